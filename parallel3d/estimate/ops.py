"""Lists the operations of a transformer layer as one tensor rank runs them, once for everything.

Parameters, FLOPs, kept activations, launches and collectives are sums over `layer_ops`; seconds are
sums of its operations' prices. `parallel3d dryrun` runs the model itself and is the test of the
list (`benchmarks/plan_dryrun.py`). A new kind of layer is described in `models/` and here.

Sizes are numbers or numpy arrays: `Widths` of one configuration, or of a table of layouts.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from parallel3d.config.schema import Config, ModelConfig
from parallel3d.config.values import parts_of

Number = Any  # int, float or a numpy array


class NormCost(NamedTuple):
    """One norm of the hidden states.

    Attributes:
        keeps: tensors of its input's size that stay until the backward; statistics: fp32 numbers a
            token beside them.
        forward, backward: launches.
        is_fused: one kernel sums the residual stream and normalises it, forward and backward.
        has_bias: beside its weight.
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
    """Sizes of a layer on one tensor rank, in elements a token; flags are 0 or 1."""

    hidden: Number
    queries: Number  # of all heads of the rank, as are keys
    keys: Number
    heads: Number  # query heads, and key heads
    key_heads: Number
    ffn: Number
    gated: Number = 0  # the MLP's first GEMM has two outputs of `ffn`
    share: Number = 1  # ranks that divide the residual stream: tp under sequence parallelism
    norm: NormCost = NORMS["rmsnorm"]
    head_norms: Number = 0  # q and k are normalised by head
    rope: Number = 0
    qkv_bias: Number = 0
    out_bias: Number = 0
    bias: Number = 0


def widths(model: ModelConfig, tp: int = 1, sp: bool = False) -> Widths:
    """Returns the sizes of `model`'s layers on each of `tp` ranks.

    With fewer key-value heads than ranks, each head is replicated on several.
    """
    heads, key_heads = model.num_attention_heads / tp, max(model.kv_heads / tp, 1)
    return Widths(
        model.hidden_size,
        model.num_attention_heads * model.head_size // tp,
        max(model.kv_heads, tp) * model.head_size // tp,
        heads,
        key_heads,
        model.ffn_size // tp,
        int(model.activation == "swiglu"),
        tp if sp else 1,
        NORMS[model.norm],
        int(model.qk_norm),
        int(model.position_embedding == "rope"),
        int(model.qkv_bias),
        int(model.out_bias),
        int(model.bias),
    )


class Op(NamedTuple):
    """One operation of a layer, forward and backward.

    Attributes:
        name: the module, as in the names of its parameters.
        kind: gemm, attention, norm or elementwise.
        inputs, outputs: elements a token that it reads and writes; of a GEMM, k and n.
        parts: the parts of `recompute` that repeat it in the backward.
        keeps: elements a token that stay until the backward; `statistics`: fp32 numbers beside.
        forward, backward: launches of kernels besides GEMMs and attention.
        split: column or row, of a GEMM: sharded outputs, or sharded inputs.
        bias: of a GEMM.
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

    A residual sum and a fused norm after it are one kernel, with their gradients, unless the norm
    is recomputed. Backward of the split into heads: a concatenation; RoPE is a kernel both ways.
    """
    h, stream, qkv = w.hidden, w.hidden / w.share, w.queries + 2 * w.keys
    up = w.ffn * (1 + w.gated)
    apart = int("norm" in recompute or not w.norm.is_fused)
    norm = {"kind": "norm", "inputs": stream, "outputs": stream}
    norm |= {"parts": ("norm", "layer"), "keeps": w.norm.keeps * stream}
    norm |= {"statistics": w.norm.statistics / w.share}
    norm |= {"forward": w.norm.forward, "backward": w.norm.backward}
    column, row = {"kind": "gemm", "split": "column"}, {"kind": "gemm", "split": "row"}
    attention, inner, layer = ("attention", "layer"), ("activation", "mlp", "layer"), ("layer",)
    found = [
        Op("input_norm", **norm),
        Op("attention.qkv", inputs=h, outputs=qkv, parts=layer, keeps=qkv, backward=w.qkv_bias,
           bias=w.qkv_bias, **column),
        Op("attention.qk_norm", "norm", qkv, qkv, attention, qkv, w.heads + w.key_heads, 1, 1),
        Op("attention.rotary", "elementwise", qkv, qkv, attention, 0, 0, w.rope, 1),
        Op("attention", "attention", qkv, w.queries, attention, w.queries, w.heads),
        Op("attention.out", inputs=w.queries, outputs=h, parts=layer, forward=w.out_bias,
           backward=w.out_bias, bias=w.out_bias, **row),
        Op("attention.residual", "elementwise", 2 * stream, stream, layer, stream, 0, apart, apart),
        Op("mlp_norm", **norm),
        Op("mlp.up", inputs=h, outputs=up, parts=("mlp", "layer"), keeps=up, backward=w.bias,
           bias=w.bias, **column),
        Op("mlp.activation", "elementwise", up, w.ffn, inner, w.ffn, 0, 1, 1),
        Op("mlp.down", inputs=w.ffn, outputs=h, parts=(), forward=w.bias, backward=w.bias,
           bias=w.bias, **row),
        # The next layer's input. Its gradient is summed by the norm's backward if they are fused.
        Op("mlp.residual", "elementwise", 2 * stream, stream, (), stream, 0, 1, apart),
    ]  # fmt: skip
    return found if w.head_norms else [op for op in found if op.name != "attention.qk_norm"]


def repeated(ops: Sequence[Op], recompute: Collection[str]) -> list[Op]:
    """Returns the operations that the backward repeats for these parts of `recompute`."""
    return [op for op in ops if {*op.parts} & {*recompute}]


def split_counts(ops: Sequence[Op]) -> tuple[int, int]:
    """Counts the column- and the row-parallel GEMMs."""
    column, row = (sum(op.split == split for op in ops) for split in ("column", "row"))
    return column, row


def flops(ops: Sequence[Op], seq_length: Number) -> Number:
    """Returns forward FLOPs a token: of the GEMMs, and of causal attention's two matmuls."""
    gemms = sum(2.0 * op.inputs * op.outputs for op in ops if op.kind == "gemm")
    return gemms + sum(2.0 * op.outputs * seq_length for op in ops if op.kind == "attention")


def layer_flops(model: ModelConfig, recompute: Collection[str] | None = None) -> float:
    """Returns forward FLOPs of a layer and token over all tensor ranks; with `recompute`, only of
    what its backward repeats."""
    ops = _layer_ops(widths(model), frozenset()).plain
    chosen = ops if recompute is None else repeated(ops, recompute)
    return float(flops(chosen, model.seq_length))


def kept(ops: Sequence[Op]) -> tuple[Number, Number]:
    """Returns (elements, fp32 statistics) a token that these operations keep until the backward."""
    return sum(op.keeps for op in ops), sum(op.statistics for op in ops)


class LayerOps(NamedTuple):
    """A layer's operations on one tensor rank of a run.

    Attributes:
        ops: of a layer that recomputes, which are those that it keeps the results of, and those
            that its backward repeats. plain: of a layer that does not.
    """

    ops: list[Op]
    kept: list[Op]
    repeated: list[Op]
    plain: list[Op]


def ops_of_run(config: Config) -> LayerOps:
    """Returns the operations of a layer with the run's tp, sp and recomputation."""
    sp = config.sp and config.tp > 1
    return _layer_ops(widths(config.model, config.tp, sp), parts_of(config.recompute))


@functools.lru_cache(maxsize=1024)
def _layer_ops(w: Widths, parts: frozenset[str]) -> LayerOps:
    ops = layer_ops(w, parts)
    again = repeated(ops, parts)
    return LayerOps(ops, [op for op in ops if op not in again], again, layer_ops(w))


# What attention sends over context-parallel ranks, by style.

STYLES = ("gather", "heads", "ring")
OVERLAPPED = ("gather", "ring")  # attention runs while these send
# Bytes of a rank's keys and values that are gathered together: enough to be bound by bandwidth.
LEAST_BYTES = 4 << 20


def heads_at_once(heads: int, of_head: float) -> int:
    """Returns how many key-value heads are gathered together, a divisor of `heads`.

    `of_head`: bytes of one head's keys and values on a rank.
    """
    enough = (n for n in range(1, heads) if heads % n == 0 and n * of_head >= LEAST_BYTES)
    return next(enough, heads)


class Sent(NamedTuple):
    """Equal calls of one layer and micro-batch on one rank.

    Attributes:
        nbytes: of one call, the whole buffer, as nccl-tests counts it.
        count: calls in forward and backward. again: more of them if the backward repeats attention.
    """

    op: str
    nbytes: Number
    count: Number
    again: Number
    what: str


def sends(
    style: str, w: Widths, tokens: Number, item: Number, cp: Number, drops: bool = False
) -> Iterator[Sent]:
    """Yields what a layer's attention sends (context_parallel/attention.py).

    Args:
        w: of one tensor rank. tokens: of a micro-batch on one context-parallel rank.
        item: bytes of an element. drops: with dropout, which gathers keys and values apart.
    """
    own, what = 2 * tokens * w.keys * item, "keys and values"  # of this rank
    if style == "gather" and drops:
        yield Sent("all_gather", cp * own / 2, 2, 2, what)
        yield Sent("reduce_scatter", cp * own / 2, 2, 0, f"gradients of {what}")
    elif style == "gather":  # a repeated forward keeps for the backward what it gathers
        yield Sent("all_gather", cp * own, 2, 0, what)
        yield Sent("reduce_scatter", cp * own, 1, 0, f"gradients of {what}")
    elif style == "ring":
        yield Sent("send_recv", own, 2 * (cp - 1), cp - 1, what)
        wide = own / item * np.maximum(item, 4)
        yield Sent("send_recv", wide, cp - 1, 0, f"gradients of {what}")
    else:
        copies = np.maximum(cp / w.key_heads, 1)  # a rank has one key-value head at least
        queries = tokens * w.queries * item
        yield Sent("all_to_all", queries + own * copies, 2, 1, "heads of whole sequences")
        yield Sent("all_to_all", queries, 2, 1, "results of heads")


def exposed(style: str, sent: Any, attention: Any, share: float) -> Any:
    """Returns the seconds of `sent` that a rank waits, beside `attention`'s seconds.

    `share`: fraction of an overlapped style's seconds that is not hidden even by long attention.
    """
    if style not in OVERLAPPED:
        return sent
    return np.maximum(share * sent, sent - attention)


def splits_heads(heads: Number, kv_heads: Number, cp: Number) -> Any:
    """Whether style=heads can divide the heads of a tensor rank over cp ranks."""
    even = (np.mod(kv_heads, cp) == 0) | (np.mod(cp, kv_heads) == 0)
    return (np.mod(heads, cp) == 0) & even


# Parameters of one rank.

TABLE = "head.table"
TABLES = ("embedding.word.weight", TABLE)


class LocalParameter(NamedTuple):
    """A parameter as one rank holds it.

    Attributes:
        replicated: every tp rank holds all of it, with the gradient of its own tokens.
        columns: of a matrix; 1: a vector.
        shared: elements at its end whose gradients several tp ranks sum: of key-value heads that
            are on several ranks, and of norms of heads, of which each rank has its own heads.
        owners: sets of ranks with different such elements.
        tied: the weight of embedding and head alike.
    """

    name: str
    numel: int
    replicated: bool
    columns: int = 1
    shared: int = 0
    owners: int = 1
    tied: bool = False


def stage_parameters(
    model: ModelConfig,
    tp: int,
    layers: range,
    first: bool,
    last: bool,
    *,
    borrows_table: bool = False,
) -> list[LocalParameter]:
    """Lists the parameters of a rank whose stage has `layers`, the embedding if `first`, the head
    if `last`; vocabulary padding included. They are in the order of `Stage.named_parameters()`,
    which decides the gradient buckets (compared by tests/unit/estimate/test_traffic.py).

    A tied weight is in the list once if one stage has both ends. It is not in the head's list if
    the head's stage `borrows_table` from the first stage on the same rank.
    """
    found = list(_embedding(model, tp)) if first else []
    of_layer = _layer(widths(model, tp), tp, model.kv_heads) if layers else ()
    for layer in layers:
        found += [p._replace(name=f"layers.{layer}.{p.name}") for p in of_layer]
    if last:
        shared = model.tie_embeddings and (first or borrows_table)
        found += _head(model, tp, has_table=not shared)
    return found


@functools.lru_cache(maxsize=64)
def _layer(w: Widths, tp: int, kv_heads: int) -> tuple[LocalParameter, ...]:
    found: list[LocalParameter] = []
    for op in _layer_ops(w, frozenset()).plain:
        if op.kind == "gemm":
            sharded, numel = op.split == "column", op.inputs * op.outputs
            rows = 2 * w.keys if op.name == "attention.qkv" and tp > kv_heads else 0
            name = f"{op.name}.weight"
            shared = rows * op.inputs
            found.append(LocalParameter(name, numel, tp == 1, op.inputs, shared, kv_heads))
            if op.bias:
                whole, name = tp == 1 or not sharded, f"{op.name}.bias"
                size = op.outputs if sharded else w.hidden
                found.append(LocalParameter(name, size, whole, 1, rows, kv_heads))
        elif op.name.endswith("qk_norm"):
            size = int(w.queries / w.heads)
            shared = size if tp > 1 else 0
            for part in ("q", "k"):
                name = f"{op.name}.{part}"
                found.append(LocalParameter(name, size, tp == 1, shared=shared))
        elif op.kind == "norm":
            found += _norm(w, op.name)
    return tuple(found)


def _embedding(model: ModelConfig, tp: int) -> Iterator[LocalParameter]:
    if model.position_embedding == "learned":
        numel = model.max_positions * model.hidden_size
        yield LocalParameter("embedding.position", numel, True, model.hidden_size)
    yield _table(model, tp, "embedding.word.weight", model.embedding == "replicated")


def _head(model: ModelConfig, tp: int, has_table: bool) -> Iterator[LocalParameter]:
    if has_table:
        yield _table(model, tp, TABLE, model.tie_embeddings and model.embedding == "replicated")
    yield from _norm(widths(model, tp), "head.norm")


def _table(model: ModelConfig, tp: int, name: str, whole: bool) -> LocalParameter:
    numel = model.padded_vocab_size // (1 if whole else tp) * model.hidden_size
    return LocalParameter(
        name, numel, whole or tp == 1, model.hidden_size, tied=model.tie_embeddings
    )


def _norm(w: Widths, name: str) -> list[LocalParameter]:
    parts = ("weight", "bias") if w.norm.has_bias else ("weight",)
    return [LocalParameter(f"{name}.{part}", w.hidden, True) for part in parts]


def parameter_count(model: ModelConfig) -> int:
    """Counts distinct trainable parameters of the unpadded model; a tied weight counts once."""
    unpadded = replace(model, vocab_multiple=1)
    ends = sum(p.numel for p in stage_parameters(unpadded, 1, range(0), True, True))
    layer = sum(p.numel for p in stage_parameters(unpadded, 1, range(1), False, False))
    return ends + model.num_layers * layer


def recomputing(given: Sequence[int] | None, stage: int, layers: int) -> int:
    """Returns how many of a stage's `layers` layers recompute, by `recompute_layers`."""
    return offloading(given, stage, layers) if given else layers


def offloading(given: Sequence[int] | None, stage: int, layers: int) -> int:
    """Returns how many of a stage's `layers` layers are offloaded, by `offload_layers`."""
    if not given:
        return 0
    return min(layers, given[0] if len(given) == 1 else given[stage])


# Conventions of the MFU:
#
# * Only matmuls count: 2 FLOPs per multiply-add, once forward and twice backward, i.e. 6 per weight
#   and token. Norms, softmax, activations, embedding look-ups and the optimizer do not.
# * Attention counts over the full s × s square, not the causal half, as in PaLM (Chowdhery et al.
#   2022, appendix B), Narayanan et al. 2021 (equation 3) and torchtitan, with document masks too.
# * Recomputed activations never count: this is model (MFU), not hardware (HFU) utilisation.
# * The output head counts `vocab_size` tokens, without padding.


MFU_FORMULA = "tokens_per_s × flops_per_token / (world_size × peak_flops_per_device)"
FLOPS_FORMULA = "6 × matmul weights + 12 × layers × heads × head_dim × seq_length (full attention)"


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Returns model FLOPs of training (forward and backward) on one token of a `seq_length` sample:
    FLOPS_FORMULA, by the conventions above."""
    ops = layer_ops(widths(model))
    forward = model.num_layers * flops(ops, 2 * seq_length)  # attention in full
    return float(3 * forward + 6 * model.hidden_size * model.vocab_size)


CPU_BYTES = 64 << 20  # of a chunk's logits in fp32
# Each chunk reads the whole output weight twice and adds to its whole gradient: below about this
# many tokens that takes longer than the matmuls (docs/performance.md).
CPU_LEAST_TOKENS = 1024
# Of a chunk's logits in the compute type: 8,372 tokens of Llama 3's vocabulary in bf16. Reading the
# weight twice and accumulating its fp32 gradient takes an H100 as long as the matmuls of 400 tokens
# (3.35 TB/s, 700 TFLOP/s; the width cancels out): 5 % of such a chunk, 40 % of one of 1,024 tokens.
# Beyond 2³¹ elements kernels would need 64-bit indices.
ACCELERATOR_BYTES = 2 << 30


def loss_chunks(
    tokens: int, columns: int, chunk_tokens: int | None, *, item: int, on_accelerator: bool
) -> Counter[int]:
    """Returns {tokens of a loss chunk: number of such chunks} of a micro-batch, in their order.

    Args:
        columns: of the logits that one rank holds.
        chunk_tokens: `loss.chunk_tokens`; None: by CPU_BYTES and CPU_LEAST_TOKENS on a CPU, by
            ACCELERATOR_BYTES on an accelerator.
        item: bytes of the compute type.
    """
    if on_accelerator:
        most = chunk_tokens or max(1, ACCELERATOR_BYTES // (item * columns))
    else:
        most = chunk_tokens or max(CPU_LEAST_TOKENS, CPU_BYTES // (4 * columns))
    count = -(-tokens // most)
    # As equal as can be: a short last chunk would run at half the speed.
    size, larger = divmod(tokens, count)
    return +Counter({size + 1: larger, size: count - larger})
