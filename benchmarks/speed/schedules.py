"""Compares pipeline schedules with those of the installed PyTorch on one clock; times the checker.

    python -m benchmarks.speed.schedules                  # p=8 m=32, hops 0, 0.1 and 0.2
    python -m benchmarks.speed.schedules --pp 16 --microbatches 64 --vpp 4
    python -m benchmarks.speed.schedules --faults 10000   # plant faults, and count the rejected
    python -m benchmarks.speed.schedules --grid           # make and check programs of many sizes
    python -m benchmarks.speed.schedules --grid --every   # of all sizes

PyTorch's orders are those that its schedule classes compute (torch.distributed.pipelining), without
stages or a process group. parallel3d's clock, which models compute, dependencies and hops, times
both. Overhead is the step's time over the busiest rank's compute, minus one. Memory is the peak of
live activations of any rank relative to that of 1F1B.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from typing import Any

from parallel3d.schedules.actions import ComputeSchedule, Kind, action
from parallel3d.schedules.check import check
from parallel3d.schedules.choose import ScheduleChoice, choose, measure, measured_schedules
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import LOOPED, NAMED_SCHEDULES, V_SHAPED, Schedule, make
from parallel3d.schedules.walk import RankWork, ScheduleError

CLASSES = {
    "Interleaved1F1B": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}

THEIR_KINDS = {
    "FORWARD": Kind.F,
    "FULL_BACKWARD": Kind.B,
    "BACKWARD_INPUT": Kind.I,
    "BACKWARD_WEIGHT": Kind.W,
}


def theirs(name: str, ranks: int, count: int, chunks: int) -> Schedule:
    """Returns the compute order of PyTorch's class Schedule{name}."""
    from torch.distributed.pipelining import schedules

    cls = getattr(schedules, f"Schedule{name}")
    assignment = StageAssignment(ranks, chunks, CLASSES[name])
    orders: ComputeSchedule = []
    for rank in range(ranks):
        one: Any = cls.__new__(cls)
        one.pp_group_size, one.n_local_stages, one.rank = ranks, chunks, rank
        one._n_microbatches = count
        one._num_stages = one.num_stages = ranks * chunks
        one.number_of_rounds = max(1, count // ranks)
        one.microbatches_per_round = count // one.number_of_rounds
        steps = one._calculate_single_rank_operations(rank)
        orders.append([
            action(THEIR_KINDS[part.computation_type.name], part.microbatch_index,
                   assignment.place(part.stage_index)[1])
            for step in steps if step is not None
            for part in (step.sub_actions or (step,))
        ])  # fmt: skip
    return Schedule(name, assignment, count, orders)


def all_of_theirs(ranks: int, count: int, chunks: int) -> Iterator[Schedule]:
    for name, shape in CLASSES.items():
        for number in (2,) if shape == "v" else sorted({1, 2, chunks}):
            yield theirs(name, ranks, count, number)


def table(ranks: int, count: int, chunks: int, costs: list[float], hops: list[float]) -> None:
    forward, input, weight = costs
    for hop in hops:
        work = RankWork(forward, input, weight, hop)
        rows = [("PyTorch", measure(one, work)) for one in all_of_theirs(ranks, count, chunks)]
        best = min(row.overhead for _, row in rows)
        forms = measured_schedules(ranks, count, chunks, work)
        ours = [("parallel3d", row) for row in forms]
        for memory in (1.0, 1.25, 1.5):
            chosen = choose(ranks, count, chunks, work, memory, forms)
            ours.append((f"parallel3d auto, memory {memory:g}", chosen))
        print(f"\np={ranks} m={count} F:I:W={':'.join(f'{c:g}' for c in costs)} hop={hop:g}")
        print(f"{'':<30} {'order':<22} {'chunks':>6} {'overhead':>9} {'memory':>7} {'of best':>8}")
        for where, row in [*rows, *ours]:
            print(_line(where, row, best))


def _line(where: str, row: ScheduleChoice, best: float) -> str:
    chunks = row.schedule.assignment.chunks
    return (
        f"{where:<30} {row.schedule.name:<22} {chunks:>6} {row.overhead:>9.2%} "
        f"{row.peak_live:>7.2f} {row.overhead / best:>8.2f}"
    )


def faults(number: int, seed: int) -> None:
    """Plants `number` faults that break a program, and checks that the checker names each of
    them."""
    from tests.tools.schedule_faults import corrupt, is_sound

    rng = random.Random(seed)
    sizes = ((2, 3), (2, 6), (3, 4), (4, 5), (4, 8))
    made = [make(n, p, m, c) for n in NAMED_SCHEDULES for c in _chunks(n, 4) for p, m in sizes]
    programs = [(one, one.program()) for one in made]
    broken = rejected = harmless = accepted = 0
    start = time.process_time()
    while broken < number:
        one, program = rng.choice(programs)
        bad = corrupt(program, rng)
        sound = is_sound(bad, one.assignment, one.microbatches)
        try:
            check(bad, one.microbatches, one.assignment)
            passed = True
        except ScheduleError:
            passed = False
        broken += not sound
        rejected += not sound and not passed
        harmless += sound
        accepted += sound and passed
    print(
        f"faults that break a program: {rejected} of {broken} rejected; changes that leave one "
        f"sound: {accepted} of {harmless} accepted; {time.process_time() - start:.1f} s of CPU"
    )


def grid(every: bool, processes: int) -> None:
    """Makes and checks plans at pp 1 to 16, m 1 to 64 and 1 to 8 chunks; without `every` only the
    smallest, the largest and those at which the behaviour changes."""
    sizes = []
    for ranks in range(16, 0, -1) if every else (16, 8, 5, 4, 3, 2, 1):  # the longest first
        near = {1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks + 1, 3 * ranks - 1, 64}
        counts = range(64, 0, -1) if every else sorted(n for n in near if 1 <= n <= 64)
        sizes += [(ranks, count, every) for count in counts]
    start = time.perf_counter()
    with multiprocessing.Pool(processes) as pool:
        done = list(pool.imap_unordered(_all_at, sizes))
    wall = time.perf_counter() - start
    programs, actions, making, checking = map(sum, zip(*done, strict=True))
    print(
        f"{programs} programs of {actions:,} computations sound in {wall:.1f} s on {processes} "
        f"processes; of CPU {making:.1f} s to make them, {checking:.1f} s to check them"
    )


def _all_at(size: tuple[int, int, bool]) -> tuple[int, int, float, float]:
    """Returns (programs, computations, CPU seconds to make them, CPU seconds to check them)."""
    # programs have no reference cycles, and the garbage collector would visit each a dozen times
    gc.disable()
    ranks, count, every = size
    programs = actions = 0
    making = checking = 0.0
    for name in NAMED_SCHEDULES:
        for chunks in _chunks(name, 8):
            if not every and chunks not in (1, 2, 3, 8):
                continue
            begin = time.process_time()
            one = make(name, ranks, count, chunks)
            program = one.program()
            made = time.process_time()
            check(program, count, one.assignment)
            making += made - begin
            checking += time.process_time() - made
            programs += 1
            actions += sum(map(len, one.orders))
    return programs, actions, making, checking


def _chunks(name: str, most: int) -> list[int]:
    if name in LOOPED:
        return list(range(1, most + 1))
    return [2 if name in V_SHAPED else 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--vpp", type=int, default=4)
    parser.add_argument("--costs", type=float, nargs=3, default=[1, 1.2, 0.8])
    parser.add_argument("--hops", type=float, nargs="+", default=[0, 0.1, 0.2])
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.faults:
        faults(args.faults, args.seed)
    if args.grid or args.every:
        grid(args.every, args.processes)
    if not (args.faults or args.grid or args.every):
        table(args.pp, args.microbatches, args.vpp, args.costs, args.hops)


if __name__ == "__main__":
    main()
