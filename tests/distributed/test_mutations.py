"""The exactness comparison can fail: known bugs are planted in the workers, and each is caught.

For each, the sound run passes in the same harness, the mutated run does not, and the quantities
that tell are exactly those named: several leave the loss of the first step, or of all steps, alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import parallel3d.optim
import parallel3d.trainer
from parallel3d.comm.collectives import CompletedWork
from parallel3d.comm.group import Group
from parallel3d.models.dropout import Dropout
from parallel3d.optim import EMA, Optimizer
from parallel3d.parameters import rounding
from parallel3d.parameters.sharding import Chunk, Initializer, ParameterSpec, Segment, ShardSpec
from parallel3d.pipeline import executor
from parallel3d.pipeline.executor import Executor, Loader
from parallel3d.pipeline.p2p import PendingTransfer
from parallel3d.schedules.actions import Action, Kind
from parallel3d.tensor_parallel.loss import ChunkLoss
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_caught
from tests.distributed.pool import Pool

Mutation = Callable[[], AbstractContextManager[None]]
ALL_NUMBERS = {"loss", "grad norm", "evaluation", "weights"}


def with_loss_scale(scale: Callable[[Executor, Loader, int], Tensor | float]) -> Iterator[None]:
    """Multiply the factor of all gradients by `scale(executor, load, num_microbatches)`."""
    sound = Executor.train_step

    def train_step(
        self: Executor, plan: list[Any], load: Loader, loss_scale: Tensor, *rest: Any
    ) -> Tensor:
        forwards = [a for a in plan if isinstance(a, Action) and a.kind == Kind.F]
        return sound(self, plan, load, loss_scale * scale(self, load, len(forwards)), *rest)

    with patch.object(Executor, "train_step", train_step):
        yield


@contextmanager
def loss_not_divided_by_microbatches() -> Iterator[None]:
    """The gradients are num_microbatches times too large; the reported loss is not."""
    yield from with_loss_scale(lambda _, __, microbatches: microbatches)


@contextmanager
def mean_of_means_over_dp() -> Iterator[None]:
    """Each of two data-parallel ranks divides by its own tokens, then the means are averaged."""

    def own_mean(_: Executor, load: Loader, microbatches: int) -> Tensor:
        own = sum(load(m).loss_mask.sum() for m in range(microbatches)).double()
        everyone = own.clone()
        dist.all_reduce(everyone)
        return everyone / (2 * own)

    yield from with_loss_scale(own_mean)


@contextmanager
def sequence_parallel_sum_missing() -> Iterator[None]:
    """Norms, biases and positions keep the gradient of their own tokens alone."""
    with patch.object(parallel3d.trainer, "all_reduce_layernorm_grads", lambda *_: None):
        yield


@contextmanager
def tied_weight_counted_twice() -> Iterator[None]:
    """The last stage's copy of the table enters the gradient norm too."""

    def counts_in_norm(segment: Any, tp: Any) -> bool:
        return not segment.spec.replicated or tp.index == 0

    with patch.object(parallel3d.optim, "counts_in_norm", counts_in_norm):
        yield


@contextmanager
def tied_gradient_not_summed() -> Iterator[None]:
    """First and last stage step their copies of the table by their own gradients."""
    with patch.object(parallel3d.trainer, "all_reduce_embedding_grads", lambda *_: None):
        yield


def exchanged_receives(kind: Kind) -> Iterator[None]:
    """The messages of micro-batches 0 and 1 change places on arrival: same shapes, no error."""
    sound = executor.post
    first, second = Action(kind, 0), Action(kind, 1)
    kept: list[PendingTransfer] = []

    def post(messages: list[tuple[Action, Tensor]], *where: Any) -> list[PendingTransfer]:
        tensors = dict(messages)
        if second in tensors:
            del tensors[second]
            return [*sound(list(tensors.items()), *where), kept.pop()]
        if first not in tensors:
            return sound(messages, *where)
        transfers = sound([*messages, (second, torch.empty_like(tensors[first]))], *where)
        one, other = (transfer for transfer in transfers if transfer.action in (first, second))
        for transfer in (one, other):
            transfer.work.wait()
            transfer.work = CompletedWork()
        one.tensor, other.tensor = other.tensor, one.tensor
        kept.append(other)
        return [transfer for transfer in transfers if transfer is not other]

    with patch.object(executor, "post", post):
        yield


@contextmanager
def activations_exchanged() -> Iterator[None]:
    """The last stage meets the labels of one micro-batch with the activations of another."""
    yield from exchanged_receives(Kind.RECV_F)


@contextmanager
def gradients_exchanged() -> Iterator[None]:
    """The first stage backpropagates the gradients of one micro-batch through another."""
    yield from exchanged_receives(Kind.RECV_B)


@contextmanager
def clones_over_tp() -> Iterator[None]:
    """Every tp rank draws the slice of tp rank 0, whose boxes start at 0."""
    sound = Initializer.fill

    def fill(self: Initializer, piece: ShardSpec, out: Tensor) -> None:
        sound(self, dataclasses.replace(piece, start=(0,) * len(piece.start)), out)

    with patch.object(Initializer, "fill", fill):
        yield


@contextmanager
def padded_columns_in_the_softmax() -> Iterator[None]:
    """Rows of zeros that pad the table count as tokens: exp(0) each in the softmax's sum."""
    sound = ChunkLoss.__init__

    def init(self: ChunkLoss, logits: Tensor, *rest: Any) -> None:
        sound(self, logits, *rest)
        self.real = logits.shape[1]

    with patch.object(ChunkLoss, "__init__", init):
        yield


@contextmanager
def smoothing_by_local_vocabulary() -> Iterator[None]:
    """Each rank spreads the smoothing over its own columns, as if they were the vocabulary."""
    sound = ChunkLoss.__init__

    def init(self: ChunkLoss, logits: Tensor, *rest: Any) -> None:
        sound(self, logits, *rest)
        self.objective = dataclasses.replace(self.objective, vocab_size=logits.shape[1])

    with patch.object(ChunkLoss, "__init__", init):
        yield


@contextmanager
def dropout_counts_local_positions() -> Iterator[None]:
    """Every part of the sequence has the masks of the first part."""
    sound = Dropout.__init__

    def init(self: Dropout, *given: Any, **named: int) -> None:
        sound(self, *given, **named | {"part": 0})

    with patch.object(Dropout, "__init__", init):
        yield


@contextmanager
def average_of_another_rank() -> Iterator[None]:
    """Each of two ranks averages its shard with the new weights of the other's."""

    sound = Optimizer.step

    def step(self: Optimizer, *args: Any) -> None:
        averages = [average for group in self.groups for average in group.state[EMA]]
        before = [average.clone() for average in averages]
        sound(self, *args)
        shards: list[Any] = [None, None]
        dist.all_gather_object(
            shards, torch.cat([m for group in self.groups for m in group.masters])
        )
        other = shards[1 - dist.get_rank()]
        for average, old in zip(averages, before, strict=True):
            theirs, other = other[: old.numel()], other[old.numel() :]
            average[: theirs.numel()] = old[: theirs.numel()].lerp(theirs, 0.4)

    with patch.object(Optimizer, "step", step):
        yield


@contextmanager
def rounding_counts_local_elements() -> Iterator[None]:
    """The random bits of a shard are those of its first element on, not of the full tensor's."""
    sound = rounding.chunks_of_range

    def local(*args: Any) -> Iterator[tuple[ShardSpec, Chunk, int]]:
        for shard, chunk, at in sound(*args):
            yield shard, Chunk((0,) * len(chunk.offsets), chunk.sizes), at

    with patch.object(rounding, "chunks_of_range", local):
        yield


@contextmanager
def shared_heads_apart() -> Iterator[None]:
    """Each copy of a key-value head keeps the gradient of its own rank's query heads."""
    with patch.object(parallel3d.trainer, "all_reduce_shared_kv_grads", lambda *_: None):
        yield


@contextmanager
def shared_heads_counted_twice() -> Iterator[None]:
    """Every copy of a key-value head enters the gradient norm."""
    sound = parallel3d.optim.tp_replicas_of
    with (
        patch.object(parallel3d.optim, "tp_replicas_of", lambda _: 1),
        patch.object(parallel3d.trainer, "all_reduce_shared_kv_grads", summed(sound)),
    ):
        yield


def summed(tp_replicas_of: Callable[[ShardSpec], int]) -> Callable[..., None]:
    """The sum over copies as it should be, whatever the optimizer counts by now."""

    def all_reduce_shared_kv_grads(segments: list[Segment], tp: Group) -> None:
        with patch.object(parallel3d.optim, "tp_replicas_of", tp_replicas_of):
            parallel3d.optim.all_reduce_shared_kv_grads(segments, tp)

    return all_reduce_shared_kv_grads


@contextmanager
def norms_of_heads_apart() -> Iterator[None]:
    """Each rank steps the norms of heads by the gradient of its own heads, as if they were norms of
    the residual stream."""
    sound = Initializer.parameter

    def parameter(self: Initializer, spec: ParameterSpec) -> Any:
        if spec.shards[0].name.endswith(("q_norm.weight", "k_norm.weight")):
            piece = dataclasses.replace(spec.shards[0], tp_replicas=1)
            spec = dataclasses.replace(spec, shards=(piece,), replicated=True)
        return sound(self, spec)

    with patch.object(Initializer, "parameter", parameter):
        yield


UNCLIPPED = (("clip_grad", 0.0), ("lr", 0.1))
SGD = Problem("gpt_tiny", "sgd", tied=True, optim=UNCLIPPED)
ADAMW = Problem("gpt_tiny", "adamw", tied=True)
ONE_HEAD = Problem(
    "llama_tiny", "sgd", tied=False, model=(("num_query_groups", 1),), optim=UNCLIPPED
)
NORMED = dataclasses.replace(ONE_HEAD, model=(("qk_norm", True),))
PLANTED = [
    pytest.param(
        loss_not_divided_by_microbatches, (1, 2, 1), Case(SGD), ALL_NUMBERS, id="wrong-1/M-sgd"
    ),
    # AdamW does not see a scale: in fp32 all losses agree, and the norm alone tells.
    pytest.param(
        loss_not_divided_by_microbatches,
        (1, 2, 1),
        Case(dataclasses.replace(ADAMW, precision="fp32")),
        {"grad norm"},
        id="wrong-1/M-adamw",
    ),
    pytest.param(
        sequence_parallel_sum_missing,
        (2, 1, 1),
        Case(SGD, sp=True),
        ALL_NUMBERS | {"replicas"},
        id="no-sp-sum",
    ),
    # Without clipping the norm is only reported.
    pytest.param(
        tied_weight_counted_twice, (1, 2, 1), Case(ADAMW), {"grad norm"}, id="tied-weight-twice"
    ),
    pytest.param(
        tied_gradient_not_summed,
        (1, 2, 1),
        Case(SGD),
        ALL_NUMBERS | {"replicas"},
        id="tied-gradient-apart",
    ),
    pytest.param(
        activations_exchanged,
        (1, 2, 1),
        Case(SGD, schedule="gpipe"),
        ALL_NUMBERS,
        id="swapped-receive-forward",
    ),
    pytest.param(
        gradients_exchanged,
        (1, 2, 1),
        Case(SGD, schedule="gpipe"),
        ALL_NUMBERS,
        id="swapped-receive-backward",
    ),
    pytest.param(
        clones_over_tp, (2, 1, 1), Case(SGD), ALL_NUMBERS | {"initial weights"}, id="clones-over-tp"
    ),
    pytest.param(
        padded_columns_in_the_softmax, (2, 1, 1), Case(SGD), ALL_NUMBERS, id="padded-softmax"
    ),
    pytest.param(
        smoothing_by_local_vocabulary,
        (2, 1, 1),
        Case(dataclasses.replace(SGD, loss=(("label_smoothing", 0.1),))),
        ALL_NUMBERS,
        id="local-smoothing",
    ),
    pytest.param(
        shared_heads_apart,
        (2, 1, 1),
        Case(ONE_HEAD),
        ALL_NUMBERS | {"replicas"},
        id="shared-heads-apart",
    ),
    pytest.param(
        shared_heads_counted_twice,
        (2, 1, 1),
        Case(ONE_HEAD),
        {"grad norm"},
        id="shared-heads-twice",
    ),
    pytest.param(
        norms_of_heads_apart,
        (2, 1, 1),
        Case(NORMED),
        ALL_NUMBERS | {"replicas"},
        id="norms-of-heads-apart",
    ),
    pytest.param(
        shared_heads_counted_twice,
        (2, 1, 1),
        Case(NORMED),
        {"grad norm"},
        id="norms-of-heads-twice",
    ),
    pytest.param(
        dropout_counts_local_positions,
        (2, 1, 1),
        Case(dataclasses.replace(SGD, model=(("dropout", 0.2),)), sp=True),
        ALL_NUMBERS,
        id="dropout-local-positions",
    ),
    pytest.param(
        average_of_another_rank,
        (1, 1, 2),
        Case(dataclasses.replace(SGD, optim=(*UNCLIPPED, ("ema_decay", 0.6))), keys=(("zero", 1),)),
        {"average"},
        id="average-of-another-rank",
    ),
    pytest.param(
        rounding_counts_local_elements,
        (2, 1, 1),
        Case(dataclasses.replace(ADAMW, optim=(("state", "bf16"),))),
        {"loss", "grad norm", "weights"},
        id="rounding-by-local-index",
    ),
    pytest.param(
        mean_of_means_over_dp, (1, 1, 2), Case(SGD), ALL_NUMBERS, id="mean-of-means-over-dp"
    ),
]


@pytest.mark.parametrize(("mutation", "sizes", "case", "told_by"), PLANTED)
def test_a_planted_bug_is_caught(
    mutation: Mutation,
    sizes: tuple[int, int, int],
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, told_by, pool, references)
