"""Parses and tabulates results for `benchmarks.compiled.kernels`, without torch or Triton."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]

_RESOURCES = re.compile(r"Function (\S+):\s*((?:[A-Z]+(?:\[\d+\])?:\d+\s*)+)")


def resources(text: str) -> dict[str, int]:
    """Parses the registers of a thread and the bytes that it spills, from `cuobjdump
    --dump-resource-usage`.

    Values that do not fit into registers are in the thread's stack frame or its other local memory.
    """
    found = _RESOURCES.findall(text)
    if len(found) != 1:
        raise ValueError(f"these are not the resources of one function: {text!r}")
    values = {k: int(v) for k, v in (pair.split(":") for pair in found[0][1].split())}
    return {"registers": values["REG"], "spilled": values["STACK"] + values["LOCAL"]}


def faults(
    compiled: Sequence[Row], interpreted: Sequence[Row], uncalled: Sequence[str]
) -> list[str]:
    """Returns the reasons for a failure: errors, spills, wrong values and functions without a
    call."""
    found = [f"no training step calls {name}" for name in uncalled]
    for row in [*compiled, *interpreted]:
        if "error" in row:
            found.append(f"{row['card']}: {row['case']}: {row['function']}: {row['error']}")
    for row in compiled:
        for kernel, candidate in _candidates(row):
            if candidate["spilled"]:
                found.append(
                    f"{row['card']}: {row['case']}: {row['function']}: {kernel['kernel']} spills "
                    f"{candidate['spilled']} bytes with {candidate['blocks']}"
                )
    for row in interpreted:
        for number, result in enumerate(row["results"]):
            if not result["is_right"]:
                found.append(
                    f"{row['case']}: {row['function']} {row['kind']}: result {number} differs by "
                    f"{result['error']:.1e} of its scale"
                )
    return found


def compiled_table(rows: Sequence[Row]) -> str:
    """Returns a line for each function and case, with the columns of every card side by side."""
    cards = list(dict.fromkeys(row["card"] for row in rows))
    head = ["function", "of", "kernels", "bytes"]
    for card in cards:
        head += [f"{card}: registers", "spilled", "shared"]
    lines = [f"| {' | '.join(head)} |", "|---" * 2 + "|--:" * (len(head) - 2) + "|"]
    by_line: dict[tuple, dict[str, Row]] = {}
    calls: Counter[tuple] = Counter()
    for row in rows:
        place = (row["function"], row["case"], row["elements"])
        calls[row["card"], place] += 1  # a function may be called with two shapes of one size
        by_line.setdefault((*place, calls[row["card"], place]), {})[row["card"]] = row
    for (function, case, elements, _), of_cards in by_line.items():
        each = [of_cards.get(card) for card in cards]
        launches = "/".join(dict.fromkeys(str(_launches(row)) for row in each if row))
        moved = "/".join(dict.fromkeys(f"{_bytes(row) / elements:.1f}" for row in each if row))
        cells = [f"`{function}`", case, launches, moved]
        for of_card in each:
            cells += _figures(of_card)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def interpreted_table(rows: Sequence[Row]) -> str:
    """Returns a line for each function: the largest errors over its cases and results."""
    names = list(dict.fromkeys(row["function"] for row in rows))
    lines = ["| function | calls | results in bf16 | in fp32 | integers |", "|---|--:|--:|--:|---|"]
    for name in names:
        own = [row for row in rows if row["function"] == name]
        results = [result for row in own for result in row["results"]]
        cells = [f"`{name}`", str(len(own))]
        for kind in ("torch.bfloat16", "torch.float32"):
            errors = [r["error"] for r in results if r["type"] == kind]
            cells.append(f"{max(errors):.1e}" if errors else "–")
        whole = [r["is_right"] for r in results if "float" not in r["type"]]
        cells.append("–" if not whole else "equal" if all(whole) else "differ")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _candidates(row: Row) -> Iterator[tuple[Row, Row]]:
    for kernel in row["kernels"]:
        for candidate in kernel["candidates"]:
            yield kernel, candidate


def _launches(row: Row) -> int:
    return sum(kernel["launches"] for kernel in row["kernels"])


def _bytes(row: Row) -> int:
    return sum(kernel["launches"] * kernel["bytes"] for kernel in row["kernels"])


def _figures(row: Row | None) -> list[str]:
    """Returns the maximum of registers, of spilled bytes and of shared memory over kernels and
    configurations."""
    candidates = [] if row is None else [candidate for _, candidate in _candidates(row)]
    if not candidates:
        return ["–"] * 3
    return [f"{max(c[key] for c in candidates):,}" for key in ("registers", "spilled", "shared")]
