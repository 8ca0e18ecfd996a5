"""Parts of summary.json: throughput against the peak, the layout, and where things lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel3d.config.schema import Config
from parallel3d.metrics.peak import Peak
from parallel3d.metrics.records import Evaluation, best_evaluation
from parallel3d.metrics.report import bits_per_byte
from parallel3d.sizes.flops import FLOPS_FORMULA, MFU_FORMULA


def mfu(tokens_per_s: float, flops_per_token: float, peak: Peak, world_size: int) -> float:
    """The fraction of the devices' peak that a throughput makes use of."""
    return tokens_per_s * flops_per_token / (world_size * peak.flops)


def mfu_with_terms(
    tokens_per_s: float, flops_per_token: float, peak: Peak, world_size: int
) -> dict[str, Any]:
    """The MFU and everything that it was made of: a bare percentage says nothing."""
    share = mfu(tokens_per_s, flops_per_token, peak, world_size)
    return {
        "value": share if math.isfinite(share) else None,
        "formula": MFU_FORMULA,
        "flops_per_token": flops_per_token,
        "flops_per_token_formula": FLOPS_FORMULA,
        "peak_flops_per_device": peak.flops,
        "peak_source": peak.source,
        "world_size": world_size,
    }


def held_out(evaluations: Sequence[Evaluation], reads_bytes: bool) -> dict[str, float | None]:
    """The last held-out loss and the best one, in nats per token, and their steps."""
    last = evaluations[-1] if evaluations else None
    best, loss = best_evaluation(evaluations), last.loss if last else None
    return {
        "eval_loss": loss,
        "eval_step": last.step if last else None,
        "best_eval_loss": best.loss if best else None,
        "best_eval_step": best.step if best else None,
        "bits_per_byte": bits_per_byte(loss, reads_bytes),
    }


def layout_of(config: Config, world_size: int) -> dict[str, int]:
    """The sizes of the parallel dimensions, dp as it came out."""
    dp = world_size // (config.tp * config.pp * config.cp)
    sizes = {"tp": config.tp, "pp": config.pp, "dp": dp, "cp": config.cp}
    return sizes | {"world_size": world_size}


def paths_of(run_dir: Path, is_drawn: bool) -> dict[str, str]:
    """The run directory and the files in it that a reader will want."""
    files = ["metrics.jsonl", "config.yaml", "summary.json"]
    if is_drawn:
        files.append("breakdown.svg")
    if (run_dir / "timeline.svg").exists():  # schedule.timeline=true
        files.append("timeline.svg")
    if (run_dir / "profile").exists():  # profile.steps
        files.append("profile")
    paths = {name.split(".")[0]: str(run_dir / name) for name in files}
    return {"run_dir": str(run_dir)} | paths
