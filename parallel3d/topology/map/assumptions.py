"""What `parallel3d topology` takes for granted where the user chose no model or no batch.

The default model of a first training run has four layers: no pipeline of eight stages, no bytes
worth a picture. A map of a cluster is about a model that needs one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from omegaconf import OmegaConf

from parallel3d.config.schema import Config, ModelConfig, conf_dir

MODEL = "llama3_70b"
MICROBATCHES_PER_STAGE = 4  # the bubble of 1F1B is then under a quarter of a step
HEAD_DIM = 128


def chosen_keys(typed: Sequence[str]) -> set[str]:
    """The keys and groups that overrides as typed give: `+model=gpt_tiny` -> `model`."""
    return {word.lstrip("+~").partition("=")[0].partition("@")[0] for word in typed}


def assume_model(config: Config, typed: Sequence[str]) -> tuple[Config, list[str]]:
    """A model and a micro-batch for a configuration that chose none, and what was assumed.

    `typed`: the overrides of the command line. An experiment counts as having chosen everything.
    """
    keys = chosen_keys(typed)
    if "experiment" in keys or any(k == "model" or k.startswith("model.") for k in keys):
        return config, []
    model, changes = _fitting(config.tp, config.pp * config.vpp, config.sp)
    told = [f"model={MODEL}", *(f"model.{name}={value}" for name, value in changes.items())]
    config = dataclasses.replace(config, model=model)
    if "micro_batch_size" not in keys:
        config = dataclasses.replace(config, micro_batch_size=1)
        told.append("micro_batch_size=1")
    return config, told


def assume_batch(config: Config, dp: int, typed: Sequence[str]) -> tuple[Config, list[str]]:
    """A global batch with enough micro-batches to fill the pipeline, where none was chosen."""
    if {"experiment", "global_batch_size"} & chosen_keys(typed):
        return config, []
    microbatches = MICROBATCHES_PER_STAGE * config.pp
    batch = config.micro_batch_size * dp * microbatches
    told = [f"global_batch_size={batch} ({microbatches} micro-batches a replica)"]
    return dataclasses.replace(config, global_batch_size=batch), told


def _fitting(tp: int, stages: int, sp: bool) -> tuple[ModelConfig, dict[str, int]]:
    """Llama 3 70B, and what had to be changed for `tp` to split it and for `stages` to fill."""
    preset = OmegaConf.load(conf_dir() / "model" / f"{MODEL}.yaml")
    model = ModelConfig(**OmegaConf.to_container(preset))  # type: ignore[arg-type]
    groups = math.lcm(model.kv_heads, tp)
    heads = _multiple(model.num_attention_heads, math.lcm(groups, tp))
    wanted = {
        "num_layers": max(model.num_layers, stages),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "hidden_size": _multiple(heads * HEAD_DIM, tp),
        "ffn_hidden_size": _multiple(model.ffn_size, tp),
        "vocab_multiple": model.vocab_multiple
        if model.padded_vocab_size % tp == 0
        else math.lcm(model.vocab_multiple, tp),
        "seq_length": _multiple(model.seq_length, tp) if sp else model.seq_length,
    }
    changes = {k: v for k, v in wanted.items() if v != getattr(model, k)}
    return dataclasses.replace(model, **changes), changes


def _multiple(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit
