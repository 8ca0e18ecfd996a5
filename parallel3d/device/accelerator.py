"""Named ranges of what a rank does, as profilers show them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function


class Ranges:
    """Opens and closes ranges of `torch.profiler` and, on CUDA, the same ones of NVTX for nsys.

    They nest: `pop` closes the newest. The thread that opens one must close it; while autograd's
    own thread has ranges open, the thread that called the backward waits.
    """

    def __init__(self, device: torch.device) -> None:
        on_device = is_accelerator(device)
        self.nvtx = getattr(module(device), "nvtx", None) if on_device else None
        self._open: list[record_function] = []

    def push(self, name: str) -> None:
        """Opens a range."""
        opened = record_function(name)
        opened.__enter__()
        self._open.append(opened)
        if self.nvtx is not None:
            self.nvtx.range_push(name)

    def pop(self) -> None:
        """Closes the newest range that is open."""
        if self.nvtx is not None:
            self.nvtx.range_pop()
        self._open.pop().__exit__(None, None, None)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """`push` and `pop` around a block."""
        self.push(name)
        try:
            yield
        finally:
            self.pop()


# The one room that knows what kind of device a tensor is on.
#
# Everything else asks here, so that a CUDA GPU, a ROCm one, another accelerator that torch knows
# and the pretended one of the tests (`parallel3d.simulated_device`) take the same lines.
# `torch.cuda` and its siblings share their names; `module` hands out the one of a device.


HOST = ("cpu", "meta")  # types whose operations have ended when they return


def is_accelerator(device: torch.device) -> bool:
    """Whether work on `device` is queued on streams, beside the host."""
    return device.type not in HOST


def module(device: torch.device) -> Any:
    """`torch.cuda`, or the module of the same names of another accelerator."""
    return torch.get_device_module(device)


def has_values(device: torch.device) -> bool:
    """Whether tensors on `device` hold numbers: not on meta, nor anywhere in a dry run."""
    if not is_accelerator(device):
        return device.type != "meta"
    machine = getattr(module(device), "machine", None)  # the pretended device's
    return machine is None or machine.data != "meta"


def backend_of(device: torch.device) -> str:
    """The process-group backend that takes tensors on `device`: gloo, nccl, …"""
    return dist.get_default_backend_for_device(device)


def make_current(device: torch.device) -> None:
    """Makes `device` the calling thread's own; a new thread begins with device 0.

    Nothing on a CPU. Raises ValueError for a device without an index.
    """
    if is_accelerator(device):
        module(device).set_device(device)


def current(device: torch.device) -> torch.device:
    """The calling thread's device of this type, with its index; a CPU has none."""
    if not is_accelerator(device):
        return torch.device(device.type)
    return torch.device(device.type, module(device).current_device())


def synchronize(device: torch.device) -> None:
    """Returns when all work queued on `device` is done."""
    if is_accelerator(device):
        module(device).synchronize(device)


def name(device: torch.device) -> str:
    """What the vendor calls it."""
    return module(device).get_device_name(device) if is_accelerator(device) else "CPU"


def bus_id(device: torch.device) -> str | None:
    """Its PCI address as Linux writes it ("0000:1b:00.0"); None if it has none or does not say."""
    if not is_accelerator(device):
        return None
    facts = module(device).get_device_properties(device)
    try:
        domain, bus, slot = facts.pci_domain_id, facts.pci_bus_id, facts.pci_device_id
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`, without waiting for the copy.

    From pinned memory the host need not wait; torch keeps the pages until the copy is done.
    """
    if not is_accelerator(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Work queued inside goes to `stream`. The thread's device is that of the stream before."""
    with module(stream.device).stream(stream):
        yield


def is_on_accelerator(tensor: Tensor) -> bool:
    return is_accelerator(tensor.device)
