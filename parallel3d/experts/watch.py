"""Records which experts are chosen in a step, and replays the choices of another run.

A layout and a single process may choose different experts for a token if two of its scores differ
by less than the rounding errors. Replaying the choices distinguishes such flips from bugs: with
equal choices, losses and gradients agree as closely as in a model without experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.experts.balance import Balance


@dataclass
class Choices:
    """The experts that the tokens of one step choose, on this rank or on all ranks.

    Attributes:
        layers: the layers with experts, in the order of the tensors' first dimension.
        first: the index of the step's first sample in the run.
        experts: (layers, samples, positions, k) int64, the router's choices; -1 for tokens that
            this rank does not have.
        margins: (layers, samples, positions) float64, how close each choice was (`margins_of`);
            infinite for tokens that this rank does not have.
        given: the experts to use instead of the router's choices, shaped like `experts`; None: the
            router's choices are used.
    """

    layers: list[int]
    first: int
    experts: Tensor
    margins: Tensor
    given: Tensor | None = None

    @classmethod
    def empty(
        cls,
        layers: list[int],
        first: int,
        shape: tuple[int, int, int],
        device: torch.device,
        given: Tensor | None = None,
    ) -> Choices:
        """Returns a record without choices; `shape`: the numbers of samples, positions and k."""
        experts = torch.full((len(layers), *shape), -1, dtype=torch.int64, device=device)
        margins = torch.full(experts.shape[:-1], torch.inf, dtype=torch.float64, device=device)
        return cls(layers, first, experts, margins, given)

    def chosen(self, layer: int, balance: Balance, experts: Tensor, margins: Tensor) -> Tensor:
        """Records the choices of a micro-batch in a layer, and returns the experts to use."""
        number = self.layers.index(layer)
        count, length = len(balance.samples), self.experts.shape[2]
        own = experts.unflatten(0, (count, -1))
        positions = balance.positions
        if positions is None:
            positions = torch.arange(own.shape[1], device=own.device).expand(count, -1)
        is_inside = positions < length  # later positions are padding for context parallelism
        rows = (balance.samples - self.first).unsqueeze(1).expand_as(positions)[is_inside]
        places = positions[is_inside]
        self.experts[number, rows, places] = own[is_inside]
        self.margins[number, rows, places] = margins.unflatten(0, (count, -1))[is_inside].double()
        if self.given is None:
            return experts
        used = own.clone()
        used[is_inside] = self.given[number, rows, places]
        return used.flatten(0, 1)

    def gathered(self, world: Group) -> Choices:
        """Returns the choices of all ranks; collective. Each token must be on exactly one rank."""
        # Adding 1 turns the -1 of a missing token into 0, so that it adds nothing to the sum.
        experts = collectives.all_reduce(self.experts + 1, world) - 1
        # Each margin is infinite on all ranks but one, so only that rank contributes to the sum.
        inverse = collectives.all_reduce(1 / self.margins, world)
        return Choices(self.layers, self.first, experts, 1 / inverse, self.given)


@dataclass(frozen=True)
class Flips:
    """The differences between a layout's choices in a step and those of a single process.

    Attributes:
        tokens: the number of tokens in each layer.
        by_layer: layer → the number of tokens whose chosen experts differ as sets.
        margin: the smallest margin of a token in the single process.
        close: the number of tokens with a margin below 1e-6, summed over the layers.
        first: (layer, sample, position, margin) of the differing token with the largest margin;
            None: no token differs.
    """

    tokens: int
    by_layer: dict[int, int]
    margin: float
    close: int
    first: tuple[int, int, int, float] | None

    @property
    def count(self) -> int:
        """The number of tokens whose experts differ, summed over the layers."""
        return sum(self.by_layer.values())

    @property
    def share(self) -> float:
        """The fraction of tokens, over all layers, whose experts differ."""
        return self.count / (self.tokens * len(self.by_layer))


CLOSE = 1e-6


def flips(layout: Choices, single: Choices) -> Flips:
    """Compares the choices of all ranks of a layout with those of a single process."""
    differ = (layout.experts.sort(-1).values != single.experts.sort(-1).values).any(-1)
    margins = single.margins
    worst = None
    if bool(differ.any()):
        widest = margins.masked_fill(~differ, -torch.inf)
        place = divmod(int(widest.argmax()), margins[0].numel())
        sample, position = divmod(place[1], margins.shape[2])
        worst = (layout.layers[place[0]], single.first + sample, position, float(widest.max()))
    return Flips(
        tokens=margins[0].numel(),
        by_layer=dict(zip(layout.layers, differ.flatten(1).sum(1).tolist(), strict=True)),
        margin=float(margins.min()),
        close=int((margins < CLOSE).sum()),
        first=worst,
    )
