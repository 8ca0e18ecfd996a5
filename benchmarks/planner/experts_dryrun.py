"""`python -m benchmarks.planner.experts_dryrun --count 40 --seed 1`: compares dry runs of random
mixtures of experts with runs. It draws models and layouts of up to eight ranks (`experts_draws`),
trains each on simulated devices that have values (`experts_runs`), and runs a rank of each pipeline
stage dry, on tensors without values. Launches by part of the step and the bytes of each group must
be equal, and peak memory within `--memory` per cent. On tensor rank 0 the collectives must also be
those of `estimate/traffic.py`, call by call; how far the planner's launches are off is printed. It
needs no GPU and takes about 15 seconds for a draw on two cores.

Experts are chosen equally often (`moe.routing=balanced`), but how many tokens all_to_all sends to a
rank follows from a random table, where the dry run has the expected number. So bytes are compared
with a second dry run that is told the numbers of the run; memory with one that is not."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from benchmarks.planner.experts_draws import Keys, configured, draws, shown
from benchmarks.planner.experts_runs import Ran, Sent, measured, numbers_of_rows
from benchmarks.planner.launches import launches
from parallel3d.blueprint.layout import layout_of
from parallel3d.commands.dryrun import find_facts
from parallel3d.commands.options import CommandConfig
from parallel3d.estimate.traffic import group_size, transfers
from tests.distributed.pool import Pool
from tests.distributed.simulated import SimulatedPool

RUN_S = 300.0  # for all ranks of a draw


class Compared(NamedTuple):
    """The dry run of a rank beside its run.

    Attributes:
        memory: error of the dry run's peak, in per cent.
        planned: error of the planner's launches, in per cent; None: they are not known.
        unequal: what should be equal and is not, in words.
    """

    memory: float
    planned: float | None
    unequal: list[str]


def ranks_of(config: CommandConfig, chance: random.Random) -> list[int]:
    """Returns one rank of each pipeline stage."""
    layout = layout_of(config)
    stages: dict[int, list[int]] = {}
    for rank in range(layout.world_size):
        stages.setdefault(layout.coordinates(rank).pp, []).append(rank)
    return [chance.choice(ranks) for ranks in stages.values()]


def compare(config: CommandConfig, rank: int, ran: Ran) -> Compared:
    """Runs `rank` dry, and compares it with its run and with the planner's lists."""
    facts = again = find_facts(config, rank)
    if any(op == "all_to_all" for _, op, _ in ran.sent):

        def told(layer: int, numbers: Sequence[int]) -> Sequence[int]:
            return ran.rows[layer, len(numbers)]

        with numbers_of_rows(told):
            again = find_facts(config, rank)
    dry = {part: figures["launches"] for part, figures in facts["parts"].items()}
    unequal = differences("launches", dry, ran.launches)
    for what in ("calls", "bytes_sent"):
        figures = {name: group[what] for name, group in again["groups"].items()}
        unequal += differences(what, figures, {n: group[what] for n, group in ran.groups.items()})
    layout = layout_of(config)
    where, planned = layout.coordinates(rank), None
    if where.tp == 0:
        shard = where.dp * layout.cp + where.cp
        listed: Sent = Counter()
        for t in transfers(config, layout, where.pp, shard):
            if group_size(t.dim, layout) > 1:
                listed[ran.names[t.dim], t.op, t.nbytes] += t.count
        # How many tokens all_to_all sends follows from the table.
        said, sent = (
            {c: n for c, n in s.items() if c[1] != "all_to_all"} for s in (listed, ran.sent)
        )
        unequal += differences("collectives", said, sent)
        if config.precision.name == "bf16":
            total = sum(launches(config, where.pp, shard).values())
            planned = 100 * (total / sum(ran.launches.values()) - 1)
    memory = 100 * (facts["peak_bytes"] / ran.peak - 1)
    return Compared(memory, planned, unequal)


def differences(what: str, ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> list[str]:
    """Returns where two counts differ, in words."""
    return [
        f"{what} of {name}: {ours.get(name, 0):,.0f}, in the run {theirs.get(name, 0):,.0f}"
        for name in {**ours, **theirs}
        if ours.get(name, 0) != theirs.get(name, 0)
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Prints a row of each rank that ran dry, and the verdict. Returns 0 if all counts are equal
    and memory is within the limit, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--memory", type=float, default=3.0, help="limit of memory, per cent")
    parser.add_argument("--draw", action="append", default=[], help="one draw, given as JSON")
    options = parser.parse_args(words)
    last = options.first + options.count
    cases: list[Keys] = [json.loads(draw) for draw in options.draw]
    cases = cases or [*islice(draws(options.seed), options.first, last)]
    print("| draw | rank | memory % | planned launches % | equal | configuration |")
    print("|---|---|---|---|---|---|")
    found: list[Compared] = []
    with Pool() as own:
        pool = SimulatedPool(own)
        for number, keys in enumerate(cases, options.first):
            config, chance = configured(keys), random.Random(number)
            ran = pool.run(config.world_size, measured, config, timeout_s=RUN_S)
            for rank in ranks_of(config, chance):
                row = compare(config, rank, ran[rank])
                found.append(row)
                planned = "" if row.planned is None else f"{row.planned:+.2f}"
                equal = "; ".join(row.unequal) or "yes"
                cells = f"{number} | {rank} | {row.memory:+.2f} | {planned} | {equal}"
                print(f"| {cells} | {shown(keys)} |", flush=True)
    errors = [row.memory for row in found]
    within = sum(abs(error) <= options.memory for error in errors)
    alike = sum(not row.unequal for row in found)
    print(
        f"\n{len(cases)} draws, {len(found)} dry runs: {alike} equal in launches and bytes, memory "
        f"from {min(errors):+.2f} to {max(errors):+.2f} %, {within} within {options.memory:g} %"
    )
    return int(not within == alike == len(found))


if __name__ == "__main__":
    sys.exit(main())
