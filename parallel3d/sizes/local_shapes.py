"""Which parameters a rank of one stage holds, and how large, without making them: no torch here.

The list is that of `Stage.named_parameters()`, in its order, which decides the gradient buckets;
tests/unit/test_traffic.py compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
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
