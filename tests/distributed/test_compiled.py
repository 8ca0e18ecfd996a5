"""`compile=true`: compiled blocks with dropout are the reference as well, and compile once.

The linear layers inside are opaque operators whose backward fills the gradient buckets unseen by
the compiler, so weights after three steps are what tells. Compiled blocks beside every other
setting, without kernels of their own: see `matrix`.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.profiling import layers_shown
from parallel3d.device.accelerator import Ranges
from parallel3d.models import transformer
from parallel3d.topology.layout import Layout
from tests.distributed.cases import HALVED, Case, Problem
from tests.distributed.harness import (
    References,
    Sizes,
    check_cases,
    differences,
    make_trainer,
    run_cases,
)
from tests.distributed.pool import Pool
from tests.kernels import no_kernels

# A layer or two, as compiling takes seconds for each; micro-batches of the size that it compiles
# for, whose kernels are found.
DROPS = Problem("gpt_tiny", "adamw", tied=True, layers=1, model=(("dropout", 0.2),))
NORMS = Problem(
    "llama_tiny", "adamw", tied=False, layers=2, model=(("qk_norm", True), ("num_query_groups", 1))
)


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        (Case(DROPS, sp=True, compile=True, microbatches=4), nullcontext),
        # TorchInductor's own kernels of these norms: tests/unit/device/test_fused.py.
        (Case(NORMS, compile=True, microbatches=4), no_kernels),
    ],
    ids=["dropout", "norms of heads"],
)
def test_compiled_blocks_are_the_reference(
    case: Case, kernels: Any, pool: Pool, references: References
) -> None:
    by_rank = pool.run(2, run_cases, (2, 1, 1), [case], kernels, timeout_s=900)
    outcomes = [found[0] for found in by_rank]
    assert differences(outcomes, references.of(case.problem), case.problem) == {}


MLP_AGAIN = (("recompute", "[norm,attention,mlp]"), ("ddp.bucket_order", "measured"))


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        # Evaluated in fp64, for which there is a graph more.
        (
            (2, 1, 2),
            Case(
                Problem("gpt_tiny", "sgd", tied=True, layers=1, batches=HALVED),
                sp=True,
                microbatches=2,
                compile=True,
                bucket_cap_mb=0.02,
                keys=(("zero", 1), ("tensor_parallel.chunks", 2), *MLP_AGAIN),
            ),
        ),
        (
            (2, 1, 1),
            Case(
                Problem("llama_tiny", "adamw", tied=False, precision="bf16", layers=1),
                microbatches=4,
                compile=True,
            ),
        ),
    ],
    ids=["fp64", "bf16"],
)
def test_kernels_of_the_compiler_are_the_reference(
    sizes: Sizes, case: Case, pool: Pool, references: References
) -> None:
    check_cases(sizes, [case], pool, references)


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


def graphs_by_step() -> tuple[list[int], int, list[float], list[str]]:
    """How many graphs there are after each of four steps, the buckets that the last backward
    reduced before it ended, the share of each of three steps that its breakdown leaves out, and
    what a profile of the fourth calls the layers."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    groups = ProcessGroups.create(Layout(1, 1, 2), "cpu", timeout_s=300)
    case = Case(Problem("llama_tiny", "sgd", False, layers=5), compile=True, bucket_cap_mb=0.02)
    trainer = make_trainer(case, groups)
    seen, early, left_out = [], 0, []
    finish = trainer.data_parallel.finish_step

    def finish_step() -> list[str]:
        nonlocal early
        early = len(trainer.data_parallel.works)
        return finish()

    trainer.data_parallel.finish_step = finish_step
    with mock.patch.object(transformer, "GRAPH_BLOCKS", 2), no_kernels():
        for _ in range(3):
            start = time.perf_counter()
            trainer.train_step()
            seconds = time.perf_counter() - start
            seen.append(counters["stats"]["unique_graphs"])
            left_out.append(1 - sum(trainer.step_timer.last.values()) / seconds)
        ranges = Ranges(trainer.device)
        with (
            profile(activities=[ProfilerActivity.CPU]) as profiled,
            layers_shown(trainer.stages, ranges, compiled=True),
        ):
            trainer.train_step()
        seen.append(counters["stats"]["unique_graphs"])
    groups.close()
    names = {event.name for event in profiled.events() if event.name.startswith("layers")}
    return seen, early, left_out, sorted(names)


def test_nothing_compiles_after_the_first_step_and_buckets_leave_early(pool: Pool) -> None:
    """Five blocks in graphs of two, two (the same code) and one; nor where they are profiled."""
    for seen, early, left_out, names in pool.run(2, graphs_by_step):
        assert seen == [2, 2, 2, 2]
        assert names == ["layers.0-1", "layers.2-3", "layers.4"]
        assert early > 1
        assert abs(statistics.median(left_out)) < 0.01  # the breakdown adds up, as without compiler
