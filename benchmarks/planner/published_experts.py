"""Published runs of mixtures of experts, to fit the costs of a layer with experts.

The sources print few of their settings. Where a row leaves one open, it has the setting that its
framework recommends for this model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.planner.published_fit import EXPERT_GUESSES, PER_ENGINE, Table, fit
from benchmarks.planner.published_models import Shape, named
from benchmarks.planner.published_rows import Row, Run, candidate, recomputed
from benchmarks.planner.published_run import COPIES
from parallel3d.estimate.fitted_cost import Constants

SET = "experts"
H800_LINK = 200e9  # bytes/s one way; all else is an H100
FLASH = (0.7, 0.3)  # attention over the rate of a GEMM, and its spread: cuDNN, FlashAttention-3
NOISE = 0.1  # relative error of a row: layouts are partly guessed


@dataclass(frozen=True)
class Case:
    """A run of a model with experts.

    Attributes:
        id: its name. source: where it was printed.
        model: name in `published_models`. device: with its type, as "h100/bf16".
        gpus, batch, seq: of the step; the batch in sequences.
        layout: tp, pp, cp, ep, chunks, micro_batch, zero where they are not 1 (zero: 1).
        differs: recompute, copies of a token, and fields of `PublishedRun` that differ from those
            of the device and of Megatron-LM with all that overlaps.
        seconds: of a step, or None.
        tflops: model TFLOP/s of a GPU in place of the seconds.
        tokens: tokens/s of a GPU in place of the seconds.
    """

    id: str
    source: str
    model: str
    device: str
    gpus: int
    batch: int
    seq: int
    layout: Mapping[str, float]
    differs: Mapping[str, Any]
    seconds: float | None = None
    tflops: float | None = None
    tokens: float | None = None


def flops(shape: Shape, seq: int) -> float:
    """Returns model FLOPs of training on a token, with the causal half of attention, which is the
    convention of Megatron-LM and NeMo for models with experts."""
    shape = {"sparse": 0.0, "expert_ffn": 0.0, "shared_ffn": 0.0, "active_experts": 0.0, **shape}
    hidden, heads = shape["hidden"], shape["heads"]
    size = shape["head_size"]
    if shape.get("q_latent"):
        query = 2 * size - shape["value_size"]
        attention = hidden * (shape["q_latent"] + shape["kv_latent"] + shape["rope_size"])
        attention += shape["q_latent"] * heads * query
        attention += shape["kv_latent"] * heads * (query - shape["rope_size"] + shape["value_size"])
        attention += heads * shape["value_size"] * hidden
    else:
        attention = hidden * size * (2 * heads + 2 * shape["kv_heads"])
    experts = shape["active_experts"] * shape["expert_ffn"] + shape["shared_ffn"]
    mean = shape["ffn"] + shape["sparse"] * (experts - shape["ffn"])
    each = attention + 3 * hidden * mean + shape["sparse"] * hidden * shape.get("experts", 0)
    window = shape.get("window", np.inf)
    keys = seq / 2 + shape.get("sliding", 1.0) * (min(window, seq / 2) - seq / 2)
    each += 2 * heads * size * keys
    return float(6 * (shape["layers"] * each + shape["vocab"] * hidden))


def run_of(case: Case) -> Run:
    """Returns the case as a row of the planner."""
    shape = named(case.model)
    layout: dict[str, float] = {
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": 1,
        "chunks": 1,
        "micro_batch": 1,
        "zero": 1,
    }
    layout |= case.layout
    differs = dict(case.differs)
    device, type = case.device.split("/")
    dp = case.gpus / (layout["tp"] * layout["pp"] * layout["cp"])
    over: Row = {**shape, **layout, "seq": case.seq, "dp": dp, "flash": 1, "dropout": 0}
    over |= {"overlap_tp": 1, "overlap_pp": 1, "overlap_dp": 1, "scatter_gather": 1, "compiled": 1}
    over |= recomputed(differs.pop("recompute", "none"))
    over["sequence_parallel"] = float(layout["tp"] > 1)
    over["gpus_per_node"] = 72 if device.startswith("gb") else 8
    over["copies"] = COPIES.index(differs.pop("copies", "node"))
    over["microbatches"] = case.batch / (dp * layout["micro_batch"])
    made = candidate(device, type, "ndr", "recent", **over) | differs
    tokens = case.batch * case.seq
    seconds = case.seconds
    if case.tokens is not None:
        seconds = tokens / (case.tokens * case.gpus)
    if case.tflops is not None:
        seconds = tokens * flops(shape, case.seq) / (case.tflops * 1e12 * case.gpus)
    return Run(case.id, SET, case.model, [made], seconds)


PAI = {"copies": "expert", "link_rate": H800_LINK}
LONG = {"pp": 32, "chunks": 3, "ep": 8}
CASES = (
    Case(
        "automodel-qwen3-30b", "NeMo Automodel, performance summary", "Qwen3_30B_a3B", "h100/bf16",
        8, 512, 4096, {"ep": 8, "micro_batch": 4}, {}, seconds=21.77,
    ),
    Case(
        "automodel-deepseek-v3", "NeMo Automodel, performance summary", "DeepSeekV3", "h100/bf16",
        256, 512, 4096, {"pp": 4, "chunks": 8, "ep": 64}, {}, seconds=8.18,
    ),
    Case(
        "automodel-gpt-oss-20b", "NeMo Automodel, performance summary", "GPT OSS 20B", "h100/bf16",
        8, 256, 4096, {"ep": 8, "micro_batch": 2}, {}, tflops=279,
    ),
    Case(
        "pai-qwen3-30b", "Pai-Megatron-Patch issue 643", "Qwen3_30B_a3B", "h100/bf16",
        16, 128, 8192, {"pp": 2, "ep": 8}, PAI, seconds=10.36,
    ),
    Case(
        "pai-qwen3-235b-full", "Pai-Megatron-Patch issue 658", "Qwen3_235B_a22B", "h100/bf16",
        256, 4096, 4096, {**LONG, "micro_batch": 4}, {**PAI, "recompute": "full"}, seconds=42.5,
    ),
    Case(
        "pai-qwen3-235b-selective", "Pai-Megatron-Patch issue 658", "Qwen3_235B_a22B", "h100/bf16",
        256, 2048, 4096, {**LONG, "tp": 2}, {**PAI, "recompute": "selective"}, seconds=22.4,
    ),
    Case(
        "folding-mixtral-8x22b", "arXiv 2504.14960", "Mixtral-8x22B", "h100/bf16",
        128, 256, 4096, {"tp": 2, "pp": 8, "ep": 8, "chunks": 7}, {}, tflops=0.493 * 989.4,
    ),
    Case(
        "megatron-deepseek-v3-gb200", "arXiv 2603.07685", "DeepSeekV3", "gb200/fp8",
        256, 4096, 4096, {"pp": 4, "chunks": 4, "ep": 64}, {"graph": 1}, tflops=1048,
    ),
    Case(
        "megatron-deepseek-v3-gb300", "arXiv 2603.07685", "DeepSeekV3", "gb300/fp8",
        256, 4096, 4096, {"pp": 2, "chunks": 8, "ep": 32, "micro_batch": 2}, {"graph": 1},
        tflops=1233,
    ),
    Case(
        "megatron-qwen3-235b-gb200", "arXiv 2603.07685", "Qwen3_235B_a22B", "gb200/fp8",
        256, 8192, 4096, {"pp": 8, "chunks": 3, "ep": 32}, {"graph": 1}, tflops=919,
    ),
    Case(
        "megatron-qwen3-235b-gb300", "arXiv 2603.07685", "Qwen3_235B_a22B", "gb300/fp8",
        256, 8192, 4096, {"pp": 4, "chunks": 12, "ep": 32, "micro_batch": 2}, {"graph": 1},
        tflops=974,
    ),
)  # fmt: skip


def fit_experts(values: Mapping[str, float], cases: Sequence[Case] = CASES) -> dict[str, float]:
    """Fits the constants of layers with experts, and of the engine that computes them.

    All others stay at `values`. The engine begins as Megatron-LM, with faster attention.
    """
    guesses = dict(EXPERT_GUESSES)
    for key, (_, spread) in PER_ENGINE.items():
        guesses[f"engine.recent.{key}"] = values[f"engine.megatron.{key}"], spread
    guesses["engine.recent.flash"] = FLASH
    runs = [run_of(case) for case in cases]
    rows = Table.of(runs)
    target = np.array([run.seconds for run in runs], dtype=float)

    def predict(some: dict[str, float]) -> Any:
        return rows.seconds(Constants({**values, **some}))

    return fit(predict, target, np.full(len(runs), 1 / NOISE), guesses)
