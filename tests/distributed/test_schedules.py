"""Every pipeline schedule trains as the reference does, whatever it is combined with.

Schedule × chunks × stages is crossed in full; micro-batches, tensor parallelism, ZeRO-1 over two
replicas, sequence parallelism, recomputation, model and optimizer vary so that every two levels
meet. What is compiled has micro-batches of one size, so that it finds the kernels of another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heapreplace
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from parallel3d.schedules.schedule import V_SHAPED, make
from parallel3d.schedules.table import write_table
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import Outcome, References, check_cases
from tests.distributed.pool import Pool

KINDS = [
    ("gpipe", 1),
    ("1f1b", 1),
    *(("interleaved", chunks) for chunks in (1, 2, 4)),
    ("zb_h1", 1),
    *(("interleaved_zb", chunks) for chunks in (1, 2, 4)),
    ("zbv", 2),
    ("v_half", 2),
]
STAGES = (2, 3, 4)
SAMPLES, COMPILED_SAMPLES = 2, 6  # of a micro-batch


class Levels(NamedTuple):
    """One combination; `count` is one of four numbers of micro-batches (see `microbatches`)."""

    kind: tuple[str, int]
    pp: int
    count: int
    tp: int
    zero: int
    sp: bool
    slices: bool
    recompute: str
    model: str
    optimizer: str
    tied: bool

    @property
    def microbatches(self) -> int:
        return (1, self.pp, self.pp + 1, 3 * self.pp - 1)[self.count]

    @property
    def layout(self) -> tuple[int, int, int]:
        return self.tp, self.pp, 2 if self.zero else 1

    @property
    def again(self) -> str:
        """The whole layer, or in every other case what needs no more than its norms and inputs."""
        parts = self.recompute == "full" and self.count % 2
        return "[norm,attention,mlp]" if parts else self.recompute

    def pairs(self) -> set[tuple[Any, ...]]:
        return set(combinations(zip(self._fields, self, strict=True), 2))

    def case(self) -> Case:
        """Layers that divide unevenly; buckets of some parameters each."""
        name, chunks = self.kind
        batch = SAMPLES * self.microbatches * self.layout[2]
        # With tied tables, the first step has a single micro-batch.
        grows = self.tied and self.microbatches > 1
        batches = ((0, batch // self.microbatches), (1, batch)) if grows else ()
        problem = Problem(
            *(self.model, self.optimizer, self.tied),
            layers=self.pp * chunks + 1, steps=2, batch=batch, batches=batches,
        )  # fmt: skip
        keys = (
            *(("vpp", chunks), ("zero", self.zero), ("recompute", self.again)),
            ("schedule.slices", self.slices),
        )
        return Case(
            problem, name, self.sp, self.microbatches, bucket_cap_mb=0.02, keys=keys
        )  # fmt: skip


def combinations_of(kind: tuple[str, int], pp: int) -> Iterator[Levels]:
    rest = product(
        range(4), (1, 2), (0, 1), (False, True), (False, True), ("none", "full"),
        ("llama_tiny", "gpt_tiny"), ("sgd", "adamw"), (True, False),
    )  # fmt: skip
    for levels in (Levels(kind, pp, *other) for other in rest):
        tp, _, dp = levels.layout
        if tp * pp * dp <= 8 and levels.sp + levels.slices < tp:
            yield levels


@functools.cache
def chosen_levels() -> list[Levels]:
    """One combination at least for each kind and number of stages, then until all pairs are met."""
    possible = {place: list(combinations_of(*place)) for place in product(KINDS, STAGES)}
    every = [c for candidates in possible.values() for c in candidates]
    pairs = {c: c.pairs() for c in every}
    missing = set().union(*pairs.values())
    found = []

    def take(best: Levels) -> None:
        missing.difference_update(pairs[best])
        found.append(best)

    for candidates in possible.values():
        take(max(candidates, key=lambda c: (len(pairs[c] & missing), -prod(c.layout))))
    # The most new pairs first. What a candidate adds only shrinks, so that the first of the heap is
    # the best where it still adds what it did.
    heap = [(-len(pairs[c] & missing), prod(c.layout), i, c) for i, c in enumerate(every)]
    heapify(heap)
    while missing:
        gain, size, i, best = heap[0]
        now = -len(pairs[best] & missing)
        if now == gain:
            take(best)
        else:
            heapreplace(heap, (now, size, i, best))
    return found


# Those of the chosen: written out, so that only who runs them chooses.
LAYOUTS = [
    *((1, 2, 1), (1, 3, 1), (1, 3, 2), (1, 4, 2)),
    *((2, 2, 1), (2, 2, 2), (2, 3, 1), (2, 4, 1)),
]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_schedule_trains_as_the_reference_does(
    sizes: tuple[int, int, int], pool: Pool, references: References
) -> None:
    cases = [levels.case() for levels in chosen_levels() if levels.layout == sizes]
    check_cases(sizes, cases, pool, references)


def test_all_that_is_promised_is_among_them() -> None:
    chosen = chosen_levels()
    assert {c.layout for c in chosen} == set(LAYOUTS)
    assert {(c.kind, c.pp) for c in chosen} == set(product(KINDS, STAGES))
    for kind in KINDS:
        of_kind = [c for c in chosen if c.kind == kind]
        assert {c.count for c in of_kind} == {0, 1, 2, 3}
        for name in ("tp", "zero", "sp", "slices", "recompute", "optimizer", "tied", "model"):
            assert len({getattr(c, name) for c in of_kind}) == 2, (kind, name)
    assert len(chosen) < 60


# (schedule, chunks, layers): a block a stage, so that all graphs have the same kernels.
COMPILED = [("zb_h1", 1, 2), ("interleaved", 2, 4), ("zbv", 2, 4)]


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 2, 2)], ids=str)
def test_compiled_blocks_put_weight_gradients_off(
    sizes: tuple[int, int, int], pool: Pool, references: References
) -> None:
    """The compiler may not write again into what a weight gradient still has to read."""
    dp = sizes[2]
    cases = [
        Case(
            Problem("llama_tiny", "sgd", tied=dp == 1, layers=layers, steps=2, batch=18 * dp),
            name, microbatches=3, compile=True, bucket_cap_mb=0.02,
            keys=(("vpp", chunks), ("zero", dp - 1)),
        )
        for name, chunks, layers in (COMPILED if dp == 1 else COMPILED[-1:])
    ]  # fmt: skip
    check_cases(sizes, cases, pool, references)


def test_schedules_that_add_in_the_same_order_have_the_same_bits(
    pool: Pool, references: References, tmp_path: Path
) -> None:
    """Gradients are added by micro-batch, so what a rank does in between shows in no bit."""
    problem = Problem("gpt_tiny", "adamw", True, layers=6, steps=2, batch=10)
    own = tmp_path / "own.csv"
    own.write_text(write_table(make("interleaved_zb", 2, 5, 2)))
    alike = [
        [("gpipe", 1, None), ("1f1b", 1, None), ("zb_h1", 1, None)],
        [("interleaved", 2, None), ("interleaved_zb", 2, None), ("file", 2, str(own))],
        [("zbv", 2, None), ("v_half", 2, None)],
    ]
    cases = [
        # A V's tied table gets the head's gradients in forwards and the embedding's in backwards.
        Case(
            replace(problem, tied=name not in V_SHAPED), name, microbatches=5,
            keys=(("vpp", chunks), ("schedule.file", file)),
        )
        for group in alike
        for name, chunks, file in group
    ]  # fmt: skip
    outcomes = iter(check_cases((1, 2, 1), cases, pool, references))
    for group in alike:
        found = [next(outcomes)[0] for _ in group]
        bits = [(one.steps, one.evaluation, digests_of(one)) for one in found]
        assert bits == bits[:1] * len(bits), group


def digests_of(outcome: Outcome) -> dict[str, bytes]:
    return {name: weight.tobytes() for name, weight in outcome.final.items()}
