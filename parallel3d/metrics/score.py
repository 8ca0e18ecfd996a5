"""What an evaluation finds of a validation set."""

from __future__ import annotations

import math
from typing import NamedTuple


class Score(NamedTuple):
    """Σ cross-entropies of a set in nats, its tokens with a loss, and the bytes of their text, None
    where the tokenizer is not known."""

    nats: float
    tokens: int
    bytes: int | None = None

    @property
    def loss(self) -> float | None:
        """Nats per token; None without a token to predict."""
        return self.nats / self.tokens if self.tokens else None

    def row(self) -> dict[str, float | None]:
        """Returns the figures that are recorded: loss, perplexity, bits_per_byte, tokens."""
        perplexity = None if self.loss is None else exponential(self.loss)
        bits = self.nats / math.log(2) / self.bytes if self.bytes else None
        figures = {"loss": self.loss, "perplexity": perplexity, "bits_per_byte": bits}
        return figures | {"tokens": self.tokens}


def exponential(x: float) -> float:
    """Returns e^x, infinite where a float does not hold it."""
    return math.exp(x) if x < 709 else math.inf if x == x else x
