"""Tests `profile.steps` in a run of four ranks: traces that load, and unchanged losses."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import TINY, Ended, Shell
from tests.e2e.forked import Forked

pytestmark = [pytest.mark.at_once(4), pytest.mark.nightly]
STEPS, MICROBATCHES = (2, 3), 3


def train(shell: Shell, *words: str) -> list[Ended]:
    """Trains four steps of tp=2 pp=2, on every rank."""
    layout = ("tp=2", "pp=2", "global_batch_size=6", "train.steps=4", "train.eval_batches=0")
    given = {word.split("=")[0]: word for word in (*TINY, *shell.text(), *layout, *words)}
    forked = Forked(shell)
    forked.add_world(4, "train", *given.values())
    forked.start()
    return forked.finish()


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def ranges_of(path: Path) -> list[tuple[str, float, float]]:
    """Returns name, start and end of each event, in microseconds."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    ours = [e for e in events if e.get("cat") == "user_annotation" and "gloo" not in e["name"]]
    assert all(event["dur"] > 0 for event in ours)
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in ours]


def test_each_profiled_rank_writes_a_trace_with_the_parts_of_these_steps(shell: Shell) -> None:
    words = (f"profile.steps=[{STEPS[0]},{STEPS[1]}]", "profile.ranks=[0,3]", "run=p")
    ended = train(shell, *words)
    train(shell, "run=plain")
    runs = shell.cwd / "runs"
    files = {path.name: path for path in (runs / "p" / "profile").iterdir()}
    assert set(files) == {"rank0-steps2-3.json.gz", "rank3-steps2-3.json.gz"}
    names = {
        "rank0-steps2-3.json.gz": ("embedding", "send activation", "recv gradient"),
        "rank3-steps2-3.json.gz": ("head", "send gradient", "recv activation"),
    }
    for file, (end, sends, receives) in names.items():
        ranges = ranges_of(files[file])
        count = [name for name, _, _ in ranges].count
        for m in range(MICROBATCHES):
            for part in ("forward", "backward", f"wait {receives}", f"wait {sends}"):
                assert count(f"{part} m{m} c0") == 2, f"{part} of micro-batch {m} in {file}"
        for part in ("clear gradients", "partial sums", "grad norm", "optimizer"):
            assert count(part) == 2, f"{part} in {file}"
        layer = file.startswith("rank3")
        for part in (end, f"layers.{layer:d}", f"layers.{layer:d}.mlp"):
            assert count(part) == 2 * MICROBATCHES, f"{part} in {file}"
        assert count("all_reduce tp") and count("data") >= 2
        assert any(sends in name and not name.startswith("wait") for name, _, _ in ranges)
        steps = [r for r in ranges if r[0].startswith("ProfilerStep")]
        assert [name for name, _, _ in steps] == ["ProfilerStep#2", "ProfilerStep#3"]
        for name, start, stop in ranges:
            if name not in ("checkpoint", *(step for step, _, _ in steps)):
                inside = [s for s, a, b in steps if a <= start and stop <= b]
                assert len(inside) == 1, f"{name} is within one step"
        (forward,) = [r for r in ranges if r[0] == "forward m1 c0" and r[1] < steps[0][2]]
        (mlp,) = [r for r in ranges if r[0].endswith("mlp") and forward[1] < r[1] < forward[2]]
        assert mlp[2] <= forward[2]
    said = [line for each in ended for line in each.errors]
    (title,) = [i for i, line in enumerate(said) if "profile of rank" in line]
    assert said[title] == (
        "parallel3d: profile of rank 0, steps 2 to 3; traces are in runs/p/profile/"
    )
    table = said[title + 1 :]  # the ten longest, whichever they are on this machine
    assert table[1].split()[:4] == ["Name", "Self", "CPU", "%"]
    assert sum("%" in line for line in table[2:]) == 10 and any("aten::" in t for t in table)
    assert "profile" in ended[0].out.splitlines()[-1]
    plain, rows = rows_of(runs / "plain"), rows_of(runs / "p")
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == [row[key] for row in plain]
    assert [row["step"] for row in rows if row.get("profiled")] == list(STEPS)
    summary = json.loads((runs / "p" / "summary.json").read_text())
    rates = [row["tokens_per_s"] for row in rows if not row.get("profiled")]
    assert summary["tokens_per_s"]["median"] == pytest.approx(statistics.median(rates))
