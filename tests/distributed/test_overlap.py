"""Recomputation and sequence parallelism in pieces change nothing: the runs are the reference's.

Pairwise over pieces, recomputation, schedule, zero, table, dropout, layout, with and without shared
memory and compiler; every case also with unequal masks and three steps.
"""

from __future__ import annotations

import pytest
import torch

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import LaunchConfig
from parallel3d.tensor_parallel.linear_ops import gather_linear, linear_scatter
from parallel3d.topology.layout import Layout
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, differences, run_cases
from tests.distributed.pool import Pool
from tests.kernels import no_kernels

GPT = Problem("gpt_tiny", "sgd", tied=True)
TWO_LAYERS = Problem("gpt_tiny", "adamw", tied=True, layers=2)  # compiling takes seconds for each
LLAMA = Problem("llama_tiny", "adamw", tied=False)
DROPS = Problem("llama_tiny", "sgd", tied=False, model=(("dropout", 0.2),))


def case(
    problem: Problem, chunks: int = 1, recompute: str = "none", zero: int = 0, **way: object
) -> Case:
    keys = (("tensor_parallel.chunks", chunks), ("recompute", recompute), ("zero", zero))
    return Case(problem, sp=chunks > 1 or way.pop("sp", False), keys=keys, **way)


SMALL_BUCKETS = {"bucket_cap_mb": 0.01}
RUNS = {
    (1, 1, 1): [case(GPT, 1, "full"), case(LLAMA, 1, "selective")],
    (2, 1, 1): [
        case(GPT, 2, "full"),
        case(LLAMA, 8),
        case(LLAMA, 1, "full", sp=True),
        case(TWO_LAYERS, 4, "full", compile=True, microbatches=4),
    ],
    (4, 1, 1): [case(DROPS, 4, "selective"), case(GPT, 2), case(GPT, 1, "full")],
    (1, 2, 2): [
        case(GPT, 1, "full", 1, schedule="gpipe"),
        case(DROPS, 1, "full", **SMALL_BUCKETS),
    ],
    (2, 2, 1): [
        case(GPT, 4, "full", schedule="gpipe"),
        case(LLAMA, 2, "[norm,mlp]"),
        case(LLAMA, 1, "full", embedding="replicated"),
    ],
    (2, 1, 2): [
        case(LLAMA, 2, "full", zero=1, **SMALL_BUCKETS),
        case(GPT, 4, zero=1, **SMALL_BUCKETS),
        case(LLAMA, 2, "full", zero=3),
    ],
}


@pytest.mark.parametrize("sizes", RUNS, ids=lambda s: "tp{}-pp{}-dp{}".format(*s))
def test_pieces_and_recomputation_train_as_the_reference_does(
    sizes: tuple[int, int, int], pool: Pool, references: References
) -> None:
    world = sizes[0] * sizes[1] * sizes[2]
    # What is compiled has TorchInductor's own kernels in test_compiled.
    by_rank = pool.run(world, run_cases, sizes, RUNS[sizes], no_kernels, timeout_s=900)
    for each, outcomes in zip(RUNS[sizes], zip(*by_rank, strict=True), strict=True):
        found = differences(outcomes, references.of(each.problem), each.problem)
        assert not found, f"{each}: {found}"


def ways_agree(size: int, shared_memory: bool) -> None:
    """Every way of gathering and scattering gives the bits of the one in one piece.

    The weight is the unit matrix, so that a GEMM only copies and bits tell the order of sums.
    """
    launch = LaunchConfig(shared_memory=shared_memory)
    groups = ProcessGroups.create(Layout(tp=size), "cpu", timeout_s=300, launch=launch)
    tp, unit = groups.tp, torch.eye(6, dtype=torch.float64)
    assert (tp.shared is not None) == shared_memory
    generator = torch.Generator().manual_seed(tp.index)
    bias = torch.arange(6.0, dtype=torch.float64)
    shard = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    partial = torch.randn(3, 4 * size, 6, generator=generator, dtype=torch.float64)
    gathered = gather_linear(shard, unit, bias, tp, 1, keep=True)
    scattered = linear_scatter(partial, unit, tp, 1)
    assert scattered.shape == shard.shape and gathered[0].shape == partial.shape
    for chunks in (2, 4):
        y, full = gather_linear(shard, unit, bias, tp, chunks, keep=True)
        assert torch.equal(y, gathered[0]) and torch.equal(full, gathered[1])
        assert torch.equal(linear_scatter(partial, unit, tp, chunks), scattered)
    groups.close()


@pytest.mark.parametrize(("size", "shared_memory"), [(2, True), (2, False), (4, True), (4, False)])
def test_all_ways_give_the_same_bits(pool: Pool, size: int, shared_memory: bool) -> None:
    pool.run(size, ways_agree, size, shared_memory)
