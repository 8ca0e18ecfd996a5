"""Memory of every layout of a search, by what parallel3d's own code holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from parallel3d.config.schema import Config
from parallel3d.plan.memory import MemoryEstimate
from parallel3d.plan.own.memory import Held, held_at_least, layers_by_stage, peak_memory
from parallel3d.plan.search import LayoutChoice
from parallel3d.sizes.stages import placement_of

STATE = ("parameters", "gradients", "masters", "optimizer")


def configure(config: Config, choice: LayoutChoice) -> Config:
    """The configuration with a choice in it, and sequence parallelism where there is tp."""
    return replace(
        config,
        tp=choice.tp, pp=choice.pp, dp=choice.dp, vpp=choice.vpp, zero=choice.zero,
        sp=choice.tp > 1, micro_batch_size=choice.micro_batch, recompute=choice.recompute,
        schedule=replace(config.schedule, name=choice.schedule),
    )  # fmt: skip


def fullest_stage(config: Config) -> tuple[int, Held]:
    """(index along pp, what it holds) of the rank that holds most.

    Ranks between the ends differ by layers and by micro-batches under way, of which earlier ones
    have more: looked at are the ends, the middle, and the first ones of most layers.
    """
    split, placement = layers_by_stage(config), placement_of(config)
    counts = [0] * config.pp
    for stage, layers in enumerate(split):
        counts[placement.place(stage)[0]] += layers
    most = counts.index(max(counts))
    seen = {0, min(1, config.pp - 1), config.pp // 2, config.pp - 1, most}
    found = ((index, peak_memory(config, index)) for index in sorted(seen))
    return max(found, key=lambda pair: pair[1].total)


def memories(
    config: Config,
    choices: Sequence[LayoutChoice],
    reserve: float,
    tell: Callable[[str], None] | None = None,
) -> MemoryEstimate:
    """Bytes of each choice's fullest GPU, with `reserve` bytes that no tensor gets; `tell` is
    called with how far they are."""
    rows = []
    for done, choice in enumerate(choices):
        if tell is not None:
            tell(f"layout {done} of {len(choices)}")
        rows.append(fullest_stage(configure(config, choice)))
    index = np.array([i for i, _ in rows])
    total = np.array([h.total for _, h in rows]) + reserve
    state = np.array([sum(getattr(h, name) for name in STATE) for _, h in rows])
    activations = np.array([h.activations + h.buffers for _, h in rows])
    logits = np.array([h.logits for _, h in rows])
    last = np.array([choice.pp - 1 for choice in choices])
    stage = np.where(index == 0, 0, np.where(index == last, 2, 1))
    return MemoryEstimate(total, state, activations, logits, stage, total)


def least_memory(
    config: Config,
    choices: Sequence[LayoutChoice],
    reserve: float,
    enough: float,
    tell: Callable[[str], None] | None = None,
) -> float:
    """The least of `memories`' totals, or one that is `enough`, without looking at all choices.

    Those that cannot hold little come last, and not at all where another holds less than they must.
    """
    configs = [configure(config, choice) for choice in choices]
    bounds = [held_at_least(one) * (1 - 1e-9) + reserve for one in configs]  # sums are rounded
    found = math.inf
    for done, i in enumerate(sorted(range(len(configs)), key=bounds.__getitem__)):
        if found <= enough or found <= bounds[i]:
            break
        if tell is not None:
            tell(f"layout {done} of {len(configs)}")
        found = min(found, fullest_stage(configs[i])[1].total + reserve)
    return found
