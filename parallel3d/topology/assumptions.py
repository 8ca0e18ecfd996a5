"""Completes a configuration for commands that only calculate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from omegaconf import OmegaConf

from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import OwnModelConfig
from parallel3d.run_config import AnyConfig, conf_dir

# assumed if no model is given, because the default model has too few layers to be instructive
MODEL = "llama3_70b"
MICROBATCHES_PER_STAGE = 4  # the bubble of 1F1B is then less than a quarter of a step


def preset(group: str, name: str) -> dict[str, Any]:
    """Returns the values of `group=name` in `conf/`."""
    values = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
    return cast(dict[str, Any], values)


def chosen_keys(typed: Sequence[str]) -> set[str]:
    """Returns the keys and groups that overrides set: `+model=gpt_tiny` → `model`."""
    return {word.lstrip("+~").partition("=")[0].partition("@")[0] for word in typed}


def assume_model(config: AnyConfig, typed: Sequence[str]) -> tuple[AnyConfig, list[str]]:
    """Returns the configuration with an assumed model and micro-batch size, and the assumptions.

    The assumptions have the form of overrides. `typed`: overrides of the command line; if they
    choose an experiment or a model, or the model is the user's own, nothing is assumed.
    """
    keys = chosen_keys(typed)
    if isinstance(config.model, OwnModelConfig):
        return config, []
    if "experiment" in keys or any(k == "model" or k.startswith("model.") for k in keys):
        return config, []
    told = [f"model={MODEL}"]
    config = dataclasses.replace(config, model=ModelConfig(**preset("model", MODEL)))
    if "micro_batch_size" not in keys:
        config = dataclasses.replace(config, micro_batch_size=1)
        told.append("micro_batch_size=1")
    return config, told


def full_batch(micro_batch_size: int, pp: int, dp: int) -> tuple[int, str]:
    """Returns a global batch size that fills the pipeline, and a text with this assumption."""
    microbatches = MICROBATCHES_PER_STAGE * pp
    batch = micro_batch_size * dp * microbatches
    return batch, f"global_batch_size={batch} ({microbatches} micro-batches a replica)"
