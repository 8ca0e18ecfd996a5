"""What a compiler would make of a block's element-wise kernels: an estimate.

TorchInductor cannot be asked without the GPU that it writes for. Here all kernels between two that
no compiler looks into (GEMMs, attention, collectives) are taken for one, which reads once what was
there before and writes once what is still there afterwards. That is what pointwise code and the
reductions along rows come to. A sum along columns (a norm's weight gradient) needs a kernel of its
own, and what is kept for the backward is chosen anew by the compiler: neither is known here.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from parallel3d.config.fields import show
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.metrics.peak import TERA, Peak, datasheet_peak
from parallel3d.simulated_device.attention import FLASH, FLASH_BACKWARD
from parallel3d.simulated_device.machine import (
    FreedMemory,
    Kernel,
    Observer,
    Range,
    SimulatedMachine,
    StorageMemory,
)

if TYPE_CHECKING:
    from parallel3d.trainer import Trainer


class Joined:
    """A run of kernels. Blocks go by numbers, so that none is kept alive here."""

    def __init__(self) -> None:
        self._numbers = count()
        self._number: dict[int, int] = {}  # id of a block → its number, newest of that id
        self._clear()

    def _clear(self) -> None:
        self.kernels = 0
        self._reads: dict[tuple[int, Range], int] = {}
        self._writes: dict[tuple[int, Range], tuple[ref[StorageMemory], int]] = {}
        self._own: set[int] = set()  # blocks that were first written
        self._read: set[int] = set()  # blocks that were first read

    def began(self, block: StorageMemory) -> None:
        self._number[id(block)] = next(self._numbers)

    def add(self, kernel: Kernel) -> None:
        self.kernels += 1
        for use in kernel.reads:
            block = self._number.get(id(use.block), -1)
            if block not in self._own:
                self._read.add(block)
                self._reads.setdefault((block, use.where), use.nbytes)
        for use in kernel.writes:
            block = self._number.get(id(use.block), -1)
            if block not in self._read:
                self._own.add(block)
            self._writes[block, use.where] = ref(use.block), use.nbytes

    def take(self) -> int:
        """Bytes read and written by the run, which ends here."""
        written = sum(nbytes for block, nbytes in self._writes.values() if block() is not None)
        nbytes = sum(self._reads.values()) + written
        self._clear()
        return nbytes


# Seconds of a kernel on a GPU: what it computes, or what it reads and writes, whichever is longer.
#
# A datasheet's peaks are never reached. How much of them is attainable is assumed here, in one
# place and the same for all GPUs, until a card has measured it.


# Of the dense peak, by H200 in bf16 (989.4 TFLOP/s). A square GEMM of 8192 measures 785 there; the
# layers' GEMMs are smaller and thinner, those of a head over a vocabulary run in chunks of tokens.
GEMM_LAYERS = 690 / 989.4
GEMM_HEAD = 580 / 989.4
# Flash attention, of the FLOPs really computed. H100, forward, without a mask, 4k tokens (Shah et
# al. 2024, figure 5): heads of 64: 321 (FlashAttention-2) and 408 TFLOP/s (cuDNN), of 128: 368 and
# 609; backward and causal are slower.
ATTENTION_NARROW = 300 / 989.4  # heads up to 64
ATTENTION_WIDE = 450 / 989.4
NARROW = 64
# H200: 4.0 of 4.8 TB/s, as long element-wise kernels get them.
BANDWIDTH = 4.0 / 4.8

SHARES = {"gemm_layers": GEMM_LAYERS, "gemm_head": GEMM_HEAD}


@dataclass(frozen=True)
class Gpu:
    """One GPU of the cluster.

    Attributes:
        peak: in the run's compute type, for MFU. peaks: FLOP/s by type (`metrics.peak`'s names).
        bandwidth: B/s of its memory. memory: bytes.
    """

    name: str
    peak: Peak
    peaks: dict[str, float]
    bandwidth: float
    memory: float

    def seconds(self, kind: str, flops: float, nbytes: float, dtype: str, head_dim: int) -> float:
        """Of one kernel: `kind` is gemm_layers, gemm_head, attention, or anything else."""
        moving = nbytes / (self.bandwidth * BANDWIDTH)
        if not flops:
            return moving
        share = SHARES.get(kind, ATTENTION_NARROW if head_dim <= NARROW else ATTENTION_WIDE)
        return max(moving, flops / (self.peaks.get(dtype, self.peak.flops) * share))


def gpu_of(config: Config) -> Gpu:
    """The cluster's GPU.

    Raises:
        UserError: the cluster does not say which GPU it has, or the datasheets do not know it.
    """
    cluster, precision = config.cluster, config.precision.name
    told = {
        "cluster.gpu": cluster.gpu,
        "cluster.gpu_memory_gb": cluster.gpu_memory_gb,
        "cluster.gpu_memory_gb_per_s": cluster.gpu_memory_gb_per_s,
    }
    missing = [name for name, value in told.items() if value is None]
    if missing:
        raise UserError(
            f"cluster={cluster.name} does not say what its GPUs are; the nearest is "
            f"cluster=dgx_h100, or {' '.join(f'{name}=…' for name in missing)}."
        )
    own = config.launch.peak_tflops
    known = {t: datasheet_peak(cluster.gpu, t) for t in ("fp64", "fp32", "tf32", "bf16", "fp16")}
    peak = known[precision] if own is None else Peak(own * TERA, "launch.peak_tflops")
    if peak is None:
        raise UserError(
            f"cluster.gpu={show(cluster.gpu)} has no {precision} in the datasheets known here; "
            "give launch.peak_tflops, its dense peak."
        )
    peaks = {name: found.flops for name, found in known.items() if found is not None}
    if own is not None:
        peaks[precision] = peak.flops
    return Gpu(
        cluster.gpu, peak, peaks, 1e9 * cluster.gpu_memory_gb_per_s, 1e9 * cluster.gpu_memory_gb
    )


# What one rank does in a step: kernels, bytes, FLOPs, collectives, and where the host waits.


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

    def freed(self, block: FreedMemory) -> None:
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


# Bytes of one simulated device by what they are for, and where they peak.


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

    def freed(self, left: FreedMemory) -> None:
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
            block = self.machine.block_of(local.data_, local.device_index)  # type: ignore[attr-defined]
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


# Where in the program a kernel is launched or memory is asked for, told by the callers' frames.
#
# The innermost frame of a known file decides. A backward that autograd runs by itself has none of
# ours on its stack: what no rule knows is of the blocks, whose operators those are.


BLOCKS, LOSS, OPTIMIZER, OTHER = "blocks", "loss", "optimizer", "other"
SHARDING = "sharding"

# (part of a file's path, the part of the step), the first that fits; None: that of its caller.
_PARTS = (
    ("/parallel3d/tensor_parallel/loss.py", LOSS),
    ("/parallel3d/tensor_parallel/loss.py", LOSS),
    ("/parallel3d/tensor_parallel/embedding.py", OTHER),
    ("/parallel3d/parameters/gradients.py", None),
    ("/parallel3d/tensor_parallel/mappings.py", None),
    ("/parallel3d/models/embedding_and_head.py", OTHER),
    ("/parallel3d/models/", BLOCKS),
    ("/parallel3d/tensor_parallel/", BLOCKS),
    ("/parallel3d/optim/", OPTIMIZER),
    ("/parallel3d/data_parallel/", OPTIMIZER),
    ("/torch/distributed/fsdp/", SHARDING),
    ("/parallel3d/pipeline/", OTHER),
    ("/parallel3d/data/", OTHER),
    ("/parallel3d/trainer.py", OTHER),
)
# (part of a file's path, function or None for any, the kind of memory), the first that fits.
_KINDS = (
    ("/parallel3d/tensor_parallel/loss.py", "train", "activations"),  # of the hidden states
    ("/parallel3d/tensor_parallel/loss.py", None, "logits"),
    ("/parallel3d/tensor_parallel/loss.py", None, "logits"),
    ("/parallel3d/parameters/gradients.py", None, "buffers"),  # products to be added
    ("/fsdp/_fully_shard/_fsdp_param.py", "to_accumulated_grad_if_needed", "gradients"),
    ("/fsdp/_fully_shard/_fsdp_param.py", None, "parameters"),  # gathered
    ("/torch/distributed/fsdp/", None, "buffers"),
    ("/parallel3d/data_parallel/", None, "buffers"),
    ("/parallel3d/optim/", None, "buffers"),
    ("/parallel3d/models/", None, "activations"),
    ("/parallel3d/tensor_parallel/", None, "activations"),
    ("/parallel3d/pipeline/", None, "activations"),
    ("/parallel3d/trainer.py", None, "buffers"),
)
_PHASES = (
    ("/parallel3d/tensor_parallel/loss.py", None, "head and loss"),
    ("/parallel3d/pipeline/executor.py", "_forward", "forward"),
    ("/parallel3d/pipeline/executor.py", "_backward", "backward"),
    ("/parallel3d/pipeline/executor.py", "_weights", "weight gradients"),
    ("/parallel3d/pipeline/executor.py", "_communicate", "messages between stages"),
    ("/parallel3d/optim/optimizer.py", None, "optimizer"),
    ("/parallel3d/data_parallel/", "all_gather_params", "optimizer"),
    ("/parallel3d/data_parallel/", "finish_step", "reduction of the gradients"),
)


class FrameFacts(NamedTuple):
    """What the code of a frame says; None: nothing."""

    part: str | None
    kind: str | None
    phase: str | None


_known: dict[CodeType, FrameFacts] = {}


def _facts(code: CodeType) -> FrameFacts:
    found = _known.get(code)
    if found is None:
        path, name = code.co_filename.replace("\\", "/"), code.co_name
        part = next((part for where, part in _PARTS if where in path), None)
        kinds, phases = (
            [what for where, function, what in rules if where in path and function in (None, name)]
            for rules in (_KINDS, _PHASES)
        )
        found = FrameFacts(part, *(next(iter(some), None) for some in (kinds, phases)))
        _known[code] = found
    return found


def _first(index: int, start: FrameType | None) -> str | None:
    frame = start
    while frame is not None:
        found = _facts(frame.f_code)[index]
        if found is not None:
            return found
        frame = frame.f_back
    return None


def part_of_step() -> str:
    """blocks, loss, optimizer, sharding (what FSDP2 copies) or other."""
    return _first(0, sys._getframe(1)) or BLOCKS


def kind_of_memory() -> str:
    """activations, logits, buffers, and what FSDP2 makes of parameters and gradients."""
    return _first(1, sys._getframe(1)) or "activations"


def phase_of_step() -> str:
    """In words."""
    found = _first(2, sys._getframe(1))
    if found is not None:
        return found
    by_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    return "backward" if by_autograd else "between forward and backward passes"


def caller() -> str:
    """file:line of the innermost frame of parallel3d outside of the simulated device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        inside = path.rpartition("/parallel3d/")[2]
        if inside != path and not inside.startswith(
            ("simulated_device/", "commands/dryrun/", "device/accelerator.py")
        ):
            return f"{inside}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
