"""Parses settings for NCCL: fields of ncclConfig_t by kind of group, and variables."""

from __future__ import annotations

import re

from parallel3d.config.fields import (
    show,
)
from parallel3d.errors import UserError, nearest

GROUP_KINDS = ("tp", "cp", "dp", "pp", "embedding")
# Fields of ncclConfig_t and their ranges.
NCCL_LIMITS = {"min_ctas": (1, 32), "max_ctas": (1, 32), "cga_cluster_size": (0, 8)}


def parse_nccl_settings(settings: list[str]) -> list[tuple[str, str, int]]:
    """Returns (kind of group, field of ncclConfig_t, value) for items such as `dp.max_ctas:8`.

    Raises UserError for other text.
    """
    parsed = []
    for item in settings:
        match = re.fullmatch(r"(\w+)\.(\w+):(-?\d+)", item)
        kind, name, value = match.groups() if match else ("", "", "0")
        low, high = NCCL_LIMITS.get(name, (1, 0))
        if kind not in GROUP_KINDS or not low <= int(value) <= high:
            near = nearest(name, NCCL_LIMITS) or "max_ctas"
            low, high = NCCL_LIMITS[near]
            near = f"{nearest(kind, GROUP_KINDS) or 'dp'}.{near}:{min(max(int(value), low), high)}"
            raise UserError(
                f"launch.nccl_settings={show(item)} must be KIND.SETTING:NUMBER, with a kind of "
                f"group (one of {', '.join(GROUP_KINDS)}), a setting (one of "
                f"{', '.join(NCCL_LIMITS)}) and a number, here {low} to {high}; the nearest is "
                f"launch.nccl_settings=[{near}]."
            )
        parsed.append((kind, name, int(value)))
    return parsed


def parse_nccl_env(settings: list[str]) -> dict[str, str]:
    """Returns the value of each variable in items such as `NCCL_CROSS_NIC:0`.

    A value may contain colons.

    Torch's variables TORCH_NCCL_…, TORCH_FR_… and TORCH_DIST_… are accepted, too. Raises UserError
    for other text.
    """
    variables = {}
    for item in settings:
        match = re.fullmatch(r"((?:NCCL|TORCH_NCCL|TORCH_FR|TORCH_DIST)_[A-Z0-9_]+):(.+)", item)
        if match is None:
            raise UserError(
                f"cluster.nccl_env={show(item)} must be NAME:VALUE, with a variable whose name "
                "begins with NCCL_, TORCH_NCCL_, TORCH_FR_ or TORCH_DIST_; the nearest is "
                "cluster.nccl_env=[NCCL_CROSS_NIC:0]."
            )
        variables[match[1]] = match[2]
    return variables
