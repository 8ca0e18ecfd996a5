"""Predicts published runs of mixtures of experts, before their results are looked up.

    python -m benchmarks.planner.experts_questions QUESTIONS [--out experts.json] [--write]

QUESTIONS is the folder of `benchmarks.published`; question E8 are the rows with experts of its
`nemo_megatron_bridge.json`. The file has one answer for each of E1 to E7: seconds of a step, tokens
a second and GPU (E7), or a ratio of these (E3); and, in "E8", seconds by the id of a row. Constants
of layers with experts are fitted on the runs of `published_experts.py`; `--write` keeps them.
Sources and families of models that are known there scale the answers by what their runs were slower
or faster than predicted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.planner.published import commit
from benchmarks.planner.published_experts import (
    CASES,
    LONG,
    NOISE,
    PAI,
    Case,
    fit_experts,
    run_of,
)
from benchmarks.planner.published_fit import Table
from benchmarks.planner.published_newer import bridge, bridge_model
from benchmarks.planner.published_run import load_all, write_constants
from parallel3d.estimate.fitted_cost import Constants

MEGATRON = "arXiv 2603.07685"
# AMD's datasheet. Its GEMMs are taken to reach 0.6 of the fraction that NVIDIA's reach.
MI355X = {
    "peak": 0.6 * 2516.6e12,
    "peak_attention": 0.6 * 2516.6e12,
    "memory_rate": 8.0e12,
    "units": 256,
    "link_rate": 537.6e9,
}
DOUBT = 0.15  # spread of an effect


def questions() -> dict[str, Case]:
    """Returns E1 to E7 by name; E3 has two runs."""
    known = {case.id: case for case in CASES}
    deepseek = known["automodel-deepseek-v3"]
    titan = Case(
        "E3", "torchtitan", "Qwen3_30B_a3B", "h100/bf16", 16, 128, 4096,
        {"ep": 8, "micro_batch": 4, "zero": 2}, {},
    )  # fmt: skip
    full, selective = known["pai-qwen3-235b-full"], known["pai-qwen3-235b-selective"]
    qwen = known["pai-qwen3-30b"]
    return {
        "E1": replace(
            deepseek, id="E1", gpus=1024, batch=8192, layout={**deepseek.layout, "zero": 2}
        ),
        "E2": replace(
            deepseek,
            id="E2",
            model="Kimi_K2",
            layout={"pp": 8, "chunks": 4, "ep": 32, "zero": 2},
        ),
        "E3 16 GPUs": titan,
        "E3 128 GPUs": replace(titan, gpus=128, batch=1024),
        "E4": replace(qwen, id="E4", batch=256, layout={"pp": 4, "ep": 4}),
        "E5": replace(full, id="E5", layout={**LONG, "tp": 2, "micro_batch": 4}),
        "E6": replace(
            selective, id="E6", differs={**PAI, "recompute": "experts"}, layout={**LONG, "tp": 2}
        ),
        "E7": Case(
            "E7",
            "Primus",
            "Mixtral-8x22B",
            "b200/bf16",
            64,
            256,
            8192,
            {"pp": 4, "chunks": 2, "ep": 8},
            {"copies": "expert", **MI355X},
        ),
    }


@dataclass(frozen=True)
class Effects:
    """Logarithms of measured over predicted seconds by source and by family of models, which add
    up; both are drawn to 0 where runs are few."""

    of: Mapping[str, float]

    @classmethod
    def known(cls, values: Mapping[str, float], cases: Sequence[Case] = CASES) -> Effects:
        """Finds the effects in runs with a result: a ridge regression."""
        measured = np.array([run_of(case).seconds for case in cases], dtype=float)
        off = np.log(measured / seconds_of(cases, values))
        names = sorted({name for case in cases for name in cls.names(case)})
        has = np.array([[name in cls.names(case) for name in names] for case in cases], dtype=float)
        ridge = has.T @ has + (NOISE / DOUBT) ** 2 * np.eye(len(names))
        return cls(dict(zip(names, np.linalg.solve(ridge, has.T @ off).tolist(), strict=True)))

    @staticmethod
    def names(case: Case) -> tuple[str, str]:
        return case.source, family(case.model)

    def factor(self, source: str, model: str) -> float:
        return float(np.exp(self.of.get(source, 0.0) + self.of.get(family(model), 0.0)))


def family(model: str) -> str:
    """Returns the family of a model, whose members have layers of the same kind."""
    return {"Kimi": "Deep"}.get(model[:4], model[:4])


def seconds_of(cases: Sequence[Case], values: Mapping[str, float]) -> list[float]:
    """Returns the planner's seconds of a step of each case."""
    return Table.of([run_of(case) for case in cases]).seconds(Constants(values)).tolist()


def left_out(values: Mapping[str, float]) -> list[float]:
    """Returns the seconds of each known run, predicted without it."""
    found = []
    for case in CASES:
        others = [other for other in CASES if other is not case]
        fitted = {**values, **fit_experts(values, others)}
        effects = Effects.known(fitted, others)
        (seconds,) = seconds_of([case], fitted)
        found.append(seconds * effects.factor(case.source, case.model))
    return found


def answers(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the answers to E1 to E7."""
    asked = questions()
    seconds = dict(zip(asked, seconds_of([*asked.values()], values), strict=True))
    effects = Effects.known(values)
    for name, case in asked.items():
        seconds[name] *= effects.factor(case.source, case.model)
    mixtral = asked["E7"]
    tokens = mixtral.batch * mixtral.seq / (seconds["E7"] * mixtral.gpus)
    few, many = seconds.pop("E3 16 GPUs"), seconds.pop("E3 128 GPUs")
    return {**seconds, "E3": few / many, "E7": tokens}


def bridge_answers(folder: Path, values: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of a step of each row of E8, by its id."""
    rows = json.loads((folder / "nemo_megatron_bridge.json").read_text())["rows"]
    runs = [run for run in map(bridge, rows) if run.candidates[0]["ep"] > 1]
    effects, seconds = Effects.known(values), Table.of(runs).seconds(Constants(values))
    factor = {row["id"]: effects.factor(MEGATRON, bridge_model(row)) for row in rows}
    return {run.id: s * factor[run.id] for run, s in zip(runs, seconds.tolist(), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("--out", type=Path, default=Path("experts.json"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    values = dict(load_all().values)
    fitted = fit_experts(values)
    without = left_out(values)
    values |= fitted
    for case, at, blind in zip(CASES, seconds_of(CASES, values), without, strict=True):
        measured = run_of(case).seconds
        print(
            f"{case.id:28} measured {measured:7.2f} s, fitted {at:7.2f} s, left out {blind:7.2f} s"
        )
    for name, effect in sorted(Effects.known(values).of.items()):
        print(f"{name}: {np.exp(effect):.2f} of the prediction")
    single = dict(sorted(answers(values).items()))
    rows = bridge_answers(options.questions, values)
    print(single)
    options.out.write_text(json.dumps({**single, "E8": rows}, indent=0) + "\n")
    if options.write:
        write_constants(fitted)
    print(f"{len(rows)} rows of E8, commit {commit()}")


if __name__ == "__main__":
    main()
