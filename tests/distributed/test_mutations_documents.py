"""Plants known bugs of packed documents: each is caught, by exactly the named quantities.

This continues test_mutations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel3d.context_parallel.documents import Documents, make_documents
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.data.loader import MicroBatch
from parallel3d.models.attention import AttentionOptions
from parallel3d.models.layer_inputs import LayerInputs
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import ATTENDED_KEYS, ATTENTION, MICRO_BATCH, Mutation, planted
from tests.distributed.test_mutations import ALL_NUMBERS

pytestmark = pytest.mark.more


def with_documents(batch: MicroBatch, documents: Documents | None) -> MicroBatch:
    return batch._replace(inputs=replace(batch.inputs, documents=documents))


def with_starts(batch: MicroBatch, positions: Tensor) -> MicroBatch:
    """Returns the micro-batch with documents whose tokens have these positions; attention is
    unchanged."""
    starts = torch.arange(positions.shape[1]) - positions
    return with_documents(batch, replace(batch.inputs.documents, starts=starts.to(torch.int32)))


@planted(ATTENDED_KEYS)
def a_neighbour_is_seen(
    sound: Any, held: np.ndarray, starts: np.ndarray, split: SequenceSplit
) -> np.ndarray:
    """Attention treats the first two documents of each sample as one; positions are right."""
    joined = starts.copy()
    for row in joined:
        second = row[row > 0].min(initial=len(row))
        row[row == second] = 0
    return sound(held, joined, split)


@planted(MICRO_BATCH)
def positions_continue(sound: Any, *which: Any) -> MicroBatch:
    """Positions count from the sample's first token, whatever the documents.

    With RoPE this would not show, because scores only depend on distances.
    """
    batch = sound(*which)
    starts = batch.inputs.documents.starts
    return with_starts(batch, torch.arange(starts.shape[1]).expand(starts.shape))


@planted(MICRO_BATCH)
def positions_of_another_sample(sound: Any, *which: Any) -> MicroBatch:
    """Each sample is rotated by the positions of the next one."""
    batch = sound(*which)
    return with_starts(batch, batch.inputs.documents.positions().roll(1, dims=0))


@planted(MICRO_BATCH)
def documents_begin_a_token_late(sound: Any, *which: Any) -> MicroBatch:
    """The first token of a document belongs to the one before it."""
    batch = sound(*which)
    late = np.zeros_like(batch.inputs.documents.starts.numpy())
    for row, starts in zip(late, batch.inputs.documents.starts.numpy(), strict=True):
        for begin in np.unique(starts)[1:] + 1:
            row[begin:] = begin
    split = SequenceSplit(late.shape[1])
    return with_documents(batch, make_documents(late, batch.inputs.samples.device, split))


@planted(MICRO_BATCH)
def spans_end_a_token_late(sound: Any, *which: Any) -> MicroBatch:
    """The loss mask is shifted by one token; the number of learned tokens is unchanged."""
    batch = sound(*which)
    return batch._replace(loss_mask=batch.loss_mask.roll(1, dims=1))


@planted(MICRO_BATCH)
def the_middle_knows_no_documents(sound: Any, *which: Any) -> MicroBatch:
    """Stages between the ends, which read no tokens, treat a sample as one document."""
    batch = sound(*which)
    return with_documents(batch, None) if batch.tokens is None else batch


@planted(ATTENTION)
def dropout_sees_everything(
    sound: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: LayerInputs,
    options: AttentionOptions,
    sinks: Tensor | None,
) -> Tensor:
    """Attention that writes its probabilities out ignores the documents."""
    if inputs.samples is not None:
        inputs = replace(inputs, documents=None)
    return sound(q, k, v, inputs, options, sinks)


@planted(MICRO_BATCH)
def parts_have_the_positions_of_the_first(sound: Any, *which: Any) -> MicroBatch:
    """Each of two parts of the sequence looks up its tokens as if it were the first."""
    batch = sound(*which)
    first_part, _ = batch.inputs.documents.positions().chunk(2, dim=1)
    return with_starts(batch, first_part.repeat(1, 2))


UNCLIPPED = (("clip_grad", 0.0), ("lr", 0.1))
LLAMA = Problem(
    "llama_tiny", "sgd", tied=True, optim=UNCLIPPED, layers=2, steps=2, batch=12, documents=True
)
GPT = replace(LLAMA, preset="gpt_tiny")
DROPS = replace(GPT, model=(("dropout", 0.2),))
PLANTED = [
    pytest.param(a_neighbour_is_seen, (1, 1, 1), Case(LLAMA), id="neighbour-seen"),
    pytest.param(positions_continue, (1, 1, 1), Case(GPT), id="positions-continue"),
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
