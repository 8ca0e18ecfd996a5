"""Compiles and tests the hand-written kernel of experts' gradients for
`benchmarks.compiled.kernels`.

python -m benchmarks.compiled.grouped compile H100 results.json
TRITON_INTERPRET=1 python -m benchmarks.compiled.grouped interpret H100 results.json

The kernel is compiled like a launch for the gradients of each preset with experts, at ep=1 and
ep=8. It is interpreted for the same number of experts with narrower matrices and few rows, and
compared with float64.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from benchmarks.compiled.calls import configured
from benchmarks.compiled.card import CARDS, Card, interpreting
from benchmarks.compiled.table import resources
from benchmarks.compiled.worker import TOLERANCES, dump
from parallel3d.device import grouped_kernels

PRESETS = (
    *("olmoe_1b_7b", "qwen3_30b_a3b", "qwen3_235b_a22b", "mixtral_8x7b"),
    *("dots1", "glm_4_5_air"),
)
RANKS = (1, 8)  # ep
TOKENS = 4096  # tokens of a rank
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


def gradients() -> list[tuple[str, int, tuple[int, int], int]]:
    """Returns tuples (case, experts of a rank, rows and columns of a matrix, chosen rows of the
    rank)."""
    found = []
    for name in PRESETS:
        model = configured(f"model={name}").model
        for ep in RANKS:
            for rows, columns in (
                (2 * model.expert_size, model.hidden_size),
                (model.hidden_size, model.expert_size),
            ):
                case = f"{name}, ep={ep}, {rows} × {columns}"
                chosen = TOKENS * model.experts_per_token
                found.append((case, model.num_experts // ep, (rows, columns), chosen))
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
    """Compares gradients of the same number of experts with float64: some experts have no row, one
    has most rows, and memory past the last row is NaN."""
    rows = []
    for groups in sorted({groups for _, groups, _, _ in gradients()}):
        draws = np.random.default_rng(groups)
        sizes = draws.integers(0, 5, groups) * draws.integers(0, 2, groups)
        sizes[groups // 2] = 150
        total = int(sizes.sum())
        a, b = (
            torch.from_numpy(draws.standard_normal((total + 3, width))).bfloat16()
            for width in NARROW
        )
        a[total:], b[total:] = torch.nan, torch.nan
        out = torch.from_numpy(draws.standard_normal((groups, *NARROW))).float()
        wanted, first = out.double(), 0
        for matrix, size in zip(wanted, sizes.tolist(), strict=True):
            part = slice(first, first + size)
            matrix += a[part].double().t() @ b[part].double()
            first += size
        with interpreting():
            ends = torch.from_numpy(sizes.cumsum()).int()
            grouped_kernels.add_products(out, a, b, ends)
        error = float((out.double() - wanted).abs().max() / wanted.abs().max())
        kind = str(out.dtype)
        result = {"type": kind, "elements": out.numel(), "error": error}
        result["is_right"] = error <= TOLERANCES[kind]
        row: dict[str, Any] = {"card": card.name, "case": f"{groups} experts"}
        row |= {"function": FUNCTION.__name__, "kind": "as called", "launches": 1}
        rows.append(row | {"results": [result]})
        print("interpreted", *row.values(), error, flush=True)
    return rows


if __name__ == "__main__":
    main()
