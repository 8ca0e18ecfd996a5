"""Predicts the seconds of a training step by closed formulas with constants from published runs.

All formulas are element-wise, so that one call can price a single layout, a table of measured runs,
or all candidates of a search. `benchmarks/planner/published.py` fits the constants and writes
`constants.json`. Constants of a device and dtype without a measured run are guesses.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from parallel3d.blueprint.collectives import bus_factor
from parallel3d.blueprint.dispatch import load_of_tokens, share_sent
from parallel3d.blueprint.sizes import STYLES, splits_heads
from parallel3d.estimate.attention_traffic import (
    HeadWidths,
    SentCalls,
    exposed,
    halo_sends,
    sends,
)
from parallel3d.estimate.rank_layers import RankLayers
from parallel3d.models.flops import ALL_TRAINED, TrainedShares
from parallel3d.models.keys import ModelConfig
from parallel3d.schedules.schedule import make
from parallel3d.schedules.walk import Costs, walk

Number = NDArray[Any]


FILE = Path(__file__).with_name("constants.json")

SPEEDS = (
    *("v100/fp16", "a100/fp16", "h100/bf16", "h100/fp8", "h100_500w/bf16", "h100_500w/fp8"),
    *("h200/bf16", "h200/fp8", "b200/bf16", "b200/fp8", "b200/fp4"),
    *("gb200/bf16", "gb200/fp8", "gb200/fp4"),
)
NETWORKS = ("hdr", "hdr4", "opa", "roce", "ndr", "efa", "edr")
FAMILIES = {"speed": SPEEDS, "network": NETWORKS}
ENGINE = "megatron"  # the fitted software whose times of the host our own runs are priced with


def from_odds(odds: Number | float) -> Number:
    """Converts odds to a fraction: odds of 1 are 0.5."""
    return np.asarray(odds / (1 + odds))


class GroupRates(NamedTuple):
    """Measured rates of an operation inside a domain, by the number of ranks, which rises."""

    ranks: Number
    rates: Number  # bytes/s through the busiest port
    latencies: Number  # seconds of a small message

    def at(self, ranks: Number | int) -> tuple[Any, Any]:
        """Returns the bytes/s and the latency in groups of `ranks`, between measured sizes."""
        size, known = np.log2(np.maximum(ranks, 1)), np.log2(self.ranks)
        return np.interp(size, known, self.rates), np.interp(size, known, self.latencies)


class Constants:
    """Holds the fitted constants by name; `benchmarks/planner/published_fit.py` describes them.

    `groups`: operation → measured rates inside a domain, in place of the constants of its links.
    """

    def __init__(
        self, values: Mapping[str, float], groups: Mapping[str, GroupRates] | None = None
    ) -> None:
        self.values = values
        self.groups = groups or {}

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def inside(self, op: str, ranks: Number | int, link_rate: Number) -> tuple[Any, Any]:
        """Returns the bytes/s and the latency, in seconds, of an operation inside a domain.

        `link_rate`: bytes/s of a GPU's link to its domain, from the datasheet.
        """
        if op in self.groups:
            return self.groups[op].at(ranks)
        return link_rate * self["link.rate"], 1e-6 * self["link.latency_us"]

    def of(self, family: str, key: str, index: Number) -> Number:
        """Returns the constant `key` for each row, such as the rate of the row's network.

        `index`: for each row, the index of its speed or network in `FAMILIES[family]`.
        """
        values = [self.values[f"{family}.{name}.{key}"] for name in FAMILIES[family]]
        return np.array(values)[np.asarray(index, dtype=int)]


def load() -> Constants:
    """Reads the fitted constants."""
    return Constants(json.loads(FILE.read_text())["constants"])


# GPU → constants for parallel3d's own kernels. They reproduce the seconds in a trace of a llama_1b
# step (docs/gpu.md): GEMMs, attention, element-wise kernels, head and loss, and the optimizer.
OWN_RATES = {
    "h100": {
        "speed.h100/bf16.rate": 0.8129,
        "engine.megatron.flash": 0.5588,
        "memory.rate": 0.7463,
        "head.bytes": 7.096,
        "optimizer.bytes": 30.35,
    }
}


def load_own(card: str) -> Constants:
    """Reads the fitted constants, overridden by those in `OWN_RATES` for the GPU `card`."""
    return Constants({**load().values, **OWN_RATES.get(card, {})})


def range_of_a_new_place() -> tuple[float, float]:
    """Returns the range of measured / predicted seconds for unknown hardware or software.

    When a GPU, network or engine was left out of the fit, 80 % of its runs were in this range.
    """
    low, high = json.loads(FILE.read_text())["ranges"]["place"]
    return low, high


class PricedProduct(NamedTuple):
    """A product with weights in a layer on one tensor-parallel rank, forward and backward.

    Attributes:
        name: its name, for tests and reports.
        inputs, outputs: number of elements per row that it reads and writes (k and n).
        split: "column" (sharded outputs) or "row" (sharded inputs); "" for neither.
        rows: number of rows per token; a product of experts has one for each chosen expert.
        matrices: number of weight matrices; more than one with several experts.
        again: 1 in rows of the table that repeat it in the backward, else 0.
        of_experts: whether it multiplies by the matrices of experts.
    """

    name: str
    inputs: Number
    outputs: Number
    split: str = ""
    rows: Any = 1.0
    matrices: Any = 1.0
    again: Any = 0.0
    of_experts: bool = False

    @property
    def numel(self) -> Number:
        """Number of elements of the weights on this rank."""
        return self.inputs * self.outputs * self.matrices


class ElementwiseBytes(NamedTuple):
    """Bytes per token that element-wise operations of a layer read and write."""

    forward: Any
    backward: Any
    repeated: Any


@dataclass(frozen=True)
class StepWork:
    """Sizes that determine the time of a step: model, layout and hardware.

    Each field has one element per row; a row is a layout. Flags are 0 or 1. Fields that differ
    between the kinds of a model's layers have the values of one kind in `by_kind`. The methods from
    `software` on describe parallel3d's own software; `benchmarks/planner/published_run.py`
    overrides them for published runs of other software.
    """

    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    head_size: Number
    vocab: Number
    tied: Number
    seq: Number
    window: Number  # maximum number of keys that a query sees in a layer with a sliding window
    # Layout
    tp: Number
    pp: Number
    dp: Number
    cp: Number
    cp_style: Number  # index into STYLES, or len(STYLES) for the cheapest style
    chunks: Number  # model chunks per pipeline rank
    split: Number  # share of the bubble that remains with a split backward, or 0 without a split
    micro_batch: Number
    microbatches: Number
    gpus_per_node: Number  # GPUs of one NVLink domain
    ranks: RankLayers  # layers of each kind on the pipeline's ranks
    zero: Number
    # Flags of the parts of `recompute`; a part that another one implies has 0.
    recompute_norm: Number
    recompute_activation: Number
    recompute_attention: Number
    recompute_mlp: Number
    recompute_layer: Number
    sequence_parallel: Number
    overlap_tp: Number
    overlap_pp: Number
    overlap_dp: Number
    grad_bytes: Number
    # Hardware
    peak: Number  # FLOP/s in the dtype of GEMMs
    peak_attention: Number  # FLOP/s in the dtype of attention
    memory_rate: Number  # bytes/s of the GPU's memory
    units: Number  # number of multiprocessors
    link_rate: Number  # bytes/s of NVLink in one direction
    fabric_rate: Number  # bytes/s of one GPU's network bandwidth in one direction
    # Indices into SPEEDS and NETWORKS
    speed: Number
    fabric: Number
    item: Number = field(default_factory=partial(np.full, (), 2.0))  # bytes of a hidden state
    backward: Number = field(default_factory=partial(np.ones, ()))  # flag: a layer has a backward
    trained: Number = field(default_factory=partial(np.ones, ()))  # share of a layer's weights
    # Flags: the embedding is trained, the head is, and so is anything before the head
    embedding_trained: Number = field(default_factory=partial(np.ones, ()))
    head_trained: Number = field(default_factory=partial(np.ones, ()))
    head_reached: Number = field(default_factory=partial(np.ones, ()))
    attends: Number = field(default_factory=partial(np.ones, ()))  # flag: a layer has attention
    output_norms: Number = field(default_factory=partial(np.zeros, ()))  # flag: norms end a layer
    sparse: Number = field(default_factory=partial(np.zeros, ()))  # flag: a layer has experts
    experts: Number = field(default_factory=partial(np.ones, ()))
    active_experts: Number = field(default_factory=partial(np.ones, ()))
    ep: Number = field(default_factory=partial(np.ones, ()))
    # Rows of the experts on the fullest rank, divided by the mean of all ranks
    load: Number = field(default_factory=partial(np.ones, ()))
    overlap_ep: Number = field(default_factory=partial(np.zeros, ()))  # flag: `moe.overlap`
    gathers: Number = field(default_factory=partial(np.zeros, ()))  # flag: `moe.dispatch=gather`
    # For each kind of layer, the fields that differ from those of the other kinds
    kinds: tuple[Mapping[str, Any], ...] = ({},)
    products: Sequence[PricedProduct] = ()

    @property
    def tokens(self) -> Number:
        """Returns the number of tokens of a micro-batch on one context-parallel rank."""
        return self.micro_batch * self.seq / self.cp

    @property
    def share(self) -> Any:
        """Returns the number of ranks over which the residual stream is split."""
        return np.where(self.sequence_parallel > 0, self.tp, 1.0)

    @functools.cached_property
    def head_widths(self) -> HeadWidths:
        """Returns the sizes of attention on one tensor-parallel rank."""
        key_heads = np.maximum(self.kv_heads / self.tp, 1)
        queries = self.heads * self.head_size / self.tp
        return HeadWidths(queries, key_heads * self.head_size, key_heads)

    @functools.cached_property
    def by_kind(self) -> list[Self]:
        """Returns the work with the layers of each kind."""
        found = []
        for own in self.kinds:
            rows: dict[str, Any]
            rows = {name: np.asarray(own[name]) for name in own if name != "products"}
            products = own.get("products", self.products)
            found.append(replace(self, kinds=({},), products=products, **rows))
        return found

    @property
    def has_experts(self) -> bool:
        """Returns whether the layers of this kind have experts."""
        return bool(np.any(self.sparse))

    @property
    def layer_products(self) -> Sequence[PricedProduct]:
        """Returns the products with weights of a layer of this kind."""
        return self.products

    @functools.cached_property
    def parameters(self) -> Any:
        """Returns a rank's number of matrix elements in a layer, without experts."""
        return _elements(self.layer_products, of_experts=False)

    @functools.cached_property
    def expert_parameters(self) -> Any:
        """Returns a rank's number of elements of experts in a layer."""
        return _elements(self.layer_products, of_experts=True)

    @functools.cached_property
    def multiplied(self) -> Any:
        """Returns a rank's multiply-adds per token in the GEMMs of a layer."""
        return sum(of.rows * of.inputs * of.outputs for of in self.layer_products)

    @property
    def ends(self) -> tuple[Any, Any]:
        """Returns the trained elements of embedding and head on a rank that has them."""
        table = self.vocab * self.hidden / self.tp
        return self.embedding_trained * table, self.head_trained * table

    @property
    def edp(self) -> Any:
        """Returns the number of ranks that hold the same experts."""
        return self.tp * self.cp * self.dp / self.ep

    @functools.cached_property
    def share_sent(self) -> Any:
        """Returns the probability that a token is sent to a given rank of its experts' group."""
        share = share_sent(self.experts, self.active_experts, self.ep)
        return np.where(self.gathers > 0, 1.0, share)

    @functools.cached_property
    def load_of_tokens(self) -> Any:
        """Returns the tokens that the fullest rank receives, relative to the mean over ranks."""
        return load_of_tokens(self.load, self.share_sent)

    def software(self, c: Constants, key: str) -> Any:
        """Returns a fitted constant of the software, such as the host's time of a message."""
        return c[f"engine.{ENGINE}.{key}"]

    def rate(self, c: Constants) -> Any:
        """Returns the FLOP/s of a large GEMM."""
        return c.of("speed", "rate", self.speed) * self.peak

    def attention_forward(self, c: Constants) -> Any:
        """Returns the seconds of attention's forward."""
        return self.attention_on(c, np.minimum(self.seq, self.window))

    def attention_on(self, c: Constants, keys: Number) -> Any:
        """Returns the seconds of attention's forward if a query sees at most `keys` keys.

        Kernels skip the masked half of the scores.
        """
        flops, rate = attention_flops(self, keys), attention_rate(self, c)
        causal = np.where(keys < self.seq, 1.0, 0.5)
        # Heads narrower than 96 reach only about three quarters of the speed.
        width = np.where(self.head_size < 96, 0.75, 1.0)
        return flops * causal / (rate * self.software(c, "flash") * width)

    @property
    def attention_backward(self) -> Any:
        """Returns the time of attention's backward, divided by that of its forward."""
        return 2.5

    @property
    def attention_again(self) -> Any:
        """Returns 1 in rows that repeat attention in the backward, else 0."""
        return np.maximum(self.recompute_attention, self.recompute_layer)

    def moved(self, c: Constants) -> ElementwiseBytes:
        """Returns the bytes of all operations of a layer but its products and attention.

        What products read and write, other operations read and write too: norms, activations,
        residual sums. The factor is that of a traced layer (`parallel3d.trace`). Norms read the
        inputs of products from the residual stream, and activations what is inside the MLP.
        """
        norms, every, within = (np.zeros(()) for _ in range(3))
        for of in self.layer_products:
            loaded = of.rows * (self.load if of.of_experts else 1.0)
            reads = of.inputs == self.hidden if of.of_experts else of.split != "row"
            stream = np.where(reads, of.inputs, of.outputs) * loaded / self.share
            other = np.where(reads, of.outputs, of.inputs) * loaded
            if of.of_experts:  # `experts.rows` has the rows of hidden states
                stream = np.zeros(())
            every = every + stream + other
            norms = norms + np.where(reads, 2 * stream, 0.0)
            within = within + other * of.name.startswith("mlp.")
        again = norms * self.recompute_norm
        activation = 0.0 if self.has_experts else self.recompute_activation
        again = again + within * np.maximum(activation, self.recompute_mlp)
        again = np.where(self.recompute_layer > 0, REPEATED * FORWARD * every, again)
        item = self.item
        return ElementwiseBytes(FORWARD * item * every, BACKWARD * item * every, item * again)

    def casts(self, of: PricedProduct, c: Constants, rows: Any) -> tuple[Any, Any]:
        """Returns the seconds that casts of a GEMM's operands add to forward and backward."""
        return 0.0, 0.0

    @property
    def head_slowdown(self) -> Any:
        """Returns how much slower the head's GEMMs are than those of the layers."""
        return 1.0

    def shown_tensor_parallel(self, c: Constants) -> Any:
        """Returns the share of the tp collectives that no GEMM hides."""
        return 1 - self.overlap_tp * from_odds(self.software(c, "tp_hidden"))

    @property
    def message_share(self) -> Any:
        """Returns the number of parts into which tp ranks divide a message to the next stage."""
        return np.where(self.sequence_parallel > 0, self.tp, 1.0)

    def copies_sent(self, inside: Any, nodes: Any) -> tuple[Any, Any]:
        """Returns the numbers of copies of a token that go over NVLink, and over the network.

        One copy goes to each rank that has any of the token's experts.

        Args:
            inside: ranks of ep in one node.
            nodes: nodes over which ep extends.
        """
        return self.share_sent * (inside - 1), self.share_sent * (self.ep - inside)

    @property
    def exchanges(self) -> Any:
        """Returns the number of exchanges of tokens in a layer's forward, backward and repetition.

        The way there is repeated with the experts, and the way back only before a norm.
        """
        there = np.maximum(self.recompute_mlp, self.recompute_layer)
        back = self.recompute_layer * self.output_norms
        return 2 + self.backward * (2 + there + back)

    def host_of_layer(self, c: Constants) -> Any:
        """Returns the seconds that the host needs to launch a layer's kernels.

        They grow with tp, and more so if pipeline messages and tp collectives share the threads
        that drive the network.
        """
        launches = 1 + self.recompute_layer / 3
        tensor = np.where(self.tp > 1, self.software(c, "launch_tp_us"), 0.0)
        tensor = tensor + self.software(c, "slowest_us") * (np.minimum(self.tp, 8) / 8) ** 2
        ranks = self.tp * self.cp * self.pp * self.dp
        spread = (self.pp > 1) & (self.tp > 1) & (ranks > self.gpus_per_node)
        wide = self.tp * np.sqrt(np.maximum(self.tp / self.gpus_per_node, 1.0))
        crowd = np.where(spread, c.of("network", "crowd_us", self.fabric) * wide, 0.0)
        return 1e-6 * (launches * (self.software(c, "launch_us") + tensor) + crowd)

    def host_of_batch(self, c: Constants) -> Any:
        """Returns the seconds that the host needs for a micro-batch beside its layers."""
        return 1e-6 * self.software(c, "batch_us")


# Fields with one number for each row.
ROW_FIELDS = [f.name for f in fields(StepWork) if f.name not in ("ranks", "kinds", "products")]


# Elements that the operations between products read and write in the forward and the backward of a
# layer, as a multiple of those that its products read and write; and the share of the forward's
# that a whole recomputation repeats. They are those of traces of llama_1b on one rank.
FORWARD, BACKWARD, REPEATED = 1.3, 1.68, 0.88


def _elements(products: Sequence[PricedProduct], *, of_experts: bool) -> Any:
    return sum(each.numel for each in products if each.of_experts is of_experts)


def sizes_of_model(model: ModelConfig, shares: TrainedShares = ALL_TRAINED) -> dict[str, float]:
    """Returns the fields of `StepWork` that depend only on the model and on its trained parts."""
    return {
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_attention_heads,
        "kv_heads": model.kv_heads,
        "head_size": model.head_size,
        "ffn": model.ffn_size,
        "vocab": model.padded_vocab_size,
        "tied": float(model.tie_embeddings),
        "seq": model.seq_length,
        "window": np.inf,
        "experts": max(model.num_experts, 1),
        "active_experts": max(model.experts_per_token, 1),
        "ep": 1,
        "load": 1,
        "attends": 1,
        "backward": 1,
        "trained": 1,
        "embedding_trained": shares.embedding,
        "head_trained": shares.head,
        "head_reached": float(shares.backward > 0),
    }


# Time of a pipeline in closed form (tested against `schedules/walk.py`)

# Share of the bubble that remains with a split backward: (F + I - W) / (F + I + W), where forward,
# input gradient and weight gradient cost F : I : W = 1 : 1.2 : 0.8. Simulations of zb_h1 and
# interleaved_zb agree within 0.02; with zbv, 0.2 of 1F1B's bubble remains.
SPLIT_BUBBLE = 0.47
_COSTS = (1.0, 1.2, 0.8)
_CLOCKED = 16  # V-Half has no closed form, so it is simulated, with at most this many ranks


def share_left(schedule: str, ranks: int, microbatches: int) -> float:
    """Returns the share of the bubble that remains with a split backward, or 0 without a split."""
    if schedule == "v_half":
        return _v_half(min(ranks, _CLOCKED), microbatches * min(ranks, _CLOCKED) // ranks)
    return {"zb_h1": SPLIT_BUBBLE, "interleaved_zb": SPLIT_BUBBLE, "zbv": 0.4}.get(schedule, 0.0)


@functools.lru_cache(maxsize=256)
def _v_half(ranks: int, microbatches: int) -> float:
    """Returns `share_left` for V-Half, extrapolated from two simulations.

    The idle time is linear in the number of micro-batches.
    """
    if ranks == 1:
        return 1.0
    few, many = (_idle(ranks, count) for count in (2 * ranks, 3 * ranks))
    idle = few + (many - few) / ranks * (microbatches - 2 * ranks)
    return max(idle, 0.1) * 2 / (ranks - 1)


@functools.lru_cache(maxsize=64)
def _idle(ranks: int, microbatches: int) -> float:
    """Returns the idle time of V-Half in units of a micro-batch's time."""
    made = make("v_half", ranks, microbatches, 2)
    found = walk(made.orders, made.assignment, Costs.even(made.assignment, *_COSTS)).ended()
    return found.seconds / sum(_COSTS) - microbatches


def pipeline_time(
    slowest: Number,
    total: Number,
    microbatches: Number,
    chunks: Number,
    split: Number | float = 0.0,
) -> Any:
    """Returns the seconds that the pipeline takes for all micro-batches of a step.

    The slowest stage waits only while the other stages fill and drain the pipeline.

    Args:
        slowest: seconds of a micro-batch's forward and backward on the slowest stage.
        total: sum of these seconds over all stages.
        microbatches: number of micro-batches.
        chunks: model chunks per pipeline rank.
        split: share of the bubble that remains (`share_left`), or 0 if no backward is split.
    """
    left = np.where(np.asarray(split) > 0, split, 1.0)
    return microbatches * slowest + np.maximum(total - slowest, 0) / chunks * left


# Tiles of a GEMM: rows, columns, splits of k, and how often the largest tile was halved.
_TILES = ((256, 128, 1, 0), (128, 128, 1, 1), (128, 64, 1, 2), (256, 128, 4, 0), (128, 128, 3, 1))


def smooth_max(a: Number, b: Number, power: float = 4.0) -> Any:
    """Returns max(a, b), plus a margin if they are close, because neither fully hides the other."""
    return (a**power + b**power) ** (1 / power)


def gemm(
    work: StepWork, c: Constants, m: Number, n: Number, k: Number, groups: Number | int = 1
) -> Any:
    """Returns the seconds of an (m, k) × (k, n) matmul, or of `groups` of them in one kernel.

    The rate of large matmuls is reduced for a short k (fill and drain of each tile), for tiles that
    reach over the edge, for an incomplete last wave (only in part, as cuBLAS chooses among tiles),
    and for an n or k that is not a multiple of 64. A row with a size of 0 has no matmul and takes
    no time.
    """
    exists = m * n * k * groups > 0
    m, n, k, groups = (np.maximum(size, 1e-9) for size in (m, n, k, groups))
    ragged = (np.mod(n, 64) != 0) | (np.mod(k, 64) != 0)
    rate = work.rate(c) * np.where(ragged, c["gemm.ragged"], 1.0)
    compute: Any = np.inf
    for rows, columns, parts, share in _TILES:
        waves = groups * np.ceil(m / rows) * np.ceil(n / columns) * parts / work.units
        wave = (np.ceil(waves) / waves) ** c["gemm.wave"] * waves * work.units
        tile = 2.0 * rows * columns * (k / parts + c["gemm.ramp"])
        compute = np.minimum(compute, wave * tile / (rate * c["gemm.small_tile"] ** share))
    moved = work.item * groups * (m * k + k * n + m * n) / (work.memory_rate * c["memory.rate"])
    return np.where(exists, smooth_max(compute, moved) + c["gemm.gap_us"] * 1e-6, 0.0)


def move(work: StepWork, c: Constants, bytes: Number) -> Any:
    """Returns the seconds of operations that move `bytes` through memory."""
    return bytes / (work.memory_rate * c["memory.rate"])


def attention(work: StepWork, c: Constants) -> tuple[Any, Any]:
    """Returns the (forward, backward) seconds of one layer's scores, softmax and values."""
    forward = work.attention_forward(c) + 3 * c["gemm.gap_us"] * 1e-6
    return forward, work.attention_backward * forward


def attention_flops(work: StepWork, keys: Number) -> Any:
    """Returns the FLOPs of attention's forward if each query sees `keys` keys."""
    queries = work.micro_batch * work.heads / work.tp * work.seq / work.cp
    return 4.0 * queries * keys * work.head_size


def attention_rate(work: StepWork, c: Constants) -> Any:
    """Returns the FLOP/s of a large GEMM in the dtype of attention."""
    odd = np.where(np.mod(work.head_size, 8) != 0, c["attention.odd_head"], 1.0)
    return c.of("speed", "rate", work.speed) * work.peak_attention * odd


def collective(
    work: StepWork,
    c: Constants,
    op: str,
    bytes: Number,
    ranks: Number,
    stride: Number | int,
    steps: Number | int,
) -> Any:
    """Returns the seconds of a collective over `ranks` GPUs that are `stride` apart.

    Inside a node, the rate and the latency are those of NVLink. Between nodes, the rate is at most
    the network bandwidth of the group's own GPUs in one node, because the node's other groups
    communicate at the same time, and the network's latency counts `steps` times.
    """
    wire = bus_factor(op, ranks) * bytes / ring_rate(work, c, op, ranks, stride)
    return np.where(ranks > 1, wire + latency(work, c, ranks, stride, steps, op), 0.0)


def ring_rate(work: StepWork, c: Constants, op: str, ranks: Number, stride: Number | int) -> Any:
    """Returns the bytes/s of a collective through the busiest port of a GPU."""
    members = _members(work, ranks, stride)
    link, _ = c.inside(op, members, work.link_rate)
    fabric = work.fabric_rate * c.of("network", "rate", work.fabric) * members
    return np.where(members >= ranks, link, np.minimum(link, fabric))


def _members(work: StepWork, ranks: Number, stride: Number | int) -> Any:
    """Returns how many of a group's GPUs are in one node."""
    return np.clip(np.floor(work.gpus_per_node / stride), 1, ranks)


def latency(
    work: StepWork,
    c: Constants,
    ranks: Number,
    stride: Number | int,
    steps: Number | int,
    op: str = "all_gather",
) -> Any:
    """Returns the latency, in seconds, of a collective with `steps` steps over the network.

    Inside a node, it is the latency of NVLink, whatever `steps` is.
    """
    members = _members(work, ranks, stride)
    network = 1e-6 * c.of("network", "latency_us", work.fabric) * steps
    _, inside = c.inside(op, members, work.link_rate)
    return inside + np.where(members >= ranks, 0, network)


# All-gathers over up to this many ranks have the latency of a ring; larger groups add a tree's.
_RING = 32


def gather(
    work: StepWork,
    c: Constants,
    bytes: Number,
    ranks: Number,
    stride: Number | int,
    op: str = "all_gather",
) -> Any:
    """Returns the seconds of an all-gather or reduce-scatter of `bytes`."""
    steps = np.where(ranks > _RING, _RING - 1 + 6 * np.log2(ranks / _RING), ranks - 1)
    return collective(work, c, op, bytes, ranks, stride, steps)


def reduce(work: StepWork, c: Constants, bytes: Number, ranks: Number, stride: Number | int) -> Any:
    """Returns the seconds of an all-reduce of `bytes`, with the latency of a tree."""
    steps = 2 * np.log2(np.maximum(ranks, 2))
    return collective(work, c, "all_reduce", bytes, ranks, stride, steps)


def message(work: StepWork, c: Constants, inside: Any) -> tuple[Any, Any]:
    """Returns the bytes/s and the seconds of latency between two GPUs.

    They are those of NVLink if both are `inside` a node, and else those of the network.
    """
    fabric = work.fabric_rate * c.of("network", "rate", work.fabric)
    link, wait = c.inside("send_recv", 2, work.link_rate)
    begin = 1e-6 * c.of("network", "begin_us", work.fabric)
    return np.where(inside, link, fabric), np.where(inside, wait, begin)


def hop(work: StepWork, c: Constants) -> Any:
    """Returns the seconds to send a micro-batch's activations to the next stage.

    The receiving rank is tp × cp × dp ranks away.
    """
    stride = work.tp * work.cp * work.dp
    bytes = work.item * work.micro_batch * work.seq / work.cp * work.hidden
    rate, wire = message(work, c, stride * work.pp <= work.gpus_per_node)
    software = 1e-6 * work.software(c, "hop_us")
    return np.where(work.pp > 1, bytes / work.message_share / rate + software + wire, 0.0)


def layer(work: StepWork, c: Constants) -> tuple[dict[str, Number], Number]:
    """Returns (kind → seconds on the GPU, total seconds) of a layer's forward and backward.

    The total is about the host's time if the launches take longer than the kernels.
    """
    parts, waits = _of_layer(work, c)
    if work.has_experts:
        parts["exchange of tokens"] = work.exchanges * exchange(work, c)
    attends = parts["attention"]
    parts["tp collectives"] = waits + context_parallel(work, c, attends)
    if work.has_experts and np.any(work.overlap_ep):
        computes = sum(parts.values()) - parts["exchange of tokens"]
        # No kernel is launched while the host waits for the row counts.
        waits = np.where(work.ep > 1, 1e-6 * c["experts.wait_us"], 0.0)
        wire = parts["exchange of tokens"] - work.exchanges * waits
        hidden = work.overlap_ep * hidden_seconds(wire, computes, work.microbatches)
        parts["exchange of tokens"] = parts["exchange of tokens"] - hidden
    return parts, smooth_max(sum(parts.values()), _host(work, c), c["launch.power"])


def _of_layer(work: StepWork, c: Constants) -> tuple[dict[str, Any], Any]:
    """Returns (kind → seconds on the GPU, exposed seconds of tp collectives) of a layer."""
    forward, backward = (work.attends * each for each in attention(work, c))
    moved = work.moved(c)
    parts: dict[str, Any] = {"matmuls": 0.0, "attention": forward + work.backward * backward}
    both = moved.forward + work.backward * moved.backward
    parts["element-wise"] = move(work, c, work.tokens * both)
    again = move(work, c, work.tokens * moved.repeated) + work.attention_again * forward
    waits: Any = 0.0
    for of in work.layer_products:
        ahead, behind = seconds(of, work, c)
        parts["matmuls"] = parts["matmuls"] + ahead + behind
        again = again + of.again * ahead
        if of.split:
            waits = waits + _tensor_parallel(of, work, c)
    parts["recomputed"] = work.backward * again
    return parts, work.shown_tensor_parallel(c) * waits


def seconds(of: PricedProduct, work: StepWork, c: Constants) -> tuple[Any, Any]:
    """Returns the (forward, backward) seconds of a product on the GPU."""
    rows = work.tokens * (of.rows * (work.load if of.of_experts else 1.0))
    if of.of_experts:
        forward, of_input, of_weight, copied = _grouped(of, work, c, rows)
    else:
        forward, of_input, of_weight = _matmul(work, c, rows, of.inputs, of.outputs)
        copied = 0.0
    backward = work.backward * (of_input + copied) + work.trained * of_weight
    ahead, behind = work.casts(of, c, rows)
    return forward + copied + ahead, backward + behind


def _grouped(
    of: PricedProduct, work: StepWork, c: Constants, rows: Any
) -> tuple[Any, Any, Any, Any]:
    """Returns the seconds of a grouped GEMM over all experts of a rank, in four parts.

    The parts are the forward, the input gradient, the weight gradient, and the kernel that gathers
    or sums the rows of hidden states.
    """
    groups, slower = of.matrices, c["experts.rate"]
    each = rows / groups
    hidden = 2 * work.item * rows * work.hidden
    return (
        gemm(work, c, each, of.outputs, of.inputs, groups) / slower,
        gemm(work, c, each, of.inputs, of.outputs, groups) / slower,
        gemm(work, c, of.inputs, of.outputs, each, groups) / slower,
        move(work, c, hidden * c["experts.rows"]),
    )


def _matmul(
    work: StepWork, c: Constants, rows: Any, inputs: Any, outputs: Any
) -> tuple[Any, Any, Any]:
    """Returns the seconds of a GEMM, of its input gradient and of its weight gradient."""
    return (
        gemm(work, c, rows, outputs, inputs),
        gemm(work, c, rows, inputs, outputs),
        gemm(work, c, inputs, outputs, rows),
    )


def _tensor_parallel(of: PricedProduct, work: StepWork, c: Constants) -> Any:
    """Returns the seconds of a GEMM's tp collectives in forward, backward and recomputation.

    With sequence parallelism, the input of a column-parallel GEMM is gathered in the forward and
    again for the weight gradient, where the GEMM of the input gradient hides half of the time.
    Without it, the output of a row-parallel GEMM and the input gradient of a column-parallel GEMM
    are all-reduced.
    """
    bytes = work.item * work.tokens * work.hidden
    one = gather(work, c, bytes, work.tp, 1)
    summed = reduce(work, c, bytes, work.tp, 1)
    sp, back = work.sequence_parallel, work.backward
    again = back * of.again
    if of.split == "column":
        return sp * (1 + 1.5 * back + again) * one + (1 - sp) * back * summed
    return np.where(sp > 0, (1 + back) * one, summed) + again * np.where(sp > 0, one, summed)


def context_parallel(work: StepWork, c: Constants, attends: Any) -> Any:
    """Returns the exposed seconds of a layer's cp traffic in the style `work.cp_style`.

    Layers with a window send only the keys and values that the window reaches, by all-to-all, if
    the style is gather or ring.

    `attends`: seconds of attention in forward and backward.
    """
    ranks, stride, heads = work.cp, work.tp, work.head_widths
    rate, _ = message(work, c, ranks * stride <= work.gpus_per_node)
    wait = latency(work, c, ranks, stride, 1, "send_recv")
    again = work.attention_again

    def calls(sent: SentCalls) -> Any:
        return sent.count - sent.backward + work.backward * (sent.backward + again * sent.again)

    # Each of a rank's two pieces of a sequence needs the keys of a window before it.
    most = work.seq * (1 - 1 / ranks)
    reached = work.micro_batch * np.minimum(2 * (np.minimum(work.window, work.seq) - 1), most)
    halo: Any = 0.0
    for sent in halo_sends(heads, reached, reached, work.item):
        halo = halo + calls(sent) * (sent.nbytes / rate + wait)
    found = []
    for style in STYLES:
        total: Any = 0.0
        for sent in sends(style, heads, work.tokens, work.item, ranks):
            if sent.op in ("all_gather", "reduce_scatter"):
                one = gather(work, c, sent.nbytes, ranks, stride, sent.op)
            else:
                one = bus_factor(sent.op, ranks) * sent.nbytes / rate + wait
            total = total + calls(sent) * one
        total = exposed(style, total, attends, c["cp.exposed"])
        if style != "heads":
            total = np.where(work.window < work.seq, halo, total)
        possible = (style != "heads") | splits_heads(work.heads / work.tp, heads.key_heads, ranks)
        total = np.where((ranks > 1) & (work.attends > 0), total, 0.0)
        found.append(np.where(possible, total, np.inf))
    same = np.broadcast_arrays(*found)
    return np.choose(work.cp_style.astype(int), [*same, np.minimum.reduce(same)])


def exchange(work: StepWork, c: Constants) -> Any:
    """Returns the seconds to send all tokens to their experts, or the results back.

    This is the time of the fullest rank on NVLink or on the network, whichever is slower, plus the
    wait for the host, which reads the row counts.
    """
    ep = work.ep
    inside = np.minimum(ep, work.gpus_per_node)
    nodes = np.maximum(ep / inside, 1.0)
    here, away = work.copies_sent(inside, nodes)
    bytes = work.item * work.hidden * work.tokens / work.share * work.load_of_tokens
    link, begin = c.inside("all_to_all", inside, work.link_rate)
    link = link * c["experts.link"]
    network = work.fabric_rate * c.of("network", "rate", work.fabric) * c["experts.network"]
    wire = np.maximum(here * bytes / link, away * bytes / network)
    steps = np.where(nodes > 1, np.log2(nodes), 0.0)
    delay = c.of("network", "latency_us", work.fabric) * steps + c["experts.wait_us"]
    return np.where(ep > 1, wire + begin + 1e-6 * delay, 0.0)


# Share of an H100's multiprocessors that NCCL takes from kernels that run at the same time.
SENDING = 16 / 132


def hidden_seconds(exchanges: Any, computes: Any, microbatches: Any) -> Any:
    """Returns the seconds of exchanges of tokens that `moe.overlap` hides.

    The first forward and the last backward have no other pass to overlap with, and exchanges slow
    what computes beside them.

    Args:
        exchanges: seconds of the exchanges without overlap.
        computes: seconds that the same layers compute.
        microbatches: number of micro-batches in a step.
    """
    return (1 - SENDING) * (1 - 1 / microbatches) * np.minimum(exchanges, computes)


def _host(work: StepWork, c: Constants) -> Any:
    """Returns the seconds that the host needs to launch a layer's kernels."""
    found = work.host_of_layer(c)
    if not work.has_experts:
        return found
    launches = 1 + work.recompute_layer / 3
    return found + launches * c["experts.launch_us"] * 1e-6


def head(work: StepWork, c: Constants) -> Any:
    """Returns the seconds of the head and the loss in forward and backward."""
    rows, columns = work.tokens, work.vocab / work.tp
    forward, of_input, of_weight = _matmul(work, c, rows, work.hidden, columns)
    matmuls = forward + (work.head_reached * of_input + work.head_trained * of_weight)
    return matmuls * work.head_slowdown + move(work, c, rows * columns * c["head.bytes"])


def _ends(work: StepWork, c: Constants) -> Any:
    """Returns the seconds of embedding and head on each rank of the pipeline."""
    ranks = work.ranks
    first = np.where(ranks.embeds > 0, embedding(work, c), 0.0)
    return first + np.where(ranks.heads > 0, head(work, c), 0.0)


def embedding(work: StepWork, c: Constants) -> Any:
    """Returns the seconds of the embedding's look-up and of its gradient."""
    return move(work, c, work.tokens * work.hidden * 8 * work.item / work.share) + 2e-5


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; each part is a number or an array.

    Attributes:
        compute: time of the slowest stage, including exposed collectives inside its layers.
        bubble: time in which the slowest stage waits for the pipeline to fill and drain.
        messages: exposed messages between stages.
        gradients: exposed reductions of gradients and all-gathers of updated parameters.
        optimizer: the optimizer's update.
        fixed: constant overhead per step.
    """

    compute: Any
    bubble: Any
    messages: Any
    gradients: Any
    optimizer: Any
    fixed: Any

    @property
    def total(self) -> Any:
        parts = (self.messages, self.gradients, self.optimizer, self.fixed)
        return self.compute + self.bubble + sum(parts)


def step(work: StepWork, c: Constants) -> StepTime:
    """Returns the seconds of one step by part, with an element for each row of `work`."""
    layers = [layer(kind, c)[1] for kind in work.by_kind]
    return assembled(work, c, layers, embedding(work, c), head(work, c))


def assembled(
    work: StepWork, c: Constants, layers: Sequence[Any], of_embedding: Any, of_head: Any
) -> StepTime:
    """Does the same as `step` from the seconds of a micro-batch's forward and backward.

    `layers`: those of a layer of each kind.
    """
    batch = work.host_of_batch(c)
    ranks = work.ranks
    pairs = zip(work.by_kind, layers, strict=True)
    seconds = [_gathered(kind, c, each) for kind, each in pairs]
    first = np.where(ranks.embeds > 0, of_embedding, 0.0)
    ends = first + np.where(ranks.heads > 0, of_head, 0.0)
    held = np.where(ranks.exist, _sum(ranks.counts, seconds) + ends + batch, 0.0)
    slowest = held.max(axis=0)
    total = _sum(ranks.totals, seconds) + of_head + of_embedding + batch * work.pp
    span = pipeline_time(slowest, total, work.microbatches, work.chunks, work.split)
    busy = work.microbatches * slowest
    backward = held[0] * 2 / 3
    return StepTime(
        busy,
        span - busy,
        _messages(work, c),
        _gradients(work, c, backward),
        _optimizer(work, c),
        c["step.fixed_us"] * 1e-6 + 0 * work.layers,
    )


def _sum(counts: Iterable[Any], of_kinds: Iterable[Any]) -> Any:
    """Returns the sum over the kinds of layers of their number times a value."""
    pairs = zip(counts, of_kinds, strict=True)
    return sum(np.where(count > 0, count * value, 0.0) for count, value in pairs)


def stage_parameters(work: StepWork) -> Any:
    """Returns the trained elements, without experts, of each rank of the pipeline."""
    ranks = work.ranks
    layers = _sum(ranks.counts, (kind.trained * kind.parameters for kind in work.by_kind))
    of_embedding, of_head = work.ends
    shared = (ranks.embeds > 0) & (work.tied > 0)
    own_head = np.where(shared, 0, of_head)
    first = layers + np.where(ranks.embeds > 0, of_embedding, 0)
    return first + np.where(ranks.heads > 0, own_head, 0)


def expert_parameters(work: StepWork) -> Any:
    """Returns the trained elements of experts of each rank of the pipeline."""
    each = (kind.trained * kind.expert_parameters for kind in work.by_kind)
    return _sum(work.ranks.counts, each)


def _gathered(work: StepWork, c: Constants, each: Number) -> Any:
    """Returns a layer's seconds, including the communication of zero=3.

    zero=3 gathers the parameters twice and reduces the gradients once, overlapped with compute if
    reductions of gradients overlap.
    `each`: seconds of the layer without this communication, returned in rows without zero=3.
    """
    ranks, stride = work.dp * work.cp, work.tp
    one = gather(work, c, work.item * work.parameters, ranks, stride)
    ring = latency(work, c, ranks, stride, ranks - 1) * np.where(ranks > 1, 1.0, 0.0)
    if work.has_experts:
        one = one + gather(work, c, work.item * work.expert_parameters, work.edp, work.ep)
        rings = latency(work, c, work.edp, work.ep, work.edp - 1)
        ring = ring + rings * np.where(work.edp > 1, 1.0, 0.0)
    wire = 3 * (one + ring * work.software(c, "dp_messages"))
    hidden = smooth_max(each, wire * c["fsdp.contention"])
    both = np.where(work.overlap_dp > 0, hidden, each + wire)
    return np.where(work.zero >= 3, both, each)


def _messages(work: StepWork, c: Constants) -> Any:
    """Returns the exposed seconds of pipeline messages.

    There are two messages for each micro-batch and chunk, plus the messages of the fill and drain.
    """
    shown = c["pp.exposed"] * (1 - work.overlap_pp * from_odds(c["pp.hidden"]))
    trips = 2 * (work.microbatches * work.chunks + work.pp - 1)
    return trips * hop(work, c) * shown


def _gradients(work: StepWork, c: Constants, backward: Number) -> Any:
    """Returns the seconds of gradient reductions that the last backward does not hide.

    They include the all-gather of parameters with zero=1 and zero=2. Layers are reduced one by one,
    so each adds the latency of a ring over all ranks; with hundreds of ranks, this exceeds the time
    to transfer the bytes. `backward`: seconds of the backward.
    """
    layers, ranks = work.ranks.layers, work.dp * work.cp
    most = layers.max(axis=0)
    reduced, returned = _reductions(work, c, stage_parameters(work), most, ranks, work.tp)
    if any(kind.has_experts for kind in work.by_kind):
        sparse = _sum(work.ranks.counts, (float(kind.has_experts) for kind in work.by_kind))
        most = sparse.max(axis=0)
        more = _reductions(work, c, expert_parameters(work), most, work.edp, work.ep)
        reduced = reduced + np.where(most > 0, more[0], 0.0)
        returned = returned + np.where(most > 0, more[1], 0.0)
    odds = work.software(c, "dp_hidden")
    hidden = np.minimum(work.overlap_dp * from_odds(odds) * reduced, backward)
    shown = reduced - hidden + returned * (1 - work.overlap_dp * from_odds(odds))
    return shown.max(axis=0)


def _reductions(
    work: StepWork, c: Constants, elements: Any, layers: Any, ranks: Any, stride: Any
) -> tuple[Any, Any]:
    """Returns the seconds of the reduction of gradients and of the all-gather of parameters.

    `elements`, `layers`: trained elements and number of layers, which are reduced one by one.
    """
    summed = reduce(work, c, work.grad_bytes * elements, ranks, stride)
    cut = gather(work, c, work.grad_bytes * elements, ranks, stride, "reduce_scatter")
    back = gather(work, c, work.item * elements, ranks, stride)
    ring = latency(work, c, ranks, stride, ranks - 1) * np.where(ranks > 1, layers, 0.0)
    ring = ring * work.software(c, "dp_messages")
    reduced = np.where(work.zero >= 3, 0.0, np.where(work.zero > 0, cut, summed) + ring)
    return reduced, np.where((work.zero > 0) & (work.zero < 3), back + ring, 0.0)


def _optimizer(work: StepWork, c: Constants) -> Any:
    ranks = np.where(work.zero > 0, work.dp * work.cp, 1.0)
    elements = stage_parameters(work) / ranks
    elements = elements + expert_parameters(work) / np.where(work.zero > 0, work.edp, 1.0)
    return move(work, c, elements.max(axis=0) * c["optimizer.bytes"])


def breakdown(work: StepWork, c: Constants, compute: float) -> dict[str, float]:
    """Returns kind → seconds of the busiest stage; the seconds add up to `compute`.

    `work` must have a single row. The time beyond kernels and exposed collectives is listed as
    launches; it includes the gathers of zero=3.
    """
    ends, counts = _ends(work, c), work.ranks.counts
    priced = [layer(kind, c) for kind in work.by_kind]
    busiest = int(np.argmax((_sum(counts, (total for _, total in priced)) + ends)[:, 0]))
    micro = float(work.microbatches[0])
    found: dict[str, float] = {}
    for count, (parts, _) in zip(counts, priced, strict=True):
        for part, each in parts.items():
            seconds = float(np.broadcast_to(each, np.shape(work.microbatches))[0])
            found[part] = found.get(part, 0.0) + micro * float(count[busiest, 0]) * seconds
    found["head and embedding"] = micro * float(ends[busiest, 0])
    rest = compute - sum(found.values())
    if rest < 0:  # the host never makes the GPU wait, and kernels overlap a little
        found = {kind: value * compute / sum(found.values()) for kind, value in found.items()}
    return found | {"launches": max(rest, 0.0)}
