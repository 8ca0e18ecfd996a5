"""Cross-checks of data, learning rate, precision, profile, placement and the run's name."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from parallel3d.config.checks.model import nearest_multiple
from parallel3d.config.data import DataConfig
from parallel3d.config.fields import show, values_of
from parallel3d.config.schema import Config, LoggerConfig
from parallel3d.errors import UserError, nearest
from parallel3d.schedules.schedule import NAMED_SCHEDULES, make

BYTE_VOCABULARY = 257  # 256 bytes and the end of text
LAST_STEP = 2**63 - 1  # of train.epochs, until the data is open
LONGEST_RUN_NAME = 200  # bytes; file systems allow 255, and a sweep adds the job's number


def check_samples(config: Config) -> None:
    """Checks the `data` section against the vocabulary; raises UserError."""
    data, vocabulary = config.data, config.model.vocab_size
    if data.reads_bytes and vocabulary < BYTE_VOCABULARY:
        raise UserError(
            f"model.vocab_size={vocabulary} must be at least {BYTE_VOCABULARY} for "
            f"data.tokenizer=byte; the nearest is model.vocab_size={BYTE_VOCABULARY}."
        )
    check_corpora(data)
    check_validation(config)


def check_batch_schedule(config: Config, dp: int) -> None:
    """Checks form and sizes of `train.batch_schedule`, also with the schedule; raises UserError."""
    given: Mapping[Any, Any] | None = config.train.batch_schedule
    if given is None:
        return
    name, multiple = f"train.batch_schedule={show(given)}", config.micro_batch_size * dp
    firsts = [_token(first) for first in given]
    if not given or firsts[0] != 0 or any(a >= b for a, b in pairwise(firsts)):
        raise UserError(
            f"{name} must give global batches by numbers of samples that grow from 0; the nearest "
            f"is train.batch_schedule={{0:{config.global_batch_size}}}."
        )
    for size in given.values():
        if type(size) is not int or size < 1 or size % multiple:
            near = nearest_multiple(size, multiple) if type(size) is int else multiple
            raise UserError(
                f"{name}: the global batch {show(size)} must be a multiple of {multiple}, the "
                f"product of micro_batch_size={config.micro_batch_size} and dp={dp}; the nearest "
                f"is {max(near, multiple)}."
            )
    if size != config.global_batch_size:
        raise UserError(
            f"{name} must end with global_batch_size={config.global_batch_size}, which memory, "
            f"time and evaluations go by; the nearest is global_batch_size={size}."
        )
    keys = config.schedule
    if keys.name not in NAMED_SCHEDULES:
        raise UserError(
            f"{name} changes the number of micro-batches, and schedule={keys.name} is made for "
            "one number; the nearest is schedule=1f1b."
        )
    for size in given.values():
        make(keys.name, config.pp, size // multiple, config.vpp)


def check_length(config: Config) -> None:
    """Raises UserError if two keys give the length, or epochs of a blend are asked for."""
    train = config.train
    given = {k: v for k in ("steps", "tokens", "epochs") if (v := getattr(train, k)) is not None}
    if len(given) > 1:
        typed = " and ".join(f"train.{name}={show(value)}" for name, value in given.items())
        raise UserError(
            f"{typed} each give the length of the run; keep one of them, the nearest is to leave "
            f"train.{next(reversed(given))} out."
        )
    if train.epochs is not None and config.data.name == "blend":
        raise UserError(
            f"train.epochs={show(train.epochs)} must be of one corpus, and a part of data=blend is "
            "read as often as its weight says; give train.tokens instead."
        )


def check_init(config: Config) -> None:
    """Raises UserError for an optimizer's state from nowhere."""
    if config.init_optimizer and config.init_from is None:
        raise UserError(
            "init_optimizer=true must stand beside init_from, whose optimizer it takes; the "
            "nearest is init_optimizer=false."
        )


def check_validation(config: Config) -> None:
    """Checks names and paths of `data.valid`, and that what is evaluated alone has a run; raises
    UserError."""
    sets = config.data.valid
    for name, path in (sets or {}).items():
        if not (isinstance(path, str) and path):
            raise UserError(
                f"data.valid gives {show(name)} the path {show(path)}, and must give a prefix of a "
                f"pair or text; as in 'data.valid={{{name}:corpora/{name}}}'."
            )
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]*\w[\w.-]*", name)):
            close = re.sub(r"[^\w.-]+", "_", str(name)).strip("_.-") or "set"
            close = close if isinstance(name, str) else f"set_{close}"  # YAML reads 0 as a number
            raise UserError(
                f"data.valid: the name {show(name)} must be of letters, digits, -, _ and dots, and "
                f"not of dots alone, as loggers show it; the nearest is {close}."
            )
    if config.optim.ema_decay is not None and "ema" in (config.data.blend or {}):
        raise UserError(
            "data.blend must have no part named ema beside optim.ema_decay, whose held-out loss "
            "has that name; the nearest is ./ema."
        )
    if config.train.eval_only and config.run is None:
        raise UserError(
            "train.eval_only=true evaluates a checkpoint, so it must stand beside run=, which is "
            "null; give the name of a run."
        )
    if config.train.eval_only and config.train.eval_batches == 0:
        raise UserError(
            "train.eval_only=true must have train.eval_batches above 0, or null for whole sets; "
            "the nearest is train.eval_batches=null."
        )


def check_learning_rate(config: Config) -> None:
    """Checks rate, warm-up and decay against each other; raises UserError."""
    optim = config.optim
    if optim.name == "muon" and optim.momentum == 0:
        raise UserError(
            f"optim.momentum={show(optim.momentum)} must be above 0 with optim.name=muon; the "
            f"nearest is optim=muon, which sets 0.95."
        )
    if optim.min_lr > optim.lr:
        raise UserError(
            f"optim.min_lr={show(optim.min_lr)} must be at most optim.lr={show(optim.lr)}; the "
            f"nearest is optim.min_lr={show(optim.lr)}."
        )
    if optim.lr_warmup_fraction > 0 and optim.lr_warmup_steps > 0:
        raise UserError(
            f"optim.lr_warmup_fraction={show(optim.lr_warmup_fraction)} and optim.lr_warmup_steps="
            f"{optim.lr_warmup_steps} both give the warm-up; keep one of them, the nearest is "
            f"optim.lr_warmup_fraction=0."
        )
    if optim.lr_decay_steps is None and config.train.epochs is not None:
        return  # checked when the data is open
    steps = optim.lr_decay_steps or config.train_steps
    span = "optim.lr_decay_steps" if optim.lr_decay_steps else "train.steps"
    if optim.lr_warmup_steps >= steps:
        raise UserError(
            f"optim.lr_warmup_steps={optim.lr_warmup_steps} must be below {span}={steps}; the "
            f"nearest is optim.lr_warmup_steps={steps - 1}."
        )
    if optim.lr_decay_style != "wsd":
        return
    warmup = optim.lr_warmup_fraction or optim.lr_warmup_steps / steps
    name, decay, near = "wsd_decay_fraction", optim.wsd_decay_fraction, round(1 - warmup, 9)
    if optim.wsd_decay_steps is not None:
        name, decay = "wsd_decay_steps", optim.wsd_decay_steps / steps
        near = steps - (optim.lr_warmup_steps or round(optim.lr_warmup_fraction * steps))
    # The margin lets 1/3 and 0.666666667, which the sentence below proposes, add up to 1.
    if warmup + decay > 1 + 1e-9 and getattr(optim, name) > near:
        raise UserError(
            f"optim.{name}={show(getattr(optim, name))} must be at most {show(near)}, what a "
            f"warm-up over {warmup:g} of {span}={steps} leaves; the nearest is "
            f"optim.{name}={show(near)}."
        )


def check_precision(config: Config) -> None:
    """Raises UserError for tf32 on a CPU, and a loss scale or half-precision loss without fp16."""
    precision = config.precision
    check_precision_of(config.device, precision.name)
    if precision.lm_cross_entropy == "fp16" and precision.name != "fp16":
        raise UserError(
            f"precision.lm_cross_entropy=fp16 must stand beside precision=fp16, whose logits are "
            f"fp16, but precision={precision.name}; the nearest is precision.lm_cross_entropy=fp32."
        )
    if precision.loss_scale is not None and precision.name != "fp16":
        raise UserError(
            f"precision.loss_scale={show(precision.loss_scale)} is read by precision=fp16 alone, "
            f"but precision={precision.name}; the nearest is precision=fp16."
        )
    if precision.min_loss_scale > precision.initial_loss_scale:
        raise UserError(
            f"precision.min_loss_scale={show(precision.min_loss_scale)} must be at most "
            f"precision.initial_loss_scale={show(precision.initial_loss_scale)}; the nearest is "
            f"precision.min_loss_scale={show(precision.initial_loss_scale)}."
        )


def check_precision_of(device: str, precision: str) -> None:
    """Raises UserError for a precision that `device` ("cpu", "cuda" or "cuda:1") does not have."""
    if precision == "tf32" and device == "cpu":
        raise UserError(
            "precision=tf32 is a mode of a GPU's tensor cores, and this run computes on the CPU; "
            "the nearest is precision=fp32."
        )


def check_profile(config: Config, world_size: int | None) -> None:
    """Checks steps and ranks to profile, ranks only if `world_size` is known; raises UserError."""
    profile = config.profile
    last_step = LAST_STEP if config.train.epochs is not None else config.train_steps
    if not profile.steps:
        if profile.memory:
            raise UserError(
                "profile.memory=true must stand beside profile.steps, which says when; the nearest "
                f"is profile.steps=[{min(10, last_step)},{min(12, last_step)}]."
            )
        return
    first, *_, last = [profile.steps[0], *profile.steps]
    if len(profile.steps) != 2 or not 1 <= first <= last <= last_step:
        near = sorted(
            min(max(1, step), last_step) for step in (min(profile.steps), max(profile.steps))
        )
        raise UserError(
            f"profile.steps={show(profile.steps)} must be two numbers, the first and the last step "
            f"to profile, from 1 to train.steps={last_step}; the nearest is "
            f"profile.steps={show(near)}."
        )
    if profile.ranks != "all" and world_size is not None and max(profile.ranks) >= world_size:
        near = [rank for rank in profile.ranks if rank < world_size] or [world_size - 1]
        raise UserError(
            f"profile.ranks={show(profile.ranks)} must be ranks of this run, from 0 to "
            f"{world_size - 1}; the nearest is profile.ranks={show(near)}."
        )


def check_loggers(logger: LoggerConfig) -> None:
    """Raises UserError if the package of a logger is missing here, where rank 0 is."""
    if "tensorboard" in logger.names and importlib.util.find_spec("tensorboard") is None:
        given, others = show(logger.name), [name for name in logger.names if name != "tensorboard"]
        raise UserError(
            f"logger={given} needs the package tensorboard, which is not installed: give "
            f"pip install 'parallel3d[tensorboard]', or logger={show(others) if others else 'none'}"
        )


def check_run_name(config: Config) -> None:
    """Raises UserError unless `run` is a plain folder name."""
    run = config.run
    if run is None:
        return
    if run.strip() in ("", ".", "..") or re.search(r"[/\\]", run) or not run.isprintable():
        raise UserError(
            f"run={show(run)} must be the plain name of a folder inside runs_dir="
            f"{show(config.runs_dir)}; null makes a name, and runs_dir moves the place."
        )
    if len(os.fsencode(run)) > LONGEST_RUN_NAME:
        raise UserError(
            f"run={run[:20]}… has {len(os.fsencode(run))} bytes, and the name of a folder may have "
            f"{LONGEST_RUN_NAME}; give a shorter run=."
        )


def check_plain(config: Config) -> None:
    """Raises UserError for text that config.yaml would read as a reference."""
    for key, value in values_of(config).items():
        if "${" in json.dumps(value):
            raise UserError(
                f"{key}={show(value)} holds ${{, which config.yaml would take for a reference to "
                "another key; give it without."
            )


# Corpora and the weights of a blend


TOKENS = "tokens"  # as a weight: the data set's number of tokens
PACKED = ("corpus", "blend")
# The meaning of `data.path`, by the kind of source.
PATHS = {
    "text": "a file, a folder or a glob, as in data.path=book.txt, or leave data=stdlib",
    "corpus": "the prefix of a pair, its name without .bin and .idx, as in data.path=corpora/web",
    "chat": "jsonl, a conversation a row, as in data.path=sft.jsonl",
}


class Weights(NamedTuple):
    """Exact weights by prefix, from token `first` of the run on.

    None: the data set's number of tokens; the other weights are then numbers of tokens.
    """

    first: int
    by_prefix: Mapping[str, Fraction | None]


def check_corpora(data: DataConfig) -> None:
    """Checks `data.path` and a blend against the kind of source; raises UserError."""
    if data.name in PATHS and not data.path:
        raise UserError(
            f"data={data.name} needs data.path, which is {show(data.path)}; give "
            f"{PATHS[data.name]}."
        )
    if data.name == "blend":
        blend_weights(data)
    for name in ("path", "blend", "blend_stages"):
        readers = ("blend",) if name != "path" else tuple(PATHS)
        if (value := getattr(data, name)) is not None and data.name not in readers:
            near = f"data={readers[0]}, which reads it"
            if data.name == "blend":
                near = f"'data.blend={{{value}:1}}'"
            raise UserError(
                f"data.{name}={show(value)} is not read by data={data.name}; the nearest is {near}."
            )


def blend_weights(data: DataConfig) -> list[Weights]:
    """Returns the weights of a blend and its later stages, in order; raises UserError."""
    if not data.blend:
        raise UserError(
            f"data=blend needs data.blend, which is {show(data.blend)}; give weights by prefix, as "
            "in 'data.blend={corpora/web:0.7,corpora/code:0.3}'."
        )
    stages = [Weights(0, _weights(data.blend, "data.blend"))]
    for typed, weights in (data.blend_stages or {}).items():
        name = f"data.blend_stages at {show(typed)}"
        first = _token(typed)
        if first <= stages[-1].first:
            near = stages[-1].first + 1
            raise UserError(
                f"{name} must be a number of tokens, above {stages[-1].first:,} of the stage "
                f"before it; the nearest is {near}."
            )
        if not isinstance(weights, dict) or not weights:
            raise UserError(
                f"{name} is {show(weights)}, and must be weights by prefix; as in "
                f"'data.blend_stages={{{first}:{{corpora/web:0.5,corpora/math:0.5}}}}'."
            )
        stages.append(Weights(first, _weights(weights, name)))
    return stages


def _token(typed: Any) -> int:
    """Returns a number of tokens, typed as 1000000000 or 1e9; -1 for other text."""
    try:
        number = Fraction(str(typed))
    except (ValueError, ZeroDivisionError):
        return -1
    return int(number) if number.denominator == 1 and number < 2**63 else -1


def _weights(given: Mapping[Any, Any], name: str) -> dict[str, Fraction | None]:
    weights: dict[str, Fraction | None] = {}
    for prefix, typed in given.items():
        if typed == TOKENS:
            weights[str(prefix)] = None
            continue
        is_number = isinstance(typed, (int, float)) and not isinstance(typed, bool)
        if not is_number or not math.isfinite(typed) or typed <= 0:
            near = f"to leave {show(str(prefix))} out"
            if isinstance(typed, str):
                near = nearest(typed, [TOKENS]) or "1"
            raise UserError(
                f"{name} gives {show(str(prefix))} the weight {show(typed)}: it must be a number "
                f"above 0 or {TOKENS}; the nearest is {near}."
            )
        weights[str(prefix)] = Fraction(repr(typed))
    small = next(((p, w) for p, w in weights.items() if w is not None and w < 1), None)
    if small is not None and None in weights.values():
        raise UserError(
            f"{name} gives {show(small[0])} the weight {float(small[1]):g}: beside {TOKENS} it "
            f"must be a number of tokens, at least 1; the nearest is {TOKENS}."
        )
    return weights


# Placement and NCCL


GROUP_KINDS = ("tp", "cp", "dp", "pp", "embedding")
# Fields of ncclConfig_t and their ranges.
NCCL_LIMITS = {"min_ctas": (1, 32), "max_ctas": (1, 32), "cga_cluster_size": (0, 8)}


def check_groups(config: Config) -> None:
    """Checks placement, rank file and NCCL settings; raises UserError."""
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
        if kind not in GROUP_KINDS:
            raise UserError(
                f"launch.nccl_high_priority={show(kind)} must name a kind of group, one of "
                f"{', '.join(GROUP_KINDS)}; the nearest is {nearest(kind, GROUP_KINDS) or 'dp'}."
            )
    parse_nccl_settings(config.launch.nccl_settings)
    parse_nccl_env(config.cluster.nccl_env)


def parse_nccl_settings(settings: list[str]) -> list[tuple[str, str, int]]:
    """Returns (kind of group, field of ncclConfig_t, value) of each `dp.max_ctas:8`. Raises
    UserError."""
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
                f"launch.nccl_settings={show(item)} must be a kind of group (one of "
                f"{', '.join(GROUP_KINDS)}), a setting (one of {', '.join(NCCL_LIMITS)}) and a "
                f"number, here {low} to {high}; the nearest is launch.nccl_settings=[{near}]."
            )
        parsed.append((kind, name, int(value)))
    return parsed


def parse_nccl_env(settings: list[str]) -> dict[str, str]:
    """Returns values by variable of each `NCCL_CROSS_NIC:0`; a value may contain colons.

    Also accepts torch's TORCH_NCCL_… and TORCH_FR_…. Raises UserError for other text.
    """
    variables = {}
    for item in settings:
        match = re.fullmatch(r"((?:NCCL|TORCH_NCCL|TORCH_FR)_[A-Z0-9_]+):(.+)", item)
        if match is None:
            raise UserError(
                f"cluster.nccl_env={show(item)} must be a variable of NCCL and its value; the "
                "nearest is cluster.nccl_env=[NCCL_CROSS_NIC:0]."
            )
        variables[match[1]] = match[2]
    return variables
