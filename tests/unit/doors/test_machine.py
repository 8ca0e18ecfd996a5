"""Tests CPUs and memory within the limits of a container or job, by files of the kernel.

Each row is a tree of files from a real machine: /proc/self/cgroup, /proc/self/mountinfo and the
files of groups.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from parallel3d.host import quotas
from parallel3d.host.quotas import available_cores, available_memory, memory_in_all
from parallel3d.run import worker

CORES = 64  # number of cores of the machine
GIB = 1 << 30
MEMINFO = f"MemTotal:       {512 << 20} kB\nMemFree: 3 kB\nMemAvailable:   {500 << 20} kB\n"
V2 = "41 31 0:38 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
CPU_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
MEMORY_V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
NO_LIMIT_V1 = "9223372036854771712\n"

Tree = dict[str, str]


def v2(groups: str, mountinfo: str = V2) -> Tree:
    return {"proc/self/cgroup": groups, "proc/self/mountinfo": mountinfo}


def files(folder: str, **given: str) -> Tree:
    """Returns the files of a group; __ is the dot of a name."""
    return {f"{folder}/{name.replace('__', '.', 1)}": text for name, text in given.items()}


def v1(
    cpu: str, memory: str, given: Tree, cpu_mount: str = CPU_V1, memory_mount: str = MEMORY_V1
) -> Tree:
    groups = f"9:name=systemd:/\n4:memory:{memory}\n2:cpu,cpuacct:{cpu}\n0::/\n"
    mounts = cpu_mount + memory_mount + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 c rw\n"
    return {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts} | given


GROUP, CPU1, MEM1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/memory"

# Each row: the tree, cores, GiB in all, GiB free.
MACHINES: dict[str, tuple[Tree, int, float, float]] = {
    "nothing is known": ({}, 64, 512, 500),
    "no group": (v2("0::/\n"), 64, 512, 500),
    "a container in its own namespace": (
        v2("0::/\n")
        | files(GROUP, cpu__max="400000 100000\n", memory__max=f"{8 * GIB}\n")
        | files(GROUP, memory__current=f"{3 * GIB}\n"),
        4,
        8,
        5,
    ),
    "max": (
        v2("0::/\n") | files(GROUP, cpu__max="max 100000\n", memory__max="max\n"),
        64,
        512,
        500,
    ),
    "a container without a namespace": (
        v2("0::/system.slice/docker-ab.scope\n")
        | files(f"{GROUP}/system.slice/docker-ab.scope", cpu__max="150000 100000\n"),
        1,
        512,
        500,
    ),
    "half a core": (v2("0::/\n") | files(GROUP, cpu__max="50000 100000"), 1, 512, 500),
    "another period": (v2("0::/\n") | files(GROUP, cpu__max="30000 10000"), 3, 512, 500),
    "a quota above the machine": (
        v2("0::/\n") | files(GROUP, cpu__max="9900000 100000"),
        64,
        512,
        500,
    ),
    "a job's limit above the step": (
        v2("0::/slurm/job_7/step_0/task_0\n")
        | files(f"{GROUP}/slurm/job_7/step_0", cpu__max="800000 100000", memory__max="max")
        | files(f"{GROUP}/slurm/job_7", cpu__max="max 100000", memory__max=str(64 * GIB))
        | files(f"{GROUP}/slurm/job_7", memory__current=str(60 * GIB)),
        8,
        64,
        4,
    ),
    "the narrowest of several": (
        v2("0::/a/b/c\n")
        | files(f"{GROUP}/a", cpu__max="1600000 100000", memory__max=str(32 * GIB))
        | files(f"{GROUP}/a/b", cpu__max="200000 100000", memory__max=str(100 * GIB))
        | files(f"{GROUP}/a/b/c", cpu__max="400000 100000", memory__max=str(48 * GIB)),
        2,
        32,
        32,
    ),
    "memory.high": (
        v2("0::/\n") | files(GROUP, memory__max=str(16 * GIB), memory__high=str(12 * GIB)),
        64,
        12,
        12,
    ),
    "pages of files can be dropped": (
        v2("0::/\n")
        | files(GROUP, memory__max=str(8 * GIB), memory__current=str(8 * GIB))
        | files(GROUP, memory__stat=f"anon 5\ninactive_file {2 * GIB}\nactive_file {GIB}\n"),
        64,
        8,
        3,
    ),
    "another group's quota": (
        v2("0::/mine\n") | files(f"{GROUP}/other", cpu__max="100000 100000"),
        64,
        512,
        500,
    ),
    "a group that the mount does not show": (
        v2("0::/../other\n") | files(GROUP, cpu__max="200000 100000"),
        2,
        512,
        500,
    ),
    "a mount of a part": (
        v2("0::/kube/pod/c1/inner\n", V2.replace(" / ", " /kube/pod/c1 ", 1))
        | files(GROUP, cpu__max="600000 100000")
        | files(f"{GROUP}/inner", cpu__max="max 100000"),
        6,
        512,
        500,
    ),
    "the host's mount beside the own": (
        v2("0::/\n", V2.replace(" / ", " /../../.. ", 1).replace("/sys/fs", "/host/sys/fs") + V2)
        | files(GROUP, cpu__max="400000 100000")
        | files("host/sys/fs/cgroup", cpu__max="max 100000"),
        4,
        512,
        500,
    ),
    "a mount of another part first": (
        v2("0::/job\n", V2.replace(" / ", " /other ", 1).replace("/sys/fs", "/mnt") + V2)
        | files(f"{GROUP}/job", cpu__max="300000 100000"),
        3,
        512,
        500,
    ),
    "a period of zero": (v2("0::/\n") | files(GROUP, cpu__max="400000 0"), 64, 512, 500),
    "a mount in a folder with a blank": (
        v2("0::/\n", V2.replace("/sys/fs/cgroup", "/sys/fs/my\\040groups"))
        | files("sys/fs/my groups", cpu__max="500000 100000"),
        5,
        512,
        500,
    ),
    "version 1": (
        v1(
            "/docker/ab",
            "/docker/ab",
            files(f"{CPU1}/docker/ab", cpu__cfs_quota_us="400000", cpu__cfs_period_us="100000")
            | files(f"{MEM1}/docker/ab", memory__limit_in_bytes=str(8 * GIB))
            | files(f"{MEM1}/docker/ab", memory__usage_in_bytes=str(6 * GIB))
            | files(f"{MEM1}/docker/ab", memory__stat=f"total_inactive_file {GIB}\n"),
        ),
        4,
        8,
        3,
    ),
    "version 1 without limits": (
        v1(
            "/",
            "/",
            files(CPU1, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
            | files(MEM1, memory__limit_in_bytes=NO_LIMIT_V1, memory__usage_in_bytes="77"),
        ),
        64,
        512,
        500,
    ),
    "version 1, a container that sees itself at the top": (
        v1(
            "/kubepods/pod1/c1",
            "/kubepods/pod1/c1",
            files(CPU1, cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
            | files(MEM1, memory__limit_in_bytes=str(4 * GIB)),
            CPU_V1.replace(" / ", " /kubepods/pod1/c1 ", 1),
            MEMORY_V1.replace(" / ", " /kubepods/pod1/c1 ", 1),
        ),
        2,
        4,
        4,
    ),
    "version 1, a limit above the mount": (
        v1(
            "/kubepods/pod1/c1",
            "/kubepods/pod1/c1",
            files(MEM1, memory__limit_in_bytes=NO_LIMIT_V1)
            | files(MEM1, memory__stat=f"hierarchical_memory_limit {2 * GIB}\n"),
            CPU_V1.replace(" / ", " /kubepods/pod1/c1 ", 1),
            MEMORY_V1.replace(" / ", " /kubepods/pod1/c1 ", 1),
        ),
        64,
        2,
        2,
    ),
    "version 1, the job's": (
        v1(
            "/slurm/uid_1/job_7/step_0",
            "/slurm/uid_1/job_7/step_0",
            files(f"{CPU1}/slurm/uid_1/job_7/step_0", cpu__cfs_quota_us="-1")
            | files(f"{CPU1}/slurm/uid_1/job_7", cpu__cfs_quota_us="300000")
            | files(f"{CPU1}/slurm/uid_1/job_7", cpu__cfs_period_us="100000")
            | files(f"{MEM1}/slurm/uid_1/job_7", memory__limit_in_bytes=str(16 * GIB)),
        ),
        3,
        16,
        16,
    ),
    "both versions": (
        {
            "proc/self/cgroup": "4:memory:/m\n0::/box\n",
            "proc/self/mountinfo": MEMORY_V1 + V2.replace("/cgroup rw", "/cgroup/unified rw"),
        }
        | files(f"{MEM1}/m", memory__limit_in_bytes=str(2 * GIB))
        | files(f"{GROUP}/unified/box", cpu__max="700000 100000"),
        7,
        2,
        2,
    ),
    "files that hold nothing": (
        v2("0::/\n") | files(GROUP, cpu__max="", memory__max="\n", memory__current=""),
        64,
        512,
        500,
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_limits_of_each_machine_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, cores, whole, free = MACHINES[name]
    monkeypatch.setattr(quotas, "cores", lambda: CORES)
    for path, text in {"proc/meminfo": MEMINFO, **tree}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = (available_cores(tmp_path), memory_in_all(tmp_path), available_memory(tmp_path))
    assert found == (cores, whole * GIB, free * GIB)


def test_without_limits_the_whole_machine_is_used(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == math.inf
    assert 0 < memory_in_all(tmp_path) < math.inf


def test_limits_of_this_machine_are_plausible() -> None:
    assert 1 <= available_cores() <= quotas.cores()
    assert 0 < available_memory() <= memory_in_all()


@pytest.mark.parametrize(
    ("within", "ranks", "environ", "threads"),
    [
        (4, 1, {}, 4),
        (4, 2, {}, 2),
        (1, 8, {}, 1),
        (CORES, 1, {}, None),  # without a quota, torch's own number of threads stays
        (4, 1, {"OMP_NUM_THREADS": "16"}, None),
    ],
)
def test_ranks_have_no_more_threads_than_the_quota_has_cores(
    within: int,
    ranks: int,
    environ: dict[str, str],
    threads: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "available_cores", lambda: within)
    monkeypatch.setattr(worker, "cores", lambda: CORES)
    assert worker.threads_within_quota(ranks, environ) == threads
