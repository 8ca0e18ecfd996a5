"""Tests `parallel3d init slurm`: it writes the checkout's scripts once and overwrites nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.cli.command_line import main
from parallel3d.commands.recipes import SCRIPTS

ROOT = Path(__file__).parents[3]


def test_the_scripts_are_those_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "slurm"]) == 0
    assert main(["init", "slurm", "other/place"]) == 0
    assert main(["init", "slurm", "folder=third one"]) == 0
    assert "next: sbatch --nodes=8 'third one/slurm/train.sbatch'" in capsys.readouterr().out
    for folder in (".", "other/place", "third one"):
        for name in SCRIPTS:
            written = Path(folder, name)
            assert written.read_bytes() == (ROOT / name).read_bytes()
            assert os.access(written, os.X_OK) == os.access(ROOT / name, os.X_OK), name
    assert subprocess.run(["bash", "-n", *SCRIPTS], check=False).returncode == 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_existing_file_is_not_overwritten_and_nothing_else_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    mine = tmp_path / name
    mine.parent.mkdir()
    mine.symlink_to(tmp_path / "elsewhere")  # a dangling link counts as well
    assert main(["init", "slurm", str(tmp_path)]) == 2
    assert f"{mine} already exists and is not overwritten" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == [mine]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slrm"], "the nearest is slurm"),
        (["slurm", "foldr=x"], "the nearest is folder"),
        (["slurm", "folder="], "folder= is empty"),
        (["slurm", "{file}"], "Not a directory"),
    ],
)
def test_a_line_that_cannot_work_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (tmp_path / "file").touch()
    words = [word.replace("{file}", str(tmp_path / "file")) for word in words]
    assert main(["init", *words]) == 2
    refusal = capsys.readouterr().err
    assert said in refusal and refusal.count("\n") == 1


def test_help_names_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--help"]) == 0
    assert main(["init", "slurm", "--help"]) == 0
    assert "parallel3d init slurm FOLDER: write slurm/train.sbatch" in capsys.readouterr().out


def test_the_torchrun_script_starts_the_python_it_is_given(tmp_path: Path) -> None:
    """Outside of a checkout there is no setup.sh next to it, and no .venv to make."""
    assert main(["init", "slurm", str(tmp_path)]) == 0
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && echo "$@" || exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environ = os.environ | {"PYTHON": str(python), "RANKS": "2"}
    script = str(tmp_path / "launch" / "torchrun.sh")
    ended = subprocess.run([script, "tp=2"], env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("-m torch.distributed.run --nnodes=1 --nproc-per-node=2")
    assert ended.stdout.rstrip().endswith("-m parallel3d train tp=2")
