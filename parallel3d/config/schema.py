"""The whole configuration: every key with its default, range and meaning, declared once.

Hydra composes `conf/` over these dataclasses, `docs/configuration.md` is generated from them, and
`config.checks` checks a whole configuration. Without torch, so that a bad key is refused at once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from parallel3d.config.cluster import (
    BenchConfig,
    CalibrateConfig,
    ClusterConfig,
    TopologyConfig,
)
from parallel3d.config.data import DataConfig
from parallel3d.config.engines import (
    CheckpointConfig,
    ContextParallelConfig,
    DryrunConfig,
    EvalConfig,
    GenerateConfig,
    LossConfig,
    PlanConfig,
    PrecisionConfig,
    RecoveryConfig,
    ScheduleConfig,
    TensorParallelConfig,
)
from parallel3d.config.run import (
    DEFAULT_STEPS,
    BatchSizes,
    DataParallelConfig,
    LaunchConfig,
    LoggerConfig,
    ProfileConfig,
    TrainConfig,
    VerifyConfig,
)
from parallel3d.config.sections import (
    AUTO,
    KERNELS,
    PARTS,
    WORDS,
    ModelConfig,
    OptimConfig,
    key,
    padded_length,
    wrong_parts,
)

__all__ = [
    "SECTIONS",
    "BenchConfig",
    "CalibrateConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ContextParallelConfig",
    "DataConfig",
    "DataParallelConfig",
    "DryrunConfig",
    "GenerateConfig",
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
    "TopologyConfig",
    "TrainConfig",
    "VerifyConfig",
    "conf_dir",
    "register_schema",
]


@dataclass
class Config:
    """A whole run. Sizes of the dimensions: world size = tp × pp × cp × dp."""

    tp: int = key(1, "tensor-parallel size", minimum=1, megatron="--tensor-model-parallel-size")
    pp: int = key(1, "pipeline-parallel size", minimum=1, megatron="--pipeline-model-parallel-size")
    dp: int | None = key(
        None, "data-parallel size; null: what is left of the world size", minimum=1
    )
    cp: int = key(1, "context-parallel size", minimum=1, megatron="--context-parallel-size")
    sp: bool = key(
        False,
        "sequence parallelism inside the tensor group; with tp=1 there is nothing to split",
        megatron="--sequence-parallel",
    )
    vpp: int = key(
        1,
        "model chunks per pipeline rank",
        minimum=1,
        megatron="--num-virtual-stages-per-pipeline-rank",
    )
    zero: int = key(
        0,
        "ZeRO stage (Rajbhandari et al. 2020): 1 shards the optimizer's state over dp, 2 the "
        "gradients too, 3 the parameters too",
        minimum=0,
        maximum=3,
        megatron="--use-distributed-optimizer",
        differs="--use-distributed-optimizer is zero=1",
    )
    recompute: Any = key(  # noqa: RUF009
        "none",
        "parts of a layer that the backward makes again, as [norm,activation]: norms' results, "
        "the MLP's non-linearity (mlp: the GEMM before it too), attention between its projections, "
        "the whole layer; selective is [attention] (Korthikanti et al. 2022 §5), full is [layer]",
        choices=tuple(WORDS),
        list_of=PARTS,
        wrong=wrong_parts,
        megatron="--recompute-granularity",
    )
    recompute_layers: list[int] | None = key(  # noqa: RUF009
        None,
        "how many layers of a stage do so, its first ones: [2] on every stage, or a number for "
        "each, as the first stages hold most activations: [3,1,0,0]; null: all",
        megatron="--recompute-num-layers",
        differs="one number there, with --recompute-method=block",
    )
    mlp_chunk_tokens: int | None = key(
        None,
        "where the MLP is recomputed: tokens of a micro-batch whose MLP runs at a time, so that "
        "its inner activations never exist for all; null: all",
        minimum=1,
    )
    offload_layers: list[int] | None = key(  # noqa: RUF009
        None,
        "how many layers of a stage move what they keep for the backward to pinned host memory, "
        "its first ones: [8] on every stage, or a number for each; null: none",
        megatron="--cpu-offloading-num-layers",
        differs="one number there, with pp=1 alone",
    )
    micro_batch_size: int = key(
        4, "sequences per forward pass", minimum=1, megatron="--micro-batch-size"
    )
    global_batch_size: int = key(
        16,
        "sequences per optimizer step, over all ranks",
        minimum=1,
        megatron="--global-batch-size",
    )
    seed: int = key(
        1234, "weights and sample order are functions of it", minimum=0, megatron="--seed"
    )
    run: str | None = key(
        None,
        "name of the run; null makes one",
        megatron="--save",
        differs="there a folder; here the name of a folder inside runs_dir",
    )
    runs_dir: str = key("runs", "folder of all runs")
    init_from: str | None = key(
        None,
        "weights of a new run: another run (its newest whole checkpoint; run@500 for that of step "
        "500), the folder of a run or of a checkpoint, or a Hugging Face folder; model and "
        "tokenizer come along",
        megatron="--finetune",
        differs="there of --load, beside all sizes of its model",
    )
    init_optimizer: bool = key(
        False,
        "init_from a run: the optimizer's state, the number of updates and the loss scale too",
        megatron="--no-load-optim",
        differs="the opposite; there --finetune never reads it",
    )
    device: str = key(
        "auto",
        "where to compute; auto: on GPUs (CUDA or ROCm) if each rank has one, else on the CPU; "
        "simulated: an accelerator simulated on the CPU, which finds races and host waits: for "
        "tests, slow",
        choices=("auto", "cpu", "cuda", "simulated"),
    )
    compile: bool = key(
        False,
        "blocks through TorchInductor: a faster step after a slower first one; needs a C++ "
        "compiler on CPU, Triton on CUDA",
    )
    deterministic: bool = key(
        False,
        "on GPUs, kernels that add in a fixed order: the same layout then gives the same bits, as "
        "it always does on CPU; slower",
        megatron="--deterministic-mode",
        differs="there it also refuses settings that are not deterministic",
    )
    attention_kernel: str = key(
        AUTO,
        "kernel of attention; auto: PyTorch's choice, but not cuDNN on a B200 where a rank has "
        "fewer than 8 key-value heads (tp divides them), as PyTorch issue 193893 reports wrong "
        "results; math writes the scores out; fa3, fa4: FlashAttention 3 or 4 where it is "
        "installed; training with model.dropout has a formula of its own",
        choices=KERNELS,
        megatron="--attention-backend",
        differs="there flash, fused, unfused, local or auto, of Transformer Engine",
    )
    layout: str = key(
        "given",
        "train: auto takes the planner's best layout that fits, by what cluster= tells of the "
        "machine; what is typed of tp, cp, pp, dp, vpp, micro_batch_size, schedule, recompute and "
        "zero holds",
        choices=("given", "auto"),
    )
    placement: str = key(
        "default",
        "which GPU holds which rank: default (the launcher's order), auto (searched), an order "
        "such as tp-cp-pp-dp, a tiling such as tp4-dp2-pp2-dp4, or file (rank_file)",
    )
    rank_file: str | None = key(
        None, "for placement=file: a line `rank host local_index` for each rank"
    )
    prompt: str = key("\n", "generate: the text to continue, taken as it is typed")
    preflight: bool = key(False, "probe every group before step 1 and name what is slow")
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
        # Keys are text in a manifest, and 1e9 is a float.
        return BatchSizes(tuple((int(Fraction(str(k))), size) for k, size in schedule.items()))

    @property
    def train_steps(self) -> int:
        """Steps of the run. Raises ValueError for epochs, before `loader.with_length`."""
        train = self.train
        if train.tokens is not None:
            return self.batch_sizes.steps(-(-math.ceil(train.tokens) // self.model.seq_length))
        if train.epochs is not None:
            raise ValueError("the steps of train.epochs are known when the data is open")
        return train.steps or DEFAULT_STEPS


SECTIONS = tuple(
    f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default_factory)
)


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
