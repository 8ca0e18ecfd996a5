"""The configuration of subcommands: a run's, and the options of each subcommand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from parallel3d.commands.bench.keys import BenchConfig
from parallel3d.commands.calibrate.keys import CalibrateConfig
from parallel3d.commands.dryrun.keys import DryrunConfig
from parallel3d.config.schema import Config
from parallel3d.config.values import FREE, key
from parallel3d.topology.keys import TopologyConfig

WEIGHTS = "those of the steps, or ema: their average (optim.ema_decay)"


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
        0.8, "of the softmax that tokens are drawn from; 0 takes the likeliest", minimum=0
    )
    top_k: int | None = key(
        None, "draw from the likeliest k tokens alone; null: from all", minimum=1
    )
    step: int | None = key(None, "step of the checkpoint; null: the newest", minimum=0)
    weights: str = key("model", WEIGHTS, choices=("model", "ema"))


@dataclass
class EvalConfig:
    """Options of `parallel3d eval`."""

    RESUME: ClassVar[str] = FREE
    tasks: str | None = key(
        None,
        "jsonl, a row a context with choices and answer, or with a continuation; typed tasks=",
        holds=Path,
    )
    to: str | None = key(
        None,
        "file for the scores of all rows, as JSON; null: in eval/ of the run directory",
        holds=Path,
    )
    batch_tokens: int = key(8192, "tokens of a forward of one rank, padding included", minimum=1)
    step: int | None = key(None, "step of the checkpoint; null: the newest", minimum=0)
    weights: str = key("model", WEIGHTS, choices=("model", "ema"))


@dataclass
class PlanConfig:
    """Options of `parallel3d plan`."""

    RESUME: ClassVar[str] = FREE
    html: str | None = key(
        None, "plan: file for the whole plan as one page, with pictures", holds=Path
    )
    confirm: int = key(
        3,
        "plan: best rows whose memory a dry run confirms, as many as begin within a minute unless "
        "this is typed; 0: none, and no torch",
        minimum=0,
    )


@dataclass
class CommandConfig(Config):
    """A run, as a subcommand other than `train` looks at it, and the options of subcommands."""

    prompt: str = key(
        "\n", "generate: the text to continue, taken as it is typed", resume=FREE, once=True
    )
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    dryrun: DryrunConfig = field(default_factory=DryrunConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
