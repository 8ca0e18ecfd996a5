"""Tests that what a refusal says to give in place of a value is accepted for the same key."""

from __future__ import annotations

import functools
import re
import shlex
from operator import attrgetter
from typing import Any

import pytest

from parallel3d.config.fields import all_keys, check_fields
from parallel3d.errors import UserError
from parallel3d.run_config import Config, check_config
from tests.unit.config.test_checks import BAD, config
from tests.unit.doors.test_words import REFUSED, taken_from_words

# Words as a shell reads them: in quotes, with a list, or plain.
GIVEN = re.compile(
    r"""('[a-z_][\w.]*=[^']*'(?:"'"'[^']*')*)"""
    r"""|(?<![\w.'"])([a-z_][\w.]*=(?:\[[^\]]*\]|[^\s,;'"]+))"""
)
LEFT_OUT = re.compile(r"(?:leave (?!it )([a-z_][\w.]*(?:=\S+)?) out|remove ([a-z_]\w*\.[\w.]+))")
OFFERS = re.compile(
    r"\b(give|use|set|quoted twice|an even split is|the (nearest|default)\b.* is)\b"
)
STEPS = 3  # refusals one after the other that remedies may take to end


def remedies(sentence: str) -> list[dict[str, str | None]]:
    """Returns the alternatives that a sentence offers, each as words by key; None leaves it out."""
    found: list[dict[str, str | None]] = []
    for part in re.split(r"[;:] ", sentence)[1:]:
        for choice in re.split(r",? or ", part):
            words: dict[str, str | None] = {}
            if OFFERS.search(part) and "…" not in choice:
                for quoted, plain in GIVEN.findall(choice):
                    word = shlex.split(quoted)[0] if quoted else plain.rstrip(".")
                    words[word.partition("=")[0]] = word
            words |= {(one or two).partition("=")[0]: None for one, two in LEFT_OUT.findall(choice)}
            found += [words] if words else []
    return found


def refused(words: list[str]) -> str | None:
    try:
        check_fields(taken_from_words(words))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("words", [row[0] for row in REFUSED], ids=lambda words: " ".join(words))
def test_a_remedy_for_words_is_accepted(words: list[str]) -> None:
    said = refused(words)
    assert said is not None
    for choice in remedies(said):
        rest = [given for given in words if given.partition("=")[0] not in choice]
        more = [word for word in choice.values() if word]
        assert refused([*rest, *more]) is None, (said, more)


@functools.cache
def value_of(name: str, typed: str | None) -> Any:
    """Returns the value of a key after a word, or its default."""
    return attrgetter(name)(config() if typed is None else taken_from_words([typed]))


def with_choice(changes: dict[str, Any], choice: dict[str, str | None]) -> dict[str, Any]:
    """Returns the changes of a configuration after a remedy."""
    tried = {**changes}
    for key, word in choice.items():
        name = key if key in all_keys(Config) else f"{key}.name"
        if name in all_keys(Config):
            typed = word and (word if name == key else word.replace(f"{key}=", f"{key}.name=", 1))
            tried[name] = value_of(name, typed)
            continue
        for given, value in changes.items():  # a name in braces
            if isinstance(value, dict):
                tried[given] = {name: v for name, v in value.items() if str(name) != key}
    return tried


@functools.cache
def said_of(row: int) -> str | None:
    """Returns the sentence that refuses a row of BAD."""
    return refusal(*BAD[row][:2])


def refusal(changes: dict[str, Any], world_size: int | None) -> str | None:
    try:
        check_config(config(**changes), world_size)
    except UserError as error:
        return str(error)
    return None


def check_remedies(
    said: str | None, changes: dict[str, Any], world_size: int | None, steps: int
) -> None:
    """Asserts that each remedy of a refused configuration leads to one that is accepted."""
    assert said is not None
    for choice in remedies(said):
        tried = with_choice(changes, choice)
        again = refusal(tried, world_size)
        # The check opens files, and that of `BAD` is not there.
        if again is None or "cannot be read: No such file" in again:
            continue
        assert steps > 1 and remedies(again), (said, choice, again)
        check_remedies(again, tried, world_size, steps - 1)


@pytest.mark.slow
@pytest.mark.parametrize("row", range(len(BAD)), ids=lambda row: str(BAD[row][0]))
def test_remedies_for_a_configuration_end_its_refusals(row: int) -> None:
    changes, world_size, _ = BAD[row]
    check_remedies(said_of(row), changes, world_size, STEPS)


@pytest.mark.slow
def test_most_refusals_of_a_configuration_have_a_remedy_that_is_tried() -> None:
    said = [said_of(row) or "" for row in range(len(BAD))]
    assert sum(bool(remedies(sentence)) for sentence in said) >= 125
