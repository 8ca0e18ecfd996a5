"""`compile=true`: who compiles when, on a CPU's host and on one of accelerators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from parallel3d.models import compilation
from tests.unit.test_recompute import NOTHING, hidden, middle_stage


@pytest.mark.parametrize("on_accelerator", [False, True])
def test_a_lock_on_cpu_alone_and_the_watch_told_of_each_graph(
    on_accelerator: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The forward and the backward are told, not what runs afterwards."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if on_accelerator:
        monkeypatch.setattr(compilation, "is_on_accelerator", lambda tensor: True)
    torch._dynamo.reset()
    events: list[str] = []

    @contextmanager
    def compiling() -> Iterator[None]:
        events.append("begins")
        yield
        events.append("ends")

    stage = middle_stage("none", layers=1)
    stage.compile_blocks()
    stage.compiling = compiling
    out = stage(hidden(), *NOTHING)
    assert events == ["begins", "ends"]
    out.sum().backward()
    assert events == ["begins", "ends"] * 2
    stage(hidden(), *NOTHING).sum().backward()
    assert len(events) == 4
    assert bool(list(tmp_path.glob("parallel3d-*.lock"))) != on_accelerator
