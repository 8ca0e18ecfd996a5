"""Tests that half-precision windows on a simulated device take the kernel of documents, and need no
wait; the matrix compares windows with the reference in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_cases
from tests.distributed.pool import Pool
from tests.distributed.simulated import SimulatedPool
from tests.distributed.simulated_runs import run_on_own_device

TYPES = {
    "sliding": ("sliding",),
    "alternating": ("full", "sliding"),
    "gemma": ("sliding", "sliding", "full"),
}


def windowed(kinds: str, window: int, **model: Any) -> Problem:
    given = {"layer_types": TYPES[kinds], "sliding_window": window, "num_query_groups": 2, **model}
    return Problem("llama_tiny", "adamw", tied=False, model=tuple(given.items()))


def styled(style: str, **more: Any) -> tuple[tuple[str, Any], ...]:
    return (("context_parallel.style", style), *more.items())


# With 2 context ranks, a piece of a sequence of 16 tokens has 4 tokens.
SHORT = windowed("alternating", 3)
LONG = windowed("gemma", 9, sliding_rotary_base=50.0)
PACKS = replace(LONG, documents=True)

# A token that sees itself alone: queries and keys have no gradient, which the matrix requires.
ALONE = windowed("sliding", 1)

# With heads of 8, half precision takes the varlen kernel.
HALF = replace(
    windowed("gemma", 5, num_attention_heads=4), precision="bf16", steps=2, batch=12, documents=True
)
SIMULATED: dict[Sizes, list[Case]] = {
    (2, 1, 1): [Case(HALF, sp=True, keys=(("recompute", "full"),)), Case(PACKS)],
    (1, 1, 1, 2): [
        Case(replace(HALF, ranks=2)),
        Case(replace(HALF, ranks=2), keys=styled("ring", recompute="selective")),
        Case(replace(PACKS, ranks=2)),
    ],
}


def test_a_window_of_one_token_trains_like_the_reference(
    pool: Pool, references: References
) -> None:
    check_cases((1, 1, 1, 2), [Case(ALONE)], pool, references)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", SIMULATED, ids=["tp", "cp"])
def test_windows_on_a_simulated_device_need_no_wait(
    sizes: Sizes, simulated: SimulatedPool, references: References
) -> None:
    check_cases(sizes, SIMULATED[sizes], simulated, references, run=run_on_own_device)
