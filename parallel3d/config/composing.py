"""A configuration from the words of a command line, for who calls parallel3d from Python."""

from __future__ import annotations

import hydra
from omegaconf import OmegaConf

from parallel3d.config.checks.whole import check_config
from parallel3d.config.overrides import check_length, explain_override_error
from parallel3d.config.schema import Config, conf_dir, register_schema


def compose(*overrides: str, world_size: int | None = None) -> Config:
    """The checked configuration that `parallel3d train` would make of the same words.

    Args:
        overrides: as they are typed: "tp=2", "model=llama_tiny", "train.steps=100".
        world_size: how many ranks there are, of which `dp` is what tp, pp and cp leave; None: as
            many as the layout has, with one replica unless `dp` is given.

    Raises:
        UserError: one sentence with the key, its value, what is allowed and the nearest choice.
    """
    register_schema()
    for word in overrides:
        check_length(word)
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = OmegaConf.to_object(hydra.compose("config", overrides=list(overrides)))
    except Exception as error:  # Hydra passes on what Python's own conversions raise as well
        raise explain_override_error(error, overrides) from None
    return check_config(config, world_size)
