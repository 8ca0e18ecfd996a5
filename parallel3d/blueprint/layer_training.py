"""Says what a run computes for each layer, which is less for frozen layers."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from parallel3d.blueprint.parameters import (
    TABLE,
    first_trained,
    frozen_parameters,
    stage_parameters,
)
from parallel3d.blueprint.stages import LayerCosts, head_cost
from parallel3d.models.declared import LayerKind
from parallel3d.models.flops import flops_of, layer_costs, layer_flops
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig


class LayerTraining(NamedTuple):
    """How much of a layer is trained.

    Attributes:
        backward: whether the layer has a backward, because it or a layer before it is trained.
        trained: share of the layer's elements that are trained.
    """

    backward: bool = True
    trained: float = 1.0


def layer_training(model: ModelConfig, optim: OptimConfig) -> list[LayerTraining]:
    """Returns what is trained of each layer."""
    frozen = frozen_parameters(model, optim)
    if not frozen:
        return [LayerTraining()] * model.num_layers
    first, every, trained = first_trained(model, frozen), Counter[int](), Counter[int]()
    for held in stage_parameters(model, 1, range(model.num_layers), False, False):
        layer = int(held.name.split(".")[1])
        every[layer] += held.numel
        trained[layer] += held.numel * (held.name not in frozen)
    return [
        LayerTraining(layer >= first, trained[layer] / every[layer])
        for layer in range(model.num_layers)
    ]


def training_costs(model: ModelConfig, optim: OptimConfig) -> LayerCosts:
    """Returns the costs by which layers are divided among stages.

    They are FLOPs of a token: those of the forward if everything is trained, because forward and
    backward are then proportional, and else a third of all that a layer computes.
    """
    frozen = frozen_parameters(model, optim)
    if not frozen:
        return LayerCosts(layer_costs(model), head_cost(model))
    costs = []
    for layer, (backward, trained) in enumerate(layer_training(model, optim)):
        kind = LayerKind.of(model, layer)
        forward, products = layer_flops(model, kind), flops_of(model, kind).products
        of_inputs = backward * (2 * forward - products)
        costs.append((forward + of_inputs + trained * products) / 3)
    reached = first_trained(model, frozen) < model.num_layers
    head = head_cost(model) * (1 + reached + (TABLE not in frozen)) / 3
    return LayerCosts(tuple(costs), head, differ_widely=True)
