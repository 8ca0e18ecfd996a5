"""Runs `parallel3d` for tasks: keys at each size, runs and their files."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.process import ROOT, Ended, reason
from benchmarks.gpu.tasks import Given, Row, judged, noted
from parallel3d.device import accelerator
from parallel3d.host.devices import SHARED_GPUS

PEAK_OFF, SECONDS_OFF = 0.05, 0.20  # tolerances of a dry run's predictions, relative to the run
# A model that trains on a CPU in seconds, on text that is in every checkout.
TINY = (
    *("model=llama_tiny", "model.num_layers=2", "model.hidden_size=64", "model.seq_length=64"),
    *("model.ffn_hidden_size=96", "launch.peak_tflops=0.1", "data=text"),
    f"data.path={ROOT / 'README.md'}",
)
UNSAVED = ("train.eval_batches=0", "checkpoint.every=0")


class RunFailed(RuntimeError):
    """Raised if a command of parallel3d ended with another code than 0; carries the command's
    sentence."""


def model_words(given: Given, *words: str) -> list[str]:
    """Returns `words` for a model; at the tiny size, the words for a tiny model instead."""
    return [*TINY, f"data.cache_dir={given.folder / 'cache'}"] if given.is_tiny else [*words]


def new_run(given: Given, name: str) -> Path:
    """Returns a run directory that does not exist yet: a task may be repeated in the same
    folder."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=given.folder)) / name


def run_words(given: Given, run_dir: Path) -> list[str]:
    """Returns the words for the device and this run directory."""
    return [f"device={given.device.type}", f"runs_dir={run_dir.parent}", f"run={run_dir.name}"]


def parallel3d(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command line of its own; its process group is the task's, and ends with it."""
    command = [sys.executable, "-m", "parallel3d", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def run(*words: str) -> str:
    """Returns the output of the command. Raises RunFailed, with its last words, if it ended
    badly."""
    return succeeded(parallel3d(*words)).stdout


def succeeded(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise RunFailed(reason(Ended(done.returncode, "", done.stderr, 0.0), 0.0))
    return done


def command_line_missing() -> Row | None:
    """Returns the row of a task that cannot run because Hydra is missing; None if Hydra is
    installed."""
    try:
        import hydra  # noqa: F401
        import omegaconf  # noqa: F401
    except ImportError as error:
        return {"skipped": f"parallel3d's command line needs a package: {error}"}
    return None


def devices_missing(given: Given, ranks: int, may_share: bool = False) -> Row | None:
    """Returns the row of a task for which devices are missing: it needs one for each of `ranks`, or
    a single one if NCCL shares it."""
    if not given.on_accelerator or (may_share and os.environ.get(SHARED_GPUS) == "1"):
        return None
    count = accelerator.module(given.device).device_count()
    return {"skipped": f"{count} device(s) here, {ranks} needed"} if count < ranks else None


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl about steps."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [step for step in map(json.loads, lines) if step.get("loss") is not None]


def trained(words: Sequence[str], run_dir: Path) -> Row:
    """Runs `parallel3d train` with these words; returns speed, memory of rank 0, losses."""
    run("train", *words)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    steps = steps_of(run_dir)
    memory = summary.get("memory") or {"ranks": []}
    return {
        "tokens_per_s": summary["tokens_per_s"]["median"],
        "mfu": summary["mfu"]["value"],
        "peak_source": summary["mfu"]["peak_source"],
        "seconds": statistics.median(step["step_time_s"] for step in steps),
        "peak_bytes": max((s["memory"]["allocated"] for s in steps if "memory" in s), default=None),
        "peak_bytes_of_ranks": [rank["allocated"] for rank in memory["ranks"]],
        "losses": [step["loss"] for step in steps],
    }


def speed_sentence(figures: Row) -> str:
    peak, losses = figures["peak_bytes"], figures["losses"]
    return (
        f"{figures['tokens_per_s']:,.0f} tokens/s, MFU {100 * figures['mfu']:.1f} % of "
        f"{figures['peak_source']}, {1e3 * figures['seconds']:.0f} ms a step, "
        f"peak {'–' if peak is None else f'{peak / 1e9:.1f}'} GB, "
        f"loss {losses[0]:.3f} → {losses[-1]:.3f}"
    )


def learns(losses: Sequence[float]) -> bool:
    return all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def dry_run(given: Given, *words: str) -> Row:
    """Returns what `parallel3d dryrun` reports about rank 0 of a run with these words on this
    card."""
    path = new_run(given, "dryrun").with_suffix(".json")
    cluster = cluster_of(accelerator.name(given.device))
    run("dryrun", *words, *cluster, "dryrun.rank=0", f"dryrun.json={path}")
    return json.loads(path.read_text(encoding="utf-8"))


def cluster_of(name: str) -> list[str]:
    """Returns the preset with this card's memory and speed; without one, the command's own."""
    known = {"H200": "dgx_h200", "H100": "dgx_h100", "B200": "dgx_b200", "A100": "dgx_a100"}
    return [f"cluster={preset}" for word, preset in known.items() if word in name][:1]


def compared(foretold: Row, measured: Row, peak_off: float = PEAK_OFF) -> Row:
    """Compares peak memory and seconds of a dry run with a run's, relative to the run's."""
    figures: Row = {"dryrun": foretold}
    said, is_near = [], True
    for key, limit in (("peak_bytes", peak_off), ("seconds", SECONDS_OFF)):
        if not measured.get(key) or foretold.get(key) is None:
            continue
        off = foretold[key] / measured[key] - 1.0
        figures[f"{key}_off"] = off
        is_near = is_near and abs(off) <= limit
        said.append(f"{key} {foretold[key]:.4g}, measured {measured[key]:.4g} ({100 * off:+.1f} %)")
    if not said:
        return noted("nothing measured to compare with", figures)
    return judged(is_near, "; ".join(said), figures)
