"""Draws environments as launchers leave them: complete, incomplete, or of two launchers.

A start is drawn first: hosts, ranks of each, job, step, and which process this is. From it follow
the variables of a launcher and, independently, the right answer. Then the environment stays as it
is, or one variable is dropped, spoiled or overwritten by that of another launcher.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.inputs.door_inputs.answers import REFUSAL, Input
from parallel3d.run.launcher_environment import detect

Env = dict[str, str]
ALONE = "alone"


@dataclass(frozen=True)
class Start:
    """A start of ranks: `here[h]` ranks on host h; this process is the `local`-th of host
    `host`."""

    here: tuple[int, ...]
    host: int
    local: int
    job: int
    step: int

    @property
    def size(self) -> int:
        return sum(self.here)

    @property
    def rank(self) -> int:
        return sum(self.here[: self.host]) + self.local

    def name(self, host: int) -> str:
        return f"n{host + 1}"

    @property
    def nodes(self) -> str:
        return "n1" if len(self.here) == 1 else f"n[1-{len(self.here)}]"

    @property
    def counts(self) -> str:
        return ",".join(map(str, self.here))


def drawn(rng: random.Random, hosts: int | None = None, most: int = 8) -> Start:
    hosts = hosts or rng.choice((1, 1, 2, 2, 3, 5))
    even = rng.random() < 0.7
    each = rng.choice([n for n in (1, 2, 4, 8) if n <= most])
    here = tuple(each if even else rng.randint(1, most) for _ in range(hosts))
    if sum(here) == 1:
        here = (2,)
    host = rng.randrange(len(here))
    return Start(here, host, rng.randrange(here[host]), rng.randrange(1, 90_000), rng.randrange(4))


def torch(start: Start) -> Env:
    return {
        "RANK": str(start.rank),
        "WORLD_SIZE": str(start.size),
        "LOCAL_RANK": str(start.local),
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }


def torchrun(start: Start) -> Env:
    return torch(start) | {
        "LOCAL_WORLD_SIZE": str(start.here[start.host]),
        "GROUP_RANK": str(start.host),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def batch(start: Start) -> Env:
    """Returns variables of a batch script of the job; a step's variables overwrite some of them."""
    return {
        "SLURM_JOB_ID": str(start.job),
        "SLURM_JOB_NODELIST": start.nodes,
        "SLURM_NNODES": str(len(start.here)),
        "SLURM_JOB_NUM_NODES": str(len(start.here)),
        "SLURM_NTASKS": str(start.size),
        "SLURM_NPROCS": str(start.size),
        "SLURM_TASKS_PER_NODE": start.counts,
        "SLURM_JOB_CPUS_PER_NODE": ",".join(str(4 * n) for n in start.here),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "n1",
    }


def srun(start: Start) -> Env:
    return batch(start) | {
        "SLURM_STEP_ID": str(start.step),
        "SLURM_STEP_NODELIST": start.nodes,
        "SLURM_STEP_NUM_NODES": str(len(start.here)),
        "SLURM_STEP_NUM_TASKS": str(start.size),
        "SLURM_STEP_TASKS_PER_NODE": start.counts,
        "SLURM_PROCID": str(start.rank),
        "SLURM_LOCALID": str(start.local),
        "SLURM_NODEID": str(start.host),
        "SLURMD_NODENAME": start.name(start.host),
    }


def _mpi(prefix: str) -> Callable[[Start], Env]:
    def given(start: Start) -> Env:
        return {
            f"{prefix}_RANK": str(start.rank),
            f"{prefix}_SIZE": str(start.size),
            f"{prefix}_LOCAL_RANK": str(start.local),
            f"{prefix}_LOCAL_SIZE": str(start.here[start.host]),
            "PMIX_RANK": str(start.rank),
            "PMIX_NAMESPACE": f"prterun-n1-{start.job}@1",
            "MASTER_ADDR": "n1",
        }

    return given


def mpich(start: Start) -> Env:
    return {
        "PMI_RANK": str(start.rank),
        "PMI_SIZE": str(start.size),
        "MPI_LOCALRANKID": str(start.local),
        "MPI_LOCALNRANKS": str(start.here[start.host]),
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }


LAUNCHERS: dict[str, Callable[[Start], Env]] = {
    "torchrun": torchrun,
    "srun": srun,
    "srun with a hook": lambda start: srun(start) | torch(start),
    "srun with PMI": lambda start: (
        srun(start) | {"PMI_RANK": str(start.rank), "PMI_SIZE": str(start.size)}
    ),
    "mpirun": _mpi("OMPI_COMM_WORLD"),
    "mpiexec": mpich,
    "deepspeed": lambda start: torch(start) | {"LOCAL_SIZE": str(start.here[start.host])},
}
# Variables that place a process; most have an equivalent, so one may be missing.
NUMBERS = ("RANK", "SIZE", "PROCID", "LOCALID", "STEP_ID", "NTASKS", "NUM_TASKS", "NODES", "ADDR")
STRAY: Env = {
    "OMPI_MCA_btl": "tcp,self",
    "PMIX_MCA_gds": "hash",
    "PMI_NO_FORK": "1",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "CUDA_VISIBLE_DEVICES": "0",
    "NODE_RANK": "0",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "GROUP_RANK": "0",
    "HOSTNAME": "n1",
}


def answer(start: Start) -> tuple[int, int, int, int, str]:
    return start.rank, start.size, start.local, start.here[start.host], "n1"


def taken(environ: Env) -> object:
    place = detect(environ)
    if place is None:
        return ALONE
    here = place.local_world_size
    return place.rank, place.world_size, place.local_rank, here, place.master_addr


def _input(text: str, environ: Env, right: object, common: bool = False) -> Input:
    shown = " ".join(f"{name}={value}" for name, value in environ.items())
    return Input(f"{text}: {shown}", lambda: taken(environ), right, common)


def inputs(rng: random.Random, folder: Path) -> Iterator[Input]:
    kinds = (
        _true,
        _true,
        _alone,
        _dropped,
        _spoiled,
        _two,
        _left_out,
        _platform,
        _hosts,
        _uncounted,
        _emptied,
    )
    while True:
        yield rng.choice(kinds)(rng)


def _true(rng: random.Random) -> Input:
    """Returns an unchanged start, with other usual variables of an environment."""
    name = rng.choice(list(LAUNCHERS))
    start = drawn(rng)
    environ = LAUNCHERS[name](start)
    environ |= {k: STRAY[k] for k in rng.sample(list(STRAY), 3)}
    # torchrun's agents are tasks of a step, one per host
    if name == "torchrun" and rng.random() < 0.4:
        daemons = Start((1,) * len(start.here), start.host, 0, start.job, start.step)
        environ = (srun(daemons) if len(start.here) > 1 else batch(start)) | environ
    if name == "mpirun" and rng.random() < 0.3:
        environ = batch(start) | environ
    return _input(name, environ, answer(start), common=True)


def _alone(rng: random.Random) -> Input:
    """Returns a single process, however it was started."""
    one = Start((1,), 0, 0, rng.randrange(1, 90_000), 0)
    cpus = {"SLURM_TASKS_PER_NODE": "64", "SLURM_JOB_CPUS_PER_NODE": "64"}
    asked = {k: v for k, v in batch(one).items() if k not in ("SLURM_NTASKS", "SLURM_NPROCS")}
    choices: dict[str, Env] = {
        "nothing": {},
        "sbatch -n1": batch(one),
        "sbatch --exclusive": asked | cpus,
        "srun -n1": srun(one),
        "srun -n1 in an allocation": batch(drawn(rng)) | srun(one),
        "srun -n1 with a hook": srun(one) | torch(one),
        "mpirun -n 1": {**_mpi("OMPI_COMM_WORLD")(one)},
        "an image": torch(one),
        "one pod": {k: v for k, v in torch(one).items() if k != "LOCAL_RANK"},
        "one host of SkyPilot": {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"},
    }
    name = rng.choice(list(choices))
    environ = choices[name] | {k: STRAY[k] for k in rng.sample(list(STRAY), 3)}
    return _input(name, environ, ALONE, common=True)


def _torn(rng: random.Random, name: str) -> tuple[Start, Env, str]:
    start = drawn(rng)
    environ = LAUNCHERS[name](start)
    return start, environ, rng.choice([key for key in environ if key.endswith(NUMBERS)])


def _dropped(rng: random.Random) -> Input:
    """Drops one or two numbers; the start must be recognised or refused, but never run alone."""
    name = rng.choice(list(LAUNCHERS))
    start, environ, key = _torn(rng, name)
    environ.pop(key)
    gone = key
    if rng.random() < 0.3:
        more = rng.choice([key for key in environ if key.endswith(NUMBERS)])
        environ.pop(more)
        gone = f"{key}, {more}"
    right = answer(start)
    if "MASTER_ADDR" in gone and len(start.here) == 1:
        right = (*right[:4], "127.0.0.1" if "SLURM_JOB_ID" not in environ else "n1")
    if "LOCAL_WORLD_SIZE" in gone or "LOCAL_SIZE" in gone:
        right = (*right[:3], 0 if taken_local(environ) else right[3], right[4])
    return _input(f"{name} without {gone}", environ, right)


def taken_local(environ: Env) -> bool:
    """Returns whether no variable gives the ranks of this host."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "LOCALNRANKS", "TASKS_PER_NODE")
    return not any(key.endswith(names) for key in environ)


def _spoiled(rng: random.Random) -> Input:
    """Spoils or replaces a number, which must be refused wherever that can be detected."""
    name = rng.choice(list(LAUNCHERS))
    start, environ, key = _torn(rng, name)
    while key.endswith(("ADDR", "NODES", "NNODES")) or key in ("SLURM_NTASKS", "SLURM_NODEID"):
        start, environ, key = _torn(rng, name)
    values = ["x", "1.0", "-1", "٣", "1_0", "0x1", " ", "three", "1e3"]
    # otherwise it may really be this large
    if not key.endswith(("SIZE", "STEP_ID", "JOB_ID", "TASKS")):
        values.append(str(10**6))
    value = rng.choice(values)
    environ[key] = value
    seen = not ("TORCHELASTIC" in key or key in ("GROUP_RANK", "NODE_RANK"))
    right = REFUSAL if seen and key != "SLURM_NPROCS" else answer(start)
    return _input(f"{name}, {key}={value}", environ, right)


def _two(rng: random.Random) -> Input:
    """Mixes two launchers of two different starts, neither inside the other."""
    first, second = drawn(rng), drawn(rng)
    while second.size == first.size or 1 in (*first.here, *second.here):
        first, second = drawn(rng), drawn(rng)
    names = ("srun", "mpirun", "mpiexec", "deepspeed")
    a, b = rng.sample(names, 2)
    return _input(f"{a} and {b}", LAUNCHERS[a](first) | LAUNCHERS[b](second), REFUSAL)


# Variables of platforms that leave the launcher to the user, with the number of hosts.
PLATFORMS = (
    *("SKYPILOT_NUM_NODES={} SKYPILOT_NODE_RANK=0", "VC_TASK_INDEX=0 VC_WORKER_NUM={}"),
    *("DSTACK_NODES_NUM={} DSTACK_NODE_RANK=0", "LWS_GROUP_SIZE={} LWS_WORKER_INDEX=0"),
    *("PET_NNODES={}", "NNODES={} NODE_RANK=0", "PBS_JOBID=7.pbs PBS_NUM_NODES={}"),
    *("AWS_BATCH_JOB_NUM_NODES={} AWS_BATCH_JOB_NODE_INDEX=0", "NUM_NODES=1:{} NODE_RANK=0"),
)


def _platform(rng: random.Random) -> Input:
    """Returns one process on each host of a platform, without torchrun; with one host it is the
    only rank."""
    hosts, words = rng.choice((1, 1, 2, 8, 100)), rng.choice(PLATFORMS)
    environ = dict(word.split("=") for word in words.format(hosts).split())
    environ |= {k: STRAY[k] for k in rng.sample(list(STRAY), 2)}
    name = f"{hosts} hosts, {words}"
    return _input(name, environ, ALONE if hosts == 1 else REFUSAL, common=hosts == 1)


def _left_out(rng: random.Random) -> Input:
    """Returns a batch script or shell of several tasks without srun."""
    environ = batch(drawn(rng))
    for name in rng.sample(("SLURM_NPROCS", "SLURM_JOB_CPUS_PER_NODE", "SLURM_PROCID"), 2):
        environ.pop(name)
    return _input("no srun", environ, REFUSAL)


def _hosts(rng: random.Random) -> Input:
    """Returns numbers that count hosts."""
    hosts, ranks = rng.randint(2, 7), rng.choice((2, 4, 8))
    host = rng.randrange(1, hosts)
    environ = torch(Start((1,) * hosts, host, 0, 1, 0))
    environ["NPROC_PER_NODE"] = str(ranks)
    if rng.random() < 0.5 or (host % ranks == 0 and hosts % ranks == 0):
        environ.pop("LOCAL_RANK")
    if rng.random() < 0.3:
        listed = ",".join(f'"algo-{n}"' for n in range(hosts))
        return _input("SageMaker", {"SM_HOSTS": f"[{listed}]"}, REFUSAL)
    if rng.random() < 0.3:
        return _input("Kubeflow's trainer", {"PET_NNODES": str(hosts)}, REFUSAL)
    return _input("numbers of hosts", environ, REFUSAL)


def _uncounted(rng: random.Random) -> Input:
    """Returns only RANK, WORLD_SIZE and LOCAL_RANK: the ranks of a host must be counted, not
    guessed."""
    start = drawn(rng)
    right = (*answer(start)[:3], 0, "n1")
    return _input("an operator", torch(start), right, common=True)


def _emptied(rng: random.Random) -> Input:
    """Adds an empty variable, as templates leave them, which does not count."""
    start = drawn(rng)
    environ = srun(start) | dict.fromkeys(torch(start), "")
    return _input("srun with empty variables", environ, answer(start), common=True)
