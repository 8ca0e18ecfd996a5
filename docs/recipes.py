"""Prints the table of docs/recipes.md: `python docs/recipes.py`, some minutes of one core.

It makes a dry run of each recipe that names GPUs: `parallel3d dryrun experiment=NAME`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from parallel3d.cli.overrides import presets
from parallel3d.commands.dry_ranks import find_facts
from parallel3d.commands.recipes import GROUP, recipe
from parallel3d.run_config import Config
from parallel3d.text import percent, si, three_digits

HEAD = (
    *("recipe", "GPUs", "tokens a step", "peak GB", "of", "fits"),
    *("step s", "tokens/s", "MFU"),
)


def for_gpus() -> list[str]:
    """Lists the recipes whose cluster has GPUs."""
    return [name for name in presets(GROUP) if recipe(name).cluster.gpu is not None]


def counted(name: str, config: Config) -> list[str]:
    """Returns the cells that need no dry run."""
    tokens = config.global_batch_size * config.model.seq_length
    return [f"`{name}`", f"{config.world_size} × {config.cluster.gpu}", f"{tokens:,}"]


def estimated(facts: dict[str, Any]) -> list[str]:
    """Returns the cells of a dry run."""
    usable = facts["gpu_memory_bytes"] - facts["reserve_bytes"]
    return [
        *(three_digits(facts["peak_bytes"] / 1e9), three_digits(usable / 1e9)),
        *("yes" if facts["fits"] else "no", three_digits(facts["step_seconds"])),
        *(si(facts["tokens_per_second"]).strip(), percent(facts["mfu"])),
    ]


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table() -> Iterator[str]:
    """Yields the lines of the table."""
    yield line(list(HEAD))
    yield line(["---"] * len(HEAD))
    for name in for_gpus():
        print(name, file=sys.stderr, flush=True)
        config = recipe(name)
        yield line(counted(name, config) + estimated(find_facts(config)))


if __name__ == "__main__":
    for row in table():
        print(row, flush=True)
