"""Tests `p3d.init`: the groups of a user's script, and refusals on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

import parallel3d as p3d
from parallel3d.comm.collectives import all_reduce, differs
from parallel3d.comm.group import group_of

# If rank 1 passes other arguments than the other ranks, they come second.
BAD = (
    ({"tp": 3}, {}, "init(tp=3) must divide the world's 4 ranks; the nearest is tp=2"),
    ({"pp": 2, "tp": 4}, {}, "init(tp=4) must divide the world's 2 ranks of each of 2 parts; "),
    ({"dp": 3}, {}, "init(dp=3) must be 4, since the world has 4 ranks and tp × pp is 1; "),
    ({"tp": None, "pp": None, "dp": 2}, {}, "init(pp=None, tp=None) must leave at most one size"),
    ({"tp": 0}, {}, "init(tp=0) must be a whole number from 1 on; the nearest is tp=1"),
    ({"pp": "two"}, {}, "init(pp='two') must be a whole number from 1 on; the nearest is pp=1"),
    ({"order": "tp-pp"}, {}, "init(order='tp-pp') must name each of tp, cp, dp and pp once"),
    ({"cp": 3}, {}, "init(cp=3) must divide the world's 4 ranks; the nearest is cp=2"),
    ({"cp": 2, "dp": 4}, {}, "init(dp=4) must be 2, since the world has 4 ranks and tp × cp × pp "),
    ({"tp": 2}, {"tp": 4}, "init(tp=4) on rank 1 must be tp=2, as on rank 0: "),
)


def grids() -> tuple[list, list[str]]:
    """Returns this rank's groups in two grids with the sums over them, and the texts of
    refusals."""
    rank, found, said = dist.get_rank(), [], []
    for words in ({"tp": 2}, {"pp": None, "dp": 2, "order": "pp-tp-cp-dp", "shared_memory": False}):
        groups = p3d.init(**words)
        sums = [int(all_reduce(torch.tensor([rank]), g)) for g in (groups.tp, groups.pp, groups.dp)]
        found.append([(groups.tp.ranks, groups.pp.ranks, groups.dp.ranks), sums])
        groups.close()
    groups = p3d.init(cp=2)
    split = (groups.cp.ranks, groups.dp.ranks, groups.dp_cp.ranks)
    sizes = groups.mesh["cp"].size(), groups.mesh["dp"].size()
    assert split == (((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2], (0, 1, 2, 3))
    assert sizes == (2, 2) and groups.mesh["cp"].get_local_rank() == groups.cp.index == rank % 2
    with groups:
        groups.close()  # in a world of the script too, closing twice is no error
    for words, of_rank_1, _ in BAD:
        try:
            p3d.init(**(words | of_rank_1 if rank == 1 else words))
        except p3d.Parallel3dError as error:
            said.append(str(error))
    return found, said


def test_init_splits_the_world_and_impossible_sizes_are_refused_on_every_rank(pool) -> None:
    results = pool.run(4, grids)
    assert [found for found, _ in results] == [
        [[((0, 1), (0,), (0, 2)), [1, 0, 2]], [((0,), (0, 1), (0, 2)), [0, 1, 2]]],
        [[((0, 1), (1,), (1, 3)), [1, 1, 4]], [((1,), (0, 1), (1, 3)), [1, 1, 4]]],
        [[((2, 3), (2,), (0, 2)), [5, 2, 2]], [((2,), (2, 3), (0, 2)), [2, 5, 2]]],
        [[((2, 3), (3,), (1, 3)), [5, 3, 4]], [((3,), (2, 3), (1, 3)), [3, 5, 4]]],
    ]
    for _, said in results:
        assert len(said) == len(BAD)
        for (_, _, wanted), sentence in zip(BAD, said, strict=True):
            assert sentence.startswith(wanted), sentence


def in_pairs() -> tuple[int, bool, bool]:
    """Returns the sum of the ranks of this rank's pair, and whether ranks and equal numbers
    differ."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = group_of(pairs[rank // 2])
    own, equal = torch.tensor([rank]), torch.tensor([7])
    return int(all_reduce(own.clone(), pair)), differs(own, pair), differs(equal, pair)


def test_two_ranks_of_a_process_group_communicate(pool) -> None:
    assert pool.run(4, in_pairs) == [(1, True, False)] * 2 + [(5, True, False)] * 2
