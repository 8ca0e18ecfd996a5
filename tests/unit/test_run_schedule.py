"""`schedule=auto` of a run: the clock's choice for its own model."""

from __future__ import annotations

import pytest

from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import Config, ModelConfig, ScheduleConfig
from parallel3d.errors import UserError
from parallel3d.schedules.choose import Work, choose, measure
from parallel3d.schedules.placement import Placement
from parallel3d.sizes.run_schedule import run_schedule, why_chosen
from parallel3d.sizes.stage_costs import StageWeights
from parallel3d.sizes.stages import layers_of_stages


def config(layers: int, vocabulary: int = 257, **schedule: object) -> Config:
    model = ModelConfig(num_layers=layers, vocab_size=vocabulary)
    keys = ScheduleConfig(name="auto", **schedule)
    sizes = {"pp": 4, "vpp": 2, "dp": 1, "micro_batch_size": 4, "global_batch_size": 32}
    return check_config(Config(model=model, schedule=keys, **sizes))


def test_the_choice_is_at_least_as_good_as_what_ignores_the_head() -> None:
    """A vocabulary so large that the head is worth several layers."""
    made = config(16, 60_000)
    work = Work(1.0, 1.0, 1.0, 0.0, StageWeights.of_run(made))
    blind = choose(4, 8, 2, Work(1.0, 1.0, 1.0)).schedule
    chosen = measure(run_schedule(made), work)
    assert chosen.seconds < measure(blind, work).seconds
    assert f"{chosen.overhead:.1%} over compute" in why_chosen(made)


def test_each_stage_of_the_choice_has_a_layer() -> None:
    """A V would be faster, and the model has no layers for its eight stages."""
    assert run_schedule(config(8)).placement.chunks == 2
    made = config(7)
    assert run_schedule(made).placement == Placement(4)
    assert [len(stage) for stage in layers_of_stages(made)] == [2, 2, 2, 1]


def test_layers_as_given_decide_how_many_stages_there_are() -> None:
    made = config(8, layers_per_stage=[2, 2, 3, 1])
    assert run_schedule(made).placement == Placement(4)
    assert [len(stage) for stage in layers_of_stages(made)] == [2, 2, 3, 1]


@pytest.mark.parametrize(
    ("layers", "given", "words"),
    [
        (3, None, "pp=4 must be at most model.num_layers=3"),
        (8, [2, 2, 4], "has 3 entries for pp=4 stages"),
        (8, [1] * 12, "has 12 entries for pp=4 stages"),
        (8, [2, 2, 2, 3], "adds up to 9 layers"),
    ],
)
def test_what_no_schedule_can_lay_out_is_refused(
    layers: int, given: list[int] | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        config(layers, layers_per_stage=given)
