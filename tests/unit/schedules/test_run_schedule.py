"""Tests `schedule=auto` in a run: the clock's choice for its own model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.errors import UserError
from parallel3d.models.flops import layer_flops
from parallel3d.models.keys import ModelConfig
from parallel3d.models.repeats import Repeats
from parallel3d.resolve import blueprint_of, stage_weights
from parallel3d.run_config import Config, check_config
from parallel3d.schedules.choose import choose, measure
from parallel3d.schedules.keys import ScheduleConfig
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import RankWork


def config(
    layers: int, vocabulary: int = 257, recompute: str = "none", **schedule: object
) -> Config:
    model = ModelConfig(num_layers=layers, vocab_size=vocabulary)
    keys = ScheduleConfig(name="auto", **schedule)
    sizes = {"pp": 4, "vpp": 2, "dp": 1, "micro_batch_size": 4, "global_batch_size": 32}
    return check_config(Config(model=model, schedule=keys, recompute=recompute, **sizes))


def test_the_choice_is_at_least_as_good_as_one_that_ignores_the_head() -> None:
    """Uses a vocabulary so large that the head costs as much as several layers."""
    made = config(16, 60_000)
    work = RankWork(1.0, 1.0, 1.0, 0.0, stage_weights(made))
    blind = choose(4, 8, 2, RankWork(1.0, 1.0, 1.0)).schedule
    chosen = measure(blueprint_of(made).pipeline.schedule(), work)
    assert chosen.seconds < measure(blind, work).seconds
    assert f"{chosen.overhead:.1%} over compute" in blueprint_of(made).pipeline.why_chosen()


def test_each_stage_of_the_choice_has_a_layer() -> None:
    """A V would be faster, but the model has too few layers for its eight stages."""
    assert blueprint_of(config(8)).pipeline.schedule().assignment.chunks == 2
    made = config(7)
    assert blueprint_of(made).pipeline.schedule().assignment == StageAssignment(4)
    assert [len(stage.layers) for stage in blueprint_of(made).stages] == [2, 2, 2, 1]


def test_given_layers_per_stage_decide_the_number_of_stages() -> None:
    made = config(8, layers_per_stage=[2, 2, 3, 1])
    assert blueprint_of(made).pipeline.schedule().assignment == StageAssignment(4)
    assert [len(stage.layers) for stage in blueprint_of(made).stages] == [2, 2, 3, 1]


@pytest.mark.parametrize(
    ("layers", "given", "words"),
    [
        (3, None, "pp=4 must be at most model.num_layers=3"),
        (8, [2, 2, 4], "has 3 entries for pp=4 stages"),
        (8, [1] * 12, "has 12 entries for pp=4 stages"),
        (8, [2, 2, 2, 3], "adds up to 9 layers"),
    ],
)
def test_a_model_that_no_schedule_can_split_is_refused(
    layers: int, given: list[int] | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        config(layers, layers_per_stage=given)


def test_recomputation_counts_towards_the_input_gradients_time() -> None:
    """The given number of layers recomputes on each stage; norms and activations count no FLOPs."""
    model, assignment = config(8).model, StageAssignment(4)
    attention = 2 * model.hidden_size * model.seq_length
    matmul = 2 * model.hidden_size * model.ffn_size  # the projection up, or the one down
    whole = 8 * model.hidden_size**2 + attention + 2 * matmul
    plain = RankWork(1.0, 1.0, 1.0, 0.0, stage_weights(config(8))).costs(assignment)
    for recompute, products in {
        "[norm,activation]": 0.0,
        "selective": attention,
        "[norm,mlp]": matmul,
        "full": whole - matmul,
    }.items():
        made = replace(config(8, recompute=recompute), recompute_layers=[2, 1, 0, 0])
        costs = RankWork(1.0, 1.0, 1.0, 0.0, stage_weights(made)).costs(assignment)
        share = products / whole
        more = [b - a for a, b in zip(plain.input, costs.input, strict=True)]
        # The shares refer to the forward of two layers, which is 1.0.
        assert more == pytest.approx([share, share / 2, 0, 0])
        assert (costs.forward, costs.weight) == (plain.forward, plain.weight)
        plainly = blueprint_of(replace(made, vpp=1, schedule=ScheduleConfig()))
        assert plainly.recompute_forwards() == pytest.approx(more)


def test_recomputed_flops_equal_those_of_dry_runs() -> None:
    """Compares with docs/dryrun.md: in a step of Llama 3 8B, a rank runs sixteen sequences in 32
    layers."""
    model = ModelConfig(
        hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336,
        seq_length=8192, activation="swiglu",
    )  # fmt: skip
    tera = 32 * 16 * 8192 / 1e12
    for recompute, flops in (("full", 8506), ("selective", 7169), ("[norm,activation]", 6887)):
        again = tera * layer_flops(model, repeats=Repeats.of(recompute))
        assert again == pytest.approx(flops - 6887, abs=1)  # both are rounded
