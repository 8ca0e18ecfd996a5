"""docs/what_goes_with_what.md is what the checks say, and its refusals lead to what works."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallel3d.config.checks import check_config
from parallel3d.config.fields import all_keys
from parallel3d.errors import UserError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "what_goes_with_what.md"
made = runpy.run_path(str(PAGE.with_name("compatibility.py")))
BY_NAME = {feature.name: feature for feature in made["features"]()}


def rows(section: str) -> list[list[str]]:
    """The cells of a section's table, without the two lines of its head."""
    text = PAGE.read_text("utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines]


REFUSED = rows("Refused pairs")
NEEDS = rows("What a feature needs")


@pytest.mark.more
def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text("utf-8") == made["page"](), (
        "run: python docs/compatibility.py > docs/what_goes_with_what.md"
    )


def offered(sentence: str) -> Iterator[tuple[str, Any]]:
    """The values that a sentence proposes: those behind its `nearest is` or `split is`; the default
    of a key that is to be left out, or instead of which another one is to be given."""
    for key in re.findall(r"leave ([a-z][\w.]*) out", sentence):
        yield key, all_keys()[key].default
    if re.search(r"; give [a-z][\w.]* instead", sentence):
        key = sentence.split("=")[0]
        yield key, all_keys()[key].default
    words = re.split(r"nearest is|split is", sentence)[-1]
    for key, value in re.findall(r"(?<![\w.])([a-z][\w.]*)=(\[[^]]*\]|[^\s,;]*[^\s,;.])", words):
        yield key if key in all_keys() else f"{key}.name", yaml.safe_load(value)


def ends_well(config: Any, sentence: str, sentences: int = 3) -> bool:
    """Whether doing what so many sentences propose lets the configuration pass."""
    for key, value in offered(sentence):
        section, _, leaf = key.rpartition(".")
        target = getattr(config, section) if section else config
        before = getattr(target, leaf)
        setattr(target, leaf, value)
        try:
            check_config(config)
        except UserError as error:
            if sentences > 1 and ends_well(config, str(error), sentences - 1):
                return True
            setattr(target, leaf, before)
        else:
            return True
    return False


@pytest.mark.parametrize(("first", "second", "sentence"), REFUSED, ids=lambda text: text[:40])
def test_a_refused_pair_is_told_what_works(first: str, second: str, sentence: str) -> None:
    pair = BY_NAME[first], BY_NAME[second]
    config = made["composed"](*pair)
    with pytest.raises(UserError) as raised:
        check_config(config)
    assert str(raised.value) == sentence
    assert any(f"{word}=" in sentence for f in pair for word in (f.key, f.name.split("=")[0]))
    assert ends_well(config, sentence)


@pytest.mark.parametrize(("name", "key", "sentence"), NEEDS, ids=lambda text: text[:40])
def test_what_a_feature_needs_is_said(name: str, key: str, sentence: str) -> None:
    brought = [k for k in BY_NAME[name].brings if made["typed_name"](k) == key]
    config = made["composed"](BY_NAME[name], without=brought[0])
    with pytest.raises(UserError) as raised:
        check_config(config)
    assert str(raised.value) == sentence
    assert key in sentence and re.search(r"must|nearest|give|even split", sentence)


def test_every_feature_works_alone() -> None:
    said = {name: made["sentence"](feature) for name, feature in BY_NAME.items()}
    assert {name: text for name, text in said.items() if text} == {}


@pytest.mark.more
def test_what_is_proven_is_not_refused_and_every_feature_that_can_be_is_proven() -> None:
    proven, refused = made["proven"](), made["refused"]()
    assert proven.isdisjoint(refused)
    with_tp = {frozenset(f.name for f in pair) for pair in proven}
    for name in ("zero=3", "recompute=full", "compile=true", "schedule=zbv", "precision=bf16"):
        assert frozenset(("tp=2", name)) in with_tp


@pytest.mark.more
def test_a_matrix_has_every_pair_that_is_refused() -> None:
    heads = made["columns"]()
    marks = {row[0].split("`")[0].split(" ")[0]: row[1:] for row in rows("Matrix")}
    assert list(marks) == list(BY_NAME)
    refused = {frozenset(row[:2]) for row in REFUSED}
    for a, b in combinations(BY_NAME, 2):
        if BY_NAME[b] in heads:
            sign = marks[a][heads.index(BY_NAME[b])]
            assert (sign == "✗") == (frozenset((a, b)) in refused), (a, b)


def test_what_could_be_built_is_refused() -> None:
    refused = {frozenset(row[:2]) for row in REFUSED}
    named = {frozenset(row[:2]) for row in rows("Refused, and could be built")}
    assert len(named) > 3 and named <= refused
