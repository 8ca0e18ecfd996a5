"""Lists the operations of a transformer layer on one tensor-parallel rank, for all estimates.

Parameters, FLOPs, kept activations and collectives are sums over `layer_ops`, and times
are sums over the times of its operations. `parallel3d dryrun` runs the model itself, so a
comparison with it tests the list (`benchmarks/planner/plan_dryrun.py`). A new kind of layer needs
its modules in `models/` and its operations here.

Sizes are numbers for one configuration, or numpy arrays for a table of layouts.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallel3d.blueprint.dispatch import (
    ALL_TO_ALL,
    chosen_way,
    load_of_tokens,
    most_load,
    share_sent,
)
from parallel3d.blueprint.sizes import Number
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.models import declared
from parallel3d.models.declared import LayerKind
from parallel3d.models.keys import ModelConfig


class NormCost(NamedTuple):
    """One norm of the hidden states.

    Attributes:
        keeps: number of tensors of the input's size that are kept until the backward.
        statistics: number of fp32 values per token that are also kept until the backward.
        has_bias: whether the norm has a bias as well as a weight.
    """

    keeps: int
    statistics: int
    has_bias: bool = False


NORMS = {
    "layernorm": NormCost(1, 2, has_bias=True),
    "rmsnorm": NormCost(1, 1),
}


class ExpertWidths(NamedTuple):
    """Sizes of a layer's experts on one rank.

    Widths, and numbers of experts and ranks, are numpy arrays for a table of layouts.

    Attributes:
        experts: number of experts of the layer.
        chosen: number of experts that each token uses.
        ep: number of ranks over which the experts are divided.
        way: how tokens reach the experts, `gather` or `all_to_all`, or "" if all are on one rank.
        ffn: width of an expert.
        shared: width of the shared expert on a tensor-parallel rank, or 0 if there is none.
        shared_gate: 1 if the shared expert's output is multiplied by a sigmoid gate, else 0.
        numbers: number of fp32 values per token that the router keeps.
        load: number of rows of this rank's experts, divided by their number if all experts were
            chosen equally often.
    """

    experts: Number
    chosen: Number
    ep: Number
    way: str
    ffn: Number
    shared: Number
    shared_gate: int
    numbers: int
    load: float = 1.0

    @property
    def here(self) -> Number:
        """Number of experts on a rank."""
        return self.experts // self.ep

    @property
    def share_sent(self) -> Number:
        """Probability that a token has an expert on a given rank."""
        return share_sent(self.experts, self.chosen, self.ep)

    @property
    def received(self) -> Number:
        """Number of tokens that a rank's experts read, divided by the rank's own tokens."""
        if self.way != ALL_TO_ALL:
            return 1.0 * self.ep
        share = self.share_sent
        return self.ep * share * load_of_tokens(self.load, share)


class Widths(NamedTuple):
    """Sizes of a layer on one tensor-parallel rank, in elements per token; flags are 0 or 1."""

    hidden: Number
    queries: Number  # total size of the rank's query heads
    keys: Number  # total size of the rank's key heads
    heads: Number  # query heads
    key_heads: Number
    ffn: Number
    gated: Number = 0  # the MLP's first GEMM has two outputs of `ffn`
    # number of ranks over which the residual stream is split: tp with sequence parallelism, else 1
    share: Number = 1
    norm: NormCost = NORMS["rmsnorm"]
    norm_before: Number = 1  # norms of the inputs of attention and MLP
    norm_after: Number = 0  # norms of their outputs
    head_norms: Number = 0  # q and k are normalised
    full_norms: Number = 0  # the norm is over all heads of q, and of k, as one vector
    qkv_bias: Number = 0
    out_bias: Number = 0
    bias: Number = 0
    experts: ExpertWidths | None = None  # in place of the MLP
    window: int | None = None  # number of keys that a query sees, or None for all up to its own


def widths(
    model: ModelConfig, tp: int = 1, sp: bool = False, kind: LayerKind | None = None
) -> Widths:
    """Returns the sizes of a layer with an MLP on each of `tp` ranks.

    The layer has the attention of `kind`, or of the model's first layer if `kind` is None. With
    fewer key-value heads than ranks, each head is on several ranks.
    """
    kind = LayerKind.of(model, 0) if kind is None else kind
    return Widths(
        hidden=model.hidden_size,
        queries=kind.heads * kind.head_size // tp,
        keys=max(kind.kv_heads, tp) * kind.head_size // tp,
        heads=kind.heads / tp,
        key_heads=max(kind.kv_heads / tp, 1),
        ffn=model.ffn_size // tp,
        gated=int(model.is_gated),
        share=tp if sp else 1,
        norm=NORMS[model.norm],
        norm_before=int(kind.norm_position != "after"),
        norm_after=int(kind.norm_position != "before"),
        head_norms=int("attention.head_norm.q" in declared.layer(model, kind)),
        full_norms=int(model.qk_norm_width == "full"),
        qkv_bias=int(model.qkv_bias),
        out_bias=int(model.out_bias),
        bias=int(model.bias),
        window=kind.window,
    )


def with_experts(
    w: Widths,
    model: ModelConfig,
    tp: int,
    ep: int,
    settings: ExpertsConfig,
    load: float = 1.0,
) -> Widths:
    """Returns the sizes `w` of a dense layer with its MLP replaced by experts over `ep` ranks.

    `load` is the rank's `ExpertWidths.load`, which is limited to `most_load`.
    """
    normalizes = model.router_normalize
    aux, z = settings.aux_loss > 0, settings.z_loss > 0
    chosen = model.experts_per_token
    numbers = model.num_experts + (chosen + 1) * normalizes + aux + (model.num_experts + 1) * z
    way = chosen_way(settings.dispatch, model.num_experts, chosen, ep) if ep > 1 else ""
    return w._replace(
        experts=ExpertWidths(
            experts=model.num_experts,
            chosen=chosen,
            ep=ep,
            way=way,
            ffn=model.expert_size,
            shared=model.shared_expert_size // tp,
            shared_gate=int(model.shared_expert_gate),
            numbers=numbers,
            load=min(load, most_load(model, ep)),
        )
    )


class Op(NamedTuple):
    """One operation of a layer, forward and backward.

    Attributes:
        name: name of the module, as in the names of its parameters.
        kind: gemm, attention, norm or elementwise.
        inputs, outputs: number of elements per token that it reads and writes; for a GEMM, k and n.
        parts: the parts of `recompute` that repeat the operation in the backward.
        keeps: number of elements per token that are kept until the backward.
        statistics: number of fp32 values per token that are also kept until the backward.
        split: for a GEMM, "column" (sharded outputs) or "row" (sharded inputs); "" for neither.
        bias: 1 if a GEMM has a bias, else 0.
        rows: number of rows that a GEMM computes per token; a GEMM of experts computes one for each
            chosen expert.
        matrices: number of weight matrices of a GEMM; more than one with several experts.
        inside, inside_backward: number of elements per token of temporary tensors inside its
            forward, and inside its backward.
        operands: number of elements per token that are kept for a deferred weight gradient, or None
            if they are the input and the output's gradient.
        window: for attention, number of keys that a query sees, or None for all up to its own.
    """

    name: str
    kind: str
    inputs: Number
    outputs: Number
    parts: Collection[str]
    keeps: Number = 0
    statistics: Number = 0
    split: str = ""
    bias: Number = 0
    rows: Number = 1
    matrices: Number = 1
    inside: Number = 0
    inside_backward: Number = 0
    operands: Number | None = None
    window: int | None = None

    @property
    def numel(self) -> Number:
        """Number of elements of a GEMM's weights on this rank."""
        return self.inputs * self.outputs * self.matrices


COLUMN: dict[str, Any] = {"kind": "gemm", "split": "column"}
ROW: dict[str, Any] = {"kind": "gemm", "split": "row"}
INNER = ("activation", "mlp", "layer")


def layer_ops(w: Widths, recompute: Collection[str] = ()) -> list[Op]:
    """Lists the operations of a layer in their order; `recompute` names the recomputed parts.

    A norm after a GEMM keeps its input, so a recomputed layer repeats that GEMM.
    """
    h = w.hidden
    stream = w.hidden / w.share
    qkv = w.queries + 2 * w.keys
    norm = {"kind": "norm", "inputs": stream, "outputs": stream}
    norm |= {"parts": ("norm", "layer"), "keeps": w.norm.keeps * stream}
    norm |= {"statistics": w.norm.statistics / w.share}
    norms = 2 if w.full_norms else w.heads + w.key_heads
    attention = ("attention", "layer")
    layer = ("layer",)
    output_norm = norm | {"parts": layer}
    found = [
        Op("input_norm", **norm),
        Op(
            "attention.qkv",
            inputs=h,
            outputs=qkv,
            parts=layer,
            keeps=qkv,
            bias=w.qkv_bias,
            **COLUMN,
        ),
        Op("attention.head_norm", "norm", qkv, qkv, attention, qkv, norms),
        Op("attention.rotary", "elementwise", qkv, qkv, attention),
        Op(
            *("attention", "attention", qkv, w.queries, attention, w.queries, w.heads),
            window=w.window,
        ),
        Op(
            "attention.out",
            inputs=w.queries,
            outputs=h,
            parts=layer,
            bias=w.out_bias,
            **ROW,
        ),
        Op("attention_output_norm", **output_norm),
        Op("attention.residual", "elementwise", 2 * stream, stream, layer, stream),
        *(_mlp(w, norm) if w.experts is None else _experts(w, w.experts, norm, recompute)),
        Op("mlp_output_norm", **output_norm),
        # The sum is the next layer's input.
        Op("mlp.residual", "elementwise", 2 * stream, stream, (), stream),
    ]
    absent = {"attention.head_norm"} if not w.head_norms else set()
    absent |= {"input_norm", "mlp_norm"} if not w.norm_before else set()
    absent |= {"attention_output_norm", "mlp_output_norm"} if not w.norm_after else set()
    return [op for op in found if op.name not in absent]


def _mlp(w: Widths, norm: dict[str, Any]) -> list[Op]:
    """Lists the operations of an MLP, given the fields of its norm."""
    up = w.ffn * (1 + w.gated)
    return [
        Op("mlp_norm", **norm),
        Op(
            "mlp.up",
            inputs=w.hidden,
            outputs=up,
            parts=("mlp", "layer"),
            keeps=up,
            bias=w.bias,
            **COLUMN,
        ),
        Op("mlp.activation", "elementwise", up, w.ffn, INNER, w.ffn),
        Op(
            "mlp.down",
            inputs=w.ffn,
            outputs=w.hidden,
            parts=("layer",) if w.norm_after else (),
            bias=w.bias,
            **ROW,
        ),
    ]


def _experts(
    w: Widths, x: ExpertWidths, norm: dict[str, Any], recompute: Collection[str]
) -> list[Op]:
    """Lists the operations of a layer's experts (models/experts.py), given the fields of its norm.

    Each token is on one tensor-parallel rank. The norm is recomputed only together with the
    experts. A recomputation ends with the last operation that keeps something.
    """
    own = 1 / w.share  # share of the tokens that are the rank's own
    read, rows = own * x.received, own * x.chosen * x.load
    h, up = w.hidden, x.ffn * (1 + w.gated)
    mlp = ("mlp", "layer")
    last = ("layer",) if w.norm_after else ()
    shares, apart = np.any(x.shared > 0), x.way != ""
    # With several ranks the shared expert comes before the experts.
    ends = mlp if shares and not apart else last
    before = mlp if apart else last
    if "mlp" not in recompute:
        norm = norm | {"parts": ("layer",)}
    # The choices, and the order of rows by expert and by token, are integers of 8 bytes. Each
    # counts as two fp32 values.
    choice = own * 2 * x.chosen + 2 * rows + 4 * x.chosen * read
    if x.way == ALL_TO_ALL:
        choice += 2 * read + 2 * own * x.ep
    inner, active = rows * up, rows * x.ffn
    # Without a gate there are separate tensors for the activation, for its product with the weights
    # in fp32, and for their gradients.
    alone = 1 - w.gated
    found = [
        Op("mlp_norm", **norm),
        Op(
            *("mlp.router", "gemm", h, x.experts, mlp),
            statistics=own * x.numbers,
            rows=own,
            operands=0,
        ),
        Op(
            *("mlp.choice", "elementwise", own * x.experts, own * x.chosen, ()),
            statistics=choice,
        ),
        Op(
            *("mlp.dispatch", "elementwise", own * h, read * h, mlp),
            keeps=read * h * apart,
            statistics=read * x.chosen,
        ),
        Op(
            *("mlp.experts.up", "gemm", h, up, mlp),
            keeps=inner,
            rows=rows,
            matrices=x.here,
            inside=rows * h,
            # The backward needs the most memory either when it has the gradients of the activations
            # or when it sums the gradients of the rows.
            inside_backward=inner
            + read * h
            + np.maximum(2 * active + 5 * active * alone, read * h),
            operands=read * h + inner,
        ),
        Op(
            *("mlp.experts.activation", "elementwise", inner, active, mlp),
            inside=4 * active * alone,
        ),
        Op(
            *("mlp.experts.down", "gemm", x.ffn, h, mlp),
            rows=rows,
            matrices=x.here,
            inside=active + read * h,
            operands=read * h + inner,
        ),
        Op("mlp.combine", "elementwise", read * h, own * h, ends),
    ]
    if not shares:
        return found
    wide = x.shared * (1 + w.gated)
    gated = x.shared_gate
    found += [
        Op("mlp.shared.up", inputs=h, outputs=wide, parts=mlp, keeps=wide, **COLUMN),
        Op("mlp.shared.activation", "elementwise", wide, x.shared, INNER, x.shared),
        Op(
            "mlp.shared.down",
            inputs=x.shared,
            outputs=h,
            parts=mlp if gated else before,
            keeps=own * h * gated,
            **ROW,
        ),
    ]
    if gated:
        found += [
            Op("mlp.shared_gate", "gemm", h, 1, mlp, own, rows=own, operands=0),
            Op("mlp.shared_product", "elementwise", own * (h + 1), own * h, before),
        ]
    summed = own * h * (x.shared > 0)  # a row of a table may have no shared expert
    found.append(Op("mlp.sum", "elementwise", 2 * summed, summed, last))
    return found


def repeated(ops: Sequence[Op], recompute: Collection[str]) -> list[Op]:
    """Returns the operations that the backward repeats for these parts of `recompute`."""
    return [op for op in ops if {*op.parts} & {*recompute}]


def kept(ops: Sequence[Op]) -> tuple[Number, Number]:
    """Returns the (elements, fp32 statistics) per token that `ops` keep until the backward."""
    return sum(op.keeps for op in ops), sum(op.statistics for op in ops)


class LayerOps(NamedTuple):
    """The operations of a layer on one tensor-parallel rank of a run.

    Attributes:
        ops: operations of a recomputed layer: `kept` and `repeated` together.
        kept: the operations of a recomputed layer that its backward does not repeat.
        repeated: the operations of a recomputed layer that its backward repeats.
        plain: operations of a layer that is not recomputed.
    """

    ops: list[Op]
    kept: list[Op]
    repeated: list[Op]
    plain: list[Op]


def ops_of(
    model: ModelConfig,
    kind: LayerKind,
    tp: int,
    sp: bool,
    recompute: frozenset[str],
    *,
    ep: int,
    settings: ExpertsConfig,
    load: float = 1.0,
) -> LayerOps:
    """Returns the operations of a layer on one of `tp` ranks, with these parts recomputed.

    `ep`, `settings` and `load` are used only if the kind has experts.
    """
    w = widths(model, tp, sp, kind)
    if kind.experts:
        w = with_experts(w, model, tp, ep, settings, load)
    return cached_ops(w, recompute)


@functools.lru_cache(maxsize=1024)
def cached_ops(w: Widths, parts: frozenset[str]) -> LayerOps:
    ops = layer_ops(w, parts)
    again = repeated(ops, parts)
    return LayerOps(ops, [op for op in ops if op not in again], again, layer_ops(w))
