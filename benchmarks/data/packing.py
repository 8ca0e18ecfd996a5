"""Compares best-fit packs with windows, on the top-level definitions of Python's own sources.

    python -m benchmarks.data.packing [--seq 512 2048 8192]

Each definition or run of statements of a file is a document, one byte per token. Only tokens of
documents that would fit into a sample count as cut, because others must be cut.
"""

from __future__ import annotations

import argparse
import ast
import time
from collections.abc import Iterator

import numpy as np

from parallel3d.data.keys import DataConfig
from parallel3d.data.packing import best_fit, pieces_of
from parallel3d.data.sources import find_documents


def lengths() -> Iterator[int]:
    for document in find_documents(DataConfig()):
        try:
            with open(document.path, "rb") as file:
                text = file.read()
            body = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
        if not body:
            continue
        lines = text.splitlines(keepends=True)
        begins = [node.lineno - 1 - len(getattr(node, "decorator_list", ())) for node in body]
        for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
            yield sum(map(len, lines[begin:end])) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, nargs="+", default=[512, 2048, 8192])
    sizes = np.array(list(lengths()))
    tokens, begins = int(sizes.sum()), np.cumsum(sizes) - sizes
    print(f"{sizes.size:,} documents, {tokens:,} tokens, median {int(np.median(sizes))}")
    for seq in parser.parse_args().seq:
        room = seq + 1
        fits = sizes <= room
        cut = (begins // seq != (begins + sizes - 1) // seq) & fits
        start = time.perf_counter()
        pieces = pieces_of(begins, tokens, room)
        packs = best_fit(pieces.lengths, room)
        took = time.perf_counter() - start
        filled = int(pieces.lengths.sum()) / ((packs.first.size - 1) * room)
        print(
            f"seq {seq}: windows cut {sizes[cut].sum() / sizes[fits].sum():.1%} of the tokens of "
            f"documents that fit; best fit cuts none, pads {1 - filled:.3%}, "
            f"{packs.first.size - 1:,} packs in {took:.2f} s"
        )


if __name__ == "__main__":
    main()
