"""Ranks of a host compile each graph once between them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from parallel3d.topology.layout import Layout
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer, plain_groups
from tests.distributed.pool import Pool
from tests.kernels import no_kernels


def compiled_and_found(folder: str) -> tuple[int, int]:
    """Graphs of a compiled step that this rank lowered, and that it found lowered.

    The graphs are this test's own, named by `folder`, where their locks are too. What the compiler
    keeps for all graphs (its headers, what it knows of the processor) is the cache's as ever.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import codecache, cpp_builder  # noqa: F401  (they know the real folder)

    from parallel3d import private_names

    counters.clear()
    groups = plain_groups(Layout(tp=1, dp=2))
    try:
        with (
            no_kernels(),
            torch.compiler.config.patch(cache_key_tag=folder),
            mock.patch.object(private_names, "inductor_cache", lambda: folder),
        ):
            problem = Problem("gpt_tiny", "sgd", True, layers=1)
            make_trainer(Case(problem, compile=True), groups).train_step()
    finally:
        groups.close()
    found = counters["inductor"]
    return found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]


def test_one_of_two_ranks_compiles_and_the_other_finds_it(pool: Pool, tmp_path: Path) -> None:
    by_rank = pool.run(2, compiled_and_found, str(tmp_path))
    compiled, found = map(sum, zip(*by_rank, strict=True))
    assert (compiled, found) == (2, 2), by_rank  # a forward and a backward
    assert list(tmp_path.glob("parallel3d-*.lock"))
