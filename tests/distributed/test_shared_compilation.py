"""Ranks of a host compile each graph once between them."""

from __future__ import annotations

import os
from pathlib import Path

from parallel3d.topology.layout import Layout
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer, plain_groups
from tests.distributed.pool import Pool


def compiled_and_found(cache: str) -> tuple[int, int]:
    """Graphs of a compiled step that this rank lowered, and that it found lowered."""
    from torch._dynamo.utils import counters

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    counters.clear()
    groups = plain_groups(Layout(tp=1, dp=2))
    try:
        problem = Problem("gpt_tiny", "sgd", True, layers=1)
        make_trainer(Case(problem, compile=True), groups).train_step()
    finally:
        groups.close()
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    found = counters["inductor"]
    return found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]


def test_one_of_two_ranks_compiles_and_the_other_finds_it(pool: Pool, tmp_path: Path) -> None:
    by_rank = pool.run(2, compiled_and_found, str(tmp_path))
    compiled, found = map(sum, zip(*by_rank, strict=True))
    assert (compiled, found) == (2, 2), by_rank  # a forward and a backward
    assert list(tmp_path.glob("parallel3d-*.lock"))
