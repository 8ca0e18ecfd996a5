"""Builds the command lines of srun, scontrol and squeue, and calls them with time limits.

The limits exist because a controller that is busy or gone may not answer for minutes, and the batch
process must go on. tests/e2e/test_slurm_nodes.py shows on a real Slurm why the options are these.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parallel3d.errors import UserError, first_line
from parallel3d.topology.cluster.slurm import (
    expand_hostlist,
    expand_tasks_per_node,
    parse_topology,
)

ANSWER_S = 60.0  # limit of a question to the controller
RELEASE_S = 10.0  # for which it is asked again to let nodes go
TIMED_OUT = 124  # as of timeout(1)
GONE_STATES = ("down", "drain", "drng", "fail", "maint", "inval")  # as sinfo abbreviates them
# Ranks that are left so long after the first one has ended are killed: NCCL waits for dead peers.
LAST_RANKS_S = 30

# Options of sbatch for the ranks, which srun would take from the environment for any step. Some of
# them do not fit a step of one task on one node, and srun refuses or is given fewer GPUs.
FOR_RANKS = re.compile(
    r"S(LURM|RUN)_(CPUS_PER_GPU|CPU_BIND|GPUS$|GPUS_PER_|GPU_BIND|GRES|MEM_|NTASKS|NPROCS|TRES_"
    r"|DISTRIBUTION|HINT|EXACT|EXCLUSIVE)"
)
OF_ALL_NODES = ("SLURM_GPUS", "SLURM_NTASKS_PER_GPU")  # the latter excludes --ntasks-per-node
# The command of a guard, which must outlive the signals that ask ranks to stop, even while it
# starts.
DEAF = 'trap "" USR1 USR2 TERM HUP INT; exec "$@"'
# The command of each rank, after the folder of its log. A signal during its start would kill the
# rank: it is blocked until the rank can handle it, or ignored if coreutils are older than 8.31.
RANK = """
logs=$1; shift
((SLURM_PROCID == 0)) || exec >"$logs/rank-$SLURM_PROCID.log" 2>&1
hold=(env --block-signal=USR1 --block-signal=USR2)
"${hold[@]}" true 2>/dev/null || { hold=(); trap "" USR1 USR2; }
exec "${hold[@]}" "$@"
"""


@dataclass(frozen=True)
class Allocation:
    """A job of Slurm, as its batch script sees it.

    Attributes:
        job: the number that squeue and scontrol take. An element of an array has the form 12_3: one
            element of an array has the number of the whole array as its SLURM_JOB_ID.
        number: SLURM_JOB_ID, which the processes of the job have.
        host: the node of this process.
        nodes: the nodes, in Slurm's order.
        tasks: number of ranks on each node; {} if Slurm does not say it.
        is_whole: whether the job has all nodes and tasks that its variables speak of.
    """

    job: str
    number: str
    name: str
    host: str
    nodes: tuple[str, ...]
    tasks: Mapping[str, int]
    is_whole: bool = True

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Allocation:
        """Returns the job of this batch script. Raises UserError outside of one."""
        number = environ.get("SLURM_JOB_ID")
        if not number:
            raise UserError(
                "parallel3d slurm run is the process of a batch script, and SLURM_JOB_ID is not "
                "set: sbatch slurm/train.sbatch submits one"
            )
        element = environ.get("SLURM_ARRAY_TASK_ID")
        job = environ.get("SLURM_ARRAY_JOB_ID", number) + (f"_{element}" if element else "")
        host = environ.get("SLURMD_NODENAME") or os.uname().nodename
        listed = environ.get("SLURM_JOB_NODELIST")
        nodes = tuple(expand_hostlist(listed, "SLURM_JOB_NODELIST")) if listed else (host,)
        name = environ.get("SLURM_JOB_NAME", "job")
        return cls(job, number, name, host, nodes, _tasks(nodes, environ))

    def without(self, nodes: Sequence[str]) -> Allocation:
        """Returns the job after it has given up these nodes."""
        kept = tuple(node for node in self.nodes if node not in nodes)
        return replace(self, nodes=kept, is_whole=False)


def _tasks(nodes: Sequence[str], environ: Mapping[str, str]) -> dict[str, int]:
    each = environ.get("SLURM_NTASKS_PER_NODE", "")
    if each.isdecimal():
        return dict.fromkeys(nodes, int(each))
    listed = environ.get("SLURM_TASKS_PER_NODE")
    # If the user has not asked for tasks, Slurm lists CPUs there, and srun starts one task a node.
    if not listed or not (environ.get("SLURM_NTASKS") or environ.get("SLURM_NPROCS")):
        return dict.fromkeys(nodes, 1)
    counts = expand_tasks_per_node(listed)
    return dict(zip(nodes, counts, strict=True)) if len(counts) == len(nodes) else {}


# Command lines


def of_ranks(
    allocation: Allocation,
    nodes: Sequence[str],
    logs: str,
    command: Sequence[str],
    *,
    beside: bool,
) -> list[str]:
    """Returns the command line of the step of the ranks, on these nodes.

    On all nodes of a whole job it leaves their numbers to Slurm, so that any way to ask sbatch for
    tasks works. `beside` lets it overlap the step of the last start, of which a lost node may hold
    a part; guards overlap everything anyway. With `--gpus` an overlapping step may be given fewer
    GPUs than the job has.
    """
    words = ["srun", *(["--overlap"] if beside else [])]
    words += ["--kill-on-bad-exit=0", f"--wait={LAST_RANKS_S}"]
    if not allocation.is_whole or tuple(nodes) != allocation.nodes:
        tasks = [allocation.tasks.get(node, 1) for node in nodes]
        words += [f"--nodes={len(nodes)}", f"--ntasks={sum(tasks)}"]
        words += [f"--ntasks-per-node={max(tasks)}", f"--nodelist={','.join(nodes)}"]
    return [*words, "bash", "-c", RANK, "rank", logs, *command]


def environment_on_some(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of ranks on some nodes of a job: without numbers of all of them."""
    kept = {name: value for name, value in environ.items() if name not in OF_ALL_NODES}
    gpus = gpus_of_each_node(environ)
    if "SLURM_GPUS" in environ and gpus is not None:
        kept.setdefault("SLURM_GPUS_PER_NODE", str(gpus))
    return kept


def on_node(environ: Mapping[str, str], node: str, *command: str) -> list[str]:
    """Returns the command line of a step of one task on one node, beside all others.

    A step over several nodes is aborted on all of them if one is dead. It is to be started with
    `environment_beside`. It sees the node's GPUs and takes no memory from the ranks.
    """
    alone = ("--overlap", "--no-kill", "--wait=0", "--kill-on-bad-exit=0")
    here = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={node}", "--mem=0"]
    gpus = gpus_of_each_node(environ)
    if gpus is not None:
        here.append(f"--gpus-per-node={gpus}")
    elif "SLURM_GPUS" in environ:  # all GPUs of the job, which no single node has
        here.append("--gres=none")
    return ["srun", *alone, *here, "bash", "-c", DEAF, "guard", *command]


def environment_beside(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of steps beside the ranks, without what sbatch was asked for them."""
    return {name: value for name, value in environ.items() if not FOR_RANKS.match(name)}


def gpus_of_each_node(environ: Mapping[str, str]) -> int | None:
    """Returns the number of GPUs that the job has on each node; None if it is not known."""
    here = environ.get("SLURM_GPUS_ON_NODE", "")
    if not here.isdecimal():
        return None
    total, nodes = environ.get("SLURM_GPUS", "").rpartition(":")[2], environ.get("SLURM_NNODES", "")
    if "SLURM_GPUS_PER_NODE" in environ or not total:
        return int(here)
    # `--gpus` alone may give nodes different numbers.
    is_even = total.isdecimal() and nodes.isdecimal() and int(total) == int(here) * int(nodes)
    return int(here) if is_even else None


# Questions and orders to the controller


@dataclass(frozen=True)
class Said:
    """The output of a command; `code` is TIMED_OUT if it did not end in time."""

    code: int
    out: str
    err: str

    @property
    def reason(self) -> str:
        """The last line of its errors."""
        lines = self.err.strip().splitlines()
        return lines[-1].removeprefix("scontrol: ") if lines else f"code {self.code}"


def call(*words: str, limit_s: float = ANSWER_S, folder: str | None = None) -> Said:
    """Runs a command in limited time; a command that is missing gives code 127."""
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Said(TIMED_OUT, "", f"{words[0]} has not answered for {limit_s:g} s")
    except OSError as error:
        return Said(127, "", f"{words[0]}: {first_line(error)}")
    out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return Said(done.returncode, out, err)


def state_and_reason(job: str) -> tuple[str, str]:
    """Returns a job's state and its reason; ("", "") if squeue does not answer."""
    said = call("squeue", "-h", "-t", "all", "-j", job, "-o", "%T %r")
    state, _, reason = said.out.strip().partition(" ")
    return state, reason.strip()


def states_of(nodes: Sequence[str]) -> dict[str, str]:
    """Returns Slurm's word for the state of each node, such as MIXED+DRAIN; some may be missing."""
    said = call("scontrol", "--oneliner", "show", "node", ",".join(nodes), limit_s=10)
    found = {}
    for line in said.out.splitlines():
        name, state = (re.search(rf"\b{key}=(\S+)", line) for key in ("NodeName", "State"))
        if name and state:
            found[name[1]] = state[1]
    return found


def release(job: str, kept: Sequence[str]) -> Said:
    """Makes a running job give up all nodes but `kept`. A site may forbid that.

    scontrol writes scripts with new variables into its folder, which nobody needs: each step is
    given its nodes.
    """
    words = ("scontrol", "update", f"JobId={job}", f"NodeList={','.join(kept)}")
    deadline = time.monotonic() + RELEASE_S
    with tempfile.TemporaryDirectory() as folder:
        while True:
            said = call(*words, limit_s=30, folder=folder)
            # Slurm changes no job that it is just entering into its data base.
            if not said.code or "try again" not in said.err or time.monotonic() > deadline:
                return said
            time.sleep(0.5)


def can_change(job: str, name: str) -> bool:
    """Returns whether Slurm changes the job, by giving it the name that it has."""
    words = ("scontrol", "update", f"JobId={job}", f"JobName={name}")
    deadline = time.monotonic() + RELEASE_S
    while (said := call(*words, limit_s=30)).code:
        if "try again" not in said.err or time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def missed_after() -> float:
    """Returns the seconds after which Slurm has surely missed a node that is dead."""
    said = call("scontrol", "show", "config", limit_s=10)
    found = re.search(r"^SlurmdTimeout\s*=\s*(\d+)", said.out, re.MULTILINE)
    # It asks nodes three times in that, and a few may be late.
    return 2.0 * int(found[1]) + 60.0 if found else 660.0


def requeue(job: str) -> Said:
    return call("scontrol", "requeue", job)


def can_avoid(job: str, nodes: Sequence[str], wanted: int) -> bool:
    """Returns whether the partition of a job has `wanted` nodes beside these.

    Without, a job that excludes them would wait until somebody takes the exclusion back, even once
    the nodes are repaired. If Slurm does not answer, there may be others.
    """
    said = call("squeue", "-h", "-t", "all", "-j", job, "-o", "%P|%n", limit_s=10).out.split("|")
    if len(said) != 2:
        return True
    partition, demanded = said[0], said[1].strip()
    if demanded and not {*nodes}.isdisjoint(expand_hostlist(demanded)):
        return False  # `--nodelist` of sbatch names one
    listed = call("sinfo", "-h", "-N", "-p", partition, "-o", "%N %t", limit_s=10)
    found = dict(line.split() for line in listed.out.splitlines() if len(line.split()) == 2)
    others = [name for name, state in found.items() if name not in nodes]
    usable = [name for name in others if not found[name].startswith(GONE_STATES)]
    return not found or len(usable) >= wanted


def places_of(nodes: Sequence[str]) -> dict[str, str]:
    """Returns the block and the leaf switch of each node, as far as Slurm knows a topology."""
    said = call("scontrol", "show", "topology", limit_s=10)
    try:
        topology = parse_topology(said.out, "scontrol show topology")
    except UserError:  # Slurm has none
        return {}
    places = {node: (topology.block.get(node), topology.unit.get(node)) for node in nodes}
    return {node: ".".join(filter(None, place)) for node, place in places.items() if any(place)}


def exclude(job: str, nodes: Sequence[str]) -> Said:
    """Keeps these nodes, beside those of before, out of the next start of a requeued job.

    Slurm takes this only while the job is pending.
    """
    already = call("squeue", "-h", "-t", "all", "-j", job, "-o", "%x", limit_s=10).out.strip()
    listed = [word for word in (already, *nodes) if word and word not in ("n/a", "(null)")]
    words = ("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(listed)}")
    return call(*words, limit_s=10)
