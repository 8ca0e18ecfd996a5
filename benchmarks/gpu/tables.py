"""Formats the results of the GPU benchmarks as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.results import Section, why_not

MODEL_COLUMNS = ("model", "micro-batch", "step ms", "tokens/s", "MFU", "of the GEMM", "peak GB")
ANSWER_COLUMNS = ("line", "answer", "found", "expected")
SIDE_COLUMNS = ("side by side", "micro-batch", "trainer", "step ms", "tokens/s", "ours is faster")
SHARD_COLUMNS = (
    *("shard of", "layout", "layers", "forward ms a layer", "backward ms a layer"),
    *("MFU", "of the GEMM", "state GB", "peak GB"),
)


def markdown(sections: list[Section]) -> str:
    """Returns each machine's tables under its name, in the order of measurement."""
    return "\n".join(_section(section) for section in sections)


def _section(section: Section) -> str:
    """Returns tables of models and shards; rows that did not run are listed below, each with its
    reason.

    There are two shares of the same speed: MFU is of the datasheet's dense bf16 peak, as in
    `parallel3d train`; "of the GEMM" is relative to the card's speed in a large product.
    """
    here, rows = section["machine"], section["rows"]
    sheet, peak = here.get("datasheet_tflops"), rows.get("gemm", {}).get("tflops")
    versions = ", ".join(f"{name} {here[name]}" for name in ("torch", "python") if name in here)
    lines = [f"## {here['device']}, {versions}, size {section['size']}", ""]
    said = []
    if sheet is not None:
        said.append(f"Datasheet, bf16: {sheet:.4g} TFLOP/s ({here['datasheet']}).")
    if peak is not None:
        share = "" if sheet is None else f", {100 * peak / sheet:.0f} % of it"
        said.append(f"GEMM at {rows['gemm']['size']}³: {peak:.3g} TFLOP/s{share}.")
    commits = list(dict.fromkeys(row["commit"] for row in rows.values() if row.get("commit")))
    if commits:
        said.append(f"Commit {', '.join(commits)}.")
    lines.append(" ".join(said))

    def shares(row: dict[str, Any]) -> tuple[str, str]:
        return _share(row["model_tflops"], sheet), _share(row["model_tflops"], peak)

    lines += _table(
        MODEL_COLUMNS,
        [
            (
                *(name, row["micro_batch"], f"{row['step_ms']:.1f}", f"{row['tokens_per_s']:,.0f}"),
                *(*shares(row), _gb(row["peak_memory_gb"])),
            )
            for name, row in rows.items()
            if {"micro_batch", "model_tflops"} <= row.keys()
        ],
    )
    lines += _table(
        SIDE_COLUMNS,
        [
            (
                *(name, row["micro_batch"], trainer, f"{step['step_ms']:.1f}"),
                *(f"{step['tokens_per_s']:,.0f}", f"{step['times_ours']:.2f}×"),
            )
            for name, row in rows.items()
            for trainer, step in row.get("trainers", {}).items()
        ],
    )
    lines += _table(
        SHARD_COLUMNS,
        [
            (
                *(name.removeprefix("shard "), row["layout"], row["layers"]),
                *(f"{row['layer_forward_ms']:.2f}", f"{row['layer_backward_ms']:.2f}"),
                *(*shares(row), _gb(row["state_gb"]), _gb(row["peak_memory_gb"])),
            )
            for name, row in rows.items()
            if "layer_forward_ms" in row
        ],
    )
    if "gain" in (fp8 := rows.get("fp8", {})):
        shape = " × ".join(map(str, fp8["shape"]))
        times = f"{fp8['bf16_ms']:.2f} and {fp8['fp8_ms']:.2f} ms, {fp8['gain']:.2f}×"
        lines += ["", f"bf16 against fp8, GEMM {shape}, casts included: {times}."]
    lines += _table(
        ANSWER_COLUMNS,
        [
            (name, row["verdict"], _cell(row["found"]), _cell(row.get("expected", "")))
            for name, row in rows.items()
            if "verdict" in row
        ],
    )
    missing = [f"- {name}: {why_not(row)}" for name, row in rows.items() if why_not(row)]
    missing += [
        f"- {name}, when repeated: {r['again']}" for name, r in rows.items() if "again" in r
    ]
    if missing:
        lines += ["", "Did not run:", "", *missing]
    return "\n".join(lines) + "\n"


def _table(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    """Returns an empty line and the lines of a table; no lines without rows."""
    if not rows:
        return []
    lines = [columns, ("---",) * len(columns), *rows]
    return ["", *(f"| {' | '.join(map(str, line))} |" for line in lines)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _share(tflops: float, peak: float | None) -> str:
    return "–" if peak is None else f"{100 * tflops / peak:.1f} %"


def _gb(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
