"""Declares the keys of all subcommands: those of a run, and the options of each subcommand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from parallel3d.calibrate.keys import CalibrateConfig
from parallel3d.commands.bench.keys import BenchConfig
from parallel3d.config.values import FREE, key
from parallel3d.dryrun.keys import DryrunConfig
from parallel3d.run_config import Config
from parallel3d.topology.keys import TopologyConfig

WEIGHTS = "model: the weights after the step; ema: their moving average (optim.ema_decay)"


@dataclass
class VerifyConfig:
    """Options of `parallel3d verify`."""

    RESUME: ClassVar[str] = FREE
    steps: int = key(5, "steps of each comparison", minimum=1)


@dataclass
class GenerateConfig:
    """Options of `parallel3d generate`."""

    RESUME: ClassVar[str] = FREE
    max_tokens: int = key(200, "tokens to write", minimum=1)
    temperature: float = key(
        0.8, "temperature of the softmax; 0 takes the likeliest token", minimum=0
    )
    top_k: int | None = key(None, "draw from the k likeliest tokens; null: from all", minimum=1)
    step: int | None = key(None, "step of the checkpoint; null: the newest", minimum=0)
    weights: str = key("model", WEIGHTS, choices=("model", "ema"))


@dataclass
class EvalConfig:
    """Options of `parallel3d eval`."""

    RESUME: ClassVar[str] = FREE
    tasks: str | None = key(
        None,
        "jsonl or parquet file whose rows have a context with choices and answer, or with a "
        "continuation; short form: tasks=",
        holds=Path,
    )
    to: str | None = key(
        None,
        "file for the scores of all rows, as JSON; null: in eval/ of the run directory",
        holds=Path,
    )
    batch_tokens: int = key(
        8192, "maximum number of tokens in one rank's forward pass, with padding", minimum=1
    )
    step: int | None = key(None, "step of the checkpoint; null: the newest", minimum=0)
    weights: str = key("model", WEIGHTS, choices=("model", "ema"))


@dataclass
class PlanConfig:
    """Options of `parallel3d plan`."""

    RESUME: ClassVar[str] = FREE
    html: str | None = key(
        None, "plan: file for the whole plan as an HTML page with pictures", holds=Path
    )
    confirm: int = key(
        3,
        "plan: number of best rows whose memory a dry run confirms; by default no dry run begins "
        "after a minute; 0: none, so that torch is not needed",
        minimum=0,
    )
    load: float = key(
        1.0,
        "plan: tokens of the experts on the fullest rank of ep, divided by the mean over ranks, "
        "for which times and memory are calculated; 1: all ranks have equally many tokens",
        minimum=1,
    )


@dataclass
class CommandConfig(Config):
    """The keys of a run together with the options of subcommands other than `train`."""

    prompt: str = key(
        "\n", "generate: the text to continue; its whitespace is kept", resume=FREE, once=True
    )
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    dryrun: DryrunConfig = field(default_factory=DryrunConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
