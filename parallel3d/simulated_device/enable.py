"""Registers the simulated device with PyTorch, once per process."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from parallel3d.private_names import setup_python_backend
from parallel3d.simulated_device import attention, nccl
from parallel3d.simulated_device.device import TYPE, SimulatedModule, this_machine
from parallel3d.simulated_device.machine import DEVICES, SimulatedMachine
from parallel3d.simulated_device.repeated_calls import RepeatedCalls
from parallel3d.simulated_device.tensor import SPECIAL, dispatch, is_pinned

FACTORIES = ("arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m")


def enable(data: str = "cpu", checks_races: bool = True) -> SimulatedMachine:
    """Registers the simulated devices in this process, unless they are registered already.

    It must be called before the first backward pass: autograd counts the devices when it first
    runs. It returns the machine that simulates them.

    Args:
        data: "cpu", or "meta" for tensors without values.
        checks_races: whether data races raise an error; False saves time.
    """
    if hasattr(torch, TYPE):
        return this_machine()
    machine = SimulatedMachine(data, checks_races)
    machine.special |= SPECIAL | nccl.functional() | attention.flash()
    module = SimulatedModule(machine)
    module.run_again = RepeatedCalls(machine).run
    setup_python_backend(TYPE, backend_module=module)
    torch.accelerator.device_count = lambda: DEVICES  # C++ counts only one device
    torch.accelerator.current_stream = module.current_stream  # type: ignore[assignment]
    library = torch.library.Library("_", "IMPL")
    library.fallback(dispatch, "PrivateUse1")
    machine.libraries = [library, _whole_factories(), attention.register()]
    _make_tensors_by_a_copy()
    _give_pinned_memory()
    _follow_resized_storages()
    nccl.register()
    return machine


def _whole_factories() -> torch.library.Library:
    """Implements the factory functions that in PyTorch resize an empty tensor."""
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, functools.partial(dispatch, operator), "PrivateUse1")
    return library


def _make_tensors_by_a_copy() -> None:
    """Replaces `torch.tensor`, whose copy to the device would bypass the Python dispatcher."""
    plain = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != TYPE:
            return plain(data, device=device, **kwargs)
        needs_gradient = kwargs.pop("requires_grad", False)
        return plain(data, **kwargs).to(device).requires_grad_(needs_gradient)

    torch.tensor = tensor  # type: ignore[assignment]


def _give_pinned_memory() -> None:
    """Makes PyTorch mark storages as pinned: the device has no C++ allocator of pinned memory."""
    plain = {name: getattr(torch, name) for name in ("empty", "zeros")}

    def with_pinned(name: str) -> Any:
        @functools.wraps(plain[name])
        def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            made = plain[name](*args, **kwargs)
            if pin_memory:
                made.untyped_storage().pinned = True
            return made

        return make

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        if is_pinned(self):
            return self
        pinned = self.clone(memory_format=torch.contiguous_format)
        pinned.untyped_storage().pinned = True  # type: ignore[attr-defined]
        return pinned

    torch.empty = with_pinned("empty")
    torch.zeros = with_pinned("zeros")
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = (  # type: ignore[method-assign]
        lambda self, device=None: is_pinned(self)  # type: ignore[arg-type]
    )


def _follow_resized_storages() -> None:
    plain = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        made = plain(self, size)
        this_machine().resized(self)
        return made

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
