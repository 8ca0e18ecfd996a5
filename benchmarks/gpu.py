"""What one GPU does: all that docs/performance.md asks of a card, in one command.

    python -m benchmarks.gpu --json gpu.json --markdown gpu.md

1. The card's speed in a large bf16 GEMM: the peak that every MFU here is measured against.
2. Llama 3.2's 1B and 3B shapes, sequence 4096, bf16: tokens/s and MFU of parallel3d (eager and
   `compile=true`), of Hugging Face transformers (the same two ways) and of torchtitan's model, on
   equal batches of random tokens, AdamW, clipping. The micro-batch is the largest that fits.
3. One rank's share of llama3_70b at tp=8 and of gpt3_175b at tp=8 pp=16, with PyTorch's `fake`
   process group in place of the other ranks: time of a layer's forward and backward without its
   communication, and memory.
4. fp8 against bf16 in the GEMMs of the first of these, casts included, where the card has fp8.

Rows that need a package or a device that is not there say so. Each row runs in a process of its own
(--in-process: all in this one), so that no row starts with another's memory.

`--size tiny --device cpu` runs every path that a CPU has in a few seconds; the suite does. The CUDA
paths (events, memory statistics, fp8) have been written with care and have not been run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu_peers import titan, transformers_row
from benchmarks.gpu_rows import SIZES, fp8_row, gemm_row, model_row, shard_row
from benchmarks.gpu_tables import markdown

ROWS = {
    "gemm": gemm_row,
    "parallel3d 1b": lambda size, device: model_row("1b", size, device, compiled=False),
    "parallel3d 1b compile": lambda size, device: model_row("1b", size, device, compiled=True),
    "transformers 1b": lambda size, device: transformers_row("1b", size, device, compiled=False),
    "transformers 1b compile": lambda size, device: transformers_row(
        "1b", size, device, compiled=True
    ),
    "torchtitan 1b": lambda size, device: titan("1b", size, device),
    "parallel3d 3b": lambda size, device: model_row("3b", size, device, compiled=False),
    "parallel3d 3b compile": lambda size, device: model_row("3b", size, device, compiled=True),
    "transformers 3b": lambda size, device: transformers_row("3b", size, device, compiled=False),
    "transformers 3b compile": lambda size, device: transformers_row(
        "3b", size, device, compiled=True
    ),
    "torchtitan 3b": lambda size, device: titan("3b", size, device),
    "shard llama3_70b": lambda size, device: shard_row("llama3_70b", size, device),
    "shard gpt3_175b": lambda size, device: shard_row("gpt3_175b", size, device),
    "fp8": fp8_row,
}


def machine(device: torch.device) -> dict[str, str]:
    here = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        here["device"] = torch.cuda.get_device_name(device)
        here["memory_gb"] = f"{torch.cuda.get_device_properties(device).total_memory / 1e9:.0f}"
    else:
        here["device"] = f"CPU, {torch.get_num_threads()} threads"
    return here


def run_row(name: str, given: argparse.Namespace) -> dict:
    """The row, or `{"failed": what was said}` of a process that did not end well."""
    if given.in_process:
        return ROWS[name](SIZES[given.size], torch.device(given.device))
    words = ["--row", name, "--size", given.size, "--device", given.device]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return {"failed": said[-1] if said else f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--only", nargs="+", choices=sorted(ROWS), help="these rows alone")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--markdown", type=Path, default=Path("gpu.md"))
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--row", choices=sorted(ROWS), help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device here: --device cpu --size tiny tries the paths", file=sys.stderr)
        return 2
    if given.row:
        print(json.dumps(ROWS[given.row](SIZES[given.size], torch.device(given.device))))
        return 0
    result = {"machine": machine(torch.device(given.device)), "size": given.size, "rows": {}}
    for name in given.only or ROWS:
        start = time.perf_counter()
        result["rows"][name] = run_row(name, given)
        seconds = time.perf_counter() - start
        print(f"{name}: {result['rows'][name]} ({seconds:.0f} s)", flush=True)
        given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    given.markdown.write_text(markdown(result), encoding="utf-8")
    print(f"{given.json} and {given.markdown} are written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
