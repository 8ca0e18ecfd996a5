"""The result of `benchmarks.gpu` as Markdown for docs/performance.md."""

from __future__ import annotations

from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """Tables of models and shards; rows that did not run stand below, each with its reason."""
    here, rows = result["machine"], result["rows"]
    peak = rows.get("gemm", {}).get("tflops")
    lines = [f"{here['device']}, torch {here['torch']}, Python {here['python']}."]
    if peak is not None:
        lines[0] += f" bf16 GEMM at {rows['gemm']['size']}³: {peak:.3g} TFLOP/s."
    models = {name: row for name, row in rows.items() if "tokens_per_s" in row}
    if models:
        lines += ["", "| model | micro-batch | step ms | tokens/s | MFU | peak memory GB |"]
        lines.append("|---|---|---|---|---|---|")
    for name, row in models.items():
        lines.append(
            f"| {name} | {row['micro_batch']} | {row['step_ms']:.1f} | {row['tokens_per_s']:,.0f} "
            f"| {_share(row, peak)} | {_gb(row['peak_memory_gb'])} |"
        )
    shards = {name: row for name, row in rows.items() if "layer_forward_ms" in row}
    if shards:
        lines += ["", "| shard of | layout | layers | forward ms a layer | backward ms a layer "
                  "| of the GEMM's speed | state GB | peak GB |"]  # fmt: skip
        lines.append("|---|---|---|---|---|---|---|---|")
    for name, row in shards.items():
        lines.append(
            f"| {name.removeprefix('shard ')} | {row['layout']} | {row['layers']} "
            f"| {row['layer_forward_ms']:.2f} | {row['layer_backward_ms']:.2f} "
            f"| {_share(row, peak)} | {_gb(row['state_gb'])} | {_gb(row['peak_memory_gb'])} |"
        )
    if "gain" in (fp8 := rows.get("fp8", {})):
        shape = " × ".join(map(str, fp8["shape"]))
        times = f"{fp8['bf16_ms']:.2f} and {fp8['fp8_ms']:.2f} ms, {fp8['gain']:.2f}×"
        lines += ["", f"bf16 against fp8, GEMM {shape}, casts included: {times}."]
    reasons = {name: row.get("skipped") or row.get("failed") for name, row in rows.items()}
    missing = [f"- {name}: {reason}" for name, reason in reasons.items() if reason]
    if missing:
        lines += ["", "Did not run:", "", *missing]
    return "\n".join(lines) + "\n"


def _share(row: dict[str, Any], peak: float | None) -> str:
    return "–" if peak is None else f"{100 * row['model_tflops'] / peak:.1f} %"


def _gb(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
