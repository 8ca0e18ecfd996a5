"""Seconds of collectives and messages, from the links that their ring crosses."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallel3d.plan.constants import Constants
from parallel3d.plan.work import Number, StepWork

_RING = 32  # ranks up to which steps are counted as a ring's; more are joined by a tree


def ring_rate(work: StepWork, c: Constants, ranks: Number, stride: Number) -> Any:
    """Bytes/s of a ring over `ranks` GPUs that are `stride` apart.

    Inside a node the link; else what the members of one node have of its network together, since
    the node's other rings run at the same time.
    """
    members = np.clip(np.floor(work.gpus_per_node / stride), 1, ranks)
    link = work.link_rate * c["link.rate"]
    fabric = work.fabric_rate * c.of("network", "rate", work.fabric) * members
    return np.where(members >= ranks, link, np.minimum(link, fabric))


def latency(work: StepWork, c: Constants, ranks: Number, stride: Number, steps: Number) -> Any:
    """Seconds that a collective of `steps` steps over the network takes beside its bytes."""
    members = np.clip(np.floor(work.gpus_per_node / stride), 1, ranks)
    network = c.of("network", "latency_us", work.fabric) * steps
    return 1e-6 * (c["link.latency_us"] + np.where(members >= ranks, 0, network))


def gather(work: StepWork, c: Constants, bytes: Number, ranks: Number, stride: Number) -> Any:
    """An all-gather or reduce-scatter of `bytes` in all; an all-reduce is two. 0 for one rank."""
    wire = (ranks - 1) / ranks * bytes / ring_rate(work, c, ranks, stride)
    steps = np.where(ranks > _RING, _RING - 1 + 6 * np.log2(ranks / _RING), ranks - 1)
    return np.where(ranks > 1, wire + latency(work, c, ranks, stride, steps), 0.0)


def reduce(work: StepWork, c: Constants, bytes: Number, ranks: Number, stride: Number) -> Any:
    """The sum of `bytes` of gradients over `ranks`, by tree or ring. 0 for one rank."""
    wire = 2 * (ranks - 1) / ranks * bytes / ring_rate(work, c, ranks, stride)
    steps = 2 * np.log2(np.maximum(ranks, 2))
    return np.where(ranks > 1, wire + latency(work, c, ranks, stride, steps), 0.0)


def hop(work: StepWork, c: Constants) -> Any:
    """One micro-batch's activations to the next stage, which lies tp × cp × dp ranks further on."""
    stride = work.tp * work.cp * work.dp
    bytes = 2 * work.micro_batch * work.seq / work.cp * work.hidden
    inside = stride * work.pp <= work.gpus_per_node
    cut = np.maximum(work.scatter_gather, work.sequence_parallel)
    share = np.where(cut > 0, work.tp, 1.0)
    # whole copies on each tensor rank share the node's network, as cut ones do
    rate = np.where(
        inside,
        work.link_rate * c["link.rate"],
        work.fabric_rate * c.of("network", "rate", work.fabric),
    )
    software = c.of("engine", "hop_us", work.engine)
    wire = np.where(inside, c["link.latency_us"], c.of("network", "begin_us", work.fabric))
    return np.where(work.pp > 1, bytes / share / rate + 1e-6 * (software + wire), 0.0)
