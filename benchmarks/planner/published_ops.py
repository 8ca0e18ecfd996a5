"""Lists the operations of a layer of a published model on one tensor-parallel rank.

Such models have norms before attention and MLP, grouped queries, and an MLP or experts. Sizes are
numpy arrays for a table of runs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from parallel3d.blueprint.dispatch import load_of_tokens, share_sent

Number = Any  # int, float or a numpy array


class Op(NamedTuple):
    """One operation of a layer, forward and backward.

    Attributes:
        name: name of the module, as in the names of its parameters.
        kind: gemm, attention or elementwise.
        inputs, outputs: number of elements per token that it reads and writes; for a GEMM, k and n.
        parts: the parts of `recompute` that repeat the operation in the backward.
        keeps: number of elements per token that are kept until the backward.
        split: for a GEMM, "column" (sharded outputs) or "row" (sharded inputs); "" for neither.
        rows: number of rows that a GEMM computes per token.
        matrices: number of weight matrices of a GEMM; more than one with several experts.
    """

    name: str
    kind: str
    inputs: Number
    outputs: Number
    parts: Collection[str]
    keeps: Number = 0
    split: str = ""
    rows: Number = 1
    matrices: Number = 1


class Widths(NamedTuple):
    """Sizes of a layer on one tensor-parallel rank, in elements per token.

    Attributes:
        queries, keys: size of the rank's query heads, and of its key heads.
        gated: 1 if the MLP's first GEMM has two outputs of `ffn`, else 0.
        share: number of ranks over which the residual stream is split.
    """

    hidden: Number
    queries: Number
    keys: Number
    ffn: Number
    gated: Number
    share: Number


class Experts(NamedTuple):
    """Sizes of a layer's experts: their number, those of a token, ranks, and widths."""

    experts: Number
    chosen: Number
    ep: Number
    ffn: Number
    shared: Number


def layer_ops(w: Widths, experts: Experts | None = None) -> list[Op]:
    """Lists the operations of a layer in their order."""
    h, stream = w.hidden, w.hidden / w.share
    qkv = w.queries + 2 * w.keys
    attention, layer = ("attention", "layer"), ("layer",)
    return [
        Op("input_norm", "elementwise", stream, stream, ("norm", "layer"), stream),
        Op("attention.qkv", "gemm", h, qkv, layer, qkv, "column"),
        Op("attention.rotary", "elementwise", qkv, qkv, attention),
        Op("attention", "attention", qkv, w.queries, attention, w.queries),
        Op("attention.out", "gemm", w.queries, h, layer, split="row"),
        Op("attention.residual", "elementwise", 2 * stream, stream, layer, stream),
        *(_mlp(w) if experts is None else _experts(w, experts)),
        Op("mlp.residual", "elementwise", 2 * stream, stream, (), stream),
    ]


def _mlp(w: Widths) -> list[Op]:
    stream, up, mlp = w.hidden / w.share, w.ffn * (1 + w.gated), ("mlp", "layer")
    return [
        Op("mlp_norm", "elementwise", stream, stream, ("norm", "layer"), stream),
        Op("mlp.up", "gemm", w.hidden, up, mlp, up, "column"),
        Op("mlp.activation", "elementwise", up, w.ffn, ("activation", *mlp), w.ffn),
        Op("mlp.down", "gemm", w.ffn, w.hidden, (), split="row"),
    ]


def _experts(w: Widths, x: Experts) -> list[Op]:
    own, stream, mlp = 1 / w.share, w.hidden / w.share, ("mlp", "layer")
    share = share_sent(x.experts, x.chosen, x.ep)
    read, rows = own * x.ep * share * load_of_tokens(1.0, share), own * x.chosen
    h, up, here = w.hidden, x.ffn * (1 + w.gated), x.experts // x.ep
    found = [
        Op("mlp_norm", "elementwise", stream, stream, ("layer",), stream),
        Op("mlp.router", "gemm", h, x.experts, mlp, rows=own),
        Op("mlp.choice", "elementwise", own * x.experts, own * x.chosen, ()),
        Op("mlp.dispatch", "elementwise", own * h, read * h, mlp, read * h),
        Op("mlp.experts.up", "gemm", h, up, mlp, rows * up, "", rows, here),
        Op("mlp.experts.activation", "elementwise", rows * up, rows * x.ffn, mlp),
        Op("mlp.experts.down", "gemm", x.ffn, h, mlp, 0, "", rows, here),
        Op("mlp.combine", "elementwise", read * h, own * h, ()),
    ]
    if not np.any(x.shared > 0):
        return found
    wide, inner = x.shared * (1 + w.gated), ("activation", *mlp)
    summed = own * h * (x.shared > 0)  # a row of a table may have no shared expert
    return [
        *found,
        Op("mlp.shared.up", "gemm", h, wide, mlp, wide, "column"),
        Op("mlp.shared.activation", "elementwise", wide, x.shared, inner, x.shared),
        Op("mlp.shared.down", "gemm", x.shared, h, mlp, split="row"),
        Op("mlp.sum", "elementwise", 2 * summed, summed, ()),
    ]
