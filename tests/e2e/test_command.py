"""Tests the command itself: help, versions, Hydra's flags, completion, and the installed
package."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import parallel3d
from parallel3d.commands.recipes import SCRIPTS
from tests.e2e.command import PARALLEL3D, ROOT, Shell
from tests.e2e.here import answer


def test_overview_names_the_subcommands(shell: Shell, capfd: pytest.CaptureFixture[str]) -> None:
    ended = shell.run(*PARALLEL3D)
    assert ended.code == 0
    assert "parallel3d train" in ended.out
    assert "parallel3d verify" in ended.out
    for word in ("--help", "-h"):
        asked = answer(shell, capfd, word)
        assert (asked.code, asked.out) == (0, ended.out)


def test_version_is_the_packages(shell: Shell) -> None:
    ended = shell.run(*PARALLEL3D, "--version")
    assert (ended.code, ended.out) == (0, f"parallel3d {parallel3d.__version__}\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == parallel3d.__version__


@pytest.mark.parametrize("app", ["train", "verify"])
def test_help_shows_presets_keys_and_examples(
    shell: Shell, capfd: pytest.CaptureFixture[str], app: str
) -> None:
    if app == "train":  # once as typed
        ended = shell.run(*PARALLEL3D, app, "--help")
    else:
        ended = answer(shell, capfd, app, "--help")
    assert ended.code == 0
    assert "llama_tiny" in ended.out
    assert "global_batch_size=16" in ended.out
    assert f"parallel3d {app} tp=2" in ended.out


def test_cfg_job_prints_the_configuration_and_leaves_nothing(shell: Shell) -> None:
    # Overrides on both sides of the flag: Hydra alone would refuse that.
    ended = shell.run(*PARALLEL3D, "train", "tp=2", "--cfg", "job", "model=llama_tiny")
    assert ended.code == 0
    config = yaml.safe_load(ended.out)
    assert config["tp"] == 2
    assert config["model"]["norm"] == "rmsnorm"
    assert list(shell.cwd.iterdir()) == []


def test_info_flag_works(shell: Shell) -> None:
    ended = shell.run(*PARALLEL3D, "train", "--info", "defaults")
    assert ended.code == 0
    assert "gpt_tiny" in ended.out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "parallel3d ",
            {
                *("train", "verify", "bench", "topology", "schedule", "plan", "dryrun", "generate"),
                *("checkpoint", "data", "calibrate", "eval", "init", "recipes", "report", "slurm"),
            },
        ),
        ("parallel3d data ", {"tokenize", "train-tokenizer", "show"}),
        ("parallel3d init ", {"slurm"}),
        ("parallel3d init slurm f", {"folder="}),
        ("parallel3d recipes ", {"list", "show", "copy"}),
        ("parallel3d recipes copy llama_1b t", {"to="}),
        (
            "parallel3d checkpoint ",
            {"ls", "verify", "export", "import", "diff", "branch", "average"},
        ),
        (
            "parallel3d checkpoint export ",
            {"run=", "runs_dir=", "to=", "step=", "dtype=", "weights="},
        ),
        ("parallel3d checkpoint ls run", {"run=", "runs_dir="}),
        ("parallel3d report run=a ", {"run=", "to=", "runs_dir="}),
        ("parallel3d generate generate.to", {"generate.top_k="}),
        ("parallel3d train checkpoint.asy", {"checkpoint.async_save="}),
        ("parallel3d ver", {"verify"}),
        ("parallel3d bench ", {"comm"}),
        ("parallel3d bench co", {"comm"}),
        ("parallel3d bench comm bench.iter", {"bench.iterations="}),
        ("parallel3d topology cluster=dgx_h", {"cluster=dgx_h100", "cluster=dgx_h200"}),
        ("parallel3d train optim=", {"optim=adamw", "optim=muon", "optim=sgd"}),
        ("parallel3d verify tp=2 schedule.na", {"schedule.name="}),
    ],
)
def test_completion_knows_the_subcommand(
    shell: Shell, capfd: pytest.CaptureFixture[str], line: str, expected: set[str]
) -> None:
    asked = {"COMP_LINE": line + " tail", "COMP_POINT": str(len(line))}
    if line == "parallel3d topology cluster=dgx_h":  # once as the shell asks
        ended = shell.run(*PARALLEL3D, "-sc", "query=bash", **asked)
    else:
        ended = answer(shell, capfd, "-sc", "query=bash", **asked)
    assert ended.code == 0, ended
    assert set(ended.out.split()) == expected


def test_completion_installs_for_the_command(shell: Shell) -> None:
    ended = shell.run(*PARALLEL3D, "-sc", "install=bash")
    assert ended.code == 0
    assert ended.out.rstrip().endswith("hydra_bash_completion parallel3d")


@pytest.mark.more
def test_the_wheel_trains_without_the_checkout_and_carries_its_pages(shell: Shell) -> None:
    """Builds the sdist and, from that alone, the wheel, without a network."""
    source, target = shell.cwd / "source", shell.cwd / "elsewhere"
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():  # one that is only deleted so far is not copied
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(shell.cwd))
    subprocess.run((*build, str(source)), check=True, capture_output=True)
    (wheel,) = shell.cwd.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    shutil.rmtree(source)
    package = target / "parallel3d"
    packed = {path.relative_to(package) for path in package.rglob("*.yaml")}
    presets = {path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")}
    assert packed == presets | {Path("config/other_trainers.yaml")}
    pages = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".svg")}
    assert {path.name for path in (package / "docs").iterdir()} == pages
    assert (package / "py.typed").is_file()

    def run(*words: str) -> str:
        python = (sys.executable, "-P", "-m", "parallel3d")
        ended = shell.run(*python, *words, PYTHONPATH=str(target))
        assert ended.code == 0, ended
        return ended.out

    assert str(package / "docs" / "index.md") in run("--help")
    assert "finished after 2 steps" in run("train", "tp=2", *shell.text(), "train.steps=2")
    run("init", "slurm", "mine")
    for name in SCRIPTS:
        assert (shell.cwd / "mine" / name).read_bytes() == (ROOT / name).read_bytes()


def test_repository_names_no_place_of_one_machine() -> None:
    scripts = [*(ROOT / "launch").iterdir(), ROOT / ".ci" / "run", ROOT / "constraints.txt"]
    for script in scripts:
        text = Path(script).read_text()
        assert "file://" not in text
        assert not re.search(r"[0-9]\+cpu", text)  # a version that only one index has


def test_every_pinned_package_takes_the_oldest_python() -> None:
    """Debian 12 has 3.11.2: a package that requires a later 3.11 would exclude all its users."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    wanted = {}
    for line in (line for line in lines if "==" in line and not line.startswith("#")):
        name, _, pinned = line.partition("==")
        with contextlib.suppress(PackageNotFoundError):  # packages of another platform
            # A user's environment may have a newer one, which the pin does not exclude.
            if (installed := metadata(name))["Version"] == pinned.split(";")[0].strip():
                wanted[name] = installed.get("Requires-Python") or ""
    assert wanted
    assert {n: w for n, w in wanted.items() if "3.11.0" not in SpecifierSet(w)} == {}
