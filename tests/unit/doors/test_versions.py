"""Tests versions of other packages at the start: old ones are refused, too new ones are named."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import parallel3d
from parallel3d import versions
from parallel3d.cli.command_line import main
from parallel3d.errors import UserError
from parallel3d.versions import OF_A_RUN, OF_A_SCRIPT, TRIED, check_versions, newer, parts, within

ROOT = Path(__file__).parents[3]
TORCH = "the newest that parallel3d was tried with"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the installed versions, which a test may change."""
    there = {package: f"{tried.newest}.0" for package, tried in TRIED.items()}
    there["hydra-core"] = "1.3.8"
    monkeypatch.setattr(versions, "installed", there.get)
    return there


# Installed version → "" if it is accepted, or the end of the sentence.
NAMED = [
    ("torch", "2.15.0", ""),
    ("torch", "2.15.3+cu132", ""),
    ("torch", "2.11.0", ""),
    ("torch", "2.12.0a0+b558c98.nv26.11", ""),  # in a container of NVIDIA
    ("torch", "2.13.0.post2", ""),
    ("torch", "v2.13.0", ""),
    ("torch", "2.16.0", f"torch 2.16.0 is newer than 2.15, {TORCH}"),
    ("torch", "2.16.0.dev20261120+cu132", f"2.16.0.dev20261120+cu132 is newer than 2.15, {TORCH}"),
    ("torch", "3.0.0rc1", f"torch 3.0.0rc1 is newer than 2.15, {TORCH}"),
    ("torch", "3", f"torch 3 is newer than 2.15, {TORCH}"),
    ("torch", "git12ab34", f"torch git12ab34 cannot be compared with 2.15, {TORCH}"),
    ("hydra-core", "1.4.0.dev1", f"hydra-core 1.4.0.dev1 is newer than 1.3, {TORCH}"),
    ("omegaconf", "2.4.0", f"omegaconf 2.4.0 is newer than 2.3, {TORCH}"),
    ("wandb", "1.0.0", f"wandb 1.0.0 is newer than 0.31, {TORCH}"),
    ("transformers", "5.0.0rc1", ""),
    ("transformers", "5.25.0.dev0", f"transformers 5.25.0.dev0 is newer than 5.24, {TORCH}"),
    ("tokenizers", "0.19.1", ""),
]


@pytest.mark.parametrize(("package", "version", "sentence"), NAMED)
def test_newer_versions_are_named(
    found: dict[str, str], package: str, version: str, sentence: str
) -> None:
    found[package] = version
    check_versions(TRIED)
    said = newer(TRIED)
    assert (said is None) if sentence == "" else (said or "").endswith(sentence)


REFUSED = [
    ("torch", "2.10.1", "torch 2.10.1 is older than 2.11, the oldest that parallel3d works with"),
    ("torch", "2.9.0+cu128", "pip install -U 'torch>=2.11'"),
    ("torch", "2.10.0a0+git", "pip install -U 'torch>=2.11'"),
    ("torch", "1.13", "pip install -U 'torch>=2.11'"),
    ("hydra-core", "1.3.1", "pip install -U 'hydra-core>=1.3.2'"),
    ("omegaconf", "2.2.3", "pip install -U 'omegaconf>=2.3'"),
    ("wandb", "0.30.5", "pip install -U 'wandb>=0.31'"),
    ("transformers", "4.57.1", "pip install -U 'transformers>=5'"),
]


@pytest.mark.parametrize(("package", "version", "sentence"), REFUSED)
def test_older_versions_are_refused(
    found: dict[str, str], package: str, version: str, sentence: str
) -> None:
    found[package] = version
    with pytest.raises(UserError) as refusal:
        check_versions(TRIED)
    assert sentence in str(refusal.value)


def test_two_newer_packages_are_one_line(found: dict[str, str]) -> None:
    found |= {"torch": "2.16.0", "omegaconf": "2.4.1"}
    assert newer(OF_A_RUN) == (
        f"torch 2.16.0 and omegaconf 2.4.1 are newer than 2.15 and 2.3, {TORCH}"
    )


def test_a_missing_package_is_not_named(found: dict[str, str]) -> None:
    found.clear()
    check_versions(TRIED)
    assert newer(TRIED) is None


@pytest.mark.nightly
def test_the_command_line_names_a_newer_torch_and_refuses_an_older(
    found: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["train", "global_batch_size=7", "micro_batch_size=2"]  # refused after the line
    found["torch"] = "2.16.0"
    assert main(wrong) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"parallel3d: torch 2.16.0 is newer than 2.15, {TORCH}\n")
    found["torch"] = "2.10.0"
    assert main(wrong) == 2
    assert capsys.readouterr().err == (
        "parallel3d: torch 2.10.0 is older than 2.11, the oldest that parallel3d works with: "
        "pip install -U 'torch>=2.11'.\n"
    )


def test_the_library_refuses_an_older_torch_before_it_imports_a_part(
    found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found["torch"] = "2.10.0"
    monkeypatch.delitem(vars(parallel3d), "Pipeline", raising=False)
    with pytest.raises(UserError, match=r"torch 2\.10\.0 is older than 2\.11"):
        parallel3d.Pipeline  # noqa: B018
    assert OF_A_SCRIPT == ("torch",)


def test_pyproject_requires_the_oldest_and_sets_no_upper_bounds() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    asked = [
        *project["dependencies"],
        *(x for xs in project["optional-dependencies"].values() for x in xs),
    ]
    for package, (oldest, newest) in TRIED.items():
        wanted = package if oldest is None else f"{package}>={oldest}"
        assert wanted in asked, f"{package}: pyproject.toml and versions.py differ"
        assert oldest is None or parts(oldest)[:2] <= parts(newest)
    assert within("torch") == ">=2.11,<2.16" and within("tokenizers") == "<0.24"


def test_the_constraints_are_versions_that_were_tried() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for package, (oldest, newest) in TRIED.items():
        version = parts(pinned[package])
        assert oldest is None or version >= parts(oldest)
        assert version[: len(parts(newest))] <= parts(newest), package
