"""Tests the split of layers over stages: the exact optimum, sensible ties, and checks of the user's
own split."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from parallel3d.blueprint.stages import (
    balance_chunks,
    balance_layers,
    checked_split,
    head_cost,
    training_costs,
)
from parallel3d.errors import UserError
from parallel3d.models.flops import layer_costs
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config
from parallel3d.schedules.keys import ScheduleConfig
from parallel3d.schedules.orders import StageAssignment
from tests.pace import in_cpu_time


def all_splits(layers: int, stages: int) -> Iterator[list[int]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        borders = [0, *cuts, layers]
        yield [b - a for a, b in itertools.pairwise(borders)]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 4, (2, 2, 2, 2)),
        (6, 4, (1, 2, 2, 1)),
        (7, 4, (2, 2, 2, 1)),
        (30, 4, (7, 8, 8, 7)),
        (8, 3, (3, 3, 2)),
        (3, 2, (2, 1)),
        (5, 1, (5,)),
        (4, 4, (1, 1, 1, 1)),
    ],
)
def test_leftover_layers_go_to_the_middle_not_to_the_last(
    layers: int, stages: int, expected: tuple[int, ...]
) -> None:
    # 0.1 has no exact binary form: sums of equal costs must still tie.
    assert balance_chunks(0.1, layers, StageAssignment(stages)) == expected


def test_the_head_takes_layers_from_its_stage() -> None:
    assert balance_chunks(1.0, 12, StageAssignment(4), last_extra=3.0) == (3, 4, 4, 1)
    assert balance_chunks(1.0, 4, StageAssignment(2), last_extra=100.0) == (3, 1)


def test_more_stages_than_layers_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"pp=5 .*model.num_layers=4.*pp=4 or less"):
        balance_chunks(1.0, 4, StageAssignment(5))


# --- several chunks a rank ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["loop", "v"])
@pytest.mark.parametrize(
    ("ranks", "chunks"), [(1, 1), (1, 3), (2, 2), (3, 2), (2, 3), (4, 1), (7, 1)]
)
def test_chunks_agree_with_brute_force(shape: str, ranks: int, chunks: int) -> None:
    """No split is better for the busiest rank, then for evenness, then by the preferences."""
    placement = StageAssignment(ranks, chunks, shape)
    middle = placement.stages - 1
    rng = random.Random(f"{shape} {ranks} {chunks}")
    for _ in range(30):
        layers = placement.stages + rng.randint(0, 4)
        cost, last = rng.randint(1, 3), rng.randint(0, 9)

        def preference(split: list[int]) -> tuple[int, ...]:
            stages = [n * cost for n in split]  # noqa: B023 (in this round)
            stages[-1] += last  # noqa: B023
            ranks: Counter[int] = Counter()
            for (rank, _), of_stage in zip(placement.places, stages, strict=True):
                ranks[rank] += of_stage
            return (
                max(ranks.values()),
                sum(s * s for s in stages),
                sum(abs(2 * i - middle) * n for i, n in enumerate(split)),
                sum(i * n for i, n in enumerate(split)),
            )

        split = balance_chunks(cost, layers, placement, last)
        assert sum(split) == layers
        best = min(all_splits(layers, placement.stages), key=preference)
        assert list(split) == best, (layers, cost, last)


def test_the_rank_with_the_head_gets_fewer_layers() -> None:
    # Ranks 0 and 1 have cost 5 each: 5 layers, and 3 with a head of two.
    assert balance_chunks(1.0, 8, StageAssignment(2, 2), last_extra=2.0) == (2, 2, 3, 1)
    # In a V the head is on rank 0, with the embedding.
    assert balance_chunks(1.0, 8, StageAssignment(2, 2, "v"), last_extra=2.0) == (2, 3, 2, 1)


def test_many_chunks_are_split_at_once() -> None:
    began = time.process_time()
    split = balance_chunks(1.3e9, 400, StageAssignment(16, 8), 3.7e9)
    assert in_cpu_time(time.process_time() - began, 0.05)
    assert len(split) == 128
    assert sum(split) == 400
    assert max(split) <= 4


def pipeline(name: str, pp: int, vpp: int, layers: int, given: list[int] | None = None) -> Config:
    schedule = ScheduleConfig(name=name, layers_per_stage=given)
    return Config(pp=pp, vpp=vpp, model=ModelConfig(num_layers=layers), schedule=schedule)


def test_stages_of_a_configuration_are_its_chunks_in_the_order_of_the_model() -> None:
    for name in ("interleaved", "zbv"):
        found = [stage.layers for stage in blueprint_of(pipeline(name, 2, 2, 9)).stages]
        assert len(found) == 4
        assert [layer for layers in found for layer in layers] == list(range(9))
    given = [
        stage.layers
        for stage in blueprint_of(pipeline("interleaved", 2, 2, 9, [1, 2, 5, 1])).stages
    ]
    assert given == [range(0, 1), range(1, 3), range(3, 8), range(8, 9)]


@pytest.mark.parametrize("given", [None, [1, 1, 1, 1]])
def test_more_chunks_than_layers_is_the_users_error(given: list[int] | None) -> None:
    with pytest.raises(UserError, match=r"pp=2 × vpp=2 stages are .*num_layers=3.*pp=1 or less"):
        _ = blueprint_of(pipeline("interleaved", 2, 2, 3, given)).stages
    with pytest.raises(UserError, match=r"pp=2 × vpp=4 stages are .*=3.*pp=1 and vpp=3 or less"):
        _ = blueprint_of(pipeline("interleaved", 2, 4, 3, given)).stages


def test_given_split_has_an_entry_for_each_chunk() -> None:
    with pytest.raises(
        UserError, match=r"\[4,4\] must be 4 positive numbers .*nearest is \[2,2,2,2\]"
    ):
        _ = blueprint_of(pipeline("interleaved", 2, 2, 8, [4, 4])).stages


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[4, 4], [], [4, 0, 4], [9, -2, 1], [3, 3, 3], [2, 2, 2]])
def test_a_given_split_that_is_invalid_is_the_users_error(given: list[int]) -> None:
    assert checked_split([5, 3], 8, StageAssignment(2)) == (5, 3)
    said = r"must be 3 positive numbers .*model.num_layers=8; the nearest is \[3,3,2\]"
    with pytest.raises(UserError, match=said):
        checked_split(given, 8, StageAssignment(3))


def test_layers_of_two_costs_are_balanced_as_the_best_of_all_splits() -> None:
    """Tests models that begin with dense layers, before layers with experts."""
    for stages, dense, last in ((2, 3, 0.0), (3, 2, 1.0), (4, 1, 2.5)):
        costs = (1.0,) * dense + (3.0,) * (9 - dense)
        found = balance_layers(costs, StageAssignment(stages), last)
        every = (
            (*ends, 9) for ends in itertools.combinations(range(1, 9), stages - 1)
        )  # costs of the stages

        def most(ends: tuple[int, ...], costs: Any = costs, last: float = last) -> float:
            sums = [sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends))]
            return max(*sums[:-1], sums[-1] + last)

        assert most(tuple(itertools.accumulate(found))) == min(map(most, every))
    assert balance_layers((1.0,) * 12, StageAssignment(4), 3.0) == (3, 4, 4, 1)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_stages_of_frozen_layers_are_balanced_by_what_they_compute(name: str) -> None:
    """A third of the FLOPs of a trained layer are left in a frozen one without a backward."""
    model = ModelConfig(num_layers=24, hidden_size=64, num_attention_heads=4, vocab_size=64)
    vpp = 1 if name == "1f1b" else 2
    config = Config(model=model, pp=3, dp=1, vpp=vpp, global_batch_size=6)
    config.schedule.name = name
    frozen = ["embedding.*", *(f"layers.{layer}.*" for layer in range(12))]
    config.optim.freeze = frozen
    run = blueprint_of(config)
    costs = training_costs(model, config.optim)
    assert costs.layers[0] * 3 == pytest.approx(costs.layers[-1])
    sums = [0.0] * 3
    ends = [0, *itertools.accumulate(run.layers_per_stage)]
    for (rank, _), (begin, end) in zip(
        run.assignment.places, itertools.pairwise(ends), strict=True
    ):
        sums[rank] += sum(costs.layers[begin:end])
    assert max(sums) - min(sums) <= costs.layers[-1] + costs.head
    assert sum(run.layers_per_stage) == 24 and min(run.layers_per_stage) > 0


def test_a_trained_layer_below_frozen_ones_makes_them_compute_a_backward() -> None:
    model = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4)
    costs = training_costs(model, OptimConfig(freeze=["layers.[23].*"])).layers
    assert costs[0] > costs[2] > 2 / 3 * costs[0]
    every = training_costs(model, OptimConfig())
    assert every.layers == layer_costs(model) and every.head == head_cost(model)


def test_full_layers_cost_more_than_sliding_ones() -> None:
    """At a long sequence the last layers, which are full, are worth several sliding ones."""
    model = ModelConfig(num_layers=12, hidden_size=64, num_attention_heads=4, seq_length=16384)
    types = ["sliding"] * 8 + ["full"] * 4
    sliding = dataclasses.replace(model, layer_types=types, sliding_window=64)
    splits = [
        blueprint_of(Config(model=each, pp=2, dp=1)).layers_per_stage for each in (model, sliding)
    ]
    assert splits == [(6, 6), (10, 2)]
