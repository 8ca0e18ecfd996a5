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
                *("checkpoint", "data", "calibrate", "eval", "init", "recipes", "report"),
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
def test_wheel_carries_the_configuration_the_scripts_and_the_types(shell: Shell) -> None:
    source = shell.cwd / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("conf", "slurm", "launch"):
        shutil.copytree(ROOT / name, source / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "parallel3d", source / "parallel3d", ignore=ignored)
    build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(source))
    subprocess.run((*build, "-w", str(shell.cwd)), check=True, capture_output=True)
    (wheel,) = shell.cwd.glob("*.whl")
    target = shell.cwd / "elsewhere"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    packed = {p.relative_to(target / "parallel3d") for p in target.rglob("*.yaml")}
    presets = {p.relative_to(ROOT) for p in (ROOT / "conf").rglob("*.yaml")}
    assert packed == presets | {Path("config/megatron.yaml")}
    shutil.rmtree(source)
    python = (sys.executable, "-P", "-m", "parallel3d")
    ended = shell.run(*python, "train", "--cfg", "job", "tp=2", PYTHONPATH=str(target))
    assert ended.code == 0, ended
    assert yaml.safe_load(ended.out)["tp"] == 2
    assert (target / "parallel3d" / "py.typed").is_file()
    ended = shell.run(*python, "init", "slurm", "mine", PYTHONPATH=str(target))
    assert ended.code == 0, ended
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
