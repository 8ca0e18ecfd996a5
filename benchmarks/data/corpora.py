"""Measures the costs of opening and reading a corpus of 10^12 tokens, next to PyTorch's DataLoader.

    python -m benchmarks.data.corpora [--sets 2000] [--tokens 500000000] [--documents 500000]

The files are sparse: each .bin is a hole that begins with its number, all have the same size, and
their indexes are one file under many names. So the benchmark measures the loader and not a disk.
The first reading fills the page cache, and the best of seven more is reported. Each figure comes
from a process of its own, which finds nothing that another has loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from parallel3d.data.corpus import check_data, open_corpus
from parallel3d.data.indexed import IndexedWriter
from parallel3d.data.keys import DataConfig
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config

SEQ = 2048
SAMPLES = 4000
PASSES = 7


def make(folder: Path, sets: int, tokens: int, documents: int) -> None:
    """Makes the pairs, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    length, first = tokens // documents, folder / "set-0000"
    if not first.with_suffix(".idx").exists():
        with IndexedWriter(first, np.dtype("<u2")) as writer:
            for _ in range(10):
                writer.add_many(np.zeros(tokens // 10, "<u2"), [length] * (documents // 10))
    for number in range(sets):
        prefix = folder / f"set-{number:04d}"
        if prefix.with_suffix(".json").exists():
            continue
        if number:
            prefix.with_suffix(".idx").unlink(missing_ok=True)
            os.link(first.with_suffix(".idx"), prefix.with_suffix(".idx"))
        with open(prefix.with_suffix(".bin"), "wb") as file:
            file.write(np.full(8, number % 257, "<u2").tobytes() + number.to_bytes(2, "little"))
            file.truncate(2 * tokens)
        facts = {
            "tokenizer": "byte",
            "tokenizer_file": None,
            "vocab_size": 2049,
            "eot": 256,
            "digest": str(number),
        }
        facts |= {"documents": documents, "tokens": tokens}
        prefix.with_suffix(".json").write_text(json.dumps(facts))


def resident() -> int:
    """Returns the MB of this process's own memory, without mapped files."""
    fields = Path("/proc/self/status").read_text().split("RssAnon:")[1].split()
    return int(fields[0]) // 1024


def best_of(begin: Callable[[], Callable[[], object]]) -> tuple[float, int]:
    """Returns thread time per sample, and samples per second, of the best of several passes over
    the same samples.

    `begin` returns a function that returns the samples, one after the other.
    """
    times = []
    for _ in range(PASSES):
        following = begin()
        thread, wall = time.thread_time(), time.perf_counter()
        for _ in range(SAMPLES):
            following()
        times.append((time.thread_time() - thread, time.perf_counter() - wall))
    return min(t for t, _ in times) / SAMPLES, round(SAMPLES / min(w for _, w in times))


def ours(folder: Path, sets: int, mask: bool) -> dict[str, Any]:
    names = [str(folder / f"set-{number:04d}") for number in range(sets)]
    random = np.random.default_rng(0)
    weights = {name: float(w) for name, w in zip(names, random.uniform(1, 50, sets), strict=True)}
    data = DataConfig(name="blend", blend=weights, document_mask=mask)
    config = Config(data=data, model=ModelConfig(seq_length=SEQ, vocab_size=2049))
    before, start = resident(), time.perf_counter()
    cpu = time.process_time()
    check_data(data, SEQ, vocab_size=2049, samples=10**6)
    checked = time.perf_counter()
    source = open_corpus(data, SEQ, vocab_size=2049).sources(config.model, data, config.seed).train
    opened, cpu = time.perf_counter(), time.process_time() - cpu
    memory = resident() - before
    wanted = random.integers(0, 400_000_000, SAMPLES).tolist()
    for i in wanted:
        source.sample(i)
    each, rate = best_of(lambda: map(source.sample, wanted).__next__)
    return {
        "check_s": round(checked - start, 2),
        "open_s": round(opened - checked, 2),
        "both_cpu_s": round(cpu, 2),
        "open_mb": memory,
        "sample_us": round(each * 1e6, 1),
        "samples_per_s": rate,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def peer(folder: Path, sets: int, mask: bool) -> dict[str, Any]:
    """Uses a DataLoader, shuffled, over windows of the same mapped files, with one worker: this
    thread."""
    del mask
    import torch
    from torch.utils.data import ConcatDataset, DataLoader

    class Windows(Dataset[Any]):
        def __init__(self, path: Path) -> None:
            self.tokens = np.memmap(path, "<u2", "r")

        def __len__(self) -> int:
            return (len(self.tokens) - 1) // SEQ

        def __getitem__(self, i: int) -> Any:
            piece = self.tokens[i * SEQ : (i + 1) * SEQ + 1].astype(np.int64)
            return torch.from_numpy(piece), torch.ones(SEQ, dtype=torch.bool)

    before, start = resident(), time.perf_counter()
    files = [folder / f"set-{number:04d}.bin" for number in range(sets)]
    order = torch.Generator()
    text: ConcatDataset[tuple[torch.Tensor, torch.Tensor]] = ConcatDataset(
        [Windows(file) for file in files]
    )
    loader = DataLoader(text, shuffle=True, generator=order.manual_seed(0))
    batches = iter(loader)
    next(batches)
    opened, memory = time.perf_counter(), resident() - before
    for _ in range(SAMPLES):
        next(batches)

    def again() -> Callable[[], object]:
        order.manual_seed(0)
        batches = iter(loader)
        next(batches)
        return batches.__next__

    each, rate = best_of(again)
    return {
        "open_s": round(opened - start, 2),
        "open_mb": memory,
        "sample_us": round(each * 1e6, 1),
        "samples_per_s": rate,
        "windows": len(loader),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=500_000_000, help="of each set")
    parser.add_argument("--documents", type=int, default=500_000, help="of each set")
    parser.add_argument(
        "--peer-sets", type=int, default=20, help="sets that the DataLoader is given"
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "p3d-corpora")
    parser.add_argument("--only", choices=("ours", "masked", "peer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        run = peer if args.only == "peer" else ours
        sets = args.peer_sets if args.only == "peer" else args.sets
        print(json.dumps(run(args.folder, sets, args.only == "masked")))
        return
    make(args.folder, args.sets, args.tokens, args.documents)
    print(
        f"{args.sets:,} sets, {args.sets * args.tokens:.3g} tokens, "
        f"{args.sets * args.documents:.3g} documents"
    )
    for only in ("ours", "masked", "peer"):
        words = (sys.executable, "-m", "benchmarks.data.corpora", *sys.argv[1:], "--only", only)
        out = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(only, out.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
