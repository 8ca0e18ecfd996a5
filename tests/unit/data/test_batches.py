"""Tests micro-batches: the global batch has the same samples in the same order for every layout."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from parallel3d.data.loader import Batches, MicroBatch
from parallel3d.data.sampler import Sample, Sampler

EOT, SEQ, GLOBAL = 256, 8, 36


def source(eod_mask_loss: bool) -> Sampler:
    tokens = np.random.default_rng(0).integers(240, 257, 4000).astype("<u2")
    return Sampler(tokens, SEQ, 5, True, EOT, eod_mask_loss, document_mask=True)


def global_batch(dp: int, micro: int, step: int) -> tuple[torch.Tensor, ...]:
    """Returns the step's micro-batches of all ranks, one after the other."""
    count = GLOBAL // (dp * micro)
    ranks = [Batches(source(True), micro, count, d, "cpu") for d in range(dp)]
    parts = [rank.micro_batch(step * GLOBAL, m) for rank in ranks for m in range(count)]
    tensors = ((*part[:3], part.inputs.samples) for part in parts)
    return tuple(torch.cat(field) for field in zip(*tensors, strict=True))


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("step", [0, 2])
def test_global_batch_is_the_same_for_every_layout(dp: int, micro: int, step: int) -> None:
    samples = [source(True).sample(i) for i in range(step * GLOBAL, (step + 1) * GLOBAL)]
    tokens, labels, mask, numbers = global_batch(dp, micro, step)
    assert numbers.tolist() == list(range(step * GLOBAL, (step + 1) * GLOBAL))
    assert tokens.tolist() == [s.tokens[:-1].tolist() for s in samples]
    assert labels.tolist() == [s.tokens[1:].tolist() for s in samples]
    assert mask.tolist() == [s.loss_mask.tolist() for s in samples]
    assert not mask.all()


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_token_counts_of_the_ranks_add_up_to_the_unmasked_tokens(dp: int) -> None:
    count = GLOBAL // (dp * 3)
    ranks = [Batches(source(True), 3, count, d, "cpu") for d in range(dp)]
    expected = [
        sum(int(rank.micro_batch(GLOBAL, m).loss_mask.sum()) for m in range(count))
        for rank in ranks
    ]
    assert [rank.token_count(GLOBAL) for rank in ranks] == expected
    assert sum(expected) == int(global_batch(1, 3, 1)[2].sum()) < GLOBAL * SEQ


def test_token_count_without_masks_does_not_read_the_data() -> None:
    class Untouchable:
        masks, seq_length = False, SEQ

        def sample(self, i: int) -> Sample:
            raise AssertionError(f"sample {i} was read")

    assert Batches(Untouchable(), 2, 3, 0, "cpu").token_count(0) == 2 * 3 * SEQ
    assert source(False).masks is False


def test_token_count_reads_a_source_that_does_not_declare_its_masks() -> None:
    class Half:
        def sample(self, i: int) -> Sample:
            return Sample(np.zeros(SEQ + 1, dtype=np.int64), np.arange(SEQ) < i)

    assert Batches(Half(), 1, 2, 1, "cpu").token_count(0) == 2 + 3


def test_tensors_have_the_promised_types_and_are_contiguous() -> None:
    batch = Batches(source(True), 2, 3, 0, "cpu").micro_batch(0, 1)
    assert isinstance(batch, MicroBatch)
    assert [t.dtype for t in batch[:3]] == [torch.int64, torch.int64, torch.bool]
    assert batch.inputs.samples.dtype == torch.int64
    assert batch.inputs.documents is None
    assert all(t.shape == (2, SEQ) and t.is_contiguous() for t in batch[:3])


def test_micro_batches_hold_the_indices_of_their_samples() -> None:
    batch = Batches(source(True), 2, 3, 1, "cpu").micro_batch(48, 2)
    assert batch.inputs.samples.tolist() == [58, 59]

    class Untouchable:
        def sample(self, i: int) -> Sample:
            raise AssertionError(f"sample {i} was read")

    inner = Batches(Untouchable(), 2, 3, 1, "cpu", needs_batch=False).micro_batch(48, 2)
    assert inner[:3] == (None, None, None) and inner.inputs.samples.tolist() == [58, 59]


@pytest.mark.parametrize("reads", [True, False])
def test_every_stage_gets_the_starts_of_documents(reads: bool) -> None:
    """Middle stages, too, get tensors of one shape, whatever the documents."""
    samples = [source(True).sample(i) for i in range(36, 54)]
    batches = Batches(source(True), 3, 3, 0, "cpu", needs_batch=reads, document_mask=True)
    found = [batches.micro_batch(36, m) for m in range(3)]
    for m, batch in enumerate(found):
        starts, table = batch.inputs.documents.starts, batch.inputs.documents.blocks.table[0]
        assert (batch.tokens is not None) == reads
        rows = [s.starts.tolist() for s in samples[3 * m : 3 * m + 3]]
        assert starts.tolist() == rows and starts.dtype == torch.int32
        edges = [[*sorted(set(row)), SEQ] for row in rows]
        segments = [[i, a, b - a, a, 0] for i, of in enumerate(edges) for a, b in pairwise(of)]
        assert table[0, 0] == len(segments) and len(table) == 3 * SEQ + 1
        assert table[1 : len(segments) + 1].tolist() == segments and table.device.type == "cpu"
        assert batch.inputs.documents.positions().tolist() == [
            [p - begin for p, begin in enumerate(row)] for row in rows
        ]
    assert len({int(batch.inputs.documents.blocks.table[0, 0, 0]) for batch in found}) > 1


def test_a_sample_without_starts_is_one_document() -> None:
    class Plain:
        def sample(self, i: int) -> Sample:
            return Sample(np.zeros(SEQ + 1, dtype=np.int64), np.ones(SEQ, dtype=bool))

    batch = Batches(Plain(), 2, 1, 0, "cpu", document_mask=True).micro_batch(0, 0)
    table = batch.inputs.documents.blocks.table[0]
    assert table[0, 0] == 2 and table[1:3].tolist() == [[i, 0, SEQ, 0, 0] for i in range(2)]


@pytest.mark.parametrize(
    "starts", [[0, 0, 1, 1], [1, 1, 2, 3], [0, 0, 2, 0], [0, 0, 3, 3], [0, 0, 0]]
)
def test_impossible_starts_of_documents_are_refused(starts: list[int]) -> None:
    class Wrong:
        def sample(self, i: int) -> Sample:
            tokens, mask = np.zeros(5, dtype=np.int64), np.ones(4, dtype=bool)
            return Sample(tokens, mask, np.array(starts, dtype=np.int32))

    with pytest.raises(ValueError, match="sample 6: starts"):
        Batches(Wrong(), 1, 1, 0, "cpu", document_mask=True).micro_batch(6, 0)


def test_a_micro_batch_that_does_not_exist_is_refused() -> None:
    with pytest.raises(IndexError):
        Batches(source(True), 2, 3, 0, "cpu").micro_batch(0, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_the_gpu_equal_those_on_the_cpu() -> None:
    here = Batches(source(True), 2, 3, 1, "cpu")
    there = Batches(source(True), 2, 3, 1, "cuda")
    for m in range(3):
        for a, b in zip(here.micro_batch(4, m)[:3], there.micro_batch(4, m)[:3], strict=True):
            assert b.device.type == "cuda" and torch.equal(a, b.cpu())
