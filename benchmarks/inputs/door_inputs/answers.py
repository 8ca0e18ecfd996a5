"""Defines inputs from outside with right answers, which are known before the door is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from parallel3d.errors import UserError


class _Refusal:
    """The right answer if an input must be refused."""

    def __repr__(self) -> str:
        return "a sentence"


REFUSAL: Final = _Refusal()

RIGHT, SENTENCE, WRONG = "right", "sentence", "wrong"


@dataclass(frozen=True)
class Input:
    """One input of a door.

    Attributes: text: the input as a person would type or see it, for the report. take: passes it to
    the door; returns the door's reading, or raises UserError. right: the right reading; REFUSAL if
    only a sentence is right. common: whether the input is common in practice, so that a refusal is
    wrong. accepted: whether the reference itself (transformers, Hydra, Slurm, datasets) takes an
    input that may be refused here; all with a right reading are accepted by it.
    """

    text: str
    take: Callable[[], object]
    right: object
    common: bool = False
    accepted: bool = False

    @property
    def is_valid(self) -> bool:
        """Whether the input is valid by the rules of its reference."""
        return self.accepted or self.right is not REFUSAL


@dataclass(frozen=True)
class Outcome:
    """The outcome of one input: RIGHT, SENTENCE or WRONG, and the text that shows it."""

    kind: str
    words: str
    is_refused: bool = False


def outcome(given: Input) -> Outcome:
    """Passes one input to its door. An error that is not a UserError is WRONG, like a guess."""
    try:
        taken = given.take()
    except UserError as error:
        if given.common:
            words = f"refused, although it is {given.right!r}: {error}"
            return Outcome(WRONG, words, is_refused=True)
        return Outcome(SENTENCE, str(error), is_refused=True)
    except Exception as error:
        return Outcome(WRONG, f"{type(error).__name__}: {error}")
    if given.right is REFUSAL or taken != given.right:
        return Outcome(WRONG, f"read as {taken!r}, although {given.right!r} is right")
    return Outcome(RIGHT, repr(taken))
