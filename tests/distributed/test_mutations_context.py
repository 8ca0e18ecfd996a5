"""Known bugs of context parallelism, planted: each is caught, and by exactly the quantities named.

As in test_mutations, of which this is another part. What others have shipped: a document's last
token lost and keys in rank order (NVIDIA/TransformerEngine#1930, #3331), positions of later
documents (NVIDIA/Megatron-LM#5243), norms and gradients over dp alone (NVIDIA/Megatron-LM#7452).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.context_parallel import attention, document_attention, documents
from parallel3d.context_parallel.attention import ContextParallel
from parallel3d.context_parallel.documents import Documents, SequenceShard, SequenceSplit
from parallel3d.data.loader import Batches, MicroBatch
from parallel3d.models import parallelize
from parallel3d.models.dropout import Dropout
from parallel3d.trainer import Trainer
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_caught
from tests.distributed.pool import Pool
from tests.distributed.test_mutations import ALL_NUMBERS, Mutation


@contextmanager
def positions_restart_at_the_cut() -> Iterator[None]:
    """Each rank counts its own tokens from 0."""

    def positions(self: Documents) -> Tensor:
        return torch.arange(self.shard.positions.shape[1]).expand(self.shard.positions.shape)

    with patch.object(Documents, "positions", positions):
        yield


@contextmanager
def keys_in_rank_order() -> Iterator[None]:
    """Gathered keys and values stay as the ranks have them."""
    sound = attention.in_sequence_order

    def unsorted(by_rank: Tensor, order: Tensor, out: Tensor | None = None) -> Tensor:
        return sound(by_rank, torch.arange(len(order)), out)

    with patch.object(attention, "in_sequence_order", unsorted):
        yield


@contextmanager
def documents_are_seen_by_all() -> Iterator[None]:
    """Attention takes a sample for one document; positions are right."""
    sound = documents._segments

    def segments(held: np.ndarray, starts: np.ndarray, split: SequenceSplit) -> np.ndarray:
        padding = starts >= split.length
        return sound(held, np.where(padding, starts, 0), split)

    with patch.object(documents, "_segments", segments):
        yield


@contextmanager
def a_document_loses_its_last_token() -> Iterator[None]:
    """Of a document that continues from an earlier piece, the last key of each query is lost."""
    sound = documents._segments

    def segments(*given: Any) -> np.ndarray:
        table = sound(*given)
        for rows in table:
            found = rows[1 : rows[0, 0] + 1]
            found[:, 4] = np.maximum(found[:, 4] - 1, 0)
        return table

    with patch.object(documents, "_segments", segments):
        yield


@contextmanager
def gradients_of_keys_not_summed() -> Iterator[None]:
    """Each rank keeps the gradients of its own queries to its own keys and values."""
    with patch.object(collectives, "reduce_scatter_bucket", lambda *_: collectives.CompletedWork()):
        yield


@contextmanager
def the_ring_drops_gradients() -> Iterator[None]:
    """Gradients of keys that other ranks have made are not added."""
    with patch.object(attention, "_add", lambda gradients, others: others[1].wait()):
        yield


@contextmanager
def parts_merged_without_rescaling() -> Iterator[None]:
    """Results of several blocks of keys are averaged, whatever their sums of exponentials."""

    def merge(out: Tensor, sums: Tensor, part: Tensor, sums_of_part: Tensor) -> None:
        out.add_(part).mul_(0.5)
        sums.copy_(torch.logaddexp(sums, sums_of_part))

    with patch.object(document_attention, "merge", merge):
        yield


@contextmanager
def norm_over_dp_alone() -> Iterator[None]:
    """Of each cp group every rank adds its copy's squared norm."""
    sound = Trainer._agree

    def agree(self: Trainer, *given: Any) -> Any:
        index, count = self.data_parallel.replicas
        self.data_parallel.replicas = (index // self.groups.cp.size, count)
        try:
            return sound(self, *given)
        finally:
            self.data_parallel.replicas = (index, count)

    with patch.object(Trainer, "_agree", agree):
        yield


@contextmanager
def gradients_over_dp_alone() -> Iterator[None]:
    """The ranks of a cp group keep the gradients, and ZeRO's shards, of their own tokens."""
    sound = parallelize.data_parallel_engine

    def engine(
        config: Any, stages: Any, initializer: Any, dtype: Any, groups: Any, *rest: Any
    ) -> Any:
        return sound(config, stages, initializer, dtype, replace(groups, dp_cp=groups.dp), *rest)

    with patch("parallel3d.trainer.data_parallel_engine", engine):
        yield


@contextmanager
def loss_divided_by_local_tokens() -> Iterator[None]:
    """Each rank divides by the tokens of the batch that it holds itself, times the ranks."""
    sound = Batches.token_count

    def token_count(self: Batches, first: int) -> int:
        held = 0
        for m in range(self._num_microbatches):
            mask = self.micro_batch(first, m).loss_mask
            held += 0 if mask is None else int(mask.sum())
        count = sound(self, first)
        return held * self._split.size if held else count

    with patch.object(Batches, "token_count", token_count):
        yield


@contextmanager
def labels_of_the_next_local_token() -> Iterator[None]:
    """Labels are shifted after the split: at a cut the label is a token of another piece."""
    sound = Batches.micro_batch

    def micro_batch(self: Batches, first: int, m: int) -> MicroBatch:
        batch = sound(self, first, m)
        if batch.tokens is None:
            return batch
        labels = batch.labels.clone()
        labels[:, :-1] = batch.tokens[:, 1:]
        return batch._replace(labels=labels)

    with patch.object(Batches, "micro_batch", micro_batch):
        yield


@contextmanager
def labels_of_another_rank() -> Iterator[None]:
    """Tokens are of this rank's pieces, labels of its neighbour's."""
    sound = SequenceShard.take
    calls = [0]

    def take(self: SequenceShard, x: np.ndarray) -> np.ndarray:
        calls[0] += 1
        if calls[0] % 3 == 2:  # tokens, labels, mask
            self = replace(self, index=(self.index + 1) % len(self.held))
        return sound(self, x)

    with patch.object(SequenceShard, "take", take):
        yield


@contextmanager
def halves_of_tokens_exchanged() -> Iterator[None]:
    """Tokens of pieces r and 2 · cp − 1 − r change places, their labels do not."""
    sound = SequenceShard.take
    calls = [0]

    def take(self: SequenceShard, x: np.ndarray) -> np.ndarray:
        calls[0] += 1
        found = sound(self, x)
        return np.roll(found, found.shape[1] // 2, axis=1) if calls[0] % 3 == 1 else found

    with patch.object(SequenceShard, "take", take):
        yield


@contextmanager
def dropout_by_local_position() -> Iterator[None]:
    """All ranks drop what the first tokens of a sample drop."""
    sound = Dropout.forward

    def forward(self: Dropout, x: Tensor, samples: Tensor | None, *_: Any) -> Tensor:
        return sound(self, x, samples)

    with patch.object(Dropout, "forward", forward):
        yield


@contextmanager
def the_diagonal_at_the_first_key() -> Iterator[None]:
    """The causal mask of fewer queries than keys is aligned at the top left: a segment's first
    query sees the first key of its document, its second two, and so on."""
    sound = documents._segments

    def segments(*given: Any) -> np.ndarray:
        table = sound(*given)
        for rows in table:
            found = rows[1 : rows[0, 0] + 1]
            found[:, 4] = 0
        return table

    with patch.object(documents, "_segments", segments):
        yield


@contextmanager
def heads_have_the_masks_of_the_first() -> Iterator[None]:
    """A rank that attends with other heads drops what the first ones drop."""
    with patch.object(ContextParallel, "first_head", lambda self, heads: 0):
        yield


@contextmanager
def heads_go_to_the_wrong_rank() -> Iterator[None]:
    """The result of attention with a part of the heads comes back in another order of heads."""
    sound = attention.to_tokens

    def to_tokens(*given: Any) -> Tensor:
        y = sound(*given)
        return y.roll(y.shape[1] // 2, dims=1)

    with patch("parallel3d.models.attention.to_tokens", to_tokens):
        yield


@contextmanager
def padding_is_learned_from() -> Iterator[None]:
    """The loss counts the padding at the end of a sample as tokens."""
    sound = SequenceShard.take

    def take(self: SequenceShard, x: np.ndarray) -> np.ndarray:
        found = sound(self, x)
        if found.dtype == bool:
            found[self.held[self.index].numpy() >= x.shape[1]] = True
        return found

    with patch.object(SequenceShard, "take", take):
        yield


@contextmanager
def evaluation_counts_tokens_twice() -> Iterator[None]:
    """Every rank of cp adds the tokens of the whole batch, in training and evaluation."""
    sound = Trainer._share_of_loss

    def share(self: Trainer, loss_sum: Tensor, tokens: Tensor) -> Tensor:
        found = sound(self, loss_sum, tokens)
        if self.has_loss and self.groups.tp.index == self.groups.dp.index == 0:
            found[1] = tokens
        return found

    with patch.object(Trainer, "_share_of_loss", share):
        yield


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
