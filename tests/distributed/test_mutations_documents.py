"""Known bugs of packed documents, planted: each is caught, and by exactly the quantities named.

As in test_mutations, of which this is another part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel3d.context_parallel.documents import Documents
from parallel3d.data import loader
from parallel3d.data.loader import Batches, MicroBatch
from parallel3d.data.sampler import Sample
from parallel3d.models import attention, embedding_and_head
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_caught
from tests.distributed.pool import Pool
from tests.distributed.test_mutations import ALL_NUMBERS, Mutation


@contextmanager
def a_neighbour_is_seen() -> Iterator[None]:
    """The first two documents of each sample are one to attention; positions are right."""

    sound = loader.documents_of

    def documents_of(samples: Sequence[Sample], *rest: Any) -> Documents:
        found = sound(samples, *rest)
        table = found.blocks.table.clone()
        rows: list[list[int]] = []
        joined: set[int] = set()
        for row in table[0, 1 : int(table[0, 0, 0]) + 1].tolist():
            if row[1] > 0 and row[0] not in joined:
                rows[-1][2] += row[2]
                joined.add(row[0])
            else:
                rows.append(row)
        table[0, 0, 0] = len(rows)
        table[0, 1 : len(rows) + 1] = torch.tensor(rows)
        return replace(found, blocks=replace(found.blocks, table=table))

    with patch.object(loader, "documents_of", documents_of):
        yield


@contextmanager
def positions_go_on() -> Iterator[None]:
    """Positions count from the sample's first token, whatever the documents.

    With RoPE nobody could tell: scores depend on the distance alone.
    """

    def positions(self: Documents) -> Tensor:
        return torch.arange(self.starts.shape[1]).expand(self.starts.shape)

    with patch.object(Documents, "positions", positions):
        yield


@contextmanager
def positions_of_another_sample() -> Iterator[None]:
    """Each sample is rotated by the positions of the next."""
    sound = Documents.positions
    with patch.object(Documents, "positions", lambda self: sound(self).roll(1, dims=0)):
        yield


@contextmanager
def documents_begin_a_token_late() -> Iterator[None]:
    """The first token of a document belongs to the one before it."""
    sound = loader.documents_of

    def late(sample: Sample) -> Sample:
        if sample.starts is None:
            return sample
        begins = np.unique(sample.starts)[1:] + 1
        starts = np.zeros_like(sample.starts)
        for begin in begins:
            starts[begin:] = begin
        return sample._replace(starts=starts)

    def documents_of(samples: Sequence[Sample], *rest: Any) -> Documents:
        return sound([late(sample) for sample in samples], *rest)

    with patch.object(loader, "documents_of", documents_of):
        yield


@contextmanager
def spans_end_a_token_late() -> Iterator[None]:
    """The loss mask is moved by one token; as many are learned from as before."""
    sound = Batches.micro_batch

    def micro_batch(self: Batches, first: int, m: int) -> MicroBatch:
        batch = sound(self, first, m)
        return batch._replace(loss_mask=batch.loss_mask.roll(1, dims=1))

    with patch.object(Batches, "micro_batch", micro_batch):
        yield


@contextmanager
def the_middle_knows_no_documents() -> Iterator[None]:
    """Stages between the ends, which read no tokens, take a sample for one document."""
    sound = Batches.micro_batch

    def micro_batch(self: Batches, first: int, m: int) -> MicroBatch:
        batch = sound(self, first, m)
        return batch if self._needs_batch else batch._replace(documents=None)

    with patch.object(Batches, "micro_batch", micro_batch):
        yield


@contextmanager
def dropout_sees_everything() -> Iterator[None]:
    """Attention that writes its probabilities out forgets the documents."""
    sound = attention.attend_dropping
    with patch.object(attention, "attend_dropping", lambda *to: sound(*to[:-1], None)):
        yield


@contextmanager
def parts_have_the_positions_of_the_first() -> Iterator[None]:
    """Each part of the sequence looks its tokens up as if it were the first."""
    sound = embedding_and_head.Embedding.forward

    def forward(
        self: embedding_and_head.Embedding,
        tokens: Tensor,
        samples: Tensor | None,
        documents: Documents,
    ) -> Tensor:
        first_part = documents.positions().chunk(self.tp.size, dim=1)[0].repeat(1, self.tp.size)
        with patch.object(Documents, "positions", lambda _: first_part):
            return sound(self, tokens, samples, documents)

    with patch.object(embedding_and_head.Embedding, "forward", forward):
        yield


UNCLIPPED = (("clip_grad", 0.0), ("lr", 0.1))
LLAMA = Problem(
    "llama_tiny", "sgd", tied=True, optim=UNCLIPPED, layers=2, steps=2, batch=12, documents=True
)
GPT = replace(LLAMA, preset="gpt_tiny")
DROPS = replace(GPT, model=(("dropout", 0.2),))
PLANTED = [
    pytest.param(a_neighbour_is_seen, (1, 1, 1), Case(LLAMA), id="neighbour-seen"),
    pytest.param(positions_go_on, (1, 1, 1), Case(GPT), id="positions-go-on"),
    pytest.param(positions_of_another_sample, (2, 1, 1), Case(LLAMA), id="others-positions"),
    pytest.param(documents_begin_a_token_late, (1, 2, 1), Case(LLAMA), id="document-off-by-one"),
    pytest.param(spans_end_a_token_late, (1, 1, 1), Case(GPT), id="span-off-by-one"),
    pytest.param(
        the_middle_knows_no_documents, (1, 3, 1), Case(replace(GPT, layers=3)), id="middle-blind"
    ),
    pytest.param(dropout_sees_everything, (1, 1, 1), Case(DROPS), id="dropout-blind"),
    pytest.param(
        parts_have_the_positions_of_the_first, (2, 1, 1), Case(GPT, sp=True), id="sp-positions"
    ),
]


@pytest.mark.parametrize(("mutation", "sizes", "case"), PLANTED)
def test_a_planted_bug_of_documents_is_caught(
    mutation: Mutation,
    sizes: tuple[int, int, int],
    case: Case,
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, ALL_NUMBERS, pool, references)
