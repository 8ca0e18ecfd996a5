"""Lists the parameters that one rank holds, with their sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from parallel3d.models import declared
from parallel3d.models.declared import (
    WORD_EMBEDDING,
    KnownModel,
    LayerKind,
    kinds_of_known,
)
from parallel3d.models.flops import ALL_TRAINED, TrainedShares
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig
from parallel3d.parameters.declaration import FullTensor, placed

TABLE = "head.table"
TABLES = (WORD_EMBEDDING, TABLE)


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
        decays: whether weight decay applies.
        muon: whether Muon may update it.
        frozen: whether no tensor in it is trained on any rank, so that it has no gradient.
        wide: whether it is in fp32 or better although the run computes in 16 bits.
    """

    name: str
    numel: int
    replicated: bool
    columns: int = 1
    shared: int = 0
    owners: int = 1
    tied: bool = False
    expert: bool = False
    decays: bool = True
    muon: bool = False
    frozen: bool = False
    wide: bool = False

    @classmethod
    def of(cls, name: str, tensors: tuple[FullTensor, ...], tp: int, ep: int = 1) -> LocalParameter:
        """Returns the parameter that holds a rank's part of these full tensors."""
        like = tensors[0]
        summed = [tensor for tensor in tensors if tensor.summed_over(tp) > 1]
        return cls(
            name,
            sum(tensor.local_numel(tp, ep) for tensor in tensors),
            like.is_replicated(tp),
            columns=like.local_shape(tp)[1] if len(like.dims) > 1 else 1,
            shared=sum(tensor.local_numel(tp) for tensor in summed),
            owners=tp // summed[0].summed_over(tp) if summed else 1,
            tied=like.tied,
            expert=like.experts > 0,
            decays=like.decays,
            muon=like.muon,
            wide=like.wide,
        )


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
    tests/unit/models/test_declared.py compares the two.

    A tied weight is in the list once if one stage has both embedding and head. It is not in
    the list of the head's stage if this stage `borrows_table` from the first stage on the same
    rank.
    """
    of = KnownModel.of(model)
    return parameters_of_known(of, tp, layers, first, last, borrows_table=borrows_table, ep=ep)


def parameters_of_known(
    of: KnownModel,
    tp: int,
    layers: range,
    first: bool,
    last: bool,
    *,
    borrows_table: bool = False,
    ep: int = 1,
) -> list[LocalParameter]:
    """Does the same as `stage_parameters`."""
    found: list[LocalParameter] = []
    if first:
        found += _of_embedding(of, tp)
    kinds = kinds_of_known(of) if layers else ()
    for number in layers:
        of_kind = _of_layer(of, kinds[number], tp, ep)
        found += [p._replace(name=f"layers.{number}.{p.name}") for p in of_kind]
    if last:
        found += [p for p in _of_head(of, tp) if not (p.tied and (first or borrows_table))]
    return found


@functools.lru_cache(maxsize=256)
def _of_embedding(of: KnownModel, tp: int) -> tuple[LocalParameter, ...]:
    held = placed("embedding", declared.embedding(of.model))
    return tuple(LocalParameter.of(name, tensors, tp) for name, tensors in held.items())


@functools.lru_cache(maxsize=1024)
def _of_layer(of: KnownModel, kind: LayerKind, tp: int, ep: int) -> tuple[LocalParameter, ...]:
    return tuple(
        LocalParameter.of(name, tensors, tp, ep)
        for name, tensors in declared.layer(of.model, kind).items()
        if not tensors[0].is_state
    )


@functools.lru_cache(maxsize=256)
def _of_head(of: KnownModel, tp: int) -> tuple[LocalParameter, ...]:
    held = placed("head", declared.head(of.model))
    return tuple(LocalParameter.of(name, tensors, tp) for name, tensors in held.items())


def tensors_by_parameter(model: ModelConfig) -> dict[str, list[str]]:
    """Maps each local parameter of the model to its full tensors, on any rank, by name."""
    return {
        name: [full for tensor in tensors for full in tensor.names]
        for name, tensors in declared.parameters_of(model)
        if not tensors[0].is_state
    }


def frozen_parameters(model: ModelConfig, optim: OptimConfig) -> frozenset[str]:
    """Returns the names of the local parameters in which no tensor is trained (`optim.freeze`).

    If any tensor in a parameter is trained on some rank, such as one of q, k and v or one expert of
    a layer, the parameter is not among them. Its frozen tensors then get gradients that are
    ignored.
    """
    if not optim.freeze:
        return frozenset()
    return frozenset(
        name
        for name, tensors in tensors_by_parameter(model).items()
        if all(optim.treatment(tensor).frozen for tensor in tensors)
    )


def fixed_states(model: ModelConfig, optim: OptimConfig) -> frozenset[str]:
    """Returns the names of the model's states, such as a router's bias, that a run does not change.

    They are frozen (`optim.freeze`), or have a learning rate of 0 (`optim.groups`). Other factors
    do not act on states, because these have no learning rate.
    """
    treated = {name: optim.treatment(name) for name in declared.states_of(model)}
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
        embedding=float(WORD_EMBEDDING not in frozen),
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
    unused = sum(
        (tensor.experts - model.experts_per_token) * math.prod(tensor.shape)
        for tensor in declared.full_tensors(model)
        if tensor.experts
    )
    return parameter_count(model) - unused
