"""An input from outside and the answer that is right, known before the door is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from parallel3d.errors import UserError


class _Refusal:
    """The right answer where an input must be refused."""

    def __repr__(self) -> str:
        return "a sentence"


REFUSAL: Final = _Refusal()

RIGHT, SENTENCE, WRONG = "right", "sentence", "wrong"


@dataclass(frozen=True)
class Input:
    """One input of a door.

    Attributes:
        text: the input as a person would type or see it, for the report.
        take: gives it to the door; returns what the door takes it for, or raises UserError.
        right: what it is; REFUSAL where only a sentence is right.
        common: an input that people have every day: a sentence is not enough, it must be taken.
    """

    text: str
    take: Callable[[], object]
    right: object
    common: bool = False


@dataclass(frozen=True)
class Outcome:
    """The end of one input: RIGHT, SENTENCE or WRONG, and the words that show it."""

    kind: str
    words: str


def outcome(given: Input) -> Outcome:
    """Gives one input to its door. An error that is no UserError is WRONG, as a guess is."""
    try:
        taken = given.take()
    except UserError as error:
        if given.common:
            return Outcome(WRONG, f"refused, though it is {given.right!r}: {error}")
        return Outcome(SENTENCE, str(error))
    except Exception as error:
        return Outcome(WRONG, f"{type(error).__name__}: {error}")
    if given.right is REFUSAL or taken != given.right:
        return Outcome(WRONG, f"taken for {taken!r}, though right is {given.right!r}")
    return Outcome(RIGHT, repr(taken))
