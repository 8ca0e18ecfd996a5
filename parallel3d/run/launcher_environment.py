"""Finds the rank of this process in its launcher's environment variables, without torch.

Each known launcher has a row that lists the variables with its numbers and those that identify the
start. The variables of all launchers in an environment must agree. Contradictory variables, and
traces of a launcher without its numbers, are refused: a wrong guess would start n separate runs, or
a single rank of a run that needs n.
"""

from __future__ import annotations

import ipaddress
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from parallel3d.errors import UserError
from parallel3d.files import text_of_file
from parallel3d.topology.cluster.slurm import (
    FIRST_SPECIAL_STEP,
    expand_hostlist,
    expand_tasks_per_node,
    host_of_rank_0,
)

Launcher = Literal["local", "torchrun", "slurm", "mpi"]
ReadFile = Callable[[str], str]
LOOPBACK = "127.0.0.1"
# The range of derived ports lies below Linux's range for outgoing connections.
FIRST_PORT, PORTS = 20000, 12768
NUMBER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class RankAssignment:
    """The rank that a launcher assigned to this process, and the address of rank 0.

    Attributes:
        local_world_size: number of ranks on this host; 0 if no variable gives it, so that the ranks
            must count themselves.
        job_id: Slurm's id of the job, which becomes a part of the run's name; None without Slurm.
        start: text that identifies this start on all of its ranks; "" if no variable identifies it.
    """

    launcher: Launcher
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    job_id: str | None = None
    start: str = ""

    def with_port(self, chosen: int) -> RankAssignment:
        """Returns the assignment with the port `chosen`, the value of launch.master_port.

        The port does not change if `chosen` is 0 or if torchrun has set a port.
        """
        if self.launcher == "torchrun" or chosen == 0:
            return self
        return replace(self, master_port=chosen)

    @property
    def prefix(self) -> str:
        """Returns the prefix of this start's keys in the ranks' store."""
        return f"{self.start or 'start'} of {self.world_size} ranks"

    @property
    def on_one_host(self) -> bool:
        return self.world_size == self.local_world_size


@dataclass(frozen=True)
class RankVariables:
    """The variables in which a launcher gives each process its rank and the number of ranks.

    Attributes:
        name: the launcher's name in messages.
        local_rank, local_size: variables with the number of the process on its host, and with the
            number of ranks there; the first one that is set counts.
        jobs: variables that identify the start, the preferred one first; without them, no port can
            be derived from the start.
        hosts: variable with the number of hosts, for a launcher without a variable for the ranks
            per host; "" for any other launcher.
    """

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    jobs: tuple[str, ...] = ()
    hosts: str = ""


MPI = (
    RankVariables(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    RankVariables(
        "mpiexec",  # the launcher of MPICH, Intel MPI and PALS
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        ("PALS_APID", "PMI_JOBID"),
    ),
    RankVariables(
        "flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        ("FLUX_TASK_LOCAL_ID",),
        (),
        ("FLUX_JOB_ID",),
        "FLUX_JOB_NNODES",
    ),
)
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Variables with the number of ranks per host. torchrun sets the first, and deepspeed the second.
TORCH_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
# Torch's agents and our own launcher set these for every rank. They override all other variables.
AGENTS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
RANKS_OF_A_HOST = ("PET_NPROC_PER_NODE", "NPROC_PER_NODE")  # set by Kubeflow and DLC for torchrun
# Azure's variables for the host of rank 0 in MPI jobs; the port in them is not ours.
AZURE_MASTERS = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")


@dataclass(frozen=True)
class Claim:
    """The numbers that one launcher's variables give this process.

    A number is None if no variable gives it.

    Attributes:
        words: the variables with their values, for messages.
        start: text that identifies the start; "" if no variable does.
    """

    words: str
    launcher: Launcher
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    start: str = ""

    def difference(self, other: Claim) -> str | None:
        """Describes the first number on which the two claims disagree; None if they agree."""
        mine = (self.size, self.rank, self.local_size, self.local_rank)
        theirs = (other.size, other.rank, other.local_size, other.local_rank)
        names = ("{} and {} ranks", "rank {} and {}", "{} and {} ranks on this host")
        for name, a, b in zip((*names, "local rank {} and {}"), mine, theirs, strict=True):
            if a is not None and b is not None and a != b:
                return name.format(a, b)
        return None


def detect(
    environ: Mapping[str, str],
    master_addr: str | None = None,
    master_port: int = 0,
    starts: int | None = 1,
    read: ReadFile = text_of_file,
) -> RankAssignment | None:
    """Returns the rank that a launcher gave this process; None if it starts its own ranks.

    A process starts its own ranks if no known launcher started it, or one started it alone.

    Args:
        environ: environment variables; empty ones are ignored.
        master_addr: launch.master_addr, which overrides the launcher's address of rank 0.
        master_port: launch.master_port, or 0.
        starts: number of ranks that this process would start itself; None if the subcommand runs in
            one process. Given a number, a process without a launcher must not leave out tasks or
            hosts that the user requested.
        read: returns the text of a file; raises OSError.

    Raises:
        UserError: a variable is missing, is not a number or contradicts another one; a launcher has
            left traces but no numbers; the address of rank 0 is unknown.
    """
    given = {name: value for name, value in environ.items() if value}
    if any(name in given for name in AGENTS) and {"RANK", "WORLD_SIZE"} & given.keys():
        return _of_agent(given, master_addr)
    step = _slurm_step(given)
    torch = _torch(given)
    claims = [claim for claim in (step, torch, *_mpi(given)) if claim is not None]
    claims += _ranks_alone(given)
    claims = _without_outer(step, claims, given)
    for place, claim in enumerate(claims):
        for other in claims[:place]:
            if (difference := other.difference(claim)) is not None:
                raise UserError(
                    f"{other.words} and {claim.words} contradict each other ({difference}): unset "
                    "those of the launcher that did not start this process"
                )
    if _first(claim.size for claim in claims) == 1:
        # An image may set WORLD_SIZE=1 for all of its processes.
        if starts is not None and all(claim is torch for claim in claims):
            _refuse_left_out(given, starts, read)
        return None
    if not claims:
        _refuse_lonely_marks(given)
        if starts is not None:
            _refuse_left_out(given, starts, read)
        return None
    return _assigned(
        given, claims, step if step in claims else None, master_addr, master_port, read
    )


def prints_for_all(environ: Mapping[str, str]) -> bool:
    """Returns whether this process prints for all ranks, because it is rank 0 or runs alone."""
    names = ("RANK", "SLURM_PROCID", *RANKS_ALONE, *(row.rank for row in MPI))
    return not any(NUMBER.fullmatch(environ.get(n, "")) and int(environ[n]) > 0 for n in names)


def _first(values: Iterable[int | None]) -> int | None:
    return next((value for value in values if value is not None), None)


def _of_agent(given: Mapping[str, str], master_addr: str | None) -> RankAssignment:
    """Returns the rank that torchrun or the local launcher assigned to this process."""
    torch = _torch(given)
    _check_torch(given, TORCH)
    assert torch is not None and torch.rank is not None and torch.size is not None
    assert torch.local_rank is not None
    if master_addr not in (None, given["MASTER_ADDR"]) and "TORCHELASTIC_RUN_ID" in given:
        raise UserError(
            f"launch.master_addr={master_addr} is for ranks that srun or mpirun starts, but "
            f"torchrun has set MASTER_ADDR={given['MASTER_ADDR']}: start torchrun with "
            f"--master-addr={master_addr}"
        )
    _check_address("MASTER_ADDR", given["MASTER_ADDR"])
    name = given.get("TORCHELASTIC_RUN_ID", "none")
    return RankAssignment(
        "torchrun",
        torch.rank,
        torch.local_rank,
        torch.size,
        torch.local_size or 0,
        given["MASTER_ADDR"],
        _number(given, "MASTER_PORT", 1, 65535, "the range of ports"),
        start="" if name == "none" else f"torchrun's run {name}",
    )


# Sets of variables


def _torch(given: Mapping[str, str]) -> Claim | None:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, some of which may be missing."""
    if not {"RANK", "WORLD_SIZE"} & given.keys():
        return None  # some platforms set LOCAL_RANK and MASTER_ADDR for any process
    size = _number(given, "WORLD_SIZE", 1) if "WORLD_SIZE" in given else None
    world = f"WORLD_SIZE={size}"
    most = None if size is None else size - 1
    rank = _number(given, "RANK", 0, most, world) if "RANK" in given else None
    local_size, here = None, world
    if named := next((name for name in TORCH_LOCAL_SIZE if name in given), None):
        local_size = _number(given, named, 1, size, world)
        most, here = local_size - 1, f"{named}={local_size}"
    local_rank = _number(given, "LOCAL_RANK", 0, most, here) if "LOCAL_RANK" in given else None
    if rank is not None and local_rank is not None and local_rank > rank:
        raise UserError(
            f"LOCAL_RANK={local_rank} contradicts RANK={rank}: the ranks of a host are numbered "
            "in order, so a local rank cannot exceed the rank"
        )
    words = " ".join(f"{name}={given[name]}" for name in TORCH[:2] if name in given)
    return Claim(words, "torchrun", rank, size, local_rank, local_size)


def _check_torch(given: Mapping[str, str], needed: tuple[str, ...]) -> None:
    """Raises UserError unless all `needed` variables are set.

    The caller has checked that RANK or WORLD_SIZE is set.
    """
    missing = [name for name in needed if name not in given]
    if not missing:
        return
    if missing[0] == "LOCAL_RANK":
        raise UserError(
            f"RANK={given['RANK']} and WORLD_SIZE={given['WORLD_SIZE']} are set but LOCAL_RANK is "
            "not, as on platforms where they count hosts (Kubeflow, DLC): start with torchrun "
            "--nnodes=$WORLD_SIZE --node-rank=$RANK --nproc-per-node=8 --master-addr=$MASTER_ADDR "
            "--master-port=$MASTER_PORT -m parallel3d …; if they count ranks, export LOCAL_RANK "
            "and LOCAL_WORLD_SIZE, too"
        )
    there = "RANK" if "RANK" in given else "WORLD_SIZE"
    raise UserError(
        f"{there}={given[there]} is set but {missing[0]} is not: start with torchrun, "
        f"set all of {', '.join(TORCH)}, or unset {there}"
    )


def _refuse_lonely_marks(given: Mapping[str, str]) -> None:
    """Raises UserError for traces of torchrun without RANK and WORLD_SIZE.

    LOCAL_RANK=0 alone does not count: some platforms set it for any process.
    """
    marks = [name for name in AGENTS if name in given]
    local = given.get("LOCAL_RANK", "0")
    if local != "0" or ("LOCAL_RANK" in given and _count(given, *TORCH_LOCAL_SIZE) > 1):
        marks.append("LOCAL_RANK")
    if marks:
        raise UserError(
            f"{marks[0]}={given[marks[0]]} is set but RANK and WORLD_SIZE are not: start with srun "
            f"or torchrun, set all of {', '.join(TORCH)}, or unset {marks[0]}"
        )


def _check_not_hosts(given: Mapping[str, str], torch: Claim) -> None:
    """Raises UserError if RANK and WORLD_SIZE count hosts although LOCAL_RANK is set."""
    assert torch.rank is not None and torch.size is not None and torch.local_rank is not None
    for name in RANKS_OF_A_HOST:
        if not given.get(name, "").isdecimal() or torch.local_size is not None:
            continue
        ranks = int(given[name])
        if ranks > 1 and (torch.size % ranks or torch.rank % ranks != torch.local_rank):
            raise UserError(
                f"{name}={ranks} contradicts {torch.words} LOCAL_RANK={torch.local_rank}, which "
                "seem to count hosts: start with torchrun --nnodes=$WORLD_SIZE --node-rank=$RANK "
                f"--nproc-per-node=${name}, or export LOCAL_WORLD_SIZE, too"
            )


def _mpi(given: Mapping[str, str]) -> list[Claim]:
    """Returns a claim for each launcher in `MPI` whose variables are set."""
    return [claim for row in MPI if (claim := _numbered(given, row)) is not None]


def _numbered(given: Mapping[str, str], row: RankVariables) -> Claim | None:
    names = (row.rank, row.size, *row.local_rank, *row.local_size)
    marks = [name for name in names if name in given]
    if not marks or marks == ["FLUX_JOB_SIZE"]:
        return None
    missing = [name for name in (row.rank, row.size) if name not in given]
    if missing:
        raise UserError(
            f"{marks[0]}={given[marks[0]]} is set, as by {row.name}, but {missing[0]} is not: "
            f"pass the variables of {row.name} on to this process, or unset {marks[0]}"
        )
    size = _number(given, row.size, 1)
    world = f"{row.size}={size}"
    local_size, here = None, world
    if named := next((name for name in row.local_size if name in given), None):
        local_size = _number(given, named, 1, size, world)
        here = f"{named}={local_size}"
    elif row.hosts and given.get(row.hosts) == "1":
        local_size = size
    local_rank = None
    if named := next((name for name in row.local_rank if name in given), None):
        local_rank = _number(given, named, 0, (local_size or size) - 1, here)
    rank = _number(given, row.rank, 0, size - 1, world)
    job = next((given[name] for name in row.jobs if name in given), "")
    words = f"{row.rank}={rank} {row.size}={size}"
    start = f"{row.name}, {job}" if job else ""
    return Claim(words, "mpi", rank, size, local_rank, local_size, start)


# Variables with the rank, set by launchers that give no number of ranks, or have no row.
RANKS_ALONE = (
    *("PMIX_RANK", "PALS_RANKID", "PMI_ID", "MPIRUN_RANK"),
    *("HOROVOD_RANK", "ALPS_APP_PE"),
)


def _ranks_alone(given: Mapping[str, str]) -> list[Claim]:
    return [
        Claim(f"{name}={given[name]}", "mpi", rank=_number(given, name))
        for name in RANKS_ALONE
        if name in given
    ]


# Slurm


def _slurm_step(given: Mapping[str, str]) -> Claim | None:
    """Returns srun's claim about this task, or None in a batch script or a shell of salloc."""
    step_names = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    number = _named(given, "SLURM_STEP_ID", "SLURM_STEPID")
    if number is None and not any(name in given for name in step_names):
        procid = given.get("SLURM_PROCID", "0")
        if procid == "0" or not procid.isdecimal():
            return None
        raise UserError(
            f"SLURM_PROCID={procid} is set but SLURM_STEP_ID is not: pass all variables of srun "
            "on to this process (a container may drop them), or unset SLURM_PROCID"
        )
    if number is not None and _number(given, number) >= FIRST_SPECIAL_STEP:
        return None
    tasks = _named(given, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if tasks is None:
        raise _not_reached(given, "SLURM_STEP_NUM_TASKS")
    size = _number(given, tasks, 1)
    words = f"{tasks}={size}"
    if size == 1:
        return Claim(words, "slurm", 0, 1)
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        if name not in given:
            raise _not_reached(given, name)
    if number is None:
        raise _not_reached(given, "SLURM_STEP_ID")
    job = _named(given, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        raise _not_reached(given, "SLURM_JOB_ID")
    local_size = _slurm_tasks_here(given, size)
    here = words if local_size is None else f"{local_size} tasks of its node"
    rank = _number(given, "SLURM_PROCID", 0, size - 1, words)
    again = given.get("SLURM_RESTART_COUNT", "0")
    return Claim(
        f"SLURM_PROCID={rank} {words}",
        "slurm",
        rank,
        size,
        _number(given, "SLURM_LOCALID", 0, (local_size or size) - 1, here),
        local_size,
        f"step {_number(given, number)} of Slurm job {_number(given, job)}"
        + (f" after {again} restarts" if again != "0" else ""),
    )


def _not_reached(given: Mapping[str, str], missing: str) -> UserError:
    there = next(name for name in given if name.startswith("SLURM_STEP") or name == "SLURM_PROCID")
    return UserError(
        f"{missing} is not set, but {there} is: pass all variables of srun on to this process (a "
        "container may drop them), or unset all SLURM_*"
    )


def _slurm_tasks_here(given: Mapping[str, str], size: int) -> int | None:
    """Returns the number of tasks on this node; None if Slurm does not give it."""
    listed = given.get("SLURM_STEP_NODELIST")
    names = [] if listed is None else expand_hostlist(listed)
    per_node = "SLURM_STEP_TASKS_PER_NODE"
    if per_node not in given:
        per_node = "SLURM_TASKS_PER_NODE"
    if per_node not in given:
        return size if len(names) == 1 else None
    counts = expand_tasks_per_node(given[per_node], per_node)
    if sum(counts) != size:
        # SLURM_TASKS_PER_NODE counts the tasks of the job, which may have more tasks than this
        # step.
        if per_node == "SLURM_TASKS_PER_NODE":
            return size if len(names) == 1 else None
        raise UserError(
            f"{per_node}={given[per_node]} means {sum(counts)} tasks, but this step has {size}: "
            "pass srun's own variables on to this process"
        )
    # The node's name takes precedence, because SLURM_NODEID has another order if a job has several
    # components.
    if given.get("SLURMD_NODENAME") in names and len(names) == len(counts):
        return counts[names.index(given["SLURMD_NODENAME"])]
    if len(counts) == 1 or len(set(counts)) == 1:
        return counts[0]
    if "SLURM_NODEID" not in given:
        return None
    place = _number(given, "SLURM_NODEID", 0, len(counts) - 1, f"{per_node}={given[per_node]}")
    return counts[place]


def _without_outer(
    step: Claim | None, claims: list[Claim], given: Mapping[str, str]
) -> list[Claim]:
    """Removes the claim of a Slurm step whose tasks, one per host, are launchers themselves.

    mpirun starts its daemons in such a step. In a step of one task, a script may also start the
    ranks in a loop over RANK.
    """
    if step is None or step.size is None:
        return claims
    starts_more = any(c.size is not None and c.size > step.size for c in claims)
    if starts_more and (step.size == 1 or _one_task_a_node(given)):
        return [claim for claim in claims if claim is not step]
    return claims


def _one_task_a_node(given: Mapping[str, str]) -> bool:
    counts = given.get("SLURM_STEP_TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE")
    return counts is not None and set(expand_tasks_per_node(counts)) == {1}


# Where rank 0 is


def _assigned(
    given: Mapping[str, str],
    claims: list[Claim],
    step: Claim | None,
    master_addr: str | None,
    master_port: int,
    read: ReadFile,
) -> RankAssignment:
    """Returns the assignment on which all claims agree, with the address of rank 0."""
    torch = next((claim for claim in claims if claim.launcher == "torchrun"), None)
    others = [claim for claim in claims if claim is not torch]
    by_torch = torch is not None and torch.local_rank is not None and torch.rank is not None
    if torch is not None and not others:
        typed = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port}
        _check_torch(given, tuple(name for name in TORCH if not typed.get(name)))
    if torch is not None and by_torch and torch.size is not None and step is None:
        _check_not_hosts(given, torch)
    rank, size = _first(c.rank for c in claims), _first(c.size for c in claims)
    local_rank = _first(c.local_rank for c in claims)
    if rank is None or size is None:
        raise UserError(
            f"no known variable says how many ranks the launcher that set "
            f"{' and '.join(c.words for c in claims)} has started: start with srun or torchrun, or "
            f"export {', '.join(TORCH)}"
        )
    local_size = _first(c.local_size for c in claims)
    if local_rank is None:
        name = next((row.local_rank[0] for row in MPI if row.rank in given), "LOCAL_RANK")
        raise UserError(
            f"the launcher that set {claims[0].words} has not set {name}, the number of this "
            "process on its host: export it, or start with torchrun"
        )
    start = next((c.start for c in claims if c.start), "")
    addr, from_environment = master_addr, False
    if addr is None and (by_torch or step is None) and "MASTER_ADDR" in given:
        addr, from_environment = given["MASTER_ADDR"], True
    if step is not None:
        first_host = None if master_addr else host_of_rank_0(given, read)
        if from_environment:
            _check_is_first_host(given, str(first_host))
        addr = addr or first_host
        _check_own_host(given, rank, first_host)
    elif addr is None:
        azure = next((given[name] for name in AZURE_MASTERS if name in given), None)
        addr = LOOPBACK if local_size == size else azure and azure.partition(":")[0]
    if not addr:
        raise UserError(
            f"the launcher that set {claims[0].words} does not say where rank 0 is: export "
            "MASTER_ADDR, the host of rank 0, or give it as launch.master_addr"
        )
    _check_address("launch.master_addr" if master_addr else "MASTER_ADDR", addr)
    if local_size is None and addr in (LOOPBACK, "localhost", "::1"):
        local_size = size
    port = _port(given, step, start, by_torch, master_port, claims[0])
    launcher: Launcher = "slurm" if step else others[0].launcher if others else "torchrun"
    job = _named(given, "SLURM_JOB_ID", "SLURM_JOBID") if step else None
    job_id = given[job] if job else None
    return RankAssignment(
        launcher, rank, local_rank, size, local_size or 0, addr, port, job_id, start
    )


def _port(
    given: Mapping[str, str],
    step: Claim | None,
    start: str,
    by_torch: bool,
    master_port: int,
    claim: Claim,
) -> int:
    """Returns the port of the rendezvous: a given one, or one derived from the start."""
    if "MASTER_PORT" in given and (by_torch or step is None):
        return _number(given, "MASTER_PORT", 1, 65535, "the range of ports")
    if step is not None:
        job = _named(given, "SLURM_JOB_ID", "SLURM_JOBID")
        number = _named(given, "SLURM_STEP_ID", "SLURM_STEPID")
        assert job is not None and number is not None  # `_slurm_step` has checked this
        # The steps of one job get different ports. A hash maps the job's id, which may exceed the
        # range of ports.
        return FIRST_PORT + (zlib.crc32(given[job].encode()) + int(given[number])) % PORTS
    if start:
        return FIRST_PORT + zlib.crc32(start.encode()) % PORTS
    if master_port:
        return master_port
    raise UserError(
        f"the launcher that set {claim.words} does not identify its starts, so no port can "
        "be derived: export MASTER_PORT, a free port on the host of rank 0, or give it as "
        "launch.master_port"
    )


def _check_address(name: str, addr: str) -> None:
    """Raises UserError unless `addr` can be the name or address of a host."""
    try:
        ipaddress.ip_address(addr.partition("%")[0])
    except ValueError:
        if re.fullmatch("[A-Za-z0-9_.-]{1,255}", addr) is None:
            raise UserError(
                f"{name}={addr!r} is not the name or address of a host: it must be one like node1, "
                "10.0.0.1 or fd00::1, and the port belongs in MASTER_PORT or launch.master_port"
            ) from None


def _check_is_first_host(given: Mapping[str, str], first_host: str) -> None:
    """Raises UserError if MASTER_ADDR names a node of the job that is not rank 0's."""
    addr, lists = given["MASTER_ADDR"], ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    nodes = [node for name in lists if name in given for node in expand_hostlist(given[name])]
    if addr != first_host and addr in nodes:
        raise UserError(
            f"MASTER_ADDR={addr} is a node of this job, but rank 0 is on {first_host}: unset "
            f"MASTER_ADDR, or give launch.master_addr={first_host}"
        )


def _check_own_host(given: Mapping[str, str], rank: int, first_host: str | None) -> None:
    """Raises UserError if rank 0 does not run on the host where the other ranks look for it."""
    own = given.get("SLURMD_NODENAME")
    if rank == 0 and own is not None and first_host is not None and own != first_host:
        raise UserError(
            f"rank 0 runs on {own}, but Slurm's variables make the other ranks look for it on "
            f"{first_host}: give all ranks launch.master_addr={own}"
        )


# Processes that a launcher should have started


def _refuse_left_out(given: Mapping[str, str], starts: int, read: ReadFile) -> None:
    """Raises UserError if this process would train alone in a job of several tasks or hosts."""
    _refuse_batch_script(given, starts)
    torchrun = (
        "this process would train on its own host alone: start torchrun on each (torchrun "
        "--nnodes={} --node-rank=… --nproc-per-node=… --master-addr=… --master-port=… -m "
        "parallel3d …)"
    )
    found = _host_counts(given, read)
    for name, hosts in found.items():
        if hosts > 1:
            raise UserError(f"{name} means {hosts} hosts, and {torchrun.format(hosts)}")
    for _, number in HOSTS:
        if not found and NUMBER.fullmatch(given.get(number, "")) and int(given[number]) > 0:
            raise UserError(
                f"{number}={given[number]} means that there are other hosts, and "
                f"{torchrun.format('…')}; or unset {number}"
            )
    if "K_MPI_JOB_ROLE" in given:
        raise UserError(
            f"K_MPI_JOB_ROLE={given['K_MPI_JOB_ROLE']} belongs to an MPIJob, whose ranks mpirun "
            "starts: "
            "put mpirun before the command, or unset K_MPI_JOB_ROLE"
        )


def alone_in_a_job(environ: Mapping[str, str], place: RankAssignment | None) -> str | None:
    """Returns a warning if this process trains its own run, but may be meant to join a larger run.

    The pods of a Kubernetes Job may be the jobs of a sweep or the hosts of one run, and no pod
    knows their number. The same holds for tasks of srun that each start a torchrun for one host.
    In all other cases the function returns None.
    """
    name, tasks = "JOB_COMPLETION_INDEX", environ.get("SLURM_STEP_NUM_TASKS", "")
    if place is None and environ.get(name):
        return (
            f"{name}={environ[name]}: this pod of a Kubernetes Job trains a run of its own; for "
            f"one run on all pods start torchrun --nnodes=… --node-rank=${name} …"
        )
    has_agent = "TORCHELASTIC_RUN_ID" in environ and environ.get("GROUP_WORLD_SIZE") == "1"
    has_others = NUMBER.fullmatch(tasks) is not None and int(tasks) > 1
    if has_agent and has_others and place is not None and place.rank == 0:
        return (
            f"this step has {tasks} tasks, and a torchrun in each trains a run of its own; for "
            "one run on all of them leave torchrun out, or start it with --nnodes=… in one task "
            "per node"
        )
    return None


def _refuse_batch_script(given: Mapping[str, str], starts: int) -> None:
    """Raises UserError in the batch script or a shell of a Slurm job with several tasks.

    On a single node, the process may start the ranks itself if there is a task for each of them.
    """
    if _named(given, "SLURM_JOB_ID", "SLURM_JOBID") is None:
        return
    nodes = _count(given, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    if listed := _named(given, "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        nodes = max(nodes, len(expand_hostlist(given[listed], listed)))
    asked = _count(given, "SLURM_NTASKS", "SLURM_NPROCS")
    components = _count(given, "SLURM_HET_SIZE")
    per_node = _count(given, "SLURM_NTASKS_PER_NODE")
    tasks = asked or per_node * max(1, nodes) or _tasks_asked_for(given)
    if max(nodes, components) <= 1 and tasks in (0, 1, starts):
        return
    job = (
        f"{components} components"
        if components > 1
        else f"{max(nodes, tasks)} tasks"
        if tasks >= nodes
        else f"{nodes} nodes"
    )
    alone = "--nodes=1 --ntasks=1"
    raise UserError(
        f"this Slurm job has {job}, but only this process would take part: put srun before the "
        f"command, or submit with {alone}, so that this process starts all ranks itself"
    )


def _tasks_asked_for(given: Mapping[str, str]) -> int:
    """Returns the number of tasks on all nodes; 0 if no variable gives it.

    If the user has asked for no number, as with `sbatch --exclusive`, Slurm counts a task for each
    CPU; the function then assumes one task per node.
    """
    tasks, cpus = given.get("SLURM_TASKS_PER_NODE"), given.get("SLURM_JOB_CPUS_PER_NODE")
    if tasks is None:
        return 0
    counts = expand_tasks_per_node(tasks)
    if cpus is not None:
        each = max(1, _count(given, "SLURM_CPUS_PER_TASK"))
        filled_in = [max(1, n // each) for n in expand_tasks_per_node(cpus)]
        if counts == filled_in:
            return len(counts)
    return sum(counts)


# Variables with the number of hosts, set by platforms that leave the launcher to the user. Their
# names are common, so each counts only if a second variable, usually this host's index, is set.
HOSTS = (
    ("GROUP_WORLD_SIZE", "GROUP_RANK"),
    ("NUM_MACHINES", "MACHINE_RANK"),
    ("PET_NNODES", "PET_NNODES"),
    ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
    ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK"),
    ("AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX"),
    ("BEAKER_REPLICA_COUNT", "BEAKER_REPLICA_RANK"),
    ("LEPTON_JOB_TOTAL_WORKERS", "LEPTON_JOB_WORKER_INDEX"),
    ("MLP_WORKER_NUM", "MLP_ROLE_INDEX"),  # Volcengine's
    ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
    ("PBS_NUM_NODES", "PBS_JOBID"),
    ("FLUX_JOB_NNODES", "FLUX_JOB_ID"),
    ("NHOSTS", "PE_HOSTFILE"),
    ("NUM_NODES", "NODE_RANK"),
    ("NNODES", "NODE_RANK"),
)
OF_VOLCANO = re.compile("VC_[A-Z0-9_]+_NUM")  # numbers of pods for each kind of task
# Variables with lists of hosts, each with its separator and the number of items per host.
HOST_LISTS = (
    ("LSB_MCPU_HOSTS", None, 2),  # "host slots host slots …"
    ("LSB_HOSTS", None, 1),
    ("AZ_BATCH_HOST_LIST", ",", 1),
)
# Variables that name a file whose lines begin with a host.
HOST_FILES = (
    *("PBS_NODEFILE", "OAR_NODEFILE", "LSB_DJOB_HOSTFILE"),
    "BATCH_HOSTS_FILE",  # Google's
)


def _host_counts(given: Mapping[str, str], read: ReadFile) -> dict[str, int]:
    """Returns the number of hosts that each variable gives, by the variable's name."""
    found = {}
    for name, beside in HOSTS:
        if name in given and beside in given:
            found[name] = _most_hosts(name, given[name])
    if "VC_TASK_INDEX" in given:
        pods = [_most_hosts(name, given[name]) for name in given if OF_VOLCANO.fullmatch(name)]
        found |= {"VC_*_NUM": sum(pods)} if pods else {}
    for name, separator, every in HOST_LISTS:
        if name in given:
            found[name] = len(set(given[name].split(separator)[::every]))
    for name in ("SM_HOSTS", "CLUSTER_SPEC", "TF_CONFIG"):  # SageMaker's, Vertex AI's, TensorFlow's
        if name in given:
            found[name] = _entries(name, given[name])
    for name in HOST_FILES:
        if name in given:
            found[name] = _lines(name, given[name], read)
    return found


def _most_hosts(name: str, text: str) -> int:
    """Returns the largest number of hosts in "4" or in a range "1:4". Raises UserError."""
    if not re.fullmatch("[0-9]{1,9}(:[0-9]{1,9})?", text):
        raise UserError(
            f"{name}={text!r} is not a number of hosts: give it as 2 or 1:4, or unset it"
        )
    return max(map(int, text.split(":")))


def _lines(name: str, path: str, read: ReadFile) -> int:
    """Counts the hosts in a scheduler's file, which has a line for each slot. Raises UserError."""
    try:
        return len({line.split()[0] for line in read(path).splitlines() if line.strip()})
    except OSError as error:
        raise UserError(
            f"{name}={path} cannot be read ({error.strerror}), so the number of this job's hosts "
            f"is unknown: make the file readable for this process, or unset {name}"
        ) from None


def _entries(name: str, text: str) -> int:
    """Counts the hosts in a JSON list, or in {"cluster": lists by role}; returns 0 for other JSON.

    Raises UserError for other text.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(
            f"{name}={text!r} is not JSON, so its hosts are unknown: fix it or unset it"
        ) from None
    groups = [value]
    if isinstance(value, dict) and isinstance(value.get("cluster"), dict):
        groups = list(value["cluster"].values())
    return sum(len(group) for group in groups if isinstance(group, list))


def task_of_cgroups(text: str) -> tuple[str, int] | None:
    """Returns Slurm's (step, task) from the text of /proc/self/cgroup, or None outside a step.

    This works even if a container, sudo or ssh has dropped all variables.
    """
    match = re.search(r"/job_([0-9]+)/step_([0-9]+)/(?:user/)?task_([0-9]+)", text)
    return (f"step {match[2]} of Slurm job {match[1]}", int(match[3])) if match else None


def refuse_lost_variables(environ: Mapping[str, str], cgroups: str) -> None:
    """Raises UserError in a task of srun, other than the first, that lacks srun's variables."""
    task = task_of_cgroups(cgroups)
    if task is not None and task[1] > 0 and "SLURM_PROCID" not in environ:
        raise UserError(
            f"this is task {task[1]} of {task[0]}, but srun's variables do not reach it, and each "
            "task would start a run of its own: pass them on (apptainer without --cleanenv, sudo "
            "-E)"
        )


# Numbers


def _named(given: Mapping[str, str], *names: str) -> str | None:
    """Returns the first of these names that is set, or None."""
    return next((name for name in names if name in given), None)


def _count(given: Mapping[str, str], *names: str) -> int:
    """Returns the number in the first of these variables that is set, or 0 without a number."""
    name = _named(given, *names)
    return int(given[name]) if name is not None and given[name].isdecimal() else 0


def _number(
    given: Mapping[str, str], name: str, least: int = 0, most: int | None = None, of: str = ""
) -> int:
    """Parses the whole number in variable `name`, from `least` to `most`.

    `of` names the source of `most` in the message, such as "WORLD_SIZE=4". Raises UserError.
    """
    text = given[name]
    if not NUMBER.fullmatch(text):
        raise UserError(f"{name}={text!r} is not a whole number; give one")
    value = int(text)
    if value < least:
        raise UserError(f"{name}={value} is too small: it must be at least {least}")
    if most is not None and value > most:
        raise UserError(f"{name}={value} contradicts {of}: it must be from {least} to {most}")
    return value
