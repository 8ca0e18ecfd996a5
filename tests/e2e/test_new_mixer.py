"""Applies a diff that adds a mixer, a gated convolution: its module, its declaration, and its line
in the list of mixers. The rest is derived."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
DIFF = ROOT / "tests/fixtures/gated_convolution.diff"
LAYERS = "model.layer_types=[gated_conv,full]"
SMALL = ("model=llama_tiny", LAYERS, "device=cpu", "model.seq_length=32", "micro_batch_size=1",
         "global_batch_size=4")  # fmt: skip
PLAYED = (
    {"tp": 2, "sp": True, "recompute": "[norm,attention]"},
    {"pp": 2, "rank": 0, "recompute": "full"},
    {"cp": 2},
    {"dp": 2, "tp": 2, "zero": 1},
    {"dp": 2, "zero": 3},
)
LARGE = ("model=llama3_8b", LAYERS, "model.num_layers=4", "cluster=dgx_h100")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the package and of its tests with the diff applied."""
    copy = tmp_path_factory.mktemp("mixer")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("parallel3d", "conf", "benchmarks", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    done = subprocess.run(
        ("git", "apply", "-C1", str(DIFF)), cwd=copy, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return copy


def ran(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        (sys.executable, "-m", *words), cwd=copy, env=environ, text=True, capture_output=True,
        check=False,
    )  # fmt: skip


def told(copy: Path, *words: str) -> str:
    done = ran(copy, "parallel3d", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_new_mixer_changes_two_files_of_the_package() -> None:
    changed = re.findall(r"^\+\+\+ b/(parallel3d/.*)$", DIFF.read_text(), re.M)
    assert changed == ["parallel3d/models/declared.py", "parallel3d/models/gated_convolution.py"]


def test_a_new_mixer_trains_like_its_reference_under_any_layout(copy: Path) -> None:
    """The diff's own test compares losses, norms and weights with the reference, at 1e-9."""
    done = ran(copy, "pytest", "-q", "-p", "no:cacheprovider",
               "tests/distributed/test_gated_convolution.py")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_mixer_is_verified_saved_resumed_elsewhere_and_generates(copy: Path) -> None:
    words = (*SMALL, "tp=2", "verify.steps=2", "precision=fp64")
    assert "The layout does not change the model." in told(copy, "verify", *words)
    own = ("run=gated", "logger=none", "checkpoint.every=2", "precision=bf16", "zero=3")
    told(copy, "train", *SMALL, *own, "dp=2", "train.steps=2")
    resumed = told(copy, "train", "run=gated", "tp=2", "dp=1", "zero=1", "train.steps=4")
    assert "resumes at step 3; layout: dp 2 → 1, tp 1 → 2, zero 3 → 1" in resumed
    assert "step 4" in told(copy, "generate", "run=gated", "prompt=ab", "generate.max_tokens=5")
    done = ran(copy, "parallel3d", "checkpoint", "export", "run=gated", "to=hf")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"parallel3d: {LAYERS} has no counterpart in Hugging Face's Llama format, the nearest one: "
        "there it must be []."
    )
    assert not (copy / "hf").exists()


def test_a_new_mixer_is_planned_and_dry_run(copy: Path) -> None:
    found = told(copy, "dryrun", *LARGE, "tp=2", "sp=true", "dp=4", "global_batch_size=16")
    assert "1.94 Gparameters" in found and "It fits" in found
    found = told(copy, "plan", *LARGE, "global_batch_size=16", "plan.confirm=1")
    assert "dry run" in found and "parallel3d train" in found


def test_a_new_mixer_sends_and_keeps_what_a_dry_run_counts(copy: Path) -> None:
    common = {"model": "llama_1b", "layers": 4, "dialect": {"layer_types": ["gated_conv", "full"]}}
    common |= {"dp": 1, "micro_batch_size": 1, "global_batch_size": 4}
    words = [word for case in PLAYED for word in ("--case", json.dumps(common | case))]
    limits = ("--below", "1", "--above", "7")  # of memory, in per cent; bytes sent are equal
    done = ran(copy, "benchmarks.planner.plan_dryrun", *limits, *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_mixer_is_refused_with_the_nearest_one(copy: Path) -> None:
    done = ran(copy, "parallel3d", "train", "model=llama_tiny", "model.layer_types=[gated_con]")
    assert done.returncode == 2
    assert "gated_deltanet or gated_conv for each layer; the nearest is" in done.stderr
    assert "model.layer_types=[gated_conv]" in done.stderr
