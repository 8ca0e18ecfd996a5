"""What the layers of a stage know about the tokens of a micro-batch beside their hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from parallel3d.context_parallel.documents import Documents
from parallel3d.experts.balance import Balance
from parallel3d.experts.route import TokenRoute
from parallel3d.models.rotary import Positions


@dataclass(frozen=True)
class LayerInputs:
    """Travels with the hidden states of a micro-batch through stages, blocks and recomputation.

    A further property of the tokens is a further field; no signature between them changes.

    This is not a tuple, for the reason that `Documents` gives.

    It is public as `parallel3d.Inputs`: the modules and the loss of a user's own model get it whole
    on every stage.

    Attributes:
        samples: (b,) int64, each sample's index in the run; None: nothing is dropped.
        documents: the documents within which attention stays and positions are counted; None: each
            sample is one document.
        balance: which tokens the experts count, and the data of their balancing losses; None: the
            experts' tokens are not counted.
        positions: the tokens' rows of the rotary tables, which the stage fills in
            (`Stage.with_positions`).
        route: the tokens' route through one layer with experts, which a recomputed forward takes
            again; None in all other layers.
        batch: the fields of the samples by name, stacked to (b, …), for a user's own model; those
            of floating point have the compute dtype. It is empty for other models.
    """

    samples: Tensor | None = None
    documents: Documents | None = None
    balance: Balance | None = None
    positions: Positions = field(default_factory=Positions)
    route: TokenRoute | None = None
    batch: Mapping[str, Tensor] = field(default_factory=dict)


Inputs = LayerInputs  # the public name


class LayerState(Protocol):
    """What a layer keeps of the tokens that it has decoded; its mixer makes it."""

    def step(self, x: Tensor, first: int, positions: Positions) -> Tensor:
        """Returns the mixer's output for new tokens (1, n, hidden), the first at place `first`.

        A sequence begins at place 0, which forgets all earlier tokens.
        """
