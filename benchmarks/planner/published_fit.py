"""Fits the planner's constants: damped Gauss-Newton on logarithms, with guesses as priors and less
weight for outliers. One set of constants holds for all rows; the fit does not know which table a
row comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner import published_memory as memory
from benchmarks.planner.published_rows import Run, table
from benchmarks.planner.published_run import MEMBERS, PublishedRun
from benchmarks.planner.published_scores import balanced
from parallel3d.estimate.fitted_cost import Constants, step

Array = NDArray[np.float64]

# name → (guess, spread of its logarithm). Times in microseconds, rates as fractions of a
# datasheet's.
GUESSES: dict[str, tuple[float, float]] = {
    "gemm.ramp": (256.0, 0.7),  # k at which a GEMM reaches half of its rate
    "gemm.wave": (0.7, 0.5),  # fraction of an incomplete wave of tiles that is lost
    "gemm.small_tile": (0.85, 0.15),  # fraction of the rate for each halving of the tile
    "gemm.ragged": (0.75, 0.5),  # fraction of the rate where a side is no multiple of 64
    "gemm.gap_us": (4.0, 0.5),
    "attention.plain": (0.5, 0.5),  # batched matmuls, with the scores in memory
    "attention.plain_ramp": (100.0, 0.7),
    "attention.score_bytes": (11.0, 0.5),  # bytes moved for each score, forward
    "attention.odd_head": (0.5, 0.5),  # fraction of the rate if a head's size is no multiple of 8
    "memory.rate": (0.75, 0.2),
    "memory.width": (1.0, 0.4),  # factor on the bytes of element-wise operations
    "memory.compiled": (0.5, 0.4),  # fraction of those bytes that compiled code moves
    "head.bytes": (16.0, 0.5),  # bytes moved for each logit
    "fp8.cast_bytes": (4.0, 0.7),  # bytes moved for each element that is converted to fp8
    "launch.power": (4.0, 0.5),  # sharpness of the maximum of host and GPU time
    "optimizer.bytes": (34.0, 0.4),
    "link.rate": (0.7, 0.3),
    "link.latency_us": (15.0, 0.6),
    "pp.exposed": (1.0, 0.7),
    "pp.hidden": (1.5, 1.0),  # odds that a message is hidden, with overlap
    "fsdp.contention": (1.1, 0.2),
    "cp.exposed": (0.3, 0.7),
    "step.fixed_us": (8000.0, 0.8),
}
# Layers with experts. `published_experts.py` fits these after all others, which it leaves as they
# are.
EXPERT_GUESSES: dict[str, tuple[float, float]] = {
    "recent.gemm": (1.15, 0.15),  # rate of GEMMs of the engine "recent", relative to others
    "recent.cast": (0.6, 0.4),  # bytes of its casts to fp8, relative to others
    "experts.rate": (0.8, 0.2),  # rate of a grouped GEMM, relative to a plain one
    "experts.rows": (1.5, 0.4),  # factor on the bytes of gathered and summed rows
    "experts.link": (0.6, 0.3),  # rate of an exchange of tokens in a node, relative to a ring
    "experts.network": (0.9, 0.3),  # the same between nodes
    "experts.wait_us": (60.0, 0.7),  # until the host knows the rows, for each pass
    "experts.launch_us": (900.0, 0.7),  # host time for the experts of a layer
}
PER_SPEED = {"rate": (0.8, 0.25)}  # rate of a large GEMM, as a fraction of the datasheet's peak
PER_NETWORK = {
    "rate": (0.55, 0.35),
    "latency_us": (25.0, 0.8),
    "crowd_us": (5.0, 1.5),
    "begin_us": (200.0, 1.5),  # time until a pipeline message arrives at another node
}
PER_ENGINE = {
    "launch_us": (300.0, 0.8),  # host time for a layer, forward and backward
    "launch_tp_us": (300.0, 1.0),  # additional time with tp
    "batch_us": (1000.0, 1.0),  # host time for a micro-batch
    "hop_us": (200.0, 1.0),  # host time for a message to the next stage
    "slowest_us": (300.0, 1.0),  # host time for a layer at tp = 8, where the slowest host counts
    "flash": (0.45, 0.4),  # attention's fraction of a GEMM's rate over the causal half
    # Odds that gradients, and zero 1's parameters, are hidden, with overlap.
    "dp_hidden": (2.0, 1.0),
    "dp_messages": (1.0, 1.0),  # collectives of a layer's gradients
    "tp_hidden": (0.7, 1.0),  # odds that tp's collectives are hidden behind GEMMs, with overlap
}
PER_MEMBER = {"speed": PER_SPEED, "network": PER_NETWORK, "engine": PER_ENGINE}


def time_guesses() -> dict[str, tuple[float, float]]:
    """Returns (guess, spread) of all constants by name."""
    found = GUESSES | EXPERT_GUESSES
    for family, keys in PER_MEMBER.items():
        for name in MEMBERS[family]:
            for key, guess in keys.items():
                found[f"{family}.{name}.{key}"] = guess
    # No run of a Blackwell GPU in bf16 is known. Its large GEMMs reach about 0.7 of the datasheet,
    # and those of an H100 0.78, for which 0.63 was fitted.
    for name in ("b200/bf16", "gb200/bf16"):
        found[f"speed.{name}.rate"] = (0.57, 0.25)
    found["network.efa.crowd_us"] = (25.0, 1.0)
    found["engine.nanotron.dp_hidden"] = (0.3, 0.7)
    found["engine.megatron.dp_messages"] = (0.2, 1.0)  # several layers are one bucket
    return found


# The relative error above which a row of a set counts as an outlier, by the noise that its source
# states.
NOISE = {
    "nanotron_playbook": 0.12,
    "narayanan_sc21": 0.04,
    "llm_foundry_mpt": 0.05,
    "mlperf_gpt3": 0.015,
    "mlperf_llama405b": 0.01,
}
_NOISE = 0.04
_MOST = 60.0  # number of rows up to which a set's weight grows, so that no set outvotes all others


@dataclass
class Table:
    """Runs as one Work; `starts` has the index of each run's first candidate."""

    runs: list[Run]
    work: PublishedRun
    starts: NDArray[np.int64]
    # Constants of the memory's fit, for stalls of full GPUs.
    peaks: Mapping[str, float] | None = None
    held: Array = field(default_factory=lambda: np.zeros(1))

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Table:
        rows = [c for run in runs for c in run.candidates]
        counts = [len(run.candidates) for run in runs]
        starts = np.cumsum([0, *counts[:-1]])
        return cls(list(runs), table(rows), starts)

    def seconds(self, c: Constants) -> Array:
        """Returns the planner's step time of each run: the time of its fastest candidate."""
        found = np.asarray(step(self.work, c).total)
        if self.peaks is not None:
            found = memory.stalled(self.work, self.peaks, self.held, found)
        return np.minimum.reduceat(found, self.starts)

    def with_stalls(self, values: Mapping[str, float]) -> Table:
        """Returns the same with the time that nearly full GPUs lose, by the memory's constants."""
        self.peaks, self.held = values, memory.memory(self.work, values).total
        return self

    def memory(self, values: Mapping[str, float]) -> Array:
        """Returns the peak of the fullest GPU in GiB, for the first candidate."""
        return memory.memory(self.work, values).total[self.starts] / memory.GIB

    def reported(self, values: Mapping[str, float]) -> Array:
        """Returns the peak in GiB of the GPU that the run's source measured."""
        found = memory.memory(self.work, values)
        first = np.array([run.reports_first for run in self.runs])
        peak = np.where(first, found.first[self.starts], found.total[self.starts]) / memory.GIB
        outside = values.get("memory.outside_gib", memory.GUESSES["outside_gib"][0])
        return peak + np.array([outside * run.by_driver for run in self.runs])


def weights(runs: Sequence[Run], noise_of: Mapping[str, float] = NOISE) -> Array:
    """Returns the weight of each row: one over the noise, and less in a large set."""
    sets = [run.set for run in runs]
    size = {name: sets.count(name) for name in set(sets)}
    noise = np.array([noise_of.get(name, _NOISE) for name in sets])
    share = np.array([min(1.0, _MOST / size[name]) for name in sets])
    return np.sqrt(share) / noise


def fit(
    predict: Callable[[dict[str, float]], Array],
    target: Array,
    weight: Array,
    guesses: Mapping[str, tuple[float, float]],
    start: Mapping[str, float] | None = None,
    rounds: int = 25,
) -> dict[str, float]:
    """Finds the constants whose predictions' logarithms are nearest to the target's, and near the
    guesses."""
    names = list(guesses)
    centre = np.log([guesses[name][0] for name in names])
    spread = np.array([guesses[name][1] for name in names])
    x = np.log([(start or {}).get(name, guesses[name][0]) for name in names])
    goal = np.log(target)

    def miss(at: Array) -> Array:
        values = dict(zip(names, np.exp(at).tolist(), strict=True))
        return (np.log(predict(values)) - goal) * weight

    def cost(r: Array, at: Array) -> float:
        return float(np.sum(2 * (np.sqrt(1 + r * r) - 1)) + np.sum(((at - centre) / spread) ** 2))

    damping, now = 1.0, miss(x)
    worth, live = cost(now, x), np.arange(len(x))
    for _ in range(rounds):
        calm = 1 / np.sqrt(np.sqrt(1 + now * now))  # soft L1, by weights
        slopes = np.zeros((len(goal), len(x)))
        for i in live:
            moved = x.copy()
            moved[i] += 1e-3
            slopes[:, i] = (miss(moved) - now) / 1e-3
        used = np.abs(slopes).sum(0) > 1e-9
        live = np.flatnonzero(used)  # the constant of a device without a row is never changed
        scaled = slopes * calm[:, None]
        hessian = scaled.T @ scaled + np.diag(1 / spread**2)
        push = scaled.T @ (now * calm) + (x - centre) / spread**2
        for _ in range(14):
            stride = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -push)
            ahead = x + np.clip(np.where(used, stride, 0.0), -0.7, 0.7)
            then = miss(ahead)
            if cost(then, ahead) < worth:
                x, now, damping = ahead, then, max(damping / 4, 1e-4)
                break
            damping *= 3
        before, worth = worth, cost(now, x)
        if before - worth < 2e-5 * before:
            break
    return dict(zip(names, np.exp(x).tolist(), strict=True))


def fit_times(
    runs: Sequence[Run], peaks: Mapping[str, float], start: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Fits the constants of `parallel3d/estimate/fitted_cost.py` to runs with a measured time.
    `peaks` are the constants of memory."""
    used = [run for run in runs if run.seconds and run.trusted]
    rows = Table.of(used).with_stalls(peaks)
    target = np.array([run.seconds for run in used], dtype=float)

    def predict(values: dict[str, float]) -> Array:
        return rows.seconds(Constants(values))

    return fit(predict, target, weights(used), time_guesses(), start)


def fit_memory(runs: Sequence[Run], start: Mapping[str, float] | None = None) -> dict[str, float]:
    """Fits the constants of `published_memory.py` to measured peaks; returns them by name."""
    used = [run for run in runs if run.memory_gib]
    rows = Table.of(used)
    target = np.array([run.memory_gib for run in used], dtype=float)
    guesses = {f"memory.{k}": v for k, v in memory.GUESSES.items()}
    values = fit(rows.reported, target, weights(used, {}), guesses, start)
    return values | {"memory.full": fit_room(runs, values)}


def fit_room(runs: Sequence[Run], values: Mapping[str, float]) -> float:
    """Returns the share of a GPU's memory that best separates successful runs from others. Among
    shares that separate about equally well it takes the smallest, since a layout that fails is the
    worst choice."""
    asked = [run for run in runs if run.fits is not None and run.runs]
    guess = memory.GUESSES["full"][0]
    if len({run.fits for run in asked}) < 2:
        return guess
    rows = Table.of(asked)
    used = rows.memory(values) * memory.GIB / rows.work.memory_bytes[rows.starts]
    truth = [bool(run.fits) for run in asked]
    shares = np.arange(0.78, 1.1, 0.01)
    scores = np.array([balanced([bool(u < s) for u in used], truth) for s in shares])
    return float(shares[scores > scores.max() - 0.01][0])
