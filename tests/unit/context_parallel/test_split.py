"""Tests the split of sequences over context-parallel ranks: all tokens once, in order, evenly."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel3d.context_parallel.documents import make_documents
from parallel3d.context_parallel.split import SequenceSplit, work_of_ranks


def starts_of(*documents: list[int], padded: int) -> np.ndarray:
    """Returns (b, padded) starts of documents of these lengths; the rest is padding."""
    rows = []
    for lengths in documents:
        edges = np.cumsum([0, *lengths, padded])
        rows.append(np.repeat(edges[:-1], np.diff(edges))[:padded])
    return np.array(rows, dtype=np.int32)


@pytest.mark.parametrize("length", [1, 7, 16, 61, 96])
@pytest.mark.parametrize(("size", "multiple"), [(2, 1), (3, 1), (3, 2), (4, 4)])
def test_every_position_is_held_once_and_ascending(length: int, size: int, multiple: int) -> None:
    for balanced in (False, True):
        split = SequenceSplit(length, size, 0, multiple, balanced)
        assert 0 <= split.padded - length < 2 * size * multiple
        assert split.local % multiple == 0
        lengths = [[length], [1] * (length // 2) + [length - length // 2]]
        held = split.held(starts_of(*lengths, padded=split.padded))
        assert held.shape == (size, 2, split.local)
        assert (np.diff(held, axis=2) > 0).all()
        for row in range(2):
            assert sorted(held[:, row].flatten()) == list(range(split.padded))


def test_halves_of_one_document_are_equal_work() -> None:
    split = SequenceSplit(96, 4, balanced=True)
    starts = starts_of([96], padded=96)
    held = split.held(starts)
    assert held[1, 0].tolist() == [*range(12, 24), *range(72, 84)]
    assert len(set(work_of_ranks(held, starts))) == 1


def test_a_balanced_split_evens_out_documents() -> None:
    """With one long document among short ones, halves give one rank most of its work."""
    lengths = [[256, *[16] * 48], [*[8] * 64, 512]]
    starts = starts_of(*lengths, padded=1024)
    works = [
        work_of_ranks(SequenceSplit(1024, 4, balanced=balanced).held(starts), starts)
        for balanced in (False, True)
    ]
    assert works[0].sum() == works[1].sum()
    spread = [work.max() / work.mean() - 1 for work in works]
    assert spread[0] > 0.2 and spread[1] < 0.05


def test_segments_are_the_runs_of_a_document() -> None:
    """Rank 1 of 2, with halves, has positions 3 to 8 in documents from 0, 5 and 6, and padding."""
    split = SequenceSplit(11, 2, 1)
    starts = split.pad_starts(starts_of([5, 1, 5], padded=11))
    shard = make_documents(starts, torch.device("cpu"), split).shard
    assert shard is not None
    (table,) = shard.blocks.table.tolist()
    assert table[1 : table[0][0] + 1] == [[0, 0, 2, 0, 3], [0, 2, 1, 5, 0], [0, 3, 3, 6, 0]]
    assert shard.positions.tolist() == [[3, 4, 5, 6, 7, 8]]
    whole = torch.arange(12)
    in_rank_order = whole[shard.places]
    assert torch.equal(in_rank_order[shard.order], whole)
    assert in_rank_order.tolist() == shard.held.flatten().tolist()


def test_take_keeps_the_tokens_of_a_rank_and_pads_with_zeros() -> None:
    parts = []
    for index in range(2):
        split = SequenceSplit(6, 2, index)
        starts = split.pad_starts(starts_of([6], padded=6))
        shard = make_documents(starts, torch.device("cpu"), split).shard
        assert shard is not None
        parts.append(shard.take(np.arange(1, 7)[None]).tolist())
    assert parts == [[[1, 2, 0, 0]], [[3, 4, 5, 6]]]


def test_padding_has_no_position_that_the_model_lacks() -> None:
    split = SequenceSplit(3, 4)
    starts = split.pad_starts(starts_of([3], padded=3))
    assert starts.tolist() == [[0, 0, 0, 3, 3, 3, 6, 6]]
    for index in range(4):
        mine = SequenceSplit(3, 4, index)
        assert make_documents(starts, torch.device("cpu"), mine).positions().max() < 3


def test_the_pictures_of_the_page_are_those_of_the_split() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    for name, draw in runpy.run_path(str(docs / "context_parallel.py"))["PICTURES"].items():
        assert (docs / name).read_text("utf-8") == draw(), "run: python docs/context_parallel.py"
