"""Plants known bugs of the engines: each is caught, by exactly the named quantities.

This continues test_mutations with overlapped tensor parallelism and recomputation. Most of the bugs
do not affect the first loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import SINGLE, Group
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.device.matmul import matmul
from parallel3d.parameters.gradients import add_matmul
from parallel3d.parameters.state import state_of
from parallel3d.tensor_parallel.layers import RowParallelLinear
from parallel3d.tensor_parallel.mappings import all_gather_sequence
from tests.distributed.cases import Case
from tests.distributed.harness import References, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    LINEAR_BACKWARD,
    LINEAR_FORWARD,
    RECOMPUTED,
    ROW_PARALLEL,
    START_STEP,
    Mutation,
    planted,
)
from tests.distributed.test_mutations import ALL_NUMBERS, SGD

Gradients = tuple[Tensor, Tensor | None]

pytestmark = pytest.mark.more


CHUNKS = 2


def in_pieces(y: Tensor, group: Group) -> Tensor:
    """Views a gathered sequence (b, s, features) as (b, tp, chunks, run, features)."""
    return y.unflatten(1, (group.size, CHUNKS, -1))


@planted(LINEAR_FORWARD)
def pieces_in_a_row(sound: Any, split: str, *given: Any) -> Tensor:
    """A gathered piece is put at one place of the sequence instead of one place for each rank."""
    y, (*_, group, chunks) = sound(split, *given), given
    gathered = split == "column" and chunks == CHUNKS
    return in_pieces(y, group).transpose(1, 2).flatten(1, 3) if gathered else y


@planted(LINEAR_FORWARD)
def pieces_out_of_turn(sound: Any, split: str, *given: Any) -> Tensor:
    """Pieces 0 and 1 are put in each other's place."""
    y, (*_, group, chunks) = sound(split, *given), given
    gathered = split == "column" and chunks == CHUNKS
    return in_pieces(y, group).flip(2).flatten(1, 3) if gathered else y


@planted(LINEAR_BACKWARD)
def gather_split_in_the_backward(
    sound: Any, split: str, grad: Tensor, x: Tensor, weight: Tensor, group: Group, *how: Any
) -> Gradients:
    """Each rank takes its part of its own input gradient; the other ranks' are not added."""
    grad_x, grad_weight = sound(split, grad, x, weight, group, *how)
    if split == "column":
        grad_x = matmul(grad, weight).chunk(group.size, dim=1)[group.index].contiguous()
    return grad_x, grad_weight


@planted(LINEAR_BACKWARD)
def split_summed_in_the_backward(
    sound: Any, split: str, grad: Tensor, x: Tensor, weight: Tensor, group: Group, *how: Any
) -> Gradients:
    """Gradients of a scattered tensor are summed over the ranks and gathered."""
    if split == "row":
        grad = collectives.all_reduce(grad.clone(), group)
    return sound(split, grad, x, weight, group, *how)


@planted(LINEAR_BACKWARD)
def weight_gradient_of_the_own_tokens(
    sound: Any, split: str, grad: Tensor, x: Tensor, weight: Tensor, group: Group, *how: Any
) -> Gradients:
    """The backward does not gather the kept shard: a weight only sees the tokens of its own
    rank."""
    if split == "column":
        others = all_gather_sequence(x, group)
        others.chunk(group.size, dim=1)[group.index].zero_()
        add_matmul(state_of(weight).main_grad, -grad.flatten(0, -2), others.flatten(0, -2))
    return sound(split, grad, x, weight, group, *how)


@planted(LINEAR_BACKWARD)
def input_gradient_not_reduced(
    sound: Any, split: str, grad: Tensor, x: Tensor, weight: Tensor, _: Group, *how: Any
) -> Gradients:
    """f has no backward: each rank continues with the gradient of its own outputs."""
    return sound(split, grad, x, weight, SINGLE, *how)


@planted(ROW_PARALLEL)
def row_bias_on_every_rank(sound: Any, layer: RowParallelLinear, x: Tensor) -> Tensor:
    """The bias is added before the sum over the ranks, so tp times. It starts at zero."""
    return sound(layer, x) + (layer.group.size - 1) * layer.bias


class _BackwardTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, engine: Any, function: Any, *rest: Any) -> Tensor:
        ctx.engine, ctx.function, ctx.rest = engine, function, rest
        ctx.save_for_backward(x)
        return function(x, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x, *ctx.rest)
        # the sound code would end the run at a second gradient of a weight
        ctx.engine.running = False
        grad_x = torch.autograd.grad(y, x, grad, retain_graph=True)[0]  # the backward for the input
        ctx.engine.running = True
        torch.autograd.backward(y, grad)  # the backward for the parameters
        return grad_x, None, None, *(None for _ in ctx.rest)


@contextmanager
def recomputed_backward_twice() -> Iterator[None]:
    """One backward runs for the input and one for the parameters, so linear layers add to their
    buckets twice.

    Norms and biases, whose gradients come from autograd, are added once.
    """
    engines: list[BucketedDataParallel] = []

    def start_step(sound: Any, engine: BucketedDataParallel, microbatches: int) -> None:
        engines[:] = [engine]
        sound(engine, microbatches)

    def recomputed(sound: Any, function: Any, x: Tensor, *rest: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return sound(function, x, *rest)
        return _BackwardTwice.apply(x, engines[0], function, *rest)

    with START_STEP.replaced(start_step), RECOMPUTED.replaced(recomputed):
        yield


@planted(LINEAR_FORWARD)
def recomputed_without_communication(
    sound: Any, split: str, x: Tensor, weight: Tensor, *rest: Any
) -> Tensor:
    """The recomputed forward leaves its reductions out, as if the sums were known."""
    in_backward = torch._C._current_graph_task_id() != -1
    if split == "row" and in_backward:
        return F.linear(x, weight)
    return sound(split, x, weight, *rest)


PIECES = Case(SGD, sp=True, keys=(("tensor_parallel.chunks", CHUNKS),))
AGAIN = Case(SGD, keys=(("recompute", "full"),))
DRIFT = ALL_NUMBERS | {"replicas"}  # ranks drift apart: norms and biases differ between them
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
    check_caught(mutation, (2, 1, 1), case, told_by, pool, references)
