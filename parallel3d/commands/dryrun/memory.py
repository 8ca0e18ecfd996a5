"""Bytes of one pretended device by what they are for, and where they peak."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d.commands.dryrun.places import kind_of_memory, phase_of_step
from parallel3d.pretend.machine import Left, SimulatedMachine, StorageMemory

if TYPE_CHECKING:
    from parallel3d.trainer import Trainer

KINDS = ("parameters", "gradients", "masters", "optimizer", "activations", "logits", "buffers")
BUILDING = "building the trainer"


class AllocationCounter:
    """What is allocated, by kind; the largest sum since `start_phase`, and what it was made of.

    Memory that begins and ends inside of one kernel (`hold`) never counts: it is in registers.
    """

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine
        self.live = dict.fromkeys(KINDS, 0)
        self.phase: str | None = BUILDING  # None: told by the callers
        self.held: dict[int, tuple[int, str]] = {}  # id of the memory → bytes, kind
        self.known: set[int] = set()  # ids of the memory that was given out under our eyes
        self.reset()

    def reset(self) -> None:
        """The peak begins anew, with what is live now."""
        self.machine.collect()
        self.peak, self.at_peak, self.peak_phase = 0, dict(self.live), ""
        self._compare()

    @property
    def total(self) -> int:
        return sum(self.live.values())

    def _compare(self) -> None:
        total = self.total
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.live)
            self.peak_phase = self.phase or phase_of_step()

    def allocated(self, block: StorageMemory, hold: bool) -> None:
        kind = kind_of_memory() if self.phase is None else "buffers"
        block.label = kind
        self.known.add(id(block.memory))
        if hold:
            self.held[id(block.memory)] = (block.nbytes, kind)
            return
        self.live[kind] += block.nbytes
        self._compare()

    def freed(self, left: Left) -> None:
        key = id(left.memory)
        if key not in self.known:  # of a trainer before this one
            return
        self.known.remove(key)
        if self.held.pop(key, None) is None:
            self.live[left.label or "buffers"] -= left.nbytes

    def settle(self) -> None:
        """What was held and is still there was written by the kernel that has just ended."""
        if not self.held:
            return
        self.machine.collect()
        held, self.held = self.held, {}
        for nbytes, kind in held.values():
            self.live[kind] += nbytes
        self._compare()

    def label(self, tensors: Iterable[Tensor], kind: str, keep: Iterable[str] = ()) -> None:
        """From here on the memory of these tensors counts as `kind`, unless it is one of `keep`."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel() == 0:
                continue
            block = self.machine.block_of(local.data_, local.index)  # type: ignore[attr-defined]
            if block.label in keep:
                continue
            self.live[block.label or "buffers"] -= block.nbytes
            self.live[kind] += block.nbytes
            block.label = kind

    def label_state(self, trainer: Trainer) -> None:
        """Finds out what of the memory are parameters, gradients, masters and optimizer state."""
        parameters = [p.detach() for p in trainer.parameters.values()]
        segments = trainer.data_parallel.segments
        # In fp32 or better the optimizer steps the parameters themselves; what FSDP2 shards is
        # never read as it is, but in the compute type.
        own = {p.dtype for p in parameters} != {trainer.dtype}
        self.label(parameters, "masters" if own else "parameters")
        self.label((s.param for s in segments), "masters" if own else "parameters")
        gradients = [getattr(p, "main_grad", None) for p in trainer.parameters.values()]
        self.label((g for g in gradients if g is not None), "gradients")
        self.label((s.grad for s in segments), "gradients")
        self.label((s.master for s in segments), "masters", keep=("parameters", "masters"))
        for group in trainer.optimizer.groups:
            state = [t for tensors in group.state.values() for t in tensors]
            self.label([*state, *group.steps], "optimizer")
