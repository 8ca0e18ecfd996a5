"""Tests the environment that launch/*.sh make: its packages, that it is made once, and the message
before a download.

Python is a script here that makes folders, records what pip is asked for, and installs nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.command import Ended, Shell

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/bash
case "$*" in
--version) echo Python 3.11.2 ;;
"-c import platform"*) echo 3.11.2 x86_64 ;;
"-c import sys; print"*) echo 3.11.2 ;;
"-c "*) ;;
"-m venv --clear "*)
  mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo "VIRTUAL_ENV=$4" >"$4/bin/activate" ;;
"-m pip show torch"*) [[ -e ${0%/*}/torch ]] ;;
"-m pip index versions torch"*) printf 'torch (9.9)\\nAvailable versions: %s\\n' "$TORCHES" ;;
"-m pip install "*)
  echo "pip ${@: -3:1}" >>"$NOTES"; touch "${0%/*}/torch"
  printf '#!/bin/bash\\necho "parallel3d $*" >>"$NOTES"\\n' >"${0%/*}/parallel3d"
  chmod +x "${0%/*}/parallel3d" ;;
"-m pytest "*) echo pytest >>"$NOTES" ;;
*) echo "unknown: $*" >&2; exit 9 ;;
esac
"""


class Clone:
    """Makes a checkout that only has the files which the scripts read."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.root = shell.cwd / "clone"
        self.notes = shell.cwd / "notes"
        self.python = shell.cwd / "python3"
        shutil.copytree(ROOT / "launch", self.root / "launch")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def run(self, script: str, *words: str, torches: str = "2.13.0+cpu, 2.13.0") -> Ended:
        environ = {"PYTHON": str(self.python), "NOTES": str(self.notes), "TORCHES": torches}
        return self.shell.run("bash", str(self.root / "launch" / script), *words, **environ)

    def noted(self) -> list[str]:
        """Returns the calls of Python since the last look."""
        lines = self.notes.read_text().replace(str(self.root), "ROOT").splitlines()
        self.notes.write_text("")
        return lines


@pytest.fixture
def clone(shell: Shell) -> Clone:
    return Clone(shell)


def test_training_installs_no_extra_and_tests_add_theirs(clone: Clone) -> None:
    assert clone.run("local.sh", "tp=2", "pp=2").code == 0
    assert clone.noted() == ["pip ROOT", "parallel3d train tp=2 pp=2"]
    assert clone.run("test.sh", "fast").code == 0
    assert clone.noted() == ["pip ROOT[test]", "pytest"]
    for script, seen in (("local.sh", "parallel3d train"), ("test.sh", "pytest")):
        assert clone.run(script).code == 0
        assert clone.noted() == [seen]


def test_the_tests_environment_is_enough_for_training(clone: Clone) -> None:
    assert clone.run("test.sh").code == 0
    assert clone.noted() == ["pip ROOT[test]", "pytest"]
    assert clone.run("local.sh").code == 0
    assert clone.noted() == ["parallel3d train"]


def test_other_dependencies_are_installed_for_each_set(clone: Clone) -> None:
    clone.run("test.sh")
    clone.noted()
    with (clone.root / "constraints.txt").open("a") as constraints:
        constraints.write("more==1.0\n")
    clone.run("local.sh")
    clone.run("test.sh")
    assert clone.noted() == ["pip ROOT", "parallel3d train", "pip ROOT[test]", "pytest"]


def test_an_unknown_set_is_refused(clone: Clone) -> None:
    ended = clone.run("setup.sh", "docs")
    assert ended.code == 2
    assert ended.errors == ["setup: docs is no set of packages: train or test"]
    assert not (clone.root / ".venv").exists()


@pytest.mark.parametrize(
    ("torches", "is_said"),
    [
        ("2.15.0, 2.13.0+cpu, 2.13.0", False),
        ("2.15.0, 2.13.0, 2.12.0", True),
        ("2.13.0+cu130, 2.13.0+cpu, 2.13.0", True),
        ("2.15.0+cpu, 2.13.0", True),
        ("2.13.0", True),
        ("", True),
    ],
)
def test_a_download_of_cuda_is_announced_before_it_begins(
    clone: Clone, torches: str, is_said: bool
) -> None:
    ended = clone.run("local.sh", torches=torches)
    told = [line for line in ended.errors if "CUDA" in line]
    assert len(told) == is_said
    if is_said:
        assert "over 2 GB" in told[0] and "PIP_EXTRA_INDEX_URL" in told[0]
        assert ended.errors.index(told[0]) < len(ended.errors) - 1  # it appears before "done"
        assert "CUDA" not in clone.run("local.sh", torches=torches).err
        assert "CUDA" not in clone.run("test.sh", torches=torches).err  # torch is installed


def test_constraints_pin_the_torch_that_the_script_checks() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = (line for line in lines if line.startswith("torch=="))
    assert "+" not in pinned
