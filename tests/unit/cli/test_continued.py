"""Tests the keys that `train run=old` takes from the last start: layouts, alternatives,
single-start keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from parallel3d.cli.continued import GivenKeys, continued
from parallel3d.config.fields import show, spell, values_of, with_values
from parallel3d.errors import UserError
from parallel3d.run_config import Config, check_config


def at_last_start(**keys: Any) -> Config:
    return check_config(with_values(Config(run="old"), keys), own_samples=True)


def resumed(
    there: Config, typed: dict[str, Any], ranks: int | None = None, presets: tuple[str, ...] = ()
) -> Config:
    here = with_values(Config(run="old"), typed)
    return continued(here, there, GivenKeys({*typed}, {*presets}), ranks)[0]


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
        # Without typed sizes, the launcher's ranks reduce those that they cannot hold.
        ((2, 2, 1), {}, 2, (2, 1, None)),
        ((4, 1, 1), {}, 2, (2, 1, None)),
        ((1, 4, 1), {}, 2, (1, 2, None)),
        ((2, 1, 2), {}, 3, (1, 1, None)),
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


MOE = {"model.num_experts": 8, "model.bias": False, "model.tie_embeddings": False}
OVERLAPPED = MOE | {"dp": 4, "ep": 4, "moe.overlap": True}
INTERLEAVED = {"pp": 2, "vpp": 2, "schedule.name": "interleaved"}


@pytest.mark.parametrize(
    ("there", "typed", "ranks", "expected"),
    [
        (OVERLAPPED, {"dp": 2}, None, {"ep": 2, "moe.overlap": True}),
        (OVERLAPPED, {}, 2, {"ep": 2, "moe.overlap": True}),
        (OVERLAPPED, {}, 1, {"ep": 1, "moe.overlap": False}),
        (OVERLAPPED, {"ep": 1}, None, {"moe.overlap": False}),
        (OVERLAPPED | {"dp": 6, "ep": 2, "global_batch_size": 48}, {}, 3, {"ep": 1}),
        (MOE | {"tp": 2, "sp": True, "dp": 2, "ep": 4}, {}, 2, {"tp": 2, "sp": True, "ep": 2}),
        ({"dp": 2, "micro_batch_size": 8}, {}, 4, {"micro_batch_size": 4}),
        ({"dp": 4, "zero": 2, "ddp.shard_size": 4}, {"dp": 2}, None, {"ddp.shard_size": None}),
        ({"dp": 4, "zero": 2, "ddp.shard_size": 4}, {}, 1, {"zero": 2}),
        ({"dp": 4, "ddp.hierarchical": True}, {"zero": 1}, None, {"ddp.hierarchical": False}),
        ({"dp": 2, "zero": 3}, {"schedule.name": "auto"}, None, {"zero": 1}),
        ({"tp": 2, "sp": True, "tensor_parallel.chunks": 64}, {"tp": 8}, None, {"sp": True}),
        ({"tp": 2, "cp": 2, "context_parallel.style": "heads"}, {"tp": 8}, 16, {"cp": 2}),
        (INTERLEAVED | {"num_layers": 8}, {"dp": 4}, None, {"schedule.name": "interleaved"}),
        (
            {"pp": 2, "schedule.layers_per_stage": [3, 1], "schedule.name": "1f1b"},
            INTERLEAVED,
            None,
            {"pp": 2, "schedule.layers_per_stage": None},
        ),
    ],
)
def test_values_that_the_layout_of_now_does_not_allow_are_reduced_or_dropped_and_reported(
    there: dict[str, Any], typed: dict[str, Any], ranks: int | None, expected: dict[str, Any]
) -> None:
    there = {f"model.{k}" if k == "num_layers" else k: value for k, value in there.items()}
    here = with_values(Config(run="old"), typed)
    found, line = continued(here, at_last_start(**there), GivenKeys({*typed}, set()), ranks)
    check_config(found, ranks, own_samples=True)
    values = values_of(found)
    assert {key: values[key] for key in expected} == expected
    lost = {key: there[key] for key in there if key != "dp" and values[key] != there[key]}
    for key, value in lost.items():
        if key not in typed:
            assert f"{spell(key, value)} (now {show(values[key])})" in (line or "")


def test_a_batch_that_no_size_of_now_divides_is_not_changed() -> None:
    there = at_last_start(dp=2, micro_batch_size=8)
    found = resumed(there, {"dp": 3})
    assert (found.micro_batch_size, found.global_batch_size) == (8, 16)
    with pytest.raises(UserError, match="global_batch_size=16 must be a multiple"):
        check_config(found, own_samples=True)


@pytest.mark.slow
def test_a_layout_that_fits_nothing_is_known_to_after_few_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {"recompute": "[mlp]", "mlp_chunk_tokens": 64, "zero": 2, "ddp.shard_size": 4}
    there = at_last_start(dp=8, micro_batch_size=120, global_batch_size=960, **keys)
    checked: list[Config] = []

    def check(config: Config, *given: Any, **named: Any) -> Config:
        checked.append(config)
        return check_config(config, *given, **named)

    monkeypatch.setattr("parallel3d.cli.continued.check_config", check)
    found = resumed(there, {}, ranks=7)
    assert (found.micro_batch_size, found.zero, found.ddp.shard_size) == (120, 2, 4)
    assert len(checked) < 500, len(checked)  # 4,580 if a key may change twice


def test_settings_that_contradict_each_other_without_a_new_layout_are_left_to_the_user() -> None:
    there = at_last_start(recompute="[mlp]", mlp_chunk_tokens=64)
    found = resumed(there, {"compile": True})
    assert found.mlp_chunk_tokens == 64
