"""Search over all layouts of a model on a cluster: prices, ranks and explains them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product

import numpy as np

from parallel3d.config.sections import PARTS, parts_of
from parallel3d.estimate.memory import PARALLEL3D, MemoryEstimate, memory
from parallel3d.estimate.rates import ENGINES, Constants
from parallel3d.estimate.step import StepTime, step
from parallel3d.estimate.work import Number, StepWork, share_left, split_balanced
from parallel3d.schedules.schedule import V_SHAPED

FULL, NONE = "full", "none"
# By cost: recomputing attention costs more seconds a byte than norms and activation.
RECOMPUTE = (NONE, "[norm,activation]", FULL)
WHOLE = ("gpipe", "1f1b", "interleaved")  # schedules of whole backwards
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 3, 4, 5, 6, 8)
# Largest pipelines in the search. Time grows with the square of the ranks; choosing a pattern of
# V-Half takes 2 s for 64 ranks.
MOST_STAGES, MOST_V_HALF = 512, 64
TIGHT = 1.05  # a nearly full GPU must win by more: measured ones stall, or fail
SAME = 1.005  # layouts within this ratio count as equally fast: the simpler one goes first


@dataclass(frozen=True)
class LayoutChoice:
    """One layout, as command-line arguments."""

    tp: int
    pp: int
    vpp: int
    dp: int
    micro_batch: int
    schedule: str
    recompute: str  # as `config.recompute.spelled`
    zero: int


@dataclass(frozen=True)
class Priced:
    """All layouts with times and bytes; `order`: indices of those that fit, the best first."""

    choices: list[LayoutChoice]
    time: StepTime
    seconds: Number
    memory: MemoryEstimate
    fits: Number
    tight: Number
    order: list[int]


def layouts(
    sizes: Mapping[str, float], gpus: int, node: int, batch: int, fixed: Mapping[str, int | str]
) -> Iterator[LayoutChoice]:
    """Yields the layouts of `gpus` GPUs that fit the sizes and the batch; `fixed` by the user.

    Tensor parallelism stays inside an NVLink domain of `node` GPUs unless `tp` is fixed.
    """
    for tp in _allowed(fixed, "tp", [t for t in divisors(gpus) if t <= node]):
        if sizes["heads"] % tp or sizes["ffn"] % tp or gpus % tp:
            continue
        for pp in _allowed(fixed, "pp", divisors(gpus // tp)):
            if gpus % (tp * pp) or pp > sizes["layers"] or (pp > MOST_STAGES and "pp" not in fixed):
                continue
            dp = gpus // (tp * pp)
            if fixed.get("dp", dp) != dp or batch % dp:
                continue
            yield from _filled(sizes, tp, pp, dp, batch // dp, fixed)


def _filled(
    sizes: Mapping[str, float], tp: int, pp: int, dp: int, mine: int, fixed: Mapping[str, int | str]
) -> Iterator[LayoutChoice]:
    """Yields micro-batch, schedule, recomputation and ZeRO stage of one tp, pp, dp."""
    chunks = [v for v in _allowed(fixed, "vpp", CHUNKS) if sizes["layers"] % (pp * v) == 0]
    chunks = chunks if pp > 1 else [1]
    micro = [b for b in _allowed(fixed, "micro_batch", MICRO_BATCHES) if mine % b == 0]
    kinds = [str(fixed["recompute"])] if "recompute" in fixed else RECOMPUTE
    stages = [z for z in _allowed(fixed, "zero", (0, 1, 2, 3)) if dp > 1 or z == 0]
    for v, b, kind, zero in product(chunks or [1], micro, kinds, stages or [0]):
        if v > 1 and mine // b < pp:
            continue
        for schedule in schedules(pp, v, zero):
            too_deep = schedule == "v_half" and pp > MOST_V_HALF
            if fixed.get("schedule", schedule) == schedule and not too_deep:
                yield LayoutChoice(tp, pp, v, dp, b, schedule, kind, zero)


def schedules(pp: int, vpp: int, zero: int) -> tuple[str, ...]:
    """Returns the schedules for these stages and chunks; FSDP2 needs whole backwards."""
    if pp == 1:
        return ("1f1b",)
    if zero >= 2:
        return ("1f1b",) if vpp == 1 else ()
    if vpp == 1:
        return ("1f1b", "zb_h1")
    return ("interleaved", "interleaved_zb", *(V_SHAPED if vpp == 2 else ()))


def divisors(n: int) -> list[int]:
    """Returns all divisors, the smallest first."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _allowed(fixed: Mapping[str, int | str], key: str, all: Iterable[int]) -> list[int]:
    return [int(fixed[key])] if key in fixed else list(all)


def works(choices: list[LayoutChoice], sizes: Mapping[str, float], batch: int) -> StepWork:
    """Returns the choices as one `StepWork`; `sizes`: the fields that no choice changes."""
    n = len(choices)
    column = {f.name: np.full(n, float(sizes.get(f.name, 0.0))) for f in fields(StepWork)}
    for name in ("tp", "pp", "dp", "micro_batch", "zero"):
        column[name] = np.array([float(getattr(c, name)) for c in choices])
    column["chunks"] = np.array([float(c.vpp) for c in choices])
    column["microbatches"] = batch / (column["dp"] * column["micro_batch"])
    counts = column["microbatches"].astype(int).tolist()
    left = [share_left(c.schedule, c.pp, n) for c, n in zip(choices, counts, strict=True)]
    column["split"] = np.array(left)
    parts = [parts_of(c.recompute) for c in choices]
    for part in PARTS:
        name = "full_recompute" if part == "layer" else f"recompute_{part}"
        column[name] = np.array([float(part in of) for of in parts])
    column["sequence_parallel"] = (column["tp"] > 1).astype(float)
    column["engine"] = np.full(n, float(ENGINES.index("megatron")))
    width = (2 + 2 * sizes["kv_heads"] / sizes["heads"]) * sizes["heads"] * sizes["head_size"]
    matrices = (2 + sizes["gated"]) * sizes["ffn"] + width
    head = sizes["vocab"] / matrices
    split = {pp: split_balanced(int(sizes["layers"]), head, pp) for pp in {c.pp for c in choices}}
    splits = [split[c.pp] for c in choices]
    for name in ("first", "middle", "last", "live_stage", "live_layers"):
        column[name] = np.array([float(getattr(one, name)) for one in splits])
    return StepWork(**column)


def price(
    choices: list[LayoutChoice],
    sizes: Mapping[str, float],
    batch: int,
    c: Constants,
    held: MemoryEstimate | None = None,
) -> Priced:
    """Returns times and bytes of every choice, and the order of those that fit.

    `held`: peak memory by `analytic_memory.memories`; None: by the fitted formulas.
    """
    work = works(choices, sizes, batch)
    time, held = step(work, c), memory(work, PARALLEL3D) if held is None else held
    seconds = np.asarray(time.total)
    share = held.total / work.memory_bytes
    fits, tight = share <= PARALLEL3D["memory.full"], share > PARALLEL3D["memory.tight"]
    risked = seconds * np.where(tight, TIGHT, 1.0)
    order = sorted(np.flatnonzero(fits).tolist(), key=lambda i: risked[i])
    order = simple_first(choices, risked, order)
    return Priced(choices, time, seconds, held, fits, tight, order)


def simple_first(choices: list[LayoutChoice], seconds: Number, order: list[int]) -> list[int]:
    """Sorts each run of nearly equal times by simplicity."""
    made: list[int] = []
    while order:
        most = seconds[order[0]] * SAME
        same = [i for i in order if seconds[i] <= most]
        made += sorted(same, key=lambda i: (complexity(choices[i]), seconds[i]))
        order = order[len(same) :]
    return made


def complexity(choice: LayoutChoice) -> float:
    """Returns a score of the dimensions and switches that a layout has to set up."""
    found = (choice.tp > 1) + 2 * (choice.pp > 1) + (choice.vpp > 1) + (choice.zero > 0)
    found += (choice.recompute != NONE) + (choice.schedule not in WHOLE) + (choice.zero > 1)
    return found + np.log2(choice.tp * choice.pp) / 16


def best(priced: Priced, rows: int) -> list[int]:
    """Returns the best layout of each (tp, pp), at most `rows`: its variants are one answer."""
    seen: set[tuple[int, int]] = set()
    made = []
    for i in priced.order:
        key = priced.choices[i].tp, priced.choices[i].pp
        if key not in seen:
            seen.add(key)
            made.append(i)
    return made[:rows]


STEP_PARTS = ("compute", "bubble", "messages", "gradients", "optimizer")


def reason(priced: Priced, index: int, first: int, node: int) -> str:
    """Explains what the layout gains or loses against the best one, `first`."""
    choice, tight = priced.choices[index], "; memory is tight" * bool(priced.tight[index])
    total, least = float(priced.seconds[index]), float(priced.seconds[first])
    mine, best = (
        {part: float(getattr(priced.time, part)[i]) for part in STEP_PARTS} for i in (index, first)
    )
    if index == first:
        rest = max(STEP_PARTS[1:], key=lambda part: mine[part])
        words = f"{100 * mine['compute'] / total:.0f} % of the step computes"
        if mine[rest] > 0.005 * total:
            share = f"{100 * mine[rest] / total:.0f} %"
            words += f"; most of the rest is {_named(rest, choice)} ({share})"
        return words + tight
    worst = max(STEP_PARTS, key=lambda part: mine[part] - best[part])
    more = mine[worst] - best[worst]
    if total - least <= 0.005 * total or more <= 0:
        return "as fast, with more to set up" + tight
    compute = worst == "compute"
    why = _compute(choice, priced.choices[first], node) if compute else _named(worst, choice)
    return f"+{100 * more / least:.0f} % {why}{tight}"


def _named(part: str, choice: LayoutChoice) -> str:
    """Describes the part with the size that causes it."""
    return {
        "bubble": f"bubble of {choice.pp} stages",
        "messages": f"messages between {choice.pp * choice.vpp} pieces of the model",
        "gradients": f"sums of gradients over dp={choice.dp}",
        "optimizer": "the optimizer's pass over its state",
    }[part]


def _compute(choice: LayoutChoice, best: LayoutChoice, node: int) -> str:
    """Explains why computing takes longer than in the best layout."""
    if choice.recompute == FULL != best.recompute:
        return "forwards run again, as it does not fit without recompute=full"
    if choice.zero >= 3 > best.zero:
        return "waiting for parameters that zero=3 gathers"
    if choice.tp > node:
        return f"tensor-parallel waits: tp={choice.tp} leaves the NVLink domain"
    if choice.tp > best.tp:
        return f"tensor-parallel waits and narrower products at tp={choice.tp}"
    return "compute: a fuller slowest stage, or smaller products"
