"""Remembers what a function of many operators does on tensors without values, and does it again.

Python dispatches each operator, which takes longer than all else. A recurrence in plain operators
has hundreds of them, and a step calls it with equal arguments in every layer and micro-batch. It is
therefore run once, and from then on its kernels and its memory are only reported to the observers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.private_names import storage_address
from parallel3d.simulated_device.machine import (
    Frames,
    Kernel,
    Observer,
    SimulatedMachine,
    StorageMemory,
)
from parallel3d.simulated_device.meta_results import Unknown, key_of
from parallel3d.simulated_device.tensor import SimulatedTensor, wrap


class _Allocation(NamedTuple):
    number: int  # of the memory, within a call
    nbytes: int
    device: int


class _Release(NamedTuple):
    number: int


class _Result(NamedTuple):
    """Describes a tensor in memory that the call has allocated, or an empty one without memory."""

    number: int | None
    nbytes: int  # of its storage
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: int


class _Call(NamedTuple):
    """What a call does, each with the frames of the stack within the call; and its results."""

    done: tuple[tuple[Frames, _Allocation | _Release | Kernel], ...]
    results: tuple[_Result, ...]
    is_tuple: bool


class RepeatedCalls:
    """Runs functions on simulated tensors without values, each only once for equal arguments.

    A function must depend on nothing else, and change nothing else. A call is run every time if it
    sends something, waits for the device, uses several streams, or keeps memory that is not in its
    results. After `most` different calls all are forgotten.
    """

    def __init__(self, machine: SimulatedMachine, most: int = 1000) -> None:
        self.machine = machine
        self.most = most
        self._known: dict[Any, _Call | None] = {}  # None: is run every time
        self._kernels: dict[Any, Kernel] = {}
        self._records = False

    def run(self, function: Callable[..., Any], given: Sequence[Any]) -> Any:
        """Returns what `function(*given)` returns."""
        machine = self.machine
        has_more = machine.data != "meta" or machine.checks_races  # than memory and kernels
        if has_more or self._records or machine.thread.fused is not None:
            return function(*given)
        try:
            key = self._key(function, given)
            known = self._known.get(key)
        except (Unknown, TypeError):  # TypeError: an argument is not hashable
            return function(*given)
        machine.collect()  # what is freed before the call is not a part of it
        if known is not None:
            return self._again(known)
        if key in self._known:
            return function(*given)
        if len(self._known) >= self.most:
            self._known.clear()
            self._kernels.clear()
        tape = _Tape(self, machine.stream_of())
        machine.observers.append(tape)
        self._records = True
        try:
            out = function(*given)
            machine.collect()
        finally:
            self._records = False
            machine.observers.remove(tape)
        self._known[key] = tape.call(out)
        return out

    def _key(self, function: Callable[..., Any], given: Sequence[Any]) -> Any:
        data, memory = [], []
        for value in given:
            if isinstance(value, SimulatedTensor):
                t = value.data_
                address = storage_address(t.untyped_storage())
                memory.append((address, t.storage_offset(), value.device_index))
                data.append(t)
                continue
            if isinstance(value, (list, tuple)):
                raise Unknown
            data.append(value)
        same = [address for address, *_ in memory]
        where = tuple((same.index(address), *others) for address, *others in memory)
        settings = torch.get_default_dtype(), torch.is_grad_enabled(), self.machine.stream_of()
        return function, key_of(data), where, settings

    def interned(self, kernel: Kernel) -> Kernel:
        """Returns a kernel like another one that keeps no memory alive. May raise Unknown."""
        uses = tuple(tuple(use.nbytes for use in of) for of in (kernel.reads, kernel.writes))
        arguments: Any = None
        if kernel.call is not None:
            operator, data, named, out = kernel.call
            arguments = operator, key_of(data), key_of([*named.items()]), key_of(out)
        key = kernel.name, kernel.stream, kernel.launches, uses, arguments
        if key not in self._kernels:
            call: Any = kernel.call and tuple(map(_bare, kernel.call))
            self._kernels[key] = replace(kernel, call=call)
        return self._kernels[key]

    def _again(self, known: _Call) -> Any:
        machine = self.machine
        owners: dict[int | None, Any] = {}
        try:
            for frames, what in known.done:
                machine.thread.repeated = frames
                if isinstance(what, Kernel):
                    machine.launch(what)
                elif isinstance(what, _Allocation):
                    owners[what.number] = machine.allocate(what.nbytes, what.device)
                else:
                    del owners[what.number]
            machine.collect()
        finally:
            machine.thread.repeated = ()
        storages: dict[int | None, Any] = {}
        made = []
        for each in known.results:
            if each.number not in storages or each.number is None:
                storages[each.number] = torch.UntypedStorage(each.nbytes, device="meta")
            if each.number in owners:
                storages[each.number].owner = owners.pop(each.number)
            data = torch.empty(0, dtype=each.dtype, device="meta")
            data.set_(storages[each.number], each.offset, each.shape, each.strides)
            made.append(wrap(data, {}, each.device))
        return tuple(made) if known.is_tuple else made[0]


class _Tape(Observer):
    """Records a call."""

    def __init__(self, calls: RepeatedCalls, stream: int) -> None:
        self.calls = calls
        self.stream = stream
        self.done: list[tuple[Frames, _Allocation | _Release | Kernel]] = []
        self.numbers: dict[StorageMemory, int] = {}  # of the memory that exists
        self.asked: dict[StorageMemory, Frames] = {}
        self.is_repeatable = True

    def kernel(self, kernel: Kernel) -> None:
        try:
            self.done.append((_frames(), self.calls.interned(kernel)))
        except (Unknown, TypeError):
            self.is_repeatable = False
        if kernel.stream != self.stream:
            self.is_repeatable = False

    def collective(self, name: str, group: Any, tensor: Tensor) -> None:
        self.is_repeatable = False

    def host_wait(self, why: str) -> None:
        self.is_repeatable = False

    def allocating(self, block: StorageMemory) -> None:
        self.asked[block] = _frames()

    def allocated(self, block: StorageMemory) -> None:
        number = self.numbers[block] = len(self.done)
        self.done.append((self.asked.pop(block), _Allocation(number, block.nbytes, block.device)))

    def freed(self, block: StorageMemory) -> None:
        if block in self.numbers:  # garbage from before the call may also be freed during it
            self.done.append(((), _Release(self.numbers.pop(block))))

    def call(self, out: Any) -> _Call | None:
        """Returns the recorded call, or None if it must be run every time."""
        is_tuple, results = type(out) is tuple, []
        for tensor in out if is_tuple else [out]:
            if type(tensor) is not SimulatedTensor or tensor.requires_grad:
                return None
            data = tensor.data_
            storage: Any = data.untyped_storage()
            owner = getattr(storage, "owner", None)
            number = None if owner is None else self.numbers.get(owner.block)
            if number is None and (owner is not None or data.numel()):
                return None
            shape = data.shape, data.stride(), int(data.storage_offset()), data.dtype
            nbytes = storage.nbytes()
            results.append(_Result(number, nbytes, *shape, tensor.device_index))
        kept = {result.number for result in results} - {None}
        if not self.is_repeatable or kept != {*self.numbers.values()}:
            return None
        return _Call(tuple(self.done), tuple(results), is_tuple)


def _bare(value: Any) -> Any:
    """Returns arguments whose tensors without values are replaced by others like them."""
    if isinstance(value, Tensor) and value.is_meta:
        shape = value.shape, value.stride()
        return torch.empty_strided(*shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {name: _bare(each) for name, each in value.items()}
    return type(value)(map(_bare, value)) if type(value) in (list, tuple) else value


def _frames() -> Frames:
    """Returns the frames of the stack from the caller's to the call that is being recorded."""
    found: list[tuple[str, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _RUN:
        found.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


_RUN = RepeatedCalls.run.__code__
