"""Decides which keys may change when a run continues.

Free keys change nothing but rounding: where and how a run computes (layout, schedule, launcher,
logger). Reported keys change the next steps (learning rate, batch, length, precision). Refused keys
define the weights and the order of samples (model, data, seed, optimizer): another value needs
another run name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from parallel3d.config.fields import all_keys, show, values_of
from parallel3d.config.schema import Config, ModelConfig

# Sections of other commands than train.
OF_COMMANDS = (
    *("verify.", "topology.", "bench.", "calibrate.", "generate.", "eval.", "dryrun.", "plan."),
)
# Keys, or sections with a trailing dot. The longest match decides; unmatched keys are reported.
REFUSED = ("model.", "data.", "seed", "optim.name", "optim.momentum", "init_from", "init_optimizer")
FREE = (
    *("run", "runs_dir", "device", "compile", "deterministic", "placement", "rank_file", "prompt"),
    *("preflight", "layout", "tp", "pp", "dp", "cp", "sp", "vpp", "zero", "micro_batch_size"),
    *("attention_kernel", "recompute", "recompute_layers", "offload_layers", "mlp_chunk_tokens"),
    *("train.progress", "train.log_every", "train.save_weights", "train.noise_scale"),
    "loss.chunk_tokens",
    *("schedule.", "tensor_parallel.", "context_parallel.", "ddp.", "cluster.", "launch."),
    *("logger.", "profile."),
    *("checkpoint.", "recovery.", *OF_COMMANDS),
    # Of the model its name and the layout of its tables. Of the data the fingerprint of the text
    # decides, not its location.
    *("model.name", "model.vocab_multiple", "model.embedding", "model.parallel_output"),
    # The tokenizer's digest decides too.
    *("model.init_std", "data.path", "data.name", "data.cache_dir", "data.tokenizer"),
    *("data.most_epochs", "data.held_out_sets", "data.block_cache_gb"),
    *("data.valid", "train.eval_only"),
)
# Reported although their section is refused or free: weights of a blend take effect from where the
# run is; a hook that rounds gradients changes them.
REPORTED = ("model.dropout", "data.blend", "data.blend_stages", "ddp.comm_hook")
LAYOUT = ("tp", "pp", "dp", "cp", "sp", "vpp", "zero", "micro_batch_size", "schedule.name")


class ConfigChange(NamedTuple):
    """A key with its values in the checkpoint and now."""

    key: str
    there: Any
    here: Any

    @property
    def kind(self) -> str:
        """ "free", "reported" or "refused".

        Momentum may change but not switch on or off: its state exists or not.
        """
        if self.key == "optim.momentum" and bool(self.there) == bool(self.here):
            return "reported"
        return _kind(self.key)

    def __str__(self) -> str:
        return f"{self.key} is {self.there!r} there, now {self.here!r}"


def changes(there: Mapping[str, Any], here: Config) -> list[ConfigChange]:
    """Returns every differing key; `there` is nested dicts, in which keys that came later have
    their defaults, and a null key of the model is the value that then holds. For
    `train.eval_only`, which reads no training sample, neither data nor seed."""
    old = _in_effect(values_of(Config()) | flat(there), here.model)
    new = _in_effect(values_of(here), here.model)
    keys = sorted(new)
    if here.train.eval_only:
        keys = [key for key in keys if key != "seed" and not key.startswith("data.")]
    return [ConfigChange(key, old[key], new[key]) for key in keys if not same(old[key], new[key])]


def _in_effect(values: dict[str, Any], here: ModelConfig) -> dict[str, Any]:
    """Returns `values` with those of the model `here` for its null keys; where the keys from which
    they follow differ, these are changes themselves."""
    nulls: dict[str, Any] = dict.fromkeys(here.in_effect)
    held = dataclasses.replace(here, **nulls).in_effect
    named = {f"model.{key}": value for key, value in held.items()}
    return values | {key: value for key, value in named.items() if values[key] is None}


def of_all_ranks(config: Config) -> dict[str, Any]:
    """Returns the keys that all ranks must have alike; paths may differ between hosts."""
    decisive = (*LAYOUT, "recompute", "init_optimizer")
    return {
        key: value
        for key, value in _in_effect(values_of(config), config.model).items()
        if key in decisive
        or key.startswith("schedule.")
        or (_kind(key) != "free" and not key.startswith("data."))
    }


def decisive(config: Config) -> dict[str, str]:
    """Returns the keys that decide on the figures of a run's steps, with their values as typed."""
    values = _in_effect(values_of(config), config.model)
    return {key: show(value) for key, value in values.items() if _kind(key) != "free"}


def first_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> ConfigChange | None:
    """Returns the first key with another value; `theirs` came as JSON."""
    both = ((key, value, ours.get(key)) for key, value in theirs.items())
    return next((ConfigChange(*each) for each in both if not same(*each[1:])), None)


def refusal(run: str | None, found: list[ConfigChange]) -> str | None:
    """Returns the sentence that refuses to continue, with the changed keys; None if none is."""
    bad = [change for change in found if change.kind == "refused"]
    if not bad:
        return None
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return (
        f"run={run} cannot resume with another configuration: "
        f"{', '.join(map(str, bad[:3]))}{more}; choose another run="
    )


def _kind(key: str) -> str:
    tables = {"refused": REFUSED, "free": FREE, "reported": REPORTED}
    fitting = [
        (len(rule), kind)
        for kind, rules in tables.items()
        for rule in rules
        if (key.startswith(rule) if rule.endswith(".") else key == rule)
    ]
    return max(fitting, default=(0, "reported"))[1]


def same(a: Any, b: Any) -> bool:
    """Compares values as JSON keeps them: tuples as lists, keys as text."""
    return bool(json.loads(json.dumps(a)) == json.loads(json.dumps(b)))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts by dotted names; values in braces stay whole."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = all_keys().get(f"{prefix}{name}")
        if isinstance(value, Mapping) and (key is None or key.kind is not dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
