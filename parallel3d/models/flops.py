"""Counts the FLOPs of a model from the shapes of its weights, by the conventions of the MFU.

A weight with several dimensions costs 2 FLOPs per element and token that uses it. This needs no
torch, and is the same on every rank, which all divide the layers among the stages by it. Tests
compare it with the products that a layer runs (`trace`).

Conventions of the MFU:

* Only matmuls count: 2 FLOPs per multiply-add, once forward and twice backward, i.e. 6 per weight
  and token. Norms, softmax, activations, embedding look-ups and the optimizer do not count.
* A frozen weight has no gradient, so it counts 4 per token, and 2 in layers before the first
  trained weight.
* Attention counts over the full s × s square, not the causal half, as in PaLM (Chowdhery et al.
  2022, appendix B), Narayanan et al. 2021 (equation 3) and torchtitan, with document masks too.
  Attention through a window counts only the keys that are seen. A recurrence counts the products
  of its chunks (`declared.flops_of_delta`), whatever its kernel does.
* Recomputation never counts: this is model (MFU), not hardware (HFU) utilisation.
* Experts count only for the tokens that use them; the router counts for all tokens.
* The output head counts `vocab_size` columns, without padding.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from parallel3d.models.declared import (
    MIXERS,
    KnownModel,
    LayerKind,
    kinds_of_layers,
    layer_kinds,
)
from parallel3d.models.keys import ModelConfig
from parallel3d.models.products import products_of, repeated_products
from parallel3d.models.repeats import Repeats
from parallel3d.models.survey import survey_of

MFU_FORMULA = "tokens_per_s × flops_per_token / (world_size × peak_flops_per_device)"
FLOPS_FORMULA = "6 × matmul weights + 12 × layers × heads × head_dim × seq_length (full attention)"

LESS_FROZEN = ", less the gradients of what is frozen"


class TrainedShares(NamedTuple):
    """The shares of a model that a run trains; less than 1 with `optim.freeze`.

    Attributes:
        backward: share of the layers with something to train in them or before them.
        weights: share of the layers' elements that are trained.
        embedding: 1 if the embedding's weight is trained, else 0.
        head: 1 if the head's weight is trained, else 0.
    """

    backward: float = 1.0
    weights: float = 1.0
    embedding: float = 1.0
    head: float = 1.0


ALL_TRAINED = TrainedShares()


class LayerFlops(NamedTuple):
    """The forward FLOPs of a layer for one token, over all tensor-parallel ranks.

    Attributes:
        products: FLOPs of the products with weights.
        attention: FLOPs of attention for each key that a query sees.
        window: number of keys that a query sees, or None for all up to its own.
        recurrence: FLOPs of a mixer whose work does not depend on the number of keys.
    """

    products: float
    attention: float
    window: int | None = None
    recurrence: float = 0.0

    def total(self, seq_length: int, every: float) -> float:
        """Returns the FLOPs if a query without a window sees `every` keys."""
        window = self.window
        seen = every
        if window is not None and window < seq_length:
            seen = keys_seen(seq_length, seq_length, True, window)
        return self.products + self.recurrence + self.attention * seen


def keys_seen(queries: float, keys: float, causal: bool, window: int | None) -> float:
    """Returns the mean number of keys that attention processes per query.

    The last query has the position of the last key. With `causal`, the keys after a query are
    skipped. If `window` is not None, each query sees only the last `window` keys up to its
    position.
    """
    if window is None or window > keys:
        return keys - causal * queries / 2
    # number of keys that the first query's window lacks at the start of the sequence
    lacking = max(0.0, window - 1 - (keys - queries))
    return window - lacking * (lacking + 1) / (2 * queries)


def flops_of(
    model: ModelConfig, kind: LayerKind, repeats: Repeats | None = None, ep: int = 1
) -> LayerFlops:
    """Returns the FLOPs of a layer; with `repeats`, only of what the backward repeats.

    `ep`: number of ranks over which experts are divided, on which the order of a layer depends.

    A block of a user's own counts as if each of its elements were multiplied once by each token.
    """
    if (survey := survey_of(model)) is not None:
        assert kind.own is not None
        whole = repeats is None or repeats.layer
        return LayerFlops(2.0 * survey.elements_of_block(kind.own) * whole, 0.0)
    of_layer = products_of(model, kind)
    if repeats is not None:
        of_layer = repeated_products(model, kind, repeats, ep)
    recurrence = attention = 0.0
    if kind.mixer is not None and (repeats is None or repeats.mixer):
        of_mixer = MIXERS[kind.mixer].flops
        recurrence, attention = (0.0, 0.0) if of_mixer is None else of_mixer(model, kind)
    products = 2 * sum(product.multiplied for product in of_layer)
    return LayerFlops(float(products), attention, kind.window, recurrence)


def layer_flops(
    model: ModelConfig,
    kind: LayerKind | None = None,
    repeats: Repeats | None = None,
    ep: int = 1,
) -> float:
    """Returns the forward FLOPs of a layer per token, over all tensor-parallel ranks.

    A query sees half of the keys. `kind` is the kind of the layer, or None for that of the first
    layer. With `repeats` only the products that the backward repeats count.
    """
    kind = LayerKind.of(model, 0) if kind is None else kind
    return flops_of(model, kind, repeats, ep).total(model.seq_length, model.seq_length / 2)


def layer_costs(model: ModelConfig) -> tuple[float, ...]:
    """Returns `layer_flops` of each layer."""
    return _layer_costs(KnownModel.of(model))


@functools.lru_cache(maxsize=64)
def _layer_costs(of: KnownModel) -> tuple[float, ...]:
    model, kinds = of.model, kinds_of_layers(of.model)
    cost = {kind: layer_flops(model, kind) for kind in dict.fromkeys(kinds)}
    return tuple(cost[kind] for kind in kinds)


def repeated_share(model: ModelConfig, repeats: Repeats, ep: int = 1) -> float:
    """Returns the share of the layers' forward FLOPs that the backward repeats."""
    return _repeated_share(KnownModel.of(model), repeats, ep)


@functools.lru_cache(maxsize=1024)
def _repeated_share(of: KnownModel, repeats: Repeats, ep: int) -> float:
    again = every = 0.0
    for kind, count in layer_kinds(of.model).items():
        again += count * layer_flops(of.model, kind, repeats, ep)
        every += count * layer_flops(of.model, kind)
    return again / every


def flops_per_token(
    model: ModelConfig, seq_length: int, shares: TrainedShares = ALL_TRAINED
) -> float:
    """Returns the model FLOPs of training on one token of a sample of `seq_length` tokens.

    They include forward and backward, and follow FLOPS_FORMULA and the conventions above.
    """
    forward = products = 0.0
    for kind, count in layer_kinds(model).items():
        each = flops_of(model, kind)
        forward += count * each.total(seq_length, seq_length)  # without the causal mask
        products += count * each.products
    # Attention's backward has four matmuls, two for each matmul of the forward.
    of_inputs = shares.backward * (2 * forward - products)
    survey = survey_of(model)
    head = 2 * (model.hidden_size * model.vocab_size if survey is None else survey.head_elements)
    of_head = head * (1 + (shares.backward > 0) + shares.head)
    return float(forward + of_inputs + shares.weights * products + of_head)
