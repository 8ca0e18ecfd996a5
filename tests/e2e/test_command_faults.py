"""Whole commands on storage that fails: a sample of benchmarks/command_faults.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.power_cuts import can_mount
from tests.e2e.command import ROOT

PAIRS, BLOCKS, CUTS = 6, 1, 1
SCENARIOS = ("a new run", "goes on, settings changed")


def test_command_on_an_ill_disk_loses_nothing_and_ends_with_a_sentence(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    counts = {"pairs": PAIRS, "blocks": BLOCKS, "cuts": CUTS if can_mount() else 0}
    words = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    bench = (sys.executable, "-m", "benchmarks.command_faults", "--jobs", "2", "--seed", "3")
    ended = subprocess.run(
        [*bench, *words, "--out", str(out), "--only", *SCENARIOS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["pairs"]["scenarios"] == dict.fromkeys(SCENARIOS, PAIRS // 2)
    assert found["pairs"]["met"] > PAIRS - 2
    assert found["blocks"]["met"] == BLOCKS
    if counts["cuts"]:
        assert found["power cuts"]["met"] == CUTS
