"""Keys of failures: how they are detected, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parallel3d.config.values import (
    FREE,
    key,
)


@dataclass
class RecoveryConfig:
    """Detection of failures, and reactions to them."""

    RESUME: ClassVar[str] = FREE
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


@dataclass
class PreflightKeys:
    """The check of the groups before the first step."""

    preflight: bool = key(
        False, "probe every group before step 1 and name what is slow", resume=FREE
    )
