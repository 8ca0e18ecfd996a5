"""Drives simulated jobs through thousands of decisions, and checks what must hold of each."""

from __future__ import annotations

from collections import Counter

import pytest

from parallel3d.slurm.decide import decide
from tests.unit.slurm.simulated_cluster import Job

FEW, MANY = 500, 5000


def live(seeds: range) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        job = Job(seed, decide)
        job.run()
        found += job.decisions
    return found


@pytest.mark.slow
def test_five_hundred_jobs_take_no_wrong_decision() -> None:
    found = live(range(FEW))
    every = {"first", "same", "replace", "smaller", "requeue", "stop", "done"}
    assert {name for name, number in found.items() if number >= 20} == every, found


@pytest.mark.nightly
def test_five_thousand_jobs_take_no_wrong_decision() -> None:
    assert sum(live(range(FEW, FEW + MANY)).values()) > 4 * MANY
