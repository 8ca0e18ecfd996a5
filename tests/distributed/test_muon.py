"""Tests that Muon equals the reference in every layout, and that planted bugs are caught.

The reference steps whole matrices by name.

The comparison is in fp64 to 1e-9. test_matrix has Muon with all other features. It lacks these
cases: the other scale, shards of shards, key-value heads on four ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from parallel3d.comm.group import Group
from parallel3d.optim import muon
from parallel3d.optim.muon import HiddenMatrix, Muon
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.segments import ParameterSpan
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_cases, check_caught
from tests.distributed.pool import Pool

GPT = Problem("gpt_tiny", "muon", True, layers=2)
LLAMA = Problem("llama_tiny", "muon", False, layers=2)
ONE_HEAD = dataclasses.replace(LLAMA, model=(("num_query_groups", 1),))
ORIGINAL = dataclasses.replace(GPT, optim=(("muon_scale", "original"), ("momentum", 0.8)))


def sharded(problem: Problem, zero: int, **way: Any) -> Case:
    return Case(problem, keys=(("zero", zero),), **way)


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        (
            (2, 1, 2),
            [sharded(ORIGINAL, 1, bucket_cap_mb=0.02), sharded(ONE_HEAD, 3, sp=True)],
        ),
        ((4, 1, 1), [Case(ONE_HEAD)]),
    ],
    ids=["tp-and-dp", "tp"],
)
def test_sharded_matrices_step_like_whole_ones(
    sizes: tuple[int, ...], cases: list[Case], pool: Pool, references: References
) -> None:
    outcomes = check_cases(sizes, cases, pool, references)
    assert [found[0].replicas[0] for found in outcomes] == [0.0] * len(cases)  # equal bits


# Planted bugs. Others have had such bugs: NVIDIA/Megatron-LM#4731, xtuner#2030, DeepSpeed#8384.

NUMBERS = {"loss", "grad norm", "weights"}


@contextmanager
def fused_matrices(inside: str) -> Iterator[None]:
    """q, k and v, or gate and up, are treated as one matrix, as which they are stored."""
    sound = muon.ranges_of

    def fuse(span: ParameterSpan) -> ParameterSpan:
        if inside not in span.name or len(span.spec.shards) == 1:
            return span
        shape = span.spec.shape
        whole = ShardSpec(f"layers.{span.name}", shape, (0, 0), shape, muon=True)
        return span._replace(spec=dataclasses.replace(span.spec, shards=(whole,)))

    with patch.object(muon, "ranges_of", lambda spans: sound([fuse(span) for span in spans])):
        yield


@contextmanager
def each_shard_by_itself() -> Iterator[None]:
    """Every tp rank makes its own shard orthogonal."""

    def gather(self: Muon, shards: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: flat.view(self.matrices[name].local) for name, flat in shards.items()}

    def scatter(self: Muon, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: matrix.reshape(-1) for name, matrix in whole.items()}

    with (
        patch.object(Muon, "gather_over_tp", gather),
        patch.object(Muon, "scatter_over_tp", scatter),
    ):
        yield


@contextmanager
def output_projection_by_rows() -> Iterator[None]:
    """Shards of columns are stacked by rows: the sizes divide evenly, so no error is raised."""
    sound = HiddenMatrix.of

    def of(spec: ParameterSpec, shard: ShardSpec, tp: Group) -> HiddenMatrix:
        found = sound(spec, shard, tp)
        if "attention.out" not in shard.name:
            return found
        rows, columns = found.full
        return dataclasses.replace(found, axis=0, local=(rows // tp.size, columns))

    with patch.object(HiddenMatrix, "of", of):
        yield


@contextmanager
def momentum_of_another_matrix() -> Iterator[None]:
    """After a step, two matrices of equal shape have each other's momentum."""
    sound = Optimizer.step_hidden

    def step(self: Optimizer, *rest: Any) -> None:
        sound(self, *rest)
        for group in self.groups:
            for segment, flat in zip(group.segments, group.state.get("momentum", []), strict=False):
                outs = [
                    (p, at) for p, at, *_ in muon.ranges_of(segment.spans) if ".out." in p.matrix
                ]
                (one, a), (_, b) = outs[:2]
                size = one.end - one.first
                kept = flat[a : a + size].clone()
                flat[a : a + size] = flat[b : b + size]
                flat[b : b + size] = kept

    with patch.object(Optimizer, "step_hidden", step):
        yield


@pytest.mark.more
@pytest.mark.parametrize(
    ("mutation", "sizes", "case"),
    [
        (partial(fused_matrices, "attention"), (1, 1, 1), Case(LLAMA)),
        (partial(fused_matrices, "mlp"), (1, 1, 1), Case(LLAMA)),
        (each_shard_by_itself, (2, 1, 1), Case(GPT)),
        (output_projection_by_rows, (2, 1, 1), Case(GPT)),
        (momentum_of_another_matrix, (1, 1, 1), Case(LLAMA)),
    ],
    ids=["fused-qkv", "fused-gate-up", "per-shard", "out-by-rows", "other-momentum"],
)
def test_a_planted_bug_of_muon_is_caught(
    mutation: Callable[[], AbstractContextManager[None]],
    sizes: tuple[int, int, int],
    case: Case,
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, NUMBERS, pool, references)
