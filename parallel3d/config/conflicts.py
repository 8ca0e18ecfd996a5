"""Rows that say which settings exclude each other, and the sentence that refuses both.

A row is declared in `keys.py`, next to its keys. The check of a configuration, the page of
refusals, the fuzzer's pairs and a test of every row read the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Is:
    """Condition that holds for each of these values."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)

    def __call__(self, value: Any) -> bool:
        return value in self.values

    def example(self, usual: Any, tried: Sequence[Any]) -> Any:
        """Returns a value for which the condition holds."""
        return self.values[0]


@dataclass(frozen=True)
class Other:
    """Condition that holds for every value but these."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)

    def __call__(self, value: Any) -> bool:
        return value not in self.values

    def example(self, usual: Any, tried: Sequence[Any]) -> Any:
        """Returns a value for which the condition holds, one of `tried` or else the default."""
        return next(value for value in (*tried, usual) if self(value))


@dataclass(frozen=True)
class Where:
    """Condition that holds for the values that pass `test`; `such` is one of them."""

    test: Callable[[Any], bool]
    such: Any

    def __call__(self, value: Any) -> bool:
        return self.test(value)

    def example(self, usual: Any, tried: Sequence[Any]) -> Any:
        """Returns a value for which the condition holds."""
        return self.such


Condition = Is | Other | Where


@dataclass(frozen=True)
class Conflict:
    """Settings that are refused together.

    Attributes:
        settings: a condition for each key. The conflict exists where all of them hold.
        because: why, as the beginning of a sentence; `{zero}` stands for the key with its value.
        nearest: settings that each end the conflict alone, the nearest first.
    """

    settings: Mapping[str, Condition]
    because: str
    nearest: tuple[tuple[str, Any], ...]

    def holds(self, value: Callable[[str], Any]) -> bool:
        """Returns whether a configuration has the conflict; `value` returns a key's value."""
        return all(condition(value(key)) for key, condition in self.settings.items())

    def sentence(self, value: Callable[[str], Any], spell: Callable[[str, Any], str]) -> str:
        """Returns the sentence that refuses a configuration; `spell` returns `key=value`."""
        why = re.sub(r"\{([\w.]+)\}", lambda m: spell(m[1], value(m[1])), self.because)
        return f"{why}; the nearest is {', or '.join(spell(*each) for each in self.nearest)}."


def exclusive(*keys: str, unset: Any = None) -> tuple[Conflict, ...]:
    """Returns the conflicts of mutually exclusive keys."""
    given = Other(unset, None)
    return tuple(
        Conflict(
            {first: given, second: given},
            f"{{{first}}} and {{{second}}} cannot be combined; keep one of them",
            ((second, unset),),
        )
        for i, first in enumerate(keys)
        for second in keys[i + 1 :]
    )
