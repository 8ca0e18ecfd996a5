"""Plants known bugs of sliding windows: each is caught, by exactly the named quantities.

This continues test_mutations. Windows off by one and inverted patterns of layers were shipped by
others (huggingface/transformers#39408, NVIDIA-NeMo/Megatron-Bridge#4875).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.distributed.cases import Case
from tests.distributed.harness import References, Sizes, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    HALO_GRADIENTS,
    KIND_OF_LAYER,
    ROWS_RECEIVED,
    WINDOWS,
    Mutation,
    planted,
)
from tests.distributed.test_mutations import ALL_NUMBERS
from tests.distributed.test_windows import LONG as LONG_ADAMW
from tests.distributed.test_windows import PACKS as PACKS_ADAMW
from tests.distributed.test_windows import SHORT as SHORT_ADAMW
from tests.distributed.test_windows import styled

pytestmark = pytest.mark.more


@planted(WINDOWS)
def a_key_too_many(sound: Any, held: Any, starts: Any, index: int, window: int, *on: Any) -> Any:
    """A query sees W keys before its own key."""
    return sound(held, starts, index, window + 1, *on)


@planted(WINDOWS)
def a_key_too_few(sound: Any, held: Any, starts: Any, index: int, window: int, *on: Any) -> Any:
    """A query sees only W − 1 keys, its own included."""
    return sound(held, starts, index, window - 1, *on)


@planted(WINDOWS)
def windows_reach_over_documents(sound: Any, held: Any, starts: np.ndarray, *more: Any) -> Any:
    """A window begins W − 1 keys before its query, even in an earlier document."""
    return sound(held, np.zeros_like(starts), *more)


@planted(KIND_OF_LAYER)
def the_pattern_is_shifted(sound: Any, model: Any, layer: int) -> Any:
    """Each layer has the type of the next one."""
    return sound(model, layer + 1)


@planted(ROWS_RECEIVED)
def a_halo_lacks_its_first_key(sound: Any, *given: Any) -> Tensor:
    """The first of the keys of another rank is not sent."""
    found = sound(*given)
    found[:1] = 0
    return found


@planted(HALO_GRADIENTS)
def gradients_of_the_halo_are_lost(
    _: Any, exchange: Any, of_k: Tensor, of_v: Tensor
) -> tuple[Tensor, Tensor]:
    """The owner of keys does not get the gradients from other ranks' queries."""
    own = exchange.places[: len(of_k) - sum(exchange.taken)]
    return of_k[own], of_v[own]


ONE, TWO = (1, 1, 1), (1, 1, 1, 2)
# Cases with SGD evaluate, too.
SHORT, LONG, PACKS = (
    replace(problem, optimizer="sgd") for problem in (SHORT_ADAMW, LONG_ADAMW, PACKS_ADAMW)
)
OVER_TWO = replace(PACKS, ranks=2)
PLANTED = [
    pytest.param(a_key_too_many, ONE, Case(SHORT), ALL_NUMBERS, id="w+1"),
    pytest.param(a_key_too_few, ONE, Case(SHORT), ALL_NUMBERS, id="w-1"),
    pytest.param(a_key_too_many, TWO, Case(LONG, keys=styled("ring")), ALL_NUMBERS, id="cp-w+1"),
    pytest.param(windows_reach_over_documents, ONE, Case(PACKS), ALL_NUMBERS, id="documents"),
    pytest.param(windows_reach_over_documents, TWO, Case(OVER_TWO), ALL_NUMBERS, id="cp-documents"),
    pytest.param(the_pattern_is_shifted, ONE, Case(SHORT), ALL_NUMBERS, id="pattern"),
    pytest.param(a_halo_lacks_its_first_key, TWO, Case(SHORT), ALL_NUMBERS, id="halo-short"),
    pytest.param(gradients_of_the_halo_are_lost, TWO, Case(OVER_TWO), ALL_NUMBERS, id="halo-dk"),
]


@pytest.mark.parametrize(("mutation", "sizes", "case", "told_by"), PLANTED)
def test_a_planted_bug_of_windows_is_caught(
    mutation: Mutation,
    sizes: Sizes,
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, told_by, pool, references)
