"""Tests sliding windows and layer types: every layout equals the reference, which uses a plain
mask."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.comm import collectives
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.context_parallel.attention import ContextParallel
from parallel3d.context_parallel.documents import whole_samples
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.models.attention import attend_split
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_cases
from tests.distributed.pool import Pool
from tests.distributed.simulated import SimulatedPool
from tests.distributed.simulated_runs import run_on_own_device

STYLES = ("gather", "heads", "ring")
TYPES = {
    "sliding": ("sliding",),
    "alternating": ("full", "sliding"),
    "gemma": ("sliding", "sliding", "full"),
    "nope": ("sliding", "full_nope"),
    "nope in windows": ("sliding_nope", "full"),
}


def windowed(kinds: str, window: int, **model: Any) -> Problem:
    given = {"layer_types": TYPES[kinds], "sliding_window": window, "num_query_groups": 2, **model}
    return Problem("llama_tiny", "adamw", tied=False, model=tuple(given.items()))


def styled(style: str, **more: Any) -> tuple[tuple[str, Any], ...]:
    return (("context_parallel.style", style), *more.items())


# With 2 context ranks, a piece of a sequence of 16 tokens has 4 tokens.
SHORT = windowed("alternating", 3)
LONG = windowed("gemma", 9, sliding_rotary_base=50.0)
NOPE = windowed("nope", 5)
PACKS = replace(LONG, documents=True)
DROPPED = windowed("sliding", 5, dropout=0.2)
ALONE = windowed("sliding", 1)

CASES: list[tuple[Sizes, list[Case]]] = [
    (
        (1, 1, 1),
        [
            *(Case(problem) for problem in (SHORT, LONG, NOPE, PACKS, DROPPED, ALONE)),
            Case(windowed("nope in windows", 4)),
            Case(replace(DROPPED, documents=True)),
            Case(LONG, keys=(("attention_kernel", "math"),)),
            Case(PACKS, keys=(("recompute", "full"),)),
        ],
    ),
    (
        (2, 1, 2),
        [Case(PACKS, sp=True, keys=(("recompute", "selective"),)), Case(NOPE, keys=(("zero", 3),))],
    ),
    ((1, 2, 1), [Case(PACKS, schedule="zb_h1"), Case(SHORT, keys=(("offload_layers", [1]),))]),
    (
        (1, 1, 1, 2),
        [
            *(Case(problem, keys=styled(s)) for problem in (SHORT, LONG, NOPE) for s in STYLES),
            *(Case(replace(PACKS, ranks=2), keys=styled(style)) for style in STYLES),
            Case(replace(PACKS, ranks=2), keys=styled("ring", recompute="selective")),
            Case(replace(PACKS, ranks=2), keys=styled("gather", recompute="full")),
            Case(replace(PACKS, ranks=2), keys=(("attention_kernel", "math"),)),
            Case(ALONE),
            Case(DROPPED),
            Case(DROPPED, keys=styled("heads")),
        ],
    ),
    (
        (2, 1, 1, 4),
        [
            *(Case(problem, sp=True, keys=styled("ring")) for problem in (SHORT, LONG)),
            *(Case(replace(PACKS, ranks=4), keys=styled(style)) for style in ("gather", "ring")),
        ],
    ),
    ((1, 1, 1, 3), [Case(replace(PACKS, ranks=3)), Case(LONG, keys=styled("ring"))]),
    (
        (1, 2, 1, 2),
        [
            Case(replace(PACKS, ranks=2, layers=5), schedule="interleaved_zb", keys=(("vpp", 2),)),
            Case(LONG, keys=styled("ring", recompute="full")),
        ],
    ),
]


@pytest.mark.parametrize(
    ("sizes", "cases"), CASES, ids=["-".join(map(str, sizes)) for sizes, _ in CASES]
)
def test_windows_train_like_the_reference(
    sizes: Sizes, cases: list[Case], pool: Pool, references: References
) -> None:
    check_cases(sizes, cases, pool, references)


# Blocks of several kinds are in one graph, with a halo inside it.
COMPILED: list[tuple[Sizes, list[Case]]] = [
    ((1, 1, 1), [Case(PACKS, compile=True), Case(NOPE, compile=True)]),
    (
        (1, 1, 1, 2),
        [
            Case(replace(PACKS, ranks=2), compile=True),
            Case(LONG, compile=True, keys=styled("ring", recompute="full")),
        ],
    ),
]


@pytest.mark.parametrize(("sizes", "cases"), COMPILED, ids=["one rank", "cp2"])
def test_compiled_windows_train_like_the_reference(
    sizes: Sizes, cases: list[Case], pool: Pool, references: References
) -> None:
    check_cases(sizes, cases, pool, references)


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


@pytest.mark.parametrize("sizes", SIMULATED, ids=["tp", "cp"])
def test_windows_on_a_simulated_device_need_no_wait(
    sizes: Sizes, simulated: SimulatedPool, references: References
) -> None:
    check_cases(sizes, SIMULATED[sizes], simulated, references, run=run_on_own_device)


def seconds_of_layers(tokens: int) -> tuple[float, float]:
    """Returns the smallest seconds of attention, forward and backward, of a full layer and of a
    sliding one whose window is a sixteenth of the sequence."""
    groups = ProcessGroups.create(Layout(cp=2), "cpu", timeout_s=300)
    window, ranks = tokens // 16, (2, groups.cp.index)
    split = SequenceSplit(tokens, *ranks, window=window)
    documents, cp = whole_samples(1, torch.device("cpu"), split), ContextParallel(groups.cp)
    shapes = [(1, tokens // 2, heads, 32) for heads in (8, 4, 4)]
    inputs = [torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes]
    found: list[list[float]] = [[], []]
    for _ in range(5):
        for times, seen in zip(found, (None, window), strict=True):
            collectives.all_reduce(torch.zeros(1), groups.cp)
            begun = time.perf_counter()
            attend_split(*inputs, documents, cp=cp, window=seen).sum().backward()
            times.append(time.perf_counter() - begun)
    groups.close()
    full, sliding = map(min, found)
    return full, sliding


def test_a_window_of_a_sixteenth_takes_at_most_half_the_time_of_a_full_layer(pool: Pool) -> None:
    for full, sliding in pool.run(2, seconds_of_layers, 2048):
        assert sliding <= 0.5 * full, (full, sliding)
