"""Tests that a mixture of experts trains the same model in every layout, with the same counts and
biases."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from parallel3d.blueprint.layout import Layout
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_cases, run_cases
from tests.distributed.pool import Pool

EIGHT: dict[str, object] = {
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_size": 24,
    "qk_norm": True,
}
SIXTEEN: dict[str, object] = {
    "num_experts": 16,
    "experts_per_token": 4,
    "expert_ffn_size": 32,  # width of the residual stream
    "router_score": "sigmoid",
    "router_bias": True,
    "router_scale": 2.5,
    "router_groups": 4,
    "router_top_groups": 2,
    "shared_expert_size": 16,
    "dense_layers": (1,),
}
LOSSES = (("aux_loss", 0.1), ("z_loss", 0.01), ("bias_update_rate", 0.05))
MODELS: dict[str, dict[str, object]] = {"eight": EIGHT, "sixteen": SIXTEEN}


def problem(model: str, optimizer: str, batch: int = 8, documents: bool = True) -> Problem:
    """Returns a problem with packed samples, some of them padded."""
    return Problem(
        "llama_tiny",
        optimizer,
        False,
        model=tuple(MODELS[model].items()),
        layers=4,
        steps=2,
        moe=LOSSES,
        documents=documents,
        batch=batch,
        optim=(("clip_grad", 0.3),) if optimizer == "sgd" else (),
    )


# (tp, pp, dp, cp, ep), keys of the layout, and the schedule.
LAYOUTS: list[tuple[Sizes, dict[str, object]]] = [
    ((1, 1, 4, 1, 1), {}),
    ((2, 1, 1, 2, 1), {}),
    ((2, 2, 1, 1, 1), {"schedule": "zb_h1"}),
    ((1, 1, 4, 1, 2), {}),
    ((1, 2, 2, 1, 2), {"schedule": "zbv", "vpp": 2}),
    ((2, 1, 2, 1, 2), {"zero": 1}),
    ((4, 1, 1, 1, 2), {}),
    ((1, 1, 4, 1, 2), {"zero": 3}),
    ((2, 1, 4, 1, 4), {}),
    ((2, 1, 2, 2, 4), {}),
    ((4, 1, 1, 1, 4), {}),
    ((1, 2, 2, 2, 4), {"schedule": "interleaved", "vpp": 2}),
    ((1, 1, 8, 1, 8), {}),
    ((2, 1, 2, 2, 8), {}),
]
WAYS = ("gather", "all_to_all")
RECOMPUTED = ("none", "[mlp]", "[norm,attention,mlp]", "full")


def case(
    of: Problem, sizes: Sizes, more: dict[str, object], way: str, recompute: str, samples: int
) -> Case:
    """Returns a case of the problem `of` under a layout, with micro-batches of `samples`
    sequences."""
    keys = {"moe.dispatch": way, "recompute": recompute, **more}
    schedule = str(keys.pop("schedule", "1f1b"))
    return Case(
        of,
        schedule,
        sp=sizes[0] > 1,
        microbatches=of.batch // sizes[2] // samples,
        keys=tuple(keys.items()),
    )


# Every layout runs with both models, one of them in the default set, in turn. Dispatch,
# recomputation, optimizer and size of micro-batches alternate too, so that every two of them meet.
SHORT = [
    pytest.param(
        number, name, sizes, more, marks=[pytest.mark.more] * (number // 2 % 2 == number % 2)
    )
    for number, ((sizes, more), name) in enumerate(product(LAYOUTS, MODELS))
]


def _id(value: object) -> str | None:
    return "-".join(map(str, value)) if isinstance(value, tuple) else None


@pytest.mark.parametrize(("number", "name", "sizes", "more"), SHORT, ids=_id)
def test_every_layout_trains_the_same_experts(
    number: int,
    name: str,
    sizes: Sizes,
    more: dict[str, object],
    pool: Pool,
    references: References,
) -> None:
    optimizer = ("sgd", "adamw", "muon")[number % 3]
    way = WAYS[number // 2 % 2]
    recompute = RECOMPUTED[number * 3 // 2 % 4]
    of = problem(name, optimizer)
    samples = min(1 + number // 3 % 2, of.batch // sizes[2])
    one = case(of, sizes, more, way, recompute, samples)
    check_cases(sizes, [one], pool, references)


LONG = [pytest.param(*layout, marks=pytest.mark.more) for layout in LAYOUTS]


@pytest.mark.parametrize(("sizes", "more"), LONG, ids=_id)
def test_every_way_and_recomputation_trains_the_same_experts(
    sizes: Sizes, more: dict[str, object], pool: Pool, references: References
) -> None:
    of = problem("sixteen", "sgd")
    cases = [
        case(of, sizes, more, way, recompute, min(1 + number % 2, of.batch // sizes[2]))
        for number, (way, recompute) in enumerate(product(WAYS, ("none", "[mlp]", "full")))
        if sizes[4] > 1 or way == WAYS[0]
    ]
    check_cases(sizes, cases, pool, references)


BALANCED: list[tuple[Sizes, str]] = [
    ((2, 1, 2, 1, 4), "all_to_all"),
    ((2, 1, 1, 2, 2), "gather"),
    ((1, 2, 2, 1, 2), "all_to_all"),
    ((1, 1, 1, 4, 4), "gather"),
]


@pytest.mark.parametrize(("sizes", "way"), BALANCED, ids=_id)
def test_balanced_routing_gives_equal_counts_and_the_same_training_in_every_layout(
    sizes: Sizes, way: str, pool: Pool
) -> None:
    """Compares with one process, because the reference has no such routing."""
    of = replace(problem("eight", "sgd"), documents=False)
    more: dict[str, object] = {"moe.routing": "balanced"}
    one = case(of, (1, 1, 1, 1, 1), more, way, "none", 1)
    many = case(of, sizes, more, way, "full", min(2, of.batch // sizes[2]))
    [alone] = pool.run(1, run_cases, (1, 1, 1, 1, 1), [one])[0]
    ranks = pool.run(Layout(*sizes).world_size, run_cases, sizes, [many])
    for [outcome] in ranks:
        for step, expected in zip(outcome.steps, alone.steps, strict=True):
            assert step.counts == expected.counts
            assert all(len(set(counts)) == 1 for _, counts in step.counts)
            for name in ("loss", "grad_norm", "aux", "z", "entropy"):
                assert getattr(step, name) == pytest.approx(getattr(expected, name), rel=1e-9)
    for name, weight in ranks[0][0].final.items():
        np.testing.assert_allclose(weight, alone.final[name], rtol=1e-9, atol=1e-12, err_msg=name)
