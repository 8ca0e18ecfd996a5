"""Plants bugs in the states that pieces of sequences hand on: each is caught.

This continues test_mutations. Layers whose states stop at the edge of a rank's tokens, or cross a
document, were shipped by others (NVIDIA/Megatron-LM#3798, NVIDIA-NeMo/Automodel#2147).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.context_parallel.documents import Pieces
from parallel3d.models.convolution import causal_convolution
from tests.distributed.cases import Case
from tests.distributed.harness import References, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    BY_CHAIN,
    CONVOLVED_HEADS,
    DELTA_RULE,
    ORDERED_PIECES,
    RATES,
    STATE_GRADIENTS,
    STATES_BEFORE,
    TOKENS_BEFORE,
    Mutation,
    planted,
)
from tests.distributed.test_mutations import ALL_NUMBERS
from tests.distributed.test_states import PACKS, by, of_ranks

pytestmark = pytest.mark.nightly


@planted(TOKENS_BEFORE)
def a_halo_of_a_token_too_few(sound: Any, x: Tensor, few: int, *how: Any) -> Tensor:
    """The convolution does not see the first of the tokens before a piece."""
    return F.pad(sound(x, few - 1, *how), (0, 0, 1, 0))


@planted(BY_CHAIN)
def the_halo_is_taken_after_the_convolution(
    sound: Any, mixer: Any, b: Tensor, a: Tensor, convolved: Tensor, *where: Any
) -> Tensor:
    """The tokens before a piece have passed the convolution already."""
    weight = mixer.conv.weight

    def after(handed: Any, x: Tensor, *how: Any) -> Tensor:
        (found,) = causal_convolution(x, weight, None, (x.shape[-1],))
        return handed(found, *how)

    with TOKENS_BEFORE.replaced(after):
        return sound(mixer, b, a, convolved, *where)


@planted(BY_CHAIN)
def the_halo_crosses_documents(
    sound: Any, mixer: Any, b: Tensor, a: Tensor, convolved: Tensor, *where: Any
) -> Tensor:
    """The first tokens of a piece read those before it, even in another document."""
    few = mixer.conv.weight.shape[1] - 1

    def seen(heads: Any, mixer: Any, x: Tensor, places: Tensor, weight: Tensor) -> Any:
        within = torch.arange(places.shape[1])
        return heads(mixer, x, torch.where(within < few, few, places), weight)

    with CONVOLVED_HEADS.replaced(seen):
        return sound(mixer, b, a, convolved, *where)


@planted(DELTA_RULE)
def a_state_crosses_documents(sound: Any, *given: Any, **how: Any) -> Tensor:
    """A document that begins with a piece goes on with the state of the one before."""
    *inputs, begins = given[:6]
    begins = begins.clone()
    begins[:, 0] = False
    return sound(*inputs, begins, *given[6:], **how)


@planted(STATES_BEFORE)
def no_state_is_handed_on(sound: Any, move: Tensor, add: Tensor, *where: Any) -> Tensor:
    """Every piece begins with a state of zero."""
    return torch.zeros_like(sound(move, add, *where))


@planted(STATES_BEFORE)
def the_transition_of_another_piece(sound: Any, move: Tensor, *more: Any) -> Tensor:
    """A rank's pieces change their matrices M."""
    return sound(move.roll(1, 0), *more)


@planted(ORDERED_PIECES)
def pieces_in_the_order_of_ranks(_: Any, by_rank: Tensor, pieces: Pieces) -> Tensor:
    """The prefix goes over the pieces of one rank after another."""
    return by_rank.transpose(1, 2).flatten(0, 1)


@planted(STATE_GRADIENTS)
def gradients_go_through_the_transposed_matrix(sound: Any, move: Tensor, *more: Any) -> Tensor:
    """The backward multiplies by M instead of its transpose."""
    return sound(move.mT.contiguous(), *more)


@planted(STATE_GRADIENTS)
def gradients_of_states_stay(sound: Any, move: Tensor, add: Tensor, *where: Any) -> Tensor:
    """No piece gets the gradient of the state that it hands on."""
    return torch.zeros_like(sound(move, add, *where))


@planted(RATES)
def decays_of_the_first_heads(
    sound: Any, rates: Any, a: Tensor, b: Tensor, *share: Any
) -> tuple[Tensor, Tensor]:
    """Every rank of cp takes the decays of the first of its heads."""
    if not share:
        return sound(rates, a, b)
    heads = a.shape[-1]
    log, bias = (x[:heads] for x in (rates.A_log, rates.dt_bias))
    return -log.exp() * F.softplus(a + bias), b.sigmoid()


TWO = (1, 1, 1, 2)
CHAIN = Case(of_ranks(PACKS, 2), keys=by("chain"))
HEADS = Case(of_ranks(PACKS, 2), keys=by("heads"))
PLANTED = [
    pytest.param(a_halo_of_a_token_too_few, CHAIN, id="halo of 2"),
    pytest.param(the_halo_is_taken_after_the_convolution, CHAIN, id="halo after convolution"),
    pytest.param(the_halo_crosses_documents, CHAIN, id="halo over documents"),
    pytest.param(a_state_crosses_documents, CHAIN, id="state over documents"),
    pytest.param(no_state_is_handed_on, CHAIN, id="no state"),
    pytest.param(the_transition_of_another_piece, CHAIN, id="M of another piece"),
    pytest.param(pieces_in_the_order_of_ranks, CHAIN, id="local order"),
    pytest.param(gradients_go_through_the_transposed_matrix, CHAIN, id="M not transposed"),
    pytest.param(gradients_of_states_stay, CHAIN, id="no gradient"),
    pytest.param(decays_of_the_first_heads, HEADS, id="decays of other heads"),
]


@pytest.mark.parametrize(("mutation", "case"), PLANTED)
def test_a_planted_bug_of_states_is_caught(
    mutation: Mutation, case: Case, pool: Pool, references: References
) -> None:
    check_caught(mutation, TWO, case, ALL_NUMBERS, pool, references)
