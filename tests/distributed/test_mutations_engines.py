"""Known bugs of the engines, planted: each is caught, and by exactly the quantities named.

As in test_mutations, of which this is the second part: overlapped tensor parallelism and
recomputation. The first loss is right under most of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.models import transformer
from parallel3d.tensor_parallel import linear_ops
from parallel3d.tensor_parallel.layers import RowParallelLinear
from tests.distributed.cases import Case
from tests.distributed.harness import References, differences, run_cases
from tests.distributed.pool import Pool
from tests.distributed.test_mutations import ALL_NUMBERS, SGD, Mutation


@contextmanager
def pieces_in_a_row() -> Iterator[None]:
    """A gathered piece is put at one place of the sequence instead of one for each rank."""

    def put(piece: Tensor, whole: Tensor, i: int) -> None:
        batch, ranks, chunks, run, features = whole.shape
        in_a_row = whole.view(batch, chunks, ranks * run, features)
        in_a_row[:, i] = piece.transpose(0, 1)

    with patch.object(linear_ops, "_put", put):
        yield


@contextmanager
def pieces_out_of_turn() -> Iterator[None]:
    """Piece 1 is put where piece 0 belongs, and the reverse, on the way in and out."""
    sound = linear_ops._put

    def put(piece: Tensor, whole: Tensor, i: int) -> None:
        sound(piece, whole, 1 - i)

    with patch.object(linear_ops, "_put", put):
        yield


@contextmanager
def gather_split_in_the_backward() -> Iterator[None]:
    """Each rank takes its part of its own input gradient; those of the others are not added."""
    sound = linear_ops.column_backward

    def column_backward(*args: Any) -> Any:
        def own_part(tensor: Tensor, group: Group) -> tuple[Tensor, collectives.CompletedWork]:
            return tensor.chunk(group.size)[group.index].clone(), collectives.CompletedWork()

        with patch.object(collectives, "reduce_scatter_async", own_part):
            return sound(*args)

    with patch.object(linear_ops, "column_backward", column_backward):
        yield


@contextmanager
def split_summed_in_the_backward() -> Iterator[None]:
    """Gradients of what was scattered are added over the ranks on top of being gathered."""
    sound = linear_ops.row_backward

    def row_backward(grad: Tensor, *rest: Any) -> Any:
        return sound(collectives.all_reduce(grad.clone(), rest[2]), *rest)

    with patch.object(linear_ops, "row_backward", row_backward):
        yield


@contextmanager
def weight_gradient_of_the_own_tokens() -> Iterator[None]:
    """The backward forgets to gather the kept shard: a weight sees the tokens of its own rank."""
    sound = linear_ops.column_backward

    def column_backward(grad: Tensor, x: Tensor, weight: Tensor, group: Group, sp: Any) -> Any:
        def nothing_of_others(
            tensor: Tensor, group: Group
        ) -> tuple[Tensor, collectives.CompletedWork]:
            out = tensor.new_zeros(group.size * tensor.shape[0], *tensor.shape[1:])
            out.chunk(group.size)[group.index].copy_(tensor)
            return out, collectives.CompletedWork()

        with patch.object(collectives, "all_gather_async", nothing_of_others):
            return sound(grad, x, weight, group, sp)

    with patch.object(linear_ops, "column_backward", column_backward):
        yield


@contextmanager
def input_gradient_not_reduced() -> Iterator[None]:
    """f without its backward: each rank goes on with the gradient of its own outputs."""
    sound = linear_ops.column_backward

    def column_backward(*args: Any) -> Any:
        with patch.object(collectives, "all_reduce_async", lambda *_: collectives.CompletedWork()):
            return sound(*args)

    with patch.object(linear_ops, "column_backward", column_backward):
        yield


@contextmanager
def row_bias_on_every_rank() -> Iterator[None]:
    """The bias is added before the sum over the ranks: tp times. It starts at zero."""

    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        y = linear_ops.linear_node("row", x, self.weight, None, self.group, self.sp)
        return y + self.group.size * self.bias

    with patch.object(RowParallelLinear, "forward", forward):
        yield


class _BackwardTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, *rest: Any) -> Tensor:
        ctx.function, ctx.rest = function, rest
        ctx.save_for_backward(x)
        return function(x, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x, *ctx.rest)
        torch.autograd.backward(y, grad, retain_graph=True)  # the parameters
        grad_x = torch.autograd.grad(y, x, grad)[0]  # the input
        return grad_x, None, *(None for _ in ctx.rest)


@contextmanager
def recomputed_backward_twice() -> Iterator[None]:
    """One backward for the parameters and one for the input: layers add to their buckets twice.

    Norms and biases, whose gradients autograd hands over, are added once.
    """

    def recomputed(function: Any, x: Tensor, *rest: Any) -> Tensor:
        return _BackwardTwice.apply(x, function, *rest)

    sound = BucketedDataParallel._grad_ready

    def arrived(self: BucketedDataParallel, number: int) -> None:
        if self.reducer.left[number]:  # sound: a weight that is told of twice ends the run
            sound(self, number)

    with (
        patch.object(transformer, "recomputed", recomputed),
        patch.object(BucketedDataParallel, "_grad_ready", arrived),
    ):
        yield


@contextmanager
def recomputed_without_communication() -> Iterator[None]:
    """The forward that is run again leaves its reductions out, as if its sums were known."""
    sound = linear_ops.row_forward

    def row_forward(x: Tensor, weight: Tensor, group: Group, sp: Any) -> Tensor:
        if torch._C._current_graph_task_id() == -1:  # not inside of a backward
            return sound(x, weight, group, sp)
        return F.linear(x, weight)

    with patch.object(linear_ops, "row_forward", row_forward):
        yield


PIECES = Case(SGD, sp=True, keys=(("tensor_parallel.chunks", 2),))
AGAIN = Case(SGD, keys=(("recompute", "full"),))
DRIFT = ALL_NUMBERS | {"replicas"}  # ranks go apart: norms and biases differ between them
PLANTED = [
    pytest.param(pieces_in_a_row, PIECES, ALL_NUMBERS, id="pieces-in-a-row"),
    pytest.param(pieces_out_of_turn, PIECES, ALL_NUMBERS, id="pieces-out-of-turn"),
    pytest.param(gather_split_in_the_backward, PIECES, ALL_NUMBERS, id="split-for-reduce-scatter"),
    pytest.param(split_summed_in_the_backward, PIECES, ALL_NUMBERS, id="summed-for-gather"),
    pytest.param(weight_gradient_of_the_own_tokens, PIECES, ALL_NUMBERS, id="own-tokens"),
    pytest.param(input_gradient_not_reduced, Case(SGD), DRIFT, id="f-without-backward"),
    pytest.param(row_bias_on_every_rank, Case(SGD), ALL_NUMBERS, id="row-bias-tp-times"),
    pytest.param(recomputed_backward_twice, AGAIN, ALL_NUMBERS, id="recompute-adds-twice"),
    pytest.param(recomputed_without_communication, AGAIN, DRIFT, id="recompute-apart"),
]


@pytest.mark.parametrize(("mutation", "case", "told_by"), PLANTED)
def test_a_planted_bug_of_tensor_parallelism_is_caught(
    mutation: Mutation, case: Case, told_by: set[str], pool: Pool, references: References
) -> None:
    sizes = (2, 1, 1)
    expected = references.of(case.problem)
    assert differences(pick(pool.run(2, run_cases, sizes, [case])), expected, case.problem) == {}
    mutated = pick(pool.run(2, run_cases, sizes, [case], mutation))
    found = differences(mutated, expected, case.problem)
    assert found.keys() == told_by, found


def pick(by_rank: list[list[Any]]) -> list[Any]:
    """The outcomes of the only case."""
    return [outcomes[0] for outcomes in by_rank]
