"""A tensor on the pretended device: a wrapper around the data, whose operators run at once.

Every operator arrives here after autograd. It runs on the data, and the machine is told of the
kernel: its stream, and the memory that it reads and writes. Views share their storage's block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from parallel3d.pretend.device import TYPE, Stream, this_machine
from parallel3d.pretend.machine import SimulatedMachine
from parallel3d.pretend.operators import OverloadFacts, facts_of, launches_of, touched
from parallel3d.pretend.records import Kernel, Use

# In place, and without a kernel for tensors that have no values: there is nothing to run.
WITHOUT_META = frozenset((torch.ops.aten._fused_sgd_.default,))


class PretendedTensor(torch.Tensor):
    """`data_` is what it stands for, on the CPU or on meta; `index` is its device's.

    To PyTorch's C++ all are on device 0: a backend in Python has one device there. `device` says
    the index.
    """

    data_: Tensor
    index: int

    # Nothing is overridden above the dispatcher; the default would only cost time.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: Tensor, index: int) -> PretendedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=torch.device(TYPE, 0),
        )
        made.data_, made.index = data, index
        return made

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatch(operator, *args, **(kwargs or {}))

    @property
    def device(self) -> torch.device:
        return torch.device(TYPE, self.index)

    @property
    def data(self) -> Tensor:
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, new: PretendedTensor) -> None:
        torch._C.TensorBase.data.__set__(self, new)
        self.data_, self.index = new.data_, new.index

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.data_.untyped_storage()

    def data_ptr(self) -> int:
        """An address; on meta a number that tensors of one place share."""
        if self.data_.device.type != "meta":
            return self.data_.data_ptr()
        offset = self.data_.storage_offset() * self.data_.itemsize
        return self.data_.untyped_storage()._cdata + offset

    def tolist(self) -> Any:
        machine = this_machine()
        machine.wait_for_stream(machine.stream_of(self.index), "tolist")
        known = self.data_.detach()
        return (torch.ones_like(known, device="cpu") if known.is_meta else known).tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device} | kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first."
        )

    def record_stream(self, stream: Stream) -> None:
        """The memory is not given out again before `stream` is done with it."""
        this_machine().block_of(self.data_, self.index).used_on.add(stream.number)

    def __format__(self, spec: str) -> str:
        """As PyTorch's, which does so for its own class alone."""
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self.dtype} {tuple(self.shape)} on {self.device}>"


def unwrapped(value: Any, met: dict[int, PretendedTensor]) -> Any:
    """An argument in terms of the data; `met` collects the pretended tensors by their data."""
    if isinstance(value, PretendedTensor):
        met[id(value.data_)] = value
        return value.data_
    if isinstance(value, (list, tuple)):
        return type(value)(unwrapped(item, met) for item in value)
    return value


def wrapped(value: Any, met: dict[int, PretendedTensor], index: int) -> Any:
    """A result: a pretended tensor that came in, where it is that one's data, or a new one."""
    if isinstance(value, Tensor):
        known = met.get(id(value))
        return PretendedTensor(value, index) if known is None else known
    if isinstance(value, (list, tuple)):
        items = [wrapped(item, met, index) for item in value]
        return type(value)(items) if type(value) in (list, tuple) else items
    return value


def dispatch(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator of which an argument is a pretended tensor or the pretended device."""
    special = this_machine().special.get(operator, run)
    return special(operator, *args, **kwargs)


def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator on the data, as one kernel on the current stream."""
    machine, facts = this_machine(), facts_of(operator)
    met: dict[int, PretendedTensor] = {}
    data = [unwrapped(a, met) for a in args]
    named = {name: unwrapped(a, met) for name, a in kwargs.items()}
    index = _index(facts, met, named, (*args, *kwargs.values()), machine)
    if "device" in named:
        named["device"] = torch.device(machine.data)
        named.pop("pin_memory", None)
    if facts.waits:
        machine.wait_for_stream(machine.stream_of(index), facts.name)
    is_known = machine.data != "meta" or operator not in WITHOUT_META
    out = operator(*data, **named) if is_known else None
    if facts.in_place:
        _check_sizes(facts, met)
    if facts.launches:
        machine.launch(_kernel(machine, operator, facts, data, named, out, index))
    elif not facts.in_place:
        for t in _tensors(out):
            machine.block_of(t, index)
    return wrapped(out, met, index)


def _index(
    facts: OverloadFacts,
    met: dict[int, PretendedTensor],
    named: dict,
    given: Iterable,
    machine: SimulatedMachine,
) -> int:
    """The device that all tensors are on. Raises RuntimeError as CUDA would where they differ."""
    found = {t.index for t in met.values()}
    others = [t for t in _tensors(given) if not isinstance(t, PretendedTensor)]
    wrong = [t for t in others if t.dim() > 0 and not facts.name.startswith("index")]
    if len(found) > 1 or (found and wrong):
        places = sorted({f"{TYPE}:{i}" for i in found} | {str(t.device) for t in wrong})
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(places)}! (in {facts.name})"
        )
    if found:
        if any(t.dim() > 0 for t in others):
            machine.wait_for_stream(machine.stream_of(), f"{facts.name} by a tensor of the host")
        return found.pop()
    device = named.get("device")
    # C++ that makes a tensor like another one says 0, whatever the index.
    return device.index if device is not None and device.index else machine.device


def _check_sizes(facts: OverloadFacts, met: dict[int, PretendedTensor]) -> None:
    """A tensor that an operator gave another size, which a wrapper cannot follow."""
    for t in met.values():
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
    index: int,
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
            use = machine.use(t, index, part.get(name))
            if name in facts.read:
                reads.append(use)
            if name in facts.written:
                writes.append(use)
                inside.add(id(t))
    results = [t for t in _tensors(out) if id(t) not in inside]
    writes += [machine.use(t, index) for t in results if t.numel()]
    lists = [_tensors(v) for v in arguments.values() if isinstance(v, (list, tuple))]
    count = launches_of(facts, lists)
    call = (operator, data, named, out)
    return Kernel(facts.name, machine.stream_of(index), reads, writes, call, count)


def launch(name: str, reads: Iterable[Tensor], writes: Iterable[Tensor], call: Any = None) -> None:
    """Tells the machine of a kernel that is no operator of PyTorch's; tensors are pretended."""
    machine = this_machine()
    tensors = [*reads], [*writes]
    uses = [[machine.use(t.data_, t.index) for t in some] for some in tensors]
    index = next(t.index for some in tensors for t in some)
    machine.launch(Kernel(name, machine.stream_of(index), *uses, call))


def poison(data: Tensor) -> None:
    """Fills memory with what nobody should read: it is not there yet."""
    if data.is_meta:
        return
    if data.is_floating_point():
        data.fill_(torch.nan)
    elif data.dtype != torch.bool:
        data.fill_(torch.iinfo(data.dtype).max - 85)
