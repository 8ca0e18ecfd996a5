"""Makes layouts for the planner's tests: Llama-like on H100s, with any fields changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.planner.published_fit import time_guesses
from benchmarks.planner.published_rows import FABRICS, recomputed, split_evenly
from parallel3d.device.datasheets import DEVICES
from parallel3d.estimate.fitted_cost import (
    ENGINES,
    NETWORKS,
    ROW_FIELDS,
    SPEEDS,
    Constants,
    StepWork,
)
from parallel3d.estimate.rank_layers import RankLayers, even_ranks


def constants(**over: float) -> Constants:
    """Returns the guesses from which the fit starts, except for `over`."""
    return Constants({name: guess for name, (guess, _) in time_guesses().items()} | over)


def work(device: str = "h100", type: str = "bf16", fabric: str = "ndr", **over: float) -> StepWork:
    """Returns a `Work` of plain numbers."""
    card = DEVICES[device]
    made: dict[str, float] = dict(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, ffn=14336, gated=1,
        vocab=128256, tied=0, seq=4096, window=float("inf"), tp=1, pp=1, dp=8, cp=1, cp_style=0,
        chunks=1, micro_batch=1, microbatches=8, gpus_per_node=8, zero=0, **recomputed(),
        sequence_parallel=0, flash=1, dropout=0, parallel_block=0,
        overlap_tp=0, overlap_pp=0, overlap_dp=0, scatter_gather=0, graph=0, compiled=0, fp8=0,
        split=0, grad_bytes=4,
        peak=card.peak[type] * 1e12, peak_attention=card.peak["bf16"] * 1e12,
        memory_bytes=card.memory_gib * 2**30, memory_rate=card.memory_gb_s * 1e9,
        units=card.units, link_rate=card.link_gb_s * 1e9, fabric_rate=FABRICS[fabric] * 1e9,
        speed=SPEEDS.index(f"{device}/{type}"), fabric=NETWORKS.index(fabric),
        engine=ENGINES.index("megatron"),
    )  # fmt: skip
    made |= over
    counts = split_evenly(int(made["layers"]), int(made["pp"]))
    held = even_ranks(counts, made.get("sparse", 0.0), made.get("sliding", 1.0))
    columns = {name: np.array(float(value)) for name, value in made.items()}
    return StepWork(**columns, ranks=RankLayers(*np.array(held, dtype=float).T))


def table(works: Sequence[StepWork]) -> StepWork:
    """Returns works of plain numbers as the rows of one `Work`."""
    columns = {name: np.array([float(getattr(w, name)) for w in works]) for name in ROW_FIELDS}
    ranks = zip(*(w.ranks for w in works), strict=True)
    return StepWork(**columns, ranks=RankLayers(*(np.stack(of, axis=-1) for of in ranks)))
