"""Compiles and tests the hand-written kernel of experts' gradients for
`benchmarks.compiled.kernels`.

python -m benchmarks.compiled.grouped compile H100 results.json
TRITON_INTERPRET=1 python -m benchmarks.compiled.grouped interpret H100 results.json

The kernel is compiled like a launch for the gradients of each family of mixtures, at ep=1 and ep=8.
It is interpreted for the same numbers of experts with narrower matrices and few rows, and for three
experts with matrices of each family's size, and compared with float64.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from benchmarks.compiled.card import CARDS, Card, interpreting
from benchmarks.compiled.mixtures import RANKS, TOKENS, Shape, shapes
from benchmarks.compiled.table import resources
from benchmarks.compiled.worker import TOLERANCES, dump
from parallel3d.device import grouped_kernels

FEW = (70, 0, 3)  # rows of experts with matrices of a family's size
# Elements of the largest matrix that is interpreted, which takes minutes. It leaves out those of
# Mixtral 8x22B, and one of 8x7B.
LARGEST = 2**26
NARROW = (144, 264)  # widths in the interpreter: a part of a block, and more than two blocks
FUNCTION = grouped_kernels.add_products_of_groups
POINTERS = {"out_ptr": "*fp32", "a_ptr": "*bf16", "b_ptr": "*bf16", "ends_ptr": "*i32"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("compile", "interpret"))
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("out", type=Path, help="the file to write")
    given = parser.parse_args()
    play = {"compile": compiled, "interpret": interpreted}[given.role]
    rows = play(CARDS[given.card])
    given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def matrices(shape: Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns rows and columns of an expert's two matrices."""
    return (2 * shape.width, shape.hidden), (shape.hidden, shape.width)


def gradients() -> list[tuple[str, int, tuple[int, int], int]]:
    """Returns tuples (case, experts of a rank, rows and columns of a matrix, chosen rows of the
    rank)."""
    found = []
    for name, shape in shapes().items():
        for ep in RANKS:
            for rows, columns in matrices(shape):
                case = f"{name}, ep={ep}, {rows} × {columns}"
                sizes = shape.experts // ep, (rows, columns), TOKENS * shape.chosen
                found.append((case, *sizes))
    return found


def compiled(card: Card) -> list[dict[str, Any]]:
    """Returns a row for each gradient; launches with equivalent arguments are compiled once."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known: dict[tuple[bool, ...], dict[str, Any]] = {}
    rows = []
    for case, groups, (a_columns, b_columns), chosen in gradients():
        sizes = (a_columns, b_columns, a_columns, b_columns)
        alike = tuple(size % 16 == 0 for size in sizes)
        if alike not in known:
            names = ("a_columns", "b_columns", "a_stride", "b_stride")
            signature = POINTERS | dict.fromkeys(names, "i32")
            signature |= dict.fromkeys(grouped_kernels.BLOCKS, "constexpr")
            aligned = [*range(len(POINTERS)), *(4 + i for i, even in enumerate(alike) if even)]
            source = ASTSource(
                FUNCTION,
                signature,
                constexprs=dict(grouped_kernels.BLOCKS),
                attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
            )
            target = GPUTarget("cuda", card.number, 32)
            binary = triton.compile(source, target=target, options=grouped_kernels.HOW)
            code = resources(dump(binary.asm["cubin"]))
            code |= {"shared": binary.metadata.shared, "warps": grouped_kernels.HOW["num_warps"]}
            blocks = " ".join(f"{name}={size}" for name, size in grouped_kernels.BLOCKS.items())
            known[alike] = {"blocks": blocks} | code
        elements = groups * a_columns * b_columns
        nbytes = 8 * elements + 2 * chosen * (a_columns + b_columns)
        kernel = {"kernel": FUNCTION.__name__, "launches": 1, "bytes": nbytes}
        kernels = [kernel | {"candidates": [known[alike]]}]
        row = {"card": card.name, "case": case, "elements": elements}
        rows.append(row | {"function": FUNCTION.__name__, "kernels": kernels})
        print(card.name, case, flush=True)
    return rows


def interpreted(card: Card) -> list[dict[str, Any]]:
    """Compares gradients with float64, of as many experts and of matrices as large as in
    `gradients`.

    Some experts have no row, one has most, and all numbers behind the last row are NaN.
    """
    rows = []
    for groups in sorted({groups for _, groups, _, _ in gradients()}):
        draws = np.random.default_rng(groups)
        sizes = draws.integers(0, 5, groups) * draws.integers(0, 2, groups)
        sizes[groups // 2] = 150
        case = f"{groups} experts"
        rows.append(_interpreted(card, case, sizes, NARROW))
    for widths in sorted({widths for _, _, widths, _ in gradients()}):
        if widths[0] * widths[1] > LARGEST:
            continue
        case = f"{widths[0]} × {widths[1]}"
        rows.append(_interpreted(card, case, np.array(FEW), widths))
    return rows


def _interpreted(
    card: Card, case: str, sizes: np.ndarray, widths: tuple[int, int]
) -> dict[str, Any]:
    """Returns the row of one launch for groups of these sizes."""
    draws = torch.Generator().manual_seed(len(sizes) + widths[0])
    total = int(sizes.sum())
    a, b = (torch.randn(total + 3, width, generator=draws).bfloat16() for width in widths)
    a[total:], b[total:] = torch.nan, torch.nan
    out = torch.randn(len(sizes), *widths, generator=draws)
    before = out.clone()
    with interpreting():
        ends = torch.from_numpy(sizes.cumsum()).int()
        grouped_kernels.add_products(out, a, b, ends)
    off, scale, first = 0.0, 0.0, 0
    for found, start, size in zip(out, before, sizes.tolist(), strict=True):
        part = slice(first, first + size)
        wanted = start.double() + a[part].double().t() @ b[part].double()
        off = max(off, float((found.double() - wanted).abs().max()))
        scale = max(scale, float(wanted.abs().max()))
        first += size
    error, kind = off / scale, str(out.dtype)
    is_right = error <= TOLERANCES[kind]  # False for NaN, too
    result = {"type": kind, "elements": out.numel(), "error": error, "is_right": is_right}
    row: dict[str, Any] = {"card": card.name, "case": case}
    row |= {"function": FUNCTION.__name__, "kind": "as called", "launches": 1}
    row["results"] = [result]
    print("interpreted", *row.values(), flush=True)
    return row


if __name__ == "__main__":
    main()
