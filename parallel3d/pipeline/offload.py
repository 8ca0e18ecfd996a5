"""Keeps tensors that layers save for their backward in host memory until the backward needs them.

    forward of a layer     saved tensors are collected, and copied to pinned slabs at its end
    end of the next layer  the compute stream waits for the copies, and the tensors are freed
    action before a        the micro-batch's last offloaded layer is copied back
      backward
    backward of a layer    the compute stream waits for the layer's copies, and copies of the
                           preceding layer are queued

All copies are queued on one stream, so a slab can be reused as soon as its last copy is queued, and
the host never waits. On a CPU the copies are ordinary ones. In addition to the tensors that are not
offloaded, the device holds the tensors of two layers: one layer computes while the tensors of the
other are copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parallel3d.device import accelerator
from parallel3d.private_names import storage_address
from parallel3d.schedules.messages import OFFLOADED_BYTES, SLAB_BYTES

Place = tuple[int, int]  # micro-batch and chunk


class HostSlabs:
    """Lends slabs of equal size, which are pinned on a machine with an accelerator.

    The slabs are reused and never given back to the system.

    Attributes:
        count: number of slabs that exist.
        free: slabs that are not lent.
    """

    def __init__(self, device: torch.device) -> None:
        self.pinned = accelerator.is_accelerator(device)
        self.place = "cpu" if accelerator.has_values(device) else "meta"
        self.count = 0
        self.free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return self.count * SLAB_BYTES

    def take(self) -> Tensor:
        if self.free:
            return self.free.pop()
        self.count += 1
        return torch.empty(SLAB_BYTES, dtype=torch.uint8, device=self.place, pin_memory=self.pinned)

    def give(self, slabs: list[Tensor]) -> None:
        """Takes back slabs whose last copy has been queued, and empties the list `slabs`."""
        self.free += slabs
        slabs.clear()


class _Stored:
    """A storage that is offloaded.

    Attributes:
        nbytes: size of the storage in bytes.
        flat: the bytes on the device, or None while they are only in slabs.
        saved: sum of the bytes of all saved views of the storage.
    """

    def __init__(self, flat: Tensor) -> None:
        self.nbytes = flat.numel()
        self.saved = 0
        self.flat: Tensor | None = flat


@dataclass(eq=False)
class _Layer:
    """The offloaded tensors of one layer for one micro-batch.

    Attributes:
        host: lends the slabs.
        earlier: the preceding offloaded layer, whose backward comes after that of this layer. It is
            None if there is no such layer or its copies back are queued.
        storages: address → storage. The dictionary is emptied once all copies back to the device
            are queued, so that each storage is freed with the autograd nodes that read it.
        slabs: slabs that hold the bytes of the storages, one storage after the other.
        copied, returned: events after the copies to the host and back to the device, or None on a
            CPU.
        fetched: whether the copies back are queued.
        entered: whether the backward of the layer has begun.
    """

    host: HostSlabs
    earlier: _Layer | None
    storages: dict[int, _Stored] = field(default_factory=dict)
    slabs: list[Tensor] = field(default_factory=list)
    copied: Any = None
    returned: Any = None
    fetched: bool = False
    entered: bool = False

    def __del__(self) -> None:
        self.host.give(self.slabs)  # needed if the backward did not run

    def pieces(self) -> Iterator[tuple[_Stored, slice, Tensor]]:
        """Yields (storage, range of bytes of the storage, part of a slab that holds them)."""
        at = 0
        for stored in self.storages.values():
            done = 0
            while done < stored.nbytes:
                index, start = divmod(at, SLAB_BYTES)
                size = min(stored.nbytes - done, SLAB_BYTES - start)
                yield stored, slice(done, done + size), self.slabs[index][start : start + size]
                done, at = done + size, at + size


class _View(NamedTuple):
    """A saved tensor, described as a view of an offloaded storage."""

    layer: _Layer
    stored: _Stored
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Moves the saved tensors of layers to host memory and back when the executor asks for it.

    A storage is copied once and as a whole, however many views of it are saved. Some storages stay
    on the device: small ones (below OFFLOADED_BYTES), those of which less than half is saved,
    parameters, and tensors that several layers read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = HostSlabs(device)
        self.stream: Any = None  # the first copy creates it
        self.place: Place | None = None  # the micro-batch and chunk of the running forward
        self.turns = False  # whether this forward's backward is the next action
        # The last offloaded layer of each forward that waits for its backward.
        self.newest: dict[Place, _Layer] = {}
        # Layers whose copies are queued and whose tensors are still on the device.
        self.leaving: list[_Layer] = []

    @contextmanager
    def forward(self, place: Place, turns: bool) -> Iterator[None]:
        """Offloads the layers of the forward that runs in a `with` block.

        Args:
            place: micro-batch and chunk of the forward.
            turns: whether the backward of `place` is the next action. If so, the last layer is not
                offloaded.
        """
        self.place = place
        self.turns = turns
        try:
            yield
        finally:
            self.place = None

    @contextmanager
    def layer(
        self, module: nn.Module, shared: Any, *, stays: bool, is_last: bool
    ) -> Iterator[None]:
        """Offloads the tensors that the forward of a layer saves in a `with` block.

        Args:
            module: the layer.
            shared: tensors that other layers read too, or tuples and objects that hold such
                tensors. They are not offloaded.
            stays: whether the layer's tensors stay on the device.
            is_last: whether this is the stage's last layer, whose backward comes first.
        """
        if self.place is None or stays or (is_last and self.turns):
            yield
            self.boundary()
            return
        layer = _Layer(self.host, self.newest.get(self.place))
        resident: set[int] = set()

        def pack(tensor: Tensor) -> Tensor | _View:
            storage = tensor.untyped_storage()
            if storage.nbytes() < OFFLOADED_BYTES or tensor.device != self.device:
                return tensor
            if not resident:  # not earlier, because FSDP2 gathers parameters inside the block
                tensors = (*module.parameters(), *_tensors_of(shared))
                resident.update(storage_address(t.untyped_storage()) for t in tensors)
            address = storage_address(storage)
            if address in resident:
                return tensor
            stored = layer.storages.get(address)
            if stored is None:
                count = storage.nbytes() // tensor.itemsize
                flat = tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)
                stored = layer.storages[address] = _Stored(flat)
            stored.saved += tensor.nbytes
            return _View(
                layer,
                stored,
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                int(tensor.storage_offset()),
            )

        with saved_tensors_hooks(pack, self.unpack):
            yield
        for key, stored in list(layer.storages.items()):
            if 2 * stored.saved < stored.nbytes:
                del layer.storages[key]
        self.boundary()
        if layer.storages:
            self.send(layer)
            self.newest[self.place] = layer

    def prefetch(self, place: Place) -> None:
        """Starts the copies back to the device that the backward of `place` needs first."""
        if place in self.newest:
            self.fetch(self.newest[place])

    def backward(self, place: Place) -> None:
        """Prepares the backward of `place`, which comes next."""
        self.prefetch(place)
        self.newest.pop(place, None)

    def boundary(self) -> None:
        """Frees the tensors whose copies to the host are queued, once these copies have ended."""
        for layer in self.leaving:
            self._wait_for(layer.copied)
            for stored in layer.storages.values():
                stored.flat = None
        self.leaving.clear()

    def send(self, layer: _Layer) -> None:
        """Queues the copies of a layer to the host."""
        total = sum(stored.nbytes for stored in layer.storages.values())
        layer.slabs += [self.host.take() for _ in range(math.ceil(total / SLAB_BYTES))]
        with self.copying():
            for stored, where, in_slab in layer.pieces():
                assert stored.flat is not None  # it has just been saved
                in_slab.copy_(stored.flat[where], non_blocking=True)
            layer.copied = self._event()
        self.leaving.append(layer)

    def fetch(self, layer: _Layer) -> None:
        """Queues the copies of a layer back to the device, unless its tensors are still there."""
        if layer.fetched:
            return
        layer.fetched = True
        if layer in self.leaving:
            # The copies to the host still read the tensors, which autograd frees in the backward.
            # So the compute stream has to wait for these copies first.
            self.leaving.remove(layer)
            layer.returned = layer.copied
        else:
            self.boundary()
            for stored in layer.storages.values():  # this memory belongs to the compute stream
                stored.flat = torch.empty(stored.nbytes, dtype=torch.uint8, device=self.device)
            with self.copying():
                for stored, where, in_slab in layer.pieces():
                    assert stored.flat is not None
                    stored.flat[where].copy_(in_slab, non_blocking=True)
                layer.returned = self._event()
        layer.storages.clear()
        self.host.give(layer.slabs)

    def unpack(self, saved: Tensor | _View) -> Tensor:
        """Returns a saved tensor to autograd.

        The first tensor of a layer fetches the tensors of this layer and of the preceding one.
        """
        if isinstance(saved, Tensor):
            return saved
        layer = saved.layer
        if not layer.entered:  # this layer's backward begins
            layer.entered = True
            self.fetch(layer)
            self._wait_for(layer.returned)
            if layer.earlier is not None:
                self.fetch(layer.earlier)
            layer.earlier = None
            self.boundary()
        assert saved.stored.flat is not None
        flat = saved.stored.flat.view(saved.dtype)
        return flat.as_strided(saved.shape, saved.stride, saved.offset)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Queues the copies of a `with` block on the copy stream, after all work queued so far."""
        if not accelerator.is_accelerator(self.device):
            yield
            return
        module = accelerator.module(self.device)
        if self.stream is None:
            self.stream = module.Stream(device=self.device)
        self.stream.wait_stream(module.current_stream(self.device))
        with accelerator.on_stream(self.stream):
            yield

    def _event(self) -> Any:
        return None if self.stream is None else self.stream.record_event()

    def _wait_for(self, event: Any) -> None:
        """Makes the compute stream wait for an event of the copy stream, if there is one."""
        if event is not None:
            accelerator.module(self.device).current_stream(self.device).wait_event(event)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)) or hasattr(value, "__dict__"):
        for part in value if isinstance(value, (list, tuple)) else vars(value).values():
            yield from _tensors_of(part)
