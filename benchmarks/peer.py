"""parallel3d beside PyTorch's own parallel parts: same model, same layout, same machine, in turns.

    python benchmarks/peer.py                                  # the table of docs/performance.md
    python benchmarks/peer.py --layouts 1,1,1 2,1,1 --rounds 5

Each round runs every contender once per layout, so that a busy minute hurts all alike. A run's
figure is its median step after the warm-up; the table shows the median over the rounds with the
spread, and the ratio of the fastest peer variant's median to ours (above 1: we are faster).
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
LAYOUTS = ["1,1,1", "2,1,1", "1,2,1", "1,1,2", "2,2,1", "2,2,2"]
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
    "device=cpu",
]


def environment() -> dict[str, str]:
    """One thread a rank for everybody; the packages of this checkout for us."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def torchrun(ranks: int, *args: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), *args]


def run_ours(layout: tuple[int, int, int], args: argparse.Namespace, folder: Path) -> dict:
    """Median step of one `parallel3d train`, read from its metrics.jsonl."""
    tp, pp, dp = layout
    keys = [f"tp={tp}", f"pp={pp}", f"dp={dp}", f"train.steps={args.steps}", *args.ours]
    runs = folder / "runs"
    data = [f"runs_dir={runs}", "data=text", f"data.path={args.data}", f"data.cache_dir={folder}"]
    command = torchrun(tp * pp * dp, "-m", "parallel3d", "train", *OURS, *keys, *data)
    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
    (run,) = runs.iterdir()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    times = [line["step_time_s"] for line in lines if "step_time_s" in line]
    shutil.rmtree(runs)
    return {"ms": 1e3 * statistics.median(times[args.warmup :])}


def run_peer(
    layout: tuple[int, int, int], variant: str, args: argparse.Namespace, folder: Path
) -> dict:
    """Median step of the peer, as it prints it."""
    tp, pp, dp = layout
    flags = [f"--{name}={value}" for name, value in (MODEL | {"vocab": VOCAB}).items()]
    flags += [f"--tp={tp}", f"--pp={pp}", f"--dp={dp}", "--micro-batch=2", f"--data={args.data}"]
    flags += [f"--num-microbatches={GLOBAL_MICROBATCHES // dp}"]
    flags += [f"--steps={args.steps}", f"--warmup={args.warmup}", *variant_flags(layout, variant)]
    command = torchrun(tp * pp * dp, str(PEER), *flags)
    done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    return {"ms": json.loads(done.stdout.strip().splitlines()[-1])["ms_per_step"]}


def variant_flags(layout: tuple[int, int, int], variant: str) -> list[str]:
    """`compile` with data parallelism works only with the flat reduction (see the peer's page)."""
    tp, pp, dp = layout
    flags = ["--compile"] if variant == "compile" else []
    if dp > 1 and (variant == "flat" or (variant == "compile" and max(tp, pp) > 1)):
        flags.append("--dp-impl=flat")
    return flags


def measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Layout → contender → one median step in ms per round."""
    contenders = ["parallel3d", *args.peers]
    result = {layout: {name: [] for name in contenders} for layout in args.layouts}
    total, done = args.rounds * len(args.layouts) * len(contenders), 0
    for _ in range(args.rounds):
        for text in args.layouts:
            layout = tuple(map(int, text.split(",")))
            for name in contenders:
                start = time.time()
                ours = name == "parallel3d"
                run = (
                    run_ours(layout, args, folder) if ours else run_peer(layout, name, args, folder)
                )
                result[text][name].append(run["ms"])
                done += 1
                said = f"[{done}/{total}] {text} {name}: {run['ms']:.0f} ms a step"
                print(f"{said} ({time.time() - start:.0f} s)", file=sys.stderr, flush=True)
    return result


def show(times: list[float]) -> str:
    return f"{statistics.median(times):.0f} ({min(times):.0f}–{max(times):.0f})"


def table(result: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: ms a step as median (min–max) over the rounds, and the ratio of medians."""
    peers = [name for name in next(iter(result.values())) if name != "parallel3d"]
    heads = [
        "tp,pp,dp",
        "parallel3d ms",
        *(f"PyTorch {p} ms" for p in peers),
        "ratio",
        "rounds' ratios",
    ]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for layout, times in result.items():
        ours = times["parallel3d"]
        best = min(peers, key=lambda p: statistics.median(times[p]))
        ratio = statistics.median(times[best]) / statistics.median(ours)
        each = [b / a for a, b in zip(ours, times[best], strict=True)]
        cells = [layout, show(ours), *(show(times[p]) for p in peers)]
        cells += [f"**{ratio:.2f}×** ({best})", f"{min(each):.2f}–{max(each):.2f}"]
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
        args.json.write_text(json.dumps({"facts": facts, "ms": result}, indent=1))


if __name__ == "__main__":
    main()
