"""Composes the schema of a run's configuration from the keys of every feature.

Each feature declares its keys in the `keys.py` of its folder. Hydra composes `conf/` over these
dataclasses, `docs/configuration.md` is generated from them, and `config.checks` checks a whole
configuration. Nothing here imports torch, so that a bad key is refused at once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, cast

from parallel3d.blueprint.keys import CONFLICTS as BLUEPRINT
from parallel3d.blueprint.keys import ClusterConfig, LayoutKeys, PlacementKeys
from parallel3d.checkpoint.keys import CONFLICTS as CHECKPOINT
from parallel3d.checkpoint.keys import CheckpointConfig, StartKeys
from parallel3d.config.values import BatchSizes, padded_length
from parallel3d.context_parallel.keys import CONFLICTS as CONTEXT_PARALLEL
from parallel3d.context_parallel.keys import ContextParallelConfig
from parallel3d.data.keys import DataConfig
from parallel3d.data_parallel.keys import CONFLICTS as DATA_PARALLEL
from parallel3d.data_parallel.keys import DataParallelConfig, ZeroKeys
from parallel3d.device.keys import CONFLICTS as DEVICE
from parallel3d.device.keys import DeviceKeys, PrecisionConfig
from parallel3d.experts.keys import CONFLICTS as EXPERTS
from parallel3d.experts.keys import ExpertLayoutKeys, ExpertsConfig
from parallel3d.faults.keys import PreflightKeys, RecoveryConfig
from parallel3d.loop.keys import CONFLICTS as LOOP
from parallel3d.loop.keys import DEFAULT_STEPS, LENGTHS, ProfileConfig, StepKeys, TrainConfig
from parallel3d.metrics.keys import LoggerConfig
from parallel3d.models.keys import CONFLICTS as MODELS
from parallel3d.models.keys import AttentionKeys, LayerKeys, ModelConfig
from parallel3d.optim.keys import CONFLICTS as OPTIM
from parallel3d.optim.keys import WARM_UPS, OptimConfig
from parallel3d.run.keys import LaunchConfig, RunKeys
from parallel3d.schedules.keys import CONFLICTS as SCHEDULES
from parallel3d.schedules.keys import ScheduleConfig
from parallel3d.tensor_parallel.keys import CONFLICTS as TENSOR_PARALLEL
from parallel3d.tensor_parallel.keys import LossConfig, TensorParallelConfig


# A dataclass takes the fields of its last base first, so the bases are listed in reverse.
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
    ExpertLayoutKeys,
    LayoutKeys,
):
    """All keys of a run. Its world size is tp × pp × cp × dp."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    moe: ExpertsConfig = field(default_factory=ExpertsConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    ddp: DataParallelConfig = field(default_factory=DataParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    @property
    def replica_size(self) -> int:
        """Returns the number of ranks of one data-parallel replica."""
        return self.tp * self.cp * self.pp

    @property
    def world_size(self) -> int:
        """Returns the number of ranks of the run, or of one replica while dp is null."""
        return self.replica_size * (self.dp or 1)

    @property
    def padded_seq_length(self) -> int:
        """Returns the length of a sample, including the padding for context parallelism."""
        return padded_length(self.model.seq_length, self.cp, self.rank_multiple)

    @property
    def local_seq_length(self) -> int:
        """Returns the number of tokens of a sample on each context-parallel rank.

        With sp, tensor-parallel ranks split these tokens further.
        """
        return self.padded_seq_length // self.cp

    @property
    def rank_multiple(self) -> int:
        """Returns the number that must divide `local_seq_length`."""
        return self.tp * self.tensor_parallel.chunks if self.sp else 1

    @property
    def mlp_chunks(self) -> int:
        """Returns the number of chunks in which a recomputed MLP runs."""
        most = self.mlp_chunk_tokens
        return 1 if most is None else -(-self.micro_batch_size * self.local_seq_length // most)

    @property
    def num_microbatches(self) -> int:
        """Returns the number of micro-batches of a data-parallel rank in a step.

        Raises ValueError while dp is null.
        """
        return self.microbatches_of(self.global_batch_size)

    def microbatches_of(self, batch: int) -> int:
        """Returns `num_microbatches` for a step of `batch` sequences.

        Raises ValueError while dp is null.
        """
        if self.dp is None:
            raise ValueError("dp is not known yet: call check_config first")
        return batch // (self.micro_batch_size * self.dp)

    @property
    def batch_sizes(self) -> BatchSizes:
        """Returns the global batch sizes of a checked configuration."""
        schedule = self.train.batch_schedule or {0: self.global_batch_size}
        return BatchSizes.of(schedule)

    @property
    def budget(self) -> int | None:
        """Returns the number of samples in `train.tokens` tokens, or None if the key is null."""
        tokens = self.train.tokens
        return None if tokens is None else -(-math.ceil(tokens) // self.model.seq_length)

    @property
    def train_steps(self) -> int:
        """Returns the number of steps of a new run; `Length` has that of a resumed run.

        Raises ValueError for `train.epochs`, which `loader.with_length` converts to steps.
        """
        if self.budget is not None:
            return self.batch_sizes.steps(self.budget)
        if self.train.epochs is not None:
            raise ValueError("the steps of train.epochs are known when the data is open")
        return self.train.steps or DEFAULT_STEPS


# Sections of subcommands, which the config.yaml of earlier versions contains.
OPTIONS = ("verify", "topology", "bench", "calibrate", "generate", "eval", "dryrun", "plan")
# Conflicts between settings, in the order in which they are checked.
CONFLICTS = (
    *MODELS,
    *EXPERTS,
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
# Groups of mutually exclusive keys. A key on the command line resets the other keys of its group,
# which a preset may set.
ALTERNATIVES = (LENGTHS, WARM_UPS)


def sections_of(schema: type[Config]) -> dict[str, type]:
    """Returns the sections of a schema and their dataclasses, by name."""
    found: dict[str, type] = _sections_of(cast(Any, schema))
    return found


@functools.cache
def _sections_of(schema: type[Config]) -> dict[str, type]:
    return {n: type(value) for n, value in vars(schema()).items() if is_dataclass(value)}


def register_schema(schema: type[Config] = Config) -> None:
    """Registers a schema with Hydra under the name `schema`; may be called repeatedly.

    `schema` is the first entry in the defaults of conf/config.yaml.
    """
    from hydra.core.config_store import ConfigStore  # imported here, as workers need no Hydra
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    there = store.repo.get("schema.yaml")
    # Building the node takes a quarter as long as composing, so it is built only once.
    if there is None or OmegaConf.get_type(there.node) is not schema:
        store.store(name="schema", node=schema)


def conf_dir() -> Path:
    """Returns the folder `conf`, which is in the package, or next to it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"
