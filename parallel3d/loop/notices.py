"""Logs notices about a run's configuration before its first step."""

from __future__ import annotations

import os
from operator import attrgetter

import torch

from parallel3d.blueprint.parameters import fixed_states, parameter_count
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.fields import all_keys, show, spell
from parallel3d.errors import print_line
from parallel3d.models.architecture import architecture_of
from parallel3d.models.declared import full_tensors, states_of
from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config
from parallel3d.text import si


def log_notices(config: Config, groups: ProcessGroups, device: torch.device) -> None:
    """Warns of toy defaults and of a job that saves nothing, and calls `log_choices`."""
    if not config.train.eval_only and (sentence := toy_defaults(config)) is not None:
        print_line(sentence)
    saves = config.train.eval_only or config.checkpoint.every != 0
    if not saves and "SLURM_JOB_ID" in os.environ:
        print_line(
            "checkpoint.every=0 saves nothing, so a time limit or preemption of this Slurm job "
            "loses the run, and the job is not queued again"
        )
    log_choices(config, groups, device)


def log_choices(config: Config, groups: ProcessGroups, device: torch.device) -> None:
    """Logs the choices for keys that are auto, and warns of a key that has no effect here."""
    if config.ddp.hierarchical and groups.dp_inner.size == 1:
        print_line("ddp.hierarchical=true has no effect: this placement has only one level")
    blueprint = blueprint_of(config)
    if config.schedule.name == "auto":
        print_line(f"schedule=auto: {blueprint.pipeline.why_chosen()}")
    for sentence in architecture_of(config.model).notices(blueprint, device):
        print_line(sentence)


def acts_on_weights(config: Config) -> str:
    """Returns a sentence about all that changes finished weights when training begins with them.

    Defaults suit a model that is trained from the start, so each is named with the size of what it
    does in a step.
    """
    optim = config.optim
    names = (name for t in full_tensors(config.model) if t.decays for name in t.names)
    decayed = [optim.treatment(name) for name in names]
    most = max((t.lr_mult * t.wd_mult for t in decayed if not t.frozen), default=0.0)
    found = []
    if share := optim.lr * optim.weight_decay * most:
        found.append(
            f"optim.weight_decay={show(optim.weight_decay)} takes up to {100 * share:.2g} % of a "
            "matrix a step"
        )
    rate, states = config.moe.bias_update_rate, states_of(config.model)
    if rate and states - fixed_states(config.model, optim):
        found.append(f"moe.bias_update_rate={show(rate)} moves routers' biases by that a step")
    others = ("model.dropout", "moe.aux_loss", "moe.z_loss", "loss.label_smoothing", "loss.z_loss")
    held = {name: attrgetter(name)(config) for name in others}
    named = [spell(name, value) for name, value in held.items() if value]
    if named:
        found.append(f"{', '.join(named)} {'acts' if len(named) == 1 else 'act'} on the gradients")
    if states and not rate:
        found.append("routers' biases stay as they are (moe.bias_update_rate=0)")
    more = f"; {'; '.join(found)}" if found else ""
    return f"training of finished weights: gradients at optim.lr={show(optim.lr)}{more}"


LARGE = 100  # a model is large above this multiple of the default parameters or vocabulary
# Keys that every recipe sets. There is a notice only if one in TELLING has its default.
TELLING = ("precision.name", "optim.lr")
OTHERS = ("optim.lr_warmup_steps", "global_batch_size")


def toy_defaults(config: Config) -> str | None:
    """Returns a sentence about defaults that do not suit the model; None if there are none."""
    keys, small = all_keys(Config), ModelConfig()
    wrong = []
    parameters = parameter_count(config.model)
    if parameters > LARGE * parameter_count(small):
        left = [name for name in TELLING + OTHERS if attrgetter(name)(config) == keys[name].default]
        if config.optim.lr_warmup_fraction > 0 and OTHERS[0] in left:
            left.remove(OTHERS[0])
        if set(TELLING) & set(left):
            wrong += [keys[name].spelled(keys[name].default) for name in left]
    if config.data.reads_bytes and config.model.vocab_size > LARGE * small.vocab_size:
        wrong.append(f"data={config.data.name} (read as bytes)")
    if not wrong:
        return None
    return (
        f"{config.model.name} has {si(parameters).strip()} parameters and is trained with defaults "
        f"for a model of {si(parameter_count(small)).strip()}: {', '.join(wrong)}; parallel3d "
        "recipes lists configurations for such models"
    )
