"""Seconds of a micro-batch: of each stage, and of a rank's layers under any stage assignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from parallel3d.schedules.actions import Kind
from parallel3d.schedules.orders import StageAssignment


@dataclass(frozen=True)
class Costs:
    """Seconds per micro-batch: each stage's forward and the two halves of its backward.

    `hop`: latency of a message to another rank; messages overlap with compute and cost their sender
    nothing, and chunks of one rank exchange none.

    Raises ValueError for costs that are not positive and finite, or a negative hop.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    hop: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight"):
            if not all(0 < cost < float("inf") for cost in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite")
        if not 0 <= self.hop < float("inf"):
            raise ValueError(f"hop={self.hop} must not be negative")

    @classmethod
    def even(
        cls,
        placement: StageAssignment,
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        hop: float = 0.0,
    ) -> Costs:
        """Spreads the costs of one rank's layers evenly over its chunks."""
        f, i, w = ((c / placement.chunks,) * placement.stages for c in (forward, input, weight))
        return cls(f, i, w, hop)

    def of(self, kind: Kind, stage: int) -> float:
        """Returns the seconds of one compute action."""
        if kind == Kind.F:
            return self.forward[stage]
        both = self.input[stage] + self.weight[stage]
        return {Kind.I: self.input[stage], Kind.W: self.weight[stage]}.get(kind, both)


# By stage: (fraction of a rank's layers, extra forwards in its forward, extra forwards in its
# backward, for recomputation), the last two in units of a rank's forward.
Weights: TypeAlias = Sequence[tuple[float, float, float]]


@dataclass(frozen=True)
class RankWork:
    """Seconds that a rank computes per micro-batch, over all its layers.

    The layers are spread evenly over chunks, or by `weights`; None there: no such stages exist.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    hop: float = 0.0
    weights: Callable[[StageAssignment], Weights | None] | None = None

    def fits(self, placement: StageAssignment) -> bool:
        """Whether the model has costs for this stage assignment."""
        return self.weights is None or self.weights(placement) is not None

    def costs(self, placement: StageAssignment) -> Costs:
        """Returns seconds by stage. Raises ValueError if `placement` does not fit."""
        if self.weights is None:
            return Costs.even(placement, self.forward, self.input, self.weight, self.hop)
        weights = self.weights(placement)
        if weights is None:
            raise ValueError(f"no costs are known for {placement}")
        return Costs(
            tuple((part + more) * self.forward for part, more, _ in weights),
            tuple(part * self.input + again * self.forward for part, _, again in weights),
            tuple(part * self.weight for part, _, _ in weights),
            self.hop,
        )
