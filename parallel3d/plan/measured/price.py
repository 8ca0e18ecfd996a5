"""Every layout of a model on a measured machine, priced one by one, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.plan.measured.machine import MeasuredMachine
from parallel3d.plan.measured.steps import Parts, step_parts
from parallel3d.plan.memory import PARALLEL3D, MemoryEstimate
from parallel3d.plan.own.memory import Held, peak_memory
from parallel3d.plan.search import LayoutChoice, Priced, layouts, simple_first
from parallel3d.plan.step import StepTime
from parallel3d.plan.work import Number, sizes_of_model
from parallel3d.schedules.schedule import LOOPED, ONE_CHUNK, V_SHAPED

SEARCHED = ("1f1b", "zb_h1", "interleaved", "interleaved_zb", "zbv", "v_half")
MOST = 4000  # layouts that are priced, the first ones
STEP = ("compute", "bubble", "messages", "gradients", "optimizer", "fixed")


def measured_layouts(
    sizes: Mapping[str, float], ranks: int, batch: int, fixed: Mapping[str, int | str]
) -> Iterator[LayoutChoice]:
    """`layouts` with every schedule that the clock can time; zero=2 and 3 where they are typed."""
    name = fixed.get("schedule")
    held = {key: value for key, value in fixed.items() if key != "schedule"}
    for choice in layouts(sizes, ranks, ranks, batch, held):
        if choice.zero > 1 and "zero" not in fixed:
            continue
        if fixed.get("vpp", choice.vpp) != choice.vpp:
            continue
        if choice.pp == 1:
            if name in (None, "1f1b", choice.schedule):
                yield choice
            continue
        if choice.schedule not in ("1f1b", "interleaved"):
            continue  # one of each number of chunks stands for all
        for schedule in SEARCHED if name is None else (str(name),):
            if _has_chunks(schedule, choice.vpp):
                yield replace(choice, schedule=schedule)


def _has_chunks(schedule: str, chunks: int) -> bool:
    if schedule in LOOPED:
        return chunks > 1
    return chunks == 1 if schedule in ONE_CHUNK else chunks == 2 and schedule in V_SHAPED


def configure(config: Config, choice: LayoutChoice) -> Config:
    """The configuration with a choice in it."""
    return replace(
        config,
        tp=choice.tp, pp=choice.pp, dp=choice.dp, vpp=choice.vpp, zero=choice.zero,
        micro_batch_size=choice.micro_batch, recompute=choice.recompute,
        schedule=replace(config.schedule, name=choice.schedule),
    )  # fmt: skip


def price_measured(
    choices: list[LayoutChoice],
    sizes: Mapping[str, float],
    config: Config,
    machine: MeasuredMachine,
) -> Priced:
    """Times and bytes of every choice that can run, and the order of those that fit.

    Recomputation costs time and nothing else, so it is looked at where less of it does not fit.
    Raises UserError where the run would refuse every one of them.
    """
    room = sizes["memory_bytes"] - machine.numbers["rank_gb"] * 1e9
    bytes: list[Held | None] = [None] * len(choices)
    parts: list[Parts | None] = [None] * len(choices)
    enough: set[LayoutChoice] = set()
    for i, choice in enumerate(choices):
        same = replace(choice, recompute="")
        if same in enough or len(enough) >= MOST:
            continue
        checked = _checked(configure(config, choice))
        bytes[i] = None if checked is None else fullest_stage(checked)
        if checked is not None and bytes[i].total <= room:
            parts[i] = step_parts(checked, machine)
            enough.add(same)
    if choices and not any(bytes):  # for a reason that has nothing to do with the layout
        first = configure(config, choices[0])
        check_config(first, first.tp * first.pp * (first.dp or 1), own_samples=True)
    fits = np.array([p is not None for p in parts])
    seconds = _column(parts, "total")
    time = StepTime(*(_column(parts, name) for name in STEP))
    held = _memory(bytes, machine.numbers["rank_gb"] * 1e9)
    order = sorted(np.flatnonzero(fits).tolist(), key=lambda i: seconds[i])
    tight = held.total > PARALLEL3D["memory.tight"] * sizes["memory_bytes"]
    return Priced(choices, time, seconds, held, fits, tight, simple_first(choices, seconds, order))


def _column(found: Sequence[object | None], name: str) -> Number:
    """One figure of all; infinite for those that were not looked at, or cannot be."""
    return np.array([np.inf if one is None else getattr(one, name) for one in found])


def fullest_stage(config: Config) -> Held:
    """What the fullest rank of a checked configuration holds."""
    return max((peak_memory(config, index) for index in range(config.pp)), key=lambda h: h.total)


def _memory(found: Sequence[Held | None], bare: float) -> MemoryEstimate:
    state = sum(_column(found, n) for n in ("parameters", "gradients", "masters", "optimizer"))
    total = _column(found, "total") + bare
    none = np.zeros(len(found))
    activations, logits = _column(found, "activations"), _column(found, "logits")
    return MemoryEstimate(total, state, activations, logits, none, total)


def _checked(config: Config) -> Config | None:
    """None for what the run would refuse."""
    try:
        world = config.tp * config.pp * (config.dp or 1)
        return check_config(config, world, own_samples=True)
    except UserError:
        return None


def measured_sizes(config: Config, machine: MeasuredMachine, ranks: int) -> dict[str, float]:
    """All fields of `plan.work.Work` that no layout changes; speeds are not looked at."""
    model, made = config.model, machine.made
    room = machine.numbers["memory_gb"] * 1e9
    whole = machine.numbers["peak_tflops"] * 1e12
    each = min(1.0, made.count / ranks) if machine.shares else 1.0
    return {
        **sizes_of_model(model),
        "gpus_per_node": ranks, "flash": 1, "dropout": float(model.dropout > 0), "overlap_dp": 1,
        "compiled": 1, "grad_bytes": 4,
        "peak": whole * each, "peak_attention": whole * each, "units": 1,
        "memory_bytes": room / ranks if machine.shares else room, "memory_rate": 1e9,
        "link_rate": 1e9, "fabric_rate": 1e9, "speed": 0, "fabric": 0,
    }  # fmt: skip
