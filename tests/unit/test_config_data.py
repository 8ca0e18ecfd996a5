"""Refusals of data-parallel settings that do not fit each other."""

from __future__ import annotations

from typing import Any

import pytest

from parallel3d.config import Config
from parallel3d.config_checks import check_config
from parallel3d.errors import UserError


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
            "ddp.comm_hook=bf16 changes how whole gradients are summed, and zero=1 scatters them; "
            "the nearest is zero=0, or ddp.comm_hook=none.",
        ),
        (
            {"ddp__hierarchical": True, "ddp__comm_hook": "powersgd"},
            "ddp.comm_hook=powersgd and ddp.hierarchical=true are two ways to sum a bucket; the "
            "nearest is ddp.hierarchical=false, or ddp.comm_hook=none.",
        ),
        (
            {"precision__name": "fp16", "ddp__comm_hook": "powersgd"},
            "ddp.comm_hook=powersgd carries gradients over from step to step, and precision=fp16 "
            "changes their scale in between; the nearest is precision=bf16.",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        check_config(config(**changes), 4)
    assert str(refused.value) == says


@pytest.mark.parametrize(
    "changes",
    [
        {"ddp__comm_hook": "bf16"},
        {"ddp__comm_hook": "bf16", "precision__name": "fp16"},
        {"ddp__comm_hook": "powersgd", "precision__name": "bf16"},
    ],
    ids=str,
)
def test_accepted(changes: dict[str, Any]) -> None:
    assert check_config(config(**changes), 4).dp == 4
