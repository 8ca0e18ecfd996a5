"""Tests the order of calls in the split linear layers, which compute while they send, without
ranks.

A group of two is simulated, and its collectives only record calls, which a test reads.
tests/distributed compares the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import SINGLE, Group
from parallel3d.device.fused import register
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layers import BuildContext
from parallel3d.parameters.initializer import Initializer
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config, check_config
from parallel3d.tensor_parallel import linear_ops
from parallel3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

PAIR = Group("tp", (0, 1), 0, None)
CPU = torch.device("cpu")
TOKENS = torch.ones(1, 4, 6)
LINEAR, MATMUL = F.linear, Tensor.__matmul__
ADD_WEIGHT_GRADIENT = linear_ops.add_weight_gradient


class Notes:
    """Stands in for the collectives and the GEMMs; `lines` records the calls, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.calls = 0
        self.in_flight = 0

    def start(self, what: str, out: Tensor) -> tuple[Tensor, Travelling]:
        self.calls += 1
        self.in_flight += 1
        self.lines.append(f"start {what} {self.calls}")
        return out, Travelling(self, f"wait {what} {self.calls}")

    def all_reduce(self, tensor: Tensor, group: Group) -> Travelling:
        return self.start("all-reduce", tensor)[1]

    def all_gather(self, tensor: Tensor, group: Group) -> tuple[Tensor, Travelling]:
        return self.start("gather", torch.cat([tensor] * group.size))

    def reduce_scatter(self, tensor: Tensor, group: Group) -> tuple[Tensor, Travelling]:
        return self.start("scatter", tensor.chunk(group.size)[group.index].clone())

    def linear(self, *args: Tensor | None) -> Tensor:
        self.lines.append("GEMM")
        return LINEAR(*args)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        self.lines.append("GEMM")
        return MATMUL(a, b)

    def weight_gradient(self, *args: Tensor) -> Tensor | None:
        self.lines.append("weight gradient")
        before = len(self.lines)
        found = ADD_WEIGHT_GRADIENT(*args)
        del self.lines[before:]  # removes the line of its GEMM
        return found


class Travelling:
    def __init__(self, notes: Notes, line: str) -> None:
        self.notes, self.line = notes, line

    def wait(self) -> None:
        self.notes.in_flight -= 1
        self.notes.lines.append(self.line)


@pytest.fixture
def notes() -> Iterator[Notes]:
    taken = Notes()
    with (
        patch.object(collectives, "all_reduce_async", taken.all_reduce),
        patch.object(collectives, "all_gather_async", taken.all_gather),
        patch.object(collectives, "reduce_scatter_async", taken.reduce_scatter),
        patch.object(F, "linear", taken.linear),
        patch.object(Tensor, "__matmul__", lambda a, b: taken.matmul(a, b)),
        patch.object(linear_ops, "add_weight_gradient", taken.weight_gradient),
    ):
        yield taken
    assert taken.in_flight == 0, "a collective that nobody waits for"


def layer(kind: type, sp: bool, chunks: int = 1) -> ColumnParallelLinear | RowParallelLinear:
    sizes = (6, 8) if kind is ColumnParallelLinear else (12, 6)
    return kind(*sizes, PAIR, bias=False, sequence_parallel=sp, chunks=chunks)


def run(made: torch.nn.Module, x: Tensor, compiled: bool) -> None:
    if compiled:
        # One graph, traced without code generation: it runs the operators that TorchInductor would
        # call, in the order of the graph.
        made.handle = register(made)
        made = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    made(x.requires_grad_()).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("sp", [False, True], ids=["no sp", "sp"])
def test_the_input_gradient_is_reduced_while_the_weight_gradient_is_computed(
    notes: Notes, sp: bool, compiled: bool
) -> None:
    made = layer(ColumnParallelLinear, sp)
    run(made, TOKENS.clone(), compiled)
    number = 3 if sp else 1  # sp gathers the input in the forward and again in the backward
    what = f"{'scatter' if sp else 'all-reduce'} {number}"
    assert notes.lines[-3:] == [f"start {what}", "weight gradient", f"wait {what}"]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_kept_shard_is_gathered_while_the_input_gradient_is_computed(
    notes: Notes, compiled: bool
) -> None:
    run(layer(ColumnParallelLinear, sp=True), TOKENS.clone(), compiled)
    assert notes.lines[3:6] == ["start gather 2", "GEMM", "wait gather 2"]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_piece_is_gathered_while_the_previous_gemm_runs(notes: Notes, compiled: bool) -> None:
    run(layer(ColumnParallelLinear, sp=True, chunks=3), torch.ones(2, 6, 6), compiled)
    assert notes.lines[:9] == [
        *("start gather 1", "wait gather 1", "start gather 2"),
        *("GEMM", "wait gather 2", "start gather 3"),
        *("GEMM", "wait gather 3", "GEMM"),
    ]
    # The backward has two GEMMs for its two collectives, so it needs no pieces.
    assert notes.lines[9:] == [
        *("start gather 4", "GEMM", "wait gather 4"),
        *("start scatter 5", "weight gradient", "wait scatter 5"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_piece_is_reduced_while_the_next_gemm_runs(notes: Notes, compiled: bool) -> None:
    run(layer(RowParallelLinear, sp=True, chunks=3), torch.ones(2, 12, 6), compiled)
    assert notes.lines[:9] == [
        *("GEMM", "start scatter 1"),
        *("GEMM", "wait scatter 1", "start scatter 2"),
        *("GEMM", "wait scatter 2", "start scatter 3", "wait scatter 3"),
    ]
    assert notes.lines[9:] == [
        *("start gather 4", "wait gather 4", "start gather 5"),
        *("GEMM", "wait gather 5", "start gather 6"),
        *("GEMM", "wait gather 6", "GEMM", "weight gradient"),
    ]


def test_pieces_hold_consecutive_tokens_of_every_rank() -> None:
    whole = torch.arange(8).view(1, 2, 2, 2, 1)  # two ranks, two pieces, runs of two tokens
    assert linear_ops._take(whole, 1).flatten().tolist() == [2, 3, 6, 7]
    back = torch.zeros_like(whole)
    for i in (0, 1):
        linear_ops._put(linear_ops._take(whole, i), back, i)
    assert torch.equal(back, whole)


def config(**changes: object) -> Config:
    made = Config(tp=2, sp=True, model=ModelConfig(seq_length=24))
    for name, value in changes.items():
        setattr(made if hasattr(made, name) else made.tensor_parallel, name, value)
    return made


@pytest.mark.parametrize(
    ("sp", "group", "pieces"), [(True, PAIR, 3), (True, SINGLE, None), (False, PAIR, None)]
)
def test_pieces_need_sequence_parallelism(sp: bool, group: Group, pieces: int | None) -> None:
    init = Initializer(1, torch.float32, CPU)
    blueprint = blueprint_of(config(sp=sp, chunks=3))
    ctx = BuildContext.of_run(blueprint, init, group)
    made = ColumnParallelLinear(6, {"up": 8}, bias=False, **ctx.linear_arguments)
    assert made.sp == pieces


def test_pieces_have_equal_size() -> None:
    check_config(config(chunks=4), 2)
    with pytest.raises(UserError, match=r"chunks=5 must divide .* = 12; .*chunks=4\.$"):
        check_config(config(chunks=5), 2)
    with pytest.raises(UserError, match=r"chunks=4 needs sp=true.*chunks=1\.$"):
        check_config(config(chunks=4, sp=False), 2)
