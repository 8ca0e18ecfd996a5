"""Hides the kind of device from all other modules, and marks ranges for profilers.

CUDA and ROCm GPUs, other accelerators that torch knows and the simulated one
(`parallel3d.simulated_device`) share this code: their modules (`torch.cuda`, …) have the same API.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

HOST = ("cpu", "meta")  # device types whose operations are complete when their calls return


def is_accelerator(device: torch.device) -> bool:
    """Returns whether work on `device` is queued on streams, asynchronously to the host."""
    return device.type not in HOST


def module(device: torch.device) -> Any:
    """Returns `torch.cuda`, or the corresponding module of another type of accelerator."""
    return torch.get_device_module(device)


def has_values(device: torch.device) -> bool:
    """Returns whether tensors on `device` hold values; on meta and in a dry run they do not."""
    if not is_accelerator(device):
        return device.type != "meta"
    machine = getattr(module(device), "machine", None)  # only the simulated device has one
    return machine is None or machine.data != "meta"


def backend_of(device: torch.device) -> str:
    """Returns the name of the process-group backend for tensors on `device`, such as nccl."""
    return dist.get_default_backend_for_device(device)


def backends_of_world() -> dict[str, str]:
    """Returns the backend of the world's process group by device type, such as {"cuda": "nccl"}."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    return {kind: backend for kind, _, backend in pairs}


def device_of_world() -> torch.device:
    """Returns the thread's current accelerator if the world has its backend, else the CPU."""
    if not dist.is_initialized() or (kind := accelerator_of_world()) is None:
        return torch.device("cpu")
    return current(kind)


def accelerator_of_world() -> torch.device | None:
    """Returns the type of this process's accelerator if the world has its backend, else None."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or backends_of_world().get(kind.type) != backend_of(kind):
        return None
    return kind


def device_of_words() -> torch.device:
    """Returns the device for exchanging small values over the world, the CPU if possible."""
    if not dist.is_initialized() or "cpu" in backends_of_world():
        return torch.device("cpu")
    return device_of_world()


def make_current(device: torch.device) -> None:
    """Makes `device` the thread's current one. Raises ValueError for a GPU without an index."""
    if is_accelerator(device):
        module(device).set_device(device)


def current(device: torch.device) -> torch.device:
    """Returns the calling thread's current device of the same type, with its index."""
    if not is_accelerator(device):
        return torch.device(device.type)
    return torch.device(device.type, module(device).current_device())


def synchronize(device: torch.device) -> None:
    if is_accelerator(device):
        module(device).synchronize(device)


def name(device: torch.device) -> str:
    return module(device).get_device_name(device) if is_accelerator(device) else "CPU"


def bus_id(device: torch.device) -> str | None:
    """Returns the PCI address as Linux writes it ("0000:1b:00.0"); None if it is unknown."""
    if not is_accelerator(device):
        return None
    facts = module(device).get_device_properties(device)
    try:
        domain = facts.pci_domain_id
        bus = facts.pci_bus_id
        slot = facts.pci_device_id
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a CPU tensor on `device`; an accelerator copies it asynchronously."""
    if not is_accelerator(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Reading:
    """Copies numbers from a device to the host asynchronously.

    Args:
        numbers: a tensor of any shape on the device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event = None
        self._numbers = numbers
        if is_accelerator(numbers.device):
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers = pinned.copy_(numbers, non_blocking=True)
            self._event = module(numbers.device).Event()
            self._event.record()

    def values(self) -> list[Any]:
        """Waits for the copy, but not for work queued after it, and returns the numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Queues the device work of a block on `stream`."""
    with module(stream.device).stream(stream):
        yield


def is_on_accelerator(tensor: Tensor) -> bool:
    return is_accelerator(tensor.device)


class Ranges:
    """Opens and closes named ranges of `torch.profiler` and, on CUDA, of NVTX for nsys.

    Ranges nest: `pop` closes the range that was opened last. The thread that opens a range must
    close it. Autograd's own thread may open ranges, because the thread that called the backward
    waits meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        on_device = is_accelerator(device)
        self.nvtx = getattr(module(device), "nvtx", None) if on_device else None
        self._open: list[record_function] = []

    def push(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._open.append(opened)
        if self.nvtx is not None:
            self.nvtx.range_push(name)

    def pop(self) -> None:
        if self.nvtx is not None:
            self.nvtx.range_pop()
        self._open.pop().__exit__(None, None, None)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        self.push(name)
        try:
            yield
        finally:
            self.pop()
