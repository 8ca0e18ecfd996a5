"""Plants known bugs of context parallelism: each is caught, by exactly the named quantities.

This continues test_mutations. Bugs that others have shipped: a document's last token lost and keys
in rank order (NVIDIA/TransformerEngine#1930, #3331), positions of later documents
(NVIDIA/Megatron-LM#5243), norms and gradients only over dp (NVIDIA/Megatron-LM#7452).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.build import Trainer
from parallel3d.comm.collectives import CompletedWork, Work
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.data.loader import Batches, MicroBatch
from parallel3d.models.dropout import Dropout
from parallel3d.models.layer_inputs import LayerInputs
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    ATTENDED_KEYS,
    ATTENTION,
    DROPOUT,
    ENGINE,
    GLOBAL_TOKENS,
    MERGED_BLOCKS,
    MICRO_BATCH,
    REDUCE_SCATTER,
    RING_GRADIENTS,
    SHARE_OF_LOSS,
    SHARE_OF_NORM,
    Mutation,
    planted,
)
from tests.distributed.test_mutations import ALL_NUMBERS

pytestmark = pytest.mark.more


def with_shard(batch: MicroBatch, **changed: Any) -> MicroBatch:
    """Returns the micro-batch with another shard of its documents."""
    documents = batch.inputs.documents
    shard = replace(documents.shard, **changed)
    inputs = replace(batch.inputs, documents=replace(documents, shard=shard))
    return batch._replace(inputs=inputs)


@planted(MICRO_BATCH)
def positions_restart_at_the_cut(sound: Any, *which: Any) -> MicroBatch:
    """Each rank counts its own tokens from 0."""
    batch = sound(*which)
    positions = batch.inputs.documents.shard.positions
    return with_shard(batch, starts=positions - torch.arange(positions.shape[1]))


@planted(MICRO_BATCH)
def keys_in_rank_order(sound: Any, *which: Any) -> MicroBatch:
    """Gathered keys and values stay in the order of the ranks."""
    batch = sound(*which)
    return with_shard(batch, order=torch.arange(len(batch.inputs.documents.shard.order)))


@planted(ATTENDED_KEYS)
def documents_are_seen_by_all(
    sound: Any, held: np.ndarray, starts: np.ndarray, split: SequenceSplit
) -> np.ndarray:
    """Attention treats a sample as one document; positions are right."""
    padding = starts >= split.length
    return sound(held, np.where(padding, starts, 0), split)


@planted(ATTENDED_KEYS)
def a_document_loses_its_last_token(sound: Any, *given: Any) -> np.ndarray:
    """A document that continues from an earlier piece loses its last keys there."""
    table = sound(*given)
    for rows in table:
        found = rows[1 : rows[0, 0] + 1]
        found[:, 4] = np.maximum(found[:, 4] - 1, 0)
    return table


@planted(REDUCE_SCATTER)
def gradients_of_keys_not_summed(*_: Any) -> CompletedWork:
    """Each rank keeps the gradients of its own queries to its own keys and values."""
    return CompletedWork()


@planted(RING_GRADIENTS)
def the_ring_drops_gradients(_: Any, gradients: Tensor, others: tuple[Tensor, Work]) -> None:
    """Gradients of keys that other ranks have computed are not added."""
    others[1].wait()


@planted(MERGED_BLOCKS)
def parts_merged_without_rescaling(
    _: Any, out: Tensor, sums: Tensor, part: Tensor, sums_of_part: Tensor
) -> None:
    """Results of several blocks of keys are averaged, whatever their sums of exponentials."""
    out.add_(part).mul_(0.5)
    sums.copy_(torch.logaddexp(sums, sums_of_part))


@planted(SHARE_OF_NORM)
def norm_over_dp_alone(sound: Any, trainer: Trainer, *how: Any) -> Tensor:
    """Every rank of a cp group adds the squared norm of its copy."""
    segments = trainer.optimizer.segments
    groups = [segment.groups for segment in segments]
    for segment in segments:
        segment.groups = replace(segment.groups, data=trainer.groups.dp)
    share = sound(trainer, *how)
    for segment, was in zip(segments, groups, strict=True):
        segment.groups = was
    return share


@planted(ENGINE)
def gradients_over_dp_alone(sound: Any, *given: Any, **more: Any) -> Any:
    """The ranks of a cp group only use the gradients, and ZeRO's shards, of their own tokens."""
    *before, groups, gathers = given
    return sound(*before, replace(groups, dp_cp=groups.dp), gathers, **more)


@planted(GLOBAL_TOKENS)
def loss_divided_by_local_tokens(
    sound: Any, trainer: Trainer, batches: Batches, first: int
) -> Tensor:
    """Each rank divides by the tokens of its own part of the batch, times the ranks."""
    masks = (
        batches.micro_batch(first, m).loss_mask for m in range(trainer.config.num_microbatches)
    )
    held = sum(int(mask.sum()) for mask in masks)
    tokens = sound(trainer, batches, first)
    return torch.full_like(tokens, held * trainer.groups.cp.size) if held else tokens


@planted(MICRO_BATCH)
def labels_of_the_next_local_token(sound: Any, *which: Any) -> MicroBatch:
    """Labels are shifted after the split: at a cut the label is a token of another piece."""
    batch = sound(*which)
    labels = batch.labels.clone()
    labels[:, :-1] = batch.tokens[:, 1:]
    return batch._replace(labels=labels)


@planted(MICRO_BATCH)
def labels_of_another_rank(sound: Any, *which: Any) -> MicroBatch:
    """Tokens are from this rank's pieces, labels from its neighbour's."""
    batch = sound(*which)
    by_rank = [torch.empty_like(batch.labels) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, batch.labels)
    return batch._replace(labels=by_rank[(dist.get_rank() + 1) % len(by_rank)])


@planted(MICRO_BATCH)
def halves_of_tokens_exchanged(sound: Any, *which: Any) -> MicroBatch:
    """Tokens of pieces r and 2 · cp − 1 − r are swapped, their labels are not."""
    batch = sound(*which)
    return batch._replace(tokens=batch.tokens.roll(batch.tokens.shape[1] // 2, dims=1))


@planted(DROPOUT)
def dropout_by_local_position(
    sound: Any, dropout: Dropout, x: Tensor, inputs: LayerInputs
) -> Tensor:
    """All ranks use the dropout masks of a sample's first tokens."""
    return sound(dropout, x, replace(inputs, documents=None))


@planted(ATTENDED_KEYS)
def the_diagonal_at_the_first_key(sound: Any, *given: Any) -> np.ndarray:
    """The causal mask of fewer queries than keys is aligned at the top left.

    A segment's first query sees the first key of its document, its second one two keys, and so on.
    """
    table = sound(*given)
    for rows in table:
        found = rows[1 : rows[0, 0] + 1]
        found[:, 4] = 0
    return table


@planted(ATTENTION)
def heads_have_the_masks_of_the_first(sound: Any, *given: Any) -> Tensor:
    """A rank that attends with other heads uses the dropout masks of the first heads."""
    *_, options, _ = given
    options.dropout.first_head = 0
    return sound(*given)


@planted(ATTENTION)
def heads_go_to_the_wrong_rank(sound: Any, *given: Any) -> Tensor:
    """The result of attention with a part of the heads returns in another order of heads."""
    y = sound(*given)
    return y.roll(y.shape[1] // 2, dims=1)


@planted(MICRO_BATCH)
def padding_is_learned_from(sound: Any, batches: Batches, first: int, m: int) -> MicroBatch:
    """The loss counts the padding at the end of a sample as tokens."""
    batch = sound(batches, first, m)
    padding = batch.inputs.documents.shard.positions >= batches.source.seq_length
    return batch._replace(loss_mask=batch.loss_mask | padding)


@planted(SHARE_OF_LOSS)
def evaluation_counts_tokens_twice(
    sound: Any, trainer: Trainer, loss_sum: Tensor, tokens: Tensor
) -> Tensor:
    """Every rank of cp adds the tokens of the whole batch, in training and evaluation."""
    found = sound(trainer, loss_sum, tokens)
    if trainer.has_loss and trainer.groups.tp.index == trainer.groups.dp.index == 0:
        found[1] = tokens
    return found


UNCLIPPED = (("clip_grad", 0.0), ("lr", 0.1))
LLAMA = Problem(
    "llama_tiny", "sgd", tied=True, optim=UNCLIPPED, layers=2, steps=2, batch=12, documents=True,
    ranks=2,
)  # fmt: skip
GPT = replace(LLAMA, preset="gpt_tiny")
ODD = replace(GPT, model=(("seq_length", 13),))
DROPS = replace(GPT, model=(("dropout", 0.2),))
RING, HEADS = ((("context_parallel.style", style),) for style in ("ring", "heads"))
TWO: Sizes = (1, 1, 1, 2)
NUMBERS_OF_LOSS = {"loss", "evaluation"}
PLANTED: list[Any] = [
    pytest.param(positions_restart_at_the_cut, TWO, Case(LLAMA), ALL_NUMBERS, id="positions"),
    pytest.param(keys_in_rank_order, TWO, Case(LLAMA), ALL_NUMBERS, id="rank-order"),
    pytest.param(documents_are_seen_by_all, TWO, Case(LLAMA), ALL_NUMBERS, id="no-mask"),
    pytest.param(
        documents_are_seen_by_all, TWO, Case(LLAMA, keys=RING), ALL_NUMBERS, id="no-mask-ring"
    ),
    pytest.param(a_document_loses_its_last_token, TWO, Case(ODD), ALL_NUMBERS, id="last-token"),
    pytest.param(
        gradients_of_keys_not_summed,
        TWO,
        Case(LLAMA),
        ALL_NUMBERS,
        id="dk-not-summed",
    ),
    pytest.param(
        the_ring_drops_gradients, TWO, Case(LLAMA, keys=RING), ALL_NUMBERS, id="ring-dk-lost"
    ),
    pytest.param(
        parts_merged_without_rescaling, TWO, Case(LLAMA, keys=RING), ALL_NUMBERS, id="no-rescaling"
    ),
    pytest.param(norm_over_dp_alone, TWO, Case(LLAMA), {"grad norm"}, id="norm-over-dp"),
    pytest.param(
        gradients_over_dp_alone, TWO, Case(LLAMA), ALL_NUMBERS | {"replicas"}, id="grads-over-dp"
    ),
    *(
        pytest.param(
            gradients_over_dp_alone,
            (1, 1, 2, 2),
            Case(LLAMA, keys=(("zero", zero),)),
            ALL_NUMBERS | {"replicas"},
            id=f"zero{zero}-over-dp",
        )
        for zero in (1, 3)
    ),
    pytest.param(
        loss_divided_by_local_tokens, TWO, Case(LLAMA), ALL_NUMBERS, id="local-token-count"
    ),
    pytest.param(labels_of_the_next_local_token, TWO, Case(GPT), ALL_NUMBERS, id="labels-at-cut"),
    pytest.param(labels_of_another_rank, TWO, Case(GPT), ALL_NUMBERS, id="others-labels"),
    pytest.param(halves_of_tokens_exchanged, TWO, Case(GPT), ALL_NUMBERS, id="halves-exchanged"),
    pytest.param(
        dropout_by_local_position, TWO, Case(DROPS), ALL_NUMBERS, id="dropout-by-local-position"
    ),
    pytest.param(the_diagonal_at_the_first_key, TWO, Case(GPT), ALL_NUMBERS, id="top-left"),
    pytest.param(
        heads_have_the_masks_of_the_first,
        TWO,
        Case(DROPS, keys=HEADS),
        ALL_NUMBERS,
        id="masks-of-first-heads",
    ),
    pytest.param(
        heads_go_to_the_wrong_rank, TWO, Case(GPT, keys=HEADS), ALL_NUMBERS, id="wrong-heads"
    ),
    pytest.param(padding_is_learned_from, TWO, Case(ODD), ALL_NUMBERS, id="padding-learned"),
    pytest.param(
        evaluation_counts_tokens_twice, TWO, Case(LLAMA), NUMBERS_OF_LOSS, id="tokens-twice"
    ),
]


@pytest.mark.parametrize(("mutation", "sizes", "case", "told_by"), PLANTED)
def test_a_planted_bug_of_context_parallelism_is_caught(
    mutation: Mutation,
    sizes: Sizes,
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, told_by, pool, references)
