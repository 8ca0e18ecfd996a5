"""docs/library.md runs as it stands: on one process, and on two with all that it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.ready import ROOT, run_code

PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
TRAINS, OWN_SAMPLES, PROOF = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def with_three_steps(script: str) -> str:
    shorter = script.replace('"train.steps=100"', '"train.steps=3"')
    assert shorter != script
    return shorter


def with_all() -> str:
    """The script with what else the page shows, before the groups are closed."""
    training, closing = TRAINS.split("groups.close()")
    return "\n".join((training, OWN_SAMPLES, PROOF, "groups.close()" + closing))


def run(folder: Path, script: str, *launched: str) -> str:
    """What the script prints, in a folder with a book, with three steps for a hundred: by itself,
    or as what `python LAUNCHED` starts."""
    shorter = with_three_steps(script)
    (folder / "small.py").write_text(shorter, encoding="utf-8")
    (folder / "book.txt").write_text(PAGE * 4, encoding="utf-8")
    paths = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    if launched:
        command = (sys.executable, *launched, "small.py")
        environ = os.environ | paths
        ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    else:
        ended = run_code(shorter, cwd=folder, **paths)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_page_trains_the_same_model_on_one_process_and_on_two(tmp_path: Path) -> None:
    """On two with what else the page shows."""
    assert len(TRAINS.splitlines()) <= 30
    alone = run(tmp_path, TRAINS)
    assert (tmp_path / "weights.pt").stat().st_size > 1_000_000
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    both = run(tmp_path, with_all(), *launched)
    losses = [
        [float(loss) for loss in re.findall(r"^step \d: loss (.*)$", out, re.MULTILINE)]
        for out in (alone, both)
    ]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    assert "The layout does not change the model." in both
    assert (tmp_path / "verify.json").exists()
