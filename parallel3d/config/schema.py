"""The configuration of a run: every feature's keys, composed.

A section, and a key without one, is declared in `keys.py` of the feature's folder. Hydra composes
`conf/` over these dataclasses, `docs/configuration.md` is generated from them, and `config.checks`
checks a whole configuration. Without torch, so that a bad key is refused at once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from parallel3d.blueprint.keys import CONFLICTS as BLUEPRINT
from parallel3d.blueprint.keys import ClusterConfig, LayoutKeys, PlacementKeys
from parallel3d.checkpoint.keys import CONFLICTS as CHECKPOINT
from parallel3d.checkpoint.keys import CheckpointConfig, StartKeys
from parallel3d.config.values import (
    FREE,
    BatchSizes,
    key,
    padded_length,
)
from parallel3d.context_parallel.keys import CONFLICTS as CONTEXT_PARALLEL
from parallel3d.context_parallel.keys import ContextParallelConfig
from parallel3d.data.keys import DataConfig
from parallel3d.data_parallel.keys import CONFLICTS as DATA_PARALLEL
from parallel3d.data_parallel.keys import DataParallelConfig, ZeroKeys
from parallel3d.device.keys import CONFLICTS as DEVICE
from parallel3d.device.keys import DeviceKeys, PrecisionConfig
from parallel3d.faults.keys import PreflightKeys, RecoveryConfig
from parallel3d.loop.keys import CONFLICTS as LOOP
from parallel3d.loop.keys import DEFAULT_STEPS, LENGTHS, ProfileConfig, StepKeys, TrainConfig
from parallel3d.metrics.keys import LoggerConfig
from parallel3d.models.keys import CONFLICTS as MODELS
from parallel3d.models.keys import AttentionKeys, LayerKeys, ModelConfig, full_shapes_of
from parallel3d.optim.keys import CONFLICTS as OPTIM
from parallel3d.optim.keys import MULTIPLIERS, WARM_UPS, OptimConfig, Treatment
from parallel3d.run.keys import LaunchConfig, RunKeys
from parallel3d.schedules.keys import CONFLICTS as SCHEDULES
from parallel3d.schedules.keys import ScheduleConfig
from parallel3d.tensor_parallel.keys import CONFLICTS as TENSOR_PARALLEL
from parallel3d.tensor_parallel.keys import LossConfig, TensorParallelConfig

__all__ = [
    "ALTERNATIVES",
    "CONFLICTS",
    "MULTIPLIERS",
    "OPTIONS",
    "SECTIONS",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ContextParallelConfig",
    "DataConfig",
    "DataParallelConfig",
    "LaunchConfig",
    "LoggerConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "RecoveryConfig",
    "ScheduleConfig",
    "TensorParallelConfig",
    "TrainConfig",
    "Treatment",
    "conf_dir",
    "full_shapes_of",
    "register_schema",
]


WEIGHTS = "those of the steps, or ema: their average (optim.ema_decay)"


@dataclass
class VerifyConfig:
    """Options of `parallel3d verify`."""

    RESUME: ClassVar[str] = FREE
    steps: int = key(5, "steps of each comparison", minimum=1)


@dataclass
class TopologyConfig:
    """Options of `parallel3d topology`."""

    RESUME: ClassVar[str] = FREE
    rank: int = key(0, "the rank whose groups are highlighted", minimum=0)
    svg: str | None = key(None, "file for a picture of the cluster, as SVG", holds=Path)
    json: str | None = key(None, "file for everything shown, as JSON", holds=Path)
    search: int = key(5, "rows of the placement search to list; 0: no search", minimum=0)


@dataclass
class BenchConfig:
    """Options of `parallel3d bench comm`."""

    RESUME: ClassVar[str] = FREE
    sizes: list[int] = key([4096, 262144, 4194304], "bytes of each message")
    iterations: int = key(5, "timed calls of each row; the median counts", minimum=1)
    warmup: int = key(2, "calls before", minimum=0)
    budget_s: float = key(60.0, "seconds for all; iterations are cut to hold it", above=0)
    outlier: float = key(
        1.5, "a pair or rank slower than this many times the median is named", above=1
    )
    json: str | None = key(
        None, "file for all rows; null: bench.json in the run directory", holds=Path
    )


@dataclass
class CalibrateConfig:
    """Options of `parallel3d calibrate`, which measures in the type of `precision`."""

    RESUME: ClassVar[str] = FREE
    file: str = key("calibrated.yaml", "the cluster file that it writes", holds=Path)
    replace: bool = key(False, "whether a file of that name may be written anew")
    ranks: int | None = key(
        None,
        "the most ranks of a group, a power of two; null: four a core and eight at least, or as "
        "many as there are GPUs",
        minimum=1,
        maximum=1024,
    )
    passes: int = key(3, "how often each piece is measured, the others between", minimum=1)


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
class DryrunConfig:
    """Options of `parallel3d dryrun`."""

    RESUME: ClassVar[str] = FREE
    rank: int | None = key(
        None,
        "the rank that is played; null: the first of the first, a middle and the last pipeline "
        "stage, with details of the one whose memory peaks highest",
        minimum=0,
    )
    reserve_gb: float = key(
        4.0,
        "memory of a GPU, in 1e9 B, that no tensor gets: CUDA's context, NCCL's buffers, cuBLAS's "
        "workspace and what the allocator loses to fragments",
        minimum=0,
    )
    json: str | None = key(None, "file for everything shown and more, as JSON", holds=Path)


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


# Python orders the fields of bases from the last to the first.
@dataclass
class Config(
    PreflightKeys,
    PlacementKeys,
    AttentionKeys,
    DeviceKeys,
    StartKeys,
    RunKeys,
    StepKeys,
    LayerKeys,
    ZeroKeys,
    LayoutKeys,
):
    """A whole run. Sizes of the dimensions: world size = tp × pp × cp × dp."""

    prompt: str = key("\n", "generate: the text to continue, taken as it is typed", resume=FREE)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    ddp: DataParallelConfig = field(default_factory=DataParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    dryrun: DryrunConfig = field(default_factory=DryrunConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def replica_size(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp * self.cp * self.pp

    @property
    def world_size(self) -> int:
        """Ranks of the run; of one replica while dp is null."""
        return self.replica_size * (self.dp or 1)

    @property
    def padded_seq_length(self) -> int:
        """Tokens of a sample with the padding that context parallelism needs."""
        return padded_length(self.model.seq_length, self.cp, self.rank_multiple)

    @property
    def local_seq_length(self) -> int:
        """Tokens of a sample on each context-parallel rank, before tp splits them under sp."""
        return self.padded_seq_length // self.cp

    @property
    def rank_multiple(self) -> int:
        """Divides the tokens of a sample on a context-parallel rank."""
        return self.tp * self.tensor_parallel.chunks if self.sp else 1

    @property
    def mlp_chunks(self) -> int:
        """Chunks in which a recomputed MLP runs."""
        most = self.mlp_chunk_tokens
        return 1 if most is None else -(-self.micro_batch_size * self.local_seq_length // most)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a data-parallel rank in a step. Raises ValueError while dp is null."""
        return self.microbatches_of(self.global_batch_size)

    def microbatches_of(self, batch: int) -> int:
        """Micro-batches of a data-parallel rank in a step of `batch` sequences, as above."""
        if self.dp is None:
            raise ValueError("dp is not known yet: call check_config first")
        return batch // (self.micro_batch_size * self.dp)

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch by samples read, of a checked configuration."""
        schedule = self.train.batch_schedule or {0: self.global_batch_size}
        return BatchSizes.of(schedule)

    @property
    def budget(self) -> int | None:
        """Samples of `train.tokens`; None where another key gives the length."""
        tokens = self.train.tokens
        return None if tokens is None else -(-math.ceil(tokens) // self.model.seq_length)

    @property
    def train_steps(self) -> int:
        """Steps of a run that begins; `Length` has those of one that goes on. Raises ValueError for
        epochs, before `loader.with_length`."""
        if self.budget is not None:
            return self.batch_sizes.steps(self.budget)
        if self.train.epochs is not None:
            raise ValueError("the steps of train.epochs are known when the data is open")
        return self.train.steps or DEFAULT_STEPS


# Sections of subcommands: no run is another by them.
OPTIONS = ("verify", "topology", "bench", "calibrate", "generate", "eval", "dryrun", "plan")
# Settings that exclude each other, in the order in which they are told.
CONFLICTS = (
    *MODELS,
    *TENSOR_PARALLEL,
    *CONTEXT_PARALLEL,
    *SCHEDULES,
    *LOOP,
    *CHECKPOINT,
    *OPTIM,
    *DEVICE,
    *DATA_PARALLEL,
    *BLUEPRINT,
)
# Keys of which at most one is given: one that is typed takes the place of a preset's.
ALTERNATIVES = (LENGTHS, WARM_UPS)
# The sections by name.
SECTIONS: dict[str, type] = {
    name: type(value) for name, value in vars(Config()).items() if dataclasses.is_dataclass(value)
}


def register_schema() -> None:
    """Registers `Config` with Hydra as `schema`, the first of conf/config.yaml's defaults; may be
    called repeatedly."""
    from hydra.core.config_store import ConfigStore  # workers read a finished config without Hydra

    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # building the node takes a quarter of composing
        store.store(name="schema", node=Config)


def conf_dir() -> Path:
    """Returns the folder of the Hydra groups: in the package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"
