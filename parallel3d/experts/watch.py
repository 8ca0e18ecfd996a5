"""Records the choices of experts in a step, and replays the choices of another run.

A layout and a single process may choose different experts where two scores differ by less than
rounding. Replaying the choice separates such flips from mistakes: with it, losses and gradients
agree as closely as in a model without experts.
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
    """The experts that the tokens of one step choose, on this rank or on all.

    Attributes:
        layers: the layers with experts, in the order of the tensors' first dimension.
        first: number of the step's first sample in the run.
        experts: (layers, samples, positions, k) int64, the model's choices; -1 where this rank has
            none.
        margins: (layers, samples, positions) float64, how close the choice was; see `margins_of`.
        given: experts to use instead of the chosen ones; None: the chosen ones are used.
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
        """Creates an empty record; `shape`: samples, positions and k."""
        experts = torch.full((len(layers), *shape), -1, dtype=torch.int64, device=device)
        margins = torch.full(experts.shape[:-1], torch.inf, dtype=torch.float64, device=device)
        return cls(layers, first, experts, margins, given)

    def chosen(self, layer: int, balance: Balance, experts: Tensor, margins: Tensor) -> Tensor:
        """Records the choice of a micro-batch; returns the experts to use."""
        number = self.layers.index(layer)
        count, length = len(balance.samples), self.experts.shape[2]
        own = experts.unflatten(0, (count, -1))
        positions = balance.positions
        if positions is None:
            positions = torch.arange(own.shape[1], device=own.device).expand(count, -1)
        is_inside = positions < length  # the rest pads sequences for context parallelism
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
        """Returns the choices of all ranks; collective. Each token must be on one rank."""
        # A rank without a token has -1, and adds nothing to the sum.
        experts = collectives.all_reduce(self.experts + 1, world) - 1
        # This is the smallest value, because it is infinite on all ranks but one.
        inverse = collectives.all_reduce(1 / self.margins, world)
        return Choices(self.layers, self.first, experts, 1 / inverse, self.given)


@dataclass(frozen=True)
class Flips:
    """Differences between the choices of a layout and of a single process in a step.

    Attributes:
        tokens: number of tokens of each layer.
        by_layer: layer → number of tokens whose sets of chosen experts differ.
        margin: the smallest margin of all tokens in the single process.
        close: number of tokens, summed over layers, with a margin below 1e-6.
        first: (layer, sample, position, margin) of the flip with the largest margin; None: there
            is none.
    """

    tokens: int
    by_layer: dict[int, int]
    margin: float
    close: int
    first: tuple[int, int, int, float] | None

    @property
    def count(self) -> int:
        """Number of tokens, summed over layers, whose experts differ."""
        return sum(self.by_layer.values())

    @property
    def share(self) -> float:
        """The share of tokens whose experts differ."""
        return self.count / (self.tokens * len(self.by_layer))


CLOSE = 1e-6


def flips(layout: Choices, single: Choices) -> Flips:
    """Compares the choices of all ranks of a layout with the choices of a single process."""
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
