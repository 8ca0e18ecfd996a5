"""Tests that the exactness comparison can fail: known bugs are planted in the workers, and each is
caught.

For each, the sound run passes in the same harness, the mutated run fails, and the quantities that
differ are exactly the named ones. Several bugs do not affect the loss of the first step, or of any
step.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.build import Trainer
from parallel3d.comm.collectives import CompletedWork
from parallel3d.comm.group import Group
from parallel3d.models.dropout import Dropout
from parallel3d.models.ops import Heads
from parallel3d.optim.optimizer import EMA, Optimizer, sum_of_powers
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.rounding import Piece
from parallel3d.parameters.segments import Segment
from parallel3d.parameters.spec import ParameterSpec, ShardSpec, tp_replicas_of
from parallel3d.pipeline.p2p import PendingTransfer
from parallel3d.schedules.actions import Action, Kind
from parallel3d.tensor_parallel.loss import ChunkLoss
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    DROPOUT,
    FULL_NORM,
    GRADIENT_SCALE,
    INITIAL_VALUES,
    LOSS,
    MESSAGES,
    NORM_GRADIENTS,
    PARAMETER,
    ROUNDED_PIECES,
    SHARE_OF_NORM,
    SHARED_HEADS,
    SQUARES,
    TIED_TABLE,
    UPDATE,
    Mutation,
    planted,
)

pytestmark = pytest.mark.more

ALL_NUMBERS = {"loss", "grad norm", "evaluation", "weights"}


@planted(GRADIENT_SCALE)
def loss_not_divided_by_microbatches(sound: Any, trainer: Trainer, tokens: Tensor) -> Tensor:
    """The gradients are num_microbatches times too large; the reported loss is not."""
    return sound(trainer, tokens) * trainer.schedule.microbatches


@planted(GRADIENT_SCALE)
def mean_of_means_over_dp(sound: Any, trainer: Trainer, tokens: Tensor) -> Tensor:
    """Each of two data-parallel ranks divides by its own tokens, then the means are averaged."""
    own = trainer.train_batches.token_count(trainer.consumed_samples)
    return sound(trainer, torch.full_like(tokens, own)) / 2


@planted(NORM_GRADIENTS)
def sequence_parallel_sum_missing(*_: Any) -> None:
    """Norms, biases and positions only get the gradient of their own tokens."""


@planted(SHARE_OF_NORM)
def tied_weight_counted_twice(sound: Any, trainer: Trainer, *how: Any) -> Tensor:
    """The last stage's copy of the table enters the gradient norm too."""
    tied = [s.grad for s in trainer.optimizer.segments if s.spec.tied]
    copies = tied if trainer.groups.embedding.index > 0 else []
    return sound(trainer, *how) + sum_of_powers(copies, trainer.device)


@planted(TIED_TABLE)
def tied_gradient_not_summed(*_: Any) -> None:
    """First and last stage step their copies of the table by their own gradients."""


def exchanged_receives(kind: Kind) -> AbstractContextManager[None]:
    """The messages of micro-batches 0 and 1 are swapped on arrival: same shapes, no error."""
    first, second = Action(kind, 0), Action(kind, 1)
    kept: list[PendingTransfer] = []

    def post(
        sound: Any, messages: list[tuple[Action, Tensor]], *where: Any
    ) -> list[PendingTransfer]:
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

    return MESSAGES.replaced(post)


def activations_exchanged() -> AbstractContextManager[None]:
    """The last stage combines the labels of one micro-batch with the activations of another."""
    return exchanged_receives(Kind.RECV_F)


def gradients_exchanged() -> AbstractContextManager[None]:
    """The first stage backpropagates the gradients of one micro-batch through another."""
    return exchanged_receives(Kind.RECV_B)


@planted(INITIAL_VALUES)
def clones_over_tp(sound: Any, initializer: Initializer, shard: ShardSpec, out: Tensor) -> None:
    """Every tp rank draws the slice of tp rank 0, whose shards start at 0."""
    sound(initializer, at_zero(shard), out)


def at_zero(shard: ShardSpec) -> ShardSpec:
    """The shard is drawn as if it began with the full tensor."""
    return dataclasses.replace(shard, start=(0,) * len(shard.start))


@planted(LOSS)
def padded_columns_in_the_softmax(sound: Any, loss: ChunkLoss) -> Tensor:
    """Rows of zeros that pad the table count as tokens: each adds exp(0) to the softmax's sum."""
    loss.real = loss.logits.shape[1]
    return sound(loss)


@planted(LOSS)
def smoothing_by_local_vocabulary(sound: Any, loss: ChunkLoss) -> Tensor:
    """Each rank spreads the smoothing over its own columns, as if they were the vocabulary."""
    loss.objective = dataclasses.replace(loss.objective, vocab_size=loss.logits.shape[1])
    return sound(loss)


@planted(DROPOUT)
def dropout_counts_local_positions(sound: Any, dropout: Dropout, *given: Any) -> Tensor:
    """Every part of the sequence uses the masks of the first part."""
    dropout.part = 0
    return sound(dropout, *given)


@planted(UPDATE)
def average_of_another_rank(sound: Any, optimizer: Optimizer, *args: Any) -> None:
    """Each of two ranks averages its shard with the new weights of the other's."""
    averages = [average for group in optimizer.groups for average in group.state[EMA]]
    before = [average.clone() for average in averages]
    sound(optimizer, *args)
    shards: list[Any] = [None, None]
    dist.all_gather_object(
        shards, torch.cat([m for group in optimizer.groups for m in group.masters])
    )
    other = shards[1 - dist.get_rank()]
    for average, old in zip(averages, before, strict=True):
        theirs, other = other[: old.numel()], other[old.numel() :]
        average[: theirs.numel()] = old[: theirs.numel()].lerp(theirs, 0.4)


@planted(ROUNDED_PIECES)
def rounding_counts_local_elements(sound: Any, segment: Segment, seed: int) -> list[Piece]:
    """The random bits of a shard start at its first element, not at the full tensor's."""
    spans = []
    for span in segment.spans:
        shards = tuple(map(at_zero, span.spec.shards))
        spans.append(span._replace(spec=dataclasses.replace(span.spec, shards=shards)))
    return sound(dataclasses.replace(segment, spans=spans), seed)


@planted(SHARED_HEADS)
def shared_heads_apart(*_: Any) -> None:
    """Each copy of a key-value head only gets the gradient of its own rank's query heads."""


@planted(SHARE_OF_NORM)
def shared_heads_counted_twice(sound: Any, trainer: Trainer, *how: Any) -> Tensor:
    """Every copy of a key-value head enters the gradient norm."""
    runs = [run for s in trainer.optimizer.segments for run in s.by_kind(tp_replicas_of)]
    copies = [run.grad for replicas, run in runs if trainer.groups.tp.index % replicas]
    return sound(trainer, *how) + sum_of_powers(copies, trainer.device)


@planted(PARAMETER)
def norms_of_heads_apart(sound: Any, initializer: Initializer, spec: ParameterSpec) -> nn.Parameter:
    """Each rank steps the norms of heads by the gradient of its own heads, as if they were norms of
    the residual stream."""
    if spec.shards[0].name.endswith(("q_norm.weight", "k_norm.weight")):
        piece = dataclasses.replace(spec.shards[0], tp_replicas=1)
        spec = dataclasses.replace(spec, shards=(piece,), replicated=True)
    return sound(initializer, spec)


@planted(FULL_NORM)
def means_over_own_heads(sound: Any, part: Tensor, tp: Group) -> Tensor:
    """A norm over all heads only reads this rank's heads."""
    return part * tp.size


@planted(SQUARES)
def copies_of_heads_in_the_mean(
    sound: Any, qkv: Tensor, widths: tuple[int, int], shape: Heads
) -> Tensor:
    """Every copy of a key-value head counts in the mean over all heads."""
    queries, keys = widths
    return sound(qkv, (queries, min(keys, shape[1] * shape[2])), shape)


UNCLIPPED = (("clip_grad", 0.0), ("lr", 0.1))
# One layer for each of two stages; the second step reads leftovers of the first.
SGD = Problem("gpt_tiny", "sgd", tied=True, optim=UNCLIPPED, layers=2, steps=2, batch=12)
ADAMW = dataclasses.replace(SGD, optimizer="adamw", optim=())
ONE_HEAD = dataclasses.replace(
    SGD, preset="llama_tiny", tied=False, model=(("num_query_groups", 1),)
)
NORMED = dataclasses.replace(ONE_HEAD, model=(("qk_norm", True),))
FULLY_NORMED = dataclasses.replace(ONE_HEAD, model=(*NORMED.model, ("qk_norm_width", "full")))
PLANTED = [
    pytest.param(
        loss_not_divided_by_microbatches, (1, 2, 1), Case(SGD), ALL_NUMBERS, id="wrong-1/M-sgd"
    ),
    # AdamW does not see a scale: in fp32 all losses agree, and only the norm differs.
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
        means_over_own_heads, (2, 1, 1), Case(FULLY_NORMED), ALL_NUMBERS, id="norm-of-own-heads"
    ),
    pytest.param(
        copies_of_heads_in_the_mean,
        (2, 1, 1),
        Case(FULLY_NORMED),
        ALL_NUMBERS,
        id="copies-in-the-norm",
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
        # A state that the first step has rounded only shows in the loss of the third step.
        Case(dataclasses.replace(ADAMW, steps=3, optim=(("state", "bf16"),))),
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
