"""Lists the products with weights in a layer, from its declaration. No torch.

A product multiplies by the matrices of one local parameter. Its name is that of the parameter, such
as attention.qkv.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

from parallel3d.models import declared
from parallel3d.models.declared import LayerKind
from parallel3d.models.keys import ModelConfig
from parallel3d.models.repeats import Repeats

COLUMN, ROW = 0, 1  # the dimension of its matrices that tensor parallelism cuts
ROUTED = "experts"  # the dimension of a router's results


class LayerProduct(NamedTuple):
    """A product of a layer.

    Attributes:
        parameter: name of its local parameter within the layer.
        multiplied: multiply-adds of a token, over all ranks.
        split: COLUMN or ROW, where a tensor-parallel layer gathers or sums; None: nothing is sent.
        inputs, outputs: names of the dimensions that its first matrix reads and makes.
        of_experts: whether it multiplies by the matrices of experts.
        before: the local parameters from which its input comes, if it reads no hidden states.
    """

    parameter: str
    multiplied: int
    split: int | None
    inputs: str
    outputs: str
    of_experts: bool = False
    before: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.parameter.removesuffix(".weight")


def products_of(model: ModelConfig, kind: LayerKind) -> list[LayerProduct]:
    """Lists the products of a layer, in the order of its parameters."""
    held = declared.layer(model, kind)
    routers = tuple(name for name, tensors in held.items() if tensors[0].dims[0].name == ROUTED)
    found = []
    for number, (name, tensors) in enumerate(held.items()):
        matrices = [tensor for tensor in tensors if len(tensor.dims) > 1]
        if not matrices:
            continue
        first, product = matrices[0], name.removesuffix(".weight")
        module, split = product.rpartition(".")[0], first.split
        outputs, *_, inputs = (dim.name for dim in first.dims)
        before: tuple[str, ...] = ()
        if inputs != "hidden":
            # Without hidden states as its input, such as a convolution, it gathers nothing.
            split = None if split == COLUMN else split
            earlier = [*held][:number]
            before = tuple(n for n in earlier if n.startswith(f"{module}."))
            if first.experts:  # the weights of a token's experts come from the router
                before += routers
        used = model.experts_per_token if first.experts else 1
        multiplied = used * sum(math.prod(tensor.shape) for tensor in matrices)
        of_experts = first.experts > 0
        found.append(LayerProduct(name, multiplied, split, inputs, outputs, of_experts, before))
    return found


def norms_over_tp(model: ModelConfig, kind: LayerKind) -> dict[str, int]:
    """Returns the numbers of a token that ranks sum for norms over a dimension that tp cuts.

    They are keyed by the module of the norms, within the layer.
    """
    held = declared.layer(model, kind)
    return Counter(
        name.rpartition(".")[0] for name, (first, *_) in held.items() if first.norm_over_tp
    )


class Gradients(NamedTuple):
    """The gradients that the backward of a layer computes, as names of products.

    Attributes:
        inputs: products whose input has a gradient.
        weights: products whose weight has a gradient.
        norms: modules of `norms_over_tp` whose results have a gradient.
    """

    inputs: frozenset[str]
    weights: frozenset[str]
    norms: frozenset[str] = frozenset()

    def reach(self, product: LayerProduct) -> bool:
        """Returns whether the result of a product has a gradient."""
        return product.name in self.inputs | self.weights


def gradients_of(
    model: ModelConfig, kind: LayerKind, frozen: Collection[str], reached: bool
) -> Gradients:
    """Returns the gradients of a layer.

    Args:
        frozen: its local parameters that are not trained.
        reached: whether its input has a gradient.
    """
    inputs, weights, norms = set[str](), set[str](), set[str]()
    products = {each.parameter: each for each in products_of(model, kind)}
    split_norms = norms_over_tp(model, kind)
    parts = groupby(declared.layer(model, kind), key=lambda name: name.split(".")[0])
    for _, parameters in parts:
        mine = [*parameters]
        norms |= {
            name.rpartition(".")[0]
            for number, name in enumerate(mine)
            if reached or any(earlier not in frozen for earlier in mine[: number + 1])
        } & split_norms.keys()
        for each in (products[name] for name in mine if name in products):
            if reached or any(name not in frozen for name in each.before):
                inputs.add(each.name)
            if each.parameter not in frozen:
                weights.add(each.name)
        reached = reached or any(name not in frozen for name in mine)
    return Gradients(frozenset(inputs), frozenset(weights), frozenset(norms))


def repeats_anything(model: ModelConfig, kind: LayerKind, repeats: Repeats) -> bool:
    """Returns whether the backward of a layer repeats anything: some parts are not in all layers.

    Norms that follow attention and MLP are not repeated by themselves, nor are the non-linearities
    of experts.
    """
    norms = repeats.norm and kind.norm_position != "after"
    activations = repeats.activation and (not kind.experts or model.shared_expert_size > 0)
    return norms or activations or repeats.mixer or repeats.mlp


def repeated_products(
    model: ModelConfig, kind: LayerKind, repeats: Repeats, ep: int = 1
) -> list[LayerProduct]:
    """Lists the products that the backward of a layer repeats.

    A recomputation ends with the input of the last product, unless a norm follows it. A shared
    expert comes last if the experts are not divided over `ep` ranks.
    """
    *_, last = products = products_of(model, kind)
    ends = not kind.experts or (last.split == ROW and ep <= 1 and not model.shared_expert_gate)

    def is_repeated(product: LayerProduct) -> bool:
        if repeats.layer:
            return not ends or product != last or kind.norm_position != "before"
        inside = product.split is None and bool(product.before)
        if product.name.startswith("attention."):  # a convolution between the projections
            return repeats.attention and inside
        return repeats.mlp and product.name.startswith("mlp.") and not (ends and product == last)

    return [product for product in products if is_repeated(product)]
