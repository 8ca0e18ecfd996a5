"""What one rank does in a step: kernels, bytes, FLOPs, collectives, and where the host waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from parallel3d.commands.dryrun.joined import Joined
from parallel3d.commands.dryrun.memory import AllocationCounter
from parallel3d.commands.dryrun.places import BLOCKS, LOSS, caller, part_of_step
from parallel3d.commands.dryrun.roofline import Gpu
from parallel3d.pretend.attention import FLASH, FLASH_BACKWARD
from parallel3d.pretend.machine import Kernel, Left, Observer, SimulatedMachine, StorageMemory

PARTS = ("gemm_layers", "gemm_head", "attention", "blocks", "loss", "optimizer")
PARTS += ("sharding", "other")
COMMUNICATION = "communication"
COLLECTIVES = frozenset(("allreduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"))
COLLECTIVES |= frozenset(("barrier", "send", "receive"))
COPIES = ("copy to the device", "copy to the host")
ATTENTION = {FLASH: 2, FLASH_BACKWARD: 5}  # GEMMs over the s × t scores (Dao et al. 2022)
aten = torch.ops.aten
_ALIKE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}
DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass
class Sums:
    """Of some kernels, in a step; a plain sum over micro-batches and what stands around them."""

    launches: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass
class Counts:
    """Of one rank and step.

    Attributes:
        parts: by `PARTS` and communication, whose kernels have no time here.
        sent: by group, bytes that leave this rank. calls: by group, collectives and messages.
        waits: "why (file:line)" → how often the host waited for the device.
    """

    parts: dict[str, Sums] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def sum(self, what: str) -> float:
        return sum(getattr(part, what) for part in self.parts.values())


class OpCounter(Observer):
    """Counts while it is one of the machine's observers.

    Args:
        names: of the process groups.
        compiled: joins the blocks' element-wise kernels as a compiler would.
        tf32: fp32 products are tf32's.
    """

    def __init__(self, machine: SimulatedMachine, gpu: Gpu, compiled: bool, tf32: bool) -> None:
        self.machine, self.gpu = machine, gpu
        self.memory = AllocationCounter(machine)
        self.joined = Joined() if compiled else None
        self.dtypes = DTYPES | ({torch.float32: "tf32"} if tf32 else {})
        self.names: Mapping[Any, str] = {}
        self.counting = False
        self.counts = Counts()

    def start(self) -> None:
        """From here on a step is counted."""
        self.counts, self.counting = Counts(), True
        self.memory.reset()

    def end(self) -> Counts:
        self._flush()
        self.memory.settle()
        self.counting = False
        return self.counts

    # --- memory --------------------------------------------------------------------------------

    def allocated(self, block: StorageMemory) -> None:
        if self.joined is not None:
            self.joined.began(block)
        in_kernel = self.machine.thread.fused is not None
        self.memory.allocated(block, hold=in_kernel or self._joins(part_of_step))

    def freed(self, block: Left) -> None:
        self.memory.freed(block)

    def _joins(self, part: Any) -> bool:
        return self.joined is not None and self.counting and part() == BLOCKS

    # --- kernels -------------------------------------------------------------------------------

    def kernel(self, kernel: Kernel) -> None:
        if not self.counting:
            self.memory.settle()
            return
        part, flops, dtype, head_dim = self._sort(kernel)
        if part == BLOCKS and self.joined is not None:
            self.joined.add(kernel)
            return
        if part != "optimizer":  # whose kernels stand beside those of the blocks
            self._flush()
        self.memory.settle()
        nbytes = sum(use.nbytes for use in kernel.reads) + sum(use.nbytes for use in kernel.writes)
        self._add(part, kernel.launches, nbytes, flops, dtype, head_dim)

    def _sort(self, kernel: Kernel) -> tuple[str, float, str, int]:
        """The part of the step, FLOPs, their type, and the width of attention's heads."""
        if kernel.call is None:
            if kernel.name in COLLECTIVES:
                return COMMUNICATION, 0.0, "", 0
            return ("other" if kernel.name in COPIES else part_of_step()), 0.0, "", 0
        operator, args, kwargs, out = kernel.call
        if kernel.name in ATTENTION:
            q, k = args
            flops = attention_flops(ATTENTION[kernel.name], q, k, kwargs["causal"])
            return "attention", flops, self.dtypes[q.dtype], q.shape[-1]
        packet = operator.overloadpacket
        count = flop_registry.get(_ALIKE.get(packet, packet))
        part = part_of_step()
        if count is None:
            return part, 0.0, "", 0
        flops = count(*args, **kwargs, out_val=out)
        first = next(a for a in args[::-1] if isinstance(a, Tensor))
        kind = "gemm_head" if part == LOSS else "gemm_layers"
        return kind, flops, self.dtypes.get(first.dtype, ""), 0

    def _add(
        self, part: str, launches: int, nbytes: float, flops: float, dtype: str, head_dim: int
    ) -> None:
        sums = self.counts.parts.setdefault(part, Sums())
        sums.launches += launches
        sums.bytes += nbytes
        sums.flops += flops
        if part != COMMUNICATION:
            sums.seconds += self.gpu.seconds(part, flops, nbytes, dtype, head_dim)

    def _flush(self) -> None:
        """What was joined so far is one kernel."""
        if self.joined is not None and self.joined.kernels:
            self._add(BLOCKS, 1, self.joined.take(), 0.0, "", 0)

    # --- communication, and the host -----------------------------------------------------------

    def collective(self, name: str, group: Any, tensor: Tensor) -> None:
        if self.counting:
            kind = self.names.get(group, group.description or "world")
            self.counts.sent[kind] += sent_bytes(name, tensor.nbytes, group.size())
            self.counts.calls[kind] += 1

    def host_wait(self, why: str) -> None:
        if self.counting:
            self.counts.waits[f"{why} ({caller()})"] += 1


def attention_flops(gemms: int, q: Tensor, k: Tensor, causal: bool) -> float:
    """Of `gemms` products over the scores of (b, heads, s, d) against (b, _, t, d): a causal kernel
    leaves out the blocks above the diagonal, half of them."""
    batch, heads, length, width = q.shape
    full = 2.0 * gemms * batch * heads * length * k.shape[-2] * width
    return full / 2 if causal else full


def sent_bytes(name: str, nbytes: int, size: int) -> float:
    """What a rank sends in a collective by ring; `nbytes`: of the tensor that it gives."""
    others = size - 1
    return {
        "allreduce": 2.0 * nbytes * others / size,
        "all_gather": 1.0 * nbytes * others,
        "reduce_scatter": nbytes * others / size,
        "all_to_all": nbytes * others / size,
        "broadcast": nbytes * others / size,
        "send": nbytes,
    }.get(name, 0.0)
