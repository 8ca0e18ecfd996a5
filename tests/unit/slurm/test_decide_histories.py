"""Drives simulated jobs through thousands of decisions, and checks what must hold of each."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from parallel3d.run.failure import RankFailure
from parallel3d.slurm.decide import (
    Evidence,
    Inputs,
    Limits,
    ProbeAnswer,
    SmallerLayout,
    StartEnd,
    decide,
)
from tests.unit.slurm.simulated_cluster import (
    BAD_STATES,
    COLLECTIVE,
    GOOD_STATES,
    NEVER,
    STRIKES,
    Job,
)

FEW, MANY = 500, 5000
NOW = 1_800_000_000.0


def live(seeds: range, replay_each: int = 1) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        job = Job(seed, decide, replays=seed % replay_each == 0)
        job.run()
        found += job.decisions
    return found


@pytest.mark.slow
def test_five_hundred_jobs_take_no_wrong_decision() -> None:
    found = live(range(FEW), replay_each=5)
    every = {"first", "same", "replace", "smaller", "requeue", "stop", "done"}
    assert {name for name, number in found.items() if number >= 20} == every, found


@pytest.mark.nightly
def test_five_thousand_jobs_take_no_wrong_decision() -> None:
    assert sum(live(range(FEW, FEW + MANY)).values()) > 4 * MANY


def any_inputs(roll: random.Random) -> Inputs:
    """Returns inputs that no job may ever have."""
    nodes = [f"n{number}" for number in range(roll.randint(0, 9))]

    def some(share: float, *others: str) -> list[str]:
        return [name for name in (*nodes, *others) if roll.random() < share]

    def cause() -> RankFailure | None:
        kind, error = roll.choice((*STRIKES, *NEVER, COLLECTIVE, ("node", "x"), ("decided", "y")))
        phase, host = roll.choice(("", "train step 3", "start")), roll.choice(nodes or ["n0"])
        made = RankFailure(roll.randint(-1, 3), "", host, phase, error.format("n1"), NOW, kind)
        return made if roll.random() < 0.7 else None

    def entry() -> Evidence:
        time, decisive = NOW - roll.uniform(0, 1e6), roll.random() < 0.4
        return Evidence(roll.choice(("does not answer", "was bad")), time, 3, decisive)

    needed = roll.randint(1, 9)
    smaller = [SmallerLayout(n, (f"dp={n}",)) for n in some_sizes(roll, needed)]
    ended = StartEnd(
        roll.choice((0, 1, 1, 1, 2, 137, 138)),
        asked=roll.choice((*9 * (None,), "SIGTERM")),
        cause=cause(),
        dead=tuple(some(0.2)),
        first=roll.random() < 0.3,
    )
    return Inputs(
        start=roll.randint(1, 9),
        now=NOW,
        batch_host=nodes[0] if nodes else "n0",
        nodes=tuple(nodes),
        needed=needed,
        limits=Limits(
            roll.randint(0, 3), roll.randint(0, 3), 7.0, tuple(smaller), roll.random() < 0.7
        ),
        used=tuple(some(0.5, "gone1", "gone2")),
        places={name: roll.choice(("", f"a.b.{name}")) for name in nodes},
        ended=ended if roll.random() < 0.7 else None,
        previous=cause(),
        answers={name: ProbeAnswer(roll.random() < 0.95, "odd") for name in some(0.95)},
        states={name: roll.choice((*4 * GOOD_STATES, *BAD_STATES)) for name in some(0.7)},
        history={name: tuple(entry() for _ in range(roll.randint(1, 3))) for name in some(0.3)},
        starts_in_row=roll.randint(0, 6),
        replaced_in_row=roll.randint(0, 3),
        requeued_for=tuple(some(0.3)),
    )


def some_sizes(roll: random.Random, below: int) -> list[int]:
    return [size for size in range(below - 1, 0, -1) if roll.random() < 0.3]


@pytest.mark.slow
def test_any_inputs_have_a_decision_that_uses_no_bad_node() -> None:
    """The local rules alone hold for inputs that contradict each other."""
    roll, found = random.Random(7), Counter[str]()
    for _ in range(1500):
        inputs = any_inputs(roll)
        decision = decide(inputs)
        found[decision.name] += 1
        assert decision.sentence
        assert inputs.batch_host not in decision.release
        assert set(decision.release) <= set(inputs.nodes) - set(decision.nodes)
        if decision.action == "run":
            sizes = (inputs.needed, *(each.nodes for each in inputs.limits.smaller))
            assert len(set(decision.nodes)) == len(decision.nodes)
            assert len(decision.nodes) in sizes
            assert inputs.answers is not None
            for name in decision.nodes:
                assert name in inputs.nodes
                if "nothing has failed yet" in decision.sentence:
                    assert inputs.ended is None
                else:
                    assert inputs.answers[name].ok
                assert inputs.states.get(name) not in BAD_STATES
    assert min(found[name] for name in ("first", "replace", "smaller", "requeue", "stop")) > 25
