"""Engines together: every pair of their settings trains as the reference does.

Each engine alone has its own tests. Bugs live where two meet (a recomputed forward inside a piece
of an overlapped gather, FSDP's resharding under 1F1B …), so here all factors vary at once. A small
set of cases, made by a greedy search, holds every pair of levels at least once in fp64, where
nothing hides behind rounding; a second one every level beside each of the other precisions, which
meet other combinations each. Compiling takes seconds on every rank, so what is compiled has two
layers and two ranks, but for one case with tensor and data parallelism; which layout of two ranks
it has is not crossed with the other factors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import combinations, product
from typing import Any
from unittest.mock import patch

import pytest

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands import verify
from parallel3d.config.schema import Config
from parallel3d.topology.layout import Layout
from parallel3d.trainer import Trainer
from tests.distributed.cases import GLOBAL_BATCH, Case, Problem
from tests.distributed.harness import References, check_cases, plain_groups, source_of
from tests.distributed.pool import Pool
from tests.kernels import no_kernels

Levels = tuple[Any, ...]

PARTS = "[norm,attention,mlp]"
HALVED = ((0, GLOBAL_BATCH), (1, GLOBAL_BATCH // 2), (GLOBAL_BATCH + 1, GLOBAL_BATCH))
FACTORS: Mapping[str, tuple[Any, ...]] = {
    "layout": ((2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)),
    "zero": (0, 1, 2, 3),
    "sp": (False, True),
    "chunks": (1, 2),
    "recompute": ("none", "full", PARTS),
    "schedule": ("1f1b", "gpipe"),
    "compile": (False, True),
    "bucket_order": ("model", "measured"),
    "model": ("gpt_tiny", "llama_tiny"),
    "optimizer": ("sgd", "adamw", "muon"),
    "tied": (True, False),
    "precision": ("fp64", "fp32", "bf16", "fp16"),
}
NAMES = tuple(FACTORS)
COMPILE = NAMES.index("compile")
# Where what is compiled runs instead of a layout of the four; below fp64 on one of these each.
COMPILED = {(2, 2, 1): (1, 2, 1), (2, 1, 2): (2, 1, 1), (1, 2, 2): (1, 1, 2), (1, 1, 4): (1, 1, 2)}
COMPILED_LOW = {"fp32": (1, 2, 1), "bf16": (2, 1, 1), "fp16": (1, 1, 2)}
TOGETHER = [  # tensor, pipeline and data at once, and what is compiled for more than two ranks
    ((2, 2, 2), 3, True, 2, "full", "gpipe", False, "model", "llama_tiny", "adamw", True, "fp64"),
    ((2, 1, 2), 1, True, 2, PARTS, "1f1b", True, "measured", "gpt_tiny", "sgd", True, "fp64"),
]


def works_together(levels: Mapping[str, Any]) -> bool:
    """Whether a combination says something: what a layout has not, is left at its default."""
    tp, pp, dp = levels["layout"]
    return (
        (tp > 1 or not levels["sp"])
        and (levels["sp"] or levels["chunks"] == 1)
        and (pp > 1 or levels["schedule"] == "1f1b")
        and (dp > 1 or levels["zero"] == 0)
        and (levels["zero"] < 2 or levels["bucket_order"] == "model")
        and not (levels["compile"] and levels["precision"] != "fp64" and has_more_kernels(levels))
    )


def has_more_kernels(levels: Mapping[str, Any]) -> bool:
    """What is compiled in a precision of its own finds no other's kernels, a second each.

    Below fp64 only pairs with the precision count, and others hold these.
    """
    return levels["sp"] or levels["recompute"] != "none"


Pairs = frozenset[tuple[str, Any, str, Any]]


def pairs_of(levels: Levels) -> Pairs:
    """All pairs of levels of one combination; below fp64 those with the precision.

    Without the layout where it is compiled.
    """
    of = tuple(zip(NAMES, levels, strict=True))[int(levels[COMPILE]) :]
    exact = levels[-1] == "fp64"
    return frozenset((*a, *b) for a, b in combinations(of, 2) if exact or b[0] == "precision")


def every_combination() -> Iterator[Levels]:
    for levels in product(*FACTORS.values()):
        of = dict(zip(NAMES, levels, strict=True))
        if of["compile"]:
            of["layout"] = COMPILED_LOW.get(of["precision"], COMPILED[of["layout"]])
        if works_together(of):
            yield tuple(of.values())


@functools.cache
def chosen_levels() -> list[Levels]:
    """A small set of combinations that holds every pair of levels that can meet."""
    held = set().union(*map(pairs_of, TOGETHER))
    candidates = {levels: pairs_of(levels) - held for levels in every_combination()}
    missing = set().union(*candidates.values())
    chosen = list(TOGETHER)

    def likeness(levels: Levels) -> int:
        """The most levels that it has in common with one of those chosen below fp64."""
        low = [c for c in chosen if c[-1] != "fp64"]
        return max((sum(map(operator.eq, levels, c)) for c in low), default=0)

    def there(levels: Levels) -> int:
        """Of what is compiled: how many of those chosen are compiled on the same layout."""
        return levels[COMPILE] and sum(c[COMPILE] and c[0] == levels[0] for c in chosen)

    while missing:
        most = max(map(len, candidates.values()))
        # Of equals one that is not compiled, and unlike what another precision has met, or is
        # compiled elsewhere.
        equals = [levels for levels, pairs in candidates.items() if len(pairs) == most]
        best = min(
            equals,
            key=lambda c: (c[COMPILE], there(c), c[-1] != "fp64" and likeness(c)),
        )
        chosen.append(best)
        missing -= candidates[best]
        left = ((levels, pairs & missing) for levels, pairs in candidates.items())
        candidates = {levels: pairs for levels, pairs in left if pairs}
    return chosen


def case_of(levels: Levels) -> tuple[tuple[int, int, int], Case]:
    of = dict(zip(NAMES, levels, strict=True))
    keys = (
        ("zero", of["zero"]),
        ("recompute", of["recompute"]),
        ("tensor_parallel.chunks", of["chunks"]),
        ("ddp.bucket_order", of["bucket_order"]),
    )
    # Where there are stages: unequal ones, and micro-batches for which the schedules differ.
    # What is compiled has micro-batches of one size, so that it finds the kernels of another.
    tp, pp, dp = of["layout"]
    size = 3 if pp > 1 and not of["compile"] else 2
    # A block after a block is compiled in fp64, where the two of a graph are told apart best, on
    # two ranks: each lowers for itself.
    one = of["compile"] and pp == 1 and (of["precision"] != "fp64" or tp * dp > 2)
    layers = 1 if one else size
    # With tied tables, so that each other level meets them: moments in bf16, averaged weights, a
    # batch that is halved in the second step, with the first bucket order and the measured one.
    optim: dict[str, Any] = {}
    microbatches, batches = 4 // dp if of["compile"] else size, ()
    if of["tied"] and of["precision"] == "fp64":
        microbatches, batches = 2 if dp > 2 or (of["compile"] and dp > 1) else 4, HALVED
        optim = {"state": "bf16", "ema_decay": 0.6}
        if of["optimizer"] == "sgd":
            optim["momentum"] = 0.9
    elif of["tied"]:  # below fp64 the weights come back by bits
        optim = {"ema_decay": 0.6}
    elif of["precision"] == "fp64":  # with untied ones: what is frozen, rates and decays by group
        optim["freeze"] = ("head.*", "layers.0.attention.k.weight", "layers.0.mlp.up.weight")
        decays = ("layers.*", (("lr_mult", 1.2), ("wd_mult", 4.0)))
        optim["groups"] = (("*.attention.v.*", (("lr_mult", 0.3),)), decays)
    case = Case(
        Problem(
            *(of[n] for n in ("model", "optimizer", "tied", "precision")),
            layers=layers,
            optim=tuple(optim.items()),
            batches=batches,
        ),
        schedule=of["schedule"],
        sp=of["sp"],
        microbatches=microbatches,
        compile=of["compile"],
        bucket_cap_mb=0.02,
        keys=keys,
    )
    return of["layout"], case


def has_kernels(case: Case) -> bool:
    """Whether what is compiled calls TorchInductor's own kernels, of which each piece takes a
    compiler a second: in fp64 with tensor and data parallelism, and in bf16. The others, lowered
    as ever, call PyTorch's operations. (Llama's kernels in fp64: see test_schedules.)"""
    return not case.compile or case.sp or case.problem.precision == "bf16"


def all_cases() -> list[tuple[tuple[int, int, int], Case]]:
    return [case_of(levels) for levels in chosen_levels()]


LAYOUTS = sorted({*FACTORS["layout"], *COMPILED.values(), *(levels[0] for levels in TOGETHER)})


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_engines_together_train_as_the_reference_does(
    sizes: tuple[int, int, int], pool: Pool, references: References
) -> None:
    for kernels, with_them in ((nullcontext, True), (no_kernels, False)):
        cases = [c for layout, c in all_cases() if layout == sizes and has_kernels(c) == with_them]
        if cases:
            check_cases(sizes, cases, pool, references, kernels)


def test_every_pair_that_can_meet_is_there() -> None:
    chosen, cases = chosen_levels(), all_cases()
    possible = set().union(*map(pairs_of, every_combination()))
    assert set().union(*map(pairs_of, chosen)) >= possible
    assert sorted({layout for layout, _ in cases}) == LAYOUTS
    low = [levels[:-1] for levels in chosen if levels[-1] != "fp64"]
    assert len(set(low)) == len(low) >= 12  # no two precisions meet the same
    assert len(cases) < 40
    compiled = {levels[0] for levels in chosen if levels[COMPILE]}
    assert compiled == {(2, 1, 2), *COMPILED.values()}
    kernels = [(layout, c.problem.precision) for layout, c in cases if c.compile and has_kernels(c)]
    assert kernels == [((2, 1, 2), "fp64"), ((2, 1, 1), "bf16")]


def failures_of_verify(case: Case) -> list[str | None]:
    """What `parallel3d verify` finds on two ranks, each of which steps half of the parameters."""
    groups, config = plain_groups(Layout(dp=2)), case.config(Layout(dp=2))
    source = source_of(case.problem, config)

    def trainer(config: Config, groups: ProcessGroups, device: Any, _: object) -> Trainer:
        return Trainer(config, groups, device, train_source=source)

    with patch.object(verify, "Trainer", trainer):
        compared = verify.compare(config, verify.EXACT, groups, groups.device, None)  # type: ignore[arg-type]
        found = [row.failure for row in compared]
    groups.close()
    return found


def test_verify_compares_parameters_that_are_gathered(pool: Pool) -> None:
    """Under zero=1 the all-gather of a step goes on until the next forward waits for it."""
    of_bytes = (("vocab_size", 260),)
    problem = Problem("gpt_tiny", "muon", True, steps=2, layers=2, model=of_bytes)
    case = Case(problem, keys=(("zero", 1),))
    assert pool.run(2, failures_of_verify, case) == [[None, None], []]
