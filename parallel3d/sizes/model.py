"""Which parameters a rank of one stage holds, and how large, without making them: no torch here.

The list is that of `Stage.named_parameters()`, in its order, which decides the gradient buckets;
tests/unit/test_traffic.py compares the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from parallel3d.config.schema import ModelConfig


class LocalParameter(NamedTuple):
    """A parameter as one rank holds it; `replicated`: every tp rank holds all of it, with
    the gradient of the tokens that it saw."""

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
    """The parameters of a rank whose stage has `layers`, the embedding if `first`, head if `last`.

    A tied table is listed once where one stage has both ends, and not at all where the head's stage
    `borrows_table` from the first, which lies on the same rank; padding of the vocabulary counts.
    """
    found = list(_embedding(model, tp)) if first else []
    for layer in layers:
        found += _layer(model, tp, f"layers.{layer}")
    if last:
        shared = model.tie_embeddings and (first or borrows_table)
        found += _head(model, tp, has_table=not shared)
    return found


def word_table_numel(model: ModelConfig, tp: int) -> int:
    """Elements of one rank's part of the word table."""
    rows = model.padded_vocab_size
    return (rows if model.embedding == "replicated" else rows // tp) * model.hidden_size


def _embedding(model: ModelConfig, tp: int) -> Iterator[LocalParameter]:
    if model.position_embedding == "learned":
        numel = model.max_positions * model.hidden_size
        yield LocalParameter("embedding.position", numel, True, model.hidden_size)
    whole = tp == 1 or model.embedding == "replicated"
    numel = word_table_numel(model, tp)
    yield LocalParameter("embedding.word.weight", numel, whole, model.hidden_size)


def _layer(model: ModelConfig, tp: int, name: str) -> Iterator[LocalParameter]:
    queries = model.num_attention_heads * model.head_size
    # Fewer key-value heads than ranks: each is on several.
    kv_rows = max(model.kv_heads, tp) * model.head_size
    qkv = queries + 2 * kv_rows
    up = model.ffn_size * (2 if model.activation == "swiglu" else 1)
    yield from _norm(model, f"{name}.input_norm")
    yield from _column(model, tp, f"{name}.attention.qkv", qkv, model.qkv_bias)
    if model.qk_norm:
        # Every rank holds them, with a gradient of its own heads whether sp or not.
        for part in ("q", "k"):
            yield LocalParameter(f"{name}.attention.qk_norm.{part}", model.head_size, tp == 1)
    yield from _row(model, tp, f"{name}.attention.out", queries, model.out_bias)
    yield from _norm(model, f"{name}.mlp_norm")
    yield from _column(model, tp, f"{name}.mlp.up", up, model.bias)
    yield from _row(model, tp, f"{name}.mlp.down", model.ffn_size, model.bias)


def _head(model: ModelConfig, tp: int, has_table: bool) -> Iterator[LocalParameter]:
    if has_table and model.tie_embeddings:
        whole = tp == 1 or model.embedding == "replicated"
        numel = word_table_numel(model, tp)
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
    """A linear layer whose rows are split."""
    numel = outputs // tp * model.hidden_size
    yield LocalParameter(f"{name}.weight", numel, tp == 1, model.hidden_size)
    if bias:
        yield LocalParameter(f"{name}.bias", outputs // tp, tp == 1)


def _row(
    model: ModelConfig, tp: int, name: str, inputs: int, bias: bool
) -> Iterator[LocalParameter]:
    """A linear layer whose columns are split; its bias is replicated."""
    columns = inputs // tp
    yield LocalParameter(f"{name}.weight", model.hidden_size * columns, tp == 1, columns)
    if bias:
        yield LocalParameter(f"{name}.bias", model.hidden_size, True)


# What `recompute` costs a layer: FLOPs and collectives that its backward makes again, by part.
#
# The clock of schedules, the traffic table and the planner read it here; what the parts are is said
# in `models/recompute.py`, the bytes that they leave in `plan/own.py`.


class LayerFlops(NamedTuple):
    """Forward FLOPs of one layer and token: its four GEMMs, and causal attention's two products."""

    qkv: float
    attention: float
    out: float
    up: float
    down: float


def layer_flops(model: ModelConfig) -> LayerFlops:
    """Over all tensor ranks; norms and the like are no products."""
    h, ffn = model.hidden_size, model.ffn_size
    queries, keys = (n * model.head_size for n in (model.num_attention_heads, model.kv_heads))
    return LayerFlops(
        2.0 * h * (queries + 2 * keys),
        2.0 * queries * model.seq_length,
        2.0 * queries * h,
        2.0 * h * ffn * (2 if model.activation == "swiglu" else 1),
        2.0 * ffn * h,
    )


def flops_again(model: ModelConfig, parts: Collection[str]) -> float:
    """Of one layer and token, beside the forward: a layer's last GEMM is never made again."""
    forward = layer_flops(model)
    if "layer" in parts:
        return sum(forward) - forward.down
    return forward.attention * ("attention" in parts) + forward.up * ("mlp" in parts)


class CollectivesAgain(NamedTuple):
    """Of hidden states over tp, by a layer: all-reduces or, under sequence parallelism, all-gathers
    and reduce-scatters instead."""

    sums: int
    gathers: int
    scatters: int


def collectives_again(parts: Collection[str]) -> CollectivesAgain:
    """Segments that hold a linear layer whose result is wanted: both of attention, or `up`."""
    if "layer" in parts:
        return CollectivesAgain(1, 2, 1)
    return CollectivesAgain(0, int("mlp" in parts), 0)


def recomputing(given: Sequence[int] | None, stage: int, layers: int) -> int:
    """How many of a stage's `layers` layers recompute, by `recompute_layers`."""
    if not given:
        return layers
    return min(layers, given[0] if len(given) == 1 else given[stage])


# What one training token costs, and how many parameters there are, from the model's shape alone.
#
# Conventions (each changes the MFU that is printed, so they are written down):
#
# * Only matrix products count: 2 FLOPs per multiply-add, once forward and twice backward, i.e.
#   6 per weight and token. Norms, softmax, activations and the optimizer are not model FLOPs.
# * Attention scores and their product with the values count over the full s × s square, not the
#   causal half, as in PaLM (Chowdhery et al. 2022, appendix B), Narayanan et al. 2021 (equation 3)
#   and torchtitan, so that figures can be compared. Causal kernels skip up to half of it, and with
#   document masks whatever lies between documents. It counts all the same: an MFU with masks can
#   be compared between layouts on the same data, not with one without masks.
# * Recomputed activations never count: this is model (MFU), not hardware (HFU) utilisation.
# * The output head counts the tokens that exist (`vocab_size`): padded logits are not useful work.
# * Looking up embeddings is no matrix product and counts nothing.


MFU_FORMULA = "tokens_per_s × flops_per_token / (world_size × peak_flops_per_device)"
FLOPS_FORMULA = "6 × matmul weights + 12 × layers × heads × head_dim × seq_length (full attention)"


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that a token is multiplied with: the layers' matrices and the head, tied or not."""
    hidden, ffn = model.hidden_size, model.ffn_size
    queries = model.num_attention_heads * model.head_size
    keys = model.kv_heads * model.head_size
    attention = hidden * (queries + 2 * keys) + queries * hidden
    mlp = _mlp_matrices(model) * hidden * ffn
    return model.num_layers * (attention + mlp) + hidden * model.vocab_size


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Model FLOPs of training, forward and backward, on one token of a `seq_length` tokens' sample.

    6 × matmul weights + 12 × layers × heads × head_dim × seq_length; see the conventions above.
    """
    queries = model.num_attention_heads * model.head_size
    attention = 12 * model.num_layers * queries * seq_length
    return float(6 * matmul_parameters(model) + attention)


def parameter_count(model: ModelConfig) -> int:
    """Distinct trainable parameters of the unpadded model; a tied table counts once."""
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
    """Elements of a layer's biases and head norms in attention."""
    rows = (model.num_attention_heads + 2 * model.kv_heads) * model.head_size
    found = rows if model.qkv_bias else 0
    found += model.hidden_size if model.out_bias else 0
    return found + (2 * model.head_size if model.qk_norm else 0)


def _mlp_matrices(model: ModelConfig) -> int:
    """up and down, and with swiglu the gate."""
    return 3 if model.activation == "swiglu" else 2


# How many tokens' logits exist at a time: arithmetic without torch, for the loss and its price.


CPU_BYTES = 64 << 20  # of the logits in fp32
# Each chunk reads the whole table twice and adds to its whole gradient: below about this many
# tokens that takes longer than the multiplications (docs/performance.md).
CPU_LEAST_TOKENS = 1024
# Of the logits in the compute type, on an accelerator: 8,372 tokens of Llama 3's vocabulary in
# bf16. To read the table twice, and read and write its fp32 gradient, takes an H100 as long as the
# products of 400 tokens (3.35 TB/s and 700 TFLOP/s; the width cancels out): 5 % of such a chunk,
# 40 % of one of 1,024 tokens. Beyond 2³¹ elements kernels would need 64-bit indices.
ACCELERATOR_BYTES = 2 << 30


def loss_chunks(
    tokens: int, columns: int, chunk_tokens: int | None, *, item: int, on_accelerator: bool
) -> list[int]:
    """The sizes of the chunks, in order, into which the loss cuts the tokens of a micro-batch.

    Arguments as those of `loss_chunk_counts`.
    """
    counts = loss_chunk_counts(
        tokens, columns, chunk_tokens, item=item, on_accelerator=on_accelerator
    )
    return [size for size, count in counts.items() for _ in range(count)]


def loss_chunk_counts(
    tokens: int, columns: int, chunk_tokens: int | None, *, item: int, on_accelerator: bool
) -> dict[int, int]:
    """How many chunks of which size the loss makes of a micro-batch's tokens, the larger first.

    Args:
        columns: of the logits that one rank holds.
        chunk_tokens: `loss.chunk_tokens`; None: as many as take 64 MiB in fp32 on a CPU, at least
            1,024, and 2 GiB in the compute type on an accelerator.
        item: bytes of the compute type.
    """
    if on_accelerator:
        most = chunk_tokens or max(1, ACCELERATOR_BYTES // (item * columns))
    else:
        most = chunk_tokens or max(CPU_LEAST_TOKENS, CPU_BYTES // (4 * columns))
    count = -(-tokens // most)
    # As equal as can be: a short rest would run at half the speed.
    size, larger = divmod(tokens, count)
    counts = {size + 1: larger, size: count - larger}
    return {size: count for size, count in counts.items() if count}
