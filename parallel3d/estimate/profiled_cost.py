"""Predicts the time of layouts from times measured by `parallel3d calibrate`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml
from numpy.typing import NDArray

from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.dispatch import load_of_tokens
from parallel3d.blueprint.ops import (
    Op,
    flops,
    layer_flops,
    layer_kinds,
    most_load,
    ops_of,
)
from parallel3d.blueprint.parameters import TABLE, trained_shares
from parallel3d.blueprint.rank import LayersOfKind, PipelineRank, StageBlueprint
from parallel3d.config.fields import check_fields
from parallel3d.errors import UserError
from parallel3d.estimate.fitted_cost import EXPERTS, StepTime, hidden_seconds, sizes_of_model
from parallel3d.estimate.memory import peak_memory
from parallel3d.estimate.search import (
    LayoutChoice,
    PricedLayouts,
    configure,
    planned,
    ranked,
)
from parallel3d.estimate.traffic import OVERLAPPED, group_size, transfers
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.files import plain, read_bounded
from parallel3d.models.declared import WORD_EMBEDDING, LayerKind
from parallel3d.models.keys import ModelConfig
from parallel3d.models.repeats import PARTS, parts_of
from parallel3d.run_config import Config, check_config
from parallel3d.schedules.actions import Action
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import Costs, walk


@dataclass(frozen=True)
class Table:
    """Interpolates measured seconds on a grid of sizes.

    The logarithm of the seconds is interpolated linearly in the logarithms of the sizes, because
    seconds grow roughly as powers of the sizes. Beyond the ends of an axis, the slope of its last
    interval continues.

    Attributes:
        axes: the measured sizes along each axis, in rising order.
        seconds: the measured seconds of all grid points; the last axis varies fastest.

    Raises ValueError for axes that do not rise, and for times that do not fill the grid or are not
    positive and finite.
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        for axis in self.axes:
            if not axis or axis[0] <= 0 or any(a >= b for a, b in pairwise(axis)):
                raise ValueError("an axis must rise from a positive number")
        if len(self.seconds) != math.prod(map(len, self.axes)):
            raise ValueError(f"{len(self.seconds)} times do not fill the grid")
        if not all(0 < s < math.inf for s in self.seconds):
            raise ValueError("times must be positive and finite")

    def __call__(self, *at: float) -> float:
        """Returns the seconds at the sizes `at`, one per axis, or 0 if any size is 0."""
        if not all(at):
            return 0.0
        values = [math.log(s) for s in self.seconds]
        for axis, size in zip(reversed(self.axes), reversed(at), strict=True):
            low = min(max(bisect_right(axis, size) - 1, 0), max(len(axis) - 2, 0))
            high = min(low + 1, len(axis) - 1)
            share = math.log(size / axis[low]) / math.log(axis[high] / axis[low]) if high else 0.0
            lines = (values[i : i + len(axis)] for i in range(0, len(values), len(axis)))
            values = [line[low] + share * (line[high] - line[low]) for line in lines]
        return math.exp(values[0])


FORMAT, VERSION = "parallel3d calibration", 4
READABLE = (3, VERSION)  # files of version 3 have a single kind of layer, without experts
LARGEST = 4 << 20  # maximum bytes of a file; calibrate writes about ten thousand bytes

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
ALL_TO_ALL = "all_to_all"  # measured for models with experts
# Suffix of a collective's table of CPU seconds per rank, used if ranks share cores.
SHARED = ".shared"
WAYS = ("forward", "input", "weight")
SHARE_OF_EP = "experts"  # prefix of tables with the effect of ep on a block with experts
# Table → number of axes, in a file for a model with one kind of layer. The comments list the axes,
# then the values.
TABLES = {
    # tp, tokens of a micro-batch: seconds of one tensor-parallel rank, without collectives
    **{f"{piece}.{way}": 2 for piece in ("block", "embedding", "head") for way in WAYS},
    **{f"recompute.{part}": 1 for part in PARTS},  # tp: share of a block's forward
    "update": 1,  # elements: seconds to clear and clip gradients and to step the optimizer
    **{name + way: 2 for name in COLLECTIVES for way in ("", SHARED)},  # ranks, bytes: seconds
    "together": 1,  # busy ranks: factor by which each rank's CPU seconds grow
    "threads": 1,  # threads of a rank: factor by which its seconds change
}


def block_name(index: int) -> str:
    """Returns the prefix of a block's tables for kind of layer `index`."""
    return f"block.{index}" if index else "block"


def recompute_name(part: str, index: int) -> str:
    """Returns the name of the table for a part of `recompute` in kind of layer `index`."""
    return f"recompute.{index}.{part}" if index else f"recompute.{part}"


def tables_of(model: ModelConfig) -> dict[str, int]:
    """Returns table → number of axes for all tables in a file for this model."""
    found = dict(TABLES)
    for index in range(1, len(layer_kinds(model))):
        found |= {f"{block_name(index)}.{way}": 2 for way in WAYS}
        found |= {recompute_name(part, index): 1 for part in PARTS}
    if model.num_experts:
        # ep, tokens of a micro-batch with tp=1: seconds of a block of the first kind with experts,
        # as a share of those with the first ep, with which all blocks with experts were measured
        found |= {f"{SHARE_OF_EP}.{way}": 2 for way in WAYS}
        found |= {ALL_TO_ALL + way: 2 for way in ("", SHARED)}
    return found


# Names of single numbers: the host's seconds per pipeline action, the GB that a rank takes without
# tensors, the GB of the whole machine or GPU, and the peak TFLOP/s of a device.
NUMBERS = ("launch.action", "rank_gb", "memory_gb", "peak_tflops")


@dataclass(frozen=True)
class CalibrationSource:
    """Device, software and date of a calibration."""

    device: str  # cpu or cuda
    name: str  # the device's name
    count: int  # cores, or GPUs, of the host
    type: str  # compute type: fp32, bf16, …
    host: str
    torch: str
    parallel3d: str
    date: str


@dataclass(frozen=True)
class MeasuredMachine:
    """Measurements of a machine.

    Attributes:
        made: the device and the software that were measured.
        model: the model whose pieces were measured.
        tables: name → measured seconds by size, see `TABLES`.
        numbers: name → other measured number, see `NUMBERS`.
    """

    made: CalibrationSource
    model: ModelConfig
    tables: Mapping[str, Table]
    numbers: Mapping[str, float]

    @property
    def shares(self) -> bool:
        """Returns whether all ranks of a host compute on the same cores."""
        return self.made.device == "cpu"

    def __getitem__(self, name: str) -> Table:
        return self.tables[name]

    @cached_property
    def kinds(self) -> list[LayerKind]:
        """Returns the kinds of layers that were measured, in the order of their tables."""
        return [*layer_kinds(self.model)]

    def nearest(self, kind: LayerKind) -> LayerKind:
        """Returns the measured kind that is most similar to `kind`."""

        def differences(other: LayerKind) -> tuple[bool, ...]:
            of_attention = kind.window != other.window, kind.rotates != other.rotates
            return kind.experts != other.experts, *of_attention

        return min(self.kinds, key=differences)

    def text(self) -> str:
        """Returns the content of the machine's file, as YAML."""
        tables = {
            name: {
                "axes": [[_short(v) for v in axis] for axis in table.axes],
                "seconds": [_short(s) for s in table.seconds],
            }
            for name, table in self.tables.items()
        }
        head = {"format": FORMAT, "version": VERSION}
        head |= {"made": asdict(self.made), "model": asdict(self.model)}
        numbers = {name: _short(value) for name, value in self.numbers.items()}
        content = head | {"numbers": numbers, "tables": tables}
        return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)


def _short(value: float) -> float | int:
    """Returns the value with four significant digits, as timers are not more precise."""
    return int(value) if value == int(value) and value < 1e15 else float(f"{value:.4g}")


def read(file: str) -> MeasuredMachine:
    """Reads a file written by `parallel3d calibrate`. Raises UserError if it is not valid."""
    key = f"cluster={plain(file)}"
    try:
        content = yaml.load(read_bounded(Path(file), LARGEST), _Loader)
    except OSError as error:
        raise UserError(f"{key} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(
            f"{key} must be a file written by parallel3d calibrate, but is not: {_reason(error)}"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{key} must be a file written by parallel3d calibrate, but is not")
    if content.get("version") not in READABLE:
        raise UserError(
            f"{key} has version {plain(str(content.get('version')))}, but this version of "
            f"parallel3d reads versions {READABLE[0]} and {VERSION}: calibrate again"
        )
    try:
        return _machine(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, UserError) as error:
        raise UserError(f"{key} is damaged ({_reason(error)}): calibrate again") from None


def _reason(error: Exception) -> str:
    return plain(" ".join(str(error).split())[:150])


class _Loader(yaml.SafeLoader):
    """Loads plain values and refuses aliases, which could expand to a huge structure."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not read")
        return super().compose_node(parent, index)


def _machine(content: Mapping[str, Any]) -> MeasuredMachine:
    """Checks the content of a machine's file and returns the machine."""
    count = int(_number("made.count", content["made"]["count"]))
    texts = {name: str(value) for name, value in content["made"].items()}
    model = ModelConfig(**content["model"])
    check_fields(Config(model=model))
    tables = {}
    for name, axes in tables_of(model).items():
        given = content["tables"][name]
        table = Table(
            tuple(tuple(_number(name, v) for v in axis) for axis in given["axes"]),
            tuple(_number(name, v) for v in given["seconds"]),
        )
        if len(table.axes) != axes:
            raise ValueError(f"{name} has {len(table.axes)} axes")
        tables[name] = table
    numbers = {name: _number(name, content["numbers"][name]) for name in NUMBERS}
    made = CalibrationSource(**(texts | {"count": count}))  # type: ignore[arg-type]
    return MeasuredMachine(made, model, tables, numbers)


def _number(name: str, value: Any) -> float:
    """Returns a positive, finite number; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is not a number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite")
    return float(value)


def check_type(machine: MeasuredMachine, file: str, precision: str) -> None:
    """Raises UserError if the file was measured in a dtype other than `precision`."""
    if machine.made.type != precision:
        raise UserError(
            f"precision={precision} must be {machine.made.type}, in which cluster={plain(file)} "
            f"was measured; for {precision}, run parallel3d calibrate precision={precision}"
        )


def check_device(
    machine: MeasuredMachine, file: str, kind: str, name: str | None, count: int
) -> None:
    """Raises UserError if the file was measured on another device.

    Args:
        kind: kind of this device, cpu or cuda.
        name: name of this device, or None if it is unknown and not compared.
        count: number of cores or GPUs of this host.
    """
    made = machine.made
    here = name or made.name
    other = made.device != kind or here != made.name
    if other or (machine.shares and count != made.count):
        raise UserError(
            f"cluster={plain(file)} must have been measured on this device, {kind} ({plain(here)} "
            f"× {count}), but was measured on {plain(made.device)} ({plain(made.name)} × "
            f"{made.count}); give a new file written by parallel3d calibrate"
        )


def scaled(machine: MeasuredMachine, file: str, model: ModelConfig) -> str:
    """Returns notices that times are scaled or extrapolated, or "" if all were measured."""
    notices = _of_other_blocks(machine, file, model), _of_other_ep(machine, file, model)
    return " ".join(filter(None, notices))


def _of_other_ep(machine: MeasuredMachine, file: str, model: ModelConfig) -> str:
    """Returns a notice if blocks with all experts on a rank were not measured, else ""."""
    if not (model.num_experts and machine.model.num_experts):
        return ""
    least = machine[f"{SHARE_OF_EP}.{WAYS[0]}"].axes[0][0]
    if least == 1:
        return ""
    fewer = "ep=1" if least == 2 else f"ep below {least:g}"
    return (
        f"Times of {fewer} are extrapolated from those of ep={least:g} and more, because the "
        f"device of cluster={plain(file)} had no memory for the experts of a smaller ep."
    )


def _of_other_blocks(machine: MeasuredMachine, file: str, model: ModelConfig) -> str:
    """Returns a notice that times are scaled if blocks differ from the measured ones, else ""."""
    measured, here = machine.model, layer_kinds(model)
    like = {kind: machine.nearest(kind) for kind in here}
    same = model.seq_length == measured.seq_length
    if same and all(_block(model, kind) == _block(measured, like[kind]) for kind in here):
        return ""
    ratio = sum(count * layer_flops(model, kind=kind) for kind, count in here.items())
    ratio /= sum(count * layer_flops(measured, kind=like[kind]) for kind, count in here.items())
    return (
        f"cluster={plain(file)} was measured for {plain(machine.model.name)}, but a block here has "
        f"{ratio:.3g} times its FLOPs, so times are scaled by that factor, which is a guess; "
        f"parallel3d calibrate model={plain(str(model.name))} measures them."
    )


def _block(model: ModelConfig, kind: LayerKind) -> list[Op]:
    """Returns the operations of a whole layer on a single rank."""
    return ops_of(model, kind, 1, False, frozenset(), ep=1, settings=ExpertsConfig()).plain


def check_experts_measured(machine: MeasuredMachine, file: str, model: ModelConfig) -> None:
    """Raises UserError for a model with experts if no block with experts was measured."""
    if model.num_experts and not machine.model.num_experts:
        raise UserError(
            f"model.num_experts={model.num_experts} must be 0 with cluster={plain(file)}, which "
            f"was measured for {plain(machine.model.name)}, a model without experts; give a "
            f"cluster file written by parallel3d calibrate model={plain(str(model.name))}"
        )


FEW = 64  # bytes of the smallest message that is measured
Passes: TypeAlias = NDArray[Any]  # seconds of forward, input gradient and weight gradient


def passes(
    machine: MeasuredMachine,
    config: Config,
    piece: str,
    kind: LayerKind | None = None,
    load: float = 1.0,
) -> Passes:
    """Returns the seconds of each pass of a block, the embedding or the head.

    They are the measured seconds, scaled to this model's FLOPs or, for the embedding, to its hidden
    size. Collectives and recomputation are not included.

    Args:
        piece: "block", "embedding" or "head".
        kind: kind of the block, or None for the kind of the first layer.
        load: rows of the fullest rank's experts relative to the mean.
    """
    here, model = machine.model, config.model
    ratio = model.hidden_size / here.hidden_size
    name, tokens = piece, config.micro_batch_size * config.local_seq_length
    if piece == "block":
        kind = LayerKind.of(model, 0) if kind is None else kind
        like = machine.nearest(kind)
        name = block_name(machine.kinds.index(like))
        ratio = layer_flops(model, kind=kind) / layer_flops(here, kind=like)
    elif piece == "head":
        ratio *= model.padded_vocab_size / here.padded_vocab_size
    found = np.array([machine[f"{name}.{way}"](config.tp, tokens) for way in WAYS])
    if kind is not None and kind.experts:
        found = found + _more_on_ep_ranks(machine, config, tokens)
        found = found * (1 + _share_of_experts(model, kind) * (load - 1))
    return ratio * found


def _share_of_experts(model: ModelConfig, kind: LayerKind) -> float:
    """Returns the share of the experts' GEMMs in the FLOPs of a layer."""
    ops = _block(model, kind)
    inside = flops([op for op in ops if op.name.startswith(EXPERTS)], model.seq_length)
    return float(inside / flops(ops, model.seq_length))


def _more_on_ep_ranks(machine: MeasuredMachine, config: Config, tokens: int) -> Passes:
    """Returns the seconds that expert parallelism adds to each pass of a block with experts.

    They are negative if expert parallelism saves time, because a rank then has fewer experts, each
    with more rows. The change was measured relative to a block of the first kind with experts at
    tp=1 and the smallest ep, so it is scaled by the seconds of such a block with one
    tensor-parallel rank's share of the tokens. Kinds of layers differ in their attention, which ep
    does not change, so it adds the same seconds to a block of any kind with experts.
    """
    own = tokens / config.tp  # sequence parallelism splits the tokens
    first = next(index for index, kind in enumerate(machine.kinds) if kind.experts)
    return np.array(
        [
            machine[f"{block_name(first)}.{way}"](1, own)
            * (machine[f"{SHARE_OF_EP}.{way}"](config.ep, own) - 1)
            for way in WAYS
        ]
    )


def layer_passes(
    machine: MeasuredMachine,
    config: Config,
    stage: StageBlueprint,
    rank: PipelineRank,
    load: float = 1.0,
) -> Passes:
    """Returns the seconds of each pass of the layers of a rank's stage, with recomputation."""
    few, trained = rank.kinds_of(stage.backward), rank.trained_layers(stage)
    parts = sorted(parts_of(config.recompute))  # so that all processes sum in the same order
    found = np.zeros(3)
    for of in rank.kinds_of(stage):
        back = next((b for b in few if b.kind == of.kind), LayersOfKind(of.kind, 0, 0))
        block = passes(machine, config, "block", of.kind, load)
        index = machine.kinds.index(machine.nearest(of.kind))
        again = sum(machine[recompute_name(part, index)](config.tp) for part in parts)
        counts = of.layers, back.layers, trained * (of.layers / len(stage.layers))
        found += counts * block + (0.0, back.recomputed * again * float(block[0]), 0.0)
    return found


def stage_passes(
    machine: MeasuredMachine,
    config: Config,
    stage: StageBlueprint,
    rank: PipelineRank,
    load: float = 1.0,
) -> Passes:
    """Returns the seconds of each pass of a rank's stage.

    They include blocks, embedding, head, recomputation and the host's work per action, but not the
    gradients of frozen parameters.
    """
    frozen, found = rank.blueprint.frozen, layer_passes(machine, config, stage, rank, load)
    found += np.array((1.0, 1.0, 0.0)) * machine.numbers["launch.action"]
    if stage.first:
        found += passes(machine, config, "embedding") * (1.0, 1.0, WORD_EMBEDDING not in frozen)
    if stage.last:
        reached = rank.blueprint.first_trained < config.model.num_layers
        found += passes(machine, config, "head") * (1.0, reached, TABLE not in frozen)
    return found


def sent_seconds(machine: MeasuredMachine, rank: PipelineRank, sent: Transfer) -> float:
    """Returns the seconds that a rank needs for all calls of a transfer.

    If the run's ranks share cores, these are the rank's CPU seconds.
    """
    shares = machine.shares and rank.layout.world_size > machine.made.count
    ranks = 2 if sent.op == "send_recv" else group_size(sent.dim, rank.layout)
    # A collective that was not measured gets the time of an all-gather of as many bytes.
    op = sent.op if sent.op in machine.tables else "all_gather"
    return sent.count * machine[op + SHARED * shares](ranks, max(sent.nbytes, FEW))


def shared_clock(
    orders: Sequence[Sequence[Action]],
    assignment: StageAssignment,
    costs: Costs,
    replicas: int,
    speed: Callable[[int], float],
    ends: Sequence[float] | None = None,
) -> float:
    """Returns the seconds until the last rank has completed its order and its `ends`.

    Ranks share the cores: all ranks that compute at the same time are equally fast, and waiting
    ranks use no core. A single number therefore describes the progress of all ranks, and it grows
    by `speed` per second. The progress at which each action begins and ends does not depend on the
    speed, and is found by a walk in which every rank has a core of its own.

    Args:
        orders: the actions of each rank.
        assignment: the stages of each rank.
        costs: seconds of a rank that runs alone. The sender and the receiver each do half of the
            work of a hop.
        replicas: number of ranks with the same actions as each pipeline rank, tp × cp × dp.
        speed: returns the speed of each rank for a number of busy ranks; 1 is the speed of a rank
            that runs alone.
        ends: seconds of each rank after its order, for reductions and the update, or None for 0.

    Raises ScheduleError if ranks wait for each other in a cycle.
    """
    # `hops`: number of messages that each stage sends or receives in a pass. Two stages on the same
    # rank, as at the turn of a V, exchange none.
    places = assignment.places
    far = [a[0] != b[0] for a, b in pairwise(places)]
    hops = [(s > 0 and far[s - 1]) + (s < len(far) and far[s]) for s in range(len(places))]
    forward, input = (
        tuple(alone + n * costs.hop / 2 for alone, n in zip(way, hops, strict=True))
        for way in (costs.forward, costs.input)
    )
    found = walk(orders, assignment, Costs(forward, input, costs.weight)).ended()
    changes: Counter[float] = Counter()  # progress → change of the number of busy ranks
    for begun, ended, more in zip(
        found.starts, found.ends, ends or [0.0] * len(orders), strict=True
    ):
        changes.update([*begun, ended[-1]])
        changes.subtract([*ended, ended[-1] + more])
    wall, busy = 0.0, 0
    for at, end in pairwise(sorted(changes)):
        busy += changes[at]
        wall += (end - at) / speed(busy * replicas)
    return wall


@dataclass(frozen=True)
class MeasuredTime(StepTime):
    """Seconds of a step by part; `core` is the sum of the core-seconds of all ranks."""

    core: float


def step_time(config: Config, machine: MeasuredMachine, load: float = 1.0) -> MeasuredTime:
    """Returns the seconds of a step of a checked configuration on the machine.

    Communication is computed from `traffic.transfers`, and compute from the measured pieces. Half
    of the time of the tp, cp and ep collectives counts in the forward, and half in the backward.
    On accelerators, `moe.overlap` hides exchanges of tokens behind the layers of another
    micro-batch, but no exchange of counts, choices and weights. On CPUs it hides nothing, because
    the cores that compute also copy the tokens.

    `load`: rows of the fullest rank's experts relative to the mean. Raises UserError for an
    impossible schedule or split of the layers.
    """
    blueprint = planned(config)
    received = 1.0
    if blueprint.experts is not None:
        load = min(load, most_load(config.model, config.ep))
        received = load_of_tokens(load, blueprint.experts.share_sent)
    layout, schedule = blueprint.layout, blueprint.pipeline.schedule()
    assignment, count, pp = schedule.assignment, config.num_microbatches, config.pp
    each, groups, crossings = np.zeros((assignment.stages, 3)), [], 0
    for rank in (PipelineRank(blueprint, index) for index in range(layout.pp)):
        seconds: dict[str, float] = defaultdict(float)
        travels = 0.0
        for sent in transfers(config, layout, rank.index):
            if sent.dim == "ep" and sent.op == ALL_TO_ALL:  # the fullest rank receives more
                sent = replace(sent, nbytes=round(received * sent.nbytes))
            took = sent_seconds(machine, rank, sent)
            seconds[sent.dim] += took
            travels += took * (sent.what in OVERLAPPED)
            crossings += sent.count * (sent.dim == "pp")
        experts = sum(p.numel for p in rank.trained if p.expert) / rank.expert_shards
        others = sum(p.numel for p in rank.trained if not p.expert) / rank.shards
        seconds["update"] = machine["update"](experts + others)
        groups.append(seconds)
        for chunk, stage in enumerate(rank.stages):
            number = assignment.stage(rank.index, chunk)
            each[number] = stage_passes(machine, config, stage, rank, load)
            inside = seconds["tp"] + seconds["cp"] + seconds["ep"]
            if blueprint.pipeline.overlaps and not machine.shares:
                layers = float(layer_passes(machine, config, stage, rank, load).sum())
                computes = count * layers + seconds["tp"] + seconds["cp"]
                inside -= float(hidden_seconds(travels, computes, count))
            each[number, :2] += inside / (2 * count * assignment.chunks)
    reduced = [g["dp"] + g["dp_cp"] + g["edp"] + g["embedding"] for g in groups]
    ends = [r + g["update"] + g["world"] for r, g in zip(reduced, groups, strict=True)]
    held = [[assignment.stage(rank, c) for c in range(assignment.chunks)] for rank in range(pp)]
    busy = [count * float(each[mine].sum()) for mine in held]
    # A rank sends as many messages as it receives, and does half of the work of each.
    messages = [g["pp"] for g in groups]
    hop = sum(messages) / max(crossings, 1)
    replicas = layout.world_size // pp
    speed = speed_of(machine, layout.world_size)
    forward, input, weight = (tuple(way) for way in np.maximum(each, 1e-9).T.tolist())
    clock = Costs(forward, input, weight, hop)
    total = shared_clock(schedule.orders, assignment, clock, replicas, speed, ends)
    slowest = max(range(pp), key=lambda rank: busy[rank] + ends[rank])
    mine = groups[slowest]
    parts = busy[slowest], messages[slowest], reduced[slowest], mine["update"], mine["world"]
    # While other ranks wait, a rank is faster than with all cores busy.
    scale = min(1 / speed(layout.world_size), total / sum(parts))
    computing, between, sums, updated, few = (part * scale for part in parts)
    core = replicas * (sum(busy) + sum(ends) + sum(messages))
    core *= machine["together"](layout.world_size)
    bubble = total - scale * sum(parts)
    return MeasuredTime(computing, bubble, between, sums, updated, few, core)


def speed_of(machine: MeasuredMachine, ranks: int) -> Callable[[int], float]:
    """Returns a function that maps the number of busy ranks to the speed of each.

    The speed is 1 for a single rank with one thread. Ranks slow each other down because they share
    cores, memory, and the caches of a core on which several of them take turns.
    """
    if not machine.shares:
        return lambda busy: 1.0
    cores = machine.made.count
    threads = max(1, cores // ranks)

    def speed(busy: int) -> float:
        own = min(1.0, cores / busy)
        alone = machine["threads"](threads) if threads > 1 else 1.0
        return own / machine["together"](busy) / alone

    return speed


MOST = 4000  # maximum number of layouts that get a time; later ones are skipped
UNKNOWN = MeasuredTime(*[math.inf] * 7)


def price_measured(
    choices: list[LayoutChoice],
    sizes: Mapping[str, float],
    config: Config,
    machine: MeasuredMachine,
) -> PricedLayouts:
    """Returns the time and memory of the layouts that can run, and the order of those that fit.

    Recomputation only costs time, so a layout is priced with more of it only if it does not fit
    with less. Raises UserError if a run would refuse all layouts.
    """
    load = sizes.get("load", 1.0)
    most, own = sizes["memory_bytes"], machine.numbers["rank_gb"] * 1e9
    memory, times = np.full(len(choices), np.inf), [UNKNOWN] * len(choices)
    enough: set[LayoutChoice] = set()
    refused: UserError | None = None
    for i, choice in enumerate(choices):
        same = replace(choice, recompute="")
        if same in enough or len(enough) >= MOST:
            continue
        try:
            world = choice.tp * choice.cp * choice.pp * choice.dp
            checked = check_config(configure(config, choice), world, own_samples=True)
        except UserError as error:
            refused = refused or error
            continue
        memory[i] = own + max(peak_memory(checked, rank, load).total for rank in range(checked.pp))
        if memory[i] <= most:
            times[i] = step_time(checked, machine, load)
            enough.add(same)
    if refused and not np.isfinite(memory).any():  # every layout was refused
        raise refused
    names = StepTime.__dataclass_fields__
    time = StepTime(*(np.array([getattr(one, name) for one in times]) for name in names))
    return ranked(choices, time, memory, most)


def measured_sizes(config: Config, machine: MeasuredMachine, ranks: int) -> dict[str, float]:
    """Returns the fields of `StepWork` that a search needs and that are equal in all layouts."""
    made, memory = machine.made, machine.numbers["memory_gb"] * 1e9
    each = min(1.0, made.count / ranks) if machine.shares else 1.0
    return {
        **sizes_of_model(config.model, trained_shares(config.model, config.optim)),
        "gpus_per_node": ranks,
        "peak": machine.numbers["peak_tflops"] * 1e12 * each,
        "memory_bytes": memory / ranks if machine.shares else memory,
    }
