"""Draws machines: GPUs and drivers that work or not, masks, jobs, containers, slices, quotas of
cgroups.

Each host is composed of parts with known meanings, so its right answer (cpu, cuda, or a refusal) is
known before the package is asked.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from benchmarks.inputs.door_inputs.answers import REFUSAL, Input
from parallel3d.device.datasheets import find_device
from parallel3d.errors import UserError
from parallel3d.host import quotas
from parallel3d.host.devices import check_numerics, choose_device, gpu_of_rank, shared_gpu
from parallel3d.host.gpus import Answer, Gpu
from parallel3d.topology.cluster.discover import visible_gpus
from parallel3d.topology.cluster.slurm import job_nodes
from tests.tools.played_gpus import Driver, Host, cards, played

GIB = 1 << 30
SMI = (0, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4b)\n")
DEAD_SMI = (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
NONE_SMI = (0, "No devices were found\n")


@dataclass
class Parts:
    """Variables, device files and nvidia-smi of a host without usable GPUs.

    `meant`: something indicates that a GPU is intended; `masked`: a mask set by the user indicates
    it.
    """

    environ: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    smi: tuple[int, str] | None = None
    meant: bool = False
    masked: bool = False
    in_job: bool = False


def _add(rng: random.Random, parts: Parts) -> None:
    """Adds one part of real hosts, with its meaning."""
    number = str(rng.randint(1, 8))
    meaning: tuple[tuple[str, str, bool, bool], ...] = (
        # variable, value, whether a GPU is intended, whether a scheduler sets it
        ("SLURM_GPUS_ON_NODE", number, True, True),
        ("SLURM_JOB_GPUS", rng.choice(("0", "0,1", "4-7")), True, True),
        ("SLURM_STEP_GPUS", "0", True, True),
        ("SLURM_GPUS", rng.choice((number, f"a100:{number}")), True, True),
        ("SLURM_GPUS_PER_NODE", rng.choice((number, f"h100:{number}")), True, True),
        ("SLURM_GPUS_PER_TASK", "1", True, True),
        ("SLURM_TRES_PER_TASK", rng.choice(("cpu=4,gres/gpu=1", "gres/gpu:a100:1")), True, True),
        ("PBS_NGPUS", number, True, True),
        ("CUDA_VISIBLE_DEVICES", rng.choice(("0", "0,1", "GPU-4b2c", "MIG-17")), True, False),
        ("SLURM_TRES_PER_TASK", "cpu=4", False, False),
        ("SLURM_GPUS_ON_NODE", rng.choice(("", "0")), False, False),
        ("SLURM_CPUS_ON_NODE", "64", False, False),
        ("NVIDIA_VISIBLE_DEVICES", rng.choice(("all", "0", "void", "none", "")), False, False),
        ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility", False, False),
        ("CUDA_HOME", "/usr/local/cuda", False, False),
        ("CUDA_VERSION", "13.0.1", False, False),
        ("PBS_NGPUS", "0", False, False),
    )
    kind = rng.randrange(4)
    if kind < 2:
        name, value, meant, of_job = rng.choice(meaning)
        if name not in parts.environ:
            parts.environ[name] = value
            parts.masked |= name == "CUDA_VISIBLE_DEVICES"
            parts.meant |= meant and name != "CUDA_VISIBLE_DEVICES"
            parts.in_job |= of_job
    elif kind == 2:
        name = rng.choice(("dev/nvidia0", "dev/nvidia3", "dev/kfd", "dev/nvidiactl", "dev/dri"))
        parts.files.append(name)
        parts.meant |= name in ("dev/nvidia0", "dev/nvidia3", "dev/kfd")
    elif parts.smi is None:
        parts.smi = rng.choice((SMI, DEAD_SMI, NONE_SMI))
        parts.meant |= parts.smi is SMI


def _judged(host: Host, ranks: int, launched: bool, folder: Path, device: str = "auto") -> str:
    with played(host, folder):
        return choose_device(device, ranks, launched=launched).kind


def _without_gpus(rng: random.Random, folder: Path) -> Input:
    parts = Parts()
    for _ in range(rng.randrange(4)):
        _add(rng, parts)
    build = rng.choice(("cpu", "cuda", "cuda", "hip"))
    driver = rng.choice((None, Driver(100, ()))) if build == "cuda" else None
    hidden = rng.random() < 0.2
    if hidden:
        parts.environ["CUDA_VISIBLE_DEVICES"] = rng.choice(("", "-1", "NoDevFiles"))
    in_slurm = rng.random() < 0.2
    if in_slurm:
        parts.environ["SLURM_JOB_ID"] = str(rng.randrange(1, 99999))
    files, smi = tuple(parts.files), parts.smi
    host = Host(build, driver, files=files, smi=smi, environ=parts.environ)
    meant = parts.meant or (parts.masked and not hidden)
    ranks = rng.choice((1, 4))
    right = REFUSAL if meant and not (hidden and not parts.in_job and not in_slurm) else "cpu"
    return Input(
        f"torch {build}, driver {'none' if driver is None else 100}, {parts.environ}, {files}, "
        f"nvidia-smi {smi and smi[0]}",
        lambda: _judged(host, ranks, False, folder),
        right,
        common=right == "cpu",
    )


CODES = (*(1, 2, 3, 34, 36, 46, 101, 201, 209, 214, 222, 304, 700), *range(800, 811), 999)


def _broken_driver(rng: random.Random, folder: Path) -> Input:
    parts, code = Parts(), rng.choice(CODES)
    for _ in range(rng.randrange(3)):
        _add(rng, parts)
    parts.environ.pop("CUDA_VISIBLE_DEVICES", None)
    host = Host(driver=Driver(code), files=tuple(parts.files), environ=parts.environ)
    device, ranks = rng.choice((("auto", 1), ("auto", 8), ("cuda", 1), ("cpu", 8)))
    return Input(
        f"cuInit: {code}, device={device}, {ranks} ranks, {parts.environ}",
        lambda: _judged(host, ranks, False, folder, device),
        "cpu" if device == "cpu" else REFUSAL,
        common=device == "cpu",
    )


def _with_gpus(rng: random.Random, folder: Path) -> Input:
    count, ranks = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 4, 8, 16))
    launched, environ = rng.random() < 0.4, dict[str, str]()
    version = rng.choice((13000, 13000, 13010, 14000, 12080))
    seen, wrong = count, version < 13000
    mask = rng.random()
    if mask < 0.2:
        seen = rng.randint(1, count)
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, rng.sample(range(count), seen)))
    elif mask < 0.3:
        environ["CUDA_VISIBLE_DEVICES"] = f"0,{count + rng.randrange(9)}"
        wrong, seen = True, 1
    elif mask < 0.35:
        environ["CUDA_VISIBLE_DEVICES"] = "0,-1,1"
        seen = 1
    if rng.random() < 0.1:
        environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    few = ranks > seen and not launched and not environ.get("NCCL_MULTI_RANK_GPU_ENABLE")
    files = tuple(f"dev/nvidia{i}" for i in range(count))
    host = Host(driver=Driver(cards=cards(count), version=version), files=files, environ=environ)
    right = REFUSAL if wrong or few else "cuda"
    return Input(
        f"{count} GPUs, {ranks} ranks{' of a launcher' * launched}, CUDA {version}, {environ}",
        lambda: _judged(host, ranks, launched, folder),
        right,
        common=right == "cuda",
    )


def _rocm(rng: random.Random, folder: Path) -> Input:
    left = rng.choice((None, 1, 2, 8))
    environ = {} if left is None else {"ROCR_VISIBLE_DEVICES": ",".join(map(str, range(left)))}
    inner = rng.choice((None, [0], [1], [0, 1], [7]))
    name = rng.choice(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
    if inner is not None:
        environ[name] = ",".join(map(str, inner))
    there = left or 8
    wrong = inner is not None and max(inner) >= there
    if rng.random() < 0.15 and inner is not None:
        other = {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} - {name}
        environ[other.pop()] = str(max(inner) + 1)
        wrong = True
    seen = there if inner is None else len([i for i in inner if i < there])
    rocm: Answer | Exception = Answer(
        tuple(Gpu(f"GPU-{i}", "AMD Instinct MI300X") for i in range(seen))
    )
    if fails := rng.random() < 0.15:
        rocm = rng.choice(
            (ImportError("libamdhip64.so.7"), OSError("libroctx64.so"), RuntimeError("x"))
        )
    host = Host("hip", rocm=rocm, files=("dev/kfd",), environ=environ)
    right = REFUSAL if wrong or fails else "cuda"
    return Input(
        f"ROCm, {environ}, {rocm if fails else seen}",
        lambda: _judged(host, 1, False, folder),
        right,
        common=right == "cuda",
    )


def _shared(rng: random.Random, folder: Path) -> Input:
    """Draws ranks of a wrapper that exports CUDA_VISIBLE_DEVICES, correctly or not."""
    count = rng.choice((2, 4, 8))
    shown = [str(rank) for rank in range(count)]
    style = rng.choice(("own", "all", "twice", "first"))
    if style == "twice":
        a, b = rng.sample(range(count), 2)
        shown[a] = shown[b]
    elif style == "first":
        shown = ["0"] * count

    def take() -> str:
        seen = []
        for rank in range(count):
            environ = {} if style == "all" else {"CUDA_VISIBLE_DEVICES": shown[rank]}
            with played(Host(driver=Driver(), environ=environ), folder):
                choice = choose_device("auto", count, launched=True)
                index = rank % len(choice.gpus)
                seen.append(("h", gpu_of_rank(f"cuda:{index}", os.environ)))
        if sentence := shared_gpu(seen):
            raise UserError(sentence)
        return "cuda"

    right = "cuda" if style in ("own", "all") else REFUSAL
    text = f"{count} ranks that see {'all GPUs' if style == 'all' else shown}"
    return Input(text, take, right, common=right == "cuda")


WHOLE = {
    "NVIDIA A100-SXM4-80GB": ("a100", 108, 79), "NVIDIA A100-SXM4-40GB": ("a100", 108, 39),
    "NVIDIA A100 80GB PCIe": ("a100", 108, 79), "NVIDIA H100 80GB HBM3": ("h100", 132, 79),
    "NVIDIA H100 PCIe": ("h100_pcie", 114, 79), "NVIDIA H200": ("h200", 132, 139),
    "NVIDIA B200": ("b200", 148, 178), "NVIDIA L40S": ("l40s", 142, 44),
    "AMD Instinct MI300X": ("mi300x", 304, 191), "AMD Instinct MI325X": ("mi325x", 304, 255),
}  # fmt: skip


def _named(rng: random.Random, folder: Path) -> Input:
    name, (device, units, gib) = rng.choice(list(WHOLE.items()))
    style = rng.choice(("whole", "units", "mig", "vgpu", "unknown"))
    given, right = name, device
    if style == "units":
        units //= rng.choice((2, 4, 7, 8))
        right = ""
    elif style == "mig":
        given = f"{name} MIG {rng.choice(('1g.10gb', '2g.20gb', '3g.40gb', '7g.80gb'))}"
        right = ""
    elif style == "vgpu":
        chip = rng.choice(("A100", "A100D", "H100", "H100XM", "L40S", "L4", "A40", "H200"))
        size = rng.choice(("", "1-", "3-"))
        given = f"{rng.choice(('GRID', 'NVIDIA'))} {chip}-{size}{rng.choice((4, 10, 20, 80))}C"
        right = ""
    elif style == "unknown":
        given = rng.choice(("Tesla T4", "NVIDIA H20", "NVIDIA GeForce RTX 4090 Laptop GPU", "x"))
        right = ""

    def take() -> str:
        found = find_device(given, units, gib * GIB)
        return "" if found is None else found.name

    return Input(f"{given}, {units} units, {gib} GiB", take, right, common=True)


def _quota(rng: random.Random, folder: Path, number: Iterator[int]) -> Input:
    """Makes a tree of control groups with limits on some of them."""
    root = folder / f"machine{next(number)}"
    cores = rng.choice((2, 8, 64, 224))
    depth = rng.randrange(4)
    names = [
        rng.choice(("slurm", "job_7", "kubepods.slice", "docker-ab.scope", "a b"))
        for _ in range(depth)
    ]
    inside = rng.randint(0, depth)  # number of levels above the part that the mount shows
    version = rng.choice((1, 2))
    mount = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/cpu,cpuacct"
    memory = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    top = "/" + "/".join(names[:inside])
    kinds = (
        ("cgroup2 c rw", "cgroup2 c rw")
        if version == 2
        else ("cgroup c rw,cpu,cpuacct", "cgroup c rw,memory")
    )
    octal = top.replace(" ", "\\040")
    files = {
        "proc/meminfo": f"MemTotal: {256 << 20} kB\nMemAvailable: {200 << 20} kB\n",
        "proc/self/mountinfo": "".join(
            f"3 2 0:{i} {octal} /{where} rw - {kind}\n"
            for i, (where, kind) in enumerate(zip((mount, memory), kinds, strict=True))
        ),
        "proc/self/cgroup": (
            f"0::/{'/'.join(names)}\n"
            if version == 2
            else f"4:memory:/{'/'.join(names)}\n2:cpu,cpuacct:/{'/'.join(names)}\n0::/\n"
        ),
    }
    most, free = float(cores), 200.0
    for level in range(inside, depth + 1):
        below = "/".join(names[inside:level])
        period = rng.choice((100000, 50000))
        quota = rng.choice((None, None, 0.5, 1, 2, 4.5, 16))
        limit, used = rng.choice((None, None, 1, 4, 32)), rng.choice((0, 1))
        if quota is not None:
            most = min(most, quota)
        if limit is not None:
            free = min(free, float(limit - used))
        cpu, mem = (f"{where}/{below}".rstrip("/") for where in (mount, memory))
        if version == 2:
            files[f"{cpu}/cpu.max"] = (
                f"{'max' if quota is None else int(quota * period)} {period}\n"
            )
            files[f"{mem}/memory.max"] = f"{'max' if limit is None else limit * GIB}\n"
            files[f"{mem}/memory.current"] = f"{used * GIB}\n"
        else:
            files[f"{cpu}/cpu.cfs_quota_us"] = f"{-1 if quota is None else int(quota * period)}\n"
            files[f"{cpu}/cpu.cfs_period_us"] = f"{period}\n"
            huge = 9223372036854771712
            files[f"{mem}/memory.limit_in_bytes"] = f"{huge if limit is None else limit * GIB}\n"
            files[f"{mem}/memory.usage_in_bytes"] = f"{used * GIB}\n"

    def take() -> tuple[int, float]:
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        with patch.object(quotas, "cores", lambda: cores):
            return quotas.available_cores(root), quotas.available_memory(root) / GIB

    text = f"version {version}, {files['proc/self/cgroup']!r}, mounted from {top}"
    return Input(text, take, (max(1, int(most)), free), common=True)


def _job(rng: random.Random, folder: Path) -> Input:
    """Makes a job of Slurm with one task per node, whose number of GPUs per node is asked for."""
    count = rng.choice((1, 2, 4, 8))
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    name, text = rng.choice(
        (
            ("SLURM_GPUS_ON_NODE", str(count)),
            ("SLURM_JOB_GPUS", ",".join(map(str, range(count)))),
            ("SLURM_JOB_GPUS", f"0-{count - 1}" if count > 1 else "0"),
            ("SLURM_GPUS_PER_NODE", f"h100:{count}"),
            ("SLURM_GPUS_PER_NODE", str(count)),
            ("SLURM_CPUS_ON_NODE", str(count)),
        )
    )
    right: object = [count, count] if "GPUS" in name else REFUSAL
    if rng.random() < 0.2 and "GPUS" in name:
        text = rng.choice(("0", "gpu:x", "many", "-1"))
        right = [1, 1] if (name, text) == ("SLURM_JOB_GPUS", "0") else REFUSAL
    environ[name] = text
    common = right is not REFUSAL
    return Input(f"{name}={text}", lambda: job_nodes(environ)[1], right, common)


def _numerics(rng: random.Random, folder: Path) -> Input:
    value, precision = rng.choice(("0", "1", "")), rng.choice(("fp32", "tf32", "bf16"))
    kind = rng.choice(("cuda", "cpu"))
    against = kind == "cuda" and (value, precision) in (("1", "fp32"), ("0", "tf32"))

    def take() -> str:
        with played(Host(driver=Driver()), folder):
            check_numerics(kind, precision, {"NVIDIA_TF32_OVERRIDE": value})
        return precision

    text = f"NVIDIA_TF32_OVERRIDE={value!r} precision={precision} on {kind}"
    return Input(text, take, REFUSAL if against else precision, common=not against)


def _mask(rng: random.Random, folder: Path) -> Input:
    """Makes a mask for nvidia-smi's list: numbers or UUIDs, of one kind of card or two."""
    mixed, by_place = rng.random() < 0.3, rng.random() < 0.5
    names = ["NVIDIA H200", "NVIDIA L4"] * 2 if mixed else ["NVIDIA H200"] * 4
    chosen = rng.sample(range(4), rng.randint(1, 4))
    uuids = rng.random() < 0.4
    words = [f"GPU-{i}b2c" if uuids else str(i) for i in chosen]
    right: object = chosen
    if rng.random() < 0.2:
        words.append(rng.choice(("9", "GPU-77", "MIG-1", "x", words[0])))
        right = REFUSAL
    if mixed and not by_place and all(word.isdecimal() for word in words):
        right = REFUSAL
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(words)}
    if by_place:
        environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    rows = "".join(f"GPU-{i}b2c-0, {name}, 143771\n" for i, name in enumerate(names))
    return Input(
        f"{environ}, {names}",
        lambda: visible_gpus(environ, 4, lambda command: rows),
        right,
        common=right is not REFUSAL,
    )


KINDS: tuple[Callable[[random.Random, Path], Input], ...] = (
    *(_without_gpus, _without_gpus, _without_gpus, _broken_driver, _with_gpus, _with_gpus),
    *(_rocm, _shared, _named, _job, _numerics, _mask),
)


def inputs(rng: random.Random, folder: Path) -> Iterator[Input]:
    """Yields hosts, names of GPUs, trees of control groups, jobs and masks, without end."""
    numbers = itertools.count()
    while True:
        kind = rng.randrange(len(KINDS) + 2)
        if kind >= len(KINDS):
            yield _quota(rng, folder, numbers)
            continue
        root = folder / f"host{next(numbers)}"
        with contextlib.suppress(FileExistsError):
            root.mkdir(parents=True)
        yield KINDS[kind](rng, root)
