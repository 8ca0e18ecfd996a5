"""Checks of the keys that place ranks and set up their groups."""

from __future__ import annotations

import re

from parallel3d.config.fields import show
from parallel3d.config.schema import Config
from parallel3d.errors import UserError, nearest

GROUP_KINDS = ("tp", "dp", "pp", "embedding")
# ncclConfig_t's fields and what NCCL takes for them.
NCCL_LIMITS = {"min_ctas": (1, 32), "max_ctas": (1, 32), "cga_cluster_size": (0, 8)}


def check_groups(config: Config) -> None:
    """Placement, rank file and NCCL settings fit each other. Raises UserError for the first."""
    if config.placement == "file" and config.rank_file is None:
        raise UserError(
            "placement=file needs rank_file=…, a file with a line `rank host local_index` for each "
            "rank; the nearest is placement=default."
        )
    if config.rank_file is not None and config.placement != "file":
        raise UserError(
            f"rank_file={show(config.rank_file)} is read with placement=file alone, but "
            f"placement={show(config.placement)}; the nearest is placement=file."
        )
    for kind in config.launch.nccl_high_priority:
        _check_kind("launch.nccl_high_priority", kind, kind)
    parse_nccl_settings(config.launch.nccl_settings)
    parse_nccl_env(config.cluster.nccl_env)


def _check_kind(key: str, word: str, kind: str) -> None:
    if kind not in GROUP_KINDS:
        raise UserError(
            f"{key}={show(word)} must name a kind of group, one of {', '.join(GROUP_KINDS)}; the "
            f"nearest is {nearest(kind, GROUP_KINDS) or 'dp'}."
        )


def parse_nccl_settings(words: list[str]) -> list[tuple[str, str, int]]:
    """(kind of group, field of ncclConfig_t, value) of each `dp.max_ctas:8`.

    Raises UserError for a word that cannot be read or is out of NCCL's range.
    """
    key = "launch.nccl_settings"
    settings = []
    for word in words:
        match = re.fullmatch(r"(\w+)\.(\w+):(-?\d+)", word)
        if match is None:
            raise UserError(
                f"{key}={show(word)} must be a kind of group, a setting and a number; the nearest "
                f"is {key}=[dp.max_ctas:8]."
            )
        kind, name, value = match[1], match[2], int(match[3])
        _check_kind(key, word, kind)
        if name not in NCCL_LIMITS:
            close = nearest(name, NCCL_LIMITS) or "max_ctas"
            raise UserError(
                f"{key}={show(word)} must set one of {', '.join(NCCL_LIMITS)}; the nearest is "
                f"{key}=[{kind}.{close}:{value}]."
            )
        low, high = NCCL_LIMITS[name]
        if not low <= value <= high:
            close = min(max(value, low), high)
            raise UserError(
                f"{key}={show(word)} must be {low} to {high}; the nearest is "
                f"{key}=[{kind}.{name}:{close}]."
            )
        settings.append((kind, name, value))
    return settings


def parse_nccl_env(words: list[str]) -> dict[str, str]:
    """Value by variable of each `NCCL_CROSS_NIC:0`; a value may have colons of its own.

    Besides NCCL's variables those of torch's part of it pass: TORCH_NCCL_… and the flight
    recorder's TORCH_FR_….

    Raises UserError for a word that cannot be read or names a variable of something else.
    """
    variables = {}
    for word in words:
        match = re.fullmatch(r"((?:NCCL|TORCH_NCCL|TORCH_FR)_[A-Z0-9_]+):(.+)", word)
        if match is None:
            raise UserError(
                f"cluster.nccl_env={show(word)} must be a variable of NCCL and its value; the "
                "nearest is cluster.nccl_env=[NCCL_CROSS_NIC:0]."
            )
        variables[match[1]] = match[2]
    return variables
