"""Tests `compile=true`: which rank compiles when, on a CPU host and on one with accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel3d import private_names
from parallel3d.models import recompute
from parallel3d.models.transformer import compile_blocks
from tests.kernels import no_kernels
from tests.unit.models.test_recompute import NOTHING, hidden, middle_stage


@pytest.mark.slow
@pytest.mark.parametrize("on_accelerator", [False, True])
def test_ranks_take_turns_to_compile_on_a_cpu_only(
    on_accelerator: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Puts the locks in `tmp_path`; the compiler itself keeps its cache, and so its headers."""
    from torch._inductor import codecache, cpp_builder  # noqa: F401  (they know the real folder)

    monkeypatch.setattr(private_names, "inductor_cache", lambda: str(tmp_path))
    if on_accelerator:
        monkeypatch.setattr(recompute, "is_on_accelerator", lambda tensor: True)
    torch._dynamo.reset()
    stage = middle_stage("none", layers=1)
    compile_blocks([stage], saves_operands=False)
    # A graph that another test has compiled would be taken from there.
    with no_kernels(), torch._functorch.config.patch(enable_autograd_cache=False):
        stage(hidden(), *NOTHING).sum().backward()
    assert bool(list(tmp_path.glob("parallel3d-*.lock"))) != on_accelerator
