"""Finds layouts of a user's own model, each by a dry run (`plan` from the model's script).

Only its code knows what a part of such a model does, so no formula prices it: memory and
computation of a layout are those that its dry run counts. Communication is priced by the bytes of
the dry run over the links of the cluster, as if nothing hid it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from parallel3d.blueprint.cluster import cluster_from_config
from parallel3d.blueprint.collectives import Transfer
from parallel3d.commands.dry_ranks import find_facts
from parallel3d.errors import UserError, first_line
from parallel3d.estimate.network import price_step
from parallel3d.estimate.search import GIB, Fixed, divisors
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config, check_config
from parallel3d.text import aligned
from parallel3d.topology.search import place

if TYPE_CHECKING:
    from parallel3d.optim.own import OptimizerFactory

ROWS = 10
MOST_TP = 8
MOST_S = 300.0  # seconds after which no further dry run begins
NOTE = (
    "Memory and computation are those of dry runs, at shares of the datasheet's peaks; "
    "communication has their bytes over the cluster's links, as if nothing hid it."
)


@dataclass(frozen=True)
class OwnRow:
    """A layout, the seconds of a step, how many of them are communication, and its memory.

    `bytes` includes the memory that must stay free.
    """

    config: Config
    seconds: float
    sent: float
    bytes: float
    fits: bool

    @property
    def cells(self) -> list[str]:
        of = self.config
        repeated = str(of.recompute)
        sizes = (of.tp, of.pp, of.dp, of.micro_batch_size, of.schedule.name, repeated, of.zero)
        gib = self.bytes / GIB
        memory = f"{gib:.2f}" if gib < 1 else f"{gib:.0f}"
        figures = f"{self.seconds:.3g}", f"{self.sent / self.seconds:.0%}", memory
        return [*map(str, sizes), *figures, "" if self.fits else "does not fit"]


HEAD = ["tp", "pp", "dp", "mb", "schedule", "recompute", "zero", "step s", "sent", "GiB", ""]


def plan_of_own_model(
    config: Config,
    fixed: Fixed,
    gpus: int,
    reserve_gb: float,
    optimizer: OptimizerFactory | None,
    tell: Callable[[str], None],
) -> str:
    """Returns the best layouts as a table, with the command line of the first.

    `fixed` has the values that the user gave. Raises UserError if no layout is possible.
    """
    rows: list[OwnRow] = []
    refused: dict[str, str] = {}
    began, left = time.monotonic(), 0
    for sizes in layouts_of(config, fixed, gpus):
        name = " ".join(f"{key}={value}" for key, value in sizes.items())
        if time.monotonic() - began > MOST_S:
            left += 1
            continue
        tell(f"a dry run of {name}")
        try:
            rows.append(_first_that_fits(config, sizes, fixed, reserve_gb, optimizer))
        except UserError as error:
            refused[name] = str(error)
        except Exception as error:  # the model's code cannot be built or run in this layout
            notes = " ".join(getattr(error, "__notes__", ()))
            refused[name] = f"{type(error).__name__}: {first_line(error)}. {notes}".strip()
    if not rows:
        why = next(iter(refused.items()), ("", f"no layout of {gpus} GPUs divides the batch"))
        raise UserError(f"{config.model.name} has no layout on {gpus} GPUs: {' '.join(why)}")
    best = sorted(rows, key=lambda row: (not row.fits, row.seconds))
    fitting = sum(row.fits for row in rows)
    title = (
        f"{config.model.name} on {gpus:,} GPUs of {config.cluster.name}, {config.precision.name}, "
        f"{config.global_batch_size} samples a step: {len(rows)} layouts, {fitting} fit"
    )
    shown = [HEAD, *(row.cells for row in best[:ROWS])]
    lines = [title, "", *(f" {line}" for line in aligned(shown, ">>>><<>>>><")), NOTE]
    if left:
        lines.append(f"{left} layouts were not tried within {MOST_S:g} s; give tp or pp.")
    lines += [f"Not possible: {name}: {why}" for name, why in [*refused.items()][:3]]
    return "\n".join([*lines, "", f"python my_train.py {_words(best[0].config)}"])


def layouts_of(config: Config, fixed: Fixed, gpus: int) -> Iterator[dict[str, int]]:
    """Yields the sizes tp, pp and dp that divide the GPUs, the layers and the batch."""
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            dp = gpus // (tp * pp)
            sizes = {"tp": tp, "pp": pp, "dp": dp}
            if tp > min(MOST_TP, config.cluster.gpus_per_node or MOST_TP):
                continue
            if pp > config.model.num_layers or any(fixed.get(k, v) != v for k, v in sizes.items()):
                continue
            if config.global_batch_size % (config.micro_batch_size * dp) == 0:
                yield sizes


def _first_that_fits(
    config: Config,
    sizes: Mapping[str, int],
    fixed: Fixed,
    reserve_gb: float,
    optimizer: OptimizerFactory | None,
) -> OwnRow:
    """Makes dry runs with less and less memory, until one fits; returns the last."""
    usual = {"zero": 1 if sizes["dp"] > 1 else 0, "recompute": "none"}
    spared = [usual, usual | {"recompute": "full"}]
    if sizes["dp"] > 1:
        spared.append({"zero": 3, "recompute": "full"})
    kept = {key: fixed[key] for key in usual if key in fixed}
    row: OwnRow | None = None
    for how in {str(each | kept): each | kept for each in spared}.values():
        changed: dict[str, Any] = {**sizes, **how}
        row = _row(
            check_config(replace(config, **changed), own_samples=True), reserve_gb, optimizer
        )
        if row.fits:
            break
    assert row is not None
    return row


def _row(config: Config, reserve_gb: float, optimizer: OptimizerFactory | None) -> OwnRow:
    facts = find_facts(config, None, reserve_gb, optimizer)
    layout = blueprint_of(config).looped_layout
    cluster = cluster_from_config(config.cluster, layout.world_size)
    sent = [
        Transfer(
            name, "send_recv", int(group["bytes_sent"] / group["calls"]), int(group["calls"]), ""
        )
        for name, group in facts["groups"].items()
        if group["calls"] and group["bytes_sent"]
    ]
    seconds = 0.0
    if sent:
        seconds = float(price_step(place("default", cluster, layout, sent), sent).seconds)
    total = facts["peak_bytes"] + 1e9 * reserve_gb
    return OwnRow(config, facts["step_seconds"] + seconds, seconds, total, facts["fits"])


def _words(config: Config) -> str:
    """Returns a layout as words of a command line."""
    words = [f"{key}={getattr(config, key)}" for key in ("tp", "pp", "dp", "zero")]
    if str(config.recompute) != "none":
        words.append(f"recompute={config.recompute}")
    return " ".join(words)
