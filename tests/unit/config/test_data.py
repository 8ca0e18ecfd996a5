"""Tests refusals of data-parallel settings that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from parallel3d.errors import UserError
from parallel3d.run_config import Config, check_config


def config(**changes: Any) -> Config:
    made = Config(dp=4, micro_batch_size=1)
    for name, value in changes.items():
        section, _, leaf = name.rpartition("__")
        setattr(getattr(made, section) if section else made, leaf, value)
    return made


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"zero": 1, "ddp__comm_hook": "bf16"},
            "ddp.comm_hook=bf16 applies to sums of whole gradients, and zero=1 scatters them; "
            "the nearest is zero=0, or ddp.comm_hook=none.",
        ),
        (
            {"ddp__hierarchical": True, "ddp__comm_hook": "bf16"},
            "ddp.comm_hook=bf16 and ddp.hierarchical=true are two ways to sum a bucket; the "
            "nearest is ddp.hierarchical=false, or ddp.comm_hook=none.",
        ),
        (
            {"ddp__comm_hook": "powersgd"},
            "ddp.comm_hook=powersgd: powersgd is no longer a value of ddp.comm_hook; the nearest "
            "is ddp.comm_hook=bf16.",
        ),
        (
            {"zero": 1, "ddp__shard_size": 2},
            "ddp.shard_size=2 only has an effect with zero=2 and zero=3, not with zero=1; "
            "the nearest is ddp.shard_size=null.",
        ),
        (
            {"zero": 1, "ddp__reduce_every_microbatch": True},
            "ddp.reduce_every_microbatch=true only has an effect with zero=2 and zero=3, not with "
            "zero=1; the nearest is ddp.reduce_every_microbatch=null.",
        ),
        (
            {"zero": 3, "ddp__shard_size": 3},
            "ddp.shard_size=3 must divide dp=4 and be at least 2; the nearest is ddp.shard_size=2.",
        ),
        (
            {"zero": 2, "ddp__shard_size": 1},
            "ddp.shard_size=1 must divide dp=4 and be at least 2; the nearest is ddp.shard_size=2.",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        check_config(config(**changes), 4)
    assert str(refused.value) == says


@pytest.mark.parametrize(
    "changes",
    [
        {"ddp__comm_hook": "bf16"},
        {"ddp__comm_hook": "bf16", "precision__name": "fp16"},
        {"zero": 2, "ddp__shard_size": 2},
        {"zero": 3, "ddp__shard_size": 4},
        {"zero": 3, "compile": False, "precision__name": "bf16"},
    ],
    ids=str,
)
def test_settings_that_fit_are_accepted(changes: dict[str, Any]) -> None:
    assert check_config(config(**changes), 4).dp == 4
