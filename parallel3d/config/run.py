"""The keys of a run: gradient buckets, logs, length, profile, launch, verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from parallel3d.config.sections import key
from parallel3d.errors import nearest


@dataclass
class DataParallelConfig:
    """Gradient buckets and their reduction."""

    bucket_cap_mb: float | None = key(
        None,
        "MiB at which a gradient bucket closes, as in PyTorch's DDP; null: first 1, then 25, or "
        "128 on a GPU",
        above=0,
        megatron="--ddp-bucket-size",
        differs="there a number of parameters, here MiB of gradients",
    )
    overlap: bool = key(
        True,
        "reduce each bucket during the last backward",
        megatron="--overlap-grad-reduce",
        differs="off unless given there, on by default here",
    )
    hierarchical: bool = key(
        False,
        "where data-parallel groups straddle NVLink domains, reduce inside each domain first and "
        "then between domains; sums in another order, so not bit for bit what one level gives",
    )
    comm_hook: str = key(
        "none",
        "what travels for a gradient bucket: none (fp32 sums), bf16 (half the bytes, rounded) or "
        "powersgd (low-rank, with error feedback; Vogels et al. 2019)",
        choices=("none", "bf16", "powersgd"),
    )
    powersgd_rank: int = key(4, "rank of PowerSGD's approximation", minimum=1)
    powersgd_start: int = key(
        10, "steps of plain sums before PowerSGD begins (at least 2)", minimum=2
    )
    bucket_order: str = key(
        "model",
        "model: buckets in the reverse order of the model; measured: in the order in which "
        "gradients became ready in the first step",
        choices=("model", "measured"),
    )
    shard_size: int | None = key(
        None,
        "zero=2 and 3: ranks of dp that a copy of the model is sharded over, the rest are "
        "replicas (HSDP); null: all of dp",
        minimum=1,
    )
    reduce_every_microbatch: bool | None = key(
        None,
        "zero=2 and 3: reduce-scatter the gradients in every backward, so that none are held "
        "whole, or (false) add them up whole and reduce-scatter once a step; null: true under "
        "zero=3, false under zero=2",
    )

    def reduces_every_microbatch(self, zero: int) -> bool:
        """`reduce_every_microbatch` under a stage of ZeRO, 2 or 3, decided where it is null.

        Whoever takes stage 3 is short of memory, and whole gradients in fp32 take twice that of
        the bf16 parameters which it frees. Stage 2 keeps the parameters, and sends less.
        """
        if self.reduce_every_microbatch is None:
            return zero == 3
        return self.reduce_every_microbatch


LOGGERS = ("wandb", "tensorboard")


def wrong_loggers(name: object) -> str | None:
    """Returns None for a valid `logger.name`, else the nearest one, as typed."""
    if name == "none":
        return None
    if isinstance(name, str):
        return None if name in LOGGERS else nearest(name, ("none", *LOGGERS)) or "none"
    if not isinstance(name, (list, tuple)):
        return "none"
    near = dict.fromkeys(nearest(str(word), LOGGERS) for word in name)
    good = [word for word in near if word is not None]
    if good == list(name):
        return None
    return f"[{','.join(good)}]" if good else "none"


@dataclass
class LoggerConfig:
    """Where metrics go besides `metrics.jsonl`: `logger=wandb`, `logger=[wandb,tensorboard]`."""

    name: Any = key(  # noqa: RUF009
        "none",
        "logger or loggers; in a file, name: [wandb, tensorboard]",
        choices=("none", *LOGGERS),
        list_of=LOGGERS,
        wrong=wrong_loggers,
    )
    project: str | None = key(
        None, "W&B project; null: WANDB_PROJECT, or parallel3d", megatron="--wandb-project"
    )
    entity: str | None = key(
        None, "W&B user or team; null: WANDB_ENTITY, or the key's own", megatron="--wandb-entity"
    )
    group: str | None = key(None, "W&B group")
    job_type: str | None = key(None, "W&B job type, as train; null: WANDB_JOB_TYPE")
    notes: str | None = key(None, "W&B notes: a sentence on the run; null: WANDB_NOTES")
    tags: list[str] = key(  # noqa: RUF009
        [], "W&B tags"
    )
    mode: str = key(
        "auto",
        "auto: as WANDB_MODE says (offline, disabled); else online if a key is at hand",
        choices=("auto", "online", "offline"),
    )
    system_metrics: bool = key(
        False, "W&B also samples CPU, memory and GPUs of rank 0's host, every 15 s"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The loggers that `name` asks for."""
        words = (self.name,) if isinstance(self.name, str) else self.name
        return tuple(word for word in words if word != "none")


DEFAULT_STEPS = 600


@dataclass
class TrainConfig:
    """Length of the run, evaluation and logging."""

    steps: int | None = key(
        None,
        f"optimizer steps; null: as tokens or epochs says, else {DEFAULT_STEPS}",
        minimum=1,
        megatron="--train-iters",
    )
    tokens: float | None = key(
        None,
        "tokens to train on instead of a number of steps, masked ones too, rounded up to whole "
        "steps, as in 9.8e6 or 2e12",
        minimum=1,
        maximum=1e18,
        megatron="--train-samples",
        differs="there a number of samples, of model.seq_length tokens each",
    )
    epochs: float | None = key(
        None,
        "passes over the training part of the corpus instead of a number of steps, rounded up to "
        "whole steps; not for a blend",
        above=0,
    )
    batch_schedule: Any = key(  # noqa: RUF009
        None,
        "global batch by the samples read before a step, {0:16,1000:32}: 16, and 32 from 1000 "
        "samples on; it ends with global_batch_size; null: that one always",
        megatron="--rampup-batch-size",
        differs="there start, increment and samples; here any sizes",
    )
    eval_every: int = key(
        100,
        "evaluate every so many steps; 0: only at the end",
        minimum=0,
        megatron="--eval-interval",
    )
    eval_batches: int | None = key(
        4,
        "global batches of each validation set per evaluation, at most all of it; null: all; 0: "
        "no evaluation",
        minimum=0,
        megatron="--eval-iters",
        differs="the same, in global batches",
    )
    eval_only: bool = key(
        False,
        "evaluate the newest checkpoint of run=, append the figures to its evaluations.jsonl, and "
        "train nothing",
    )
    log_every: int = key(
        10,
        "without a terminal, print a line every so many steps",
        minimum=1,
        megatron="--log-interval",
    )
    progress: bool = key(True, "progress bar (on a terminal)")
    noise_scale: bool = key(
        False,
        "measure the gradient noise scale (McCandlish et al. 2018), the batch beyond which a "
        "larger one saves few steps: from the gradients of replicas, with dp=1 of micro-batches",
    )
    save_weights: bool = key(
        False, "write the first and the last weights, unsharded, as safetensors (small models)"
    )


def wrong_ranks(ranks: object) -> str | None:
    """Returns None for a valid `profile.ranks`, else the nearest one, as typed."""
    if ranks == "all":
        return None
    if not isinstance(ranks, (list, tuple)):
        return "all" if isinstance(ranks, str) else "[0]"
    good = [rank for rank in ranks if type(rank) is int and rank >= 0]
    return None if good and len(good) == len(ranks) else f"[{','.join(map(str, good or [0]))}]"


@dataclass
class ProfileConfig:
    """Steps under `torch.profiler`: `profile.steps=[10,12] profile.ranks=[0]`."""

    steps: list[int] | None = key(  # noqa: RUF009
        None,
        "first and last step to profile, both included; each rank of profile.ranks writes a Chrome "
        "trace into profile/ of the run directory; null or []: none",
        megatron="--profile --profile-step-start --profile-step-end",
        differs="--profile-step-start=10 --profile-step-end=12 is profile.steps=[11,12]: there "
        "steps count from 0 and the end is left out",
    )
    ranks: Any = key(  # noqa: RUF009
        [0],
        "whose steps",
        choices=("all",),
        list_of=("ranks",),
        wrong=wrong_ranks,
        megatron="--profile-ranks",
    )
    memory: bool = key(
        False,
        "on GPUs, also a snapshot of the allocator and what it did in these steps, for "
        "pytorch.org/memory_viz",
        megatron="--record-memory-history",
        differs="there of the whole run",
    )


@dataclass
class LaunchConfig:
    """Start and failure of local workers."""

    master_port: int = key(
        0,
        "port of the rendezvous; 0 picks a free one, under Slurm one by the job's number",
        minimum=0,
        maximum=65535,
    )
    ranks: int | None = key(
        None,
        "layout=auto: ranks to start on this host; null: one a GPU or core",
        minimum=1,
    )
    timeout_s: float = key(
        600.0,
        "seconds after which a stuck collective fails",
        above=0,
        megatron="--distributed-timeout-minutes",
        differs="minutes there, seconds here",
    )
    grace_s: float = key(
        60.0,
        "seconds that a signal (SIGTERM, SIGUSR1, Ctrl-C) leaves the ranks to end their step and "
        "save, before they are killed",
        above=0,
    )
    shared_memory: bool = key(
        True, "CPU ranks of one host exchange through shared memory; false: through the network"
    )
    nccl_high_priority: list[str] = key(  # noqa: RUF009
        ["tp", "cp", "pp"],
        "kinds of groups whose kernels get high-priority streams",
        megatron="--high-priority-stream-groups",
    )
    nccl_settings: list[str] = key(  # noqa: RUF009
        [],
        "of the groups of a kind: min_ctas, max_ctas or cga_cluster_size, as in dp.max_ctas:8",
        megatron="--nccl-communicator-config-path",
        differs="there the path of a YAML file that holds the same",
    )
    huge_pages: bool = key(
        True,
        "CPU ranks keep the memory that they free, in huge pages where the system offers them "
        "(Linux with glibc); false: they give large blocks back, slower and with less memory",
    )
    numa_binding: bool = key(
        True,
        "keep each rank on the CPUs of its GPU's NUMA node, unless whoever started it has chosen "
        "its CPUs already",
    )
    peak_tflops: float | None = key(
        None, "peak of one device for MFU; null: the datasheet's, or measured on CPU", above=0
    )


@dataclass
class VerifyConfig:
    """Options of `parallel3d verify`."""

    steps: int = key(5, "steps of each comparison", minimum=1)


class BatchSizes(NamedTuple):
    """Gives the global batch of every step, a function of the samples read before it.

    Attributes:
        entries: (first, size) with growing `first`, the first one 0: a step before which at least
            `first` samples were read takes `size`.
    """

    entries: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.entries]

    def at(self, samples: int) -> int:
        """Returns the size of the step before which `samples` were read."""
        return next(size for first, size in reversed(self.entries) if first <= samples)

    def steps(self, samples: int) -> int:
        """Returns the least number of steps that read `samples` or more."""
        steps = read = 0
        for (_, size), end in self._until():
            last = samples if end is None else min(end, samples)
            count = max(0, -(-(last - read) // size))
            steps, read = steps + count, read + count * size
        return steps

    def samples(self, steps: int) -> int:
        """Returns the samples that the first `steps` steps read."""
        read = 0
        for (_, size), end in self._until():
            count = steps if end is None else min(steps, max(0, -(-(end - read) // size)))
            steps, read = steps - count, read + count * size
        return read

    def _until(self) -> list[tuple[tuple[int, int], int | None]]:
        """Returns each entry with the number of samples at which the next one begins."""
        after = [first for first, _ in self.entries[1:]]
        return list(zip(self.entries, [*after, None], strict=True))
