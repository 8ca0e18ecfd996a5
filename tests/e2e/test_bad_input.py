"""Tests every bad input: one sentence that names the key, exit code 2, at once, nothing written.

A loaded machine stretches wall time, so "at once" is measured as the process's own CPU time. Each
kind of refusal is tested once in a process of its own; further sentences of the same kind are
tested in this process.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from tests.e2e.command import PARALLEL3D, ROOT, TINY, Ended, Shell
from tests.e2e.here import answer
from tests.pace import in_cpu_time

pytestmark = pytest.mark.nightly

SECONDS = 2.0
RANK_0 = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}


def assert_refused(ended: Ended, *parts: str) -> None:
    assert ended.code == 2, ended
    assert len(ended.errors) == 1, ended.err
    assert ended.errors[0].startswith("parallel3d: ")
    for part in parts:
        assert part in ended.errors[0]
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert in_cpu_time(ended.cpu_s, SECONDS)


def assert_refusal(shell: Shell, words: tuple[str, ...], *parts: str, **environ: str) -> None:
    """Runs `train` with `words`: it is refused with `parts` in the sentence, and nothing is
    written."""
    before = shell.snapshot()
    assert_refused(shell.run(*PARALLEL3D, *words, **environ), *parts)
    assert shell.snapshot() == before


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        pytest.param("tp=3", ["tp=3", "heads", "hidden", "ffn", "tp=2"], id="tp"),
        pytest.param("tpp=2", ["tpp", "tp"], id="unknown key"),
        pytest.param("data=text data.path=missing.txt", ["missing.txt"], id="missing data"),
        pytest.param("runs_dir=/dev/null/runs", ["runs_dir=/dev/null/runs"], id="runs_dir"),
    ],
)
def test_bad_override_is_refused(shell: Shell, words: str, parts: list[str]) -> None:
    shell.anew = words == "tp=3"  # for one of the commands, whose time may include the start
    assert_refusal(shell, ("train", *words.split()), *parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        pytest.param("data=text", ["data.path"], id="no path"),
        pytest.param("--tpp=2", ["--tpp=2", "tp"], id="flag"),
        pytest.param("--multirun --cfg job", ["--multirun", "--cfg"], id="two flags"),
        pytest.param("run=a/b", ["a/b"], id="run name"),
        pytest.param(
            "hydra/launcher=joblib", ["launcher=joblib must be one of basic, submitit"], id="plugin"
        ),
        pytest.param("hydra/sweeper=optuna", ["sweeper=optuna must be one of basic"], id="sweeper"),
        pytest.param("hydra.launcher.n_jobs=2", ["hydra.launcher.n_jobs"], id="key of Hydra's"),
        pytest.param("model=./my.yaml", ["model=my ", "--config-dir"], id="file for a preset"),
        pytest.param("-cp mine", ["--config-dir=mine"], id="config path"),
        pytest.param(
            "seed=range(1,4)", ["seed=range(1,4)", "--multirun to run each one."], id="range"
        ),
        pytest.param("~logger", ["~logger", "nearest is logger="], id="group taken away"),
        pytest.param("hydra.run.dir=here", ["runs_dir=…"], id="Hydra's folder"),
        pytest.param("hydra.job.chdir=true", ["hydra.job.chdir=true"], id="Hydra's chdir"),
        pytest.param(
            "--config-dir=nowhere tp=1",
            ["--config-dir=nowhere is not a folder", "give one"],
            id="config dir",
        ),
        pytest.param("hydra.verbose=true", ["hydra.verbose=true", "false"], id="Hydra's verbose"),
        pytest.param("hydra/job_logging=default", ["job_logging=default", "none"], id="job log"),
        pytest.param("hydra/hydra_logging=default", ["none", "--multirun"], id="Hydra's own log"),
        pytest.param("-m hydra/hydra_logging=colorlog", ["must be one of default"], id="no log"),
        pytest.param("data=text data.path=empty.txt", ["empty.txt"], id="empty data"),
        pytest.param("data=text data.path=short.txt", ["short.txt", "seq_length"], id="short data"),
    ],
)
def test_further_bad_override_is_refused(
    shell: Shell, capfd: pytest.CaptureFixture[str], words: str, parts: list[str]
) -> None:
    (shell.cwd / "empty.txt").touch()
    (shell.cwd / "short.txt").write_text("too short\n")
    before = shell.snapshot()
    assert_refused(answer(shell, capfd, "train", *words.split()), *parts)
    assert shell.snapshot() == before


FLAGS = ("--cfg job", "--cfg all", "--cfg hydra --resolve", "--info config")


@pytest.mark.parametrize(
    ("added", "flags"),
    [("+new.key=1", FLAGS), ("+model.foo=1", FLAGS[:1]), ("+new=${tp}", FLAGS[:1])],
)
def test_a_configuration_with_unknown_keys_is_not_shown(
    shell: Shell, capfd: pytest.CaptureFixture[str], added: str, flags: tuple[str, ...]
) -> None:
    """`--cfg` and `--info config` refuse a key with the run's sentence."""
    ran = answer(shell, capfd, "train", added)
    assert_refused(ran, "is not a key of the configuration")
    for flag in flags:
        assert_refused(answer(shell, capfd, "train", added, *flag.split()), *ran.errors)


def test_values_of_a_sweep_are_shown(shell: Shell, capfd: pytest.CaptureFixture[str]) -> None:
    shown = answer(shell, capfd, "train", "run=x-${hydra:job.num}", "--cfg", "job")
    assert (shown.code, shown.errors) == (0, [])
    assert "run: x-${hydra:job.num}" in shown.out


def test_unknown_subcommand_names_the_nearest(shell: Shell) -> None:
    assert_refusal(shell, ("trian", "tp=2"), "trian", "train")


def test_unreadable_data_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret.txt"
        secret.write_text("who may not read this\n" * 1000)
        secret.chmod(0)
        words = ("train", "data=text", f"data.path={secret}", f"data.cache_dir={folder}/cache")
        shell = Shell(Path(folder), scratch=Path(tempfile.gettempdir()))
        # Root reads everything, unless it lacks that capability. It stays root, because another
        # user might not reach the package.
        rights = "--bounding-set=-dac_override,-dac_read_search"
        become = ("setpriv", rights) if os.geteuid() == 0 else ()
        assert_refused(shell.run(*become, *PARALLEL3D, *words), "secret.txt")
        assert [path.name for path in Path(folder).iterdir()] == ["secret.txt"]


def test_absent_cuda_is_refused(shell: Shell) -> None:
    assert_refusal(
        shell, ("train", "device=cuda"), "device=cuda", "device=cpu", CUDA_VISIBLE_DEVICES=""
    )


def test_port_in_use_is_refused(shell: Shell) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ("train", "tp=2", *TINY, *shell.text(), f"launch.master_port={port}")
        assert_refusal(shell, words, f"launch.master_port={port}", "in use")


def test_contradicting_launcher_is_refused(shell: Shell) -> None:
    words = ("train", "tp=2", *TINY, *shell.text())
    assert_refusal(shell, words, "RANK=2", "WORLD_SIZE=2", **(RANK_0 | {"RANK": "2"}))


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"RANK": "one"}, ["RANK='one'", "number"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, ["LOCAL_RANK=1", "LOCAL_WORLD_SIZE=1"]),
        ({"MASTER_PORT": "99999"}, ["MASTER_PORT=99999"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR", "RANK=0"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE", "RANK=0"]),
    ],
)
def test_further_contradicting_launcher_is_refused(
    shell: Shell, capfd: pytest.CaptureFixture[str], environ: dict[str, str], parts: list[str]
) -> None:
    words = ("train", "tp=2", *TINY, *shell.text())
    before = shell.snapshot()
    assert_refused(answer(shell, capfd, *words, **(RANK_0 | environ)), *parts)
    assert shell.snapshot() == before


def test_world_size_that_does_not_fit_is_refused_by_rank_0_alone(shell: Shell) -> None:
    words = ("train", "tp=2", *TINY, *shell.text())
    three = RANK_0 | {"WORLD_SIZE": "3"}
    assert_refusal(shell, words, "3", "tp=2", **three)
    silent = shell.run(*PARALLEL3D, *words, **(three | {"RANK": "1", "LOCAL_RANK": "1"}))
    assert (silent.code, silent.out, silent.err) == (2, "", "")


def test_taken_run_is_refused_and_left_alone(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "run=mine", *TINY, *shell.text())
    assert shell.run(*PARALLEL3D, *words).code == 0
    assert_refusal(shell, words, "run=mine", "exists already")
    before = shell.snapshot()
    # Keys that do not belong to a run's identity are not listed as differences.
    watched = ("train.progress=false", "logger.project=other", "launch.master_port=29511")
    for more, sentence in (((), "exists already"), (("seed=7",), "seed is 1234 there, now 7")):
        ended = answer(shell, capfd, *words, *watched, *more)
        assert_refused(ended, "run=mine", sentence)
    assert shell.snapshot() == before
    (shell.cwd / "runs" / "mine" / "config.yaml").unlink()
    assert_refusal(shell, words, "run=mine", "not a run directory")


def test_user_who_asks_for_hydras_traceback_gets_it(shell: Shell) -> None:
    ended = shell.run(*PARALLEL3D, "train", "hydra/launcher=x", HYDRA_FULL_ERROR="1")
    assert ended.code == 2
    assert "Traceback" in ended.err


def test_old_python_is_refused_by_the_scripts(shell: Shell) -> None:
    tools = shell.cwd / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "cat"):
        (tools / name).symlink_to(shutil.which(name) or name)
    old = tools / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1\nexit 1\n')
    old.chmod(0o755)
    clone = shell.cwd / "clone"
    shutil.copytree(ROOT / "launch", clone / "launch")
    ended = shell.run("bash", str(clone / "launch" / "local.sh"), PATH=str(tools), PYTHON="")
    assert ended.code != 0
    assert len(ended.errors) == 1
    assert "needs Python 3.11 or newer; found: Python 3.8.1" in ended.errors[0]
    assert sorted(path.name for path in clone.iterdir()) == ["launch"]
