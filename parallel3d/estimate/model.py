"""Model statistics: parameters of a stage, FLOPs of a layer and a token, sizes of loss chunks.

Parameters are in the order of `Stage.named_parameters()`, which decides the gradient buckets
(compared by tests/unit/test_traffic.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from parallel3d.config.schema import ModelConfig


class LocalParameter(NamedTuple):
    """A parameter as one rank holds it; `replicated`: every tp rank holds all of it, with the
    gradient of its own tokens."""

    name: str
    numel: int
    replicated: bool
    columns: int = 1  # 1: a vector


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
    if `last`; vocabulary padding included.

    A tied weight is in the list once if one stage has both ends. It is not in the head's list if
    the head's stage `borrows_table` from the first stage on the same rank.
    """
    found = list(_embedding(model, tp)) if first else []
    for layer in layers:
        found += _layer(model, tp, f"layers.{layer}")
    if last:
        shared = model.tie_embeddings and (first or borrows_table)
        found += _head(model, tp, has_table=not shared)
    return found


def word_embedding_numel(model: ModelConfig, tp: int) -> int:
    """Returns the elements of one rank's shard of the word embedding."""
    rows = model.padded_vocab_size
    return (rows if model.embedding == "replicated" else rows // tp) * model.hidden_size


def _embedding(model: ModelConfig, tp: int) -> Iterator[LocalParameter]:
    if model.position_embedding == "learned":
        numel = model.max_positions * model.hidden_size
        yield LocalParameter("embedding.position", numel, True, model.hidden_size)
    whole = tp == 1 or model.embedding == "replicated"
    numel = word_embedding_numel(model, tp)
    yield LocalParameter("embedding.word.weight", numel, whole, model.hidden_size)


def _layer(model: ModelConfig, tp: int, name: str) -> Iterator[LocalParameter]:
    queries = model.num_attention_heads * model.head_size
    # With fewer key-value heads than ranks, each head is replicated on several.
    kv_rows = max(model.kv_heads, tp) * model.head_size
    qkv = queries + 2 * kv_rows
    up = model.ffn_size * (2 if model.activation == "swiglu" else 1)
    yield from _norm(model, f"{name}.input_norm")
    yield from _column(model, tp, f"{name}.attention.qkv", qkv, model.qkv_bias)
    if model.qk_norm:
        # Replicated, with a gradient of the rank's own heads, with and without sp.
        for part in ("q", "k"):
            yield LocalParameter(f"{name}.attention.qk_norm.{part}", model.head_size, tp == 1)
    yield from _row(model, tp, f"{name}.attention.out", queries, model.out_bias)
    yield from _norm(model, f"{name}.mlp_norm")
    yield from _column(model, tp, f"{name}.mlp.up", up, model.bias)
    yield from _row(model, tp, f"{name}.mlp.down", model.ffn_size, model.bias)


def _head(model: ModelConfig, tp: int, has_table: bool) -> Iterator[LocalParameter]:
    if has_table and model.tie_embeddings:
        whole = tp == 1 or model.embedding == "replicated"
        numel = word_embedding_numel(model, tp)
        yield LocalParameter("head.table", numel, whole, model.hidden_size)
    elif has_table:
        numel = model.padded_vocab_size // tp * model.hidden_size
        yield LocalParameter("head.table", numel, tp == 1, model.hidden_size)
    yield from _norm(model, "head.norm")


def _norm(model: ModelConfig, name: str) -> Iterator[LocalParameter]:
    yield LocalParameter(f"{name}.weight", model.hidden_size, True)
    if model.norm == "layernorm":
        yield LocalParameter(f"{name}.bias", model.hidden_size, True)


def _column(
    model: ModelConfig, tp: int, name: str, outputs: int, bias: bool
) -> Iterator[LocalParameter]:
    """Yields a linear layer whose rows are sharded."""
    numel = outputs // tp * model.hidden_size
    yield LocalParameter(f"{name}.weight", numel, tp == 1, model.hidden_size)
    if bias:
        yield LocalParameter(f"{name}.bias", outputs // tp, tp == 1)


def _row(
    model: ModelConfig, tp: int, name: str, inputs: int, bias: bool
) -> Iterator[LocalParameter]:
    """Yields a linear layer whose columns are sharded; its bias is replicated."""
    columns = inputs // tp
    yield LocalParameter(f"{name}.weight", model.hidden_size * columns, tp == 1, columns)
    if bias:
        yield LocalParameter(f"{name}.bias", model.hidden_size, True)


# FLOPs of a layer, and what `recompute` adds. The parts are defined in `models/recompute.py`; the
# activations that they keep are counted in `estimate/analytic_memory.py`.


class LayerFlops(NamedTuple):
    """Forward FLOPs of one layer and token: its four GEMMs, and causal attention's two matmuls."""

    qkv: float
    attention: float
    out: float
    up: float
    down: float


def layer_flops(model: ModelConfig) -> LayerFlops:
    """Counts the matmuls over all tensor ranks; norms and activations are not counted."""
    h, ffn = model.hidden_size, model.ffn_size
    queries, keys = (n * model.head_size for n in (model.num_attention_heads, model.kv_heads))
    return LayerFlops(
        2.0 * h * (queries + 2 * keys),
        2.0 * queries * model.seq_length,
        2.0 * queries * h,
        2.0 * h * ffn * (2 if model.activation == "swiglu" else 1),
        2.0 * ffn * h,
    )


def recompute_flops(model: ModelConfig, parts: Collection[str]) -> float:
    """Returns the recomputed FLOPs of one layer and token; its last GEMM never is recomputed."""
    forward = layer_flops(model)
    if "layer" in parts:
        return sum(forward) - forward.down
    return forward.attention * ("attention" in parts) + forward.up * ("mlp" in parts)


class RecomputeCollectives(NamedTuple):
    """Collectives of hidden states over tp that a layer's backward repeats: all-reduces, or
    all-gathers and reduce-scatters under sequence parallelism."""

    sums: int
    gathers: int
    scatters: int


def recompute_collectives(parts: Collection[str]) -> RecomputeCollectives:
    """Counts segments that end with a needed linear output: both of attention, or `up`."""
    if "layer" in parts:
        return RecomputeCollectives(1, 2, 1)
    return RecomputeCollectives(0, int("mlp" in parts), 0)


def recomputing(given: Sequence[int] | None, stage: int, layers: int) -> int:
    """Returns how many of a stage's `layers` layers recompute, by `recompute_layers`."""
    if not given:
        return layers
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


def matmul_parameters(model: ModelConfig) -> int:
    """Returns the weights that multiply a token: the layers' matrices and the head, tied or not."""
    hidden, ffn = model.hidden_size, model.ffn_size
    queries = model.num_attention_heads * model.head_size
    keys = model.kv_heads * model.head_size
    attention = hidden * (queries + 2 * keys) + queries * hidden
    mlp = _mlp_matrices(model) * hidden * ffn
    return model.num_layers * (attention + mlp) + hidden * model.vocab_size


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Returns model FLOPs of training (forward and backward) on one token of a `seq_length` sample:
    FLOPS_FORMULA, by the conventions above."""
    queries = model.num_attention_heads * model.head_size
    attention = 12 * model.num_layers * queries * seq_length
    return float(6 * matmul_parameters(model) + attention)


def parameter_count(model: ModelConfig) -> int:
    """Counts distinct trainable parameters of the unpadded model; a tied weight counts once."""
    hidden, ffn = model.hidden_size, model.ffn_size
    norm = 2 * hidden if model.norm == "layernorm" else hidden
    layers = matmul_parameters(model) - hidden * model.vocab_size + model.num_layers * 2 * norm
    layers += model.num_layers * _attention_vectors(model)
    if model.bias:
        layers += model.num_layers * ((_mlp_matrices(model) - 1) * ffn + hidden)
    tables = 1 if model.tie_embeddings else 2
    positions = model.max_positions * hidden if model.position_embedding == "learned" else 0
    return layers + tables * hidden * model.vocab_size + positions + norm


def _attention_vectors(model: ModelConfig) -> int:
    """Counts the elements of a layer's biases and head norms in attention."""
    rows = (model.num_attention_heads + 2 * model.kv_heads) * model.head_size
    found = rows if model.qkv_bias else 0
    found += model.hidden_size if model.out_bias else 0
    return found + (2 * model.head_size if model.qk_norm else 0)


def _mlp_matrices(model: ModelConfig) -> int:
    """Returns 2 for up and down, 3 with swiglu's gate."""
    return 3 if model.activation == "swiglu" else 2


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
) -> list[int]:
    """Returns the sizes of the loss chunks of a micro-batch, in order; see `loss_chunk_counts`."""
    counts = loss_chunk_counts(
        tokens, columns, chunk_tokens, item=item, on_accelerator=on_accelerator
    )
    return [size for size, count in counts.items() for _ in range(count)]


def loss_chunk_counts(
    tokens: int, columns: int, chunk_tokens: int | None, *, item: int, on_accelerator: bool
) -> dict[int, int]:
    """Returns {tokens of a loss chunk: number of such chunks}, the larger size first.

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
    counts = {size + 1: larger, size: count - larger}
    return {size: count for size, count in counts.items() if count}
