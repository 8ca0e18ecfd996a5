"""Plants known bugs of attention sinks: each is caught, by exactly the named quantities.

This continues test_mutations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.context_parallel.attention import ContextParallel
from parallel3d.models.key_value_cache import KeyValueCache
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ShardSpec
from tests.distributed.cases import Case
from tests.distributed.harness import References, Sizes, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    ATTENTION,
    CACHED_STEP,
    DROPPED_ATTENTION,
    FIRST_HEAD,
    INITIAL_VALUES,
    JOINED_SINKS,
    SINK_GRADIENTS,
    WINDOW_ATTENTION,
    Mutation,
    planted,
)
from tests.distributed.test_mutations import ALL_NUMBERS, ONE_HEAD
from tests.unit.commands import test_generate

pytestmark = pytest.mark.nightly


@planted(JOINED_SINKS)
def a_sink_for_each_part_of_a_ring(
    sound: Any, out: Tensor, sums: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """The sinks join the keys of each of two ranks, and so count twice."""
    return sound(*sound(out, sums, sinks), sinks)


def without(sinks: Tensor) -> Tensor:
    """Returns sinks that change no result; they get a gradient of 0."""
    return sinks * 0.0 - torch.inf


@planted(WINDOW_ATTENTION)
def no_sinks_in_windows(sound: Any, *given: Any) -> Tensor:
    *most, sinks, cap = given
    return sound(*most, without(sinks), cap)


@planted(DROPPED_ATTENTION)
def no_sinks_with_dropout(sound: Any, *given: Any) -> Tensor:
    *most, sinks, cap = given
    return sound(*most, without(sinks), cap)


@planted(DROPPED_ATTENTION)
def sinks_are_dropped(sound: Any, *given: Any) -> Tensor:
    """The probability of a sink is divided by 1 − p, as that of a key that is kept."""
    *most, sinks, cap = given
    return sound(*most, sinks - torch.log(torch.tensor(0.8)), cap)


class WithoutSinks:
    def __init__(self, attention: Any) -> None:
        self.attention = attention

    def __getattr__(self, name: str) -> Any:
        return None if name == "sinks" else getattr(self.attention, name)


@planted(CACHED_STEP)
def no_sinks_in_decoding(
    sound: Any, cache: KeyValueCache, x: Tensor, first: int, *more: Any
) -> Tensor:
    """The tokens after the prompt attend without sinks."""
    attention = cache.attention
    if first > 0:
        cache.attention = WithoutSinks(attention)
    found = sound(cache, x, first, *more)
    cache.attention = attention
    return found


@planted(SINK_GRADIENTS)
def gradients_of_sinks_have_the_other_sign(sound: Any, *given: Tensor) -> Tensor:
    return -sound(*given)


@planted(SINK_GRADIENTS)
def gradients_of_sinks_read_the_sums_without_them(
    sound: Any, grad: Tensor, out: Tensor, sums: Tensor, sinks: Tensor
) -> Tensor:
    """dσ is that of exp(σ − L) in place of exp(σ − L')."""
    before = torch.log(sums.exp() - sinks.view(-1, 1).exp())
    return sound(grad, out, before, sinks)


@planted(JOINED_SINKS)
def the_backward_reads_the_sums_without_sinks(
    sound: Any, out: Tensor, sums: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """The probabilities that the backward computes again sum to 1."""
    before = sums.clone()
    return sound(out, sums, sinks)[0], before


@planted(ATTENTION)
def a_sink_for_each_key_value_head(sound: Any, *given: Any) -> Tensor:
    """The query heads that share a key-value head share the sink of its number."""
    *most, sinks = given
    kv_heads = given[1].shape[1]
    return sound(*most, sinks[:kv_heads].repeat_interleave(len(sinks) // kv_heads))


@planted(FIRST_HEAD)
def sinks_are_sliced_by_key_value_heads(sound: Any, cp: ContextParallel, heads: int) -> int:
    """A rank counts its first sink in key-value heads, of which there are half as many."""
    return sound(cp, heads) // 2


@planted(INITIAL_VALUES)
def sinks_begin_as_none(
    sound: Any, initializer: Initializer, shard: ShardSpec, out: Tensor
) -> None:
    """Sinks begin at −∞, from which they never move."""
    sound(initializer, shard, out)
    if shard.name.endswith(".sinks"):
        out.fill_(-torch.inf)


def styled(case: Case, style: str) -> Case:
    return replace(case, keys=(*case.keys, ("context_parallel.style", style)))


ONE, TWO, OVER_TP = (1, 1, 1), (1, 1, 1, 2), (2, 1, 1)
MODEL = (("num_attention_heads", 8), ("num_query_groups", 4), ("attention_sinks", True))
FULL = Case(replace(ONE_HEAD, model=MODEL))
OVER_CP = replace(FULL, problem=replace(FULL.problem, ranks=2))
WINDOWS = (*MODEL, ("layer_types", ("full", "sliding")), ("sliding_window", 5))
SLIDING = replace(FULL, problem=replace(FULL.problem, model=WINDOWS))
DROPPING = replace(FULL, problem=replace(FULL.problem, model=(*MODEL, ("dropout", 0.2))))
PLANTED = [
    pytest.param(
        a_sink_for_each_part_of_a_ring, TWO, styled(OVER_CP, "ring"), ALL_NUMBERS, id="per-part"
    ),
    pytest.param(no_sinks_in_windows, ONE, SLIDING, ALL_NUMBERS, id="window"),
    pytest.param(no_sinks_with_dropout, ONE, DROPPING, ALL_NUMBERS, id="dropout"),
    pytest.param(sinks_are_dropped, ONE, DROPPING, ALL_NUMBERS, id="dropped"),
    pytest.param(gradients_of_sinks_have_the_other_sign, ONE, FULL, ALL_NUMBERS, id="sign"),
    pytest.param(
        gradients_of_sinks_read_the_sums_without_them, ONE, FULL, ALL_NUMBERS, id="sums-in-dsink"
    ),
    pytest.param(the_backward_reads_the_sums_without_sinks, ONE, FULL, ALL_NUMBERS, id="sums"),
    pytest.param(a_sink_for_each_key_value_head, OVER_TP, FULL, ALL_NUMBERS, id="kv-heads"),
    pytest.param(
        sinks_are_sliced_by_key_value_heads,
        TWO,
        styled(OVER_CP, "heads"),
        ALL_NUMBERS,
        id="kv-heads-of-cp",
    ),
    pytest.param(
        sinks_begin_as_none, ONE, FULL, ALL_NUMBERS | {"initial weights"}, id="minus-infinity"
    ),
]


@pytest.mark.parametrize(("mutation", "sizes", "case", "told_by"), PLANTED)
def test_a_planted_bug_of_sinks_is_caught(
    mutation: Mutation,
    sizes: Sizes,
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, told_by, pool, references)


def test_tokens_decoded_without_sinks_are_caught() -> None:
    check = test_generate.test_cached_logits_are_those_of_the_whole_sequence_in_view
    with no_sinks_in_decoding(), pytest.raises(AssertionError, match="not close"):
        check(test_generate.SINKS, 5)
