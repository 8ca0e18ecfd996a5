"""`compile=true`: compiled blocks with dropout are the reference as well, and compile once.

The linear layers inside are opaque operators whose backward fills the gradient buckets unseen by
the compiler, so weights after three steps are what tells. Both models compiled, with tensor,
pipeline and data parallelism and without dropout: see test_engines.
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
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, differences, make_trainer, run_cases
from tests.distributed.pool import Pool
from tests.kernels import no_kernels

# A layer or two, as compiling takes seconds for each (those of test_engines in fp64 tell two of a
# graph apart, and are evaluated, for which there is a graph more); micro-batches of the size that
# it compiles for, whose kernels are found.
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
