"""Tests sharded and full state dicts: through torch.distributed.checkpoint into another split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import parallel3d as p3d
from parallel3d.comm.group import SINGLE
from tests.distributed.pool import Pool

WORDS, WIDTH = 16, 12


class Block(nn.Module):
    """Has plain and tensor-parallel layers, and buffers of two dtypes."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        column, row, more = nn.Linear, nn.Linear, ()
        if group is not None:
            column, row, more = p3d.ColumnParallelLinear, p3d.RowParallelLinear, (group,)
        self.up, self.down = column(WIDTH, 20, *more), row(20, WIDTH, *more)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x)).transpose(1, 2)).transpose(1, 2)


def net(group: Any = None, seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    words = nn.Embedding(WORDS, WIDTH)
    if group is not None:
        words = p3d.VocabParallelEmbedding.from_embedding(words, group)
    modules = nn.Sequential(words, Block(group), Block(group), nn.Linear(WIDTH, 5))
    for module in modules:
        for buffer in module.buffers():
            buffer.add_(seed)
    return modules


# By number of ranks, so that each split is loaded from the preceding one, in few runs of the pool.
SPLITS: dict[int, dict[str, dict[str, int]]] = {
    1: {"one": {}},
    2: {"tp": {"tp": 2}, "pp": {"pp": 2}},
    4: {
        "tp of four": {"tp": 4},
        "fsdp with odd rows": {"dp": 4},
        "tp and pp": {"tp": 2, "pp": 2},
        "tp and fsdp": {"tp": 2, "dp": 2},
    },
    8: {"all": {"tp": 2, "pp": 2, "dp": 2}},
}


def split(name: str, groups: p3d.ProcessGroups, seed: int) -> nn.Module:
    module: nn.Module = net(groups.tp, seed)
    if "fsdp" in name or name == "all":
        for part in module:
            fully_shard(part, mesh=groups.mesh["dp"])
    if groups.pp.size > 1:
        module = p3d.Pipeline(module, groups.pp)
    return module


def equal(ours: dict[str, Tensor], seed: int) -> bool:
    theirs = net(seed=seed).state_dict()
    assert list(ours) == list(theirs)
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


def saved(groups: p3d.ProcessGroups, module: nn.Module, folder: Path) -> None:
    shards = p3d.sharded_state_dict(module)
    whole = net().state_dict()
    for key, value in shards.items():
        assert tuple(value.shape) == tuple(whole[key].shape)
        if isinstance(value, DTensor):
            assert value.to_local().numel() < value.numel() or value.numel() < 8
    dcp.save(shards, checkpoint_id=str(folder))
    full = p3d.full_state_dict(module)
    assert equal(full, 3) if groups.rank == 0 else full == {}
    again = net(seed=4)
    if groups.rank == 0:
        again.load_state_dict(full)
        full["3.weight"].zero_()  # a copy
    assert groups.rank > 0 or equal(again.state_dict(), 3)
    full = p3d.full_state_dict(module)
    assert groups.rank > 0 or equal(full, 3)


def loaded(groups: p3d.ProcessGroups, module: nn.Module, other: nn.Module, folder: Path) -> None:
    shards = p3d.sharded_state_dict(module)
    dcp.load(shards, checkpoint_id=str(folder))
    full = p3d.full_state_dict(module)  # loading has filled the module's own memory
    assert groups.rank > 0 or equal(full, 3)
    other.load_state_dict(shards)
    full = p3d.full_state_dict(other)
    assert groups.rank > 0 or equal(full, 3)


def in_turn(splits: dict[str, dict[str, int]], last: str, folder: Path) -> None:
    """Loads each split from the last saved one, if any, and saves it."""
    for name, sizes in splits.items():
        groups = p3d.init(**sizes)
        module = split(name, groups, seed=4 if last else 3)
        if last:
            loaded(groups, module, split(name, groups, seed=5), folder / last)
        saved(groups, module, folder / name)
        last = name


@pytest.mark.nightly
def test_dcp_loads_a_state_dict_into_another_split(pool: Pool, tmp_path: Path) -> None:
    last = ""
    for ranks, splits in SPLITS.items():
        pool.run(ranks, in_turn, splits, last, tmp_path)
        last = [*splits][-1]
    pool.run(1, in_turn, {"one again": {}}, last, tmp_path)


class Counting(nn.Linear):
    """Has a state that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None: ...


def refusals() -> list[str]:
    group = p3d.init(pp=2).pp
    counting = p3d.Pipeline([nn.Linear(2, 2), Counting(2, 2)], group)
    inside = nn.Sequential(p3d.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], group))
    said = []
    counted = p3d.Pipeline([Counting(2, 2), nn.Linear(2, 2)], group)
    for ask in (
        lambda: p3d.full_state_dict(counting),
        lambda: p3d.full_state_dict(inside),
        counted.state_dict,
    ):
        try:
            ask()
        except p3d.Parallel3dError as error:
            said.append(str(error))
    full = p3d.full_state_dict(counted)
    if group.index == 0:
        assert full["0._extra_state"] == {"calls": 3}
    return said


def test_state_that_would_be_lost_is_refused_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(2, refusals)
    assert first == second
    second_stage, inside, first_stage = first
    assert "1._extra_state of a Pipeline is a dict, but must be a tensor" in second_stage
    assert "0._extra_state of a Pipeline is a dict, but must be a tensor" in first_stage
    assert "full_state_dict(Sequential) must get a Pipeline itself" in inside


def wrapped() -> None:
    groups = p3d.init(tp=2)
    inner = p3d.DistributedDataParallel(net(groups.tp), process_group=groups.dp)
    assert set(p3d.sharded_state_dict(inner)) == set(net().state_dict())
    assert isinstance(p3d.sharded_state_dict(inner)["1.up.weight"], DTensor)
    assert not isinstance(inner.state_dict()["1.up.weight"], DTensor)
    full = p3d.full_state_dict(inner)
    assert groups.rank > 0 or equal(full, 3)
    if dist.get_rank() == 0:  # not collective
        p3d.sharded_state_dict(inner)


def test_state_dicts_of_wrapped_modules_and_on_a_single_rank(pool: Pool) -> None:
    pool.run(4, wrapped)


def test_one_process_has_no_shards() -> None:
    module = net()
    assert not any(isinstance(v, DTensor) for v in p3d.sharded_state_dict(module).values())
    assert equal(p3d.full_state_dict(module), 3)


class Tied(nn.Module):
    """Has a table that looks up words and scores them."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.words = p3d.VocabParallelEmbedding(WORDS, WIDTH, group)
        self.head = p3d.ColumnParallelLinear(WIDTH, WORDS, group, bias=False, gather_output=True)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids))


def tied(folder: str) -> tuple[float, dict[str, Any]]:
    torch.manual_seed(5)
    net = Tied(p3d.init(tp=None, dp=1).tp).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    state = {"model": net, "optimizer": optimizer}
    if p3d.load(state, checkpoint_id=folder) is None:
        p3d.save(state, checkpoint_id=folder, step=1)
    net(torch.arange(WORDS)).square().mean().backward()
    norm = float(p3d.clip_grad_norm_(net.parameters(), 1e9))
    optimizer.step()
    full = p3d.full_state_dict(net)
    return norm, {name: value.numpy() for name, value in full.items()}


def test_a_tied_table_counts_once_and_stays_tied(pool: Pool, tmp_path: Path) -> None:
    wanted = pool.run(1, tied, str(tmp_path))[0]
    for rank, (norm, full) in enumerate(pool.run(4, tied, str(tmp_path))):
        assert norm == pytest.approx(wanted[0], rel=1e-12)
        assert rank > 0 or abs(full["words.weight"] - wanted[1]["words.weight"]).max() < 1e-12
        assert rank > 0 or (full["head.weight"] == full["words.weight"]).all()


def test_a_pipeline_of_one_rank_keeps_states_that_are_no_tensors() -> None:
    whole = p3d.Pipeline([Counting(2, 2)], SINGLE).state_dict()
    assert whole["0._extra_state"] == {"calls": 3}
