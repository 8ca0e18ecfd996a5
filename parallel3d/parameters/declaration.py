"""Declares full tensors as data: what their dimensions mean, how they are cut, drawn and treated.

A module's parameters are declared once, without torch (`models/declared.py`). The module is built
from the declaration, and what a rank holds, what a checkpoint contains and what an optimizer does
with a tensor are derived from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias


class Dimension(NamedTuple):
    """A dimension of full tensors.

    Attributes:
        name: its meaning: hidden, queries, keys, ffn, vocabulary, …
        size: number of elements, without padding.
        heads: number of heads, between which tensor parallelism cuts. A head is on several ranks
            if there are more ranks than heads. 0: the dimension is cut anywhere.
        padded: number of elements with padding, or 0 if there is none.
    """

    name: str
    size: int
    heads: int = 0
    padded: int = 0

    def copies(self, tp: int) -> int:
        """Returns the number of consecutive ones of `tp` ranks that hold the same part."""
        return max(1, tp // self.heads) if self.heads else 1

    def local(self, tp: int) -> int:
        """Returns the size, with padding, of the part that one of `tp` ranks holds."""
        return (self.padded or self.size) * self.copies(tp) // tp


class Drawn(NamedTuple):
    """Initial values that are drawn between two bounds and then mapped.

    Attributes:
        low, high: the bounds.
        value: "log": the logarithm of a uniform number, as for the decay rates of Mamba and gated
            DeltaNet. "inverse_softplus": the number whose softplus is log-uniform, as for their
            time steps.
    """

    low: float
    high: float
    value: Literal["log", "inverse_softplus"]


class FullTensor(NamedTuple):
    """A full tensor of a model; with experts, the equal tensors of all experts of a layer.

    Attributes:
        name: its name; that of an expert's tensor has `{}` in place of the expert's number.
        dims: its dimensions.
        split: the dimension that tensor parallelism cuts; None: every tp rank holds the tensor.
        std: standard deviation of the initial values around 0, or 0 if all values are `fill`.
        decays: whether weight decay applies.
        muon: whether Muon may update it.
        of_heads: whether a rank's gradient covers only its own heads although it holds the whole
            tensor; the gradients of all tp ranks are then summed. For any other tensor that all tp
            ranks hold, a rank has the gradient of its own tokens under sequence parallelism, and
            otherwise the whole gradient.
        experts: number of experts that have such a tensor, which expert parallelism divides over
            ranks; 0: it is no expert's.
        is_state: whether it is a state, which has no gradient and which no optimizer updates.
        wide: whether it is in fp32 (or fp64) although the model is in 16 bits: its layer reads it
            so, and checkpoints and exports contain it so. A few such vectors are whole on every
            data-parallel rank under zero=2 and 3, where FSDP2 shards all others. Muon may update
            none. The tensors of one local parameter agree in it.
        tied: whether it is the table of both embedding and head.
        drawn: how its initial values are drawn, if they do not follow from `std` and `fill`.
        norm_over_tp: whether it is the weight of a norm over a dimension that tensor parallelism
            cuts. Its ranks then sum one number for each token, in the forward and in the backward;
            the norms of one module do so together.
    """

    name: str
    dims: tuple[Dimension, ...]
    split: int | None = None
    std: float = 0.0
    fill: float = 0.0
    decays: bool = True
    muon: bool = False
    of_heads: bool = False
    experts: int = 0
    is_state: bool = False
    wide: bool = False
    tied: bool = False
    drawn: Drawn | None = None
    norm_over_tp: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape, without padding."""
        return tuple(dim.size for dim in self.dims)

    @property
    def names(self) -> list[str]:
        """The names of the tensors: one, or one for each expert."""
        return self.names_of(range(self.experts))

    def names_of(self, experts: Iterable[int]) -> list[str]:
        """Returns the names of the tensors of some experts, or the name if it is no expert's."""
        return [self.name.format(number) for number in experts] if self.experts else [self.name]

    def copies(self, tp: int) -> int:
        """Returns the number of consecutive ones of `tp` ranks that hold the same part."""
        return tp if self.split is None else self.dims[self.split].copies(tp)

    def summed_over(self, tp: int) -> int:
        """Returns the number of consecutive tp ranks whose gradients of a part are always summed.

        They hold the same part, and each has only the gradient of its own heads.
        """
        return 1 if self.split is None and not self.of_heads else self.copies(tp)

    def is_replicated(self, tp: int) -> bool:
        """Returns whether all tp ranks hold all of it, and none only the gradient of its heads."""
        return not self.experts and (tp == 1 or (self.split is None and not self.of_heads))

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Returns the shape of a rank's part, with padding."""
        parts = (tp if i == self.split else 1 for i in range(len(self.dims)))
        return tuple(dim.local(ranks) for dim, ranks in zip(self.dims, parts, strict=True))

    def start(self, tp: int, index: int) -> tuple[int, ...]:
        """Returns the first index of the part of tp rank `index` in each dimension."""
        start = [0] * len(self.dims)
        if self.split is not None:
            start[self.split] = index // self.copies(tp) * self.local_shape(tp)[self.split]
        return tuple(start)

    def local_numel(self, tp: int, ep: int = 1) -> int:
        """Returns the number of elements on a rank, with padding."""
        return math.prod(self.local_shape(tp)) * max(1, self.experts // ep)


# Name of a local parameter (or of a state) → the full tensors that it holds, stacked by rows, in
# the order of the module's parameters. The tensors of experts are stacked expert by expert.
Held: TypeAlias = dict[str, tuple[FullTensor, ...]]


def within(prefix: str, held: Held) -> Held:
    """Returns `held` with `prefix.` before the names of local parameters and of tensors."""
    return placed(prefix, named(prefix, held))


def placed(module: str, held: Held) -> Held:
    """Returns `held` with `module.` before the names of local parameters only."""
    return {f"{module}.{name}": tensors for name, tensors in held.items()}


def named(prefix: str, held: Held) -> Held:
    """Returns `held` with `prefix.` before the names of tensors only."""
    return {
        name: tuple(tensor._replace(name=f"{prefix}.{tensor.name}") for tensor in tensors)
        for name, tensors in held.items()
    }


def part_of(held: Held, module: str) -> Held:
    """Returns the parameters of a submodule, by their names within it."""
    return {
        name.removeprefix(f"{module}."): tensors
        for name, tensors in held.items()
        if name.startswith(f"{module}.")
    }


def vector(name: str, dim: Dimension, split: int | None = None, fill: float = 0.0) -> FullTensor:
    """Declares a bias or a norm's weight, which does not decay."""
    return FullTensor(name, (dim,), split, fill=fill, decays=False)


def column_parallel(
    matrices: Mapping[str, Dimension], inputs: Dimension, std: float, bias: bool
) -> Held:
    """Declares a linear layer with split outputs, which holds several matrices by name."""
    weights = (
        FullTensor(f"{name}.weight", (rows, inputs), 0, std, muon=True)
        for name, rows in matrices.items()
    )
    biases = tuple(vector(f"{name}.bias", rows, split=0) for name, rows in matrices.items())
    return {"weight": tuple(weights), **({"bias": biases} if bias else {})}


def row_parallel(name: str, inputs: Dimension, outputs: Dimension, std: float, bias: bool) -> Held:
    """Declares a linear layer with split inputs; every rank holds its bias."""
    weight = FullTensor(f"{name}.weight", (outputs, inputs), 1, std, muon=True)
    biases = {"bias": (vector(f"{name}.bias", outputs),)} if bias else {}
    return {"weight": (weight,), **biases}


def vocabulary_table(
    name: str, rows: int, padded: int, hidden: Dimension, std: float, *, replicated: bool
) -> FullTensor:
    """Declares a table with a row for each word, whose padding is at its end."""
    dims = Dimension("vocabulary", rows, padded=padded), hidden
    return FullTensor(name, dims, None if replicated else 0, std)
