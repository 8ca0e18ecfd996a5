"""Search over all layouts of a model on a cluster: prices, ranks and explains them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from parallel3d.config.schema import Config
from parallel3d.config.sections import PARTS, parts_of, spelled
from parallel3d.estimate.balance import balance_chunks
from parallel3d.estimate.fitted_cost import (
    ENGINES,
    Constants,
    Number,
    StepTime,
    StepWork,
    share_left,
    step,
)
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import LOOPED, ONE_CHUNK, V_SHAPED

GIB = 2.0**30
Fixed: TypeAlias = Mapping[str, Any]  # what the user typed, by names of `LayoutChoice`
FULL, NONE = "full", "none"
# By cost: recomputing attention costs more seconds a byte than norms and activation.
RECOMPUTE = (NONE, "[norm,activation]", FULL)
WHOLE = ("gpipe", "1f1b", "interleaved")  # schedules of whole backwards
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 3, 4, 5, 6, 8)
# Largest pipelines in the search. Time grows with the square of the ranks; choosing a pattern of
# V-Half takes 2 s for 64 ranks.
MOST_STAGES, MOST_V_HALF = 512, 64
# A GPU fuller than this must win by more: measured ones stall, or fail.
NEARLY_FULL, TIGHT = 0.92, 1.05
SAME = 1.005  # layouts within this ratio count as equally fast: the simpler one goes first


@dataclass(frozen=True)
class LayoutChoice:
    """One layout, as command-line arguments."""

    tp: int
    pp: int
    vpp: int
    dp: int
    micro_batch_size: int
    schedule: str
    recompute: str  # as `config.recompute.spelled`
    zero: int


@dataclass(frozen=True)
class Priced:
    """All layouts with seconds, and bytes of the fullest GPU; `tight`: it is nearly full; `order`:
    indices of those that fit, the best first."""

    choices: list[LayoutChoice]
    time: StepTime
    memory: Number
    tight: Number
    order: list[int]

    @cached_property
    def seconds(self) -> Number:
        return np.asarray(self.time.total)


def configure(config: Config, choice: LayoutChoice) -> Config:
    """Returns the configuration with a choice in it; with sequence parallelism where there is tp,
    but on a measured machine as it is."""
    sp = choice.tp > 1 if config.cluster.file is None else config.sp
    schedule = replace(config.schedule, name=choice.schedule)
    return replace(config, **(vars(choice) | {"sp": sp, "schedule": schedule}))


def layouts(
    sizes: Mapping[str, float],
    gpus: int,
    node: int,
    batch: int,
    fixed: Fixed,
    zeros: Sequence[int] = (0, 1, 2, 3),
) -> Iterator[LayoutChoice]:
    """Yields the layouts of `gpus` GPUs that fit the sizes and the batch; `fixed` by the user.

    Tensor parallelism stays inside an NVLink domain of `node` GPUs unless `tp` is fixed; `zeros`:
    stages of ZeRO unless `zero` is.
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
            mine, layers = batch // dp, sizes["layers"]
            micro = [b for b in _allowed(fixed, "micro_batch_size", MICRO_BATCHES) if mine % b == 0]
            even = [v for v in CHUNKS if v == 1 or (pp > 1 and layers % (pp * v) == 0)]
            chunks = [v for v in _allowed(fixed, "vpp", even) if v == 1 or 1 < pp <= layers // v]
            kinds = [spelled(fixed["recompute"])] if "recompute" in fixed else RECOMPUTE
            stages = [z for z in _allowed(fixed, "zero", zeros) if dp > 1 or z == 0]
            for v, b, kind, zero in product(chunks, micro, kinds, stages or [0]):
                if v == 1 or mine // b >= pp:
                    for schedule in schedules(pp, v, zero, fixed.get("schedule")):
                        yield LayoutChoice(tp, pp, v, dp, b, schedule, kind, zero)


def schedules(pp: int, vpp: int, zero: int, typed: str | None = None) -> list[str]:
    """Returns the schedules for these stages and chunks, or of them the typed one; FSDP2 needs
    whole backwards. GPipe is only an answer if it is typed: 1F1B needs less memory."""
    if pp == 1:
        found = ["1f1b"]
    elif vpp == 1:
        found = [name for name in ONE_CHUNK if zero < 2 or name in WHOLE]
    else:
        found = [] if zero >= 2 else [*LOOPED, *(V_SHAPED if vpp == 2 else ())]
    if pp > MOST_V_HALF and "v_half" in found:
        found.remove("v_half")
    return [name for name in found if typed == name or (typed is None and name != "gpipe")]


def divisors(n: int) -> list[int]:
    """Returns all divisors, the smallest first."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _allowed(fixed: Fixed, key: str, all: Iterable[int]) -> list[int]:
    return [int(fixed[key])] if key in fixed else list(all)


_COLUMNS = {"tp": "tp", "pp": "pp", "dp": "dp", "zero": "zero", "chunks": "vpp",
            "micro_batch": "micro_batch_size"}  # fmt: skip


def works(choices: list[LayoutChoice], sizes: Mapping[str, float], batch: int) -> StepWork:
    """Returns the choices as one `StepWork`; `sizes`: the fields that no choice changes."""
    n = len(choices)
    column = {f.name: np.full(n, float(sizes.get(f.name, 0.0))) for f in fields(StepWork)}
    for name, of in _COLUMNS.items():
        column[name] = np.array([float(getattr(c, of)) for c in choices])
    column["microbatches"] = batch / (column["dp"] * column["micro_batch"])
    counts = column["microbatches"].astype(int).tolist()
    left = [share_left(c.schedule, c.pp, n) for c, n in zip(choices, counts, strict=True)]
    column["split"] = np.array(left)
    parts = [parts_of(c.recompute) for c in choices]
    for part in PARTS:
        column[f"recompute_{part}"] = np.array([float(part in of) for of in parts])
    column["sequence_parallel"] = (column["tp"] > 1).astype(float)
    column["engine"] = np.full(n, float(ENGINES.index("megatron")))
    work = StepWork(**column)
    head = float((work.vocab * work.hidden / (work.tp * work.parameters))[0])  # in layers
    split = {pp: _split(int(sizes["layers"]), head, pp) for pp in {c.pp for c in choices}}
    first, middle, last = np.array([split[c.pp] for c in choices], dtype=float).T
    return replace(work, first=first, middle=middle, last=last)


def _split(layers: int, head: float, pp: int) -> tuple[int, int, int]:
    """Returns the layers of the first stage, the fullest between and the last."""
    counts = balance_chunks(1.0, layers, StageAssignment(pp), last_extra=head)
    return counts[0], max(counts[1:-1], default=0), counts[-1]


def price(
    choices: list[LayoutChoice],
    sizes: Mapping[str, float],
    batch: int,
    c: Constants,
    memory: Number,
) -> Priced:
    """Returns times by the fitted constants; `memory`: bytes of every choice's fullest GPU."""
    return ranked(choices, step(works(choices, sizes, batch), c), memory, sizes["memory_bytes"])


def ranked(choices: list[LayoutChoice], time: StepTime, memory: Number, most: float) -> Priced:
    """Returns the order of the choices that need at most `most` bytes and have a time."""
    seconds, tight = np.asarray(time.total), memory > NEARLY_FULL * most
    risked = seconds * np.where(tight, TIGHT, 1.0)
    fits = np.flatnonzero((memory <= most) & np.isfinite(seconds)).tolist()
    order = simple_first(choices, risked, sorted(fits, key=lambda i: risked[i]))
    return Priced(choices, time, memory, tight, order)


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
    found: dict[tuple[int, int], int] = {}
    for i in priced.order:
        found.setdefault((priced.choices[i].tp, priced.choices[i].pp), i)
    return [*found.values()][:rows]


def reason(priced: Priced, index: int, first: int, node: int) -> str:
    """Explains what the layout gains or loses against the best one, `first`."""
    choice, tight = priced.choices[index], "; memory is tight" * bool(priced.tight[index])
    total, least = float(priced.seconds[index]), float(priced.seconds[first])
    mine, best = (
        {f.name: float(getattr(priced.time, f.name)[i]) for f in fields(StepTime)}
        for i in (index, first)
    )
    if index == first:
        rest = max([*mine][1:], key=lambda part: mine[part])
        words = f"{100 * mine['compute'] / total:.0f} % of the step computes"
        if mine[rest] > 0.005 * total:
            share = f"{100 * mine[rest] / total:.0f} %"
            words += f"; most of the rest is {_cause(rest, choice, choice, node)} ({share})"
        return words + tight
    worst = max(mine, key=lambda part: mine[part] - best[part])
    more = mine[worst] - best[worst]
    if total - least <= 0.005 * total or more <= 0:
        return "as fast, with more to set up" + tight
    why = _cause(worst, choice, priced.choices[first], node)
    return f"+{100 * more / least:.0f} % {why}{tight}"


def _cause(part: str, choice: LayoutChoice, best: LayoutChoice, node: int) -> str:
    """Describes the part of a step with the size that causes it, against the best layout's."""
    causes = {
        "bubble": f"bubble of {choice.pp} stages",
        "messages": f"messages between {choice.pp * choice.vpp} pieces of the model",
        "gradients": f"sums of gradients over dp={choice.dp}",
        "optimizer": "the optimizer's pass over its state",
        "fixed": "what a step takes whatever its size",
    }
    if part != "compute":
        return causes[part]
    if choice.recompute == FULL != best.recompute:
        return "forwards run again, as it does not fit without recompute=full"
    if choice.zero >= 3 > best.zero:
        return "waiting for parameters that zero=3 gathers"
    if choice.tp > node:
        return f"tensor-parallel waits: tp={choice.tp} leaves the NVLink domain"
    if choice.tp > best.tp:
        return f"tensor-parallel waits and narrower products at tp={choice.tp}"
    return "compute: a fuller slowest stage, or smaller products"
