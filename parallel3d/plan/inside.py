"""What the busiest stage computes, by kind: the parts of `step`'s compute, for one layout."""

from __future__ import annotations

import numpy as np

from parallel3d.plan.constants import Constants
from parallel3d.plan.layer import (
    attention_and_rows,
    embedding,
    head,
    layer,
    products,
    recomputed_seconds,
    waits,
)
from parallel3d.plan.work import StepWork


def inside(work: StepWork, c: Constants, compute: float) -> dict[str, float]:
    """Seconds of a step by kind, which add up to `compute`; `work` has one row.

    What kernels and waits do not explain is the host's, or zero 3's gathers.
    """
    one, (forward, backward) = layer(work, c), products(work, c)
    attend, rows = attention_and_rows(work, c)
    single = work.pp == 1
    stages = np.stack([work.first, work.middle, np.where(single, work.first, work.last)])
    ends = np.stack([
        embedding(work, c) + np.where(single, head(work, c), 0.0),
        0.0 * work.first,
        np.where(single, 0.0, head(work, c)),
    ])  # fmt: skip
    busiest = int(np.argmax((stages * one.total + ends)[:, 0]))
    layers, count = stages[busiest, 0], float(work.microbatches[0])
    each = {
        "matrix products": forward + backward,
        "attention": attend[0] + attend[1],
        "between the products": 3 * rows,
        "made again": recomputed_seconds(work, c, one.forward),
        "sums over tp": waits(work, c),
    }
    found = {kind: float(count * layers * np.ravel(value)[0]) for kind, value in each.items()}
    found["head and embedding"] = float(count * ends[busiest, 0])
    rest = compute - sum(found.values())
    if rest < 0:  # the host waits for nobody: kernels are a little faster together
        found = {kind: value * compute / sum(found.values()) for kind, value in found.items()}
    return found | {"launches": max(rest, 0.0)}
