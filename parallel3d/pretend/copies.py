"""Operators of the pretended device that are more than a kernel: copies to and from the host, reads
of a number, and what the CPU lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel3d.pretend.device import TYPE, this_machine
from parallel3d.pretend.tensor import PretendedTensor, launch, poison, run

aten = torch.ops.aten


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


def _copy(operator: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    to_device, from_device = (isinstance(t, PretendedTensor) for t in (target, source))
    if to_device and from_device:
        target.data_.copy_(source.data_)
        launch("copy_", [source], [target])
    elif to_device:
        _to_device(target, source, non_blocking)
    else:
        _to_host(target, source, non_blocking)
    return target


def _to_device(target: PretendedTensor, source: Tensor, non_blocking: bool) -> None:
    machine = this_machine()
    target.data_.copy_(source)
    launch("copy to the device", [], [target])
    stream = machine.stream_of(target.index)
    if not (non_blocking and is_pinned(source)):
        # Without pinned memory the driver waits, which PyTorch's debug mode does not see.
        why = "a copy from memory that is not pinned, or that waits"
        machine.wait_for_stream(stream, why, is_detected=not non_blocking)
    elif machine.data == "cpu":
        before = source.detach().clone()
        machine.once_known(stream, lambda: _check_unchanged(source, before))


def _check_unchanged(source: Tensor, before: Tensor) -> None:
    if not torch.equal(source.detach().view(torch.uint8), before.view(torch.uint8)):
        raise RuntimeError(
            "pinned memory was overwritten before its copy to the device was known to be done"
        )


def _to_host(target: Tensor, source: PretendedTensor, non_blocking: bool) -> None:
    machine = this_machine()
    launch("copy to the host", [source], [])
    stream = machine.stream_of(source.index)
    waits = not (non_blocking and is_pinned(target))
    if machine.data == "meta":
        target.zero_()
    elif waits:
        target.copy_(source.data_)
    else:
        now = source.data_.detach().clone()
        poison(target)
        machine.once_known(stream, lambda: target.copy_(now))
    if waits:
        machine.wait_for_stream(stream, "a copy to the host", is_detected=not non_blocking)


def _foreach_copy(operator: Any, targets: list, sources: list, non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        _copy(operator, target, source, non_blocking)


def _to(operator: Any, tensor: Tensor, *, device: Any = None, non_blocking: bool = False,
        **kwargs: Any) -> Tensor:  # fmt: skip
    device = None if device is None else torch.device(device)
    kwargs.pop("pin_memory", None)
    if not isinstance(tensor, PretendedTensor):  # from the host
        made = torch.empty_like(tensor, device=device, dtype=kwargs.get("dtype"))
        return _copy(operator, made, tensor, non_blocking)
    if device is None or device.type == TYPE:
        return run(operator, tensor, **kwargs)
    data = tensor.data_.to(kwargs.get("dtype") or tensor.dtype)
    # PyTorch, too, gives pinned memory to a copy that does not wait.
    target = torch.empty(data.shape, dtype=data.dtype, pin_memory=non_blocking)
    _to_host(target, PretendedTensor(data, tensor.index), non_blocking)
    return target


def _scalar(operator: Any, tensor: PretendedTensor) -> Any:
    machine = this_machine()
    machine.wait_for_stream(machine.stream_of(tensor.index), "item")
    launch("item", [tensor], [])
    if not tensor.data_.is_meta:
        return tensor.data_.item()
    return 1.0 if tensor.is_floating_point() else 1


def _addmm(
    operator: Any, add: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, **kwargs: Any
) -> Tensor:
    """`torch.addmm(..., out_dtype=…)`, which the CPU does not have: products in `out_dtype`."""
    to = kwargs.pop("out", None)
    if to is None:
        to = torch.empty(add.shape, dtype=dtype, device=add.device)
    data = [t.data_ for t in (add, a, b)]
    if not to.data_.is_meta:
        product = torch.addmm(*(t.to(dtype) for t in data), **kwargs)
        to.data_.copy_(product)
    launch("addmm", [add, a, b], [to], (aten.addmm.default, data, kwargs, to.data_))
    return to


def _index_add(
    operator: Any, table: PretendedTensor, dim: int, index: Tensor, source: Tensor, **kwargs: Any
) -> Tensor:
    """Rows that fall on one place are added in an order of the device's own, as atomics do."""
    if dim == 0 and table.index % 2 and table.is_floating_point() and not table.data_.is_meta:
        index, source = (PretendedTensor(t.data_.flip(0), t.index) for t in (index, source))
    return run(operator, table, dim, index, source, **kwargs)


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten._foreach_copy_.default: _foreach_copy,
    aten._to_copy.default: _to,
    aten._local_scalar_dense.default: _scalar,
    aten.index_add_.default: _index_add,
    aten.addmm.dtype: _addmm,
    aten.addmm.dtype_out: _addmm,
}
