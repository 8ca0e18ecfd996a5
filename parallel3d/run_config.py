"""Composes the schema of a run's configuration from the keys of every feature.

Each feature declares its keys in the `keys.py` of its folder. Hydra composes `conf/` over these
dataclasses, `docs/configuration.md` is generated from them, and `check_config` checks a whole
configuration by the `checks.py` of every feature, before any process group exists. Nothing here
imports torch, so that a bad key is refused at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from parallel3d.blueprint.checks import check_given, check_groups, data_parallel_size
from parallel3d.blueprint.keys import CONFLICTS as BLUEPRINT
from parallel3d.blueprint.keys import ClusterConfig, LayoutKeys, PlacementKeys
from parallel3d.checkpoint.keys import CONFLICTS as CHECKPOINT
from parallel3d.checkpoint.keys import CheckpointConfig, StartKeys
from parallel3d.config.fields import (
    check_conflicts,
    check_fields,
    show,
    values_of,
    with_values,
)
from parallel3d.config.length import PlannedLength
from parallel3d.config.values import (
    BatchSizes,
    Replicas,
    padded_length,
)
from parallel3d.context_parallel.checks import check_context_parallel
from parallel3d.context_parallel.keys import CONFLICTS as CONTEXT_PARALLEL
from parallel3d.context_parallel.keys import ContextParallelConfig
from parallel3d.data.checks import check_samples, check_validation
from parallel3d.data.keys import DataConfig
from parallel3d.data_parallel.checks import check_data_parallel
from parallel3d.data_parallel.keys import CONFLICTS as DATA_PARALLEL
from parallel3d.data_parallel.keys import DataParallelConfig, ZeroKeys
from parallel3d.device.checks import check_precision
from parallel3d.device.keys import CONFLICTS as DEVICE
from parallel3d.device.keys import DeviceKeys, PrecisionConfig
from parallel3d.errors import UserError
from parallel3d.experts.checks import check_expert_parallel, check_experts
from parallel3d.experts.keys import CONFLICTS as EXPERTS
from parallel3d.experts.keys import ExpertLayoutKeys, ExpertsConfig
from parallel3d.faults.keys import PreflightKeys, RecoveryConfig
from parallel3d.loop.checks import (
    check_batch,
    check_batch_schedule,
    check_profile,
)
from parallel3d.loop.keys import CONFLICTS as LOOP
from parallel3d.loop.keys import DEFAULT_STEPS, LENGTHS, ProfileConfig, StepKeys, TrainConfig
from parallel3d.metrics.keys import LoggerConfig
from parallel3d.models.checks import (
    check_kernels,
    check_layer_types,
    check_model,
    check_own_model,
)
from parallel3d.models.keys import CONFLICTS as MODELS
from parallel3d.models.keys import AttentionKeys, LayerKeys, ModelConfig
from parallel3d.models.repeats import spelled
from parallel3d.models.survey import TARGET, OwnModelConfig, survey_of, tree_of
from parallel3d.optim.checks import check_learning_rate, check_treatment
from parallel3d.optim.keys import CONFLICTS as OPTIM
from parallel3d.optim.keys import WARM_UPS, OptimConfig
from parallel3d.run.checks import check_run_name
from parallel3d.run.keys import LaunchConfig, RunKeys
from parallel3d.schedules.checks import (
    LayerCounts,
    check_no_count,
    check_schedule,
    check_schedule_of_batches,
)
from parallel3d.schedules.keys import CONFLICTS as SCHEDULES
from parallel3d.schedules.keys import ScheduleConfig
from parallel3d.tensor_parallel.checks import check_tensor_parallel
from parallel3d.tensor_parallel.keys import CONFLICTS as TENSOR_PARALLEL
from parallel3d.tensor_parallel.keys import LossConfig, TensorParallelConfig

AnyConfig = TypeVar("AnyConfig", bound="Config")


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

    @property
    def planned_length(self) -> PlannedLength:
        """Returns the length of a new run; raises ValueError for `train.epochs`."""
        return PlannedLength(self.batch_sizes, self.train_steps, self.budget)


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


def check_config(
    config: AnyConfig,
    world_size: int | None = None,
    *,
    own_samples: bool = False,
    may_resume: bool = False,
) -> AnyConfig:
    """Checks a whole configuration and returns a copy with derived values filled in.

    The derived values are `dp` (from `world_size`; 1 if both are None), `model.num_query_groups`,
    `model.ffn_hidden_size`, `model.max_position_embeddings`, `data.valid_fraction`,
    `data.document_mask`, and `train.steps` unless tokens or epochs are given. A list in `recompute`
    becomes text. A configuration that was returned by this function passes unchanged.

    Args:
        config: the configuration.
        world_size: number of ranks; None if it is not known.
        own_samples: whether the caller provides the samples, so that `data` is not checked.
        may_resume: whether the run may resume a checkpoint with another global batch. The number of
            steps that follows from `train.tokens` is then not known yet, and the caller calls
            `check_schedule_of_rate` later.

    Raises:
        UserError: the configuration is invalid. The sentence has the key, its value, the allowed
            values and the nearest one.
    """
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise UserError(f"a {kind} is not a Config; make one by OmegaConf.to_object or Config().")
    check_fields(config)
    check_plain(config)
    check_bound(config.model)
    check_given(config.layout, config.launch.ranks)
    tp = config.tp
    cp = config.cp
    pp = config.pp
    model = config.model
    train = config.train
    optim = config.optim
    tensor = config.tensor_parallel
    is_own = isinstance(model, OwnModelConfig)
    if is_own:
        check_own_model(config.recompute, lambda name: attrgetter(name)(config))
    else:
        check_model(model)
        check_experts(model)
        check_tensor_parallel(model, tensor.chunks, tp=tp, cp=cp, sp=config.sp)
    dp = data_parallel_size(world_size, tp=tp, pp=pp, cp=cp, dp=config.dp)
    derived = {"dp": dp, "data.document_mask": config.data.masks_documents}
    check_conflicts(
        CONFLICTS, lambda name: derived[name] if name in derived else attrgetter(name)(config)
    )
    if not is_own:
        check_layer_types(model)
        check_kernels(model, config.attention_kernel, config.delta_kernel)
    check_replicas(config, dp)
    style = config.context_parallel.style
    states = config.context_parallel.states
    check_context_parallel(model, style, tensor.attention, tp=tp, cp=cp, states=states)
    if not own_samples:
        check_samples(config.data, model.vocab_size)
        check_validation(config.data, train, optim.ema_decay, config.run)
    is_open = train.epochs is not None or (may_resume and train.tokens is not None)
    steps = None if is_open else config.train_steps
    check_learning_rate(optim, steps)
    check_treatment(optim, model)
    check_precision(config.precision)
    is_known = world_size is not None or config.dp is not None
    check_profile(config.profile, steps, config.replica_size * dp if is_known else None)
    check_run_name(config.run, config.runs_dir)
    check_groups(config.launch, config.cluster)
    values = {"dp": dp, "recompute": spelled(config.recompute)}
    return with_values(with_derived_keys(config), values)


def check_replicas(config: Config, dp: int) -> None:
    """Raises UserError unless experts, batches and their schedule can be divided over `dp`."""
    pp, vpp, batch, schedule = config.pp, config.vpp, config.global_batch_size, config.schedule
    check_expert_parallel(config.model.num_experts, config.ep, config.tp * config.cp * dp)
    replica = Replicas(config.micro_batch_size, dp)
    check_no_count(schedule.num_microbatches, replica)
    check_batch(batch, replica)
    layers = LayerCounts(
        num_layers=config.model.num_layers,
        layers_per_stage=schedule.layers_per_stage,
        recompute_layers=config.recompute_layers,
        offload_layers=config.offload_layers,
    )
    check_schedule(schedule, layers, pp=pp, vpp=vpp, count=batch // replica.multiple)
    sizes = config.train.batch_schedule
    if sizes is not None:
        check_batch_schedule(sizes, batch, replica)
        check_schedule_of_batches(sizes, schedule.name, pp, vpp, replica)
    check_data_parallel(config.ddp, dp=dp, cp=config.cp)


def with_derived_keys(config: AnyConfig) -> AnyConfig:
    """Returns a copy of the configuration in which null keys have the values that others imply."""
    model, train = config.model, config.train
    values = {
        "model.num_query_groups": model.kv_heads,
        "model.ffn_hidden_size": model.ffn_size,
        "model.max_position_embeddings": model.max_positions,
        "data.valid_fraction": config.data.held_out,
        "data.document_mask": config.data.masks_documents,
    }
    if train.tokens is None and train.epochs is None:
        values["train.steps"] = config.train_steps
    return with_values(config, values)


def check_bound(model: ModelConfig) -> None:
    """Raises UserError for keys of a user's own model that came in without the model itself."""
    if isinstance(model, OwnModelConfig):
        survey_of(model)
    elif model._target_ is not None or model.fields is not None:
        raise UserError(
            f"{TARGET}={show(model._target_)} and model.fields={show(model.fields)} are set by the "
            "command line and fit(model=…) alone: give fields as model.NAME=VALUE."
        )


def single_process(config: AnyConfig) -> AnyConfig:
    """Returns the configuration of the same training on one rank.

    More micro-batches replace the data-parallel replicas. The numbers of recomputed and offloaded
    layers of each stage are dropped, since they only save memory. The samples were checked with
    `config`. Raises UserError if one process cannot train the model.
    """
    one = dict.fromkeys(("tp", "pp", "dp", "cp", "vpp", "ep"), 1)
    of_stages = dict.fromkeys(("recompute_layers", "offload_layers"))
    alone = {"sp": False, "schedule": ScheduleConfig(), "profile": ProfileConfig()}
    return check_config(with_values(config, one | of_stages | alone), 1, own_samples=True)


def saved_tree(config: Config) -> dict[str, Any]:
    """Returns all keys as nested dicts, as a run saves them."""
    tree = dataclasses.asdict(dataclasses.replace(config, model=ModelConfig()))
    return tree | {"model": tree_of(config.model)}


def check_plain(config: Config) -> None:
    """Raises UserError for text that a reader of config.yaml would take for a reference."""
    for key, value in values_of(config).items():
        is_text_free = value is None or isinstance(value, (bool, int, float))
        if not is_text_free and "${" in json.dumps(value):
            raise UserError(
                f"{key}={show(value)} holds ${{, which config.yaml would take for a reference to "
                "another key; give text without it."
            )
