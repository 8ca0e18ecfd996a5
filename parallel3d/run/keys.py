"""Keys of a run: its name, and how its ranks start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parallel3d.config.values import (
    FREE,
    key,
)


@dataclass
class RunKeys:
    """The name of a run, and the folder of all runs."""

    run: str | None = key(
        None,
        "name of the run; null: made from the time and the layout",
        resume=FREE,
        once=True,
    )
    runs_dir: str = key("runs", "folder of all runs", holds=Path, resume=FREE, once=True)


@dataclass
class LaunchConfig:
    """Start and failure of local workers."""

    RESUME: ClassVar[str] = FREE
    master_port: int = key(
        0,
        "port of the rendezvous; 0 picks a free one, or under Slurm derives one from the job's id",
        minimum=0,
        maximum=65535,
    )
    master_addr: str | None = key(
        None,
        "address of rank 0's host, for ranks started by srun or mpirun; null: the launcher's",
        once=True,
    )
    ranks: int | None = key(
        None,
        "layout=auto: ranks to start on this host; null: one per GPU or core",
        minimum=1,
        once=True,
    )
    spares: int = key(
        0,
        "nodes of a Slurm job that stay idle until one of the others fails, and then replace it "
        "without a requeue; they are not counted in the layout, and slurm/train.sbatch gives them",
        minimum=0,
        once=True,
    )
    timeout_s: float = key(
        600.0,
        "seconds after which a stuck collective fails",
        above=0,
    )
    grace_s: float = key(
        60.0,
        "seconds that the ranks have after a signal (SIGTERM, SIGUSR1, Ctrl-C) to end their step "
        "and save, before they are killed",
        above=0,
    )
    shared_memory: bool = key(
        True,
        "CPU ranks of one host exchange data through shared memory; false: through the network",
    )
    nccl_high_priority: list[str] = key(
        ["tp", "cp", "pp"],
        "kinds of groups whose kernels get high-priority streams",
    )
    nccl_settings: list[str] = key(
        [],
        "NCCL settings of one kind of group: min_ctas, max_ctas or cga_cluster_size, such as "
        "dp.max_ctas:8",
    )
    numa_binding: bool = key(
        True,
        "keep each rank on the CPUs of its GPU's NUMA node, unless its launcher has already "
        "bound it to CPUs",
    )
    peak_tflops: float | None = key(
        None, "peak of one device for MFU; null: the datasheet's, or measured on CPU", above=0
    )
