"""Steps of pipelines beside PyTorch's own schedules, in turns (see `pipeline.py`)."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.peer import MODEL, OURS, PEER, VOCAB, commit, corpus, run, torchrun

SAMPLES = 2
# By name, PyTorch's flags. Its zero-bubble schedules do not compile.
THEIRS = {
    "1F1B": [],
    "1F1B compiled": ["--compile"],
    "interleaved": ["--vpp=2"],
    "interleaved compiled": ["--vpp=2", "--compile"],
    "zero bubble": ["--vpp=2", "--zero-bubble"],
    "ZB-V": ["--vpp=2", "--zero-bubble", "--v-placement"],
}
OUR_SCHEDULES = {  # all compiled
    "1f1b": ["compile=true"],
    "interleaved": ["vpp=2", "schedule=interleaved", "compile=true"],
    "zb_h1": ["schedule=zb_h1", "compile=true"],
    "interleaved_zb": ["vpp=2", "schedule=interleaved_zb", "compile=true"],
    "zbv": ["schedule=zbv", "compile=true"],
}


def compare_with_peer(
    stages: Sequence[int],
    microbatches: Sequence[int],
    rounds: int,
    steps: tuple[int, int],
    precision: str,
    overrides: Sequence[str],
) -> None:
    """Prints a table. `steps`: of a run, and how many of them are not counted. `precision`: bf16 is
    autocast over fp32 weights there, and bf16 parameters with fp32 masters here.

    A schedule of PyTorch's that fails is named, one of ours ends the run.
    """
    facts = f"commit {commit()}, torch {torch.__version__}, {os.cpu_count()} cores"
    print(f"{facts}, {platform.machine()}; `{' '.join(['python', *sys.argv])}`\n")
    print("| pp | micro-batches | parallel3d, ms | PyTorch, ms | ratio of the best |")
    print("|---|---|---|---|---|")
    overrides = [f"precision={precision}", *overrides]
    theirs = {name: [f"--precision={precision}", *flags] for name, flags in THEIRS.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = corpus(folder)
        for pp in stages:
            for count in microbatches:
                print(_row(pp, count, rounds, steps, overrides, theirs, folder, data), flush=True)


def _row(
    pp: int,
    count: int,
    rounds: int,
    steps: tuple[int, int],
    overrides: Sequence[str],
    flags_of: Mapping[str, Sequence[str]],
    folder: Path,
    data: Path,
) -> str:
    ours: dict[str, list[float]] = {name: [] for name in OUR_SCHEDULES}
    theirs: dict[str, list[float]] = {name: [] for name in flags_of}
    failed: set[str] = set()
    for _ in range(rounds):
        for name, keys in OUR_SCHEDULES.items():
            ours[name].append(_ours(pp, count, steps, [*keys, *overrides], folder, data))
            print(f"pp={pp} m={count} {name}: {ours[name][-1]:.0f} ms", file=sys.stderr, flush=True)
        for name, flags in flags_of.items():
            if name in failed:
                continue
            try:
                theirs[name].append(_theirs(pp, count, steps, flags, data))
                said = f"{theirs[name][-1]:.0f} ms"
            except subprocess.CalledProcessError:
                failed.add(name)
                said = "failed"
            print(f"pp={pp} m={count} PyTorch's {name}: {said}", file=sys.stderr, flush=True)
    medians = [
        {name: statistics.median(times) for name, times in found.items() if times}
        for found in (ours, theirs)
    ]
    said = [
        ", ".join(f"{name} {ms:.0f}" for name, ms in sorted(found.items(), key=lambda i: i[1]))
        for found in medians
    ]
    if failed:
        said[1] += f" ({', '.join(sorted(failed))} failed)"
    ratio = min(medians[1].values()) / min(medians[0].values())
    return f"| {pp} | {count} | {said[0]} | {said[1]} | **{ratio:.2f}×** |"


def _ours(
    pp: int, count: int, steps: tuple[int, int], keys: Sequence[str], folder: Path, data: Path
) -> float:
    """Median step of one `parallel3d train` in ms, from its metrics.jsonl."""
    runs = folder / "runs"
    sizes = [f"pp={pp}", f"global_batch_size={SAMPLES * count}", f"train.steps={steps[0]}"]
    files = [f"runs_dir={runs}", "data=text", f"data.path={data}", f"data.cache_dir={folder}"]
    run(torchrun(pp, "-m", "parallel3d", "train", *OURS, *sizes, *files, *keys))
    (folder_of_run,) = runs.iterdir()
    lines = map(json.loads, (folder_of_run / "metrics.jsonl").read_text().splitlines())
    times = [line["step_time_s"] for line in lines if "step_time_s" in line]
    shutil.rmtree(runs)
    return 1e3 * statistics.median(times[steps[1] :])


def _theirs(pp: int, count: int, steps: tuple[int, int], flags: Sequence[str], data: Path) -> float:
    sizes = [f"--{name}={value}" for name, value in (MODEL | {"vocab": VOCAB}).items()]
    sizes += [f"--pp={pp}", f"--micro-batch={SAMPLES}", f"--num-microbatches={count}"]
    sizes += [f"--steps={steps[0]}", f"--warmup={steps[1]}", f"--data={data}"]
    printed, _ = run(torchrun(pp, str(PEER), *sizes, *flags))
    return json.loads(printed.strip().splitlines()[-1])["ms_per_step"]
