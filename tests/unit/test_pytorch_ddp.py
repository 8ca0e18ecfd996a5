"""Tests tests/tools/pytorch_ddp.py: its changes to torch's file, and its verdicts on runs."""

from __future__ import annotations

import ast
import time
import types
import unittest

import pytest
import torch.distributed as dist

import parallel3d
from tests.tools.pytorch_ddp import Run, names_in, read

pytestmark = pytest.mark.more


def test_the_file_for_a_cpu_has_no_cuda_calls_left() -> None:
    text = read()
    ast.parse(text)
    assert ".cuda(" not in text
    assert "torch.cuda.set_device" not in text
    names = names_in(text)
    assert len(names) > 90
    assert {"test_DistributedDataParallelCPU", "test_ddp_buffer_hook_allreduce"} <= set(names)
    assert "test_all_reduce_sum" not in names


class Cases:
    """Stands in for the class of torch's tests."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _barrier(self) -> None:
        dist.barrier()

    def test_pass(self) -> None:
        assert dist.get_world_size() == 2

    def test_ours(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        if DistributedDataParallel is not parallel3d.DistributedDataParallel:
            raise TypeError(DistributedDataParallel.__module__)

    def test_fail(self) -> None:
        if self.rank:
            raise ValueError("as planned")
        time.sleep(60)

    def test_skip(self) -> None:
        raise unittest.SkipTest("not here")

    def test_hang(self) -> None:
        time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ours", "limit_s", "wanted"),
    [
        ("test_pass", False, 60, ("pass", "")),
        ("test_ours", True, 60, ("pass", "")),
        ("test_ours", False, 60, ("fail", "TypeError: torch.nn.parallel.distributed")),
        ("test_fail", False, 60, ("fail", "ValueError: as planned")),
        ("test_skip", False, 60, ("skip", "")),
        ("test_hang", False, 0.1, ("time", "")),
    ],
)
def test_a_run_is_judged_by_its_ranks(
    name: str, ours: bool, limit_s: float, wanted: tuple[str, str]
) -> None:
    run = Run(name, ours)
    run.start(types.SimpleNamespace(Barrier=types.SimpleNamespace()), Cases)
    while not run.ended(limit_s):
        time.sleep(0.05)
    assert run.verdict() == wanted
