"""Prints the planner's prices of long sequences: `python -m benchmarks.planner.context_prices`.

For each length and number of context-parallel ranks it prints the best layout of the GPUs, its
step, the memory of the fullest GPU, and how long a layer waits in a micro-batch for the tokens of
other ranks in each style, next to the time of its attention. Steps have the same number of tokens
at every length. These prices have not been compared with measurements on GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.commands.plan import Plan, searched
from parallel3d.errors import UserError
from parallel3d.estimate.fitted_cost import attention, load
from parallel3d.estimate.search import GIB, configure, style_seconds, works
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.topology.assumptions import preset

LENGTHS = tuple(1 << power for power in (15, 17, 18, 19, 20))
HEAD = ("tokens", "cp", "layout", "step s", "MFU %", "GiB", "attention", "gather", "heads", "ring")


def configured(cluster: str, model: str, length: int, gpus: int, tokens: int) -> Config:
    """Returns the configuration of a run with `tokens` per step, in bf16 with the cheapest
    style."""
    machine = ClusterConfig(**preset("cluster", cluster))
    machine.nodes = gpus // (machine.gpus_per_node or 8)
    sizes = preset("model", model) | {"seq_length": length}
    config = Config(cluster=machine, model=ModelConfig(**sizes))
    config.global_batch_size = max(1, tokens // length)
    config.precision.name, config.context_parallel.style = "bf16", "auto"
    return config


def cells(plan: Plan, cp: int) -> Iterator[str]:
    """Yields the row of a plan's best layout, without the length."""
    choice, best = plan.priced.choices[plan.rows[0]], plan.rows[0]
    config = configure(plan.config, choice)
    work = works([choice], plan.sizes, config.global_batch_size)
    waits = style_seconds(config) if cp > 1 else {}
    keys = {"tp": 1, "pp": 1, "dp": 0, "vpp": 1, "schedule": "1f1b", "recompute": "none", "zero": 0}
    typed = (f"{k}={getattr(choice, k)}" for k, v in keys.items() if getattr(choice, k) != v)
    yield str(cp)
    yield f"`{' '.join(typed)}`"
    yield f"{float(plan.priced.seconds[best]):.1f}"
    yield f"{plan.mfu(best):.1f}"
    yield f"{float(plan.priced.memory[best]) / GIB:.0f}"
    yield f"{1e3 * float(np.sum(attention(work, load()))):.3g}"
    least = min(waits.values(), default=0.0)
    for style in HEAD[-3:]:
        shown = f"{1e3 * waits[style]:.3g}" if style in waits else ""
        yield f"**{shown}**" if waits.get(style) == least else shown


def rows(
    cluster: str, model: str, lengths: Sequence[int], gpus: int, tokens: int
) -> Iterator[Sequence[str]]:
    """Yields a row for each length and cp for which a layout fits."""
    for length in lengths:
        config, refused = configured(cluster, model, length, gpus, tokens), []
        for cp in (1 << power for power in range(7)):
            if gpus % cp or length // cp < 8192 > 1 < cp:
                continue
            try:
                plan = searched(dataclasses.replace(config, cp=cp), {"cp": cp}, gpus)
            except UserError:
                refused.append(str(cp))
                continue
            yield (f"{length:,}", *cells(plan, cp))
        if refused:
            yield (f"{length:,}", ", ".join(refused), "fits no layout", *[""] * 7)


def main(words: Sequence[str] | None = None) -> None:
    """Prints a table for each cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", nargs="+", default=["dgx_h100", "gb200_nvl72"])
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--gpus", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8 << 20, help="of a step")
    options = parser.parse_args(words)
    for cluster in options.clusters:
        print(f"\n{options.model}, {options.gpus} GPUs of {cluster}, {options.tokens:,} tokens\n")
        print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
        for row in rows(cluster, options.model, options.lengths, options.gpus, options.tokens):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
