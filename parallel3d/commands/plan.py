"""`parallel3d plan`: the ten best layouts of a model on a cluster, before anything is launched.

Nothing here imports torch. Keys that are typed hold (tp, pp, vpp, dp, micro_batch_size, schedule,
recompute, zero); the others are searched.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from parallel3d.commands.plan_page import check_page, write_page
from parallel3d.commands.plan_progress import SearchProgress
from parallel3d.commands.plan_table import ROWS, command, mfu, table
from parallel3d.config.checks.model import check_model
from parallel3d.config.fields import check_fields, show
from parallel3d.config.recompute import spelled
from parallel3d.config.schema import Config
from parallel3d.errors import UserError, closest, nearest
from parallel3d.plan.constants import NETWORKS, SPEEDS, load
from parallel3d.plan.devices import DEVICES, Device
from parallel3d.plan.measured.machine import check_type, read
from parallel3d.plan.measured.price import measured_layouts, measured_sizes, price_measured
from parallel3d.plan.memory import GIB, PARALLEL3D
from parallel3d.plan.own.table import least_memory, memories
from parallel3d.plan.search import (
    MOST_STAGES,
    MOST_V_HALF,
    LayoutChoice,
    Priced,
    best,
    divisors,
    layouts,
    price,
)
from parallel3d.plan.work import sizes_of_model
from parallel3d.topology.map.assumptions import assume_model, chosen_keys

TYPES = ("bf16", "fp16", "fp8")
_MOST_NODES = 1 << 16  # looked through for a cluster that a model would fit
_STILL = 0.98  # of a rank's memory: with twice the nodes it still needs as much
_HELD = {
    "tp": "tp", "pp": "pp", "vpp": "vpp", "dp": "dp", "zero": "zero", "recompute": "recompute",
    "micro_batch_size": "micro_batch",
}  # fmt: skip


def plan(config: Config, typed: Sequence[str]) -> int:
    """Print the table. Returns the exit code, 0. Raises UserError for what cannot work."""
    keys = chosen_keys(typed)
    check_page(config)
    config, assumed = assume_model(config, typed)
    if not {"precision", "precision.name"} & keys and config.cluster.file is None:
        config = replace(config, precision=replace(config.precision, name="bf16"))
    check_fields(config)
    check_model(config.model)
    fixed = held(config, keys)
    nodes, node = _gpus(config)
    gpus = nodes * node
    check_fixed(config, fixed, gpus)
    priced, sizes = searched(config, fixed, gpus)
    if not priced.order:
        raise UserError(fits_nowhere(config, sizes, priced, fixed, nodes))
    for line in table(config, priced, gpus, sizes):
        print(line, file=sys.stdout)
    if config.plan.html:
        rows = best(priced, ROWS)
        shown = [mfu(config, sizes, gpus, float(priced.seconds[i])) for i in rows]
        write_page(config, priced, rows, shown, gpus, sizes, command(priced, rows[0]), assumed)
    if config.model.num_layers > MOST_STAGES and "pp" not in fixed:
        print(f"Not looked at: pp above {MOST_STAGES}, and above {MOST_V_HALF} with v_half")
    if assumed:
        print(f"Assumed: {', '.join(assumed)}")
    return 0


def held(config: Config, keys: set[str]) -> dict[str, int | str]:
    """What the user holds, by the names of `plan.search.Choice`."""
    found = {name: getattr(config, key) for key, name in _HELD.items() if key in keys}
    if "recompute" in found:
        found["recompute"] = spelled(config.recompute)
    if "dp" in found and found["dp"] is None:
        del found["dp"]
    if "schedule" in keys or "schedule.name" in keys:
        found["schedule"] = config.schedule.name
    return found


def searched(
    config: Config, fixed: Mapping[str, int | str], ranks: int
) -> tuple[Priced, dict[str, float]]:
    """Every layout of `ranks`, priced by the cluster's datasheet or its measured file, and what all
    of them share. Raises UserError for a cluster that cannot be priced."""
    file, batch = config.cluster.file, config.global_batch_size
    if fixed.get("schedule") == "v_half" and int(fixed.get("pp", 1)) > MOST_V_HALF:
        raise UserError(
            f"pp={fixed['pp']} must be at most {MOST_V_HALF} with schedule=v_half, which is not "
            f"priced for more ranks; the nearest is pp={MOST_V_HALF}"
        )
    if file is not None:
        machine = read(file)
        check_type(machine, file, config.precision.name)
        if (config.cluster.nodes or 1) > 1:
            raise UserError(
                f"cluster.nodes={config.cluster.nodes} must be 1 with cluster={file}, in which no "
                "network was measured; the nearest is cluster.nodes=1"
            )
        sizes = measured_sizes(config, machine, ranks)
        choices = list(measured_layouts(sizes, ranks, batch, fixed))
        if not choices:
            raise UserError(no_layout(config, ranks, fixed))
        return price_measured(choices, sizes, config, machine), sizes
    sizes = sizes_of(config)
    choices = list(layouts(sizes, ranks, int(sizes["gpus_per_node"]), batch, fixed))
    if not choices:
        raise UserError(no_layout(config, ranks, fixed))
    return priced_by_shapes(config, choices, sizes), sizes


def priced_by_shapes(
    config: Config, choices: list[LayoutChoice], sizes: Mapping[str, float]
) -> Priced:
    """Times by the datasheet's constants, bytes by what parallel3d's own code holds."""
    with SearchProgress() as tell:
        held = memories(config, choices, 1e9 * config.dryrun.reserve_gb, tell)
    return price(choices, sizes, config.global_batch_size, load(), held)


def _gpus(config: Config) -> tuple[int, int]:
    """(nodes, GPUs of a node)."""
    if config.cluster.file is not None:
        return 1, config.cluster.gpus_per_node or read(config.cluster.file).made.count
    return config.cluster.nodes or 1, config.cluster.gpus_per_node or 8


def card_of(config: Config) -> tuple[str, Device]:
    """The cluster's GPU among those whose constants are known.

    Raises UserError where the cluster names none, one that is not known, or one without the type.
    """
    named = config.cluster.gpu
    if named is None:
        raise UserError(
            f"cluster={config.cluster.name} does not say which GPU it has: cluster.gpu must be one "
            f"of {', '.join(DEVICES)}; cluster=dgx_h100 has H100s"
        )
    words = named.lower().replace("-", " ").split()
    found = next((word for word in words if word in DEVICES), None)
    if found is None:
        near = nearest(named.lower(), DEVICES) or "h100"
        raise UserError(
            f"cluster.gpu={show(named)} must be one of {', '.join(DEVICES)}, whose speed is known; "
            f"the nearest is {near}"
        )
    type = config.precision.name
    if type not in DEVICES[found].peak:
        known = [t for t in TYPES if t in DEVICES[found].peak]
        raise UserError(
            f"precision={type} must be one of {', '.join(known)} on a GPU whose peaks are those of "
            f"{found}; the nearest is {known[0]}"
        )
    return found, DEVICES[found]


def sizes_of(config: Config) -> dict[str, float]:
    """All fields of `plan.work.Work` that no layout changes."""
    model, cluster, type = config.model, config.cluster, config.precision.name
    name, card = card_of(config)
    like = name.replace("b300", "b200")
    # A card has one of bf16 and fp16 fitted, which run alike.
    speed = next(s for s in (f"{like}/{type}", f"{like}/bf16", f"{like}/fp16") if s in SPEEDS)
    domain = cluster.domain_gpus or cluster.gpus_per_node or 8
    memory = cluster.gpu_memory_gb * 1e9 if cluster.gpu_memory_gb else card.memory_gib * GIB
    moved = cluster.gpu_memory_gb_per_s or card.memory_gb_s
    fabric = "ndr" if cluster.rail_gb_per_s >= 40 else "hdr"
    return {
        **sizes_of_model(model),
        "gpus_per_node": domain, "flash": 1, "dropout": 0, "overlap_tp": 1, "overlap_pp": 1,
        "overlap_dp": 1, "scatter_gather": 1, "compiled": 1, "fp8": float(type == "fp8"),
        "grad_bytes": 4,
        "peak": card.peak[type] * 1e12, "peak_attention": card.peak.get("bf16", 125.0) * 1e12,
        "memory_bytes": memory, "memory_rate": moved * 1e9, "units": card.units,
        "link_rate": cluster.nvlink_gb_per_s * 1e9, "fabric_rate": cluster.rail_gb_per_s * 1e9,
        "speed": SPEEDS.index(speed), "fabric": NETWORKS.index(fabric),
    }  # fmt: skip


def check_divides(fixed: Mapping[str, int | str], count: int, of: str) -> None:
    """Raises UserError for a tp, pp or dp that was typed and that does not divide so many."""
    product = 1
    for name in ("tp", "pp", "dp"):
        value = int(fixed.get(name, 1))
        product *= value
        if count % product:
            near = closest(value, lambda v, p=product // value: count % (p * v) == 0, count)
            raise UserError(
                f"{name}={value} must divide the {count} {of} with what else was "
                f"typed; the nearest is {near}"
            )


def check_fixed(config: Config, fixed: Mapping[str, int | str], gpus: int) -> None:
    """Refuse sizes that were typed and that the GPUs, the heads or the batch do not allow."""
    check_divides(fixed, gpus, "GPUs of the cluster")
    heads = config.model.num_attention_heads
    tp = int(fixed.get("tp", 1))
    if heads % tp:
        near = closest(tp, lambda v: heads % v == 0, heads)
        raise UserError(
            f"tp={tp} must divide model.num_attention_heads={heads}; the nearest is {near}"
        )
    pp, layers = int(fixed.get("pp", 1)), config.model.num_layers
    if pp > layers:
        raise UserError(
            f"pp={pp} must be at most model.num_layers={layers}; the nearest is {layers}"
        )


def no_layout(config: Config, gpus: int, fixed: Mapping[str, int | str]) -> str:
    """The sentence for a batch, or a node count, that no layout divides."""
    batch = config.global_batch_size
    model = int(fixed.get("tp", 1)) * int(fixed.get("pp", 1))
    most = gpus // model
    ways = [d for d in divisors(most) if not fixed.get("dp") or d == fixed["dp"]]
    step = int(fixed.get("micro_batch", 1)) * min(ways or [1], key=lambda d: abs(d - most))
    near = max(round(batch / step), 1) * step
    return (
        f"global_batch_size={batch} must be a multiple of dp times the micro-batch in a layout of "
        f"{gpus} GPUs with what else was typed; the nearest is {near}"
    )


def fits_nowhere(
    config: Config,
    sizes: Mapping[str, float],
    priced: Priced,
    fixed: Mapping[str, int | str],
    nodes: int,
) -> str:
    """The sentence for a model that no layout fits: by how much, and the nearest that would."""
    least = int(np.argmin(priced.memory.total))
    choice, room = priced.choices[least], float(sizes["memory_bytes"])
    over = (float(priced.memory.total[least]) - room) / GIB
    if config.cluster.file is not None:
        return (
            f"model={config.model.name} fits no layout of the ranks of cluster="
            f"{config.cluster.file}: the one that needs least (tp={choice.tp} pp={choice.pp} "
            f"micro_batch_size={choice.micro_batch} recompute={choice.recompute} "
            f"zero={choice.zero}) misses by {over:.1f} GiB of {room / GIB:.1f} a rank; "
            f"{_fewer_layers(config, choice, sizes)}"
        )
    words = _nodes_that_fit(config, sizes, fixed, nodes, float(priced.memory.total[least]))
    return (
        f"model={config.model.name} fits no layout on cluster.nodes={nodes}: the one that needs "
        f"least (tp={choice.tp} pp={choice.pp} micro_batch_size={choice.micro_batch} "
        f"recompute={choice.recompute} zero={choice.zero}) misses by {over:.1f} GiB of "
        f"{room / GIB:.0f}; cluster.nodes must be larger, {words}"
    )


def _nodes_that_fit(
    config: Config,
    sizes: Mapping[str, float],
    fixed: Mapping[str, int | str],
    nodes: int,
    needed: float,
) -> str:
    """What fits_nowhere says of the cluster that would hold the model: nodes are doubled until one
    does. `needed`: bytes of the layout of `nodes` that needs least."""
    node, room = config.cluster.gpus_per_node or 8, float(sizes["memory_bytes"])
    full = PARALLEL3D["memory.full"]
    with SearchProgress() as tell:
        while True:
            nodes *= 2
            batch = max(config.global_batch_size, nodes * node)
            tried = list(layouts(sizes, nodes * node, int(sizes["gpus_per_node"]), batch, fixed))
            grown = replace(config, global_batch_size=batch)
            before = needed
            if tried:
                # How long a step takes is not asked: bytes alone say whether one fits.
                least = least_memory(
                    grown, tried, 1e9 * config.dryrun.reserve_gb, full * room, tell.at(nodes)
                )
                if least / room <= full:
                    words = f"the nearest that would is cluster.nodes={nodes}"
                    more = batch != config.global_batch_size
                    return words + (f" global_batch_size={batch}" if more else "")
                needed = min(needed, least)
            # Where twice the GPUs save nothing, what is left is shared out as far as it can be.
            if 2 * nodes > _MOST_NODES or (tried and needed > _STILL * before):
                return f"none was found up to {nodes} nodes"


def _fewer_layers(config: Config, choice: LayoutChoice, sizes: Mapping[str, float]) -> str:
    """The deepest model of the same kind that would fit in the layout that needs least."""
    machine, step = read(str(config.cluster.file)), choice.pp * choice.vpp
    for layers in range((config.model.num_layers - 1) // step * step, 0, -step):
        smaller = replace(config, model=replace(config.model, num_layers=layers))
        if price_measured([choice], sizes, smaller, machine).order:
            return f"model.num_layers must be less, the nearest that fits is {layers}"
    return "model.hidden_size must be less: no number of layers fits"
