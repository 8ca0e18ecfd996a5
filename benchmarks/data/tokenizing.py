"""Compares `data tokenize` with `datasets.map` and a plain loop, all with one tokenizer.

    pip install --target /tmp/datasets-peer datasets
    PYTHONPATH=/tmp/datasets-peer python -m benchmarks.data.tokenizing [--workers 2] [--repeats 5]
    python -m benchmarks.data.tokenizing --memory 2000 --workers 1 [--byte]

This project does not depend on `datasets`: it is taken from PYTHONPATH, and left out if it is
missing. The input is this Python's sources as jsonl, one file per row; the tokenizer is byte-level
BPE with 8,192 tokens, trained on them. Each contender reads the input from its file and writes
tokens to files, in a process of its own whose imports do not count; contenders take turns. The
figure is CPU time of all processes that take part: a tokenizer keeps a core busy, and others use
this machine too. The benchmark checks that all made the same tokens. `--memory` tokenizes a larger
input and reports the largest memory of all processes together (PSS, sampled ten times per second).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.data.indexed import IndexedCorpus
from parallel3d.data.inputs import find_inputs
from parallel3d.data.preprocess import PreprocessJob, tokenize, train_tokenizer

VOCABULARY = 8192
DTYPE = np.dtype("<u2")
BATCH = 1000  # rows per batch, the default of datasets


def make(folder: Path, megabytes: int) -> tuple[Path, Path]:
    """Makes the input, the sources repeated to the given MB, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
    texts = [path.read_text("utf-8", "replace") for path in files]
    text, tokenizer = folder / f"{megabytes}.jsonl", folder / "tok.json"
    if not text.exists():
        rows, size = [json.dumps({"text": each}) + "\n" for each in texts], 0
        with open(text, "w") as file:
            for row in itertools.cycle(rows):
                size += file.write(row)
                if size >= megabytes * 10**6:
                    break
    if not tokenizer.exists():
        inputs = find_inputs(str(text), None)
        tokenizer.write_bytes(train_tokenizer(inputs, VOCABULARY, "text", lambda *_: None)[0])
    return text, tokenizer


def ours(text: Path, tokenizer: Path, workers: int, to: Path) -> Callable[[], Iterable[Any]]:
    tokenize(
        PreprocessJob(tuple(find_inputs(str(text), None)), str(tokenizer), to, workers=workers), _no
    )

    def made() -> Iterable[Any]:
        corpus = IndexedCorpus(str(to))
        ends = corpus.begins(1, corpus.documents) - 1
        return [np.delete(corpus.tokens[:], ends)]

    return made


def _no(_: object) -> None:
    """Prints nothing, in place of the progress."""


def loop(text: Path, tokenizer: Path, workers: int, to: Path) -> Callable[[], Iterable[Any]]:
    """Tokenizes with a plain loop: rows in, tokens out, one process."""
    del workers
    from tokenizers import Tokenizer

    cut = Tokenizer.from_file(str(tokenizer))
    with open(text, "rb") as rows, open(to, "wb") as out:
        for row in rows:
            tokens = cut.encode(json.loads(row)["text"], add_special_tokens=False).ids
            np.array(tokens, dtype=DTYPE).tofile(out)
    return lambda: [np.fromfile(to, DTYPE)]


def datasets(text: Path, tokenizer: Path, workers: int, to: Path) -> Callable[[], Iterable[Any]]:
    """Tokenizes with `map` over batches, with the library's fastest call and the smallest dtype."""
    from datasets import Dataset, Features, Sequence, Value
    from tokenizers import Tokenizer

    cut = Tokenizer.from_file(str(tokenizer))

    def batch(rows: dict[str, list[str]]) -> dict[str, Any]:
        made = cut.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"input_ids": [each.ids for each in made]}

    rows = Dataset.from_json(str(text), cache_dir=str(to))
    mapped = rows.map(
        batch,
        batched=True,
        batch_size=BATCH,
        num_proc=workers,
        remove_columns=["text"],
        features=Features({"input_ids": Sequence(Value("uint16"))}),
    )
    return lambda: (np.array(row, DTYPE) for row in mapped["input_ids"])


WAYS = {"ours": ours, "datasets": datasets, "loop": loop}


def measured(name: str, text: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    """Runs one of the contenders, in this process, after all imports."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # parallelism comes from processes only
    importlib.import_module("tokenizers" if name != "datasets" else "datasets")
    with tempfile.TemporaryDirectory(dir=text.parent) as folder:
        wall, cpu = time.perf_counter(), _cpu()
        made = WAYS[name](text, tokenizer, workers, Path(folder, "made"))
        wall, cpu = time.perf_counter() - wall, _cpu() - cpu
        digest, tokens = hashlib.blake2b(), 0
        for part in made():
            digest.update(np.ascontiguousarray(part, DTYPE).data)
            tokens += part.size
    return {"tokens": tokens, "cpu_s": cpu, "wall_s": wall, "digest": digest.hexdigest()}


def _cpu() -> float:
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def compare(args: argparse.Namespace, text: Path) -> None:
    """Runs all contenders in turn, `args.repeats` times."""
    names = [n for n in WAYS if n != "datasets" or importlib.util.find_spec("datasets")]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(args.repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            words = (
                sys.executable,
                "-m",
                "benchmarks.data.tokenizing",
                *sys.argv[1:],
                "--only",
                name,
            )
            out = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[name].append(json.loads(out.strip().splitlines()[-1]))
            print(name, {k: v for k, v in found[name][-1].items() if k != "digest"}, flush=True)
    assert len({one["digest"] for of in found.values() for one in of}) == 1, "other tokens"
    size = text.stat().st_size
    print(f"{size / 1e6:.1f} MB of jsonl, {found['ours'][0]['tokens']:,} tokens")
    for name, of in found.items():
        rates = sorted(one["tokens"] / one["cpu_s"] for one in of)
        wall = statistics.median(one["tokens"] / one["wall_s"] for one in of)
        print(
            f"{name:9} {statistics.median(rates):>12,.0f} tokens/s of a core "
            f"(from {rates[0]:,.0f} to {rates[-1]:,.0f}), {wall:,.0f} tokens/s"
        )


def memory(text: Path, tokenizer: Path | str, workers: int) -> None:
    """Prints the peak memory of all processes together while they make a corpus."""
    to = text.parent / "memory"
    given = (f"input={text}", f"tokenizer={tokenizer}", f"to={to}/made", f"workers={workers}")
    shutil.rmtree(to, ignore_errors=True)
    start, most = time.perf_counter(), 0
    process = subprocess.Popen((sys.executable, "-m", "parallel3d", "data", "tokenize", *given))
    while process.poll() is None:
        most = max(most, sum(_pss(pid) for pid in _family(process.pid)))
        time.sleep(0.1)
    took = time.perf_counter() - start
    shutil.rmtree(to, ignore_errors=True)
    print(
        f"{text.stat().st_size / 1e6:,.0f} MB of jsonl, {workers} workers, {took:.0f} s: at most "
        f"{most / 1e6:,.0f} MB in all processes; exit code {process.returncode}"
    )


def _family(pid: int) -> list[int]:
    """Returns a process and its children that still exist."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in _family(int(child)))]


def _pss(pid: int) -> int:
    try:
        rolled = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return int(rolled.split("\nPss:")[1].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=25, help="of the input")
    parser.add_argument(
        "--workers", type=int, default=2, help="worker processes of ours and of datasets"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--memory", type=int, metavar="MB", help="megabytes of the input; measures memory only"
    )
    parser.add_argument(
        "--byte", action="store_true", help="with --memory: the byte tokenizer, which is fast"
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "p3d-tokenize")
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    text, tokenizer = make(args.folder, args.memory or args.megabytes)
    if args.memory:
        memory(text, "byte" if args.byte else tokenizer, args.workers)
    elif args.only:
        print(json.dumps(measured(args.only, text, tokenizer, args.workers)))
    else:
        compare(args, text)


if __name__ == "__main__":
    main()
