"""Finds the longest sequence that fits into a GPU: `python -m benchmarks.planner.longest`.

It uses the planner's bound of memory (`estimate/memory.py`) for a model and layout given on the
command line; with `--played` it also runs the longest ones as dry runs. No GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.planner.plan_dryrun import Keys, configured, off
from parallel3d.commands.dry_ranks import find_facts
from parallel3d.estimate.memory import host_memory, peak_stage
from parallel3d.estimate.search import planned
from parallel3d.run_config import Config

GIB = 1 << 30
STEP = 8192  # tokens
PARTS, CHUNK = "[norm,attention,mlp]", 8192
WAYS: tuple[Keys, ...] = (
    {},
    {"recompute": "selective"},
    {"recompute": PARTS},
    {"recompute": PARTS, "mlp_chunk_tokens": CHUNK},
    {"recompute": "full"},
    {"offload_layers": [1000]},
    {"recompute": "selective", "offload_layers": [1000]},
    {"recompute": "full", "offload_layers": [1000]},
    {"recompute": PARTS, "offload_layers": [1000]},
    {"recompute": PARTS, "mlp_chunk_tokens": CHUNK, "offload_layers": [1000]},
)


def of_length(keys: Keys, tokens: int) -> Config:
    """Returns the configuration with sequences of `tokens`; 1000 layers stand for all."""
    config = configured(keys | {"offload_layers": None})
    away = keys.get("offload_layers") and [config.model.num_layers]
    model = replace(config.model, seq_length=tokens)
    model.max_position_embeddings = max(tokens, model.max_position_embeddings or 0)
    return replace(config, model=model, offload_layers=away)


def longest(keys: Keys, memory: float) -> int:
    """Returns the largest number of tokens, a multiple of STEP, whose fullest rank needs at most
    `memory` bytes."""
    few, many = 0, 1
    while peak_stage(planned(of_length(keys, many * STEP)))[1].total <= memory:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        fits = peak_stage(planned(of_length(keys, middle * STEP)))[1].total <= memory
        few, many = (middle, many) if fits else (few, middle)
    return few * STEP


def row(keys: Keys, memory: float, plays: bool) -> str:
    tokens = longest(keys, memory)
    config = of_length(keys, max(tokens, STEP))
    more = of_length(keys, 2 * max(tokens, STEP))
    slope = peak_stage(planned(more))[1].total - peak_stage(planned(config))[1].total
    host = max(host_memory(config, index) for index in range(config.pp))
    cells = [f"{tokens:,}", f"{max(tokens, STEP) / slope * GIB:,.0f}", f"{host / GIB:.0f}"]
    if plays:
        index, said = peak_stage(planned(config))
        rank = index * config.tp * (config.dp or 1) * config.cp
        found = find_facts(config, rank)
        cells.append(f"{off(found['peak_bytes'], said.total):+.1f}")
    return " | ".join(cells)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3_8b")
    for name, default in (("tp", 8), ("pp", 1), ("cp", 1), ("microbatches", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--memory", type=float, default=81.5, help="GB of a GPU's memory for tensors"
    )
    parser.add_argument("--played", action="store_true")
    options = parser.parse_args(words)
    base = {"model": options.model, "tp": options.tp, "pp": options.pp, "cp": options.cp, "dp": 1}
    base |= {"sp": options.tp > 1, "micro_batch_size": 1, "global_batch_size": options.microbatches}
    played = " | dry run %" * options.played
    print(f"| | longest sequence | tokens a GiB | pinned GiB a rank{played} |")
    print("|---|---:|---:|---:|" + "---:|" * options.played)
    for way in WAYS:
        named = {k: "all" if k == "offload_layers" else v for k, v in way.items()}
        said = " ".join(f"{k}={v}" for k, v in named.items()) or "recompute=none"
        print(f"| `{said}` | {row(base | way, 1e9 * options.memory, options.played)} |", flush=True)


if __name__ == "__main__":
    main()
