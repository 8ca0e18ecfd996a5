"""Declares the keys for detecting and handling failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parallel3d.config.values import (
    FREE,
    key,
)

# A rank or a wire is slow if it takes more than this multiple of the median time.
OUTLIER = 1.5


@dataclass
class RecoveryConfig:
    """Detection and handling of failures."""

    RESUME: ClassVar[str] = FREE
    max_restarts: int = key(
        3,
        "how often the local ranks may restart from the newest good checkpoint after one of them "
        "died (without a checkpoint, the run ends), and how often after_skipped=rollback may roll "
        "back",
        minimum=0,
    )
    max_skipped: int = key(
        10,
        "consecutive steps that may be skipped because their gradients are not finite, before "
        "`after_skipped` applies",
        minimum=0,
    )
    after_skipped: str = key(
        "stop",
        "after too many skipped steps, stop and name the first bad parameter, or roll back to the "
        "newest checkpoint and skip the samples in between",
        choices=("stop", "rollback"),
    )
    watchdog_s: float | None = key(
        None,
        "seconds without progress after which a hang is reported and the job ends; null: 0.9 × "
        "launch.timeout_s, so that it precedes a collective's own time-out. GPUs need at least "
        "120, because a kernel is compiled for each new shape",
        above=0,
    )
    heartbeat_s: float = key(
        5.0,
        "seconds between two signs of life of each node of a Slurm job, by which a dead node is "
        "noticed after 30 s; 0: none, so that Slurm or the watchdog notices it",
        minimum=0,
        maximum=10,
    )
    exclude_days: float = key(
        7.0,
        "days for which the run avoids a node of a Slurm job that has failed in it",
        minimum=0,
    )
    shrink: bool = key(
        False,
        "a Slurm job of slurm/train.sbatch that has lost nodes and has no spare left goes on with "
        "a smaller dp, until it is queued again for another reason",
        once=True,
    )
    spike_factor: float = key(
        3.0,
        "report a loss above this multiple of the median of the last 50 steps; 0: never",
        minimum=0,
    )
    node_days: float = key(
        264.0,
        "days between two failures of one node, by which checkpoint.every=auto expects those of "
        "the run until it has had three; 264 is that of Llama 3 on 2,048 nodes",
        above=0,
    )
    drift_every: int = key(
        100,
        "steps between checks, by a hash, that replicas have equal parameters; 0: never",
        minimum=0,
    )


@dataclass
class PreflightKeys:
    """Key that enables a check of all groups before the first step."""

    preflight: bool = key(
        False, "probe every group before step 1 and report slow ranks and links", resume=FREE
    )
