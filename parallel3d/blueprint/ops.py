"""Lists the operations of a transformer layer on one tensor rank: the one list for all estimates.

Parameters, FLOPs, kept activations, launches and collectives are sums over `layer_ops`; seconds are
sums of its operations' prices. `parallel3d dryrun` runs the model itself and is the test of the
list (`benchmarks/planner/plan_dryrun.py`). A new kind of layer is described in `models/` and here.

Sizes are numbers or numpy arrays: `Widths` of one configuration, or of a table of layouts.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from parallel3d.config.schema import ModelConfig

Number = Any  # int, float or a numpy array


class NormCost(NamedTuple):
    """One norm of the hidden states.

    Attributes:
        keeps: tensors of its input's size that stay until the backward.
        statistics: fp32 numbers per token that stay too.
        forward, backward: kernel launches.
        is_fused: one kernel sums the residual stream and normalises it, forward and backward.
        has_bias: it has a bias as well as a weight.
    """

    keeps: int
    statistics: int
    forward: int
    backward: int
    is_fused: bool
    has_bias: bool = False


NORMS = {
    "layernorm": NormCost(1, 2, 1, 1, is_fused=False, has_bias=True),
    "rmsnorm": NormCost(1, 1, 1, 1, is_fused=True),
}


class Widths(NamedTuple):
    """Sizes of a layer on one tensor rank, in elements per token; flags are 0 or 1."""

    hidden: Number
    queries: Number  # of all heads of the rank, like `keys`
    keys: Number
    heads: Number  # query heads
    key_heads: Number
    ffn: Number
    gated: Number = 0  # the MLP's first GEMM has two outputs of `ffn`
    share: Number = 1  # ranks that divide the residual stream: tp under sequence parallelism
    norm: NormCost = NORMS["rmsnorm"]
    head_norms: Number = 0  # q and k are normalised
    full_norms: Number = 0  # all heads of q, and of k, as one vector
    rope: Number = 0
    qkv_bias: Number = 0
    out_bias: Number = 0
    bias: Number = 0


def widths(model: ModelConfig, tp: int = 1, sp: bool = False) -> Widths:
    """Returns the sizes of `model`'s layers on each of `tp` ranks.

    With fewer key-value heads than ranks, each head is replicated on several.
    """
    return Widths(
        hidden=model.hidden_size,
        queries=model.num_attention_heads * model.head_size // tp,
        keys=max(model.kv_heads, tp) * model.head_size // tp,
        heads=model.num_attention_heads / tp,
        key_heads=max(model.kv_heads / tp, 1),
        ffn=model.ffn_size // tp,
        gated=int(model.activation == "swiglu"),
        share=tp if sp else 1,
        norm=NORMS[model.norm],
        head_norms=int(model.qk_norm),
        full_norms=int(model.qk_norm_width == "full"),
        rope=int(model.position_embedding == "rope"),
        qkv_bias=int(model.qkv_bias),
        out_bias=int(model.out_bias),
        bias=int(model.bias),
    )


class Op(NamedTuple):
    """One operation of a layer, forward and backward.

    Attributes:
        name: name of the module, as in the names of its parameters.
        kind: gemm, attention, norm or elementwise.
        inputs, outputs: elements per token that it reads and writes; for a GEMM, k and n.
        parts: the parts of `recompute` that repeat it in the backward.
        keeps: elements per token that stay until the backward.
        statistics: fp32 numbers per token that stay too.
        forward, backward: kernel launches other than GEMMs and attention.
        split: for a GEMM, "column" (sharded outputs) or "row" (sharded inputs).
        bias: whether a GEMM has a bias.
    """

    name: str
    kind: str
    inputs: Number
    outputs: Number
    parts: Collection[str]
    keeps: Number = 0
    statistics: Number = 0
    forward: Number = 0
    backward: Number = 0
    split: str = ""
    bias: Number = 0


def layer_ops(w: Widths, recompute: Collection[str] = ()) -> list[Op]:
    """Lists a layer's operations in their order; `recompute`: the parts that it recomputes.

    A residual sum and a fused norm after it are one kernel, forward and backward, unless the norm
    is recomputed. The backward of the split into heads is a concatenation; RoPE is a kernel in both
    directions.
    """
    h = w.hidden
    stream = w.hidden / w.share
    qkv = w.queries + 2 * w.keys
    up = w.ffn * (1 + w.gated)
    apart = int("norm" in recompute or not w.norm.is_fused)
    norm = {"kind": "norm", "inputs": stream, "outputs": stream}
    norm |= {"parts": ("norm", "layer"), "keeps": w.norm.keeps * stream}
    norm |= {"statistics": w.norm.statistics / w.share}
    norm |= {"forward": w.norm.forward, "backward": w.norm.backward}
    # Of all heads: a sum over the ranks is between two kernels.
    norms, kernels = (2, 2) if w.full_norms else (w.heads + w.key_heads, 1)
    column, row = {"kind": "gemm", "split": "column"}, {"kind": "gemm", "split": "row"}
    attention = ("attention", "layer")
    inner = ("activation", "mlp", "layer")
    layer = ("layer",)
    found = [
        Op("input_norm", **norm),
        Op(
            "attention.qkv",
            inputs=h,
            outputs=qkv,
            parts=layer,
            keeps=qkv,
            backward=w.qkv_bias,
            bias=w.qkv_bias,
            **column,
        ),
        Op("attention.qk_norm", "norm", qkv, qkv, attention, qkv, norms, kernels, kernels),
        Op("attention.rotary", "elementwise", qkv, qkv, attention, 0, 0, w.rope, 1),
        Op("attention", "attention", qkv, w.queries, attention, w.queries, w.heads),
        Op(
            "attention.out",
            inputs=w.queries,
            outputs=h,
            parts=layer,
            forward=w.out_bias,
            backward=w.out_bias,
            bias=w.out_bias,
            **row,
        ),
        Op("attention.residual", "elementwise", 2 * stream, stream, layer, stream, 0, apart, apart),
        Op("mlp_norm", **norm),
        Op(
            "mlp.up",
            inputs=h,
            outputs=up,
            parts=("mlp", "layer"),
            keeps=up,
            backward=w.bias,
            bias=w.bias,
            **column,
        ),
        Op("mlp.activation", "elementwise", up, w.ffn, inner, w.ffn, 0, 1, 1),
        Op(
            "mlp.down",
            inputs=w.ffn,
            outputs=h,
            parts=(),
            forward=w.bias,
            backward=w.bias,
            bias=w.bias,
            **row,
        ),
        # The next layer's input. The norm's backward sums its gradient if they are fused.
        Op("mlp.residual", "elementwise", 2 * stream, stream, (), stream, 0, 1, apart),
    ]
    return found if w.head_norms else [op for op in found if op.name != "attention.qk_norm"]


def repeated(ops: Sequence[Op], recompute: Collection[str]) -> list[Op]:
    """Returns the operations that the backward repeats for these parts of `recompute`."""
    return [op for op in ops if {*op.parts} & {*recompute}]


def split_counts(ops: Sequence[Op]) -> tuple[int, int]:
    """Counts the column- and the row-parallel GEMMs."""
    column, row = (sum(op.split == split for op in ops) for split in ("column", "row"))
    return column, row


def flops(ops: Sequence[Op], seq_length: Number) -> Number:
    """Returns forward FLOPs per token of the GEMMs and of causal attention's two matmuls."""
    gemms = sum(2.0 * op.inputs * op.outputs for op in ops if op.kind == "gemm")
    return gemms + sum(2.0 * op.outputs * seq_length for op in ops if op.kind == "attention")


def layer_flops(model: ModelConfig, recompute: Collection[str] | None = None) -> float:
    """Returns forward FLOPs per layer and token over all tensor ranks; with `recompute`, only of
    the operations that the backward repeats."""
    ops = cached_ops(widths(model), frozenset()).plain
    chosen = ops if recompute is None else repeated(ops, recompute)
    return float(flops(chosen, model.seq_length))


def kept(ops: Sequence[Op]) -> tuple[Number, Number]:
    """Returns (elements, fp32 statistics) per token that these operations keep until the
    backward."""
    return sum(op.keeps for op in ops), sum(op.statistics for op in ops)


class LayerOps(NamedTuple):
    """A layer's operations on one tensor rank of a run.

    Attributes:
        ops: operations of a layer that recomputes: `kept` and `repeated` together.
        kept: those whose results it keeps.
        repeated: those that its backward repeats.
        plain: operations of a layer that does not recompute.
    """

    ops: list[Op]
    kept: list[Op]
    repeated: list[Op]
    plain: list[Op]


def ops_of(model: ModelConfig, tp: int, sp: bool, recompute: frozenset[str]) -> LayerOps:
    """Returns the operations of a layer on one of `tp` ranks, with these parts recomputed."""
    return cached_ops(widths(model, tp, sp), recompute)


@functools.lru_cache(maxsize=1024)
def cached_ops(w: Widths, parts: frozenset[str]) -> LayerOps:
    ops = layer_ops(w, parts)
    again = repeated(ops, parts)
    return LayerOps(ops, [op for op in ops if op not in again], again, layer_ops(w))


# Conventions of the MFU:
#
# * Only matmuls count: 2 FLOPs per multiply-add, once forward and twice backward, i.e. 6 per weight
#   and token. Norms, softmax, activations, embedding look-ups and the optimizer do not.
# * Attention counts over the full s × s square, not the causal half, as in PaLM (Chowdhery et al.
#   2022, appendix B), Narayanan et al. 2021 (equation 3) and torchtitan, with document masks too.
# * Recomputed activations never count: this is model (MFU), not hardware (HFU) utilisation.
# * Experts count as far as a token uses them, with their router.
# * The output head counts `vocab_size` tokens, without padding.


MFU_FORMULA = "tokens_per_s × flops_per_token / (world_size × peak_flops_per_device)"
FLOPS_FORMULA = "6 × matmul weights + 12 × layers × heads × head_dim × seq_length (full attention)"


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Returns model FLOPs of training (forward and backward) on one token of a `seq_length` sample.

    They follow FLOPS_FORMULA and the conventions above.
    """
    ops = layer_ops(widths(model))
    forward = model.num_layers * flops(ops, 2 * seq_length)  # attention in full
    forward += len(model.expert_layers) * _more_by_experts(model)
    return float(3 * forward + 6 * model.hidden_size * model.vocab_size)


def _more_by_experts(model: ModelConfig) -> float:
    """Returns the forward FLOPs per token of a layer with experts, less those of an MLP."""
    matrices, hidden = (3 if model.activation == "swiglu" else 2), model.hidden_size
    width = model.experts_per_token * model.expert_size + model.shared_expert_size - model.ffn_size
    router = model.num_experts + int(model.shared_expert_gate)
    return 2.0 * hidden * (matrices * width + router)
