"""A new key with a conflict only touches its feature's folder: everything else is derived from it.

A copy of the package gets one key of data parallelism and one row of `CONFLICTS`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.more, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
KEYS = "parallel3d/data_parallel/keys.py"
KEY = """    comm_hook: str = key(
"""
NEW_KEY = """    send_every: int = key(
        1, "steps whose gradients are summed before they are sent", minimum=1, maximum=64,
        resume=REPORTED, tried=(4,),
    )
"""
ROWS = """CONFLICTS = (
"""
NEW_ROW = """    Conflict(
        {"ddp.send_every": NoneOf(1), "zero": OneOf(2, 3)},
        "{ddp.send_every} keeps whole gradients between steps, and {zero} shards them",
        (("zero", 1), ("ddp.send_every", 1)),
    ),
"""
ASKED = """
import json
from parallel3d import run_config
from parallel3d.cli import help_text
from parallel3d.checkpoint import identity
from parallel3d.data_parallel.keys import DataParallelConfig

there = run_config.Config(ddp=DataParallelConfig(send_every=2))
found = identity.changes({"ddp": {"send_every": 2}}, run_config.Config())
words = help_text._next_words(["train"], ["train"], {})
rows = [row for row in run_config.CONFLICTS if "ddp.send_every" in row.settings]
print(json.dumps({
    "resume": [(change.key, change.kind) for change in found],
    "completion": "ddp.send_every=" in words,
    "help": help_text.of_names(["ddp.send_every"]),
    "tried": [row.settings["ddp.send_every"].example(1, (4,)) for row in rows],
    "torch": "torch" in __import__("sys").modules,
}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the package with the new key."""
    copy = tmp_path_factory.mktemp("key")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("parallel3d", "conf", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    text = (copy / KEYS).read_text(encoding="utf-8")
    assert text.count(KEY) == text.count(ROWS) == 1
    text = text.replace(KEY, NEW_KEY + KEY).replace(ROWS, ROWS + NEW_ROW)
    (copy / KEYS).write_text(text, encoding="utf-8")
    return copy


def ran(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        (sys.executable, *words), cwd=copy, env=environ, text=True, capture_output=True, check=False
    )


def test_a_new_keys_range_and_conflict_are_refused_in_a_sentence(copy: Path) -> None:
    train = ("-m", "parallel3d", "train", "dp=2")
    done = ran(copy, *train, "zero=2", "ddp.send_every=4")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "parallel3d: ddp.send_every=4 keeps whole gradients between steps, and zero=2 shards them; "
        "the nearest is zero=1, or ddp.send_every=1."
    )
    done = ran(copy, *train, "ddp.send_every=99")
    assert done.returncode == 2 and "the nearest is ddp.send_every=64" in done.stderr
    done = ran(copy, *train, "ddp.send_evry=3")
    assert done.returncode == 2 and "the nearest is ddp.send_every" in done.stderr


def test_pages_help_completion_and_resume_know_a_new_key(copy: Path) -> None:
    done = ran(copy, "-c", ASKED)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["resume"] == [["ddp.send_every", "reported"]]
    assert found["completion"] and not found["torch"]
    assert found["tried"] == [4]
    assert "steps whose gradients are summed" in found["help"]
    assert "refused: ddp.send_every=4 with zero=2" in found["help"]
    for page, row in (("configuration", "| `ddp.send_every` | `1` |"), ("compatibility", "zero=2")):
        done = ran(copy, f"docs/{page}.py")
        assert done.returncode == 0, done.stderr
        assert row in done.stdout and "ddp.send_every" in done.stdout


def test_the_configuration_of_a_run_has_a_new_key(copy: Path) -> None:
    done = ran(copy, "-m", "parallel3d", "train", "--cfg", "job", "ddp.send_every=4")
    assert done.returncode == 0, done.stderr
    assert "  send_every: 4\n" in done.stdout
