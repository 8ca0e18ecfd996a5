"""Reads published runs as rows for the planner.

There is one reader per file, which fills in the facts that its text states. A row that leaves a
choice open (micro-batch, chunks) becomes several candidates; the planner's answer is the fastest of
them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.published_models import gpt
from benchmarks.planner.published_run import ENGINES, ROW_FIELDS, PublishedRun
from parallel3d.device.datasheets import DEVICES
from parallel3d.estimate.fitted_cost import NETWORKS, SPEEDS
from parallel3d.estimate.rank_layers import PipelineLayers, Rank, pipeline_of, table_of
from parallel3d.schedules.orders import StageAssignment

Row = dict[str, Any]


@dataclass
class Run:
    """One published row: candidates as fields of `Work`, the measurement, and the set it belongs
    to."""

    id: str
    set: str
    group: str  # rows of one group are left out of a fit together, or not at all
    candidates: list[Row]
    seconds: float | None = None
    memory_gib: float | None = None
    fits: bool | None = None
    trusted: bool = True  # the source has measured it and not flagged it
    reports_first: bool = False  # its memory is the first rank's
    by_driver: bool = False  # its memory is the driver's figure, not the allocator's
    runs: bool = True  # false if its engine fails there, whatever the memory


def recomputed(kind: str = "none") -> Row:
    """Fields of no, selective or full recomputation, the last up to the layer's very end, or of
    recomputing the experts."""
    full = float(kind.startswith("full"))
    made = dict.fromkeys(("recompute_norm", "recompute_activation"), 0.0)
    made["recompute_mlp"] = float(kind == "experts")
    made["recompute_attention"] = float(kind.startswith("selective"))
    return {**made, "recompute_layer": full, "recompute_end": full}


# GB/s in one direction of a GPU's share of its node's network.
FABRICS = {
    "hdr": 25.0,  # 8 × 200 Gb/s InfiniBand
    "hdr4": 12.5,  # 4 × 200 Gb/s
    "opa": 6.25,  # 4 × 100 Gb/s Omni-Path
    "roce": 25.0,  # 1,600 Gb/s a node
    "ndr": 50.0,  # 8 × 400 Gb/s
    "efa": 50.0,  # 3,200 Gb/s a node
    "edr": 12.5,  # 8 × 100 Gb/s
}
_DEFAULTS: dict[str, float] = {
    "gated": 0, "tied": 1, "head_size": 0, "kv_heads": 0, "cp": 1, "cp_style": 0, "chunks": 1,
    "zero": 0, **recomputed(), "sequence_parallel": 0, "flash": 0,
    "dropout": 1, "parallel_block": 0, "overlap_tp": 0, "overlap_pp": 0, "overlap_dp": 0,
    "scatter_gather": 0, "graph": 0, "compiled": 0, "split": 0, "grad_bytes": 2,
    "window": math.inf, "gpus_per_node": 8, "backward": 1, "trained": 1, "embedding_trained": 1,
    "head_trained": 1, "head_reached": 1, "sliding": 1,
    "sparse": 0, "experts": 1, "active_experts": 1, "expert_ffn": 0, "shared_ffn": 0, "ep": 1,
    "load": 1, "attends": 1, "output_norms": 0, "overlap_ep": 0, "copies": 0, "gathers": 0,
    "item": 2,
    "q_latent": 0, "kv_latent": 0, "value_size": 0, "rope_size": 0,
}  # fmt: skip


def candidate(
    device: str, type: str, fabric: str, engine: str = "megatron", split: str = "even", **over: Any
) -> Row:
    """Fills in all fields of `Work` from a row and from the settings that all runs of its set
    share."""
    made: dict[str, Any] = {**_DEFAULTS, **over}
    made["head_size"] = made["head_size"] or made["hidden"] / made["heads"]
    made["kv_heads"] = made["kv_heads"] or made["heads"]
    card = DEVICES[device]
    speed = f"{device}/{type}".replace("bf16", "fp16" if device in ("a100", "v100") else "bf16")
    speed = speed.replace("b300/fp4", "b200/fp4").replace("b300/", "b200/")
    made["speed"] = SPEEDS.index(speed)
    made["fabric"], made["engine"] = NETWORKS.index(fabric), ENGINES.index(engine)
    made["peak"] = card.peak[type] * 1e12
    made["peak_attention"] = card.peak.get("bf16", card.peak["fp16"]) * 1e12
    made["memory_bytes"] = card.memory_gib * 2**30
    made["memory_rate"] = card.memory_gb_s * 1e9
    made["units"], made["link_rate"] = card.units, card.link_gb_s * 1e9
    made["fabric_rate"] = FABRICS[fabric] * 1e9
    made["fp8"] = float(type in ("fp8", "fp4"))
    made["ranks"] = _ranks(made, split)
    return made


# The kinds of layers of published runs: without and with experts.
KINDS: tuple[dict[str, float], ...] = ({"sparse": 0.0}, {"sparse": 1.0})


def _ranks(row: Row, split: str) -> PipelineLayers:
    """Returns the layers of the ranks of a row's pipeline.

    Layers without experts are the first ones of a model.
    """
    layers, stages = int(row["layers"]), int(row["pp"])
    if 0 < row["sparse"] < 1:
        place = StageAssignment(stages, int(row["chunks"]))
        dense = round((1 - row["sparse"]) * layers)
        kind_of = [int(layer >= dense) for layer in range(layers)]
        return pipeline_of(split_evenly(layers, place.stages), place, kind_of, 2)
    if split == "cost":
        matrices = (2 + row["gated"]) * row["ffn"] + 4 * row["hidden"]
        counts = split_by_cost(layers, row["vocab"] / matrices, stages)
    else:
        counts = split_evenly(layers, stages, ends=split == "ends")
    return even_pipeline(counts, row["sparse"] == 1, layers)


def even_pipeline(counts: list[int], sparse: bool, layers: int) -> PipelineLayers:
    """Returns a pipeline of layers of one kind, of which the last rank has the head."""

    def of_kind(count: int) -> tuple[int, int]:
        return (0, count) if sparse else (count, 0)

    first, *between, last = counts if len(counts) > 1 else (*counts, 0)
    alone = int(len(counts) == 1)
    ranks = (
        Rank(of_kind(first), 1, alone),
        Rank(of_kind(max(between, default=0))),
        Rank(of_kind(last), 0, 1 - alone),
    )
    return PipelineLayers(ranks, of_kind(layers))


def table(rows: list[Row]) -> PublishedRun:
    """Converts rows to one `PublishedRun` of arrays; KeyError for a field that a row lacks."""
    columns: dict[str, Any] = {
        name: np.array([row[name] for row in rows], dtype=float) for name in ROW_FIELDS
    }
    return PublishedRun(**columns, ranks=table_of([row["ranks"] for row in rows]), kinds=KINDS)


def split_evenly(layers: int, stages: int, ends: bool = False) -> list[int]:
    """Splits layers over stages, the rest to the first ones; `ends`: embedding and head count as a
    layer."""
    if stages == 1:
        return [layers]
    slots = layers + 2 * ends
    counts = [slots // stages + (stage < slots % stages) for stage in range(stages)]
    if ends:
        counts[0], counts[-1] = max(counts[0] - 1, 0), max(counts[-1] - 1, 0)
    return counts


def split_by_cost(layers: int, head: float, stages: int) -> list[int]:
    """Splits layers over stages as nanotron does, which starts a stage as soon as a block ends
    beyond its share of all costs. `head` is the head's cost in layers; stages after it are empty
    and left out."""
    share = (layers + head) / stages
    counts, stage = [0] * stages, 0
    for block in range(1, layers + 2):
        end = block if block <= layers else layers + head
        stage += end > share * (stage + 1) * (1 + 1e-9) and stage < stages - 1
        counts[stage] += block <= layers
    return counts[: stage + 1]


def stages_by_cost(layers: int, head: float, stages: int) -> int:
    """Returns the stages of `split_by_cost` that are not empty: one more block follows the head."""
    used = len(split_by_cost(layers, head, stages))
    return used + (used < stages and layers + head > (layers + head) / stages * used * (1 + 1e-9))


def batches(total: float, ranks: float, micro: float | None) -> list[Row]:
    """Returns micro-batch and their number; several pairs if the row does not say."""
    mine = max(total / ranks, 1)
    sizes = [micro] if micro else [b for b in (1, 2, 4) if round(mine) % b == 0]
    return [{"micro_batch": b, "microbatches": max(round(mine / b), 1)} for b in sizes]


def _layout(row: Row) -> Row:
    """Reads tp, pp, dp and chunks by the names that most files use."""
    tp, pp, cp = row.get("tp") or 1, row.get("pp") or 1, row.get("cp") or 1
    dp = row.get("dp") or max(row["gpus"] // (tp * pp * cp), 1)
    return {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "chunks": row.get("interleave_v") or 1}


def _shape(row: Row, **over: Any) -> Row:
    keys = ("layers", "hidden", "heads", "ffn", "vocab", "seq")
    made = {key: row[key] for key in keys if row.get(key) is not None}
    return {"ffn": 4 * made.get("hidden", 0), "vocab": 51200, "seq": 2048, **made, **over}


def hardware_seconds(row: Row, shape: Row, rate: float, full: bool = True) -> float:
    """Converts TFLOP/s per GPU to the seconds of a step, by SC'21's equation 3 (72: no
    recomputation)."""
    s, h, n, v = shape["seq"], shape["hidden"], shape["layers"], shape["vocab"]
    last = 16 if full else 12
    flops = (96 if full else 72) * row["global_batch"] * s * n * h * h
    flops *= 1 + s / (6 * h) + v / (last * n * h)
    return flops / (row["gpus"] * rate * 1e12)


def narayanan(row: Row) -> Run | None:
    """SC'21: A100s, full recomputation, scores written out, scatter-gather between stages."""
    if row["table"] == "text":
        return None
    shape = _shape(row)
    zero3 = row.get("zero_stage") == 3
    chosen = batches(row["global_batch"], _layout(row)["dp"], row.get("microbatch"))
    common = {**shape, **_layout(row), **recomputed(row.get("activation_recompute") or "full")}
    common["scatter_gather"] = float(row.get("scatter_gather", True))
    common["overlap_dp"] = float(bool(row.get("dp_grad_overlap")) or zero3)
    common["zero"] = 3 if zero3 else 0
    engine = "deepspeed" if zero3 else "megatron"
    made = [candidate("a100", "fp16", "hdr", engine, **common, **b) for b in chosen]
    seconds = row.get("iter_time_s")
    rate = row.get("tflops_per_gpu_hardware") or row.get("tflops_per_gpu")
    if rate and not seconds:
        seconds = hardware_seconds(row, shape, rate)
    return Run(row["id"], "narayanan_sc21", row["table"], made, seconds)


def korthikanti(row: Row) -> Run | None:
    """Selective recomputation and sequence parallelism on A100s; the times of single layers are
    left out."""
    if "gpus" not in row:
        return None
    sp = float(row["sequence_parallel"])
    common = {
        **_shape(row),
        **_layout(row),
        **recomputed(str(row.get("activation_recompute") or "full")),
        "sequence_parallel": sp,
    }
    common["scatter_gather"] = 1.0
    chosen = batches(row["global_batch"], row["dp"], row["microbatch"])
    made = [candidate("a100", "fp16", "hdr", **common, **b) for b in chosen]
    return Run(row["id"], "korthikanti_2022", row["model"], made, row.get("iter_time_s"))


def readme(row: Row) -> Run | None:
    """Megatron-LM's own tables: V100 and A100 of 2019 to 2021, H100 of 2024."""
    table = row["table"]
    if "H100" in table:
        return _readme_h100(row)
    if "hidden" not in row:  # the GPT-3 example
        row = {**gpt(96, 12288, 96), "seq": 2048, **row}
    device = "v100" if row.get("gpu") == "V100" else "a100"
    common = {**_shape(row), **_layout(row), **recomputed("full")}
    common["overlap_dp"] = float("128-way" in table)
    mine = row["global_batch"] / row["dp"] if "batch" in table else None
    chosen = batches(row["global_batch"], row["dp"], mine)
    fabric = "edr" if device == "v100" else "hdr"
    made = [candidate(device, "fp16", fabric, **common, **b) for b in chosen]
    seconds = row["iter_time_ms"] / 1e3 if "iter_time_ms" in row else None
    rate = row.get("tflops_per_gpu_hardware")
    if rate and seconds is None:
        seconds = hardware_seconds(row, common, rate)
    return Run(row["id"], "megatron_lm_readme", table, made, seconds)


def _readme_h100(row: Row) -> Run:
    over = _overlaps(1)
    if "tp" not in row:
        row = {**row, "tp": 8, "pp": 6, "dp": row["gpus"] // 48}
    made = []
    for chunks in (1, 2, 4, 8):
        layers = row["layers"] / row["pp"]
        if chunks > 1 and (row["pp"] == 1 or layers % chunks):
            continue
        common = {**_shape(row), **_layout(row), **over, "chunks": chunks, "flash": 1, "dropout": 0}
        common.update(sequence_parallel=1, zero=1, tied=0)
        for b in batches(row["global_batch"], row["dp"], row.get("microbatch")):
            made.append(candidate("h100", "bf16", "ndr", **common, **b))
    return Run(row["id"], "megatron_lm_readme", row["table"], made, row.get("iter_s"))


def _overlaps(on: float) -> Row:
    return {"overlap_tp": on, "overlap_pp": on, "overlap_dp": on}


def megascale(row: Row) -> Run:
    """Megatron-LM of 2023, and MegaScale's changes to it, added one after the other in its
    ablation."""
    shape = {**gpt(96, 12288, 128, 64000), "seq": 2048, **_shape_only(row)}
    steps = ("baseline", "+parallel", "+sliding", "+TP", "+PP", "+DP", "+efficient", "+misc")
    done = next((i for i, s in enumerate(steps) if row.get("step", "?").startswith(s)), 8)
    if row.get("system") == "Megatron-LM":
        done = 0
    common: Row = {**shape, **_layout({"interleave_v": 6, **row}), "flash": 1, "zero": 1}
    common.update(sequence_parallel=1, scatter_gather=1, parallel_block=float(done >= 1))
    common.update(overlap_tp=float(done >= 3), overlap_pp=float(done >= 4))
    common.update(overlap_dp=float(done >= 5), compiled=float(done >= 6))
    common["window"] = 1024 if done >= 2 else math.inf
    made = [
        candidate("a100", "bf16", "hdr", **common, **b)
        for b in batches(row["global_batch"], row["dp"], 1)
    ]
    seconds = None
    if "mfu_pct" in row:
        seconds = hardware_seconds(row, shape, 3.12 * row["mfu_pct"], full=False)
    trusted = True
    return Run(
        row["id"], "megascale", "ablation" if done else "plain", made, seconds, None, None, trusted
    )


def _shape_only(row: Row) -> Row:
    made: dict[str, Any] = {k: row[k] for k in ("layers", "hidden", "heads", "vocab") if k in row}
    return {**made, "ffn": 4 * made["hidden"]} if "hidden" in made else made


def bloom(row: Row) -> Run | None:
    """BLOOM's search: A100s, Omni-Path, ZeRO 1, full recomputation; shapes that are not given are
    those of 200B."""
    guess = {"layers": 80, "hidden": 14400, "heads": 96}
    known = {k: row[k] for k in guess if row.get(k)}
    size = float(re.sub(r"[^0-9.]", "", str(row.get("size", "200"))) or 200)
    if "hidden" not in known:
        whole = row["pp"] * round(guess["layers"] * (size if size > 100 else 200) / 200 / row["pp"])
        known = {"layers": whole, "hidden": 14400, "heads": 96}
    if "heads" not in known:
        known["heads"] = 64 if known["hidden"] % 64 == 0 and known["hidden"] != 14400 else 96
    if size < 100:  # measured on one of its stages only
        known["layers"] = known["layers"] * size / 200
    shape = {**known, "vocab": 250880, "seq": 2048, "ffn": 4 * known["hidden"]}
    layout = _layout(row)
    layout["dp"] = row["gpus"] // (row["tp"] * row["pp"])
    common = {**shape, **layout, **recomputed("full"), "zero": row.get("zero_stage") or 0}
    chosen = batches(row["global_batch"], layout["dp"], row["microbatch"])
    half = row.get("section") not in ("bf16", "Rebalancing layers")
    common["grad_bytes"] = 2 if half else 4
    common["scatter_gather"] = 1  # DeepSpeed cuts messages by tp
    ends = "ends" if row.get("section") == "Rebalancing layers" else "even"
    made = [
        candidate("a100", "fp16", "opa", "deepspeed", split=ends, **common, **b) for b in chosen
    ]
    seconds = row.get("sec_per_iter")
    memory = re.match(r"[\d.]+", str(row.get("mem") or ""))
    gib = float(memory[0]) if memory else None
    fits = None if "oom" not in row else not row["oom"]
    name = "bigscience_bloom_3d"
    return Run(row["id"], name, row["section"], made, seconds, gib, fits, by_driver=True)


def vtrain(name: str) -> Callable[[Row], Run]:
    """vTrain's own runs: Megatron-DeepSpeed on A100s, full recomputation."""

    def read(row: Row) -> Run:
        common = {**_shape(row, vocab=51200), **_layout(row), **recomputed("full")}
        common["scatter_gather"] = 1
        chosen = batches(row["global_batch"], row["dp"], row["microbatch"])
        made = [candidate("a100", "fp16", "hdr4", "deepspeed", **common, **b) for b in chosen]
        seconds = row["iter_time_ms"] / 1e3 if "iter_time_ms" in row else None
        group = f"h{row['hidden']} tp{row['tp']} pp{row['pp']} dp{row['dp']}"
        return Run(row["id"], name, group, made, seconds)

    return read


def read_folder(folder: Path, readers: dict[str, Callable[[Row], Run | None]]) -> Iterator[Run]:
    """Yields all runs of a folder's files; KeyError for a file without a reader."""
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            run = readers[path.stem](row)
            if run is not None:
                yield run
