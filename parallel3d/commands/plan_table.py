"""The table that `parallel3d plan` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel3d.config.schema import Config
from parallel3d.plan.memory import GIB
from parallel3d.plan.reasons import reason
from parallel3d.plan.search import Priced, best
from parallel3d.sizes.flops import flops_per_token

ROWS = 10
UNMEASURED = (
    "MFU is an upper bound and the step's time a lower one: prices are datasheets' and others' "
    "published runs, and no GPU has been measured against them."
)


def caution(config: Config) -> str:
    """Returns what to say of a plan's times; nothing where the machine itself was measured."""
    return "" if config.cluster.file else UNMEASURED


def table(config: Config, priced: Priced, gpus: int, sizes: Mapping[str, float]) -> list[str]:
    """The lines that are printed."""
    rows = best(priced, ROWS)
    where = f"{gpus} GPUs of {config.cluster.name}"
    if config.cluster.file is not None:
        where = f"{gpus} ranks of the machine in {config.cluster.file}"
    lines = [
        f"{config.model.name} on {where}, {config.precision.name}, "
        f"{config.global_batch_size} sequences of {config.model.seq_length} a step: "
        f"{len(priced.choices)} layouts, {len(priced.order)} fit",
        "",
        "  #   tp  pp vpp    dp  mb schedule       recompute         "
        "zero  step s   MFU %  GiB  why",
    ]
    for place, i in enumerate(rows, 1):
        c, seconds = priced.choices[i], float(priced.seconds[i])
        held = float(priced.memory.total[i]) / GIB
        why = reason(priced, i, rows[0], int(sizes["gpus_per_node"]))
        lines.append(
            f"{place:3d} {c.tp:4d} {c.pp:3d} {c.vpp:3d} {c.dp:5d} {c.micro_batch:3d} "
            f"{c.schedule:14s} {c.recompute:17s} {c.zero:4d} {seconds:7.3g} "
            f"{mfu(config, sizes, gpus, seconds):7.1f} {held:4.{2 if held < 1 else 0}f}  {why}"
        )
    return [*lines, *filter(None, [caution(config)]), "", command(priced, rows[0])]


def mfu(config: Config, sizes: Mapping[str, float], gpus: int, seconds: float) -> float:
    """Useful work of the peak, per cent."""
    tokens = config.global_batch_size * config.model.seq_length
    useful = tokens * flops_per_token(config.model, config.model.seq_length)
    return 100 * useful / (seconds * gpus * sizes["peak"])


def command(priced: Priced, index: int) -> str:
    """What to type for a layout."""
    c: Any = priced.choices[index]
    words = [f"tp={c.tp}", f"pp={c.pp}", f"dp={c.dp}", f"micro_batch_size={c.micro_batch}"]
    words += [f"schedule={c.schedule}"] * (c.pp > 1) + [f"vpp={c.vpp}"] * (c.vpp > 1)
    words += ["sp=true"] * (c.tp > 1) + [f"zero={c.zero}"] * (c.zero > 0)
    words += [f"recompute={c.recompute}"] * (c.recompute != "none")
    return "parallel3d train … " + " ".join(words)
