"""Lists the parameters that one rank holds, with their sizes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from parallel3d.blueprint.ops import ALL_TRAINED, TrainedShares, Widths, cached_ops, widths
from parallel3d.models.keys import ModelConfig, states_of
from parallel3d.optim.keys import OptimConfig

TABLE = "head.table"
WORD_TABLE = "embedding.word.weight"
TABLES = (WORD_TABLE, TABLE)


class LocalParameter(NamedTuple):
    """The part of a parameter that one rank holds.

    Attributes:
        numel: number of elements.
        replicated: whether every tp rank holds the whole parameter. Under sequence parallelism a
            rank then has only the gradient of its own tokens.
        columns: number of columns of a matrix; 1 for a vector.
        shared: number of elements, at the parameter's end, whose gradients are summed over several
            tp ranks: key-value heads that are on several ranks, and norms of heads, since each rank
            has different heads.
        owners: number of sets of ranks with different shared elements.
        tied: whether it is the weight of both embedding and head.
        expert: whether it holds experts, whose gradients are summed over edp.
        frozen: whether no tensor in it is trained on any rank, so that it has no gradient.
    """

    name: str
    numel: int
    replicated: bool
    columns: int = 1
    shared: int = 0
    owners: int = 1
    tied: bool = False
    expert: bool = False
    frozen: bool = False


def stage_parameters(
    model: ModelConfig,
    tp: int,
    layers: range,
    first: bool,
    last: bool,
    *,
    borrows_table: bool = False,
    ep: int = 1,
) -> list[LocalParameter]:
    """Lists a rank's parameters of one stage, including vocabulary padding.

    The stage has `layers`, the embedding if `first`, and the head if `last`. The order is that of
    `Stage.named_parameters()`, which decides the gradient buckets;
    tests/unit/estimate/test_traffic.py compares the two.

    A tied weight is in the list once if one stage has both embedding and head. It is not in
    the list of the head's stage if this stage `borrows_table` from the first stage on the same
    rank.
    """
    found = list(_embedding(model, tp)) if first else []
    dense = _layer(widths(model, tp), tp, model.kv_heads) if layers else ()
    for layer in layers:
        of_layer = _with_experts(dense, model, tp, ep) if model.has_experts(layer) else dense
        found += [p._replace(name=f"layers.{layer}.{p.name}") for p in of_layer]
    if last:
        shared = model.tie_embeddings and (first or borrows_table)
        found += _head(model, tp, has_table=not shared)
    return found


def tensors_of(name: str, model: ModelConfig) -> list[str]:
    """Returns the names of the full tensors that the local parameter `name` holds, on any rank."""
    inner = ("gate", "up") if model.is_gated else ("up",)
    prefix, _, of_layer = name.rpartition(".")
    if name == TABLE:
        return [WORD_TABLE if model.tie_embeddings else "head.weight"]
    if prefix == "head.norm":
        return [f"final_norm.{of_layer}"]
    if prefix.endswith("attention.qkv"):
        return [f"{prefix.removesuffix('qkv')}{part}.{of_layer}" for part in "qkv"]
    if prefix.endswith("attention.qk_norm"):
        return [f"{prefix.removesuffix('qk_norm')}{of_layer}_norm.weight"]
    if prefix.endswith("mlp.experts"):
        parts = inner if of_layer == "up" else (of_layer,)
        experts = range(model.num_experts)
        return [f"{prefix}.{number}.{part}.weight" for number in experts for part in parts]
    if prefix.endswith(("mlp.up", "mlp.shared.up")):
        return [f"{prefix.removesuffix('up')}{part}.{of_layer}" for part in inner]
    if name == "embedding.position" or of_layer == "shared_gate":
        return [f"{name}.weight"]
    return [name]


@functools.lru_cache(maxsize=64)
def _layer(w: Widths, tp: int, kv_heads: int) -> tuple[LocalParameter, ...]:
    found: list[LocalParameter] = []
    for op in cached_ops(w, frozenset()).plain:
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
        elif op.name.endswith("qk_norm") and w.full_norms:
            shared = w.keys if tp > kv_heads else 0
            found.append(LocalParameter(f"{op.name}.q", w.queries, tp == 1))
            found.append(LocalParameter(f"{op.name}.k", w.keys, tp == 1, 1, shared, kv_heads))
        elif op.name.endswith("qk_norm"):
            size = int(w.queries / w.heads)
            shared = size if tp > 1 else 0
            for part in ("q", "k"):
                name = f"{op.name}.{part}"
                found.append(LocalParameter(name, size, tp == 1, shared=shared))
        elif op.kind == "norm":
            found += _norm(w, op.name)
    return tuple(found)


def _with_experts(
    dense: Sequence[LocalParameter], model: ModelConfig, tp: int, ep: int
) -> list[LocalParameter]:
    """Returns the parameters of a layer with experts instead of an MLP, in the module's order."""
    hidden, width = model.hidden_size, model.expert_size
    inner = 2 if model.is_gated else 1
    here = model.num_experts // ep
    apart = ("mlp.", "mlp_output_norm.")
    found = [p for p in dense if not p.name.startswith(apart)]
    if model.shared_expert_gate:
        found.append(LocalParameter("mlp.shared_gate", hidden, True, hidden))
    found += [
        LocalParameter("mlp.router.weight", model.num_experts * hidden, True, hidden),
        LocalParameter("mlp.experts.up", here * inner * width * hidden, False, hidden, expert=True),
        LocalParameter("mlp.experts.down", here * hidden * width, False, width, expert=True),
    ]
    if shared := model.shared_expert_size // tp:
        found += [
            LocalParameter("mlp.shared.up.weight", inner * shared * hidden, tp == 1, hidden),
            LocalParameter("mlp.shared.down.weight", hidden * shared, tp == 1, shared),
        ]
    return found + [p for p in dense if p.name.startswith("mlp_output_norm.")]


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


def frozen_parameters(model: ModelConfig, optim: OptimConfig) -> frozenset[str]:
    """Returns the names of the local parameters in which no tensor is trained (`optim.freeze`).

    If any tensor in a parameter is trained on some rank, such as one of q, k and v or one expert of
    a layer, the parameter is not among them. Its frozen tensors then get gradients that are
    ignored.
    """
    if not optim.freeze:
        return frozenset()
    held = stage_parameters(model, 1, range(model.num_layers), True, True)
    names = {parameter.name for parameter in held} | {TABLE}
    return frozenset(
        name for name in names if all(optim.treatment(t).frozen for t in tensors_of(name, model))
    )


def fixed_states(model: ModelConfig, optim: OptimConfig) -> frozenset[str]:
    """Returns the names of the model's states, such as a router's bias, that a run does not change.

    They are frozen (`optim.freeze`), or have a learning rate of 0 (`optim.groups`). Other factors
    do not act on states, because these have no learning rate.
    """
    treated = {name: optim.treatment(name) for name in states_of(model)}
    return frozenset(name for name, t in treated.items() if t.frozen or t.lr_mult == 0)


def first_trained(model: ModelConfig, frozen: Collection[str]) -> int:
    """Returns the first layer with a parameter to train; no layer before it has a backward.

    It returns −1 if the embedding has such a parameter, and the number of layers if only the head
    has one.
    """
    if not frozen:
        return -1
    layers = range(model.num_layers)
    held = stage_parameters(model, 1, layers, True, True)
    place = {"embedding": -1, "head": len(layers)}
    parts = [p.name.split(".") for p in held if p.name not in frozen]
    return min(place[part[0]] if part[0] in place else int(part[1]) for part in parts)


def trained_shares(model: ModelConfig, optim: OptimConfig) -> TrainedShares:
    """Returns which shares of the model a run trains, given `optim.freeze`."""
    frozen = frozen_parameters(model, optim)
    if not frozen:
        return ALL_TRAINED
    layers = range(model.num_layers)
    held = stage_parameters(model, 1, layers, False, False)
    trained = sum(p.numel for p in held if p.name not in frozen)
    return TrainedShares(
        backward=1 - max(0, first_trained(model, frozen)) / len(layers),
        weights=trained / sum(p.numel for p in held),
        embedding=float(WORD_TABLE not in frozen),
        head=float(TABLE not in frozen),
    )


def parameter_count(model: ModelConfig) -> int:
    """Counts the parameters of the model without padding; a tied weight counts once."""
    unpadded = replace(model, vocab_multiple=1)
    ends = sum(p.numel for p in stage_parameters(unpadded, 1, range(0), True, True))
    layers = stage_parameters(unpadded, 1, range(model.num_layers), False, False)
    return ends + sum(p.numel for p in layers)


def active_parameter_count(model: ModelConfig) -> int:
    """Counts the parameters that one token uses, with `experts_per_token` experts in each layer."""
    unused = 0
    if model.num_experts:
        inner = 3 if model.is_gated else 2
        expert = inner * model.expert_size * model.hidden_size
        layers = len(model.expert_layers)
        unused = layers * (model.num_experts - model.experts_per_token) * expert
    return parameter_count(model) - unused
