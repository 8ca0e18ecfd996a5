"""Counts what one rank does in a step: memory by kind, kernels, FLOPs, collectives, host waits.

A compiled block is estimated: TorchInductor needs the GPU that it compiles for. All kernels between
two that no compiler sees into (GEMMs, attention, collectives) count as one, which reads its inputs
once and writes once what is alive afterwards, as fused pointwise code and row reductions do. Column
sums (a norm's weight gradient) and the compiler's own choice of saved tensors are not modelled.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from parallel3d.config.fields import show
from parallel3d.config.schema import Config
from parallel3d.device.precision import COMPUTE
from parallel3d.errors import UserError
from parallel3d.estimate.analytic_memory import RankMemory
from parallel3d.estimate.devices import DEVICES
from parallel3d.estimate.network import bus_factor
from parallel3d.metrics.peak import TERA, Peak, datasheet_peak
from parallel3d.parameters.sharding import state_of
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

# Achievable fractions of datasheets, assumed to be the same for all GPUs, by an H200 in bf16.
_H200 = DEVICES["h200"]
SHARES = {
    # A square GEMM of 8192 reaches 785 TFLOP/s. The layers' GEMMs are smaller and thinner; those of
    # a vocabulary run in chunks of tokens.
    "gemm_layers": 690 / _H200.peak["bf16"],
    "gemm_head": 580 / _H200.peak["bf16"],
    "optimizer": 690 / _H200.peak["bf16"],  # Muon's products are of the layers' sizes
}
# Flash attention, of the FLOPs computed. H100, forward, no mask, 4k tokens (Shah et al. 2024,
# figure 5): heads of 64: 321 (FlashAttention-2) and 408 TFLOP/s (cuDNN), of 128: 368 and 609;
# backward and causal are slower.
NARROW = 64
ATTENTION_NARROW = 300 / _H200.peak["bf16"]  # heads up to 64
ATTENTION_WIDE = 450 / _H200.peak["bf16"]
BANDWIDTH = 4000 / _H200.memory_gb_s  # long element-wise kernels


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
    known = {t: datasheet_peak(name, t) for t in COMPUTE}
    peak = known[precision] if own is None else Peak(own * TERA, "launch.peak_tflops")
    if peak is None:
        raise UserError(
            f"cluster.gpu={show(name)} has no {precision} in the datasheets known here; "
            "give launch.peak_tflops, its dense peak."
        )
    peaks = {t: found.flops for t, found in known.items() if found is not None}
    return Gpu(name, peak, peaks | {precision: peak.flops}, 1e9 * bandwidth, 1e9 * memory)


BLOCKS, LOSS, OPTIMIZER, OTHER, SHARDING = "blocks", "loss", "optimizer", "other", "sharding"
PARTS = ("gemm_layers", "gemm_head", "attention", BLOCKS, LOSS, OPTIMIZER, SHARDING, OTHER)
COMMUNICATION = "communication"
OFFLOAD, COPIES = "offload", ("copy to the host", "copy to the device")
KINDS = RankMemory._fields[:-1]
OF_KERNELS = ("launches", "bytes", "flops", "seconds")
ATTENTION = {FLASH: 2, FLASH_BACKWARD: 5}  # GEMMs over the s × t scores (Dao et al. 2022)
COLLECTIVES = {  # the simulated device's names, and those of `bus_factor`
    **{op: op for op in ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")},
    **{"allreduce": "all_reduce", "send": "send_recv", "receive": "barrier"},  # only a send sends
}
aten = torch.ops.aten
_ALIKE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}


class Counts(Counter[tuple[str, str]]):
    """Counts of one rank and step.

    (one of `OF_KERNELS`, part of the step); ("sent", group): bytes that this rank sends; ("calls",
    group): collectives and messages; ("waits", "why (file:line)"): waits of the host; ("copied",
    one of `COPIES`): bytes of offloaded activations.
    """

    def of(self, what: str) -> dict[str, float]:
        return {name: number for (kind, name), number in self.items() if kind == what}

    def sum(self, what: str) -> float:
        return sum(self.of(what).values())


class FusedRun:
    """Kernels that a compiler fuses. Weak references: others would keep the blocks alive."""

    def __init__(self) -> None:
        self.kernels = 0
        self.reads: dict[tuple[ref[StorageMemory], Range], int] = {}
        self.writes: dict[tuple[ref[StorageMemory], Range], int] = {}
        self.own: set[ref[StorageMemory]] = set()  # blocks that were first written
        self.read: set[ref[StorageMemory]] = set()  # blocks that were first read

    def add(self, kernel: Kernel) -> None:
        self.kernels += 1
        for use in kernel.reads:
            block = ref(use.block)
            if block not in self.own:
                self.read.add(block)
                self.reads.setdefault((block, use.where), use.nbytes)
        for use in kernel.writes:
            block = ref(use.block)
            if block not in self.read:
                self.own.add(block)
            self.writes[block, use.where] = use.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that it reads and writes."""
        written = sum(nbytes for (block, _), nbytes in self.writes.items() if block() is not None)
        return sum(self.reads.values()) + written


class StepCounter(Observer):
    """Counts while it is one of the machine's observers.

    Memory that is allocated and freed inside of one kernel does not count: registers.

    Args:
        compiled: fuses the blocks' element-wise kernels as a compiler would.
        tf32: fp32 matmuls run in tf32.

    Attributes:
        live: allocated bytes by kind. peak, at_peak, peak_phase: since `start`.
    """

    def __init__(self, machine: SimulatedMachine, gpu: Gpu, compiled: bool, tf32: bool) -> None:
        self.machine, self.gpu = machine, gpu
        self.fused = FusedRun() if compiled else None
        other = "fp32" if tf32 else "tf32"  # of the two that are one type of tensors
        self.dtypes = {dtype: name for name, dtype in COMPUTE.items() if name != other}
        self.names: Mapping[Any, str] = {}  # process group → name
        self.counting, self.building = False, True
        self.live = dict.fromkeys(KINDS, 0)
        self.held: dict[int, tuple[int, str]] = {}  # id of memory in a kernel → bytes, kind
        self.known: set[int] = set()  # ids of memory allocated since this counter exists
        self._reset()

    def _reset(self) -> None:
        self.counts = Counts()
        self.machine.collect()
        self.peak, self.at_peak, self.peak_phase = 0, dict(self.live), ""
        self._compare()

    def start(self) -> None:
        """Starts to count a step; a new peak begins with the live memory."""
        self._reset()
        self.counting = True

    def end(self) -> Counts:
        self._flush()
        self._settle()
        self.counting = False
        return self.counts

    def _compare(self) -> None:
        total = sum(self.live.values())
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.live)
            self.peak_phase = "building the trainer" if self.building else phase_of_step()

    def allocated(self, block: StorageMemory) -> None:
        block.label = kind = "buffers" if self.building else kind_of_memory()
        self.known.add(id(block.memory))
        joins = self.fused is not None and self.counting and part_of_step() == BLOCKS
        if joins or self.machine.thread.fused is not None:
            self.held[id(block.memory)] = block.nbytes, kind
        else:
            self.live[kind] += block.nbytes
            self._compare()

    def freed(self, block: FreedMemory) -> None:
        key = id(block.memory)
        if key not in self.known:  # of an earlier trainer
            return
        self.known.remove(key)
        if self.held.pop(key, None) is None:
            self.live[block.label or "buffers"] -= block.nbytes

    def _settle(self) -> None:
        """Counts the held memory that outlives the kernel that has just ended."""
        if self.held:
            self.machine.collect()
            held, self.held = self.held, {}
            for nbytes, kind in held.values():
                self.live[kind] += nbytes
            self._compare()

    def _label(self, tensors: Iterable[Tensor], kind: str, keep: Collection[str] = ()) -> None:
        """Counts the memory of these tensors as `kind` from now on, unless it is one of `keep`."""
        for tensor in tensors:
            local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel() == 0:
                continue
            # With the attributes of simulated_device/tensor.py.
            block = self.machine.block_of(local.data_, local.device_index)
            if block.label not in keep:
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
        self._label([*parameters, *(s.param for s in segments)], "masters" if own else "parameters")
        gradients = [state_of(p).main_grad for p in trainer.parameters.values()]
        self._label([g for g in gradients if g is not None], "gradients")
        self._label((s.grad for s in segments), "gradients")
        self._label((s.master for s in segments), "masters", keep=("parameters", "masters"))
        for group in trainer.optimizer.groups:
            state = [t for tensors in group.state.values() for t in tensors]
            self._label([*state, *group.steps], "optimizer")

    def kernel(self, kernel: Kernel) -> None:
        if not self.counting:
            self._settle()
            return
        if kernel.name in COPIES and part_of_step() == OFFLOAD:  # on a stream of their own
            self._settle()
            nbytes = sum(use.nbytes for use in (*kernel.reads, *kernel.writes))
            self.counts["copied", kernel.name] += nbytes
            return
        part, flops, dtype, head_dim = self._sort(kernel)
        if part == BLOCKS and self.fused is not None:
            self.fused.add(kernel)
            return
        if part != OPTIMIZER:  # the optimizer's kernels do not interrupt those of the blocks
            self._flush()
        self._settle()
        nbytes = sum(use.nbytes for use in (*kernel.reads, *kernel.writes))
        self._add(part, kernel.launches, nbytes, flops, dtype, head_dim)

    def _sort(self, kernel: Kernel) -> tuple[str, float, str, int]:
        """Returns the part of the step, FLOPs, their type, and the width of attention's heads."""
        if kernel.name in COLLECTIVES and kernel.call is None:
            return COMMUNICATION, 0.0, "", 0
        if kernel.name in COPIES:
            return OTHER, 0.0, "", 0
        part = part_of_step()
        if kernel.call is None:
            return part, 0.0, "", 0
        operator, args, kwargs, out = kernel.call
        if kernel.name in ATTENTION:
            q, k = args
            batch, heads, length, width = q.shape
            # A causal kernel skips the blocks above the diagonal, which ends at the last key.
            keys = k.shape[-2] - kwargs["causal"] * length / 2
            flops = 2.0 * ATTENTION[kernel.name] * batch * heads * length * keys * width
            return "attention", flops, self.dtypes[q.dtype], width
        packet = operator.overloadpacket
        count = flop_registry.get(_ALIKE.get(packet, packet))
        if count is None:
            return part, 0.0, "", 0
        flops = count(*args, **kwargs, out_val=out)
        first = next(a for a in args[::-1] if isinstance(a, Tensor))
        kind = {LOSS: "gemm_head", OPTIMIZER: OPTIMIZER}.get(part, "gemm_layers")  # Muon's too
        return kind, flops, self.dtypes.get(first.dtype, ""), 0

    def _add(
        self, part: str, launches: int, nbytes: float, flops: float, dtype: str, head_dim: int
    ) -> None:
        timed = part != COMMUNICATION
        seconds = self.gpu.seconds(part, flops, nbytes, dtype, head_dim) if timed else 0.0
        for what, number in zip(OF_KERNELS, (launches, nbytes, flops, seconds), strict=True):
            self.counts[what, part] += number  # type: ignore[assignment]

    def _flush(self) -> None:
        """Counts the fused run so far as one kernel."""
        if self.fused is not None and self.fused.kernels:
            self._add(BLOCKS, 1, self.fused.nbytes, 0.0, "", 0)
            self.fused = FusedRun()

    def collective(self, name: str, group: Any, tensor: Tensor) -> None:
        if self.counting:
            kind, size = self.names.get(group, group.description or "world"), group.size()
            whole = tensor.nbytes * (size if name == "all_gather" else 1)  # the tensor is an input
            self.counts["sent", kind] += whole * bus_factor(COLLECTIVES.get(name, "barrier"), size)
            self.counts["calls", kind] += 1

    def host_wait(self, why: str) -> None:
        if self.counting:
            self.counts["waits", f"{why} ({caller()})"] += 1


# The call stack decides where in the program a kernel is launched or memory is allocated: its
# innermost frame in one of these files. (Part of a file's path, function or None for any, part of
# the step, kind of memory, phase); the first that matches counts, and where it has None the caller
# decides. A backward of autograd has no frame of ours: it belongs to the blocks.
_LOSS, _DATA_PARALLEL = "/parallel3d/tensor_parallel/loss.py", "/parallel3d/data_parallel/"
_EXECUTOR, _FSDP = "/parallel3d/pipeline/executor.py", "/torch/distributed/fsdp/"
_FSDP_PARAM = f"{_FSDP}_fully_shard/_fsdp_param.py"
_FRAMES: tuple[tuple[str, str | None, str | None, str | None, str | None], ...] = (
    (_LOSS, "run", LOSS, "activations", "head and loss"),
    (_LOSS, None, LOSS, "logits", "head and loss"),
    ("/parallel3d/tensor_parallel/embedding.py", None, OTHER, "activations", None),
    ("/parallel3d/tensor_parallel/mappings.py", None, None, "activations", None),
    ("/parallel3d/tensor_parallel/", None, BLOCKS, "activations", None),
    ("/parallel3d/parameters/gradients.py", None, None, "buffers", None),  # matmuls to be added
    ("/parallel3d/models/embedding_and_head.py", None, OTHER, "activations", None),
    ("/parallel3d/models/", None, BLOCKS, "activations", None),
    ("/parallel3d/optim.py", None, OPTIMIZER, "buffers", "optimizer"),
    ("/parallel3d/muon.py", None, OPTIMIZER, "buffers", "optimizer"),
    (_DATA_PARALLEL, "all_gather_params", OPTIMIZER, "buffers", "optimizer"),
    (_DATA_PARALLEL, "finish_step", OPTIMIZER, "buffers", "reduction of the gradients"),
    (_DATA_PARALLEL, None, OPTIMIZER, "buffers", None),
    (_FSDP_PARAM, "to_accumulated_grad_if_needed", SHARDING, "gradients", None),
    (_FSDP_PARAM, None, SHARDING, "parameters", None),  # gathered
    (_FSDP, None, SHARDING, "buffers", None),
    ("/parallel3d/pipeline/offload.py", None, OFFLOAD, "activations", None),
    (_EXECUTOR, "_forward", OTHER, "activations", "forward"),
    (_EXECUTOR, "_backward", OTHER, "activations", "backward"),
    (_EXECUTOR, "_weights", OTHER, "activations", "weight gradients"),
    (_EXECUTOR, "_communicate", OTHER, "activations", "messages between stages"),
    ("/parallel3d/pipeline/", None, OTHER, "activations", None),
    ("/parallel3d/data/", None, OTHER, None, None),
    ("/parallel3d/trainer.py", None, OTHER, "buffers", None),
)  # fmt: skip


@cache
def _frame_facts(file: str, function: str) -> tuple[str | None, ...]:
    path = file.replace("\\", "/")
    rows = (row[2:] for row in _FRAMES if row[0] in path and row[1] in (None, function))
    return next(rows, (None, None, None))


def _innermost(column: int) -> str | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = _frame_facts(frame.f_code.co_filename, frame.f_code.co_name)[column]
        if found is not None:
            return found
        frame = frame.f_back
    return None


def part_of_step() -> str:
    """Returns blocks, loss, optimizer, sharding (FSDP2's copies) or other."""
    return _innermost(0) or BLOCKS


def kind_of_memory() -> str:
    """Returns activations, logits, buffers, or FSDP2's parameters and gradients."""
    return _innermost(1) or "activations"


def phase_of_step() -> str:
    """Returns the phase in words."""
    by_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    apart = "backward" if by_autograd else "between forward and backward passes"
    return _innermost(2) or apart


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
