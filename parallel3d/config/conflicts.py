"""Declares which settings exclude each other, and composes the sentence that refuses them.

A conflict is declared in `keys.py`, next to its keys. The check of a configuration, the page of
refusals, the fuzzer and a test of every conflict read the same declarations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OneOf:
    """Condition that holds if the key has one of these values."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)

    def __call__(self, value: Any) -> bool:
        return value in self.values

    def example(self, usual: Any, tried: Sequence[Any]) -> Any:
        """Returns a value for which the condition holds."""
        return self.values[0]


@dataclass(frozen=True)
class NoneOf:
    """Condition that holds if the key has none of these values."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)

    def __call__(self, value: Any) -> bool:
        return value not in self.values

    def example(self, usual: Any, tried: Sequence[Any]) -> Any:
        """Returns a value for which the condition holds: one of `tried`, or else the usual one."""
        return next(value for value in (*tried, usual) if self(value))


@dataclass(frozen=True)
class Matches:
    """Condition that holds if the value passes `test`; `such` is an example of such a value."""

    test: Callable[[Any], bool]
    such: Any

    def __call__(self, value: Any) -> bool:
        return self.test(value)

    def example(self, usual: Any, tried: Sequence[Any]) -> Any:
        """Returns a value for which the condition holds."""
        return self.such


Condition = OneOf | NoneOf | Matches


@dataclass(frozen=True)
class Conflict:
    """Settings that are refused if they occur together.

    Attributes:
        settings: a condition for each key. The conflict exists if all conditions hold.
        because: the reason, as the beginning of a sentence. In it, `{zero}` stands for the key
            `zero` with its value.
        nearest: changes of one key that each resolve the conflict, the nearest first.
    """

    settings: Mapping[str, Condition]
    because: str
    nearest: tuple[tuple[str, Any], ...]

    def holds(self, value: Callable[[str], Any]) -> bool:
        """Returns whether a configuration has the conflict; `value` maps a key to its value."""
        return all(condition(value(key)) for key, condition in self.settings.items())

    def sentence(self, value: Callable[[str], Any], spell: Callable[[str, Any], str]) -> str:
        """Returns the sentence that refuses a configuration; `spell` formats a key's value."""
        why = re.sub(r"\{([\w.]+)\}", lambda m: spell(m[1], value(m[1])), self.because)
        return f"{why}; the nearest is {', or '.join(spell(*each) for each in self.nearest)}."


def exclusive(*keys: str, unset: Any = None) -> tuple[Conflict, ...]:
    """Returns a conflict for each pair of mutually exclusive keys; `unset` is their default."""
    given = NoneOf(unset, None)
    return tuple(
        Conflict(
            {first: given, second: given},
            f"{{{first}}} and {{{second}}} cannot be combined; keep one of them",
            ((second, unset),),
        )
        for i, first in enumerate(keys)
        for second in keys[i + 1 :]
    )
