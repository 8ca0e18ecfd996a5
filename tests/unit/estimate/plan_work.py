"""Makes layouts for the planner's tests: Llama-like on H100s, with any fields changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.planner.published_fit import time_guesses
from benchmarks.planner.published_rows import (
    FABRICS,
    KINDS,
    even_pipeline,
    split_evenly,
)
from benchmarks.planner.published_run import ROW_FIELDS, PublishedRun
from parallel3d.device.datasheets import DEVICES
from parallel3d.estimate.fitted_cost import NETWORKS, SPEEDS, Constants
from parallel3d.estimate.rank_layers import RankLayers, table_of


def constants(**over: float) -> Constants:
    """Returns the guesses from which the fit starts, except for `over`."""
    return Constants({name: guess for name, (guess, _) in time_guesses().items()} | over)


def work(
    device: str = "h100", type: str = "bf16", fabric: str = "ndr", **over: float
) -> PublishedRun:
    """Returns a run of plain numbers, with Megatron's software unless `over` says otherwise."""
    card = DEVICES[device]
    made: dict[str, float] = dict.fromkeys(ROW_FIELDS, 0.0)
    made |= dict(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, ffn=14336, gated=1,
        vocab=128256, seq=4096, window=float("inf"), sliding=1, tp=1, pp=1, dp=8, cp=1, chunks=1,
        micro_batch=1, microbatches=8, gpus_per_node=8, item=2, grad_bytes=4, flash=1,
        backward=1, trained=1, embedding_trained=1, head_trained=1, head_reached=1, attends=1,
        experts=1, active_experts=1, ep=1, load=1,
        peak=card.peak[type] * 1e12, peak_attention=card.peak["bf16"] * 1e12,
        memory_rate=card.memory_gb_s * 1e9, memory_bytes=card.memory_gib * 2**30,
        units=card.units, link_rate=card.link_gb_s * 1e9, fabric_rate=FABRICS[fabric] * 1e9,
        speed=SPEEDS.index(f"{device}/{type}"), fabric=NETWORKS.index(fabric),
    )  # fmt: skip
    made |= over
    layers = int(made["layers"])
    pipeline = even_pipeline(split_evenly(layers, int(made["pp"])), bool(made["sparse"]), layers)
    ranks = RankLayers(*(of[..., 0] for of in table_of([pipeline])))
    columns = {name: np.array(float(value)) for name, value in made.items()}
    return PublishedRun(**columns, ranks=ranks, kinds=KINDS)


def table(works: Sequence[PublishedRun]) -> PublishedRun:
    """Returns runs of plain numbers as the rows of one."""
    columns = {name: np.array([float(getattr(w, name)) for w in works]) for name in ROW_FIELDS}
    ranks = zip(*(w.ranks for w in works), strict=True)
    stacked = RankLayers(*(np.stack(of, axis=-1) for of in ranks))
    return PublishedRun(**columns, ranks=stacked, kinds=KINDS)
