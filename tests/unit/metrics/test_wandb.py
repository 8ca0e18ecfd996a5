"""Tests W&B: the content of an offline run, that restarts are one run, and that its failure does
not stop ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import wandb

from parallel3d.checkpoint.identity import decisive
from parallel3d.metrics.jsonl import rows_of
from parallel3d.metrics.keys import LoggerConfig
from parallel3d.metrics.loggers import resolve_mode, sync_command
from parallel3d.metrics.peak import Peak
from parallel3d.metrics.recorder import Recorder
from parallel3d.metrics.wandb_ledger import begin, kept_id
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.e2e.ready import run_code
from tests.wandb_records import wandb_records
from tests.wandb_server import WandbServer

pytestmark = pytest.mark.nightly

SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a home without keys."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in (
        "WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC",
        "WANDB_PROJECT", "WANDB_NAME", "WANDB_TAGS", "WANDB_RUN_ID", "WANDB_SWEEP_ID",
        "WANDB_ENTITY", "WANDB_NOTES", "WANDB_JOB_TYPE",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


def make_config() -> Config:
    config = Config()
    config.model = ModelConfig(name="gpt_tiny")
    config.train.steps = 3
    keys = {"entity": "my-team", "job_type": "pretrain", "notes": "a try"}
    config.logger = LoggerConfig(name="wandb", group="sweep", tags=["a", "b"], **keys)
    return config


def train(config: Config, run_dir: Path, wait_s: float = 0.0) -> dict[str, Any]:
    with Recorder(config, run_dir, 1e6, Peak(1e9, "test")) as recorder:
        recorder.start({})
        for step in (1, 2, 3):
            times = {"forward": 0.04, "tp": step / 100}
            more = {"times": times, "memory": {"allocated": step, "reserved": 9}}
            recorder.step(step, 4.0 - step, 0.5, 1e-3, 4096, 0.1, skipped=step == 2, **more)
        recorder.evaluation(3, 1.5)
        time.sleep(wait_s)
        return recorder.finish()


def inspect(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns records of the run directory's only W&B file by type, read by W&B's own tool."""
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    return wandb_records(path)


def test_an_offline_run_holds_metrics_config_code_version_group_and_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No figures of the host are logged, although there would be time, because nobody asked for
    them."""
    monkeypatch.setenv("WANDB__STATS_SAMPLING_INTERVAL", "0.1")
    run_dir = tmp_path / "my-run"
    run_dir.mkdir()
    config = make_config()
    config.logger.name = ["wandb", "tensorboard"]  # TensorBoard has tests of its own
    summary = train(config, run_dir, wait_s=0.5)
    records = inspect(run_dir)
    assert "stats" not in records
    assert [*(run_dir / "tensorboard").glob("events.out.tfevents.*")]
    rows = [history["item"] for history in records["history"]]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == [3.0, 2.0, 1.0]
    assert [row["tokens"] for row in rows] == [4096, 8192, 12288, 12288]
    assert rows[-1]["eval/loss"] == 1.5
    assert [row.get("time/tp") for row in rows] == [0.01, 0.02, 0.03, None]
    assert [bool(row.get("train/skipped")) for row in rows] == [False, True, False, False]
    assert [row.get("memory/allocated") for row in rows] == [1, 2, 3, None]
    assert not {"times", "memory"} & rows[0].keys()
    run = records["run"][0]
    assert run["run_id"] == (run_dir / "wandb-id").read_text().strip()
    assert (run["display_name"], run["project"]) == ("my-run", "parallel3d")
    assert run["run_group"] == "sweep"
    assert run["tags"] == ["a", "b"]
    assert (run["entity"], run["job_type"], run["notes"]) == ("my-team", "pretrain", "a try")
    assert records["exit"][0].get("exit_code", 0) == 0
    axes = [metric["name"] for metric in records["metric"] if "name" in metric]
    assert axes == ["step", "tokens"]
    merged = {k: v for record in records["summary"] for k, v in record["update"].items()}
    assert merged["status"] == "finished"
    assert "paths" not in merged
    kept = run["config"]["update"]
    assert kept["global_batch_size"] == 16
    assert kept["model"]["hidden_size"] == 128
    assert set(kept["code"]) == {"parallel3d", "git_commit", "torch", "hostname"}
    assert summary["wandb"]["mode"] == "offline"
    assert Path(summary["wandb"]["folder"]).is_dir()
    begin, end = capfd.readouterr().out.split("run directory", 1)
    command = f"wandb sync {summary['wandb']['folder']}"
    assert "W&B is offline, because there is no API key" in begin
    assert all(command in "".join(text.split("\n")) for text in (begin, end))
    (run_dir / "wandb" / "offline-run-20260101_000000-x").mkdir()
    several = sync_command(Path(summary["wandb"]["folder"]))
    assert several.startswith(f"find {run_dir / 'wandb'}/offline-run-* -name")


def test_wandbs_variables_set_keys_that_are_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep's agent gives the id: otherwise the run would be another one outside of the sweep."""
    variables = {"PROJECT": "foo", "NAME": "nice", "TAGS": "x,y"}
    variables |= {"ENTITY": "us", "NOTES": "as told", "JOB_TYPE": "sft"}
    agents = {"RUN_ID": "agent01", "SWEEP_ID": "sweep"}
    for name, text in (variables | agents).items():
        monkeypatch.setenv(f"WANDB_{name}", text)
    wandb.teardown()  # W&B reads its variables once per process
    config = make_config()
    config.logger = LoggerConfig(name="wandb")
    run_dir = tmp_path / "b"
    run_dir.mkdir()
    train(config, run_dir)
    run = inspect(run_dir)["run"][0]
    found = run["project"], run["display_name"], run.get("tags")
    assert found == ("foo", "nice", ["x", "y"])
    assert (run["entity"], run["notes"], run["job_type"]) == ("us", "as told", "sft")
    assert (run_dir / "wandb-id").read_text().strip() == run["run_id"] == "agent01"

    for name in agents:
        monkeypatch.delenv(f"WANDB_{name}")
    wandb.teardown()
    typed = tmp_path / "typed"
    typed.mkdir()
    config.logger = LoggerConfig(name="wandb", project="bar", tags=["z"])
    with Recorder(config, typed, 1e6, Peak(1e9, "test")) as recorder:
        recorder.start({})
        # this step has no token to learn
        recorder.step(1, None, 0.0, 1e-3, 4096, 0.1, skipped=True)
        recorder.evaluation(1, None, {"a": None})
    records = inspect(typed)
    assert (records["run"][0]["project"], records["run"][0]["tags"]) == ("bar", ["z"])
    rows = [history["item"] for history in records["history"]]
    assert [row["step"] for row in rows] == [1, 1] and rows[0]["train/skipped"]
    assert not any("loss" in name for row in rows for name in row)
    wandb.teardown()


def test_wandb_mode_disabled_leaves_nothing_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    summary = train(make_config(), tmp_path)
    assert summary["wandb"] == {"mode": "disabled", "url": None, "folder": None}
    left = {path.name for path in tmp_path.iterdir()} - {"home"}
    assert left == {"metrics.jsonl", "starts.jsonl", "summary.json"}
    assert "disabled by WANDB_MODE" in capfd.readouterr().out


def test_an_error_of_the_run_also_fails_the_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = []
    real = wandb.Run.finish

    def finish(self: wandb.Run, exit_code: int) -> None:
        codes.append(exit_code)
        real(self, exit_code=exit_code)

    def broken(self: wandb.Run, row: dict[str, float], **how: object) -> None:
        raise TypeError("ours")

    monkeypatch.setattr(wandb.Run, "finish", finish)
    monkeypatch.setattr(wandb.Run, "log", broken)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with pytest.raises(TypeError, match="ours"):
        train(make_config(), run_dir)
    assert codes == [1]


def test_no_key_is_offline_and_a_key_is_online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_mode("auto") == "offline"
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text(f"machine api.wandb.ai\n login user\n password {SECRET}\n")
    netrc.chmod(0o600)
    assert resolve_mode("auto") == "online"
    assert resolve_mode("offline") == "offline"
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert resolve_mode("auto") == "offline"


def test_no_network_at_the_start_falls_back_to_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tests that the key is found nowhere in the run directory or on the screen."""
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    real = wandb.init

    def unreachable(**options: Any) -> Any:
        if options["mode"] == "online":
            raise wandb.errors.CommError("no such host")
        return real(**options)

    monkeypatch.setattr(wandb, "init", unreachable)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    summary = train(make_config(), run_dir)
    assert (summary["status"], summary["wandb"]["mode"]) == ("finished", "offline")
    assert len(list(run_dir.glob("wandb/offline-run-*/*.wandb"))) == 1
    out, err = capfd.readouterr()
    assert out.count("CommError: no such host") == 1 and SECRET not in out + err
    files = [f for f in run_dir.rglob("*") if f.is_file()]
    assert not [f for f in files if SECRET.encode() in f.read_bytes()]


def test_a_dead_wandb_process_is_reported_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def lost(self: wandb.Run, row: dict[str, float], **how: object) -> None:
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(wandb.Run, "log", lost)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    summary = train(make_config(), run_dir)
    assert summary["status"] == "finished"
    assert len([*rows_of(run_dir / "metrics.jsonl")]) == 4
    assert capfd.readouterr().out.count("Connection lost") == 1


def test_two_runs_of_one_name_are_two_wandb_runs_and_starts_of_a_run_are_one(
    tmp_path: Path,
) -> None:
    mine, theirs = tmp_path / "a" / "gpt tiny", tmp_path / "b" / "gpt tiny"
    for run_dir in (mine, theirs):
        run_dir.mkdir(parents=True)

    def made(run_dir: Path) -> str:
        return begin(run_dir, 1, decisive(make_config()), {}).id

    assert made(mine) == made(mine) != made(theirs)


# Sessions `first-last-how`, one after another, each in a process of its own: it trains these steps
# and evaluates every 10. With `kill` it dies like on a dead node, with W&B's own process and the
# rows in its buffers. They are forked from one process, which imports everything and starts
# nothing.
SESSIONS = """
import os, sys, time
from pathlib import Path
import torch, wandb
from parallel3d.metrics.keys import LoggerConfig
from parallel3d.metrics.peak import Peak
from parallel3d.metrics.recorder import Recorder
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config

def session(run_dir, first, last, how):
    config = Config()
    config.model = ModelConfig(name="gpt_tiny")
    config.train.steps = 400
    config.logger = LoggerConfig(name="wandb")
    with Recorder(config, run_dir, 1e6, Peak(1e9, "test"), first_step=first) as recorder:
        recorder.start({})
        for step in range(first, last + 1):
            loss = float("nan") if step == 7 else 4.0 / step
            recorder.step(step, loss, 0.5, 1e-3, 4096, 0.1)
            if step % 10 == 0:
                recorder.evaluation(step, 5.0 / step)
        if how == "kill":
            # Of three hundred rows W&B writes the first block of 32 KiB while they come.
            files = run_dir.glob("wandb/offline-run-*/*.wandb")
            while last - first > 100 and next(files).stat().st_size < 32768:
                files = run_dir.glob("wandb/offline-run-*/*.wandb")
                time.sleep(0.005)
            for task in Path("/proc/self/task").iterdir():
                for child in (task / "children").read_text().split():
                    os.kill(int(child), 9)
            os.kill(os.getpid(), 9)

for asked in sys.argv[2:]:
    first, last, how = asked.split("-")
    child = os.fork()
    if child == 0:
        session(Path(sys.argv[1]), int(first), int(last), how)
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != (-9 if how == "kill" else 0):
        sys.exit(f"session {asked} ended with {code}")
"""


def test_no_step_is_twice_in_wandb_and_none_is_lost_when_killed_sessions_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions resume before, at and after the last row that reached the file."""
    run_dir = tmp_path / "my-run"
    run_dir.mkdir()

    sessions = (
        "1-300-kill",  # many blocks reach the file, the last rows do not
        "300-310-kill",  # a checkpoint after the file's last row; nothing reaches a file
        "305-320-end",  # all missing rows are added
        "311-325-end",  # a checkpoint before the last row: some steps are trained twice
    )
    # Earlier tests have left the address of their W&B process: each has its own here.
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    done = run_code(SESSIONS, str(run_dir), *sessions)
    assert done.returncode == 0, done.stderr
    assert "W&B offline failed" not in done.stdout, done.stdout

    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    records = [wandb_records(path) for path in files]
    made = (run_dir / "wandb-id").read_text().strip()
    assert {run["run_id"] for record in records for run in record.get("run", [])} == {made}
    reached = [len(record.get("history", [])) for record in records]
    assert 0 < reached[0] < 330  # the premise: the killed session lost its last rows
    rows = [history["item"] for record in records for history in record.get("history", [])]
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert steps == list(range(1, 326))
    assert [row["step"] for row in rows if "eval/loss" in row] == list(range(10, 330, 10))
    assert all(row["tokens"] == row["step"] * 4096 for row in rows)
    numbers = [row["_step"] for row in rows]  # `wandb sync` sends them as they are
    assert numbers == sorted(set(numbers))
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert (losses[7], losses[300], losses[325]) == ("NaN", 4 / 300, 4 / 325)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at the end", "after each"])
def test_wandb_sync_sends_all_sessions_as_one_history_with_growing_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Uploads with W&B's own tool, by the command that we print, to a stub of its server."""
    run_dir = tmp_path / "my run"
    run_dir.mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)

    def sync() -> None:
        newest = max(run_dir.glob("wandb/offline-run-*"))
        env = os.environ | {"WANDB_BASE_URL": server.address, "WANDB_API_KEY": SECRET}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        command = ("sh", "-c", sync_command(newest))
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and "ERROR" not in done.stderr, done.stderr

    # The second session resumes from a checkpoint before the first one's last row, and is killed
    # before a record reaches its file.
    sessions = ("1-12-end", "11-15-kill", "13-20-end")
    batches = [sessions] if when == "at the end" else [(one,) for one in sessions]
    with WandbServer().serving() as server:
        for batch in batches:
            done = run_code(SESSIONS, str(run_dir), *batch)
            assert done.returncode == 0, done.stderr
            sync()
    (lines,) = server.lines.values()
    rows = [lines[place] for place in sorted(lines)]
    # Nothing was sent over lines that were there.
    assert sum(count for _, count in server.sent) == len(lines) == 22
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 21))
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers))


# The same by W&B's own means: `resume`, and explicit steps of rows. A session logs the rows from
# its first step on, or from step 1 on ("all").
ONLY_WANDB = """
import os, sys, time
from pathlib import Path
import wandb

def session(folder, first, last, how):
    quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    run = wandb.init(project="p", id="same", dir=folder, mode="offline", resume="allow",
                     settings=quiet)
    for step in range(first, last + 1):
        run.log({"loss": 4.0 / step}, step=step)
    if how == "kill":
        # Of three hundred rows W&B writes the first block of 32 KiB while they come.
        while last - first > 100 and Path(run.settings.sync_file).stat().st_size < 32768:
            time.sleep(0.005)
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                os.kill(int(child), 9)
        os.kill(os.getpid(), 9)
    run.finish()

for asked in sys.argv[3:]:
    first, last, how = asked.split("-")
    child = os.fork()
    if child == 0:
        session(sys.argv[1], 1 if sys.argv[2] == "all" else int(first), int(last), how)
        sys.exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.more
@pytest.mark.parametrize("logged", ["new", "all"])
def test_wandbs_own_resume_and_steps_do_not_keep_rows_whole(tmp_path: Path, logged: str) -> None:
    """Shows why `wandb_ledger` reads the files of killed sessions. If this fails, it need not read
    them any more."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("WANDB_")}
    sessions = ("1-300-kill", "291-310-kill", "301-320-end")  # each starts from a checkpoint
    command = (sys.executable, "-c", ONLY_WANDB, str(tmp_path), logged, *sessions)
    subprocess.run(command, capture_output=True, env=own, check=True)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    rows = [row["item"] for file in files for row in wandb_records(file).get("history", [])]
    times = Counter(row["_step"] for row in rows)
    if logged == "new":
        assert set(range(1, 321)) - times.keys()  # rows are lost
    else:
        assert [step for step, count in times.items() if count > 1]


def test_the_later_last_step_of_server_and_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    logged: list[dict[str, Any]] = []
    real = wandb.init

    def resumed(**options: Any) -> Any:
        assert (options["id"], options["resume"]) == (kept_id(run_dir), "allow")
        run = real(**options | {"mode": "offline", "resume": None})
        monkeypatch.setattr(type(run), "resumed", True)
        monkeypatch.setattr(run, "log", lambda row, **how: logged.append(row))
        run.summary.update({"step": 2})
        return run

    monkeypatch.setattr(wandb, "init", resumed)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    earlier = {"step": 1, "loss": 3.0, "grad_norm": 0.5, "lr": 1e-3, "tokens": 4096}
    more = {"tokens_per_s": 1.0, "mfu": 0.1, "step_time_s": 0.1}
    (run_dir / "metrics.jsonl").write_text(json.dumps(earlier | more) + "\n")
    with Recorder(make_config(), run_dir, 1e6, Peak(1e9, "test"), first_step=2) as recorder:
        recorder.start({})
        recorder.step(2, 2.0, 0.5, 1e-3, 4096, 0.1)
        recorder.step(3, 1.0, 0.5, 1e-3, 4096, 0.1)
    assert [row["step"] for row in logged] == [3]


def test_an_unreadable_wandb_file_leads_to_a_separate_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    folder = run_dir / "wandb" / "offline-run-20260101_000000-run"
    folder.mkdir(parents=True)
    (folder / "run-run.wandb").write_bytes(b"another format")
    (run_dir / "wandb-id").write_text("run\n")
    summary = train(make_config(), run_dir)
    assert summary["status"] == "finished" and summary["wandb"]["folder"] is not None
    said = capfd.readouterr().out.replace("\n", " ")
    assert "cannot be read: Error: transactionlog: bad header" in said
    assert kept_id(run_dir) != "run" and f"a new W&B run, {kept_id(run_dir)}" in said
    assert len([*rows_of(run_dir / "metrics.jsonl")]) == 4


def test_system_metrics_are_sampled_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB__STATS_SAMPLING_INTERVAL", "0.1")
    config = make_config()
    config.logger.system_metrics = True
    for seconds in (1, 5, 25):  # time for ten samples, or more on slow machines
        run_dir = tmp_path / f"run{seconds}"
        run_dir.mkdir()
        train(config, run_dir, wait_s=seconds)
        if "stats" in inspect(run_dir):
            return
    pytest.fail("no figures of the host")
