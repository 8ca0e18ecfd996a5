"""Tests the keys that `train run=old` takes from the last start: layouts, alternatives,
single-start keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from parallel3d.cli.continued import Given, continued
from parallel3d.config.checks import check_config
from parallel3d.config.fields import with_values
from parallel3d.config.schema import Config


def at_last_start(**keys: Any) -> Config:
    return check_config(with_values(Config(run="old"), keys), own_samples=True)


def resumed(
    there: Config, typed: dict[str, Any], ranks: int | None = None, presets: tuple[str, ...] = ()
) -> Config:
    here = with_values(Config(run="old"), typed)
    return continued(here, there, Given({*typed}, {*presets}), ranks)[0]


@pytest.mark.parametrize(
    ("there", "typed", "ranks", "sizes"),
    [
        # Without a launcher there are as many ranks as before.
        ((2, 1, 4), {}, None, (2, 1, 4)),
        ((2, 2, 2), {"tp": 4}, None, (4, 2, None)),
        ((2, 2, 2), {"pp": 1}, None, (2, 1, 4)),
        ((2, 2, 2), {"dp": 1}, None, (2, 2, 1)),
        ((1, 2, 1), {"tp": 2}, None, (2, 1, None)),
        # The launcher's ranks: dp takes the rest; typed sizes may drop the others.
        ((2, 2, 2), {}, 4, (2, 2, None)),
        ((1, 4, 1), {"tp": 2}, 4, (2, 1, None)),
        ((2, 1, 4), {"dp": 4}, 4, (1, 1, 4)),
        ((2, 2, 1), {}, 2, (2, 2, None)),  # a later check refuses it, with sizes that fit
    ],
)
def test_sizes_are_those_of_the_last_start_where_they_fit(
    there: tuple[int, int, int],
    typed: dict[str, int],
    ranks: int | None,
    sizes: tuple[int, int, int | None],
) -> None:
    tp, pp, dp = there
    found = resumed(at_last_start(tp=tp, pp=pp, dp=dp), typed, ranks)
    assert (found.tp, found.pp, found.dp) == sizes


def test_the_schedule_is_kept_with_the_same_pp_and_a_placement_with_the_same_sizes() -> None:
    keys = {"tp": 2, "pp": 2, "vpp": 2, "schedule.name": "interleaved", "placement": "tp-cp-pp-dp"}
    there = at_last_start(**keys)
    same = resumed(there, {})
    assert (same.schedule.name, same.vpp, same.placement) == ("interleaved", 2, "tp-cp-pp-dp")
    wider = resumed(there, {}, ranks=8)
    assert (wider.schedule.name, wider.vpp, wider.placement) == ("interleaved", 2, "default")
    flat = resumed(there, {"pp": 1})
    assert (flat.schedule.name, flat.vpp, flat.placement) == ("1f1b", 1, "default")


def test_given_keys_win_and_keys_of_a_single_start_are_not_inherited() -> None:
    there = at_last_start(
        **{"train.steps": 9, "optim.lr": 0.5, "optim.lr_warmup_fraction": 0.1, "seed": 7},
        **{"checkpoint.load": False, "profile.steps": [1, 2], "init_from": "source@3"},
    )
    found = resumed(there, {"train.tokens": 1e6, "optim.lr_warmup_steps": 3, "optim.lr": 0.1})
    assert (found.train.steps, found.train.tokens, found.seed) == (None, 1e6, 7)
    assert (found.optim.lr, found.optim.lr_warmup_fraction) == (0.1, 0.0)
    assert found.checkpoint.load and found.profile.steps is None
    assert resumed(there, {"init_from": "source"}).init_from == "source@3"
    assert resumed(there, {"init_from": "source@2"}).init_from == "source@2"


def test_another_preset_replaces_its_section_and_the_same_one_changes_nothing() -> None:
    there = at_last_start(**{"optim.name": "sgd", "optim.lr": 0.5})
    assert resumed(there, {}, presets=("optim",)).optim == Config().optim
    there = dataclasses.replace(there, optim=dataclasses.replace(there.optim, name="adamw"))
    assert resumed(there, {}, presets=("optim",)).optim.lr == 0.5
