"""Compares the planner's figures with `dryrun`'s: `python -m benchmarks.planner.plan_dryrun`.

It samples presets × layouts × schedules × zero × recompute, runs one rank of each on tensors
without values, and prints a row for each: the figures of the dry run, and the planner's relative
differences. The planner's memory (`estimate/memory.py`) is a bound, which is hardly ever below the
dry run's. Models keep their widths and get `--layers` layers per stage, since the time of a dry run
grows with its launches. No GPU is needed; a row takes about a second of one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from parallel3d.blueprint.collectives import wire_bytes
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.sizes import STYLES
from parallel3d.commands.dry_ranks import find_facts
from parallel3d.commands.options import CommandConfig
from parallel3d.dryrun.keys import DryrunConfig
from parallel3d.errors import UserError
from parallel3d.estimate.memory import host_memory, peak_memory
from parallel3d.estimate.traffic import group_size, transfers
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import layout_of
from parallel3d.run_config import check_config
from parallel3d.schedules.schedule import LOOPED, V_SHAPED
from parallel3d.topology.assumptions import preset

PRESETS = (
    *("llama_1b", "llama3_8b", "llama3_70b", "gpt2_124m", "gpt3_175b"),
    *("qwen3_8b", "qwen2_5_0_5b", "megatron_1t"),
)
LAYOUTS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (4, 4), (8, 2))  # tp, pp
SCHEDULES = ("1f1b", "gpipe", "zb_h1", "interleaved", "interleaved_zb", "zbv", "v_half")
RECOMPUTE = ("none", "selective", "full", "[norm,activation]", "[mlp]", "[norm,attention,mlp]")
NAMES = ("memory", "bytes sent", "pinned memory")
ROUNDED = 1e-9  # in per cent; both are sums of floats
Keys = dict[str, Any]


def configured(keys: Keys) -> CommandConfig:
    """Returns the checked configuration of a case. Raises UserError if it cannot run."""
    keys = dict(keys)
    model = preset("model", keys.pop("model"))
    model["num_layers"] = keys.pop("layers", model["num_layers"])
    for key in {"norm", "seq_length"} & {*keys}:
        model[key] = keys.pop(key)
    model |= keys.pop("experts", {}) | keys.pop("dialect", {})
    config = CommandConfig(
        cluster=ClusterConfig(**preset("cluster", "dgx_h100")),
        model=ModelConfig(**model),
        dryrun=DryrunConfig(rank=keys.pop("rank", 0)),
        moe=ExpertsConfig(**keys.pop("moe", {})),
    )
    config.precision.name = "bf16"
    config.schedule.name = keys.pop("schedule", "1f1b")
    config.context_parallel.style = keys.pop("style", "gather")
    config.optim.state = keys.pop("state", "fp32")
    config.optim.ema_decay = keys.pop("ema_decay", None)
    config.ddp.reduce_every_microbatch = keys.pop("every", None)
    return check_config(dataclasses.replace(config, **keys), own_samples=True)


def sample(seed: int, layers: int, experts: bool = False) -> Iterator[Keys]:
    """Yields cases without end, each of which can run; equal seeds give equal cases.

    `experts`: only models with experts in place of MLPs.
    """
    chance, more = random.Random(seed), random.Random(seed)
    while True:
        tp, pp = chance.choice(LAYOUTS)
        schedule = chance.choice(SCHEDULES if pp > 1 else ("1f1b",))
        vpp = 2 if schedule in (*V_SHAPED, *LOOPED) else 1
        dp, batch, cp = (
            chance.choice((1, 2, 8)),
            chance.choice((1, 1, 2)),
            chance.choice((1, 1, 2, 4)),
        )
        count = pp * chance.choice((1, 2, 3))
        keys: Keys = {
            "model": chance.choice(PRESETS), "layers": layers * pp * vpp, "tp": tp, "pp": pp,
            "vpp": vpp, "dp": dp, "cp": cp,
            "style": chance.choice(STYLES if cp > 1 else STYLES[:1]),
            "sp": chance.random() < 0.6 and tp > 1, "schedule": schedule,
            "zero": chance.choice((0, 1, 2, 3)) if dp * cp > 1 else 0,
            "recompute": chance.choice(RECOMPUTE), "micro_batch_size": batch,
            "global_batch_size": batch * dp * count,
            "rank": chance.choice((0, pp // 2, pp - 1)) * tp * cp * dp,
        }  # fmt: skip
        if keys["zero"] > 1:
            keys["every"] = chance.choice((None, True, False))  # ddp.reduce_every_microbatch
        if experts:
            keys |= mixture(more, keys)
        try:
            configured(keys)
        except UserError:
            continue
        yield keys


def mixture(chance: random.Random, keys: Keys) -> Keys:
    """Returns keys of random experts in a layout; they may contradict each other."""
    count, chosen = chance.choice(((8, 2), (16, 4), (64, 8)))
    sigmoid = chance.random() < 0.4
    model: Keys = {
        "num_experts": count, "experts_per_token": chosen, "vocab_size": 8192,
        "expert_ffn_size": chance.choice((512, 768, 1024)),
        "shared_expert_size": chance.choice((0, 0, 1024)),
        "router_score": "sigmoid" if sigmoid else "softmax",
        "router_bias": sigmoid, "router_normalize": chance.random() < 0.7,
        "dense_layers": chance.choice(([], [], [0])),
    }  # fmt: skip
    if model["shared_expert_size"]:
        model["shared_expert_gate"] = chance.random() < 0.5
    if chance.random() < 0.2:
        model |= {"router_groups": 4, "router_top_groups": 2}
    moe = {
        "dispatch": chance.choice(("auto", "gather", "all_to_all")),
        "aux_loss": chance.choice((0.0, 0.01)),
        "z_loss": chance.choice((0.0, 0.001)),
    }
    return {"experts": model, "moe": moe, "ep": chance.choice((1, 2, 4, 8)), "sp": keys["tp"] > 1}


def compare(keys: Keys) -> dict[str, tuple[float, float]]:
    """Returns, by `NAMES`, the figures of the dry run and of the planner in bytes."""
    config = configured(keys)
    facts, layout = find_facts(config, config.dryrun.rank), layout_of(config)
    where = layout.coordinates(facts["rank"])
    shard = where.dp * layout.cp + where.cp
    played = (facts["peak_bytes"], _sum(facts["groups"]), facts["host_bytes"])
    sent = sum(
        wire_bytes(t, group_size(t.dim, layout)) for t in transfers(config, layout, where.pp, shard)
    )
    said = (
        peak_memory(config, where.pp).total,
        sent,
        host_memory(config, where.pp),
    )
    return dict(zip(NAMES, zip(played, said, strict=True), strict=True))


def _sum(groups: dict[str, dict[str, float]]) -> float:
    return sum(group["bytes_sent"] for group in groups.values())


def off(played: float, said: float) -> float:
    """Returns the error of the planner in per cent."""
    return 100 * (said / played - 1) if played else 0.0 if not said else float("inf")


def _row(keys: Keys) -> tuple[str, list[float]]:
    found = compare(keys)
    errors = [off(*found[name]) for name in NAMES]
    plain = {"sp": False, "vpp": 1, "zero": 0, "recompute": "none", "dp": 1, "rank": 0}
    plain |= {"cp": 1, "style": "gather", "every": None}
    words = [f"{k}={v}" for k, v in keys.items() if plain.get(k) != v and k != "model"]
    played = f"{found['memory'][0] / 1e9:.2f}"
    cells = " | ".join(f"{error:+.2f}" for error in errors)
    return f"| {keys['model']} | {' '.join(words)} | {played} | {cells} |", errors


def main(words: Sequence[str] | None = None) -> int:
    """Prints the table. Returns 0 if in all cases memory is at most `--below` per cent below and
    `--above` above, and bytes sent are equal, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2, help="layers a stage")
    parser.add_argument("--experts", action="store_true", help="models with experts")
    parser.add_argument("--below", type=float, default=3.0, help="limit of memory, per cent")
    parser.add_argument("--above", type=float, default=12.0, help="limit of memory, per cent")
    parser.add_argument("--case", action="append", default=[], help="run one case, given as JSON")
    options = parser.parse_args(words)
    began = time.monotonic()
    found = sample(options.seed, options.layers, options.experts)
    cases = [json.loads(case) for case in options.case]
    cases = cases or [next(found) for _ in range(options.cases)]
    print("| model | layout | GB | memory % | bytes sent % | pinned % |")
    print("|---|---|---|---|---|---|")
    errors = []
    for keys in cases:
        row, off_by = _row(keys)
        errors.append(off_by)
        print(row, flush=True)
    table = np.array(errors)
    print()
    even = [0.0, 3.0]  # limits of all figures but memory
    limits = np.array([[-options.below, options.above], *([-n, n] for n in even)])
    least, most = (limits + np.array([-ROUNDED, ROUNDED])).T
    within = (least <= table) & (table <= most)
    for name, (low, high), column, inside in zip(NAMES, limits, table.T, within.T, strict=True):
        print(
            f"{name}: median {np.median(column):+.2f} %, from {column.min():+.2f} to "
            f"{column.max():+.2f} %, {int(inside.sum())} of {len(column)} from {low:+g} to "
            f"{high:+g} %"
        )
    print(f"{time.monotonic() - began:.0f} s")
    return int(not within.all())


if __name__ == "__main__":
    sys.exit(main())
