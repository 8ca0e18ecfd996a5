"""Compares the planner's figures with `dryrun`'s: `python -m benchmarks.planner.plan_dryrun`.

It draws models from tiny to medium, with experts, windows, uneven and frozen stages, in random
layouts, schedules and settings, runs one rank of each on tensors without values, and prints a row
for each: the figure of the dry run, and the planner's relative differences. The planner's memory
(`estimate/memory.py`) is a bound, which is hardly ever below the dry run's. No GPU is needed; a
row takes about a second of one core, and a new model some seconds more for its traces, which
`--sent` does without.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallel3d.blueprint.collectives import wire_bytes
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.sizes import STYLES
from parallel3d.commands.dry_ranks import find_facts
from parallel3d.commands.options import CommandConfig
from parallel3d.dryrun.keys import DryrunConfig
from parallel3d.errors import UserError
from parallel3d.estimate.memory import host_memory, peak_memory
from parallel3d.estimate.search import planned
from parallel3d.estimate.traffic import group_size, transfers
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import layout_of
from parallel3d.run_config import check_config
from parallel3d.schedules.schedule import LOOPED, V_SHAPED
from parallel3d.topology.assumptions import preset

PRESETS = ("llama_1b", "llama3_8b", "gpt2_124m", "qwen3_8b", "qwen2_5_0_5b", "gemma3_1b")
LAYOUTS = (
    *((1, 1), (1, 1), (1, 2), (1, 2), (1, 4), (1, 4)),
    *((2, 1), (2, 2), (2, 4), (4, 1), (4, 2)),
)  # tp, pp
SCHEDULES = ("1f1b", "gpipe", "zb_h1", "interleaved", "interleaved_zb", "zbv", "v_half")
RECOMPUTE = (
    *("none", "none", "selective", "full", "full"),
    *("[norm]", "[norm,activation]", "[mlp]", "[norm,attention,mlp]"),
)
FROZEN = (
    *(["embedding.*"], ["embedding.*", "layers.0.*"], ["layers.[01].*", "embedding.*"]),
    *(["*.attention.*"], ["*norm*"], ["*.mlp.*"], ["head.*", "final_norm.*"]),
)
STATES = ("parameters", "gradients", "masters", "optimizer")
NAMES = ("memory", "states", "bytes sent", "collectives", "pinned memory")
SENT = ("bytes sent", "collectives")  # figures that need no traces
EVEN = {"states": 1.0, "bytes sent": 0.0, "collectives": 0.0, "pinned memory": 3.0}  # per cent
WORST = 8  # number of cases that are named at either end
ROUNDED = 1e-9  # in per cent; both are sums of floats
Keys = dict[str, Any]


class Compared(NamedTuple):
    """Figures of a case.

    Attributes:
        pairs: (bytes or calls in the dry run, those according to the planner), by `NAMES`.
        peak: bytes of memory in the dry run.
        played, said: the phases of the peak in the dry run, and according to the planner.
    """

    pairs: dict[str, tuple[float, float]]
    peak: float
    played: str
    said: str


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
    config.precision.name = keys.pop("precision", "bf16")
    config.schedule.name = keys.pop("schedule", "1f1b")
    config.schedule.layers_per_stage = keys.pop("stages", None)
    config.context_parallel.style = keys.pop("style", "gather")
    config.context_parallel.states = keys.pop("states", "auto")
    config.optim.name = keys.pop("optim", "adamw")
    config.optim.freeze = keys.pop("freeze", None)
    config.optim.state = keys.pop("state", "fp32")
    config.optim.ema_decay = keys.pop("ema_decay", None)
    config.ddp.reduce_every_microbatch = keys.pop("every", None)
    return check_config(dataclasses.replace(config, **keys), own_samples=True)


class CaseSampler:
    """Draws cases without end, each of which can run; equal seeds give equal cases.

    Attributes:
        refused: number of drawn cases so far that cannot run.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.refused = 0

    def __iter__(self) -> Iterator[Keys]:
        while True:
            keys = self._keys()
            try:
                planned(configured(keys)).stages  # noqa: B018  # refuses empty stages
            except UserError:
                self.refused += 1
                continue
            yield keys

    def _keys(self) -> Keys:
        chance = self.chance
        tp, pp = chance.choice(LAYOUTS)
        schedule = chance.choice(SCHEDULES if pp > 1 else ("1f1b",))
        vpp = 2 if schedule in (*V_SHAPED, *LOOPED) else 1
        dp, cp = chance.choice((1, 2, 2, 4, 8)), chance.choice((1, 1, 1, 2, 4))
        batch, stages = chance.choice((1, 1, 2)), pp * vpp
        keys: Keys = self._model() | {
            "layers": chance.choice((1, 2, 2, 3)) * stages, "tp": tp, "pp": pp, "vpp": vpp,
            "dp": dp, "cp": cp, "style": chance.choice(STYLES if cp > 1 else STYLES[:1]),
            "sp": chance.random() < 0.6 and tp > 1, "schedule": schedule,
            "zero": chance.choice((0, 1, 2, 2, 3, 3)) if dp * cp > 1 else 0,
            "recompute": chance.choice(RECOMPUTE), "micro_batch_size": batch,
            "global_batch_size": batch * dp * pp * chance.choice((1, 2, 3)),
            "rank": chance.choice((0, pp // 2, pp - 1)) * tp * cp * dp,
            "precision": chance.choice(("bf16", "bf16", "bf16", "bf16", "fp32")),
        }  # fmt: skip
        if keys["zero"] > 1:
            keys["every"] = chance.choice((None, True, False))  # ddp.reduce_every_microbatch
        if chance.random() < 0.15:
            keys["optim"] = "sgd"
        if chance.random() < 0.2:
            keys["state"] = "bf16"
        if chance.random() < 0.1:
            keys["ema_decay"] = 0.9
        if keys["recompute"] != "none" and chance.random() < 0.3:
            keys["recompute_layers"] = [1]
        if stages > 1 and chance.random() < 0.25:
            keys["stages"] = self._stages(keys["layers"], stages)
        if chance.random() < 0.2:
            keys["freeze"] = chance.choice(FROZEN)
        if chance.random() < 0.35:
            keys |= self._experts(keys)
        return keys

    def _model(self) -> Keys:
        """Returns a preset, or sizes from tiny to medium, perhaps with windows."""
        chance = self.chance
        dialect: Keys = {}
        if chance.random() < 0.25:
            dialect |= {"layer_types": chance.choice((["sliding", "full"], ["sliding"]))}
            dialect |= {"sliding_window": chance.choice((64, 256, 1024))}
        if chance.random() < 0.4:
            return {"model": chance.choice(PRESETS), "dialect": dialect}
        head, heads = chance.choice((32, 64, 128)), chance.choice((4, 8, 16))
        dialect |= {
            "hidden_size": head * heads, "num_attention_heads": heads, "head_dim": head,
            "num_query_groups": chance.choice((None, 2, 4)),
            "ffn_hidden_size": chance.choice((2, 3, 4)) * head * heads,
            "vocab_size": chance.choice((512, 8192, 32000, 50257)),
            "seq_length": chance.choice((256, 512, 1024, 2048, 4096)),
            "max_position_embeddings": 4096,
            "norm": chance.choice(("rmsnorm", "layernorm")),
            "norm_position": chance.choice(("before", "before", "before", "both", "after")),
            "activation": chance.choice(("swiglu", "gelu")), "qk_norm": chance.random() < 0.3,
            "bias": chance.random() < 0.3, "tie_embeddings": chance.random() < 0.5,
        }  # fmt: skip
        return {"model": "llama_tiny", "dialect": dialect}

    def _stages(self, layers: int, stages: int) -> list[int]:
        """Returns numbers of layers of stages, at least one each."""
        cuts = sorted(self.chance.choices(range(layers - stages + 1), k=stages - 1))
        return [1 + end - begin for begin, end in pairwise([0, *cuts, layers - stages])]

    def _experts(self, keys: Keys) -> Keys:
        """Returns keys of random experts in a layout; they may contradict each other."""
        chance = self.chance
        count, chosen = chance.choice(((8, 2), (16, 4), (64, 8)))
        sigmoid = chance.random() < 0.4
        model: Keys = {
            "num_experts": count, "experts_per_token": chosen,
            "expert_ffn_size": chance.choice((256, 512, 768, 1024)),
            "shared_expert_size": chance.choice((0, 0, 1024)),
            "router_score": "sigmoid" if sigmoid else "softmax",
            "router_bias": sigmoid, "router_normalize": chance.random() < 0.7,
            "router_logit_bias": chance.random() < 0.3, "expert_bias": chance.random() < 0.3,
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
        return {
            "experts": model,
            "moe": moe,
            "ep": chance.choice((1, 2, 4, 8)),
            "sp": keys["tp"] > 1,
        }


def compare(keys: Keys, only_sent: bool = False) -> Compared:
    """Returns the figures of the dry run and of the planner; if `only_sent`, those in `SENT`."""
    config = configured(keys)
    facts, layout = find_facts(config, config.dryrun.rank), layout_of(config)
    where = layout.coordinates(facts["rank"])
    shard = where.dp * layout.cp + where.cp
    found = transfers(config, layout, where.pp, shard)
    sent = sum(wire_bytes(t, group_size(t.dim, layout)) for t in found)
    played = sum(group["bytes_sent"] for group in facts["groups"].values())
    # Messages between stages are left out. Two stages that are not the whole world share their
    # communicator with the tied table. A rank of a ring receives as often as it sends.
    like_pp = {"pp"} | ({"embedding"} if layout.pp == 2 < layout.world_size else set())
    calls = sum(t.count * (1 + (t.op == "send_recv")) for t in found if t.dim not in like_pp)
    counted = sum(group["calls"] for name, group in facts["groups"].items() if name != "pp")
    pairs = {"bytes sent": (played, sent), "collectives": (counted, calls)}
    peak, phase = facts["peak_bytes"], facts["peak_in"]
    if only_sent:
        return Compared(pairs, peak, phase, "")
    said = peak_memory(config, where.pp)
    pairs |= {
        "memory": (peak, said.total),
        "states": (sum(facts["live_bytes"][name] for name in STATES), said.states),
        "pinned memory": (facts["host_bytes"], host_memory(config, where.pp)),
    }
    return Compared(pairs, peak, phase, said.phase)


def off(played: float, said: float) -> float:
    """Returns the error of the planner in per cent."""
    return 100 * (said / played - 1) if played else 0.0 if not said else float("inf")


def _words(keys: Keys) -> str:
    plain = {"sp": False, "vpp": 1, "zero": 0, "recompute": "none", "dp": 1, "rank": 0}
    plain |= {"cp": 1, "style": "gather", "every": None, "pp": 1, "tp": 1, "precision": "bf16"}
    plain |= {"schedule": "1f1b", "dialect": {}}
    words = [f"{k}={v}" for k, v in keys.items() if k != "model" and plain.get(k) != v]
    return " ".join(words)


def main(words: Sequence[str] | None = None) -> int:
    """Prints the tables. Returns 0 if in all cases memory is at most `--below` per cent below and
    `--above` above, and collectives and bytes sent are equal, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=60, metavar="N", help="cases to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--below", type=float, default=1.0, help="limit of memory, per cent")
    parser.add_argument("--above", type=float, default=12.0, help="limit of memory, per cent")
    parser.add_argument("--case", action="append", default=[], help="run one case, given as JSON")
    parser.add_argument("--sent", action="store_true", help="compare only bytes and collectives")
    parser.add_argument("--json", help="file for the cases beyond the limits, a JSON line each")
    options = parser.parse_args(words)
    began, sampler = time.monotonic(), CaseSampler(options.seed)
    given = [json.loads(case) for case in options.case]
    cases = given or islice(sampler, options.random)
    names = SENT if options.sent else NAMES
    titles = "model", "layout", "GB", *(f"{name} %" for name in names), "peaks in, by plan"
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    rows: list[tuple[list[float], Keys, str]] = []
    for keys in cases:
        found = compare(keys, options.sent)
        errors = [off(*found.pairs[name]) for name in names]
        cells = [keys["model"], _words(keys), f"{found.peak / 1e9:.2f}"]
        cells += [
            *(f"{error:+.2f}" for error in errors),
            ", ".join(filter(None, (found.played, found.said))),
        ]
        rows.append((errors, keys, f"| {' | '.join(cells)} |"))
        print(rows[-1][-1], flush=True)
    table = np.array([errors for errors, _, _ in rows])
    limited = {name: (-most, most) for name, most in EVEN.items()}
    limited["memory"] = -options.below, options.above
    limits = np.array([limited[name] for name in names])
    least, most = (limits + np.array([-ROUNDED, ROUNDED])).T
    within = (least <= table) & (table <= most)
    worst = sorted(rows, key=lambda row: row[0][0])
    few = max(0, min(WORST, len(rows) // 4))
    ends = ("lowest bounds", worst[:few]), ("highest bounds", worst[::-1][:few])
    for title, listed in () if options.sent else ends:
        print("", title, "", *(line for _, _, line in listed), sep="\n")
    print()
    for name, (low, high), column, inside in zip(names, limits, table.T, within.T, strict=True):
        print(
            f"{name}: median {np.median(column):+.2f} %, from {column.min():+.2f} to "
            f"{column.max():+.2f} %, 19 of 20 below {np.quantile(column, 0.95):+.2f} %, "
            f"{int(inside.sum())} of {len(column)} from {low:+g} to {high:+g} %"
        )
    print(f"{sampler.refused} drawn cases refused; {time.monotonic() - began:.0f} s")
    if options.json:
        beyond = [
            keys for (_, keys, _), inside in zip(rows, within, strict=True) if not all(inside)
        ]
        Path(options.json).write_text("".join(json.dumps(keys) + "\n" for keys in beyond))
    return int(not within.all())


if __name__ == "__main__":
    sys.exit(main())
