"""Compares the pipeline's executor with its clock, and with PyTorch's schedules.

    python -m benchmarks.speed.pipeline idle     # layers that sleep: idle share, measured, computed
    python -m benchmarks.speed.pipeline large    # messages of 64 MiB over gloo, every schedule
    python -m benchmarks.speed.pipeline peer     # steps next to peers/torch_native.py, in turns

`idle`: runs a step of each schedule on stages that sleep for F, I and W, so that the number of
cores does not matter. It prints the share of all ranks' time without computation, next to that of
the clock.

`peer`: runs the same model and micro-batches under PyTorch's 1F1B, interleaved and zero-bubble
schedules (those that run) and ours. Contenders take turns of two steps that count; the others are
stopped meanwhile. The figure is the median of all these steps, with the smallest and the largest of
a turn. The ratio compares PyTorch's fastest with ours, turn by turn (above 1: we are faster); it is
the median of all turns with the smallest and the largest. All contenders run at the same time, with
pp processes each.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.peers.pipelines import OUR_SCHEDULES, THEIRS, compare_with_peer
from parallel3d.schedules.schedule import LOOPED, NAMED_SCHEDULES, V_SHAPED, Schedule, make
from parallel3d.schedules.walk import Costs, time_orders
from tests.distributed.pool import Pool
from tests.tools.sleeping_stages import Ran, run_all

SECONDS = (0.060, 0.072, 0.048)  # seconds of F, I and W of a rank's layers, as 1 : 1.2 : 0.8
LARGE = (1, 1024, 16384)


def forms(ranks: int, microbatches: int, chunks: int = 2) -> list[Schedule]:
    many = dict.fromkeys(LOOPED, chunks) | dict.fromkeys(V_SHAPED, 2)
    return [make(name, ranks, microbatches, many.get(name, 1)) for name in NAMED_SCHEDULES]


def idle_share(by_rank: list[Ran]) -> float:
    """Returns the seconds from the first computation of any rank to the end of the last."""
    first = min(ran.spans[0][1] for ran in by_rank)
    last = max(ran.spans[-1][2] for ran in by_rank)
    busy = sum(end - start for ran in by_rank for _, start, end in ran.spans)
    return 1 - busy / (len(by_rank) * (last - first))


def idle(pool: Pool) -> None:
    """Prints measured and computed idle shares, then the largest difference."""
    worst = 0.0
    print("| pp | schedule | chunks | measured idle | clock | difference |")
    print("|---|---|---|---|---|---|")
    for ranks in (2, 3, 4):
        schedules = forms(ranks, 3 * ranks)
        how = {"costs": SECONDS, "steps": 2}
        by_rank = pool.run(ranks, run_all, schedules, how)
        for schedule, ran in zip(schedules, zip(*by_rank, strict=True), strict=True):
            measured = idle_share(list(ran))
            costs = Costs.even(schedule.assignment, *SECONDS)
            clock = time_orders(schedule.orders, schedule.assignment, costs).bubble_fraction
            worst = max(worst, abs(measured - clock))
            chunks = schedule.assignment.chunks
            print(
                f"| {ranks} | {schedule.name} | {chunks} | {measured:.1%} | {clock:.1%} | "
                f"{100 * (measured - clock):+.1f} points |"
            )
    print(f"largest difference: {100 * worst:.1f} points")


def large(pool: Pool) -> None:
    """Runs every schedule with 64 MiB messages; prints the seconds of a step."""
    print("| pp | schedule | seconds |\n|---|---|---|")
    for ranks in (2, 3, 4):
        for schedule in forms(ranks, ranks + 1):
            ran = pool.run(ranks, run_all, [schedule], {"shape": LARGE}, timeout_s=600)
            seconds = statistics.median(found[0].seconds for found in ran)
            assert sum(r[0].loss for r in ran) == schedule.assignment.stages * schedule.microbatches
            print(f"| {ranks} | {schedule.name} | {seconds:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("idle", "large", "peer"))
    parser.add_argument(
        "--turns", type=int, default=7, help="peer: number of turns of each contender"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="peer: pp")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    for side, all_of_it in (("ours", OUR_SCHEDULES), ("theirs", THEIRS)):
        parser.add_argument(
            f"--{side}", nargs="+", choices=all_of_it, default=list(all_of_it), help="peer"
        )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="peer")
    parser.add_argument("overrides", nargs="*", help="peer: keys for our side")
    args = parser.parse_args()
    if args.what == "peer":
        contenders = args.ours, args.theirs
        compare_with_peer(
            *(args.stages, args.microbatches, args.turns, args.precision),
            *(contenders, args.overrides),
        )
        return
    with Pool() as pool:
        {"idle": idle, "large": large}[args.what](pool)


if __name__ == "__main__":
    main()
