"""Tests that gathers and scatters in pieces, by every transport, have the same bits as in one
piece.

`matrix` tests that sequence parallelism in pieces trains like the reference.
"""

from __future__ import annotations

from itertools import product

import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import LaunchConfig
from parallel3d.tensor_parallel.linear_ops import gather_linear, linear_scatter
from tests.distributed.pool import Pool


def ways_agree(layout: Layout, shared_memory: bool) -> None:
    """Asserts that each transport, in pieces, gives the bits of a gather or scatter in one piece.

    The weight is the unit matrix, so that a GEMM only copies, and bits show the order of sums.
    """
    launch = LaunchConfig(shared_memory=shared_memory)
    groups = ProcessGroups.create(layout, "cpu", timeout_s=300, launch=launch)
    tp, size, unit = groups.tp, groups.tp.size, torch.eye(6, dtype=torch.float64)
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


def all_ways_agree() -> None:
    for layout, shared_memory in product((Layout(tp=2, dp=2), Layout(tp=4)), (True, False)):
        ways_agree(layout, shared_memory)


def test_all_transports_in_pieces_give_the_same_bits(pool: Pool) -> None:
    pool.run(4, all_ways_agree)
