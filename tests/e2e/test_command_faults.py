"""Runs whole commands on storage that fails: a sample of `benchmarks.failures.command_faults`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.failures.power_cuts import can_mount
from tests.e2e.ready import run_code, run_module

pytestmark = pytest.mark.more

PAIRS, BLOCKS, CUTS = 4, 1, 1
SCENARIOS = ("a new run", "resumes, settings changed")


TRAIN = """
import sys
from pathlib import Path
from benchmarks.failures.command_cases import SETTINGS
from parallel3d.cli.command_line import main
from tests.tools.failing_files import FailingFiles, Fault

ill = [("write", 2)] if sys.argv[1] == "ill" else []
with FailingFiles(Path("runs/run/metrics.jsonl").absolute(), Fault("EIO", "kind"), *ill):
    settings = [word for word in SETTINGS if not word.startswith("train.steps=")]
    sys.exit(main(["train", "run=run", "runs_dir=runs", *settings, *sys.argv[2:]]))
"""


def test_lines_lost_to_a_full_disk_are_restored_from_the_checkpoint(tmp_path: Path) -> None:
    for disk, steps, found in (("ill", 4, [1, 2]), ("well", 6, [1, 2, 3, 3, 4, 4, 5, 6, 6])):
        ended = run_code(TRAIN, disk, f"train.steps={steps}", cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        lines = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == found  # evaluations after 3, 4, 6
        lost = "4 lines of runs/run/metrics.jsonl could not be written"
        assert (lost in ended.stdout) == (disk == "ill")


def test_a_command_on_a_failing_disk_loses_nothing_and_ends_with_a_sentence(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    counts = {"pairs": PAIRS, "blocks": BLOCKS, "cuts": CUTS if can_mount() else 0}
    words = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    words += ["--jobs", "2", "--seed", "3", "--out", str(out), "--only", *SCENARIOS]
    ended = run_module("benchmarks.command_faults", *words)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["pairs"]["scenarios"] == dict.fromkeys(SCENARIOS, PAIRS // 2)
    assert found["pairs"]["met"] > PAIRS - 2
    assert found["blocks"]["met"] == BLOCKS
    if counts["cuts"]:
        assert found["power cuts"]["met"] == CUTS
