"""The keys of the engines: tensor parallelism, pipeline, precision, loss, checkpoints, recovery,
generation, dry run and plan."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.sections import key


@dataclass
class TensorParallelConfig:
    """Computation and communication of tensor-parallel layers; does not change results."""

    attention: str = key(
        "heads",
        "heads: each rank attends with its own heads; gather_qk: q and k are all-gathered first "
        "and v stays local (equal results, more bytes: for comparison)",
        choices=("heads", "gather_qk"),
    )
    chunks: int = key(
        1,
        "pieces in which sp gathers and scatters the sequence, each while the GEMM of the piece "
        "beside it runs (asynchronous tensor parallelism); 1: in one",
        minimum=1,
        megatron="--tp-comm-overlap",
        differs="there on or off, here the number of pieces",
    )


@dataclass
class ContextParallelConfig:
    """Splitting of sequences over cp ranks; does not change results."""

    style: str = key(
        "gather",
        "how attention reads the other ranks' tokens: gather all-gathers keys and values (Llama 3 "
        "report, §3.3.2); heads gives each rank all tokens of a part of the heads by all-to-all "
        "(Ulysses, Jacobs et al. 2023); ring passes keys and values from rank to rank (Liu et al. "
        "2023); auto takes the one that the planner prices lowest on cluster=",
        choices=("gather", "heads", "ring", "auto"),
        megatron="--cp-comm-type",
        differs="--cp-comm-type is context_parallel.style: p2p is ring, a2a heads, allgather "
        "gather",
    )
    balance: bool = key(
        True,
        "with data.document_mask: where documents make the attention of equal halves uneven, give "
        "each rank as many blocks of a sequence, by their work; not for style heads, which is even",
    )


@dataclass
class LossConfig:
    """The training loss. Held-out losses are always plain cross-entropies."""

    label_smoothing: float = key(
        0.0,
        "share of each target spread evenly over the vocabulary (Szegedy et al. 2016 §7)",
        minimum=0,
        below=1,
        megatron="--label-smoothing",
    )
    z_loss: float = key(
        0.0,
        "weight of the squared log of the softmax's sum (PaLM, Chowdhery et al. 2022 §5)",
        minimum=0,
    )
    chunk_tokens: int | None = key(
        None,
        "tokens whose logits exist at a time; null: as many as take 2 GiB on one GPU, or on a CPU "
        "64 MiB in fp32, but at least 1024",
        minimum=1,
    )


@dataclass
class CheckpointConfig:
    """Saving of checkpoints: `checkpoint.every=500 checkpoint.keep=3`."""

    every: int = key(
        500,
        "save every so many steps and at the end; 0: never",
        minimum=0,
        megatron="--save-interval",
    )
    keep: int = key(3, "newest checkpoints that are kept; older ones are removed", minimum=1)
    keep_every: int | None = key(
        None,
        "checkpoints of steps that are multiples of this are kept for good",
        minimum=1,
        megatron="--save-retain-interval",
    )
    async_save: bool = key(
        True,
        "write in the background while training goes on; may be typed checkpoint.async",
        megatron="--async-save",
    )
    load: bool = key(
        True, "resume from the run's newest good checkpoint; false refuses a run that exists"
    )


@dataclass
class RecoveryConfig:
    """Detection of failures, and reactions to them."""

    max_restarts: int = key(
        3,
        "times that the local ranks are started again after one of them died, from the newest good "
        "checkpoint (without one the run ends), and times that `after_skipped` rolls back",
        minimum=0,
    )
    max_skipped: int = key(
        10,
        "steps in a row whose gradients are not finite and that are skipped, before "
        "`after_skipped` happens",
        minimum=0,
    )
    after_skipped: str = key(
        "stop",
        "after too many skipped steps: stop, naming the first bad parameter, or roll back to the "
        "newest checkpoint and pass over the samples between",
        choices=("stop", "rollback"),
    )
    watchdog_s: float | None = key(
        None,
        "seconds without progress after which a hang is reported and the job ended; null: nine "
        "tenths of launch.timeout_s, before a collective's own time-out. Below 120 it is not for "
        "GPUs, which compile a kernel for each new shape",
        above=0,
    )
    spike_factor: float = key(
        3.0,
        "report a loss above so many times the median of the last 50 steps; 0: never",
        minimum=0,
    )
    drift_every: int = key(
        100,
        "every so many steps compare the parameters of data-parallel replicas by a hash; 0: never",
        minimum=0,
    )


WEIGHTS = "those of the steps, or ema: their average (optim.ema_decay)"


@dataclass
class GenerateConfig:
    """Options of `parallel3d generate`."""

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

    tasks: str | None = key(
        None,
        "jsonl, a row a context with choices and answer, or with a continuation; typed tasks=",
    )
    to: str | None = key(
        None, "file for the scores of all rows, as JSON; null: in eval/ of the run directory"
    )
    batch_tokens: int = key(8192, "tokens of a forward of one rank, padding included", minimum=1)
    step: int | None = key(None, "step of the checkpoint; null: the newest", minimum=0)
    weights: str = key("model", WEIGHTS, choices=("model", "ema"))


@dataclass
class DryrunConfig:
    """Options of `parallel3d dryrun`."""

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
    json: str | None = key(None, "file for everything shown and more, as JSON")


@dataclass
class PlanConfig:
    """Options of `parallel3d plan`."""

    html: str | None = key(None, "plan: file for the whole plan as one page, with pictures")


@dataclass
class ScheduleConfig:
    """The pipeline schedule, `schedule=1f1b`, and the output of `parallel3d schedule`."""

    name: str = key(
        "1f1b",
        "pipeline schedule; auto: the fastest on the clock, file: a table of one's own",
        choices=(
            *("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "v_half"),
            *("auto", "file"),
        ),
    )
    file: str | None = key(None, "for schedule=file: CSV, a row a rank, cells such as 0F3 or 1I2")
    layers_per_stage: list[int] | None = key(  # noqa: RUF009
        None,
        "layers of each stage, pp · vpp of them in the order of the model, e.g. [3,5]; null "
        "balances them by cost",
    )
    slices: bool | None = key(
        None,
        "with tp > 1 and no sp: each tensor-parallel rank sends its part of the sequence to the "
        "next stage, whose ranks gather the parts; null: on accelerators",
        megatron="--no-scatter-gather-tensors-in-pipeline",
        differs="--no-scatter-gather-tensors-in-pipeline is schedule.slices=false",
    )
    num_microbatches: int | None = key(
        None,
        "parallel3d schedule: micro-batches of a step, typed num_microbatches; null: what "
        "global_batch_size makes",
        minimum=1,
    )
    costs: list[float] = key(  # noqa: RUF009
        [1.0, 1.0, 1.0],
        "for auto and parallel3d schedule: time of a micro-batch in all layers of one rank: "
        "forward, gradient of the input, gradient of the weights",
    )
    hop: float = key(
        0.0, "for auto and parallel3d schedule: time of a message, in the unit of costs", minimum=0
    )
    of_model: bool = key(
        False,
        "parallel3d schedule: stages cost what those of `model` do, as they always do for auto in "
        "training: layers as they are split, and the head with its loss; an average rank's layers "
        "then take schedule.costs",
    )
    memory: float | None = key(
        None,
        "activations that auto may hold, of 1F1B's peak; null: 1, and the table of parallel3d "
        "schedule shows what more would give",
        above=0,
    )
    timeline: bool = key(
        False,
        "draw the third step of a start: when each pipeline rank computed what, measured and on "
        "the clock, as timeline.svg and, for Perfetto, timeline.json in the run directory",
    )
    svg: str | None = key(None, "parallel3d schedule: file for the timeline as SVG")
    csv: str | None = key(None, "parallel3d schedule: file for the schedule as a table of actions")
    json: str | None = key(None, "parallel3d schedule: file for the table of all schedules as JSON")


@dataclass
class PrecisionConfig:
    """Number formats: `precision=fp32`. Master weights and gradients are never below fp32."""

    name: str = key(
        "fp32",
        "compute type",
        choices=("fp64", "fp32", "tf32", "bf16", "fp16"),
        megatron="--fp16",
        differs="--fp16 is precision=fp16 and --bf16 is precision=bf16",
    )
    lm_cross_entropy: str = key(
        "fp32",
        "type in which the training loss is made of the logits: fp32, or (fp16) each logit, "
        "exponential, sum and loss rounded to fp16, with precision=fp16; held-out losses are fp32",
        choices=("fp32", "fp16"),
        megatron="--fp16-lm-cross-entropy",
        differs="--fp16-lm-cross-entropy is precision.lm_cross_entropy=fp16",
    )
    loss_scale: float | None = key(
        None,
        "fp16: a fixed loss scale; null: a dynamic one",
        above=0,
        megatron="--loss-scale",
    )
    initial_loss_scale: float = key(
        65536.0, "fp16: the dynamic scale at the start", above=0, megatron="--initial-loss-scale"
    )
    min_loss_scale: float = key(
        1.0, "fp16: floor of the dynamic scale", above=0, megatron="--min-loss-scale"
    )
    loss_scale_growth: float = key(2.0, "fp16: factor after a window without overflow", above=1)
    loss_scale_backoff: float = key(0.5, "fp16: factor after an overflow", above=0, below=1)
    loss_scale_window: int = key(
        1000,
        "fp16: steps in a row without overflow before the scale grows",
        minimum=1,
        megatron="--loss-scale-window",
    )
    loss_scale_hysteresis: int = key(
        2,
        "fp16: overflows in a row before the scale backs off",
        minimum=1,
        megatron="--hysteresis",
    )
