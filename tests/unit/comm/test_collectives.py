"""Tests the calls of bucket collectives to an accelerator's backend, by recording them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from tests.operators import Operators

GROUP = Group("dp", (0, 1, 2, 3), 2, "handle")
NAMES = [("all_gather_single", "reduce_scatter_single")]
NAMES.append(("all_gather_into_tensor", "reduce_scatter_tensor"))  # names before torch 2.13


@pytest.fixture(params=NAMES, ids=["now", "before"])
def backend(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """Records (operation, output, input) of every call of the backend; all tensors are an
    accelerator's."""
    calls: list[tuple[str, Tensor, Tensor]] = []

    def recorded(name: str) -> Any:
        def call(out: Tensor, tensor: Tensor, group: Any, async_op: bool) -> SimpleNamespace:
            assert (group, async_op) == ("handle", True)
            calls.append((name, out, tensor))
            return SimpleNamespace(wait=lambda: None)

        return call

    with ExitStack() as patches:
        for name in NAMES[0]:
            if request.param != NAMES[0] and hasattr(dist, name):
                patches.enter_context(patch.object(dist, name))
                delattr(dist, name)
        for kind, name in zip(("all_gather", "reduce_scatter"), request.param, strict=True):
            patched = patch.object(dist, name, recorded(kind), create=True)
            patches.enter_context(patched)
        yield calls


def test_buckets_are_gathered_and_scattered_in_place(
    backend: list[tuple[str, Tensor, Tensor]],
) -> None:
    bucket = torch.arange(64.0)
    with Operators() as ran:
        collectives.reduce_scatter_bucket(bucket, GROUP).wait()
        collectives.all_gather_bucket(bucket, GROUP).wait()
    (scatter, mine, whole), (gather, every, given) = backend
    assert (scatter, gather) == ("reduce_scatter", "all_gather")
    assert whole is bucket and every is bucket
    for own in (mine, given):  # at the place that NCCL needs: rank · count elements after the first
        assert own.data_ptr() == bucket.data_ptr() + 4 * 2 * 16 and own.numel() == 16
    assert set(ran.names) <= {"split", "detach", "alias"}, "nothing is copied or allocated"


def test_a_given_output_goes_to_the_backend(backend: list[tuple[str, Tensor, Tensor]]) -> None:
    tensor, out = torch.zeros(64), torch.zeros(16)
    with Operators() as ran:
        collectives.reduce_scatter_into(out, tensor, GROUP).wait()
    ((name, written, read),) = backend
    assert name == "reduce_scatter" and written is out and read is tensor
    assert ran.names == []


def test_a_scatter_into_an_output_is_logged_like_any_other(
    backend: list[tuple[str, Tensor, Tensor]],
) -> None:
    noted: list[str] = []

    class Log:
        waiting, progress = None, 0

        def start(self, group: Group, name: str, tensor: Tensor, peer: None) -> str:
            noted.append(name)
            return name

    group = Group("dp", (0, 1, 2, 3), 2, "handle", log=Log())
    collectives.reduce_scatter_into(torch.zeros(16), torch.zeros(64), group).wait()
    assert noted == ["reduce_scatter"]
