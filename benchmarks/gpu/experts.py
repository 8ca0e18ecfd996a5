"""Measures mixtures of experts on one GPU, and compares them with other trainers and a dry run.

    python -m benchmarks.gpu.experts --call 1

OLMoE with six of its layers, in micro-batches of 4 × 4,096 tokens, and the share of Qwen3-30B that
a rank has at ep=8 (16 experts, 12 of the layers), in bf16 with the routers' own choices: the share
of the card's peak that the active FLOPs reach, memory beside the dry run's, waits of the host, the
time beside that with experts chosen equally often, and whole steps in turns with torchtitan's model
(`pip install torchtitan==0.2.2`) and transformers' `experts_implementation="grouped_mm"`.

Each line runs in a process of its own, as in `benchmarks.gpu_first`; a package that is not there
is named. `--size tiny --device cpu` and `--device simulated` enter the lines without a GPU. Seconds
and expected shares are estimates: this has never run on a GPU.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.gpu import experts_beside as beside
from benchmarks.gpu import mixtures
from benchmarks.gpu.first_runs import syncs_of
from benchmarks.gpu.mixtures import MIXTURES
from benchmarks.gpu.tasks import Bench, Given, Row, Task


def host_syncs(given: Given, name: str) -> Row:
    """Returns how often the host waits for the card in a step of a mixture."""
    mixture = MIXTURES[name]
    micro_batch, _ = mixture.batch(given)
    return syncs_of(given, partial(mixtures.trainer_of, mixture, given, micro_batch))


def lines_of(name: str, seconds: tuple[int, int, int, int, int]) -> dict[str, Task]:
    """Returns the lines of a mixture, with their estimated seconds."""
    mixture = MIXTURES[name]
    train, dryrun, syncs, side_by_side, balanced = seconds
    return {
        name: Task(
            partial(mixtures.train, name=name),
            train,
            f"MFU of active FLOPs ≥ {100 * mixture.mfu:.0f} % of the datasheet",
            by_command=True,
        ),
        f"{name} dryrun": Task(
            partial(mixtures.dryrun, name=name, of=name),
            dryrun,
            f"it agrees with `{name}`: peak memory within 3 %, seconds within 20 %",
            by_command=True,
        ),
        f"{name} host syncs": Task(partial(host_syncs, name=name), syncs, "one per step"),
        f"{name} side by side": Task(
            partial(beside.side_by_side, name=name),
            side_by_side,
            "torchtitan takes ≥ 1.2 times as long, transformers ≥ 1.5; first losses agree to 2e-2",
        ),
        f"{name} balanced": Task(partial(beside.balanced, name=name), balanced),
    }


OLMOE, SHARD = (lines_of(name, (90, 25, 30, 170, 60)) for name in MIXTURES)
LINES = OLMOE | SHARD
BENCH = Bench("benchmarks.gpu.experts", __doc__, LINES, (tuple(OLMOE), tuple(SHARD)))
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
