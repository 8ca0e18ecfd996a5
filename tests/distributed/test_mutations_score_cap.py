"""Plants known bugs of capped scores of attention: each is caught, by exactly the named quantities.

This continues test_mutations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from parallel3d.models.key_value_cache import KeyValueCache
from tests.distributed.cases import Case
from tests.distributed.harness import References, Sizes, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    ACROSS_RANKS,
    CACHED_STEP,
    DROPPED_ATTENTION,
    LOGITS,
    PLAIN_SCORES,
    SLOPE_OF_LOGITS,
    WINDOW_ATTENTION,
    Mutation,
    planted,
)
from tests.distributed.test_mutations import ALL_NUMBERS, ONE_HEAD
from tests.distributed.test_mutations_sinks import styled
from tests.unit.commands import test_generate

pytestmark = pytest.mark.nightly

CAP = 0.5


@planted(PLAIN_SCORES)
def capped_after_the_mask(sound: Any, *given: Any) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The score of a hidden key is −c in place of −∞."""
    for rows, queries, scores in sound(*given):
        yield rows, queries, scores.clamp(min=-CAP)


@planted(LOGITS)
def scaled_after_the_cap(sound: Any, products: Tensor, scale: float, cap: float | None) -> Tensor:
    return sound(products, 1.0, cap) * scale


@planted(SLOPE_OF_LOGITS)
def the_slope_reads_unscaled_scores(
    sound: Any, z: Tensor, scale: float, cap: float | None
) -> Tensor:
    return sound(z / scale, scale, cap)


@planted(SLOPE_OF_LOGITS)
def the_cap_has_no_slope(sound: Any, z: Tensor, scale: float, cap: float | None) -> float:
    return sound(z, scale, None)


@planted(WINDOW_ATTENTION)
def no_cap_in_windows(sound: Any, *given: Any) -> Tensor:
    return sound(*given[:-1], None)


@planted(ACROSS_RANKS)
def no_cap_in_rings(sound: Any, *given: Any) -> Tensor:
    return sound(*given[:-1], None)


@planted(DROPPED_ATTENTION)
def no_cap_with_dropout(sound: Any, *given: Any) -> Tensor:
    return sound(*given[:-1], None)


@planted(CACHED_STEP)
def no_cap_in_decoding(
    sound: Any, cache: KeyValueCache, x: Tensor, first: int, *more: Any
) -> Tensor:
    """The tokens after the prompt attend without a cap."""
    attention = cache.attention
    options = attention.options
    if first > 0:
        attention.options = replace(options, cap=None)
    found = sound(cache, x, first, *more)
    attention.options = options
    return found


ONE, TWO = (1, 1, 1), (1, 1, 1, 2)
MODEL = (("num_query_groups", 4), ("attention_logit_cap", CAP))
FULL = Case(replace(ONE_HEAD, model=MODEL))
OVER_CP = styled(replace(FULL, problem=replace(FULL.problem, ranks=2)), "ring")
WINDOWS = (*MODEL, ("layer_types", ("full", "sliding")), ("sliding_window", 5))
SLIDING = replace(FULL, problem=replace(FULL.problem, model=WINDOWS))
DROPPING = replace(FULL, problem=replace(FULL.problem, model=(*MODEL, ("dropout", 0.2))))
PLANTED = [
    pytest.param(capped_after_the_mask, ONE, FULL, ALL_NUMBERS, id="after-mask"),
    pytest.param(scaled_after_the_cap, ONE, FULL, ALL_NUMBERS, id="scale-after-cap"),
    pytest.param(the_slope_reads_unscaled_scores, ONE, FULL, ALL_NUMBERS, id="unscaled-slope"),
    pytest.param(the_cap_has_no_slope, ONE, FULL, ALL_NUMBERS, id="no-slope"),
    pytest.param(no_cap_in_windows, ONE, SLIDING, ALL_NUMBERS, id="window"),
    pytest.param(no_cap_in_rings, TWO, OVER_CP, ALL_NUMBERS, id="ring"),
    pytest.param(no_cap_with_dropout, ONE, DROPPING, ALL_NUMBERS, id="dropout"),
]


@pytest.mark.parametrize(("mutation", "sizes", "case", "told_by"), PLANTED)
def test_a_planted_bug_of_capped_scores_is_caught(
    mutation: Mutation,
    sizes: Sizes,
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, told_by, pool, references)


def test_tokens_decoded_without_a_cap_are_caught() -> None:
    check = test_generate.test_cached_logits_are_those_of_the_whole_sequence_in_view
    with no_cap_in_decoding(), pytest.raises(AssertionError, match="not close"):
        check(test_generate.GEMMA, 5)
