"""The configuration of `train run=NAME` for a run that exists: what is not typed is as it was.

In the order of precedence: what is typed, with the presets and the experiment that it names; the
configuration of the run's last start; the defaults.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose
from hydra.core.config_store import ConfigStore

from parallel3d.config.fields import show
from parallel3d.config.overrides import groups
from parallel3d.config.schema import SECTIONS, Config

EXPERIMENT = "experiment"
SIZES = ("tp", "pp", "cp")
# Keys of a single start. A section ends with a dot.
OF_A_START = (
    *("run", "runs_dir", "prompt", "layout", "checkpoint.load", "train.eval_only", "profile."),
    *("launch.ranks", "verify.", "topology.", "bench.", "calibrate.", "generate.", "dryrun."),
    "plan.",
)
OF_STAGES = ("vpp", "recompute_layers", "schedule.")  # of the same pp alone
OF_RANKS = ("placement", "rank_file")  # of the same sizes alone
OF_THE_PLANNER = (*SIZES, *OF_STAGES, "dp", "micro_batch_size", "zero", "recompute")
# Keys of which one is given: of the others none is kept beside a typed one.
ALTERNATIVES = (
    {"train.steps", "train.tokens", "train.epochs"},
    {"optim.lr_warmup_fraction", "optim.lr_warmup_steps"},
)
MOST_SHOWN = 6


def given_keys(words: Sequence[str]) -> set[str]:
    """Returns the keys that overrides give; a section, with a dot at its end, is given by a preset.

    May be called in Hydra's job alone, as an experiment is composed.
    """
    found: set[str] = set()
    for word in words:
        name = word.lstrip("+~").partition("=")[0].partition("@")[0]
        found.add(f"{name}." if name in groups() or name in SECTIONS else name)
    if f"{EXPERIMENT}." in found:
        found |= _keys_of_experiment([w for w in words if w.lstrip("+").startswith(EXPERIMENT)])
    return found


def _keys_of_experiment(words: Sequence[str]) -> set[str]:
    """Returns the keys and sections of an experiment, composed over nothing else."""
    nothing: list[Any] = [{group: None} for group in groups() if group != EXPERIMENT]
    node = {"defaults": [*nothing, "_self_", {EXPERIMENT: None}]}
    ConfigStore.instance().store(name="given", node=node)
    composed = compose("given", overrides=list(words), return_hydra_config=True)
    chosen = {f"{g}." for g, choice in composed.hydra.runtime.choices.items() if choice}
    keys = set(map(str, composed)) - {"hydra"}
    for section in keys & {*SECTIONS}:
        keys |= {f"{section}.{leaf}" for leaf in composed[section]}
    return chosen | keys - {*SECTIONS}


def is_given(key: str, given: set[str]) -> bool:
    section, dot, _ = key.partition(".")
    return key in given or section + dot in given


def continued(
    config: Config, there: Config, given: set[str], world_size: int | None
) -> tuple[Config, str | None]:
    """Returns the configuration with which a run goes on, and a line that tells what it took.

    Sizes of the layout that are not typed are those of the last start, and dp is what they leave of
    the ranks: of the launcher's (`world_size`), or of as many as there were. Where they do not fit
    beside typed sizes, they are left out.

    Args:
        there: the configuration of the run's last start.
        given: what is typed (`given_keys`).
    """
    old, new = _keys(there), _keys(config)
    left = {*OF_A_START, *OF_THE_PLANNER} if "layout" in given else {*OF_A_START}
    if "layout" not in given:
        old |= _sizes(config, there, given, world_size)
        same = all(old[s] == getattr(there, s) for s in SIZES) and old["dp"] in (None, there.dp)
        if not same or world_size not in (None, _ranks(there)):
            left |= {*OF_RANKS}
        if old["pp"] != there.pp:
            left |= {*OF_STAGES}
    left = left.union(*(some for some in ALTERNATIVES if any(is_given(k, given) for k in some)))
    # A source without a step, typed again, is the one with the step that the first start chose.
    if config.init_from == str(there.init_from).rpartition("@")[0]:
        given = given - {"init_from"}
    taken = {k: v for k, v in old.items() if not is_given(k, given) and not is_given(k, left)}
    changed = [f"{key}={show(value)}" for key, value in taken.items() if new[key] != value]
    if not changed:
        return config, None
    more = f" and {len(changed) - MOST_SHOWN} more" if len(changed) > MOST_SHOWN else ""
    shown = f"{', '.join(changed[:MOST_SHOWN])}{more}"
    line = f"run={config.run}: what is not typed is as at its last start: {shown}"
    return with_keys(config, taken), line


def _sizes(
    config: Config, there: Config, given: set[str], world_size: int | None
) -> dict[str, int | None]:
    """Returns tp, pp, cp and dp as `continued` has them; dp=None: what is left of the launcher's
    ranks."""
    typed = {s: getattr(config, s) for s in (*SIZES, "dp") if s in given}
    kept = {s: typed.get(s, getattr(there, s)) for s in SIZES}
    ranks = world_size or _ranks(there)
    if "dp" in typed and world_size is None:  # as many ranks as they make
        return kept | typed
    if typed and ranks % (math.prod(kept.values()) * (typed.get("dp") or 1)):
        kept = {s: typed.get(s, getattr(config, s)) for s in SIZES}
    dp, odd = divmod(ranks, math.prod(kept.values()))
    return kept | {"dp": None if world_size or odd or dp == 1 else dp} | typed


def _ranks(config: Config) -> int:
    return math.prod(getattr(config, size) or 1 for size in (*SIZES, "dp"))


def _keys(config: Config) -> dict[str, Any]:
    """Returns every key's value by dotted name, with what `check_config` derives."""
    model = dataclasses.replace(
        config.model,
        num_query_groups=config.model.kv_heads,
        ffn_hidden_size=config.model.ffn_size,
        max_position_embeddings=config.model.max_positions,
    )
    config = dataclasses.replace(config, model=model)
    found: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name in SECTIONS:
            inside = dataclasses.fields(value)
            found |= {f"{f.name}.{i.name}": getattr(value, i.name) for i in inside}
        else:
            found[f.name] = value
    return found


def with_keys(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns the configuration with these values, by dotted name."""
    top: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for section in SECTIONS:
        inside = {n.partition(".")[2]: v for n, v in values.items() if n.startswith(f"{section}.")}
        top[section] = dataclasses.replace(getattr(config, section), **inside)
    return dataclasses.replace(config, **top)
