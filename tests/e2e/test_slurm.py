"""Runs slurm/train.sbatch and sweep.sbatch on a real Slurm: every disturbed run has the undisturbed
result.

Nodes are namespaces of this machine, each with its own slurmd, and the jobs are real: one rank, or
two on two nodes, disturbed while they train. All run at the same time on one cluster. The scripts
are those for users; options on sbatch's command line make them small. CI runs this as root with
Slurm; elsewhere the tests are skipped with the reason.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import PARALLEL3D, ROOT, TINY, Ended, Shell, without_replaced
from tests.e2e.forked import Forked
from tests.e2e.private_slurm import OVER, Job, Slurm, why_not
from tests.pace import PATIENCE
from tests.wandb_records import wandb_records

# CI has all of it, and must not pass by skipping.
REASON = None if os.environ.get("CI") else why_not()
pytestmark = [
    pytest.mark.more,
    pytest.mark.first,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

TRAIN, SWEEP = ROOT / "slurm" / "train.sbatch", ROOT / "slurm" / "sweep.sbatch"
SLOW_STEPS = Path(__file__).parent / "slow_steps"
STEPS = 40
DISTURB_AT = 12  # the first slow step: jobs wait there, and a checkpoint is two steps older
WORDS = (f"train.steps={STEPS}", "train.save_weights=true", "checkpoint.every=10")
WANDB = "logger=wandb"
SMALL = ("--gpus-per-node=0", "--cpus-per-task=1")
TWO_NODES = (*SMALL, "--nodes=2", "--ntasks-per-node=1", "--exclusive")
# Runs of one rank, and the runs to compare with; all others have two ranks.
SAME_AS = {"array_1": "undisturbed-0", "array_2": "undisturbed-1"}
SECRETS = {
    "WANDB_API_KEY": "5ec4e70123456789abcdef0123456789abcdef01",
    "HF_TOKEN": "hf_5ec4e7QwErTyUiOpAsDfGhJkLzXcVbNm",
    "AWS_SECRET_ACCESS_KEY": "5ec4e7/K7MDENG+bPxRfiCYEXAMPLEKEY",
}


@dataclass
class Story:
    """The submitted jobs, their results, and their folders."""

    shell: Shell
    numbers: dict[str, str] = field(default_factory=dict)  # name → job
    # "crash" → the state of the job before the crash.
    disturbed: dict[str, Job] = field(default_factory=dict)
    ended: dict[str, Job] = field(default_factory=dict)  # number → the state of the job at the end
    submitted: Ended | None = None  # the sweep by Hydra's launcher

    def run_dir(self, run: str) -> Path:
        return self.shell.cwd / "runs" / run

    def number(self, name: str) -> str:
        """Returns the run of a job, or of an element of an array: array_2 → 12_2."""
        name, *element = name.split("_")
        return "_".join((self.numbers[name], *element))

    def of(self, name: str) -> Job:
        return self.ended[self.number(name)]

    def output(self, name: str) -> str:
        return (self.shell.cwd / f"slurm-{self.number(name)}.out").read_text()

    def weights(self, run: str) -> bytes:
        return (self.run_dir(run) / "weights-final.safetensors").read_bytes()

    def losses(self, run: str) -> list[tuple[int, float, float]]:
        """Returns (step, loss, gradient norm) from metrics.jsonl."""
        lines = (self.run_dir(run) / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]

    def logged(self, run: str) -> list[dict[str, Any]]:
        """Returns rows of all of the run's W&B sessions, in order."""
        files = sorted(self.run_dir(run).glob("wandb/offline-run-*/*.wandb"))
        sessions = [wandb_records(path) for path in files]
        ids = {record["run_id"] for session in sessions for record in session.get("run", [])}
        assert ids == {(self.run_dir(run) / "wandb-id").read_text().strip()}
        return [row["item"] for session in sessions for row in session.get("history", [])]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Runs all jobs from beginning to end and, at the same time, the runs to compare with."""
    cwd = tmp_path_factory.mktemp("slurm")
    environ = SECRETS | {"WANDB_MODE": "offline", "GLOO_SOCKET_IFNAME": "lo"}
    scratch = tmp_path_factory.mktemp("scratch")
    shell = Shell(cwd, scratch, environ, anew=True)  # submitit starts jobs with its own interpreter
    # The runs to compare with: these are not the jobs' processes.
    alone = Shell(cwd, scratch=shell.scratch)
    forked = Forked(alone)
    story = Story(shell)
    words = without_replaced((*TINY, *shell.text(), *WORDS))
    slurm = Slurm.start(shell, nodes=10)
    try:
        submit(story, slurm, words)
        reference(forked, words)
        train = (*PARALLEL3D, "train", *words)
        elsewhere = ("run=submitted", "seed=1", "tp=1,3", "hydra/launcher=submitit_slurm")
        submitted = shell.start(*train, "--multirun", *elsewhere, SLURM_CONF=str(slurm.conf))
        disturb_all(story, slurm)
        forked.finish()
        out, err = submitted.communicate(timeout=600)  # Hydra's launcher polls less and less often
        story.submitted = Ended(submitted.returncode, out, err, 0.0, 0.0)
        yield story
    finally:
        slurm.stop(cwd / "slurm-logs")
        shell.end_all()
        alone.end_all()


def reference(forked: Forked, words: tuple[str, ...]) -> None:
    """Starts the runs to compare with: on two ranks, and the runs of the sweeps."""
    forked.add_world(2, "train", *words, "dp=2", "run=undisturbed")
    for seed in (1, 2):
        forked.add("train", *words, f"run=undisturbed-{seed - 1}", f"seed={seed}")
    forked.start()


def submit(story: Story, slurm: Slurm, words: tuple[str, ...]) -> None:
    path = story.shell.environment()["PYTHONPATH"]
    environ = {
        "PARALLEL3D": shlex.join((sys.executable, "-m", "parallel3d")),
        "PYTHONPATH": os.pathsep.join((str(SLOW_STEPS), path)),
        "LET_GO": str(story.shell.cwd),
    }
    (story.shell.cwd / "runs.txt").write_text("# a learning-rate sweep\nseed=1\n\nseed=2\n")

    def job(name: str, *command: str) -> None:
        story.numbers[name] = slurm.submit(f"--job-name={name}", *command, **environ)

    one = (*SMALL, "--nodes=1", "--ntasks-per-node=1")
    # Slurm notices the limit within half a minute, and then the second job has a quarter of a
    # minute.
    limit = ("--time=1", "--signal=USR1@15")
    job("array", *one, *limit, "--array=1-2", str(SWEEP), "runs.txt", *words)
    slurm.call("scontrol", "update", f"jobid={story.number('array_1')}", "timelimit=10")
    job("crash", *TWO_NODES, str(TRAIN), *words, WANDB)
    job("preempt", *TWO_NODES, str(TRAIN), *words, WANDB)
    job("cancel", *one, str(TRAIN), *words)
    job("wrong", *one, str(TRAIN), *words, "tp=3")


def disturb_all(story: Story, slurm: Slurm) -> None:
    """Disturbs each job once it trains and has a checkpoint; returns when all jobs are over."""
    names = {"crash", "preempt", "array_1", "array_2", "cancel"}
    todo = set(names)
    deadline = time.monotonic() + 400 * PATIENCE
    while True:
        jobs = slurm.jobs()
        if not todo and all(job.state in OVER for job in jobs.values()):
            break
        assert time.monotonic() < deadline, f"still to disturb: {todo}; {jobs}"
        for name in sorted(names):
            number = story.number(name)
            if name in todo and number in jobs and disturb(name, jobs[number], story, slurm):
                todo.remove(name)
            if (story.shell.cwd / "logs" / number / "2").exists():  # the run's second start
                (story.shell.cwd / f"{name}.go").touch()
        time.sleep(0.3)
    story.ended = jobs


def disturb(name: str, job: Job, story: Story, slurm: Slurm) -> bool:
    """Disturbs a job according to its name, if it is time; returns whether it did."""
    if name == "array_2" and job.restarts:  # Slurm has disturbed it; it only has to be released
        slurm.call("scontrol", "update", f"jobid={job.number}", "timelimit=10")
    if job.restarts:
        return True
    if name == "array_2":
        return False
    run_dir = story.run_dir(run_of(job))
    saved, metrics = run_dir / "checkpoints" / "step-00000010", run_dir / "metrics.jsonl"
    if job.state != "RUNNING" or not saved.exists():
        return False
    if len(metrics.read_text().splitlines()) < DISTURB_AT:
        return False
    if name == "crash":
        # Slurm learns of it half a minute sooner, when the other node's rank has failed because of
        # it.
        if name not in story.disturbed:
            story.disturbed[name] = job
            slurm.crash(job.nodes[1])
        if "Exited with exit code" not in story.output(name):
            return False
        slurm.down(job.nodes[1])
    elif name == "preempt":
        # It has a higher priority, and needs the very nodes of this job.
        nodes = ("--nodes=2", "--exclusive", f"--nodelist={','.join(job.nodes)}")
        urgent = slurm.submit("--partition=urgent", *nodes, "--wrap=sleep 2")
        story.numbers["urgent"] = urgent
    elif name == "array_1":
        processes = story.shell.processes().items()
        (pid,) = (
            pid
            for pid, env in processes
            if f"{env.get('SLURM_ARRAY_JOB_ID')}_{env.get('SLURM_ARRAY_TASK_ID')}" == job.number
            and env.get("SLURM_STEP_ID") == "0"
            and Path(f"/proc/{pid}/comm").read_text().startswith("python")
        )
        os.kill(pid, signal.SIGKILL)
    elif name == "cancel":
        slurm.call("scancel", job.number)
    return True


def run_of(job: Job) -> str:
    return f"{job.name}-{job.number}"


@pytest.mark.parametrize("name", ["preempt", "crash", "array_1", "array_2"])
def test_a_disturbed_job_resumes_by_itself_to_the_undisturbed_result(
    story: Story, name: str
) -> None:
    job = story.of(name)
    assert job.state == "COMPLETED", story.output(name)
    # Only the killed rank is restarted on the job's node; the others are queued again.
    assert (job.restarts > 0) == (name != "array_1"), story.output(name)
    assert ("; starting again" in story.output(name)) == (name == "array_1")
    run, undisturbed = run_of(job), SAME_AS.get(name, "undisturbed")
    assert f"run={run} resumes at step " in story.output(name)
    assert story.losses(run) == story.losses(undisturbed)
    assert story.weights(run) == story.weights(undisturbed)


def test_a_preempted_job_saves_and_ends(story: Story) -> None:
    assert story.of("urgent").state == "COMPLETED"
    assert "stopped by SIGUSR1 after step " in story.output("preempt")
    assert "the job is queued again" in story.output("preempt")


def test_a_job_saves_before_its_time_limit(story: Story) -> None:
    assert "stopped by SIGUSR1 after step " in story.output("array_2")
    assert "DUE TO TIME LIMIT" not in story.output("array_2")


def test_a_job_whose_node_dies_continues_on_other_nodes(story: Story) -> None:
    dead = story.disturbed["crash"].nodes[1]
    assert dead not in story.of("crash").nodes


def test_array_elements_train_their_lines_and_resume_after_a_disturbance(
    story: Story,
) -> None:
    """The last element has the number and the limit of the whole array: only it may be queued
    again."""
    for line in (1, 2):
        job = story.ended[f"{story.numbers['array']}_{line}"]
        assert (job.state, job.restarts) == ("COMPLETED", line - 1)
        assert story.weights(run_of(job)) == story.weights(f"undisturbed-{line - 1}")
    assert story.weights("undisturbed-0") != story.weights("undisturbed-1")


def test_hydras_submitit_launcher_runs_a_sweep_and_reports_failures(story: Story) -> None:
    assert story.weights("submitted-0") == story.weights("undisturbed-0")
    assert not story.run_dir("submitted-1").exists()  # tp=3 does not divide four heads
    assert story.submitted.code == 2, story.submitted.err
    assert "parallel3d: job 1 of the sweep ended with code 2; " in story.submitted.errors[-1]
    (log,) = (story.shell.cwd / "runs").glob(".multirun/.submitit/*_1/*_1_0_log.err")
    assert "tp=3 must divide model.num_attention_heads=4" in log.read_text()


def test_a_cancelled_job_stays_cancelled(story: Story) -> None:
    assert (story.of("cancel").state, story.of("cancel").restarts) == ("CANCELLED", 0)
    assert "queued again" not in story.output("cancel")


def test_an_invalid_configuration_is_not_retried(story: Story) -> None:
    assert (story.of("wrong").state, story.of("wrong").restarts) == ("FAILED", 0)
    assert "tp=3" in story.output("wrong")
    assert "starting again" not in story.output("wrong")
    assert not story.run_dir(run_of(story.of("wrong"))).exists()


@pytest.mark.parametrize("name", ["preempt", "crash"])
def test_wandb_has_one_run_with_every_step_once(story: Story, name: str) -> None:
    rows = story.logged(run_of(story.of(name)))
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/loss" in row] == [STEPS]
    per_step = 4 * 32  # global batch × sequence
    assert [row["tokens"] for row in rows if "train/loss" in row] == [n * per_step for n in steps]


def test_secrets_of_the_environment_are_in_no_file(story: Story) -> None:
    """Collects logs, configurations, checkpoints, W&B files, and tracebacks of crashed jobs."""
    files = [path for path in story.shell.cwd.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "rank-1.log", "metrics.jsonl", "debug-internal.log"} <= names
    assert [path for path in files if path.name.endswith(".traceback.txt")]
    assert [path for path in files if "checkpoints" in path.parts]
    for name, secret in SECRETS.items():
        found = [path for path in files if secret.encode() in path.read_bytes()]
        assert not found, f"{name} is in {found}"


def test_run_directories_and_logs_are_private_to_the_user(story: Story) -> None:
    folders = [*(story.shell.cwd / "runs").iterdir(), *(story.shell.cwd / "logs").iterdir()]
    runs = [folder for folder in folders if folder.is_dir() and folder.name != ".multirun"]
    assert len(runs) > 10
    assert not [folder for folder in runs if folder.stat().st_mode & 0o077]
