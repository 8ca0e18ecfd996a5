"""Composes a configuration from overrides, for callers in Python."""

from __future__ import annotations

from collections.abc import Sequence

import hydra
from omegaconf import OmegaConf

from parallel3d.config.checks.whole import check_config
from parallel3d.config.overrides import (
    check_filled,
    check_length,
    explain_override_error,
    typed_alternatives,
)
from parallel3d.config.schema import Config, conf_dir, register_schema


def compose(*overrides: str, world_size: int | None = None) -> Config:
    """Returns the checked configuration that `parallel3d train` makes of the same overrides.

    Args:
        overrides: as typed: "tp=2", "model=llama_tiny", "train.steps=100".
        world_size: number of ranks, from which `dp` follows; None: as many as the layout has, with
            one replica unless `dp` is given.

    Raises UserError: one sentence with the key, its value, what is allowed and the nearest choice.
    """
    config = composed(overrides)
    check_filled(config, overrides)
    return check_config(config, world_size)


def composed(overrides: Sequence[str]) -> Config:
    """Returns the configuration before its checks. Raises UserError if it cannot be composed."""
    register_schema()
    for override in overrides:
        check_length(override)
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = OmegaConf.to_object(hydra.compose("config", overrides=list(overrides)))
    except Exception as error:  # Hydra passes on errors of Python's conversions too
        raise explain_override_error(error, overrides) from None
    assert isinstance(config, Config)
    return typed_alternatives(config, overrides)
