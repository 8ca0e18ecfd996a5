"""Runs a step of one rank without its peers, on a device whose tensors have no values.

Memory is counted by kind, kernels and FLOPs by part of the step, collectives by group, and host
waits by reason. With `compile=true` the blocks run in eager mode, because TorchInductor needs the
GPU for which it compiles.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.collectives import bus_factor
from parallel3d.blueprint.in_flight import states_of
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.build import Trainer, groups_of_run
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.fields import show
from parallel3d.device.datasheets import DEVICES
from parallel3d.device.precision import COMPUTE
from parallel3d.errors import UserError
from parallel3d.metrics.peak import TERA, Peak, datasheet_peak
from parallel3d.parameters.state import state_of
from parallel3d.resolve import layout_of
from parallel3d.run_config import Config
from parallel3d.schedules.messages import SENDS
from parallel3d.simulated_device.device import TYPE, this_machine
from parallel3d.simulated_device.machine import Kernel, Observer, SimulatedMachine, StorageMemory
from parallel3d.trace.products import attention_of, name_of, product_of
from parallel3d.trace.world import (
    COLLECTIVES,
    machine_without_values,
    names_of,
    samples_for,
    whole_bytes,
    world_of,
)

if TYPE_CHECKING:
    from parallel3d.optim.own import OptimizerFactory

# Achievable fractions of datasheet peaks, which are assumed to be the same for all GPUs. They were
# measured in a training step of llama_1b on one H100 with micro-batches of 8 in bf16 (docs/gpu.md),
# where the power limit bounds the clock.
_H100 = DEVICES["h100"]
SHARES = {
    # A single square GEMM of size 8192 reaches 795 TFLOP/s outside a step.
    "gemm_layers": 757 / _H100.peak["bf16"],
    "gemm_head": 771 / _H100.peak["bf16"],
    "optimizer": 757 / _H100.peak["bf16"],  # Muon's products have the sizes of the layers' GEMMs
}
# Rates of cuDNN's causal attention, forward and backward, without the masked FLOPs. Outside a step
# it reaches 399 TFLOP/s with heads of 64 dimensions and 507 with 128. In the step, whose heads have
# 64 dimensions, it reaches 333; wider heads are assumed to slow down by the same factor.
NARROW = 64
ATTENTION_NARROW = 333 / _H100.peak["bf16"]  # heads of up to 64 dimensions
ATTENTION_WIDE = 333 * 507 / 399 / _H100.peak["bf16"]
BANDWIDTH = 2500 / _H100.memory_gb_s  # mean of all element-wise kernels


@dataclass(frozen=True)
class Gpu:
    """Describes a GPU of the cluster, and estimates the time of its kernels.

    Attributes:
        name: the name of the GPU in `cluster.gpu`.
        peak: the peak FLOP/s in the run's compute type, for MFU.
        peaks: the peak FLOP/s by compute type, such as "bf16".
        bandwidth: the memory bandwidth in B/s.
        memory: the size of the memory in bytes.
    """

    name: str
    peak: Peak
    peaks: dict[str, float]
    bandwidth: float
    memory: float

    def seconds(self, kind: str, flops: float, nbytes: float, dtype: str, head_dim: int) -> float:
        """Returns the seconds of a kernel: the longer of its memory time and its compute time.

        Args:
            kind: a part of the step, one of PARTS.
            flops: FLOPs of the kernel.
            nbytes: bytes that the kernel reads and writes.
            dtype: the type in which the kernel computes, or "" to assume the run's type.
            head_dim: the head dimension of an attention kernel, or 0 for other kernels.
        """
        moving = nbytes / (self.bandwidth * BANDWIDTH)
        share = SHARES.get(kind, ATTENTION_NARROW if head_dim <= NARROW else ATTENTION_WIDE)
        return max(moving, flops / (self.peaks.get(dtype, self.peak.flops) * share))


def gpu_of(cluster: ClusterConfig, precision: str, own_tflops: float | None) -> Gpu:
    """Returns the cluster's GPU. Raises UserError if it is not configured or has no datasheet.

    Args:
        cluster: the cluster.
        precision: the run's precision.
        own_tflops: the GPU's dense peak TFLOP/s in that precision, or None to use the datasheet.
    """
    name, memory, bandwidth = cluster.gpu, cluster.gpu_memory_gb, cluster.gpu_memory_gb_per_s
    if name is None or memory is None or bandwidth is None:
        keys = {"gpu": name, "gpu_memory_gb": memory, "gpu_memory_gb_per_s": bandwidth}
        missing = " ".join(f"cluster.{key}=…" for key, value in keys.items() if value is None)
        raise UserError(
            f"cluster={cluster.name} does not say what its GPUs are; the nearest is "
            f"cluster=dgx_h100, or {missing}."
        )
    known = {t: datasheet_peak(name, t) for t in COMPUTE}
    peak = known[precision] if own_tflops is None else Peak(own_tflops * TERA, "launch.peak_tflops")
    if peak is None:
        raise UserError(
            f"cluster.gpu={show(name)} has no known {precision} peak; give its dense peak, as in "
            "launch.peak_tflops=100."
        )
    peaks = {t: found.flops for t, found in known.items() if found is not None}
    return Gpu(name, peak, peaks | {precision: peak.flops}, 1e9 * bandwidth, 1e9 * memory)


BLOCKS, LOSS, OPTIMIZER, OTHER, SHARDING = "blocks", "loss", "optimizer", "other", "sharding"
PARTS = ("gemm_layers", "gemm_head", "attention", BLOCKS, LOSS, OPTIMIZER, SHARDING, OTHER)
COMMUNICATION = "communication"
OFFLOAD, COPIES = "offload", ("copy to the host", "copy to the device")
KINDS = (
    *("parameters", "gradients", "masters", "optimizer"),
    *("activations", "logits", "buffers"),
)
OF_KERNELS = ("launches", "bytes", "flops", "seconds")


class Counts(Counter[tuple[str, str]]):
    """Holds the counts of one rank's step.

    A key is a pair of a quantity and a name:

    - one of `OF_KERNELS` and a part of the step;
    - "sent" and a group: bytes that this rank sends;
    - "calls" and a group: collectives and messages;
    - "waits" and "why (file:line)": waits of the host;
    - "copied" and one of `COPIES`: bytes of offloaded activations.
    """

    def of(self, what: str) -> dict[str, float]:
        return {name: number for (kind, name), number in self.items() if kind == what}

    def sum(self, what: str) -> float:
        return sum(self.of(what).values())


class StepCounter(Observer):
    """Counts the memory, kernels, collectives and host waits of a simulated machine.

    Args:
        machine: the simulated machine.
        gpu: the GPU that prices the kernels.
        tf32: whether fp32 matmuls run in tf32.

    Attributes:
        live: allocated bytes by kind.
        peak: the largest sum of `live` since `start`.
        at_peak: `live` at that peak.
        peak_phase: the phase of the step at that peak.
    """

    def __init__(self, machine: SimulatedMachine, gpu: Gpu, tf32: bool) -> None:
        self.machine = machine
        self.gpu = gpu
        other = "fp32" if tf32 else "tf32"  # fp32 and tf32 share a dtype
        self.dtypes = {name_of(dtype): name for name, dtype in COMPUTE.items() if name != other}
        self.names: Mapping[Any, str] = {}  # the names of process groups
        self.counting = False
        self.building = True
        self.live = dict.fromkeys(KINDS, 0)
        self.known: set[StorageMemory] = set()  # memory allocated since this counter was made
        self._reset()

    def _reset(self) -> None:
        self.counts = Counts()
        self.machine.collect()
        self.peak, self.at_peak, self.peak_phase = 0, dict(self.live), ""
        self._compare()

    def start(self) -> None:
        """Starts counting a step, with the currently live memory as the initial peak."""
        self._reset()
        self.counting = True

    def end(self) -> Counts:
        self.counting = False
        return self.counts

    def _compare(self) -> None:
        total = sum(self.live.values())
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.live)
            self.peak_phase = "building the trainer" if self.building else phase_of_step()

    def allocating(self, block: StorageMemory) -> None:
        block.label = "buffers" if self.building else kind_of_memory()

    def allocated(self, block: StorageMemory) -> None:
        self.known.add(block)
        self.live[block.label or "buffers"] += block.nbytes
        self._compare()

    def freed(self, block: StorageMemory) -> None:
        if block in self.known:  # memory of an earlier trainer was never counted here
            self.known.remove(block)
            self.live[block.label or "buffers"] -= block.nbytes

    def _label(self, tensors: Iterable[Tensor], kind: str, keep: Collection[str] = ()) -> None:
        """Relabels the memory of the tensors as `kind`, unless its current kind is in `keep`."""
        for tensor in tensors:
            local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel() == 0:
                continue
            # `simulated_device.tensor` defines `data_` and `device_index`.
            block = self.machine.block_of(local.data_, local.device_index)
            if block.label not in keep:
                self.live[block.label or "buffers"] -= block.nbytes
                self.live[kind] += block.nbytes
                block.label = kind

    def label_state(self, trainer: Trainer) -> None:
        """Labels the memory of parameters, gradients, master weights and optimizer state."""
        parameters = [p.detach() for p in trainer.parameters.values() if p.requires_grad]
        segments = trainer.data_parallel.segments
        # With a compute type of fp32 or fp64, the optimizer updates the parameters themselves. With
        # other types, FSDP2's shards are the masters, and are gathered in the compute type. Frozen
        # parameters have no masters.
        self._label((constant.param for constant in trainer.data_parallel.constants), "parameters")
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
            return
        nbytes = kernel.nbytes
        # Offloaded activations are copied on a separate stream, concurrently with the kernels.
        if kernel.name in COPIES and part_of_step() == OFFLOAD:
            self.counts["copied", kernel.name] += nbytes
            return
        part, flops, dtype, head_dim = self._sort(kernel)
        timed = part != COMMUNICATION
        seconds = self.gpu.seconds(part, flops, nbytes, dtype, head_dim) if timed else 0.0
        for what, number in zip(OF_KERNELS, (kernel.launches, nbytes, flops, seconds), strict=True):
            self.counts[what, part] += number  # type: ignore[assignment]

    def _sort(self, kernel: Kernel) -> tuple[str, float, str, int]:
        """Returns a kernel's part of the step, FLOPs, compute type and head dimension.

        The type is "" if it is unknown, and the head dimension is 0 for kernels other than
        attention.
        """
        if kernel.name in COLLECTIVES and kernel.call is None:
            return COMMUNICATION, 0.0, "", 0
        if kernel.name in COPIES:
            return OTHER, 0.0, "", 0
        part = part_of_step()
        if (attention := attention_of(kernel)) is not None:
            dtype = self.dtypes[attention.dtype]
            return "attention", attention.flops, dtype, attention.width
        if (product := product_of(kernel)) is None:
            return part, 0.0, "", 0
        # Muon's GEMMs belong to the optimizer.
        kind = {LOSS: "gemm_head", OPTIMIZER: OPTIMIZER}.get(part, "gemm_layers")
        return kind, product.flops, self.dtypes.get(product.dtype, ""), 0

    def collective(self, name: str, group: Any, tensor: Tensor) -> None:
        if self.counting:
            kind, size = self.names.get(group, group.description or "world"), group.size()
            whole = whole_bytes(name, size, tensor)
            self.counts["sent", kind] += whole * bus_factor(COLLECTIVES.get(name, "barrier"), size)
            self.counts["calls", kind] += 1

    def host_wait(self, why: str) -> None:
        if self.counting:
            self.counts["waits", f"{why} ({caller()})"] += 1


# These rows map frames of the call stack to the part of the step, the kind of memory that is
# allocated, and the phase. Each row has a part of a file's path, a function (None matches any), and
# these three results. Frames are searched from the innermost outwards. The first row that matches a
# frame applies; if its result is None, the search continues with the next outer frame. A backward
# pass run by autograd has no frame in these files and is attributed to the blocks.
_LOSS, _DATA_PARALLEL = "/parallel3d/tensor_parallel/loss.py", "/parallel3d/data_parallel/"
_EXECUTOR, _FSDP = "/parallel3d/pipeline/executor.py", "/torch/distributed/fsdp/"
_FSDP_PARAM = f"{_FSDP}_fully_shard/_fsdp_param.py"
_FRAMES: tuple[tuple[str, str | None, str | None, str | None, str | None], ...] = (
    (_LOSS, "run", LOSS, "activations", "head and loss"),
    (_LOSS, None, LOSS, "logits", "head and loss"),
    ("/parallel3d/tensor_parallel/embedding.py", None, OTHER, "activations", None),
    ("/parallel3d/tensor_parallel/mappings.py", None, None, "activations", None),
    ("/parallel3d/tensor_parallel/partial_gradients.py", None, OPTIMIZER, "buffers", "optimizer"),
    ("/parallel3d/tensor_parallel/", None, BLOCKS, "activations", None),
    # These files allocate results of matmuls that are added to gradients.
    ("/parallel3d/parameters/gradients.py", None, None, "buffers", None),
    ("/parallel3d/experts/gradients.py", None, BLOCKS, "buffers", None),
    ("/parallel3d/models/embedding_and_head.py", None, OTHER, "activations", None),
    ("/parallel3d/models/", None, BLOCKS, "activations", None),
    ("/parallel3d/experts/grouped.py", None, BLOCKS, "activations", None),
    ("/parallel3d/optim/optimizer.py", None, OPTIMIZER, "buffers", "optimizer"),
    ("/parallel3d/optim/muon.py", None, OPTIMIZER, "buffers", "optimizer"),
    (_DATA_PARALLEL, "all_gather_params", OPTIMIZER, "buffers", "optimizer"),
    (_DATA_PARALLEL, "finish_step", OPTIMIZER, "buffers", "reduction of the gradients"),
    (_DATA_PARALLEL, None, OPTIMIZER, "buffers", None),
    (_FSDP_PARAM, "to_accumulated_grad_if_needed", SHARDING, "gradients", None),
    (_FSDP_PARAM, None, SHARDING, "parameters", None),  # gathered parameters
    (_FSDP, None, SHARDING, "buffers", None),
    ("/parallel3d/pipeline/offload.py", None, OFFLOAD, "activations", None),
    (_EXECUTOR, "_forward", OTHER, "activations", "forward"),
    (_EXECUTOR, "_backward", OTHER, "activations", "backward"),
    (_EXECUTOR, "_weights", OTHER, "activations", "weight gradients"),
    (_EXECUTOR, "_communicate", OTHER, "activations", "messages between stages"),
    ("/parallel3d/pipeline/", None, OTHER, "activations", None),
    ("/parallel3d/data/", None, OTHER, None, None),
    ("/parallel3d/build.py", None, OTHER, "buffers", None),
    ("/parallel3d/trainer.py", None, OTHER, "buffers", None),
)


@cache
def _frame_facts(file: str, function: str) -> tuple[str | None, ...]:
    path = file.replace("\\", "/")
    rows = (row[2:] for row in _FRAMES if row[0] in path and row[1] in (None, function))
    return next(rows, (None, None, None))


def _innermost(column: int) -> str | None:
    for place in this_machine().thread.repeated:
        if (found := _frame_facts(*place)[column]) is not None:
            return found
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = _frame_facts(frame.f_code.co_filename, frame.f_code.co_name)[column]
        if found is not None:
            return found
        frame = frame.f_back
    return None


def part_of_step() -> str:
    """Returns the part of the step that is running.

    The part is blocks, loss, optimizer, sharding (copies by FSDP2), offload or other.
    """
    return _innermost(0) or BLOCKS


def kind_of_memory() -> str:
    """Returns the kind of memory that is being allocated.

    The kind is activations, logits or buffers, or, with FSDP2, also parameters or gradients.
    """
    return _innermost(1) or "activations"


def phase_of_step() -> str:
    """Returns a description of the phase of the step that is running."""
    by_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    apart = "backward" if by_autograd else "between forward and backward passes"
    return _innermost(2) or apart


def caller() -> str:
    """Returns file:line of the innermost parallel3d frame outside the dry run's own code.

    Returns "?" if there is no such frame.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        inside = path.rpartition("/parallel3d/")[2]
        if inside != path and not inside.startswith(
            ("simulated_device/", "dryrun/", "device/accelerator.py")
        ):
            return f"{inside}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


MORE = 1  # number of micro-batches beyond a full pipeline that suffices to reach the memory peak


def dry_step(
    config: Config,
    rank: int,
    gpu: Gpu,
    placement: RankMapping | None = None,
    memory_only: bool = False,
    optimizer: OptimizerFactory | None = None,
) -> dict[str, Any]:
    """Builds the trainer of `rank` and returns the facts about one step.

    An earlier step, which is not counted, makes the allocations that happen only once.

    Args:
        config: a checked configuration.
        rank: the rank to run.
        gpu: the GPU whose speeds price the kernels.
        placement: the rank mapping if the dp groups have two levels, or else None.
        memory_only: whether to return only the facts about memory, which takes at most half the
            time.
        optimizer: makes the optimizer with `optim.name=own`.
    """
    machine = machine_without_values()
    counter = StepCounter(machine, gpu, config.precision.name == "tf32")
    machine.observers.append(counter)
    try:
        with world_of(rank, layout_of(config).world_size) as is_made:
            groups = ProcessGroups.single()
            if is_made:
                groups = groups_of_run(config, TYPE, placement)
            # Without a batch schedule, the step has the final batch size.
            train = dataclasses.replace(config.train, batch_schedule=None)
            config = dataclasses.replace(config, train=train, compile=False)
            source, device = samples_for(config.model), torch.device(TYPE, 0)
            # No variable holds the trainer, so that it is freed after its step.
            make = partial(Trainer, train_source=source, optimizer=optimizer)
            return _step(make(config, groups, device), counter, memory_only)
    finally:
        machine.observers.remove(counter)
        gc.collect()
        machine.collect()
        machine.forget()  # each dry run adds streams, and every wait visits all streams


def _step(trainer: Trainer, counter: StepCounter, memory_only: bool) -> dict[str, Any]:
    """Counts a step with just enough micro-batches to fill the pipeline, and extrapolates.

    Each further micro-batch adds the difference between a step of two micro-batches and a step of
    one, or of three and two if FSDP2 accumulates gradients.
    """
    blueprint, groups = trainer.blueprint, trainer.groups
    counter.machine.collect()
    start_peak, counter.building = counter.peak, False
    counter.names = names_of(groups)
    stage = groups.coordinates.pp
    few = _fewest(blueprint, stage)
    more = blueprint.microbatches - few

    def counted(count: int) -> Counts:
        trainer.use(blueprint.pipeline.schedule(count))
        counter.label_state(trainer)
        counter.start()
        trainer.train_step()
        return counter.end()

    counted(1 if more else few)
    if memory_only:
        counted(few)
        return _memory(trainer, counter, start_peak)
    # If FSDP2 accumulates gradients, a step of several micro-batches casts them to fp32 once.
    accumulates = blueprint.data.zero > 1 and not blueprint.data.every_microbatch
    first = 1 + accumulates
    one, two = (counted(first), counted(first + 1)) if more else (Counts(), Counts())
    counts = counted(few)
    counts = Counts({key: n + more * (two[key] - one[key]) for key, n in counts.items()})
    parts = {
        part: {what: counts[what, part] for what in OF_KERNELS} for part in (*PARTS, COMMUNICATION)
    }
    return {
        **_memory(trainer, counter, start_peak),
        "offloaded": counts.of("copied"),
        **{what: counts.sum(what) for what in OF_KERNELS},
        "bytes": counts.sum("bytes") - parts[COMMUNICATION]["bytes"],
        "host_syncs": counts.sum("waits"),
        "host_waits": counts.of("waits"),
        "groups": {
            group: {"bytes_sent": counts["sent", group], "calls": calls}
            for group, calls in counts.of("calls").items()
        },
        "parts": parts,
    }


def _memory(trainer: Trainer, counter: StepCounter, start_peak: int) -> dict[str, Any]:
    """Returns the rank, its stages, and its memory at the peak of the last step and after it."""
    counter.machine.collect()
    assignment, offload = trainer.schedule.assignment, trainer.executor.offload
    stage = trainer.groups.coordinates.pp
    return {
        "rank": trainer.groups.rank,
        "stage": stage,
        "stages": [assignment.stage(stage, chunk) for chunk in range(assignment.chunks)],
        **{f"{kind}_bytes": counter.at_peak[kind] for kind in KINDS},
        "peak_bytes": counter.peak,
        "peak_in": counter.peak_phase,
        "live_bytes": dict(counter.live),
        "between_steps_bytes": sum(counter.live.values()),
        "start_peak_bytes": start_peak,
        "host_bytes": 0 if offload is None else offload.host.nbytes,
    }


def _sending(blueprint: Blueprint, index: int) -> int:
    """Returns the number of micro-batches after which a rank's sends in flight reach their limit.

    A send keeps its tensor in memory until it completes. `index` is the rank's index along pp.
    """
    rank = PipelineRank(blueprint, index)
    each = rank.neighbours(1) + rank.neighbours(-1, with_backward=True)
    return -(-SENDS // each) if each else 0


def _fewest(blueprint: Blueprint, index: int) -> int:
    """Returns the smallest number of micro-batches that has the same memory peaks as all of them.

    The peaks are those of live activations, deferred weight gradients and sends in flight on the
    rank whose index along pp is `index`.
    """
    count, name = blueprint.microbatches, blueprint.pipeline.name
    if name in ("gpipe", "auto", "file"):
        return count  # memory grows with each micro-batch, or the order depends on their number

    def most(microbatches: int) -> tuple[dict[tuple[Any, ...], float], float]:
        held: dict[tuple[Any, ...], float] = defaultdict(float)
        waits = 0.0
        for action, seen in states_of(blueprint, index, microbatches).items():
            deferred = seen.deferred.sum(axis=1)
            waits = max(waits, deferred.max())
            # With FSDP2 a chunk also holds gradients from its first backward pass on.
            begun = map(tuple, seen.begun & (blueprint.data.zero > 1))
            for chunks, live in zip(begun, seen.live.sum(axis=1) + deferred, strict=True):
                held[action, chunks] = max(held[action, chunks], live)
        return held, waits

    least = max(blueprint.layout.pp, _sending(blueprint, index)) + MORE
    all_of, tried = most(count), range(least, count)
    return next((few for few in tried if most(few) == all_of), count)
