"""Lists the layouts of a model on a cluster, sorts them by predicted time and explains them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.cluster import cluster_from_config
from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.dispatch import GATHER, largest_load
from parallel3d.blueprint.layout import DEFAULT_ORDER, Layout
from parallel3d.blueprint.parameters import trained_shares
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.blueprint.sizes import STYLES
from parallel3d.blueprint.stages import (
    LayerCosts,
    LayerTraining,
    checked_split,
    layer_training,
    training_costs,
)
from parallel3d.calibrate.record import read
from parallel3d.config.fields import show
from parallel3d.context_parallel.checks import check_context_parallel
from parallel3d.device.datasheets import DEVICES, Device
from parallel3d.errors import UserError, nearest
from parallel3d.estimate.attention_traffic import HeadWidths, sends
from parallel3d.estimate.fitted_cost import (
    NETWORKS,
    ROW_FIELDS,
    SPEEDS,
    Constants,
    Number,
    PricedProduct,
    StepTime,
    StepWork,
    attention,
    context_parallel,
    load_own,
    share_left,
    sizes_of_model,
    step,
)
from parallel3d.estimate.measured_rates import constants_of_machine, sizes_of_machine
from parallel3d.estimate.network import price_step
from parallel3d.estimate.own_cost import elements_by_rank, own_step, own_work
from parallel3d.estimate.rank_layers import PipelineLayers, RankLayers, pipeline_of, table_of
from parallel3d.models import declared
from parallel3d.models.declared import LayerKind
from parallel3d.models.keys import ModelConfig
from parallel3d.models.products import COLUMN, ROW, products_of, repeated_products
from parallel3d.models.repeats import PARTS, Repeats, parts_of, spelled
from parallel3d.models.survey import OwnModelConfig, survey_of
from parallel3d.parameters.declaration import FullTensor
from parallel3d.resolve import blueprint_of, layout_of
from parallel3d.run_config import AnyConfig, Config
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import LOOPED, ONE_CHUNK, V_SHAPED, assignment_of
from parallel3d.trace.own_trace import ModelTrace, WantedParts, traces_of

GIB = 2.0**30
Fixed: TypeAlias = Mapping[str, Any]  # field of `LayoutChoice` → value from the command line
FULL, NONE = "full", "none"
# Sorted by cost: attention takes more seconds to recompute per saved byte than norms and activation
# do.
RECOMPUTE = (NONE, "[norm,activation]", FULL)
WHOLE = ("gpipe", "1f1b", "interleaved")  # schedules that do not split the backward
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# In the search, a context-parallel rank has at least this many tokens of a sequence.
CP_TOKENS = 8192
CHUNKS = (1, 2, 3, 4, 5, 6, 8)
# Largest pipelines in the search, in general and with V-Half. Larger ones take too long to price:
# the time grows with the square of the ranks, and finding a V-Half pattern for 64 ranks takes 2 s.
MOST_STAGES, MOST_V_HALF = 512, 64
# A layout that fills more than NEARLY_FULL of a GPU's memory is sorted as if it took TIGHT times as
# long, because runs on such GPUs have stalled or failed.
NEARLY_FULL, TIGHT = 0.92, 1.05
SAME = 1.005  # layouts within this ratio count as equally fast, and the simpler one comes first


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, described by the values of the configuration keys that select it."""

    tp: int
    pp: int
    vpp: int
    dp: int
    micro_batch_size: int
    schedule: str
    recompute: str  # text from `models.repeats.spelled`
    zero: int
    cp: int = 1
    ep: int = 1

    @property
    def row(self) -> tuple[int, int, int, int]:
        """Returns the values that define a row of the planner's table.

        Layouts that share these values are variants of the same row.
        """
        return self.tp, self.cp, self.pp, self.ep


TYPES = ("bf16", "fp16")


def card_of(config: Config) -> tuple[str, Device]:
    """Returns the name and the data of the cluster's GPU.

    Raises UserError if cluster.gpu is unset or unknown, or if the GPU does not support the dtype.
    """
    named, type = (config.cluster.gpu or "null").lower(), config.precision.name
    found = next((w for w in named.replace("-", " ").split() if w in DEVICES), None)
    if found is None:
        raise UserError(
            f"cluster.gpu={show(config.cluster.gpu)} must be one of {', '.join(DEVICES)}, whose "
            f"speed is known; the nearest is {nearest(named, DEVICES) or 'h100'}"
        )
    known = [t for t in TYPES if t in DEVICES[found].peak]
    if type not in known:
        raise UserError(
            f"precision={type} must be one of {', '.join(known)} on a GPU with the peaks of "
            f"{found}; the nearest is {known[0]}"
        )
    return found, DEVICES[found]


def sizes_of(config: Config, ranks: int = 1) -> dict[str, Any]:
    """Returns the fields of `StepWork` that do not depend on the layout, by name, and `layers_of`.

    The hardware is the one that `cluster.file` has measured, or that of the cluster's datasheet.
    `ranks`: number of ranks of the layouts, which share the cores of a measured CPU.
    """
    file = config.cluster.file
    machine = None if file is None else read(file)
    hardware = _of_datasheet(config) if machine is None else sizes_of_machine(machine, ranks)
    overlaps = float(machine is None or not machine.shares_cores)
    return {
        **sizes_of_model(config.model, trained_shares(config.model, config.optim)),
        **hardware,
        "layers_of": layers_of(config),
        **({} if survey_of(config.model) is None else OF_OWN),
        "item": ITEM_BYTES.get(config.precision.name, 4.0),
        "overlap_tp": overlaps,
        "overlap_pp": overlaps,
        "overlap_dp": overlaps,
        "overlap_ep": overlaps * float(config.moe.overlap),
        "gathers": float(config.moe.dispatch == GATHER),
        "grad_bytes": 4,
        "cp_style": [*STYLES, "auto"].index(config.context_parallel.style),
    }


# Sizes of the transformer that a user's own model has not.
OF_OWN = {"own": 1.0, "heads": 0.0, "kv_heads": 0.0, "ffn": 0.0, "tied": 0.0}


def constants_of(config: Config) -> Constants:
    """Returns the constants of the price for parallel3d's kernels on the cluster of `config`."""
    if config.cluster.file is None:
        return load_own(card_of(config)[0])
    return constants_of_machine(read(config.cluster.file))


ITEM_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp64": 8.0}  # all other types compute with 4 bytes


def _of_datasheet(config: Config) -> dict[str, float]:
    """Returns the fields of `StepWork` that describe the hardware, from the GPU's datasheet."""
    cluster, type = config.cluster, config.precision.name
    name, card = card_of(config)
    like = name.replace("b300", "b200")
    # There are constants for only one of bf16 and fp16 on each card, as both are equally fast.
    speed = next(s for s in (f"{like}/{type}", f"{like}/bf16", f"{like}/fp16") if s in SPEEDS)
    domain = cluster.domain_gpus or cluster.gpus_per_node or 8
    memory = cluster.gpu_memory_gb * 1e9 if cluster.gpu_memory_gb else card.memory_gib * GIB
    moved = cluster.gpu_memory_gb_per_s or card.memory_gb_s
    fabric = "ndr" if cluster.rail_gb_per_s >= 40 else "hdr"
    return {
        "gpus_per_node": domain,
        "peak": card.peak[type] * 1e12,
        "peak_attention": card.peak.get("bf16", 125.0) * 1e12,
        "memory_bytes": memory,
        "memory_rate": moved * 1e9,
        "units": card.units,
        "link_rate": cluster.nvlink_gb_per_s * 1e9,
        "fabric_rate": cluster.rail_gb_per_s * 1e9,
        "speed": SPEEDS.index(speed),
        "fabric": NETWORKS.index(fabric),
    }


@dataclass(frozen=True)
class PricedLayouts:
    """Layouts with their predicted time and memory.

    Attributes:
        choices: the layouts.
        time: seconds of a step of each layout.
        memory: bytes of the fullest GPU of each layout, or NaN if they are not known.
        tight: whether that GPU is nearly full.
        order: indices of the layouts that fit into memory, best first.
    """

    choices: list[LayoutChoice]
    time: StepTime
    memory: Number
    tight: Number
    order: list[int]

    @cached_property
    def seconds(self) -> Number:
        return np.asarray(self.time.total)


def configure(config: Config, choice: LayoutChoice) -> Config:
    """Returns the configuration with the layout `choice`.

    Sequence parallelism is on if tp > 1, and off otherwise; a user's own model keeps its setting.
    """
    schedule = replace(config.schedule, name=choice.schedule)
    moe = replace(config.moe, overlap=config.moe.overlap and can_overlap(choice))
    sp = choice.tp > 1 if survey_of(config.model) is None else config.sp
    keys = vars(choice) | {"sp": sp, "schedule": schedule, "moe": moe}
    return replace(config, **keys)


def can_overlap(choice: LayoutChoice) -> bool:
    """Returns whether `moe.overlap` is supported in this layout."""
    return choice.pp == 1 and choice.ep > 1 and choice.zero < 2


def layouts(
    sizes: Mapping[str, float],
    gpus: int,
    node: int,
    batch: int,
    fixed: Fixed,
    zeros: Sequence[int] = (0, 1, 2, 3),
) -> Iterator[LayoutChoice]:
    """Yields the layouts that are possible on `gpus` GPUs.

    `ep` takes every value that divides the number of experts and the number of ranks of a stage.

    Args:
        sizes: sizes of the model, see `sizes_of`.
        gpus: number of GPUs.
        node: GPUs of an NVLink domain, to which tensor parallelism is limited unless `tp` is fixed.
        batch: global batch size.
        fixed: values that all layouts must have. Unless `cp` is fixed, each context-parallel rank
            has at least CP_TOKENS of a sequence.
        zeros: values of `zero` to try unless it is fixed.
    """
    most = max(1, sizes["seq"] // CP_TOKENS)
    contexts = _allowed(fixed, "cp", (2**i for i in range(int(most).bit_length())))
    tensors = _allowed(fixed, "tp", [t for t in divisors(gpus) if t <= node])
    for tp, cp in product(tensors, contexts):
        if sizes["heads"] % tp or sizes["ffn"] % tp or gpus % (tp * cp):
            continue
        for pp in _allowed(fixed, "pp", divisors(gpus // (tp * cp))):
            too_many = pp > sizes["layers"] or (pp > MOST_STAGES and "pp" not in fixed)
            if too_many or gpus % (tp * cp * pp):
                continue
            dp = gpus // (tp * cp * pp)
            if fixed.get("dp", dp) != dp or batch % dp:
                continue
            mine, layers = batch // dp, sizes["layers"]
            # cp=4 with two sequences computes as much per rank as cp=2 with one sequence, but has
            # more traffic. With cp, a micro-batch therefore has one sequence.
            counts = _allowed(fixed, "micro_batch_size", MICRO_BATCHES if cp == 1 else [1])
            micro = [b for b in counts if mine % b == 0]
            even = [v for v in CHUNKS if v == 1 or (pp > 1 and layers % (pp * v) == 0)]
            if given := stages_given(sizes):  # `schedule.layers_per_stage`
                even = [given // pp] if given % pp == 0 else []
            chunks = [v for v in _allowed(fixed, "vpp", even) if v == 1 or 1 < pp <= layers // v]
            chunks = [v for v in chunks if not given or v * pp == given]
            kinds = [spelled(fixed["recompute"])] if "recompute" in fixed else RECOMPUTE
            if sizes.get("own"):  # it repeats whole blocks
                kinds = [kind for kind in kinds if kind in (NONE, FULL)]
            for ep in expert_sizes(sizes, tp * cp * dp, fixed):
                copies = max(dp * cp, tp * cp * dp // ep if sizes["experts"] > 1 else 1)
                stages = [z for z in _allowed(fixed, "zero", zeros) if copies > 1 or z == 0]
                for v, b, kind, zero in product(chunks, micro, kinds, stages or [0]):
                    if v == 1 or mine // b >= pp:
                        for schedule in schedules(pp, v, zero, fixed.get("schedule")):
                            yield LayoutChoice(tp, pp, v, dp, b, schedule, kind, zero, cp, ep)


def stages_given(sizes: Mapping[str, Any]) -> int:
    """Returns the number of stages in `schedule.layers_per_stage`, or 0 if it is not given."""
    layers: LayersOfModel | None = sizes.get("layers_of")
    return len(layers.given) if layers is not None and layers.given else 0


def expert_sizes(sizes: Mapping[str, float], ranks: int, fixed: Fixed) -> list[int]:
    """Returns the possible expert-parallel sizes for a pipeline stage of `ranks` ranks."""
    experts = int(sizes["experts"])
    every = [ep for ep in divisors(ranks) if experts % ep == 0] if experts > 1 else [1]
    return [ep for ep in _allowed(fixed, "ep", every) if ep in every]


def schedules(pp: int, vpp: int, zero: int, typed: str | None = None) -> list[str]:
    """Returns the possible schedules for these numbers of stages and chunks.

    `typed`: the only schedule to consider, or None for all but GPipe, which needs more memory than
    1F1B. With FSDP2 (zero ≥ 2), schedules with several chunks or a split backward are left out.
    """
    if pp == 1:
        found = ["1f1b"]
    elif vpp == 1:
        found = [name for name in ONE_CHUNK if zero < 2 or name in WHOLE]
    else:
        found = [] if zero >= 2 else [*LOOPED, *(V_SHAPED if vpp == 2 else ())]
    if pp > MOST_V_HALF and "v_half" in found:
        found.remove("v_half")
    return [name for name in found if typed == name or (typed is None and name != "gpipe")]


def divisors(n: int) -> list[int]:
    """Returns all divisors of `n`, smallest first."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _allowed(fixed: Fixed, key: str, all: Iterable[int]) -> list[int]:
    return [int(fixed[key])] if key in fixed else list(all)


_COLUMNS = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "cp": "cp",
    "ep": "ep",
    "zero": "zero",
    "chunks": "vpp",
    "micro_batch": "micro_batch_size",
}


def works(choices: list[LayoutChoice], sizes: Mapping[str, Any], batch: int) -> StepWork:
    """Returns the layouts as one `StepWork`, whose fields have an element per layout.

    `sizes`: see `sizes_of`.
    """
    n = len(choices)
    column: dict[str, Any] = {name: np.full(n, float(sizes.get(name, 0.0))) for name in ROW_FIELDS}
    for name, of in _COLUMNS.items():
        column[name] = np.array([float(getattr(c, of)) for c in choices])
    column["microbatches"] = batch / (column["dp"] * column["micro_batch"])
    counts = column["microbatches"].astype(int).tolist()
    left = [share_left(c.schedule, c.pp, n) for c, n in zip(choices, counts, strict=True)]
    column["split"] = np.array(left)
    parts = [parts_of(c.recompute) for c in choices]
    for part in PARTS:
        column[f"recompute_{part}"] = np.array([float(part in of) for of in parts])
    most = largest_load(column["experts"], column["active_experts"], column["ep"])
    column["load"] = np.minimum(column["load"], most)
    column["overlap_ep"] *= [can_overlap(choice) for choice in choices]
    column["sequence_parallel"] = (column["tp"] > 1).astype(float)
    places = [assignment_of(c.schedule, c.pp, c.vpp) for c in choices]
    layers: LayersOfModel = sizes["layers_of"]
    split = {place: layers.pipeline(place) for place in dict.fromkeys(places)}
    every, index = table_of([*split.values()]), {place: i for i, place in enumerate(split)}
    rows = [index[place] for place in places]
    ranks = RankLayers(*(of[..., rows] for of in every))
    alike = LayoutsOfLayer(column["tp"], column["ep"], [c.recompute for c in choices])
    kinds = [
        _fields_of(kind, training) | {"products": alike.products(layers.model, kind)}
        for kind, training in layers.kinds
    ]
    return StepWork(**column, ranks=ranks, kinds=tuple(kinds))


def priced(config: Config, choices: list[LayoutChoice], sizes: Mapping[str, Any]) -> StepTime:
    """Returns the seconds of a step of each layout; infinity for one that cannot run.

    Raises UserError if a user's own model can run in none.
    """
    work, model = works(choices, sizes, config.global_batch_size), config.model
    if not isinstance(model, OwnModelConfig):
        return step(work, constants_of(config))
    layers: LayersOfModel = sizes["layers_of"]
    trace = partial(trace_of, config)
    return own_step(own_work(work, model), constants_of(config), model, layers.kind_of, trace)


def trace_of(config: Config, tp: int, micro_batch_size: int) -> ModelTrace:
    """Returns the traces of a user's own model on one of `tp` ranks, without recomputation."""
    assert isinstance(config.model, OwnModelConfig)
    one = LayoutChoice(tp, 1, 1, 1, micro_batch_size, "1f1b", NONE, 0)
    batch = replace(config, global_batch_size=micro_batch_size)
    return traces_of(config.model).of(WantedParts.of(planned(configure(batch, one))))


class LayoutsOfLayer(NamedTuple):
    """What the products of a layer depend on, for each row of a table of layouts.

    Attributes:
        tp, ep: sizes of the layouts; with tp, sequence parallelism is on.
        recompute: the values of the key.
    """

    tp: Number
    ep: Number
    recompute: Sequence[str]

    def products(self, model: ModelConfig, kind: LayerKind) -> list[PricedProduct]:
        """Returns the products of a layer, from its declaration."""
        held, keys = declared.layer(model, kind), [*zip(self.recompute, self.ep, strict=True)]
        if kind.own is not None:  # only the number of its elements counts
            return [PricedProduct("block", elements_by_rank(held, self.tp), np.ones(()))]
        repeated = {
            (word, ep): {
                of.name for of in repeated_products(model, kind, Repeats.of(word), int(ep))
            }
            for word, ep in {*keys}
        }
        found = []
        for each in products_of(model, kind):
            matrices = [matrix for matrix in held[each.parameter] if len(matrix.dims) > 1]
            experts, split = matrices[0].experts, {None: "", COLUMN: "column", ROW: "row"}
            sizes = {tp: _local(matrices, int(tp)) for tp in np.unique(self.tp).tolist()}
            inputs, outputs = np.array([sizes[tp] for tp in self.tp.tolist()]).T
            # Each token of a product that is not split is on one tensor-parallel rank.
            rows = (model.experts_per_token if experts else 1) / self.tp
            found.append(
                PricedProduct(
                    each.name,
                    inputs,
                    outputs,
                    split[each.split],
                    rows=rows if each.split is None else 1.0,
                    matrices=experts / self.ep if experts else 1.0,
                    again=np.array([float(each.name in repeated[key]) for key in keys]),
                    of_experts=experts > 0,
                )
            )
        return found


def _local(matrices: Sequence[FullTensor], tp: int) -> tuple[float, float]:
    """Returns the lengths of a row of inputs and of outputs on a rank."""
    shapes = [each.local_shape(tp) for each in matrices]
    return float(shapes[0][-1]), float(sum(math.prod(shape[:-1]) for shape in shapes))


@dataclass(frozen=True)
class LayersOfModel:
    """The layers of a model, and how a run divides them among stages.

    Attributes:
        kinds: the kinds of layers, and how much of each is trained.
        kind_of: index of the kind of each layer.
        costs: the costs by which layers are balanced.
        given: `schedule.layers_per_stage`, or None.
    """

    model: ModelConfig
    kinds: tuple[tuple[LayerKind, LayerTraining], ...]
    kind_of: tuple[int, ...]
    costs: LayerCosts
    given: tuple[int, ...] | None = None

    def pipeline(self, place: StageAssignment) -> PipelineLayers:
        """Returns the ranks of a pipeline. Raises UserError if the layers cannot be divided."""
        if self.given is None:
            counts = self.costs.split(place)
        else:
            counts = checked_split(self.given, len(self.kind_of), place)
        return pipeline_of(counts, place, self.kind_of, len(self.kinds))


def layers_of(config: Config) -> LayersOfModel:
    """Returns the layers of the configuration's model."""
    model, given = config.model, config.schedule.layers_per_stage
    each = [
        (LayerKind.of(model, layer), training)
        for layer, training in enumerate(layer_training(model, config.optim))
    ]
    index = {kind: i for i, kind in enumerate(dict.fromkeys(each))}
    return LayersOfModel(
        model,
        tuple(index),
        tuple(index[kind] for kind in each),
        training_costs(model, config.optim),
        None if given is None else tuple(given),
    )


def _fields_of(kind: LayerKind, training: LayerTraining) -> dict[str, float]:
    """Returns the fields of `StepWork` in which kinds of layers differ."""
    return {
        "attends": float(kind.mixer == declared.ATTENTION),
        "output_norms": float(kind.norm_position != "before"),
        "sparse": float(kind.experts),
        "window": np.inf if kind.window is None else float(kind.window),
        "heads": float(kind.heads),
        "kv_heads": float(kind.kv_heads),
        "head_size": float(kind.head_size),
        "backward": float(training.backward),
        "trained": training.trained,
    }


def ranked(
    choices: list[LayoutChoice], time: StepTime, memory: Number, most: float
) -> PricedLayouts:
    """Returns the layouts with their prices, and with the order of those that fit into memory.

    `most`: bytes of a GPU's memory.
    """
    seconds, tight = np.asarray(time.total), memory > NEARLY_FULL * most
    risked = seconds * np.where(tight, TIGHT, 1.0)
    fits = np.flatnonzero((memory <= most) & np.isfinite(seconds)).tolist()
    order = simple_first(choices, risked, sorted(fits, key=lambda i: risked[i]))
    return PricedLayouts(choices, time, memory, tight, order)


def simple_first(choices: list[LayoutChoice], seconds: Number, order: list[int]) -> list[int]:
    """Returns `order` with layouts of nearly equal times sorted by simplicity."""
    made: list[int] = []
    while order:
        most = seconds[order[0]] * SAME
        same = [i for i in order if seconds[i] <= most]
        made += sorted(same, key=lambda i: (complexity(choices[i]), seconds[i]))
        order = order[len(same) :]
    return made


def complexity(choice: LayoutChoice) -> float:
    """Returns a score that grows with the dimensions and features that a layout uses."""
    found = (choice.tp > 1) + (choice.cp > 1) + (choice.vpp > 1) + (choice.zero > 0)
    found += choice.ep > 1
    found += 2 * (choice.pp > 1)
    found += (choice.recompute != NONE) + (choice.schedule not in WHOLE) + (choice.zero > 1)
    return found + np.log2(choice.tp * choice.cp * choice.pp * choice.ep) / 16


def best(priced: PricedLayouts, rows: int) -> list[int]:
    """Returns the index of the best layout in each of the best `rows` rows (`LayoutChoice.row`)."""
    found: dict[tuple[int, int, int, int], int] = {}
    for i in priced.order:
        found.setdefault(priced.choices[i].row, i)
    return [*found.values()][:rows]


def reason(priced: PricedLayouts, index: int, first: int, node: int) -> str:
    """Returns a phrase that explains why a layout is slower than the best one, `first`.

    For the best layout itself, the phrase says where its time goes. `node`: GPUs of a domain.
    """
    choice = priced.choices[index]
    tight = "; memory is tight" if priced.tight[index] else ""
    total, least = float(priced.seconds[index]), float(priced.seconds[first])
    mine, best = (
        {f.name: float(getattr(priced.time, f.name)[i]) for f in fields(StepTime)}
        for i in (index, first)
    )
    if index == first:
        rest = max([*mine][1:], key=lambda part: mine[part])
        words = f"{100 * mine['compute'] / total:.0f} % of the step is computation"
        if mine[rest] > 0.005 * total:
            share = f"{100 * mine[rest] / total:.0f} %"
            words += f"; most of the rest is {_cause(rest, choice, choice, node)} ({share})"
        return words + tight
    worst = max(mine, key=lambda part: mine[part] - best[part])
    more = mine[worst] - best[worst]
    if total - least <= 0.005 * total or more <= 0:
        return "equally fast, with more to set up" + tight
    why = _cause(worst, choice, priced.choices[first], node)
    return f"+{100 * more / least:.0f} % {why}{tight}"


def _cause(part: str, choice: LayoutChoice, best: LayoutChoice, node: int) -> str:
    """Returns a phrase that explains the seconds in a part of the step.

    For compute, the phrase names a difference from the layout `best`.
    """
    over_cp = f" · cp={choice.cp}" if choice.cp > 1 else ""
    causes = {
        "bubble": f"bubble of {choice.pp} stages",
        "messages": f"messages between {choice.pp * choice.vpp} pieces of the model",
        "gradients": f"sums of gradients over dp={choice.dp}{over_cp}",
        "optimizer": "the optimizer's pass over its state",
        "fixed": "the fixed cost of a step",
    }
    if part != "compute":
        return causes[part]
    if choice.recompute == FULL != best.recompute:
        return "forward passes run again, since the layout does not fit without recompute=full"
    if choice.zero >= 3 > best.zero:
        return "waiting for parameters that zero=3 gathers"
    if choice.tp > node:
        return f"tensor-parallel waits: tp={choice.tp} leaves the NVLink domain"
    if choice.cp > best.cp:
        return f"compute: keys and values of other ranks, and smaller products, at cp={choice.cp}"
    if choice.ep > best.ep:
        return f"the exchange of tokens between the ranks of ep={choice.ep}"
    if choice.tp > best.tp:
        return f"tensor-parallel waits and narrower products at tp={choice.tp}"
    if choice.ep < best.ep:
        return f"fewer rows for each of a rank's experts at ep={choice.ep}"
    return "compute: more work on the slowest stage, or smaller products"


def with_style(config: AnyConfig) -> AnyConfig:
    """Returns the configuration with context_parallel.style=auto replaced by the cheapest style.

    The result is the same on all ranks.
    """
    if config.cp == 1 or config.context_parallel.style != "auto":
        return config
    seconds = style_seconds(config)
    return _of_style(config, min(seconds, key=seconds.__getitem__))


def planned(config: Config, layout: Layout | None = None) -> Blueprint:
    """Returns the blueprint of the configuration, with context_parallel.style=auto resolved.

    `layout`: replaces the layout of the configuration, unless it is None.
    """
    if layout is not None:
        ep = layout.ep or config.ep
        config = replace(config, tp=layout.tp, cp=layout.cp, pp=layout.pp, dp=layout.dp, ep=ep)
    return blueprint_of(with_style(config))


def _of_style(config: AnyConfig, style: str) -> AnyConfig:
    return replace(config, context_parallel=replace(config.context_parallel, style=style))


def style_seconds(config: Config) -> dict[str, float]:
    """Returns style → seconds per micro-batch that a layer waits for cp traffic.

    Only allowed styles are included. If the planner does not know the cluster's GPU, the seconds
    are those of the network, without overlap with compute.
    """
    allowed, split = [], config.tensor_parallel.attention
    for style in STYLES:
        try:
            check_context_parallel(config.model, style, split, tp=config.tp, cp=config.cp)
        except UserError:
            continue
        allowed.append(style)
    try:
        sizes, c = sizes_of(config, _ranks(config)), constants_of(config)
    except UserError:
        return {style: _sent_seconds(config, style) for style in allowed}
    names = vars(config) | {"dp": config.dp or 1, "schedule": config.schedule.name}
    names["recompute"] = spelled(config.recompute)
    choice = LayoutChoice(**{f.name: names[f.name] for f in fields(LayoutChoice)})
    work = works([choice], sizes, config.global_batch_size)
    found = {}
    for style in allowed:
        one = replace(work, cp_style=np.array([STYLES.index(style)]))
        each = [context_parallel(kind, c, sum(attention(kind, c))) for kind in one.by_kind]
        every = zip(one.ranks.totals, each, strict=True)
        found[style] = float(sum(n * seconds for n, seconds in every)[0]) / config.model.num_layers
    return found


def _ranks(config: Config) -> int:
    return config.tp * config.cp * config.pp * (config.dp or 1)


def _sent_seconds(config: Config, style: str) -> float:
    """Returns the network's seconds for a layer's cp traffic, without overlap."""
    layout = layout_of(config)
    cluster = cluster_from_config(config.cluster, layout.world_size)
    order = Tiling.parse(DEFAULT_ORDER, layout)
    tokens, item = config.micro_batch_size * config.local_seq_length, 2
    again = Repeats.of(config.recompute).mixer
    sent = [
        Transfer("cp", s.op, int(s.nbytes), int(s.count + again * s.again), s.what)
        for s in sends(
            style, HeadWidths.of(LayerKind.of(config.model, 0), config.tp), tokens, item, config.cp
        )
    ]
    return price_step(RankMapping.tiled(cluster, layout, order), sent).seconds
