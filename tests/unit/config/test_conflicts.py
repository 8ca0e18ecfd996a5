"""Tests that every row of `CONFLICTS` refuses with its sentence, and that its nearest choice
resolves it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest

from parallel3d.config.conflicts import Conflict, NoneOf, OneOf, exclusive
from parallel3d.config.fields import all_keys, check_conflicts, check_value, spell, with_values
from parallel3d.errors import UserError
from parallel3d.run_config import CONFLICTS, Config, check_config

ROWS = [pytest.param(row, id=" × ".join(row.settings)) for row in CONFLICTS]


def example(row: Conflict) -> dict[str, Any]:
    """Returns a value for each key of a row with which the row holds."""
    keys = all_keys(Config)
    return {
        name: condition.example(keys[name].default, keys[name].tried)
        for name, condition in row.settings.items()
    }


def holds(row: Conflict, config: Config) -> bool:
    return row.holds(lambda name: attrgetter(name)(config))


def test_the_settings_of_a_row_are_values_that_their_keys_may_have() -> None:
    for row in CONFLICTS:
        for name, value in example(row).items():
            check_value(name, value, Config)  # its sentence names the key


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_refused_in_its_own_sentence(row: Conflict) -> None:
    config = with_values(Config(dp=1), example(row))
    with pytest.raises(UserError) as refused:
        check_conflicts([row], lambda name: attrgetter(name)(config))
    said = str(refused.value)
    assert said.endswith(".") and "{" not in said and "\n" not in said
    assert any(spell(name, value) in said for name, value in example(row).items())
    with pytest.raises(UserError) as refused:
        check_config(config, config.world_size)
    others = [r for r in CONFLICTS if r is not row and holds(r, config)]
    told = [r.sentence(lambda name: attrgetter(name)(config), spell) for r in [row, *others]]
    assert str(refused.value) in told


def test_each_nearest_setting_ends_the_conflict() -> None:
    for row in CONFLICTS:
        config = with_values(Config(dp=1), example(row))
        for name, value in row.nearest:
            if value is not None:
                check_value(name, value, Config)
            changed = with_values(config, {name: value})
            assert not holds(row, changed), (*row.settings, spell(name, value))


def test_a_sentence_spells_keys_as_on_the_command_line() -> None:
    row = Conflict(
        {"precision.name": OneOf("fp16"), "zero": NoneOf(0)},
        "{precision.name} cannot meet {zero}",
        (("zero", 0), ("precision.name", "bf16")),
    )
    value = {"precision.name": "fp16", "zero": 2}.__getitem__
    said = "precision=fp16 cannot meet zero=2; the nearest is zero=0, or precision=bf16."
    assert row.holds(value) and row.sentence(value, spell) == said
    assert not row.holds({"precision.name": "fp16", "zero": 0}.__getitem__)


def test_every_pair_of_exclusive_keys_is_a_row() -> None:
    rows = exclusive("train.steps", "train.tokens", "train.epochs")
    assert [tuple(row.settings) for row in rows] == [
        ("train.steps", "train.tokens"),
        ("train.steps", "train.epochs"),
        ("train.tokens", "train.epochs"),
    ]
    only = {"train.steps": 3, "train.tokens": None, "train.epochs": None}
    assert not any(row.holds(only.__getitem__) for row in rows)
