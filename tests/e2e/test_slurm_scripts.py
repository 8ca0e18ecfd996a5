"""Tests slurm/train.sbatch and sweep.sbatch without Slurm: stubs stand in for its commands.

This tests the scripts and the batch process that they start with folders that others made, with
unusual names and paths, and with unreadable lines. test_slurm.py shows on a real Slurm that jobs
resume.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel3d.slurm.job_state import JobState
from tests.e2e.command import ROOT, Ended, Shell

pytestmark = pytest.mark.nightly

TRAIN, SWEEP = (ROOT / "slurm" / name for name in ("train.sbatch", "sweep.sbatch"))
REAL = shlex.join((sys.executable, "-m", "parallel3d"))
# Each stub appends its arguments to a file of its own name, one line per call. srun acts as a rank
# 0 that was preempted if MARKER is set. `parallel3d` prints the keys that the batch process reads;
# only `parallel3d slurm` is the real command.
TOOLS = {
    "srun": """
        [[ $1 == --overlap ]] && exit
        printf '%s|' "$PARALLEL3D_SECRET" "${@:6}" >>srun.calls; echo >>srun.calls
        echo "$PARALLEL3D_START" >>start.calls
        [[ ${MARKER:-} ]] && mkdir -p "${MARKER%/*}" && touch "$MARKER"
        exit 0""",
    "scontrol": 'echo "$*" >>scontrol.calls',
    "squeue": 'if [[ $* == *%o ]]; then echo "${SUBMITTED:-}"; else echo RUNNING None; fi',
    "parallel3d": f"""
        [[ $1 == -m ]] && shift 2
        [[ $1 == slurm ]] && exec {REAL} "$@"
        printf '%s\\n' 'tp: 1' 'pp: 1' 'cp: 1' 'dp: null' 'runs_dir: runs'
        echo 'recovery: {{max_restarts: 3, exclude_days: 7.0, heartbeat_s: 5.0, shrink: false}}'
        echo 'launch: {{spares: 0}}'
        run=null
        for word in "$@"; do [[ $word == run=* ]] && run=${{word#run=}}; done
        echo "run: $run\"""",
}


@pytest.fixture
def tools(shell: Shell) -> Path:
    """Makes the folder with stubs of Slurm's commands."""
    folder = shell.scratch / "tools"
    folder.mkdir()
    for name, body in TOOLS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


def job(shell: Shell, tools: Path, script: Path, *words: str, **environ: str) -> Ended:
    """Runs `script` to its end as job 5, or as the second element of array 5."""
    path = os.pathsep.join((str(tools), os.environ["PATH"]))
    own = {"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "job", "SLURM_NNODES": "1", "PATH": path}
    return shell.run("bash", str(script), *words, **(own | environ))


def calls(shell: Shell, name: str) -> list[str]:
    file = shell.cwd / f"{name}.calls"
    return file.read_text().splitlines() if file.exists() else []


def words_of_ranks(shell: Shell) -> list[str]:
    """Returns the arguments after `bash -c SCRIPT rank` in the only call of srun, without the
    folder of logs."""
    (call,) = calls(shell, "srun")
    return call.split("|")[3:-1]


def state(shell: Shell, **changes: Any) -> dict[str, Any]:
    """Returns what the job keeps for its next start, after writing `changes` to it."""
    path = shell.cwd / "logs" / "5" / "job.json"
    if changes:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.chmod(0o700)
        path.write_text(json.dumps(dataclasses.asdict(JobState()) | changes))
    found = json.loads(path.read_text())
    return {name: found[name] for name in ("starts", "in_row", "newest")}


def test_a_job_ends_with_its_ranks_and_its_logs_are_private(shell: Shell, tools: Path) -> None:
    ended = job(shell, tools, TRAIN, "tp=2", "data.path=my 'books'/*")
    assert (ended.code, ended.err) == (0, "")
    words = ["parallel3d", "train", "tp=2", "data.path=my 'books'/*", "run=job-5"]
    assert words_of_ranks(shell) == words
    assert (shell.cwd / "logs" / "5").stat().st_mode & 0o777 == 0o700
    assert state(shell) == {"starts": 1, "in_row": 1, "newest": ""}


def test_a_job_whose_nodes_do_not_answer_at_first_starts_without_guards(
    shell: Shell, tools: Path
) -> None:
    two = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURMD_NODENAME": "n1"}
    ended = job(shell, tools, TRAIN, "run=r", **two)
    assert ended.code == 0, ended.err
    assert "2 of 2 nodes do not answer or fail their self-test" in ended.err
    assert words_of_ranks(shell) == ["parallel3d", "train", "run=r"]
    # A guard ends all processes of its start, so a late one must not take the ranks for its own.
    assert calls(shell, "start") == ["1 without guards"]


def test_a_job_may_get_another_number_of_nodes_each_time(shell: Shell, tools: Path) -> None:
    """As with `sbatch --nodes=1-2`, after a requeue."""
    two = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURMD_NODENAME": "n1"}
    for nodes in ({}, two, {}):
        ended = job(shell, tools, TRAIN, "run=r", **nodes)
        assert ended.code == 0, ended.err
    assert state(shell)["starts"] == 3


def test_only_failures_of_other_ranks_are_repeated_from_the_end_of_their_logs(
    shell: Shell, tools: Path
) -> None:
    log = "logs/5/1/rank-1.log"
    said = f"seq 200000 >{log}; echo 'parallel3d: X failed' >>{log}"
    (tools / "srun").write_text(f"#!/bin/bash\n{said}\nexit $CODE")
    assert "X failed" not in job(shell, tools, TRAIN, "run=r", CODE="0").err
    shell.run("rm", "-r", "logs")
    assert job(shell, tools, TRAIN, "run=r", CODE="2").err.count("X failed") == 1


@pytest.mark.parametrize("train", ["python my_train.py", "box python my_train.py"])
def test_a_script_of_the_users_own_is_run_in_place_of_the_command(
    shell: Shell, tools: Path, train: str
) -> None:
    """In a container there is no srun, so the batch process runs outside of it."""
    (tools / "python").symlink_to(tools / "parallel3d")
    (tools / "box").write_text('#!/bin/bash\n[[ $* == *" slurm "* ]] || exec "$@"\nexit 1\n')
    (tools / "box").chmod(0o755)
    ended = job(shell, tools, TRAIN, "tp=2", "run=r", PARALLEL3D_TRAIN=train)
    assert (ended.code, ended.err) == (0, "")
    assert words_of_ranks(shell) == [*train.split(), "tp=2", "run=r"]


@pytest.mark.parametrize("whose", ["somebody else's", "everybody's", "a link"])
def test_a_folder_of_logs_that_others_may_write_is_refused(
    shell: Shell, tools: Path, whose: str
) -> None:
    logs = shell.cwd / "logs" / "5"
    logs.parent.mkdir()
    if whose == "a link":
        (shell.cwd / "precious").mkdir(mode=0o700)
        logs.symlink_to(shell.cwd / "precious")
    else:
        logs.mkdir()
        logs.chmod(0o700 if whose == "somebody else's" else 0o777)
        if whose == "somebody else's":
            if os.geteuid() != 0:
                pytest.skip("only root makes folders of somebody else's")
            os.chown(logs, 65534, 65534)
    ended = job(shell, tools, TRAIN, "run=r")
    assert ended.code == 1
    assert len(ended.errors) == 1
    assert f"{logs} is not a folder that belongs to you alone" in ended.err
    assert calls(shell, "srun") == []


def test_text_in_counter_files_is_not_executed(shell: Shell, tools: Path) -> None:
    state(shell, starts="job[$(touch${IFS}PLANTED)]", newest="$(touch PLANTED)")
    assert job(shell, tools, TRAIN, "run=r").code == 0
    assert not (shell.cwd / "PLANTED").exists()
    assert state(shell) == {"starts": 1, "in_row": 1, "newest": ""}
    # The batch process counts onwards from the number that it wrote.
    assert job(shell, tools, TRAIN, "run=r").code == 0
    assert state(shell) == {"starts": 2, "in_row": 2, "newest": ""}


def test_a_preempted_job_is_requeued_wherever_its_runs_are(shell: Shell, tools: Path) -> None:
    """A value may be interpolated, have blanks or quotes, or be longer than the width at which YAML
    folds."""
    deep = shell.cwd / ("long and " * 12 + "'quoted'")
    environ = {"DEEP": str(deep), "MARKER": str(deep / "runs" / "custom-7" / "requeue")}
    words = ("runs_dir=${oc.env:DEEP}/runs", "run=${logger.project}-7", "logger.project=custom")
    (deep / "runs" / "custom-7" / "checkpoints" / "step-00000020").mkdir(parents=True)
    # The state is that after four starts without progress, but there is a checkpoint now.
    state(shell, starts=4, in_row=4, newest="step-00000010")
    ended = job(shell, tools, TRAIN, *words, PARALLEL3D=REAL, **environ)
    assert (ended.code, calls(shell, "scontrol")) == (0, ["requeue 5"]), ended.err
    assert state(shell) == {"starts": 5, "in_row": 1, "newest": "step-00000020"}
    assert not [path for path in shell.cwd.iterdir() if path.name.startswith("$")]


def test_a_run_that_cannot_be_resolved_ends_before_any_rank(shell: Shell, tools: Path) -> None:
    ended = job(shell, tools, TRAIN, "run=${oc.env:NO_SUCH}", PARALLEL3D=REAL)
    assert ended.code == 2
    assert len(ended.errors) == 1
    assert "NO_SUCH" in ended.err
    assert calls(shell, "srun") == []


def test_a_job_that_could_never_shrink_is_refused_before_any_rank(
    shell: Shell, tools: Path
) -> None:
    ended = job(shell, tools, TRAIN, "run=r", "recovery.shrink=true", "dp=1", PARALLEL3D=REAL)
    assert (ended.code, len(ended.errors), calls(shell, "srun")) == (2, 1, [])
    assert "dp=1 on 1 node has none; the nearest is recovery.shrink=false" in ended.err


@pytest.mark.parametrize("saved", [True, False])
def test_what_becomes_of_ranks_that_a_signal_asked_to_stop_decides(
    shell: Shell, tools: Path, saved: bool
) -> None:
    """They save and are started again, or have just ended their run."""
    marker = shell.cwd / "runs" / "r" / "requeue"
    save = f"mkdir -p {marker.parent}; touch {marker}" if saved else "true"
    (tools / "srun").write_text(
        f"#!/bin/bash\ntrap '{save}; exit 0' USR1\nkill -USR1 $PPID\nwhile :; do sleep 0.1; done\n"
    )
    ended = job(shell, tools, TRAIN, "run=r")
    assert (ended.code, calls(shell, "scontrol")) == (0, ["requeue 5"] if saved else []), ended.err
    assert ("a signal stopped the run and it has saved" in ended.err) == saved


def test_a_squeue_that_does_not_answer_is_logged(shell: Shell, tools: Path) -> None:
    (tools / "squeue").write_text("#!/bin/bash\nexit 1\n")
    marker = str(shell.cwd / "runs" / "r" / "requeue")
    ended = job(shell, tools, TRAIN, "run=r", MARKER=marker)
    assert calls(shell, "scontrol") == []
    assert "squeue does not answer; scontrol requeue 5 queues the job again" in ended.err


def test_any_job_name_becomes_a_valid_run_name(shell: Shell, tools: Path) -> None:
    name = "llama(1), 'a'=[b]/{c}$d é"
    marker = str(shell.cwd / "runs" / "llama_1____a___b___c__d__-5" / "requeue")
    environ = {"SLURM_JOB_NAME": name, "MARKER": marker, "LC_ALL": "C.UTF-8"}
    ended = job(shell, tools, TRAIN, PARALLEL3D=REAL, **environ)
    assert calls(shell, "scontrol") == ["requeue 5"], (ended.err, calls(shell, "srun"))


def test_ranks_share_a_secret_of_their_job(shell: Shell, tools: Path) -> None:
    for environ in ({}, {}, {"PARALLEL3D_SECRET": "given"}):
        assert job(shell, tools, TRAIN, "run=r", **environ).code == 0
    first, second, third = (call.split("|")[0] for call in calls(shell, "srun"))
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != second
    assert third == "given"


def element(shell: Shell, tools: Path, folder: Path, **environ: str) -> Ended:
    """Submits an array with the scripts in `folder`; returns its second element."""
    own = {
        "SLURM_ARRAY_JOB_ID": "5",
        "SLURM_ARRAY_TASK_ID": "2",
        "SUBMITTED": f"{folder}/sweep.sbatch runs.txt tp=2 run=lr",
    }
    return job(shell, tools, SWEEP, "runs.txt", "tp=2", "run=lr", **(own | environ))


def lines(shell: Shell, second: str) -> None:
    (shell.cwd / "runs.txt").write_text(f"# a sweep\nseed=1\n\n{second}\n")


def test_a_sweep_works_with_blanks_in_folders_and_quotes_in_words(
    shell: Shell, tools: Path
) -> None:
    folder = shell.scratch / "my dir" / "slurm"
    shutil.copytree(TRAIN.parent, folder)
    lines(shell, "seed=2 data.path='my books/*' \"logger.project=it's\"")
    ended = element(shell, tools, folder)
    assert (ended.code, ended.err) == (0, "")
    words = ["tp=2", "run=lr-2", "seed=2", "data.path=my books/*", "logger.project=it's"]
    assert words_of_ranks(shell) == ["parallel3d", "train", *words]


def test_an_unclosed_quote_is_refused(shell: Shell, tools: Path) -> None:
    lines(shell, "optim.lr=1e-3 data.path=/d/tom's.txt")
    ended = element(shell, tools, TRAIN.parent)
    assert (ended.code, calls(shell, "srun")) == (2, [])
    assert len(ended.errors) == 1
    assert "line 2 of runs.txt has a quote without its other half" in ended.err


@pytest.mark.parametrize(
    "submitted", ["", "/nowhere/sweep.sbatch runs.txt", "wrapped/sweep.sbatch"]
)
def test_only_the_right_train_sbatch_is_run(shell: Shell, tools: Path, submitted: str) -> None:
    for folder in (shell.cwd, shell.cwd / "wrapped"):
        folder.mkdir(exist_ok=True)
        (folder / "train.sbatch").write_text("touch PLANTED\n")
    lines(shell, "seed=2")
    ended = element(shell, tools, TRAIN.parent, SUBMITTED=submitted)
    assert (ended.code, calls(shell, "srun")) == (2, [])
    assert "give its path as TRAIN_SBATCH" in ended.err
    assert not (shell.cwd / "PLANTED").exists()
    named = element(shell, tools, TRAIN.parent, SUBMITTED=submitted, TRAIN_SBATCH=str(TRAIN))
    assert (named.code, len(calls(shell, "srun"))) == (0, 1), named.err
