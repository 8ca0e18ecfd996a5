"""Buckets follow the order in which gradients become ready, and nothing else changes by it.

That trainings in this order are the reference's: see `matrix`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from parallel3d.blueprint.buckets import MIB
from parallel3d.blueprint.layout import Layout
from parallel3d.config.schema import OptimConfig
from parallel3d.data_parallel import engine as engines
from parallel3d.data_parallel.engine import (
    BucketedDataParallel,
    agreed_order,
    full_values,
    rebuild_buckets,
)
from parallel3d.optim import Optimizer
from parallel3d.parameters.copies import Copies, CopyGroups
from parallel3d.parameters.slices import ParameterSlice
from parallel3d.parameters.spec import ParameterSpec
from parallel3d.parameters.state import state_of
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer, plain_groups
from tests.distributed.pool import Pool

Mutation = Callable[[], AbstractContextManager[None]]
MEASURED = ("ddp.bucket_order", "measured")
NAMES = ["a", "b", "c", "d", "e"]
EXECUTED = ["c", "a", "e", "b"]  # in forward order; d is not used at all
ONE_EACH = 40 * 4 / MIB


def chain(parameters: dict[str, nn.Parameter], order: list[str], scale: float) -> torch.Tensor:
    """A forward whose backward reaches the parameters in the reverse of `order`, one by one."""
    x = torch.ones(40)
    for name in order:
        x = torch.sin(x * parameters[name].float() * scale)
    return x.sum()


@contextmanager
def everyone_for_himself() -> Iterator[None]:
    """Each rank fills its buckets in its own order: equal sizes, other parameters, no error."""
    with patch.object(engines, "broadcast_json", lambda value, handle, device: value):
        yield


def artificial(
    zero: int, dtype: torch.dtype, measured: bool, mutation: Mutation = nullcontext
) -> dict[str, Any]:
    """Three steps of a chain on two ranks; the second rank runs it in another order at first."""
    groups = plain_groups(Layout(dp=2))
    generator = torch.Generator().manual_seed(5)
    parameters = {}
    for name in NAMES:
        parameters[name] = nn.Parameter(torch.randn(40, generator=generator))
        state_of(parameters[name]).spec = ParameterSpec((40,), (), replicated=True)
    engine = BucketedDataParallel(
        [parameters], dtype, lambda spec: CopyGroups(groups.dp), zero, bucket_cap_mb=ONE_EACH
    )
    make_optimizer = partial(Optimizer, OptimConfig(name="adamw", lr=0.1))
    optimizer = make_optimizer(engine.segments)
    result: dict[str, Any] = {}
    for step in range(3):
        engine.wait_for_all_gathers()
        engine.start_step(1)
        order = EXECUTED if groups.rank == 0 or step else EXECUTED[::-1]
        chain(parameters, order, 1.0 + groups.rank).backward()
        result["unused"] = engine.finish_step()
        optimizer.step(0.1, 1.0)
        engine.all_gather_params()
        if measured and step == 0:
            result["ready order"] = list(engine.ready_order)
            with mutation():
                optimizer = rebuild_buckets(engine, optimizer, make_optimizer, groups)
        result[f"buckets {step}"] = [list(b.params) for b in engine.buckets]
    engine.wait_for_all_gathers()
    result["values"] = {n: p.detach().float().numpy().tobytes() for n, p in parameters.items()}
    result["updates"] = optimizer.updates
    groups.close()
    return result


def both_orders() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    kinds = [(0, torch.float32), (1, torch.bfloat16)]
    return [(artificial(*kind, True), artificial(*kind, False)) for kind in kinds]


def test_order_of_a_model_that_runs_against_its_registration(pool: Pool) -> None:
    first, second = pool.run(2, both_orders)
    assert [ours["ready order"] for ours, _ in first] == [["b", "e", "a", "c"]] * 2
    assert [ours["ready order"] for ours, _ in second] == [["c", "a", "e", "b"]] * 2
    for ours, theirs in (*first, *second):
        # The second rank takes the first one's word; what never arrived is last.
        assert ours["buckets 0"] == ours["buckets 2"] == [["b"], ["e"], ["a"], ["c"], ["d"]]
        assert theirs["buckets 2"] == [["e"], ["d"], ["c"], ["b"], ["a"]]
        assert ours["unused"] == theirs["unused"] == ["d"]
        assert ours["values"] == theirs["values"], "bits: the order moves numbers, no more"
        assert ours["updates"] == theirs["updates"] == 3


@pytest.mark.more
def test_buckets_that_nobody_agreed_on_are_told(pool: Pool) -> None:
    mutated = pool.run(2, artificial, 0, torch.float32, True, everyone_for_himself)
    plain = pool.run(2, artificial, 0, torch.float32, False)
    assert plain[0]["values"] == plain[1]["values"], "replicas"
    assert mutated[0]["values"] != plain[0]["values"]
    assert mutated[0]["values"] != mutated[1]["values"]


def orders() -> list[list[str]]:
    """Of one stage of tp=2 × dp=2, and of two stages of dp=2."""
    found = []
    for layout in (Layout(tp=2, dp=2), Layout(pp=2, dp=2)):
        groups = plain_groups(layout)
        mine = ["x", "y", "z"][groups.rank :] + ["x", "y", "z"][: groups.rank]
        found.append(agreed_order(mine[:2], ["x", "y", "z"], groups))
        groups.close()
    return found


def test_all_ranks_of_a_stage_take_the_order_of_its_first(pool: Pool) -> None:
    one, two = zip(*pool.run(4, orders), strict=True)
    assert one == (["x", "y", "z"],) * 4
    assert two == (["x", "y", "z"],) * 2 + (["z", "x", "y"],) * 2


def moved_values(rank_has: list[dict[str, dict[str, torch.dtype]]]) -> dict[str, Any]:
    """What `full_values` makes of slices of which each rank has kinds of its own, in its order."""
    groups = plain_groups(Layout(dp=2))
    parameters = {name: nn.Parameter(torch.empty(3)) for name in "ab"}
    spec = ParameterSpec((3,), (), replicated=True)
    slices = [
        ParameterSlice(
            name, spec, 0,
            {kind: torch.full((3,), len(kind), dtype=dtype) for kind, dtype in kinds.items()},
            Copies(0, 1),
        )
        for name, kinds in rank_has[groups.rank].items()
    ]  # fmt: skip
    found = full_values(slices, parameters, groups.dp)
    groups.close()
    return {
        kind: [(str(x.dtype), x.tolist()) for x in values.values()]
        for kind, values in sorted(found.items())
    }


def test_state_is_moved_by_kind_whatever_kinds_a_rank_has_and_in_whichever_order(
    pool: Pool,
) -> None:
    """As Muon beside AdamW has them, with groups of parameters by name."""
    wide, half = torch.float32, torch.bfloat16
    first = {"a": {"parameter": wide, "momentum": half}}
    second = {"b": {"exp_avg": half, "parameter": wide}}
    for rank in pool.run(2, moved_values, [first, second]):
        assert rank == {
            "exp_avg": [("torch.bfloat16", [0.0] * 3), ("torch.bfloat16", [7.0] * 3)],
            "momentum": [("torch.bfloat16", [8.0] * 3), ("torch.bfloat16", [0.0] * 3)],
            "parameter": [("torch.float32", [9.0] * 3)] * 2,
        }


def model_order(sizes: tuple[int, int, int]) -> tuple[list[str], list[str]]:
    """The order of the buckets' parameters before and after the first step of a real model."""
    groups = plain_groups(Layout(*sizes))
    case = Case(Problem("gpt_tiny", "sgd", tied=True), bucket_cap_mb=1e-6, keys=(MEASURED,))
    trainer = make_trainer(case, groups)
    before = [name for b in trainer.data_parallel.buckets for name in b.params]
    trainer.train_step()
    after = [name for b in trainer.data_parallel.buckets for name in b.params]
    trainer.train_step()
    arrived = trainer.data_parallel.ready_order
    groups.close()
    assert after == arrived != before
    return before, after


def test_buckets_of_the_model_are_in_its_order(pool: Pool) -> None:
    for before, after in pool.run(2, model_order, (1, 1, 2)):
        assert sorted(before) == sorted(after)
        assert after[-1] == "embedding.word.weight", "a tied table is ready last"
