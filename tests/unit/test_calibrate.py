"""What `calibrate` measures, and how the other ranks wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel3d import optim
from parallel3d.commands.calibrate import measure
from parallel3d.commands.calibrate.measure import Kernels
from parallel3d.config.schema import Config
from parallel3d.run.launch import Worker
from tests.operators import Operators

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_on_an_accelerator_is_the_optimizers(name: str, dtype: torch.dtype) -> None:
    """One norm of the whole segment, and no clipping apart from the fused kernel."""
    cases = [case for case in Kernels.on(CPU, dtype).cases() if case.table == name]
    case = next(case for case in cases if case.point[0] > optim.NORM_PIECE)
    with (
        patch.object(optim, "is_accelerator", lambda device: True),
        patch.object(torch, "_foreach_norm", wraps=torch._foreach_norm) as norms,
        patch.object(torch, f"_fused_{name}_", wraps=getattr(torch, f"_fused_{name}_")) as kernel,
    ):
        run = case.make()
        with Operators() as operators:
            run()
    assert [len(call.args[0]) for call in norms.call_args_list] == [1]
    assert "_foreach_mul_" not in operators.names
    assert kernel.call_args.kwargs["grad_scale"] == pytest.approx(2.0)
    assert ("copy_" in operators.names) == (dtype == torch.bfloat16)


def test_other_ranks_wait_for_rank_0_at_the_store() -> None:
    """Not in a collective, whose time-out is shorter than rank 0's compiling and measuring."""
    store = dist.HashStore()
    worker = Worker(1, 1, 2, 2, Path(), "local", store=store)
    with (
        patch.object(measure, "collectives", lambda *_: {}),
        patch.object(measure, "slowing", lambda *_: {}),
        ThreadPoolExecutor() as threads,
    ):
        code = threads.submit(measure.calibrate, Config(device="cpu"), worker)
        with pytest.raises(TimeoutError):
            code.result(0.2)
        store.set(measure.MEASURED_KEY, "")
        assert code.result(60) == 0
