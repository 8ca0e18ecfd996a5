"""Applies the diff of docs/architecture.md that adds a norm: the model trains, is priced and
dry-run, and an export is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("model=llama_tiny", "model.norm=l1norm", "device=cpu", "model.seq_length=32",
         "micro_batch_size=1", "global_batch_size=2")  # fmt: skip
TRAINED = (*SMALL, "train.steps=2", "run=option", "logger=none", "checkpoint.every=2")
PLANNED = ("model=llama3_8b", "model.norm=l1norm", "cluster=dgx_h100", "cluster.nodes=2",
           "global_batch_size=16", "plan.confirm=0")  # fmt: skip
PLAYED = (
    {"tp": 1, "recompute": "none"},
    {"tp": 2, "sp": True, "recompute": "[norm,mlp]"},
    {"tp": 2, "sp": True, "recompute": "full", "pp": 2, "rank": 2},
)
NORM = """
import torch
from types import SimpleNamespace
from parallel3d.comm.group import SINGLE
from parallel3d.models import declared
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layers import BuildContext, Norm
from parallel3d.parameters.initializer import Initializer
from tests.reference.model import make_norm
model = ModelConfig(norm="l1norm", hidden_size=64)
init = Initializer(1, torch.float64, torch.device("cpu"))
ours = Norm(declared.norm(model), model, BuildContext(init, SINGLE, sp=False))
theirs = make_norm(SimpleNamespace(norm="l1norm", hidden_size=64, norm_eps=model.norm_eps)).double()
x = torch.randn(2, 3, 64, dtype=torch.float64)
torch.testing.assert_close(ours(x), theirs(x))
"""
# Runs command lines one after another, in a process that imports the package once.
COMMANDS = """
import json
import sys
from parallel3d.cli.command_line import main
sys.exit(any(main(words) for words in json.loads(sys.argv[1])))
"""


def documented_diff() -> str:
    page = (ROOT / "docs/architecture.md").read_text()
    (found,) = re.findall(r"^```diff\n(.*?)^```$", page, re.M | re.S)
    return found


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the package with the diff applied."""
    copy = tmp_path_factory.mktemp("option")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("parallel3d", "conf", "benchmarks", "tests/reference"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    (copy / "tests/__init__.py").touch()
    done = subprocess.run(
        ("git", "apply", "-p0", "-C1", "-"), cwd=copy, input=documented_diff(), text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return copy


def run(copy: Path, *words: str, code: int = 0) -> str:
    environ = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        (sys.executable, *words), cwd=copy, env=environ, text=True, capture_output=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_new_norm_changes_two_files_of_the_package_and_the_reference() -> None:
    files = re.findall(r"^\+\+\+ (\S+)", documented_diff(), re.M)
    assert [file.split("/")[0] for file in files] == ["parallel3d", "parallel3d", "tests"]


@pytest.mark.slow
def test_a_new_norm_equals_the_reference_and_is_trained_and_priced(copy: Path) -> None:
    words = [["train", *TRAINED], ["plan", *PLANNED]]
    told = run(copy, "-c", NORM + COMMANDS, json.dumps(words))
    assert "parallel3d train" in told
    export = ("checkpoint", "export", "run=option", "to=hf")
    assert "model.norm=l1norm" in run(copy, "-m", "parallel3d", *export, code=2)


@pytest.mark.slow
def test_a_new_norm_is_verified_under_a_layout(copy: Path) -> None:
    # In fp32, rounding may change the sign of a number near zero, and the gradient is this sign.
    words = (*SMALL, "tp=2", "verify.steps=2", "precision=fp64")
    told = run(copy, "-m", "parallel3d", "verify", *words)
    assert "The layout does not change the model." in told


@pytest.mark.slow
def test_a_new_norms_operations_equal_the_dry_run(copy: Path) -> None:
    """Bytes are equal, and memory is within the bound."""
    common = {"model": "llama3_8b", "norm": "l1norm", "layers": 2, "dp": 1, "micro_batch_size": 1}
    cases = [json.dumps(common | {"global_batch_size": 4} | case) for case in PLAYED]
    words = [word for case in cases for word in ("--case", case)]
    told = run(copy, "-m", "benchmarks.planner.plan_dryrun", *words)
    assert re.search(r"bytes sent: median \+0.00 %, from \+0.00 to \+0.00 %", told), told
