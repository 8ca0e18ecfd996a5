"""parallel3d beside PyTorch's own parallel parts: same model, same layout, same machine, in turns.

    python benchmarks/peer.py                                  # the table of docs/performance.md
    python benchmarks/peer.py --layouts 1,1,1 2,1,1 --rounds 5
    python benchmarks/peer.py --precision bf16 --peers compile -- compile=true

Each round runs every contender once per layout, so that a busy minute hurts all alike. A run's
figure is its median step after the warm-up; the table shows the median over the rounds with the
spread, and the ratio of the fastest peer variant's median to ours (above 1: we are faster). Memory
is the largest resident set of any rank, compilation included. The peer's bf16 is autocast over fp32
weights, ours keeps bf16 parameters with fp32 masters.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEER = HERE / "peers" / "torch_native.py"
LAYOUTS = ["1,1,1", "2,1,1", "1,2,1", "1,1,2", "2,2,1", "2,1,2", "1,2,2", "2,2,2"]
GLOBAL_MICROBATCHES = 8  # of 2 sequences, over all data-parallel ranks: 4,096 tokens a step

# The byte tokenizer has 257 tokens; both sides pad the table to 264 so that tp divides it.
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
    """One thread a rank for everybody; the packages of this checkout for us."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def torchrun(ranks: int, *args: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), *args]


def run(command: list[str]) -> tuple[str, float]:
    """What the command prints, and the largest resident set of its processes in MiB."""
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return printed, used.ru_maxrss / 1024


def run_ours(layout: tuple[int, int, int], args: argparse.Namespace, folder: Path) -> dict:
    """Median step of one `parallel3d train`, read from its metrics.jsonl."""
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
    """Median step of the peer, as it prints it."""
    tp, pp, dp = layout
    flags = [f"--{name}={value}" for name, value in (MODEL | {"vocab": VOCAB}).items()]
    flags += [f"--tp={tp}", f"--pp={pp}", f"--dp={dp}", "--micro-batch=2", f"--data={args.data}"]
    flags += [f"--num-microbatches={GLOBAL_MICROBATCHES // dp}", f"--precision={args.precision}"]
    flags += [f"--steps={args.steps}", f"--warmup={args.warmup}", *variant_flags(layout, variant)]
    command = torchrun(tp * pp * dp, str(PEER), *flags)
    printed, memory = run(command)
    return {"ms": json.loads(printed.strip().splitlines()[-1])["ms_per_step"], "mib": memory}


def variant_flags(layout: tuple[int, int, int], variant: str) -> list[str]:
    """`compile` with data parallelism works only with the flat reduction (see the peer's page)."""
    tp, pp, dp = layout
    flags = ["--compile"] if variant == "compile" else []
    if dp > 1 and (variant == "flat" or (variant == "compile" and max(tp, pp) > 1)):
        flags.append("--dp-impl=flat")
    return flags


def measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[dict]]]:
    """Layout → contender → one median step in ms, and the memory in MiB, per round."""
    contenders = ["parallel3d", *args.peers]
    result = {layout: {name: [] for name in contenders} for layout in args.layouts}
    total, done = args.rounds * len(args.layouts) * len(contenders), 0
    for _ in range(args.rounds):
        for text in args.layouts:
            layout = tuple(map(int, text.split(",")))
            for name in contenders:
                start = time.time()
                ours = name == "parallel3d"
                seen = (
                    run_ours(layout, args, folder) if ours else run_peer(layout, name, args, folder)
                )
                result[text][name].append(seen)
                done += 1
                said = f"[{done}/{total}] {text} {name}: {seen['ms']:.0f} ms, {seen['mib']:.0f} MiB"
                print(f"{said} ({time.time() - start:.0f} s)", file=sys.stderr, flush=True)
    return result


def show(times: list[float]) -> str:
    spread = f" ({min(times):.0f}–{max(times):.0f})" if len(times) > 1 else ""
    return f"{statistics.median(times):.0f}{spread}"


def table(result: dict[str, dict[str, list[dict]]]) -> str:
    """Markdown: ms a step as median (min–max) over the rounds, the ratio of medians, and MiB."""
    peers = [name for name in next(iter(result.values())) if name != "parallel3d"]
    heads = [
        "tp,pp,dp",
        "parallel3d ms",
        *(f"PyTorch {p} ms" for p in peers),
        "ratio",
        "rounds' ratios",
        "MiB a rank, ours",
        "theirs",
    ]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for layout, runs in result.items():
        times = {name: [seen["ms"] for seen in rounds] for name, rounds in runs.items()}
        mib = {n: statistics.median(seen["mib"] for seen in r) for n, r in runs.items()}
        ours = times["parallel3d"]
        best = min(peers, key=lambda p: statistics.median(times[p]))
        ratio = statistics.median(times[best]) / statistics.median(ours)
        each = [b / a for a, b in zip(ours, times[best], strict=True)]
        cells = [layout, show(ours), *(show(times[p]) for p in peers)]
        cells += [f"**{ratio:.2f}×** ({best})", f"{min(each):.2f}–{max(each):.2f}"]
        cells += [f"{mib['parallel3d']:.0f}", f"{mib[best]:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="tp,pp,dp each")
    variants = ["eager", "compile", "flat"]
    parser.add_argument("--peers", nargs="+", default=variants[:2], choices=variants)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3, help="steps left out of each median")
    parser.add_argument("--data", type=Path, help="text file (default: sources of this Python)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("ours", nargs="*", help="more overrides for parallel3d, key=value")
    return parser.parse_args()


def corpus(folder: Path) -> Path:
    """A megabyte of this Python's own sources, the same for both sides."""
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
