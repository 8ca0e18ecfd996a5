"""Names what a run's loss and speed count: tokens, or the samples of a user's own model."""

from __future__ import annotations

from typing import NamedTuple

from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import OwnModelConfig

NATS = "nats per token"


class Units(NamedTuple):
    """The words for what a run counts.

    Attributes:
        loss: the unit of the loss. A user's own loss is a mean over what it counts.
        work: what the samples consist of: "tokens", or "samples" if they are no text.
        short: `work` in a line that has little room.
        samples: the samples of a batch.
    """

    loss: str = NATS
    work: str = "tokens"
    short: str = "tok"
    samples: str = "sequences"

    @property
    def in_nats(self) -> bool:
        """Whether the loss is the cross-entropy of a text."""
        return self.loss == NATS


def units_of(model: ModelConfig) -> Units:
    if not isinstance(model, OwnModelConfig):
        return Units()
    counted = Units() if model.is_of_text else Units(NATS, *["samples"] * 3)
    return counted._replace(loss="per item")
