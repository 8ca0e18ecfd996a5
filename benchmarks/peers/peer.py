"""Compares parallel3d with PyTorch's own parallel parts: same model, layout and machine, in turns.

    python -m benchmarks.peer                                  # the table of docs/performance.md
    python -m benchmarks.peer --layouts 1,1,1 2,1,1 --rounds 5
    python -m benchmarks.peer --precision bf16 --peers all -- compile=true

Each round runs every contender once per layout, so that a busy minute slows all of them equally. A
run's figure is its median step after the warm-up. The table shows the median over the rounds with
the spread, and the ratio of the fastest peer variant's median to ours (above 1: we are faster).
Memory is the largest resident set of any rank, compilation included. The peer's bf16 is autocast
over fp32 weights; ours keeps bf16 parameters with fp32 masters.

A peer variant is "eager" or "compile", with data parallelism followed by the way gradients are
reduced: "eager-ddp", "compile-flat" …; "all" means every variant of a layout. Variants that do not
compose in PyTorch (see the peer's page) fail in the first round and are left out of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEER = Path(__file__).resolve().with_name("torch_native.py")
LAYOUTS = ["1,1,1", "2,1,1", "1,2,1", "1,1,2", "2,2,1", "2,1,2", "1,2,2", "2,2,2"]
OURS_NAME = "parallel3d"
MODES = ["eager", "compile"]
DP_IMPLS = ["ddp", "flat", "fsdp2", "replicate"]
# Micro-batches of 2 sequences, over all data-parallel ranks: 4,096 tokens per step.
GLOBAL_MICROBATCHES = 8

# The byte tokenizer has 257 tokens; both sides pad the table to 264, which tp divides.
VOCAB = 264
MODEL = {"layers": 8, "hidden": 256, "heads": 8, "ffn": 688, "seq": 256}
OURS = [
    "model=llama_tiny",
    f"model.num_layers={MODEL['layers']}",
    f"model.hidden_size={MODEL['hidden']}",
    f"model.num_attention_heads={MODEL['heads']}",
    f"model.num_query_groups={MODEL['heads']}",
    f"model.ffn_hidden_size={MODEL['ffn']}",
    f"model.seq_length={MODEL['seq']}",
    "model.vocab_multiple=8",
    "micro_batch_size=2",
    f"global_batch_size={2 * GLOBAL_MICROBATCHES}",
    "optim.lr_decay_style=constant",
    "train.eval_batches=0",
    "train.progress=false",
    "checkpoint.every=0",
    "device=cpu",
]


def environment() -> dict[str, str]:
    """Sets one thread per rank for every contender, and the packages of this checkout for us."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def torchrun(ranks: int, *args: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), *args]


def layout_of(text: str) -> tuple[int, int, int]:
    """Reads "tp,pp,dp"."""
    tp, pp, dp = map(int, text.split(","))
    return tp, pp, dp


def run(command: list[str]) -> tuple[str, float]:
    """Runs a command. Returns its output, and the largest resident set of its processes in MiB."""
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return printed, used.ru_maxrss / 1024


def run_ours(layout: tuple[int, int, int], args: argparse.Namespace, folder: Path) -> dict:
    """Returns the median step of one `parallel3d train`, read from its metrics.jsonl."""
    tp, pp, dp = layout
    keys = [f"tp={tp}", f"pp={pp}", f"dp={dp}", f"train.steps={args.steps}"]
    keys += [f"precision={args.precision}", *args.ours]
    runs = folder / "runs"
    data = [f"runs_dir={runs}", "data=text", f"data.path={args.data}", f"data.cache_dir={folder}"]
    command = torchrun(tp * pp * dp, "-m", "parallel3d", "train", *OURS, *keys, *data)
    _, memory = run(command)
    (folder_of_run,) = runs.iterdir()
    lines = map(json.loads, (folder_of_run / "metrics.jsonl").read_text().splitlines())
    times = [line["step_time_s"] for line in lines if "step_time_s" in line]
    shutil.rmtree(runs)
    return {"ms": 1e3 * statistics.median(times[args.warmup :]), "mib": memory}


def run_peer(
    layout: tuple[int, int, int], variant: str, args: argparse.Namespace, folder: Path
) -> dict:
    """Returns the median step of the peer, read from its output."""
    tp, pp, dp = layout
    mode, _, dp_impl = variant.partition("-")
    flags = [f"--{name}={value}" for name, value in (MODEL | {"vocab": VOCAB}).items()]
    flags += ["--compile"] if mode == "compile" else []
    flags += [f"--dp-impl={dp_impl}"] if dp_impl else []
    flags += [f"--tp={tp}", f"--pp={pp}", f"--dp={dp}", "--micro-batch=2", f"--data={args.data}"]
    flags += [f"--num-microbatches={GLOBAL_MICROBATCHES // dp}", f"--precision={args.precision}"]
    flags += [f"--steps={args.steps}", f"--warmup={args.warmup}"]
    command = torchrun(tp * pp * dp, str(PEER), *flags)
    printed, memory = run(command)
    return {"ms": json.loads(printed.strip().splitlines()[-1])["ms_per_step"], "mib": memory}


def variants(layout: tuple[int, int, int], wanted: Sequence[str]) -> list[str]:
    """Lists the peer's variants of `wanted` that differ under this layout. `compile` alone takes
    the reduction that composes with it: flat where dp meets tp or pp."""
    tp, pp, dp = layout
    if dp == 1:
        return sorted({w.partition("-")[0] for w in (MODES if "all" in wanted else wanted)})
    if "all" in wanted:
        return [f"{mode}-{dp_impl}" for mode in MODES for dp_impl in DP_IMPLS]
    default = {"eager": "ddp", "compile": "flat" if max(tp, pp) > 1 else "ddp"}
    return [w if "-" in w else f"{w}-{default[w]}" for w in wanted]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[dict]]]:
    """Runs all contenders in turns. Returns layout → contender → the median step in ms, and the
    memory in MiB, of each round."""
    layouts = {text: layout_of(text) for text in args.layouts}
    result: dict[str, dict[str, list[dict]]] = {
        text: {name: [] for name in [OURS_NAME, *variants(layout, args.peers)]}
        for text, layout in layouts.items()
    }
    for number in range(args.rounds):
        for text, layout in layouts.items():
            for name in list(result[text]):
                start = time.time()
                seen = run_one(layout, name, args, folder)
                if seen is None:
                    del result[text][name]
                    said = "failed"
                else:
                    result[text][name].append(seen)
                    said = f"{seen['ms']:.0f} ms, {seen['mib']:.0f} MiB"
                where = f"round {number + 1}/{args.rounds} {text} {name}"
                took = f"{time.time() - start:.0f} s"
                print(f"{where}: {said} ({took})", file=sys.stderr, flush=True)
    return result


def run_one(
    layout: tuple[int, int, int], name: str, args: argparse.Namespace, folder: Path
) -> dict | None:
    """Runs a contender once; None for a variant of the peer that fails. Ours must not fail."""
    if name == OURS_NAME:
        return run_ours(layout, args, folder)
    try:
        return run_peer(layout, name, args, folder)
    except subprocess.CalledProcessError:
        return None


def show(times: list[float]) -> str:
    spread = f" ({min(times):.0f}–{max(times):.0f})" if len(times) > 1 else ""
    return f"{statistics.median(times):.0f}{spread}"


def table(result: dict[str, dict[str, list[dict]]]) -> str:
    """Returns a Markdown table: milliseconds per step as median (min–max) over the rounds, the
    ratio of medians, and MiB."""
    heads = ["tp,pp,dp", "parallel3d ms", "PyTorch's best ms", "ratio", "rounds' ratios"]
    heads += ["MiB a rank, ours", "theirs", "its other variants, ms"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for layout, runs in result.items():
        times = {name: [seen["ms"] for seen in rounds] for name, rounds in runs.items()}
        mib = {n: statistics.median(seen["mib"] for seen in r) for n, r in runs.items()}
        ours = times.pop(OURS_NAME)
        if not times:
            raise SystemExit(f"{layout}: every variant of the peer failed")
        best, *others = sorted(times, key=lambda name: statistics.median(times[name]))
        ratio = statistics.median(times[best]) / statistics.median(ours)
        each = [b / a for a, b in zip(ours, times[best], strict=True)]
        cells = [layout, show(ours), f"{show(times[best])} {best}"]
        cells += [f"**{ratio:.2f}×**", f"{min(each):.2f}–{max(each):.2f}"]
        cells += [f"{mib[OURS_NAME]:.0f}", f"{mib[best]:.0f}"]
        cells.append(", ".join(f"{name} {show(times[name])}" for name in others) or "—")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="tp,pp,dp each")
    names = [*MODES, *(f"{mode}-{impl}" for mode in MODES for impl in DP_IMPLS), "all"]
    parser.add_argument("--peers", nargs="+", default=MODES, choices=names, metavar="VARIANT")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3, help="steps left out of each median")
    parser.add_argument("--data", type=Path, help="text file (default: sources of this Python)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("ours", nargs="*", help="more overrides for parallel3d, key=value")
    return parser.parse_args()


def corpus(folder: Path) -> Path:
    """Writes a megabyte of this Python's own sources, the same for both sides."""
    text = b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py")))
    path = folder / "corpus.txt"
    path.write_bytes(text[: 1 << 20])
    return path


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        args.data = args.data or corpus(folder)
        result = measure(args, folder)
    import torch

    facts = f"commit {commit()}, torch {torch.__version__}, {os.cpu_count()} cores"
    print(f"{facts}, {platform.machine()}; `{' '.join(['python', *sys.argv])}`\n")
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps({"facts": facts, "runs": result}, indent=1))


if __name__ == "__main__":
    main()
