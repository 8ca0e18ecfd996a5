"""Counts what one rank does in a step: memory by kind, kernels, FLOPs, collectives, host waits.

A compiled block is estimated: TorchInductor needs the GPU that it compiles for. All kernels between
two that no compiler sees into (GEMMs, attention, collectives) count as one, which reads its inputs
once and writes once what is alive afterwards, as fused pointwise code and row reductions do. Column
sums (a norm's weight gradient) and the compiler's own choice of saved tensors are not modelled.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
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
from parallel3d.estimate.devices import DEVICES
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


class FusedRun:
    """Kernels that a compiler fuses. Blocks go by numbers: references would keep them alive."""

    def __init__(self) -> None:
        self._numbers = count()
        self._number: dict[int, int] = {}  # id of a block → number of the newest block with this id
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
        """Ends the run and returns the bytes that it reads and writes."""
        written = sum(nbytes for block, nbytes in self._writes.values() if block() is not None)
        nbytes = sum(self._reads.values()) + written
        self._clear()
        return nbytes


# Achievable fractions of datasheets, assumed to be the same for all GPUs.

# Of the dense peak, by an H200 in bf16: a square GEMM of 8192 reaches 785 TFLOP/s. The layers'
# GEMMs are smaller and thinner; those of a vocabulary run in chunks of tokens.
_H200 = DEVICES["h200"]
GEMM_LAYERS = 690 / _H200.peak["bf16"]
GEMM_HEAD = 580 / _H200.peak["bf16"]
# Flash attention, of the FLOPs computed. H100, forward, no mask, 4k tokens (Shah et al. 2024,
# figure 5): heads of 64: 321 (FlashAttention-2) and 408 TFLOP/s (cuDNN), of 128: 368 and 609;
# backward and causal are slower.
ATTENTION_NARROW = 300 / _H200.peak["bf16"]  # heads up to 64
ATTENTION_WIDE = 450 / _H200.peak["bf16"]
NARROW = 64
BANDWIDTH = 4000 / _H200.memory_gb_s  # long element-wise kernels

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
        """Returns seconds of a kernel; `kind`: gemm_layers, gemm_head, attention or another."""
        moving = nbytes / (self.bandwidth * BANDWIDTH)
        if not flops:
            return moving
        share = SHARES.get(kind, ATTENTION_NARROW if head_dim <= NARROW else ATTENTION_WIDE)
        return max(moving, flops / (self.peaks.get(dtype, self.peak.flops) * share))


def gpu_of(config: Config) -> Gpu:
    """Returns the cluster's GPU. Raises UserError if it is not configured or has no datasheet."""
    cluster, precision = config.cluster, config.precision.name
    name, memory, bandwidth = cluster.gpu, cluster.gpu_memory_gb, cluster.gpu_memory_gb_per_s
    if name is None or memory is None or bandwidth is None:
        keys = {"gpu": name, "gpu_memory_gb": memory, "gpu_memory_gb_per_s": bandwidth}
        missing = " ".join(f"cluster.{key}=…" for key, value in keys.items() if value is None)
        raise UserError(
            f"cluster={cluster.name} does not say what its GPUs are; the nearest is "
            f"cluster=dgx_h100, or {missing}."
        )
    own = config.launch.peak_tflops
    known = {t: datasheet_peak(name, t) for t in ("fp64", "fp32", "tf32", "bf16", "fp16")}
    peak = known[precision] if own is None else Peak(own * TERA, "launch.peak_tflops")
    if peak is None:
        raise UserError(
            f"cluster.gpu={show(name)} has no {precision} in the datasheets known here; "
            "give launch.peak_tflops, its dense peak."
        )
    peaks = {t: found.flops for t, found in known.items() if found is not None}
    if own is not None:
        peaks[precision] = peak.flops
    return Gpu(name, peak, peaks, 1e9 * bandwidth, 1e9 * memory)


PARTS = (
    *("gemm_layers", "gemm_head", "attention", "blocks", "loss", "optimizer"),
    *("sharding", "other"),
)
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
    """Sums over some kernels of a step."""

    launches: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass
class Counts:
    """Counts of one rank and step.

    Attributes:
        parts: by `PARTS` and communication, whose kernels have no time.
        sent: by group, bytes that this rank sends. calls: by group, collectives and messages.
        waits: "why (file:line)" → how often the host waited for the device.
    """

    parts: dict[str, Sums] = field(default_factory=dict)
    sent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def sum(self, what: str) -> float:
        return sum(getattr(part, what) for part in self.parts.values())


class OpCounter(Observer):
    """Counts while it is one of the machine's observers.

    Args:
        compiled: fuses the blocks' element-wise kernels as a compiler would.
        tf32: fp32 matmuls run in tf32.
    """

    def __init__(self, machine: SimulatedMachine, gpu: Gpu, compiled: bool, tf32: bool) -> None:
        self.machine, self.gpu = machine, gpu
        self.memory = AllocationCounter(machine)
        self.fused = FusedRun() if compiled else None
        self.dtypes = DTYPES | ({torch.float32: "tf32"} if tf32 else {})
        self.names: Mapping[Any, str] = {}  # process group → name
        self.counting = False
        self.counts = Counts()

    def start(self) -> None:
        """Starts to count a step."""
        self.counts, self.counting = Counts(), True
        self.memory.reset()

    def end(self) -> Counts:
        self._flush()
        self.memory.settle()
        self.counting = False
        return self.counts

    def allocated(self, block: StorageMemory) -> None:
        if self.fused is not None:
            self.fused.began(block)
        in_kernel = self.machine.thread.fused is not None
        self.memory.allocated(block, hold=in_kernel or self._fuses(part_of_step))

    def freed(self, block: FreedMemory) -> None:
        self.memory.freed(block)

    def _fuses(self, part: Callable[[], str]) -> bool:
        return self.fused is not None and self.counting and part() == BLOCKS

    def kernel(self, kernel: Kernel) -> None:
        if not self.counting:
            self.memory.settle()
            return
        part, flops, dtype, head_dim = self._sort(kernel)
        if part == BLOCKS and self.fused is not None:
            self.fused.add(kernel)
            return
        if part != "optimizer":  # the optimizer's kernels do not interrupt those of the blocks
            self._flush()
        self.memory.settle()
        nbytes = sum(use.nbytes for use in kernel.reads) + sum(use.nbytes for use in kernel.writes)
        self._add(part, kernel.launches, nbytes, flops, dtype, head_dim)

    def _sort(self, kernel: Kernel) -> tuple[str, float, str, int]:
        """Returns the part of the step, FLOPs, their type, and the width of attention's heads."""
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
        """Counts the fused run so far as one kernel."""
        if self.fused is not None and self.fused.kernels:
            self._add(BLOCKS, 1, self.fused.take(), 0.0, "", 0)

    def collective(self, name: str, group: Any, tensor: Tensor) -> None:
        if self.counting:
            kind = self.names.get(group, group.description or "world")
            self.counts.sent[kind] += sent_bytes(name, tensor.nbytes, group.size())
            self.counts.calls[kind] += 1

    def host_wait(self, why: str) -> None:
        if self.counting:
            self.counts.waits[f"{why} ({caller()})"] += 1


def attention_flops(gemms: int, q: Tensor, k: Tensor, causal: bool) -> float:
    """Returns FLOPs of `gemms` matmuls over the scores of (b, heads, s, d) against (b, _, t, d); a
    causal kernel skips half of them, the blocks above the diagonal."""
    batch, heads, length, width = q.shape
    full = 2.0 * gemms * batch * heads * length * k.shape[-2] * width
    return full / 2 if causal else full


def sent_bytes(name: str, nbytes: int, size: int) -> float:
    """Returns the bytes that a rank sends in a ring collective; `nbytes`: of its input."""
    others = size - 1
    return {
        "allreduce": 2.0 * nbytes * others / size,
        "all_gather": 1.0 * nbytes * others,
        "reduce_scatter": nbytes * others / size,
        "all_to_all": nbytes * others / size,
        "broadcast": nbytes * others / size,
        "send": nbytes,
    }.get(name, 0.0)


KINDS = ("parameters", "gradients", "masters", "optimizer", "activations", "logits", "buffers")
BUILDING = "building the trainer"


class AllocationCounter:
    """Allocated bytes by kind, and their peak since `reset`.

    Memory that is allocated and freed inside of one kernel (`hold`) does not count: registers.
    """

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine
        self.live = dict.fromkeys(KINDS, 0)
        self.phase: str | None = BUILDING  # None: by the call stack
        self.held: dict[int, tuple[int, str]] = {}  # id of the memory → bytes, kind
        self.known: set[int] = set()  # ids of memory allocated since this counter exists
        self.reset()

    def reset(self) -> None:
        """Starts a new peak with the live memory."""
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
        if key not in self.known:  # of an earlier trainer
            return
        self.known.remove(key)
        if self.held.pop(key, None) is None:
            self.live[left.label or "buffers"] -= left.nbytes

    def settle(self) -> None:
        """Counts the held memory that outlives the kernel that has just ended."""
        if not self.held:
            return
        self.machine.collect()
        held, self.held = self.held, {}
        for nbytes, kind in held.values():
            self.live[kind] += nbytes
        self._compare()

    def label(self, tensors: Iterable[Tensor], kind: str, keep: Collection[str] = ()) -> None:
        """Counts the memory of these tensors as `kind` from now on, unless it is one of `keep`."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel() == 0:
                continue
            simulated: Any = local  # with the attributes of simulated_device/tensor.py
            block = self.machine.block_of(simulated.data_, simulated.device_index)
            if block.label in keep:
                continue
            self.live[block.label or "buffers"] -= block.nbytes
            self.live[kind] += block.nbytes
            block.label = kind

    def label_state(self, trainer: Trainer) -> None:
        """Labels parameters, gradients, masters and optimizer state."""
        parameters = [p.detach() for p in trainer.parameters.values()]
        segments = trainer.data_parallel.segments
        # In fp32 or better the optimizer steps the parameters themselves; FSDP2's shards are only
        # read in the compute type.
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


# The call stack decides where in the program a kernel is launched or memory is allocated: its
# innermost frame in a file of these tables. A backward of autograd has no frame of ours: it belongs
# to the blocks.


BLOCKS, LOSS, OPTIMIZER, OTHER = "blocks", "loss", "optimizer", "other"
SHARDING = "sharding"

# (part of a file's path, part of the step); the first match counts; None: the caller decides.
_PARTS = (
    ("/parallel3d/tensor_parallel/loss.py", LOSS),
    ("/parallel3d/tensor_parallel/layers.py", OTHER),
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
# (part of a file's path, function or None for any, kind of memory); the first match counts.
_KINDS = (
    ("/parallel3d/tensor_parallel/loss.py", "train", "activations"),  # of the hidden states
    ("/parallel3d/tensor_parallel/loss.py", None, "logits"),
    ("/parallel3d/parameters/gradients.py", None, "buffers"),  # matmuls to be added
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
    ("/parallel3d/optim.py", None, "optimizer"),
    ("/parallel3d/data_parallel/", "all_gather_params", "optimizer"),
    ("/parallel3d/data_parallel/", "finish_step", "reduction of the gradients"),
)


class FrameFacts(NamedTuple):
    """Facts about the code of a frame; None: unknown."""

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
        found = FrameFacts(part, next(iter(kinds), None), next(iter(phases), None))
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
    """Returns blocks, loss, optimizer, sharding (FSDP2's copies) or other."""
    return _first(0, sys._getframe(1)) or BLOCKS


def kind_of_memory() -> str:
    """Returns activations, logits, buffers, or FSDP2's parameters and gradients."""
    return _first(1, sys._getframe(1)) or "activations"


def phase_of_step() -> str:
    """Returns the phase in words."""
    found = _first(2, sys._getframe(1))
    if found is not None:
        return found
    by_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    return "backward" if by_autograd else "between forward and backward passes"


def caller() -> str:
    """Returns file:line of the innermost frame of parallel3d outside of the simulated device."""
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
