"""Tests the rates that `calibrate` measures, and that the other ranks wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel3d.calibrate import measure
from parallel3d.calibrate.record import RATES
from parallel3d.commands import calibrate as command
from parallel3d.commands.options import CommandConfig
from parallel3d.run.launch import Worker

CPU = torch.device("cpu")


def test_all_rates_of_a_device_are_measured() -> None:
    sizes = {"PRODUCT": (64, 64), "ADDED": (1 << 16, 1 << 16), "ATTENTION": ((1, 64), (1, 64))}
    threads = torch.get_num_threads()
    with patch.multiple(measure, **sizes):  # type: ignore[arg-type]
        found = measure.device_rates(CPU, torch.bfloat16, lambda _: None, 1)
        found |= measure.memory_of(CPU)
    assert set(found) == set(RATES) and min(found.values()) > 0
    assert 1 <= found["product_ramp"] <= 64 and torch.get_num_threads() == threads


@pytest.mark.parametrize("ramp", [4.0, 100.0])
def test_rates_of_a_product_are_those_of_endless_sums(ramp: float) -> None:
    """The seconds of a product grow with the length of its sums plus a ramp, here at 1 TFLOP/s."""

    def windows(run: object, *_: object) -> list[tuple[float, float]]:
        free = [c.cell_contents for c in run.__closure__ or ()]  # type: ignore[attr-defined]
        shapes = [v.shape for v in free if isinstance(v, torch.Tensor) and v.dim() == 2]
        length = shapes[0][1] if shapes else 1
        return [(0.0, 2e-12 * 256**2 * (length + ramp))]

    with (
        patch.multiple(measure, PRODUCT=(256, 256), ADDED=(64, 64), ATTENTION=((1, 8), (1, 8))),
        patch.object(measure, "windows", windows),
    ):
        found = measure.device_rates(CPU, torch.float32, lambda _: None, 1)
    assert found["product_tflops"] == pytest.approx(1.0)
    assert found["product_ramp"] == pytest.approx(ramp)


def test_a_time_is_the_lower_quartile_of_all_windows() -> None:
    """The result is not the minimum, because the processor may be faster than usual for a
    moment."""
    assert measure.lower_quartile([8.0, 3.0, 5.0, 1.0]) == 3.0


def test_other_ranks_wait_for_rank_0_at_the_store() -> None:
    """The other ranks do not wait in a collective, whose time-out is shorter than rank 0's work."""
    store = dist.HashStore()
    worker = Worker(1, 1, 2, 2, Path(), "local", store=store)
    with (
        patch.object(measure, "group_times", lambda *_: {}),
        ThreadPoolExecutor() as threads,
    ):
        code = threads.submit(command.calibrate, CommandConfig(device="cpu"), worker)
        with pytest.raises(TimeoutError):
            code.result(0.2)
        store.set(measure.MEASURED_KEY, "")
        assert code.result(60) == 0
