"""Asks a real Slurm what becomes of a job whose node dies, and of its next step.

The batch process, which goes on without the dead node, relies on these answers, which Slurm's
manual does not give. Nine jobs run at once on 24 virtual nodes of a network: nodes crash, so that
their sockets close, or their links are cut, so that they only become silent. `pytest -s` prints
what each job noted, with the seconds; docs/recovery.md has them in a table.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e import rails
from tests.e2e.command import Shell, wait_for
from tests.e2e.private_slurm import OVER, Job, Slurm, why_not
from tests.e2e.rails import Rails
from tests.pace import PATIENCE

REASON = None if os.environ.get("CI") else why_not() or rails.why_not()
pytestmark = [
    pytest.mark.more,
    pytest.mark.first,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

# A job's script notes what it does in NAME.log, as "seconds key exit-code microseconds text", and
# the tasks of its first step write to NAME.beats. Once NAME.go exists, the tasks of all nodes but
# the lost one fail, as ranks do when a peer is gone, and the script goes on.
BEGIN = r"""#!/bin/bash
export LC_ALL=C
note() { printf '%s %s %s %s %s\n' "$EPOCHREALTIME" "$1" "$2" "$3" "$4" >>"$NAME.log"; }
ask() { # key command …
    local key=$1 began=$EPOCHREALTIME text code
    shift
    text=$("$@" 2>&1)
    code=$?
    note "$key" "$code" $((${EPOCHREALTIME/./} - ${began/./})) "${text//$'\n'/ | }"
}
on() { # seconds at most, then nodes, then options: starts a step on these nodes
    timeout "$1" srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist="$2" "${@:3}" hostname
}
export beat='while sleep 0.5; do
    echo "$EPOCHREALTIME $SLURMD_NODENAME" >>"$NAME.beats"
    [[ -e $NAME.go && " $LOST " != *" $SLURMD_NODENAME "* ]] && exit 1
done'
go() { until [[ -e $NAME.$1 ]]; do sleep 0.1; done; }
each() { # step, then nodes: starts a task on each of these nodes, in a step of its own
    local node
    for node in "${@:2}"; do
        WHAT=$1 srun $GUARD --nodes=1 --ntasks=1 --nodelist="$node" bash -c "$guard" &
    done
}
export guard='printf "%s %s 0 0 %s %s\\n" \
    "$EPOCHREALTIME" "$WHAT" "$SLURMD_NODENAME" "$SLURM_STEP_ID" >>"$NAME.log"
while sleep 0.5; do echo "$EPOCHREALTIME $SLURMD_NODENAME $WHAT" >>"$NAME.beats"; done'
GUARD='--overlap --no-kill --wait=0 --kill-on-bad-exit=0'
note begin 0 0 "$SLURM_JOB_NODELIST"
"""
STEP = 'srun --kill-on-bad-exit=0 --wait=30 bash -c "$beat" &\nstep=$!\n'
SHRINK = 'scontrol update JobId="$SLURM_JOB_ID" NodeList='
OLD = """(
    while kill -0 "$step" 2>/dev/null; do sleep 0.1; done
    note old-srun-ended 0 $((${EPOCHREALTIME/./} - ${began/./})) ""
) &
"""
SCRIPTS = {
    # The node of the batch script is lost.
    "zombie": STEP + 'wait "$step"\nnote after 0 0 ""\nsleep 600\n',
    # Another node is lost, and the old srun is left to itself.
    "shrunk": STEP
    + f"""go go
began=$EPOCHREALTIME
{OLD}
sleep 3 # until the tasks of the other nodes have failed: before, Slurm ends the step otherwise
ask overlap-whole on 60 h3,h4 --overlap
ask shrink {SHRINK}h3,h4
ask overlap on 60 h3,h4 --overlap
ask plain on 15 h3,h4
go down
ask last on 60 h3,h4 --overlap
ask twice {SHRINK}h3
wait
""",
    # The old srun is killed, and the lost node boots again before Slurm has missed it.
    "booted": STEP
    + f"""go go
kill -KILL "$step"
ask shrink {SHRINK}h6,h7
touch booted.shrunk
go down
ask last on 60 h6,h7 --overlap
""",
    # A node is excluded while the job runs, and in the trap after a requeue.
    "excluded": """((${SLURM_RESTART_COUNT:-0})) && exit 0
exclude() { ask "$1" scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$SLURMD_NODENAME"; }
trap 'exclude in-trap' TERM
exclude running
ask requeue scontrol requeue "$SLURM_JOB_ID"
for _ in {1..40}; do sleep 0.1; done
""",
    # A node becomes silent.
    "silent": STEP
    + f"""go go
sleep 3 # until the tasks of the other nodes have failed
ask shrink {SHRINK}h10,h11
ask overlap on 60 h10,h11 --overlap
kill -KILL "$step"
ask plain on 15 h10,h11
go down
ask last on 60 h10,h11 --overlap
""",
    # One node is dead and one silent, and every node is to have a guard: by one step, or by one
    # step a node. Then the srun of the ranks is killed, whose tasks have ended on the other nodes.
    "guards": STEP
    + f"""go go
sleep 3
note whole 0 0 ""
WHAT=guard srun $GUARD --nodes=4 --ntasks=4 --ntasks-per-node=1 bash -c "$guard" &
sleep 12
note each 0 0 ""
each own h16 h17 h18 h19
sleep 5
ask shrink {SHRINK}h16,h17
kill -KILL "$step"
ask next on 60 h16,h17 --overlap
go down
note last 0 0 ""
sleep 2
""",
    # A node is lost on which only a guard runs, while the ranks train on the others.
    "spare": f"""each own h20 h21 h22
WHAT=train srun --overlap --kill-on-bad-exit=0 --wait=30 --nodes=2 --ntasks=2 \\
    --nodelist=h20,h21 bash -c "$guard" &
go go
ask shrink {SHRINK}h20,h21
go down
note last 0 0 ""
sleep 2
""",
    # A node becomes silent, and the job does nothing about it.
    "ended": STEP + 'wait "$step"\nsleep 600\n',
    # A job is queued again while it holds a dead node that Slurm has not missed yet.
    "queued": """((${SLURM_RESTART_COUNT:-0})) && exit 0
go go
scontrol requeue "$SLURM_JOB_ID"
sleep 30
""",
}
NODES = {
    "zombie": ("h1", "h2"),
    "shrunk": ("h3", "h4", "h5"),
    "booted": ("h6", "h7", "h8"),
    "silent": ("h10", "h11", "h12"),
    "ended": ("h13", "h14"),
    "guards": ("h16", "h17", "h18", "h19"),
    "spare": ("h20", "h21", "h22"),
}
# The nodes that each job loses, the first of them by a crash unless the job is in CUT.
LOST = {
    "zombie": ("h1",),
    "shrunk": ("h5",),
    "booted": ("h8",),
    "silent": ("h12",),
    "ended": ("h14",),
    "guards": ("h18", "h19"),
    "spare": ("h22",),
}
CUT = ("h12", "h14", "h19")
DOWN = {node for nodes in LOST.values() for node in nodes} - {"h8"}  # which boots again
FIRST = {"spare": ("own",)}  # the first task on each node, if it is not one of the ranks
LASTING = ("shrunk", "booted", "silent", "guards", "spare")  # these wait until nodes are down


@dataclass(frozen=True)
class Answer:
    """A line of a job's log: when, exit code, seconds, and output of a command."""

    at: float
    code: int
    seconds: float
    text: str


@dataclass
class Answers:
    """What the jobs noted, and the test saw.

    Attributes:
        lost: when each job's node was lost, by job.
        down: when Slurm called each node down.
        ended: the jobs at the end, by name.
    """

    folder: Path
    lost: dict[str, float] = field(default_factory=dict)
    down: dict[str, float] = field(default_factory=dict)
    ended: dict[str, Job] = field(default_factory=dict)
    version: str = ""

    def of(self, job: str) -> dict[str, list[Answer]]:
        found: dict[str, list[Answer]] = {}
        path = self.folder / f"{job}.log"
        for line in path.read_text().splitlines() if path.exists() else ():
            at, key, code, microseconds, *text = line.split(" ", 4)
            answer = Answer(float(at), int(code), int(microseconds) / 1e6, "".join(text))
            found.setdefault(key, []).append(answer)
        return found

    def one(self, job: str, key: str) -> Answer:
        (answer,) = self.of(job)[key]
        return answer

    def beats(self, job: str, node: str, *what: str) -> list[float]:
        """Returns when the job's task on a node has written: of its first step, or of `what`."""
        path = self.folder / f"{job}.beats"
        lines = (line.split() for line in path.read_text().splitlines()) if path.exists() else ()
        return [float(at) for at, *where in lines if where == [node, *what]]

    def table(self) -> str:
        rows = [f"\nSlurm {self.version}: seconds after the loss of a node"]
        for job, lost in self.lost.items():
            for node in LOST[job]:
                down = self.down.get(node)
                after = "–" if down is None else f"{down - lost:.1f}"
                rows.append(f"{job}: {node} down after {after}")
            for key, answers in self.of(job).items():
                rows += [
                    f"  {answer.at - lost:7.1f} {key}: code {answer.code} in "
                    f"{answer.seconds:.2f} s {answer.text[:90]}"
                    for answer in answers
                ]
        return "\n".join(rows)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """Runs all jobs to their ends."""
    folder = tmp_path_factory.mktemp("slurm-nodes")
    shell = Shell(folder, tmp_path_factory.mktemp("scratch"), {}, anew=True)
    net = Path(tempfile.mkdtemp(prefix="p3d-net-"))
    net.rmdir()
    made = Rails.start(net, hosts=24, gpus=1)
    slurm = None
    try:
        slurm = Slurm.start(shell, nodes=24, rails=made)
        found = Answers(folder, version=slurm.call("sinfo", "--version").split()[-1])
        lose_nodes(found, slurm, made)
        print(found.table())
        yield found
    finally:
        if slurm is not None:
            slurm.stop(folder / "slurm-logs")
        made.stop()
        shell.end_all()


def lose_nodes(found: Answers, slurm: Slurm, net: Rails) -> None:
    """Submits the jobs, takes a node from each while it runs, and waits for what follows."""
    numbers = submit(found.folder, slurm)
    for job in LOST:
        wait_for(
            lambda job=job: all(found.beats(job, node, *FIRST.get(job, ())) for node in NODES[job]),
            30 * PATIENCE,
            f"{job} on all its nodes",
        )
    # Later it might start on a lost node that its job has given up: Slurm takes it for idle.
    wait_for(lambda: len(found.of("excluded").get("begin", ())) == 2, 30 * PATIENCE, "a requeue")
    slurm.crash(slurm.jobs()[numbers["queued"]].nodes[1])  # two other nodes are free
    (found.folder / "queued.go").touch()
    for job, nodes in LOST.items():
        found.lost[job] = time.time()
        for node in nodes:
            if node in CUT:
                net.set_link(node, up=False)
            else:
                slurm.crash(node)
        (found.folder / f"{job}.go").touch()
    wait_for((found.folder / "booted.shrunk").exists, 30 * PATIENCE, "the shrunk job")
    slurm.boot("h8")
    deadline = time.monotonic() + 60 * PATIENCE
    while time.monotonic() < deadline and len(found.down) < len(DOWN):
        see_down(found, slurm)
        time.sleep(0.5)
    for job in LASTING:
        (found.folder / f"{job}.down").touch()
    for job in LASTING:
        wait_for(lambda job=job: "last" in found.of(job), 30 * PATIENCE, f"the end of {job}")
    for key in ("old-srun-ended", "twice"):
        wait_for(lambda key=key: key in found.of("shrunk"), 30 * PATIENCE, f"{key} of shrunk")
    wait_for(lambda: slurm.jobs()[numbers["ended"]].state in OVER, 30 * PATIENCE, "the end")
    wait_for(lambda: "BadConstraints" in reasons(slurm), 60 * PATIENCE, "the queued job")
    jobs = slurm.jobs()
    found.ended = {job: jobs[number] for job, number in numbers.items()}
    slurm.call("scancel", numbers["zombie"])
    wait_for(lambda: slurm.jobs()[numbers["zombie"]].state == "CANCELLED", 30 * PATIENCE, "scancel")


def reasons(slurm: Slurm) -> str:
    return slurm.call("squeue", "-h", "-t", "PENDING", "-o", "%j %r %Q")


def submit(folder: Path, slurm: Slurm) -> dict[str, str]:
    numbers = {}
    for job, script in SCRIPTS.items():
        file = folder / f"{job}.sh"
        file.write_text(BEGIN + script)
        words = [f"--job-name={job}", f"--output={job}.out", "--open-mode=append"]
        if job in NODES:
            nodes = NODES[job]
            words += [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"]
            words += ["--ntasks-per-node=1", "--no-kill" if job == "zombie" else "--no-requeue"]
        else:  # on any of the four nodes that are left
            words += ["--exclusive", "--requeue", f"--nodes={2 if job == 'queued' else 1}"]
        environ = {"NAME": job, "LOST": " ".join(LOST.get(job, ()))}
        numbers[job] = slurm.submit(*words, str(file), **environ)
    return numbers


def see_down(found: Answers, slurm: Slurm) -> None:
    for line in set(slurm.call("sinfo", "-h", "-N", "-o", "%N %T").splitlines()):
        node, state = line.split()
        if state.startswith("down") and node in DOWN:
            found.down.setdefault(node, time.time())


def test_without_its_batch_host_a_no_kill_job_runs_on_without_a_script(answers: Answers) -> None:
    job = answers.ended["zombie"]
    assert (job.state, job.nodes) == ("RUNNING", ("h2",))
    assert "h1" in answers.down and "after" not in answers.of("zombie")


def test_a_job_that_has_given_up_its_dead_node_survives_what_becomes_of_it(
    answers: Answers,
) -> None:
    """The node is called down, boots before it was missed, or only is silent."""
    assert {"h5", "h12"} <= set(answers.down) and "h8" not in answers.down
    for job in ("shrunk", "booted", "silent"):
        assert answers.one(job, "shrink").code == 0
        assert answers.one(job, "last").code == 0, answers.table()
        assert answers.ended[job].state in ("RUNNING", "COMPLETING", "COMPLETED")
        assert answers.ended[job].nodes == NODES[job][:2]
    assert answers.ended["ended"].state == "NODE_FAIL"  # Slurm ends a job that keeps its node


def test_the_next_step_must_overlap_the_old_one(answers: Answers) -> None:
    """It starts at once, before and after the shrinking; any other waits for the lost step."""
    for job, key in (("shrunk", "overlap-whole"), ("shrunk", "overlap"), ("silent", "overlap")):
        answer = answers.one(job, key)
        assert answer.code == 0 and set(NODES[job][:2]) <= set(answer.text.split(" | "))
    assert answers.one("shrunk", "plain").code == 124, answers.one("shrunk", "plain")


def test_the_old_srun_waits_long_for_a_lost_node(answers: Answers) -> None:
    """It outlives `--wait=30`, so the script kills it, or starts the next step beside it."""
    assert answers.one("shrunk", "old-srun-ended").seconds > 30
    assert answers.one("shrunk", "overlap").at < answers.one("shrunk", "old-srun-ended").at


def test_a_node_can_be_excluded_only_after_the_requeue(answers: Answers) -> None:
    assert answers.one("excluded", "running").code != 0
    assert "no longer pending" in answers.one("excluded", "running").text
    # The signal that ends the script may reach scontrol, too, when it has done its work.
    assert answers.one("excluded", "requeue").code in (0, 128 + signal.SIGTERM)
    assert answers.one("excluded", "in-trap").code == 0
    first, second = answers.of("excluded")["begin"]
    assert second.text != first.text
    assert answers.ended["excluded"].state == "COMPLETED"


def test_the_tasks_of_a_silent_node_run_on(answers: Answers) -> None:
    """Neither shrinking nor Slurm's end of the job reaches them: there may be a second writer."""
    assert max(answers.beats("silent", "h12")) > answers.down["h12"]
    assert max(answers.beats("ended", "h14")) > answers.down["h14"]
    assert max(answers.beats("ended", "h13")) < max(answers.beats("ended", "h14")) - 3


def test_guards_of_nodes_need_a_step_each(answers: Answers) -> None:
    """A step that cannot begin on a dead node ends on all nodes, in spite of --no-kill."""
    shrunk = answers.one("guards", "shrink")
    for node in ("h16", "h17"):
        begun = answers.beats("guards", node, "guard")
        assert begun and max(begun) < shrunk.at - shrunk.seconds - 1
        assert max(answers.beats("guards", node, "own")) > answers.one("guards", "last").at - 1
    assert {line.text.split()[0] for line in answers.of("guards")["own"]} == {"h16", "h17"}


def test_the_next_step_has_a_number_of_its_own(answers: Answers) -> None:
    """The ports of the ranks follow from it, so the next start cannot meet the old one."""
    assert answers.one("guards", "next").code == 0
    steps = {line.text.split()[1] for line in answers.of("guards")["own"]}
    assert len(steps) == 2 and "0" not in steps


def test_ranks_survive_that_their_job_gives_up_a_spare_node(answers: Answers) -> None:
    assert answers.one("spare", "shrink").code == 0
    last = answers.one("spare", "last").at
    assert answers.ended["spare"].state in ("RUNNING", "COMPLETING", "COMPLETED")
    assert last > answers.down["h22"] and answers.ended["spare"].nodes == NODES["spare"][:2]
    for node, what in (("h20", "train"), ("h21", "train"), ("h20", "own"), ("h21", "own")):
        assert max(answers.beats("spare", node, what)) > last


def test_without_accounting_a_job_gives_up_nodes_once(answers: Answers) -> None:
    twice = answers.one("shrunk", "twice")
    assert twice.code != 0 and "try again in a bit" in twice.text


def test_a_job_that_is_queued_again_with_a_dead_node_never_starts(answers: Answers) -> None:
    """Once Slurm has missed the node it finds BadConstraints, and the priority is 0."""
    assert answers.ended["queued"].state == "PENDING"
