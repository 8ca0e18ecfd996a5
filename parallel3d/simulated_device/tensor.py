"""Provides the tensors of the simulated device, each of which wraps a tensor with its data.

Every operator arrives here after autograd. It runs immediately on the data, and is reported to the
machine as a kernel, with its stream and the memory that it reads and writes. A view and its base
use the same block of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.private_names import (
    FOREACH_NORM,
    OF_MANY_TENSORS,
    OF_UNKNOWN_SIZE,
    OVERWRITING,
    WITHOUT_A_KERNEL,
    DisabledDispatch,
    TensorBase,
    aten_foreach_copy_,
    aten_fused_sgd_,
    disabled_torch_function,
    include_meta,
    includes_meta,
    local_scalar_dense,
    make_wrapper_subclass,
    schema_of,
    storage_address,
    to_copy,
)
from parallel3d.simulated_device.device import TYPE, SimulatedStream, this_machine
from parallel3d.simulated_device.machine import Call, Kernel, SimulatedMachine, Use

# In-place operators that PyTorch lacks for meta tensors; they are skipped there.
WITHOUT_META = frozenset((aten_fused_sgd_.default,))


class SimulatedTensor(torch.Tensor):
    """Wraps `data_`, a tensor on the CPU or meta device, as a tensor on a simulated device.

    C++ sees all such tensors on device 0; `device_index` is the real index.
    """

    data_: Tensor
    device_index: int

    # The class overrides nothing above the dispatcher, and the default would be slower.
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, data: Tensor, device_index: int) -> SimulatedTensor:
        made = make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=torch.device(TYPE, 0),
        )
        made.data_ = data
        made.device_index = device_index
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatch(operator, *args, **(kwargs or {}))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(TYPE, self.device_index)

    @property
    def data(self) -> Tensor:
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        TensorBase.data.__set__(self, new)
        self.data_ = simulated(new).data_
        self.device_index = simulated(new).device_index

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.data_.untyped_storage()

    def data_ptr(self) -> int:
        """Returns the data's address; meta tensors in the same place return the same number."""
        if self.data_.device.type != "meta":
            return self.data_.data_ptr()
        offset = self.data_.storage_offset() * self.data_.itemsize
        return storage_address(self.data_.untyped_storage()) + offset

    def tolist(self) -> Any:
        machine = this_machine()
        machine.wait_for_stream(machine.stream_of(self.device_index), "tolist")
        known = self.data_.detach()
        return (torch.ones_like(known, device="cpu") if known.is_meta else known).tolist()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Converts or copies the tensor; ignores a device argument that is the tensor's device.

        C++ takes every tensor to be on device 0, so it would copy to any other device.
        """
        if args and self._is_own(args[0]):
            args = args[1:]
        if self._is_own(kwargs.get("device")):
            del kwargs["device"]
        return super().to(*args, **kwargs) if args or kwargs else self

    def _is_own(self, device: Any) -> bool:
        return isinstance(device, (str, torch.device)) and torch.device(device) == self.device

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        settings: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return torch.tensor(data, **settings | kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first."
        )

    def record_stream(self, stream: SimulatedStream) -> None:  # type: ignore[override]
        """Keeps the allocator from reusing the memory, as another stream uses it."""
        this_machine().block_of(self.data_, self.device_index).used_on.add(stream.number)

    def __format__(self, spec: str) -> str:
        """Formats scalars as numbers, which PyTorch does only for its own class."""
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self.dtype} {tuple(self.shape)} on {self.device}>"


def simulated(tensor: Tensor) -> SimulatedTensor:
    assert isinstance(tensor, SimulatedTensor)
    return tensor


def unwrap(value: Any, originals: dict[int, SimulatedTensor]) -> Any:
    """Returns an argument with its simulated tensors unwrapped, and adds them to `originals`."""
    if isinstance(value, SimulatedTensor):
        originals[id(value.data_)] = value
        return value.data_
    if isinstance(value, (list, tuple)):
        return type(value)(unwrap(item, originals) for item in value)
    return value


def wrap(value: Any, originals: dict[int, SimulatedTensor], device_index: int) -> Any:
    """Returns a result with its tensors wrapped; known ones are taken from `originals`."""
    if isinstance(value, Tensor):
        known = originals.get(id(value))
        return SimulatedTensor(value, device_index) if known is None else known
    if isinstance(value, (list, tuple)):
        items = [wrap(item, originals, device_index) for item in value]
        return type(value)(items) if type(value) in (list, tuple) else items
    return value


def dispatch(operator: Any, *args: Any, **kwargs: Any) -> Any:
    special = this_machine().special.get(operator, run)
    return special(operator, *args, **kwargs)


def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the operator on the data, as one kernel on the current stream."""
    machine, facts = this_machine(), facts_of(operator)
    originals: dict[int, SimulatedTensor] = {}
    data = [unwrap(a, originals) for a in args]
    named = {name: unwrap(a, originals) for name, a in kwargs.items()}
    device_index = _device_index_of(facts, originals, named, (*args, *kwargs.values()), machine)
    if "device" in named:
        named["device"] = torch.device(machine.data)
        named.pop("pin_memory", None)
    if facts.name in _HOST_WAITS:
        machine.wait_for_stream(machine.stream_of(device_index), facts.name)
    out = _compute(machine, operator, facts, data, named)
    if facts.written:
        _check_sizes(facts, originals)
    if facts.launches:
        machine.launch(_kernel(machine, operator, facts, data, named, out, device_index))
    elif not facts.written:
        for t in _tensors(out):
            machine.block_of(t, device_index)
    return wrap(out, originals, device_index)


def _compute(
    machine: SimulatedMachine, operator: Any, facts: OverloadFacts, data: list, named: dict
) -> Any:
    if machine.data != "meta":
        return operator(*data, **named)
    if operator in WITHOUT_META:
        return None
    if facts.launches:
        return machine.meta_results.run(operator, data, named)
    return operator(*data, **named)


def _device_index_of(
    facts: OverloadFacts,
    originals: dict[int, SimulatedTensor],
    named: dict,
    arguments: Iterable,
    machine: SimulatedMachine,
) -> int:
    """Returns the index of the tensors' device. Raises CUDA's RuntimeError if devices differ."""
    found = {t.device_index for t in originals.values()}
    others = [t for t in _tensors(arguments) if not isinstance(t, SimulatedTensor)]
    wrong = [t for t in others if t.dim() > 0 and not facts.name.startswith("index")]
    if len(found) > 1 or (found and wrong):
        places = sorted({f"{TYPE}:{i}" for i in found} | {str(t.device) for t in wrong})
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(places)}! (in {facts.name})"
        )
    if found:
        if any(t.dim() > 0 for t in others):
            machine.wait_for_stream(machine.stream_of(), f"{facts.name} with a tensor on the host")
        return found.pop()
    device = named.get("device")
    # When C++ makes a tensor like another one, it passes device 0 whatever the real device is.
    return device.index if device is not None and device.index else machine.device


def _check_sizes(facts: OverloadFacts, originals: dict[int, SimulatedTensor]) -> None:
    for t in originals.values():
        if t.shape != t.data_.shape:
            raise NotImplementedError(f"{facts.name} resizes a tensor on the {TYPE} device")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def _kernel(
    machine: SimulatedMachine,
    operator: Any,
    facts: OverloadFacts,
    data: list,
    named: dict,
    out: Any,
    device_index: int,
) -> Kernel:
    arguments = dict(zip(facts.arguments, data, strict=False)) | named
    part = touched(facts, arguments, out)
    reads: list[Use] = []
    writes: list[Use] = []
    inside = set()
    for name, value in arguments.items():
        for t in _tensors(value):
            if t.numel() == 0 or t.device.type != machine.data:
                continue
            use = machine.use(t, device_index, part.get(name))
            if name in facts.read:
                reads.append(use)
            if name in facts.written:
                writes.append(use)
                inside.add(id(t))
    results = [t for t in _tensors(out) if id(t) not in inside]
    writes += [machine.use(t, device_index) for t in results if t.numel()]
    lists = [_tensors(v) for v in arguments.values() if isinstance(v, (list, tuple))]
    count = launches_of(facts, lists)
    call = (operator, data, named, out)
    return Kernel(facts.name, machine.stream_of(device_index), reads, writes, call, count)


def launch(
    name: str,
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    call: Call | None = None,
    *,
    host_reads: Iterable[Tensor] = (),
    host_writes: Iterable[Tensor] = (),
    stream: int | None = None,
) -> None:
    """Reports a kernel that is not an operator of PyTorch, by default on the current stream.

    `inputs` and `outputs` are simulated tensors; `host_reads` and `host_writes` are tensors in
    pinned memory. `call` is given to observers; None stands for no operator.
    """
    machine = this_machine()
    read, written = [simulated(t) for t in inputs], [simulated(t) for t in outputs]
    reads, writes = (
        [machine.use(t.data_, t.device_index) for t in tensors] for tensors in (read, written)
    )
    if stream is None:
        stream = machine.stream_of((read or written)[0].device_index)
    pinned = [[machine.pinned(t) for t in tensors] for tensors in (host_reads, host_writes)]
    machine.launch(Kernel(name, stream, reads, writes, call), *pinned)


def poison(data: Tensor) -> None:
    """Fills memory with NaN or very large integers, which stay until the result is written."""
    if data.is_meta:
        return
    if data.is_floating_point():
        data.fill_(torch.nan)
    elif data.dtype != torch.bool:
        data.fill_(torch.iinfo(data.dtype).max - 85)


aten = torch.ops.aten


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


def _copy(operator: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, SimulatedTensor):
        _to_host(target, simulated(source), non_blocking)
    elif isinstance(source, SimulatedTensor):
        target.data_.copy_(source.data_)
        launch("copy_", [source], [target])
    else:
        _to_device(target, source, non_blocking)
    return target


def _to_device(target: SimulatedTensor, source: Tensor, non_blocking: bool) -> None:
    machine, pinned = this_machine(), is_pinned(source)
    late = getattr(source.untyped_storage(), "late", [])
    target.data_.copy_(_with(late, source) if late else source)
    launch("copy to the device", [], [target], host_reads=[source] if pinned else [])
    stream = machine.stream_of(target.device_index)
    if not (non_blocking and pinned):
        # Copies from pageable memory wait in the driver, unseen by PyTorch's debug mode.
        why = "a blocking copy, or one from memory that is not pinned"
        machine.wait_for_stream(stream, why, is_detected=not non_blocking)
    elif machine.data == "cpu":
        before, copies = target.data_.detach().clone().to(source.dtype), _copies_into(source)
        machine.once_known(stream, lambda: _check_unchanged(source, before, copies))


def _with(late: Sequence[tuple[Tensor, Tensor]], source: Tensor) -> Tensor:
    """Returns `source` as the device sees it: with the copies that the host has not waited for."""
    whole = torch.empty(0, dtype=torch.uint8).set_(source.untyped_storage()).clone()

    def same(t: Tensor) -> Tensor:
        return whole.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())

    for into, values in late:
        same(into).copy_(values)
    return same(source)


def _copies_into(pinned: Tensor) -> int:
    """Returns the number of copies from the device into the storage so far."""
    return getattr(pinned.untyped_storage(), "copies", 0)


def _check_unchanged(source: Tensor, before: Tensor, copies: int) -> None:
    # The device has written to the memory since then; `Races` checks that the order is safe.
    if _copies_into(source) != copies:
        return
    if not torch.equal(source.detach().view(torch.uint8), before.view(torch.uint8)):
        raise RuntimeError(
            "pinned memory was overwritten before its copy to the device was known to be done"
        )


def _to_host(target: Tensor, source: SimulatedTensor, non_blocking: bool) -> None:
    machine, pinned = this_machine(), is_pinned(target)
    launch("copy to the host", [source], [], host_writes=[target] if pinned else [])
    stream = machine.stream_of(source.device_index)
    waits = not (non_blocking and pinned)
    if machine.data == "meta":
        target.zero_()
    elif waits:
        target.copy_(source.data_)
    else:
        storage: Any = target.untyped_storage()
        storage.copies = _copies_into(target) + 1
        storage.late = getattr(storage, "late", [])
        copy = target, source.data_.detach().clone()
        storage.late.append(copy)
        poison(target)
        machine.once_known(stream, lambda: _settle(storage.late, copy))
    if waits:
        machine.wait_for_stream(stream, "a copy to the host", is_detected=not non_blocking)


def _settle(late: list[tuple[Tensor, Tensor]], copy: tuple[Tensor, Tensor]) -> None:
    late[:] = [other for other in late if other is not copy]
    copy[0].copy_(copy[1])


def _foreach_copy(operator: Any, targets: list, sources: list, non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        _copy(operator, target, source, non_blocking)


def _to(
    operator: Any, tensor: Tensor, *, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> Tensor:
    device = None if device is None else torch.device(device)
    kwargs.pop("pin_memory", None)
    if not isinstance(tensor, SimulatedTensor):  # the copy comes from the host
        made = torch.empty_like(tensor, device=device, dtype=kwargs.get("dtype"))
        return _copy(operator, made, tensor, non_blocking)
    if device is None or device.type == TYPE:
        return run(operator, tensor, **kwargs)
    data = tensor.data_.to(kwargs.get("dtype") or tensor.dtype)
    # PyTorch also pins the target of a non-blocking copy.
    target = torch.empty(data.shape, dtype=data.dtype, pin_memory=non_blocking)
    _to_host(target, SimulatedTensor(data, tensor.device_index), non_blocking)
    return target


def _scalar(operator: Any, tensor: SimulatedTensor) -> Any:
    machine = this_machine()
    machine.wait_for_stream(machine.stream_of(tensor.device_index), "item")
    launch("item", [tensor], [])
    if not tensor.data_.is_meta:
        return tensor.data_.item()
    return 1.0 if tensor.is_floating_point() else 1


def _addmm(
    operator: Any, add: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, **kwargs: Any
) -> Tensor:
    """Runs `torch.addmm(…, out_dtype=…)`, which the CPU lacks, by computing in `out_dtype`."""
    out = kwargs.pop("out", None)
    to = simulated(torch.empty(add.shape, dtype=dtype, device=add.device) if out is None else out)
    data = [simulated(t).data_ for t in (add, a, b)]
    if not to.data_.is_meta:
        product = torch.addmm(*(t.to(dtype) for t in data), **kwargs)
        to.data_.copy_(product)
    launch("addmm", [add, a, b], [to], (aten.addmm.default, data, kwargs, to.data_))
    return to


def _index_add(
    operator: Any, table: SimulatedTensor, dim: int, index: Tensor, source: Tensor, **kwargs: Any
) -> Tensor:
    """Adds rows with equal indices in an order that depends on the device, like GPU atomics."""
    if (
        dim == 0
        and table.device_index % 2
        and table.is_floating_point()
        and not table.data_.is_meta
    ):
        index, source = (_flipped(simulated(t)) for t in (index, source))
    return run(operator, table, dim, index, source, **kwargs)


def _transpose_in_place(operator: Any, tensor: SimulatedTensor, a: int, b: int) -> SimulatedTensor:
    """Transposes the data, and the sizes that the tensor itself shows.

    As PyTorch's own wrappers do, it runs the operator on the wrapper as on a meta tensor.
    """
    operator(tensor.data_, a, b)
    included = includes_meta()
    with DisabledDispatch():
        include_meta(True)
        try:
            operator(tensor, a, b)
        finally:
            include_meta(included)
    return tensor


def _flipped(tensor: SimulatedTensor) -> SimulatedTensor:
    return SimulatedTensor(tensor.data_.flip(0), tensor.device_index)


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten_foreach_copy_.default: _foreach_copy,
    to_copy.default: _to,
    local_scalar_dense.default: _scalar,
    aten.index_add_.default: _index_add,
    aten.transpose_.default: _transpose_in_place,
    aten.addmm.dtype: _addmm,
    aten.addmm.dtype_out: _addmm,
}


# Operators without a kernel: they make a tensor without filling it, or read its metadata.
_NO_KERNEL = frozenset(
    (
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "detach",
        "alias",
        "lift_fresh",
        "lift",
        *WITHOUT_A_KERNEL,
        "set_",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "is_same_size",
    )
)
# In-place operators that write without reading.
_OVERWRITING = frozenset(
    ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", *OVERWRITING)
)
# Operators for which the host waits, as it needs their result or its size.
_HOST_WAITS = frozenset(
    (*OF_UNKNOWN_SIZE, "nonzero", "masked_select", "equal", "unique_dim", "bincount", "is_nonzero")
)
# Maximum number of tensors in one launch of PyTorch's multi-tensor kernels, by the number of lists.
_BY_LISTS = {1: 110, 2: 64, 3: 48, 4: 36}


class OverloadFacts(NamedTuple):
    """Describes an overload; `written` and `read` name the arguments that it writes and reads."""

    name: str
    launches: bool
    written: frozenset[str]
    read: frozenset[str]
    arguments: tuple[str, ...]


@functools.cache
def facts_of(operator: Any) -> OverloadFacts:
    schema = schema_of(operator)
    name = schema.name.partition("::")[2]
    written, read = set(), set()
    for argument in schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written.add(argument.name)
        if not is_written or not (argument.is_out or name in _OVERWRITING):
            read.add(argument.name)
    is_view = operator.is_view and not written
    names = tuple(argument.name for argument in schema.arguments)
    launches = not is_view and name not in _NO_KERNEL
    return OverloadFacts(name, launches, frozenset(written), frozenset(read), names)


def launches_of(facts: OverloadFacts, tensors: Sequence[Sequence[Tensor]]) -> int:
    if not facts.name.startswith(OF_MANY_TENSORS):
        return 1
    lists = [t for t in tensors if t]
    if not lists:
        return 1
    count = max(len(t) for t in lists)
    a_launch = _BY_LISTS.get(len([t for t in lists if len(t) == count]), 36)
    # Large tensors are cut into chunks of 64 Ki elements, 320 per launch.
    chunks = sum(-(-t.numel() // 65536) for t in max(lists, key=len))
    launches = max(-(-count // a_launch), -(-chunks // 320))
    return launches + (1 if facts.name == FOREACH_NORM else 0)


def touched(facts: OverloadFacts, arguments: dict[str, Any], out: Any) -> dict[str, int]:
    """Returns, for each argument that an operator uses only in part, the bytes that it uses.

    Lookups read some rows of a table, and indexed additions change some.
    """
    if table := _LOOKUPS.get(facts.name):
        return {table: out.nbytes}
    if rows := _ADDITIONS.get(facts.name):
        table = arguments["self"]
        return {"self": min(table.nbytes, arguments[rows].numel() * table.itemsize)}
    return {}


# Names of the argument that holds a lookup's table, and of the one that holds the added rows.
_LOOKUPS = {"embedding": "weight", "index_select": "self", "gather": "self"}
_ADDITIONS = {"index_add_": "source", "scatter_add_": "src"}
