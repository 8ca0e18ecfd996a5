"""Scores of the planner on published rows, and a null model to compare it with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.published_rows import Run, table

Array = NDArray[np.float64]

# Errors that others have published for rows of the same sets, which they predicted blind with their
# own constants.
PEERS = {
    "narayanan_sc21": "Calculon 10.7 / 10.3 (tables), 19 / 23 / 34 (figures 11, 14, 15)",
    "vtrain_single": "vTrain 8.4 with a GPU profile, Calculon 39; regression 6",
    "vtrain_multi": "vTrain 14.7, Calculon 15.3",
    "megascale": "Calculon 4.7 (Megatron-LM rows)",
    "bigscience_bloom_3d": "Calculon 31.6, rho 0.62",
    "mlperf_gpt3": "Calculon 28.8",
    "mlperf_llama405b": "Calculon 28.8 (with GPT-3)",
    "nanotron_playbook": "Calculon 59 median, rho 0.62, regret 12.8",
}


def errors(predicted: Array, measured: Array) -> Array:
    """Returns relative errors in per cent."""
    return np.abs(predicted / measured - 1) * 100


def null(runs: Sequence[Run]) -> Array:
    """Returns the null model without its constant: FLOPs of a GPU times the pipeline's bubble."""
    work = table([run.candidates[0] for run in runs])
    dense, each = work.ffn, work.expert_ffn * work.active_experts + work.shared_ffn
    matrices = (2 + work.gated) * (dense + work.sparse * (each - dense))
    matrices = work.layers * work.hidden * (matrices + 4 * work.hidden)
    each = 6 * (matrices + work.vocab * work.hidden) + 12 * work.layers * work.hidden * work.seq
    batch = work.micro_batch * work.microbatches * work.dp
    ideal = batch * work.seq * each * (1 + work.recompute_layer / 3)
    ideal = ideal / (work.tp * work.pp * work.dp * work.cp * work.peak)
    return ideal * (1 + (work.pp - 1) / (work.chunks * work.microbatches))


def scaled(plain: Array, known: Iterable[int], measured: Array) -> Array:
    """Returns a null model whose constant comes from the rows of `known`."""
    rows = list(known)
    if not rows:
        return plain * 2.0
    return plain * np.exp(np.median(np.log(measured[rows] / plain[rows])))


def rank_correlation(a: Array, b: Array) -> float:
    """Returns Spearman's rank correlation, with mean ranks for ties; NaN for fewer than three."""
    if len(a) < 3:
        return float("nan")
    x, y = ((v[:, None] > v).sum(1) + (v[:, None] == v).sum(1) / 2 for v in (a, b))
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


@dataclass(frozen=True)
class Choice:
    """The cost of the planner's choice for a user, in a group of layouts of one model, GPUs and
    batch."""

    set: str
    regret: float  # in per cent; infinite if the choice fails
    correlation: float  # rank correlation among the layouts that ran


def choose(runs: Sequence[Run], seconds: Array, fits: NDArray[Any]) -> list[Choice]:
    """Returns the choice in each group: the smallest predicted time among layouts that are
    predicted to fit. Its regret is its measured time relative to the best measured one. A choice
    that failed when it was run is wrong: its regret is infinite. Rows that their source flags count
    neither way; groups have at least three measured rows."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, run in enumerate(runs):
        if (run.seconds and run.trusted) or run.fits is False:
            groups.setdefault(same_job(run), []).append(i)
    found = []
    for mine in groups.values():
        ran = [i for i in mine if runs[i].seconds]
        if len(ran) < 3:
            continue
        measured = np.array([runs[i].seconds for i in ran], dtype=float)
        chosen = min([i for i in mine if fits[i]] or mine, key=lambda i: seconds[i])
        regret = 100 * ((runs[chosen].seconds or np.inf) / measured.min() - 1)
        order = rank_correlation(seconds[ran], measured)
        found.append(Choice(runs[chosen].set, regret, order))
    return found


def same_job(run: Run) -> tuple[object, ...]:
    """Returns the facts that a user knows before choosing: the set's machine, a model, GPUs and a
    batch."""
    c = run.candidates[0]
    model = (c[key] for key in ("layers", "hidden", "ffn", "vocab", "seq", "speed"))
    gpus = c["tp"] * c["pp"] * c["dp"] * c["cp"]
    return (run.set, *model, round(gpus), round(c["micro_batch"] * c["microbatches"] * c["dp"]))


def balanced(says: Sequence[bool], is_so: Sequence[bool]) -> float:
    """Returns the balanced accuracy: the mean of the hit rates of both answers."""
    pairs = list(zip(says, is_so, strict=True))
    rates = [np.mean([s == t for s, t in pairs if t is kind]) for kind in (True, False)]
    return float(np.mean(rates))
