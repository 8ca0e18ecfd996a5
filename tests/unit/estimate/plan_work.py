"""Makes layouts for the planner's tests: Llama-like on H100s, with any fields changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

import numpy as np

from benchmarks.planner.published_fit import time_guesses
from benchmarks.planner.published_rows import (
    FABRICS,
    KINDS,
    even_pipeline,
    recomputed,
    split_evenly,
)
from benchmarks.planner.published_run import ROW_FIELDS as PUBLISHED
from benchmarks.planner.published_run import PublishedRun
from parallel3d.device.datasheets import DEVICES
from parallel3d.estimate.fitted_cost import NETWORKS, ROW_FIELDS, SPEEDS, Constants, StepWork
from parallel3d.estimate.rank_layers import RankLayers, table_of


def constants(**over: float) -> Constants:
    """Returns the guesses from which the fit starts, except for `over`."""
    return Constants({name: guess for name, (guess, _) in time_guesses().items()} | over)


def work(device: str = "h100", type: str = "bf16", fabric: str = "ndr", **over: float) -> StepWork:
    """Returns a `StepWork` of plain numbers."""
    card = DEVICES[device]
    made: dict[str, float] = dict(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, ffn=14336, gated=1,
        vocab=128256, tied=0, seq=4096, window=float("inf"), tp=1, pp=1, dp=8, cp=1, cp_style=0,
        chunks=1, micro_batch=1, microbatches=8, gpus_per_node=8, zero=0,
        **{key: value for key, value in recomputed().items() if key in ROW_FIELDS},
        sequence_parallel=0, overlap_tp=0, overlap_pp=0, overlap_dp=0, split=0, grad_bytes=4,
        peak=card.peak[type] * 1e12, peak_attention=card.peak["bf16"] * 1e12,
        memory_rate=card.memory_gb_s * 1e9,
        units=card.units, link_rate=card.link_gb_s * 1e9, fabric_rate=FABRICS[fabric] * 1e9,
        speed=SPEEDS.index(f"{device}/{type}"), fabric=NETWORKS.index(fabric),
    )  # fmt: skip
    made |= over
    layers = int(made["layers"])
    pipeline = even_pipeline(
        split_evenly(layers, int(made["pp"])), bool(made.get("sparse")), layers
    )
    ranks = RankLayers(*(of[..., 0] for of in table_of([pipeline])))
    columns = {name: np.array(float(value)) for name, value in made.items()}
    return StepWork(**columns, ranks=ranks, kinds=KINDS)


def published(**over: float) -> PublishedRun:
    """Returns the same as a `PublishedRun`, which has more fields."""
    own = {name: value for name, value in over.items() if name in ROW_FIELDS}
    return as_published(work(**own), **{key: over[key] for key in over if key not in own})


def as_published(w: StepWork, **over: float) -> PublishedRun:
    """Returns a work as a `PublishedRun`, with Megatron's software unless `over` says otherwise."""
    given = {f.name: getattr(w, f.name) for f in fields(w)}
    card = DEVICES["h100"]
    usual = {"flash": 1.0, "sliding": 1.0, "memory_bytes": card.memory_gib * 2**30} | over
    names = [name for name in PUBLISHED if name not in given]
    more = {name: np.full(np.shape(w.layers), usual.get(name, 0.0)) for name in names}
    return PublishedRun(**given, **more)


Work = TypeVar("Work", bound=StepWork)


def table(works: Sequence[Work]) -> Work:
    """Returns works of plain numbers as the rows of one."""
    names = [f.name for f in fields(works[0]) if f.name not in ("ranks", "kinds")]
    columns = {name: np.array([float(getattr(w, name)) for w in works]) for name in names}
    ranks = zip(*(w.ranks for w in works), strict=True)
    stacked = RankLayers(*(np.stack(of, axis=-1) for of in ranks))
    return type(works[0])(**columns, ranks=stacked, kinds=KINDS)
