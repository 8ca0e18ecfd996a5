"""Runs a selection of PyTorch's own tests of DistributedDataParallel, with our class instead.

`python -m tests.tools.pytorch_ddp` runs all of them; docs/ddp.md lists those with other
expectations.
"""

from __future__ import annotations

import os
import time
import types
import unittest
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from tests.tools.pytorch_ddp import Run, load, read

pytestmark = pytest.mark.more

CHOSEN = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_broadcast_buffer",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_create_graph",
    "test_ddp_device_mesh_initialization",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_ignore_params_arg",
    "test_ddp_join_model_equivalence",
)


@pytest.fixture(scope="module")
def theirs() -> Iterator[tuple[types.ModuleType, type[unittest.TestCase]]]:
    with patch.dict(os.environ):  # a launcher's variables are set for torch's tests
        yield load(read())


@pytest.mark.parametrize("name", CHOSEN)
def test_pytorchs_own_test_passes(
    name: str, theirs: tuple[types.ModuleType, type[unittest.TestCase]]
) -> None:
    run = Run(name, ours=True)
    run.start(*theirs)
    while not run.ended(limit_s=300):
        time.sleep(0.05)
    assert run.verdict() == ("pass", "")
