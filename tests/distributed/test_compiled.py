"""Tests `compile=true`: TorchInductor's own kernels train like the reference, and each graph is
compiled once.

The linear layers inside are opaque operators with effects unknown to the compiler: their backward
fills the gradient buckets, or defers the weight gradients. So only weights after several steps show
whether memory was overwritten too early. `matrix` has compiled blocks with every other setting,
without kernels of their own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from parallel3d.blueprint.layout import Layout
from parallel3d.device.accelerator import Ranges
from parallel3d.loop.profiling import layers_shown
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import (
    References,
    Sizes,
    check_cases,
    make_trainer,
    plain_groups,
)
from tests.distributed.pool import Pool
from tests.kernels import no_kernels

pytestmark = pytest.mark.nightly

# AdamW is used because without evaluation there is one graph less to compile. Positions restart
# with each document.
DOCUMENTS = Problem(
    "gpt_tiny", "adamw", True,
    model=(("position_embedding", "rope"),), layers=1, steps=2, batch=12, documents=True,
)  # fmt: skip
PUT_OFF = Problem("llama_tiny", "adamw", False, layers=4, steps=2, batch=18)


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        # Gathered and scattered in pieces, while the compiler's code continues.
        (
            (2, 1, 1),
            Case(
                DOCUMENTS,
                sp=True,
                microbatches=2,
                compile=True,
                bucket_cap_mb=0.02,
                keys=(("tensor_parallel.chunks", 2),),
            ),
        ),
        # Memory that a weight gradient still has to read must not be overwritten. With one block
        # per stage, all stages have the same kernels.
        ((1, 2, 1), Case(PUT_OFF, "zbv", microbatches=3, compile=True, keys=(("vpp", 2),))),
    ],
    ids=["documents and pieces", "weight gradients put off"],
)
def test_training_with_compiled_kernels_equals_the_reference(
    sizes: Sizes, case: Case, pool: Pool, references: References
) -> None:
    check_cases(sizes, [case], pool, references)


@dataclass
class FirstSteps:
    """The observations of one rank in the first steps of a compiled model."""

    graphs: list[int]  # number of graphs after each step
    early: int  # number of buckets that the last backward reduced before it ended
    left_out: list[float]  # share of each step except the last that the breakdown misses
    names: list[str]  # kernels of the layers in a profile of the last step
    documents: int  # number of different counts of attention calls
    lowered: int  # graphs that this rank compiled
    found: int  # graphs that another rank had compiled


@contextmanager
def own_graphs(folder: str) -> Iterator[None]:
    """Keeps graphs compiled inside, and their locks, in `folder`.

    The compiler's files for all graphs (its headers, its knowledge of the processor) stays in the
    usual cache.
    """
    from torch._inductor import codecache, cpp_builder  # noqa: F401  (they know the real folder)

    from parallel3d import private_names

    with (
        no_kernels(),
        torch.compiler.config.patch(cache_key_tag=folder),
        torch._functorch.config.patch(enable_autograd_cache=False),  # one cache for both passes
        mock.patch.object(private_names, "inductor_cache", lambda: folder),
    ):
        yield


def run_first_steps(folder: str) -> FirstSteps:
    """Runs four steps of five blocks, in graphs of two, two (with the same code) and one."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    groups = plain_groups(Layout(1, 1, 2))
    problem = Problem("llama_tiny", "sgd", False, layers=5, documents=True)
    trainer = make_trainer(Case(problem, compile=True, bucket_cap_mb=0.02), groups)
    for stage in trainer.stages:
        stage.graph_blocks = 2
    graphs, early, left_out, documents = [], 0, [], set()
    finish, load = trainer.data_parallel.finish_step, trainer.train_batches.micro_batch

    def finish_step() -> list[str]:
        nonlocal early
        early = len(trainer.data_parallel.works)
        return finish()

    def micro_batch(first: int, m: int) -> Any:
        batch = load(first, m)
        documents.add(int(batch.inputs.documents.blocks.table[0, 0, 0]))
        return batch

    trainer.data_parallel.finish_step = finish_step
    trainer.train_batches.micro_batch = micro_batch
    with own_graphs(folder):
        for _ in range(3):
            start = time.perf_counter()
            trainer.train_step()
            seconds = time.perf_counter() - start
            graphs.append(counters["stats"]["unique_graphs"])
            left_out.append(1 - sum(trainer.step_timer.last.values()) / seconds)
        ranges = Ranges(trainer.device)
        with (
            profile(activities=[ProfilerActivity.CPU]) as profiled,
            layers_shown(trainer.stages, ranges, compiled=True),
        ):
            trainer.train_step()
        graphs.append(counters["stats"]["unique_graphs"])
    groups.close()
    names = {event.name for event in profiled.events() if event.name.startswith("layers")}
    lowered, found = (counters["inductor"][f"fxgraph_cache_{how}"] for how in ("miss", "hit"))
    return FirstSteps(graphs, early, left_out, sorted(names), len(documents), lowered, found)


@pytest.fixture(scope="module")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns where the ranks' locks are."""
    return tmp_path_factory.mktemp("locks")


@pytest.fixture(scope="module")
def first_steps(pool: Pool, locks: Path) -> list[FirstSteps]:
    """Returns the observations of two ranks."""
    return pool.run(2, run_first_steps, str(locks), timeout_s=900)


def test_nothing_compiles_after_the_first_step(first_steps: list[FirstSteps]) -> None:
    """Other documents, and profiled layers, do not trigger a compilation."""
    for seen in first_steps:
        assert seen.documents > 2, "the micro-batches have equally many documents"
        assert seen.graphs == [2, 2, 2, 2]
        assert seen.names == ["layers.0-1", "layers.2-3", "layers.4"]


def test_compiled_steps_reduce_buckets_early_and_the_breakdown_adds_up(
    first_steps: list[FirstSteps],
) -> None:
    """Profiled layers have the same ranges as without a compiler."""
    for seen in first_steps:
        assert seen.early > 1
        assert abs(statistics.median(seen.left_out)) < 0.01


def test_ranks_of_a_host_share_each_compiled_graph(
    first_steps: list[FirstSteps], locks: Path
) -> None:
    by_rank = [(seen.lowered, seen.found) for seen in first_steps]
    lowered, found = map(sum, zip(*by_rank, strict=True))
    assert (lowered, found) == (4, 4), by_rank  # two forwards and two backwards
    assert list(locks.glob("parallel3d-*.lock"))
