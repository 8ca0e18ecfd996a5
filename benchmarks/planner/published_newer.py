"""Reads the published sets on H100 and later GPUs; see published_rows.py."""

from __future__ import annotations

import re

from benchmarks.planner.published_models import gpt, named, unnamed
from benchmarks.planner.published_rows import (
    Row,
    Run,
    _layout,
    _overlaps,
    _shape,
    batches,
    bloom,
    candidate,
    korthikanti,
    megascale,
    narayanan,
    readme,
    recomputed,
    stages_by_cost,
    vtrain,
)
from benchmarks.planner.published_run import COPIES

_MPT = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12),
        "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32),
        "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64)}  # fmt: skip


def playbook(row: Row) -> Run:
    """Reads the playbook's figure: nanotron on H100s of AWS, sequence parallel, without
    recomputation."""
    common = {**_shape(row), **_layout(row), "gated": 1, "tied": float(row["tied"]), "flash": 1}
    common.update(kv_heads=row["kv_heads"], zero=row["zero"], dropout=0, grad_bytes=4)
    common.update(sequence_parallel=float(row["tp"] > 1), overlap_tp=1, overlap_dp=1)
    common.update(micro_batch=row["mb"], microbatches=row["grad_acc"])
    made = [candidate("h100", "bf16", "efa", "nanotron", "cost", **common)]
    seconds, status = row.get("iter_s"), row.get("status")
    trusted = not row.get("suspect_slow") and not row.get("suspect_batch")
    # Cases in which nanotron fails: a stage without a block; a tied table on two stages whose
    # gradients are summed without ZeRO across nodes.
    head = row["vocab"] / (4 * row["hidden"] + 3 * row["ffn"])
    runs = stages_by_cost(row["layers"], head, row["pp"]) == row["pp"]
    spread = row["pp"] > 1 and row["dp"] > 1 and row["nodes"] > 1
    runs = runs and not (row["tied"] and not row["zero"] and spread)
    return Run(
        row["id"],
        "nanotron_playbook",
        f"{row['model']} {row['nodes']} nodes",
        made,
        seconds if status == "ok" else None,
        row.get("mem_GB"),
        None if status is None else status == "ok",
        trusted,
        reports_first=True,
        runs=runs,
    )


def mpt(row: Row) -> Run:
    """Reads llm-foundry: only FSDP, flash attention, per-block checkpoints if the row says so."""
    layers, hidden, heads = _MPT[row["model"]]
    fp8 = row["precision"].endswith("fp8")
    device = "h100" if row["gpu"].startswith("h100") else "a100"
    common = {**gpt(layers, hidden, heads, 50368), "seq": row["seq"], **_layout(row)}
    common.update(zero=3, flash=1, dropout=0, **recomputed("full" if row["act_ckpt"] else "none"))
    common.update(micro_batch=row["microbatch"], microbatches=row["grad_accum"], overlap_dp=1)
    type, fabric = "fp8" if fp8 else "bf16", "ndr" if device == "h100" else "roce"
    made = [candidate(device, type, fabric, "fsdp", **common)]
    seconds = None
    if "tokens_per_s" in row:
        seconds = row["global_batch"] * row["seq"] / row["tokens_per_s"]
    group = f"{row['model']} {type}"
    return Run(row["id"], "llm_foundry_mpt", group, made, seconds)


def mlperf_gpt3(row: Row) -> Run:
    """Reads GPT-3 of MLPerf: fp8, sequence parallel, no recomputation, all communication
    overlapped."""
    common = {**_shape(row), **_layout(row), **_overlaps(1), "flash": 1, "zero": 1}
    common.update(sequence_parallel=1, scatter_gather=1, overlap_tp=float(row["tp_comm_overlap"]))
    common["compiled"] = 1
    chosen = batches(row["global_batch"], row["dp"], row["microbatch"])
    made = [candidate("h100", "fp8", "ndr", **common, **b) for b in chosen]
    group = "thousands" if row["gpus"] > 1000 else "hundreds"
    return Run(row["id"], "mlperf_gpt3", group, made, row.get("iter_time_s"))


def mlperf_405b(row: Row) -> Run:
    """Reads Llama 3.1 405B of MLPerf: fp8 or fp4; embedding and loss each count as a layer of the
    pipeline."""
    device = row["gpu"].removeprefix("DGX").lower()
    common = {**named("LLAMA3-405B"), "seq": 8192, **_layout(row), **_overlaps(1), "flash": 1}
    common.update(sequence_parallel=1, scatter_gather=1, zero=1, dropout=0, compiled=1)
    common.update(graph=float(row["cuda_graph"]), overlap_tp=1)
    common.update(micro_batch=row["microbatch"], microbatches=row["microbatches"])
    common["gpus_per_node"] = 72 if device.startswith("gb") else 8
    type = row["precision"]
    made = [candidate(device, type, "ndr", split="ends", **common)]
    group = f"{device} {type}"
    return Run(row["id"], "mlperf_llama405b", group, made, row.get("iter_s"))


def nemo(row: Row) -> Run:
    """Reads NeMo's launcher: fp8 on H100s; fine-tuning uses packed samples, LoRA trains few
    weights."""
    shape = {"seq": row["seq"], **named(row["model"]), **_overlaps(1), "flash": 1, "zero": 1}
    layout = _layout(row)
    shape.update(sequence_parallel=float(row["tp"] > 1), dropout=0, compiled=1, scatter_gather=1)
    made = []
    for chunks in (1, 5) if row["pp"] > 1 else (1,):
        if shape["layers"] / row["pp"] % chunks == 0:
            for b in batches(row["global_batch"], layout["dp"], row["microbatch"]):
                over = {**shape, **layout, "chunks": chunks, **b}
                made.append(candidate("h100", "fp8", "ndr", **over))
    seconds = None
    if "tokens_per_s_gpu" in row:
        seconds = row["global_batch"] * row["seq"] / (row["tokens_per_s_gpu"] * row["gpus"])
    lora = row["mode"] == "LoRA"
    return Run(
        row["id"], "nemo_launcher_h100_fp8", row["mode"], made, seconds, None, None, not lora
    )


def bridge(row: Row) -> Run:
    """Reads Megatron-Bridge's tables: Hopper and Blackwell, with and without experts."""
    place = row["system"] or row["model"]
    device = place.split("DGX-")[1].lower()
    shape = named(bridge_model(row))
    numbers = {k: _first(row.get(k)) for k in ("tp", "pp", "cp", "vp", "ep", "fsdp", "microbatch")}
    tp, pp, cp = numbers["tp"], numbers["pp"], numbers["cp"]
    dp = max(row["gpus"] / (tp * pp * cp), 1)
    type = str(row["precision"] or "FP8")
    type = "fp4" if "FP4" in type else "bf16" if "BF16" in type else "fp8"
    if device.startswith("h") and type == "fp4":
        type = "fp8"
    over: Row = {
        **shape,
        **_overlaps(1),
        "flash": 1,
        "dropout": 0,
        "compiled": 1,
        "seq": row["seq"],
    }
    over.update(tp=tp, pp=pp, cp=cp, dp=dp, chunks=numbers["vp"], ep=numbers["ep"])
    over.update(zero=3 if numbers["fsdp"] > 1 else 1, sequence_parallel=float(tp > 1))
    over.update(gpus_per_node=72 if device.startswith("gb") else 8, scatter_gather=1)
    over["graph"] = float(device != "h100")
    over["copies"] = COPIES.index("node")
    chosen = batches(row["global_batch"], dp, numbers["microbatch"])
    engine = "recent" if "experts" in shape else "megatron"
    made = [candidate(device, type, "ndr", engine, **over, **b) for b in chosen]
    return Run(row["id"], "nemo_megatron_bridge", place, made)


def bridge_model(row: Row) -> str:
    """Returns the model's name in a row of Megatron-Bridge's tables, some of which leave it out."""
    return row["model"] if row["system"] else unnamed(row)


def _first(value: object) -> float:
    found = re.match(r"\d+", str(value))
    return max(float(found[0]), 1) if found else 1.0


def torchtitan(row: Row) -> Run:
    """Reads torchtitan: FSDP, alone or with tp, pp and cp, compiled or not."""
    device = "h200" if row.get("gpu") == "H200" else "h100_500w"
    how = f"{row['techniques']} {row.get('precision', '')}"
    type = "fp8" if re.search("fp8|Float8", how) else "bf16"
    layout = {"tp": row["tp"], "pp": row["pp"], "dp": row["fsdp"], "cp": row["cp"], "chunks": 1}
    if "Interleaved" in str(row.get("schedule")):
        layout["chunks"] = 2
    over: Row = {**named(row["model"]), "seq": row["seq"], **layout, "flash": 1, "dropout": 0}
    over.update(recomputed("full" if row["ac"].startswith("full") else "selective"))
    over.update(zero=3, overlap_dp=1, overlap_tp=float("async" in how.lower()))
    over.update(sequence_parallel=1, compiled=float("compile" in how))
    pieces = 1 if row["pp"] == 1 else row["local_batch"]
    over.update(micro_batch=row["local_batch"] / pieces, microbatches=pieces)
    made = [candidate(device, type, "ndr", "fsdp", **over)]
    if "rowwise" in how:  # two scales per product, computed in separate passes
        made[0]["fp8"] = 4.0
    seconds = None
    if "tps_per_gpu" in row:
        batch = row.get("global_batch") or row["local_batch"] * row["fsdp"]
        seconds = batch * row["seq"] / (row["tps_per_gpu"] * row["gpus"])
    return Run(row["id"], "torchtitan", device, made, seconds, row.get("mem_GiB"), True)


def llama3(row: Row) -> Run:
    """Reads Llama 3's paper: 405B in bf16 on H100s with an interleaved schedule."""
    over: Row = {**_shape(row), **_layout(row), **_overlaps(1), "kv_heads": 8, "gated": 1}
    over.update(tied=0, flash=1, zero=1, dropout=0, sequence_parallel=1, scatter_gather=1)
    over["chunks"] = 8
    total = row["batch_per_dp"] * row["dp"]
    chosen = batches(total, row["dp"], 1)
    made = [candidate("h100", "bf16", "ndr", split="ends", **over, **b) for b in chosen]
    return Run(row["id"], "llama3_table4", "405B", made)


def misc(row: Row) -> Run | None:
    """Reads single rows of several sources; unstated settings follow the usual ones of their
    frameworks."""
    name = row.get("model", "")
    if row.get("gpu") == "H100":
        shape = named(name)
        over: Row = {**shape, "seq": 4096 if "7B" in name else 2048, **_layout(row), "flash": 1}
        over.update(dropout=0, overlap_dp=1)
        made = [candidate("h100", "bf16", "ndr", **over, micro_batch=4, microbatches=8)]
        return Run(row["id"], "misc_single_rows", name, made, None)
    old = row.get("gpu") == "V100"
    over = {
        **_shape(row),
        **_layout(row),
        **recomputed("full"),
        "zero": row.get("zero_stage") or 0,
    }
    if old:
        over["seq"] = 1024
    batch = row.get("global_batch", 512)
    micro = row.get("microbatch") or (1 if "MT-NLG" in name else None)
    chosen = batches(batch, over["dp"], micro)
    device, fabric = ("v100", "edr") if old else ("a100", "opa" if "BLOOM" in name else "hdr")
    ends = "ends" if "BLOOM" in name else "even"
    engine = "deepspeed" if "BLOOM" in name or "MT-NLG" in name else "megatron"
    made = [candidate(device, "fp16", fabric, engine, split=ends, **over, **b) for b in chosen]
    return Run(row["id"], "misc_single_rows", name, made, row.get("iter_time_s_derived"))


READERS = {
    "bigscience_bloom_3d": bloom,
    "korthikanti_2022": korthikanti,
    "llama3_table4": llama3,
    "llm_foundry_mpt": mpt,
    "megascale": megascale,
    "megatron_lm_readme": readme,
    "misc_single_rows": misc,
    "mlperf_gpt3": mlperf_gpt3,
    "mlperf_llama405b": mlperf_405b,
    "nanotron_playbook": playbook,
    "narayanan_sc21": narayanan,
    "nemo_launcher_h100_fp8": nemo,
    "nemo_megatron_bridge": bridge,
    "torchtitan": torchtitan,
    "vtrain_multi": vtrain("vtrain_multi"),
    "vtrain_single": vtrain("vtrain_single"),
}
