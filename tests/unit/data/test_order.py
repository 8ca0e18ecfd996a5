"""Tests the order of samples: equal for every layout, and for runs that change the layout."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from parallel3d.data.corpus import open_corpus
from parallel3d.data.keys import DataConfig
from parallel3d.data.loader import Batches
from parallel3d.data.sampler import SampleSource
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.corpora import pair
from tests.sources import sources_of
from tests.unit.data.test_chat import ROWS, samples
from tests.unit.data.test_chat import data as chat

SEQ, BATCH, STEPS = 16, 12, 9
LONGEST = 200  # tokens per sample of chat
LAYOUTS = [(1, 1), (1, 4), (2, 3), (3, 2), (4, 3), (3, 4), (2, 6), (4, 1)]  # dp, micro-batch size


@pytest.fixture(params=["concat", "best_fit", "chat padded", "chat best_fit"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> SampleSource:
    """Returns a blend, or conversations, that are read several times."""
    if request.param.startswith("chat"):
        given = chat(tmp_path, ROWS, packing=request.param.split()[1], document_mask=True)
        train, _ = samples(given, LONGEST)
        assert 3 * train.windows < BATCH * STEPS
        return train
    return blend(tmp_path, request.param)


def blend(tmp_path: Path, packing: str) -> SampleSource:
    """Returns a blend whose weights change in the middle of a step, and whose parts are read
    again."""
    names = [str(pair(tmp_path / name, seed)) for seed, name in enumerate(("a", "b", "c"))]
    data = DataConfig(
        name="blend",
        blend=dict(zip(names, (5, 3, 1), strict=True)),
        blend_stages={40 * SEQ: dict(zip(names[1:], (1, 4), strict=True))},
        packing=packing,
        document_mask=True,
        cut_documents=True,
        cache_dir=str(tmp_path / "cache"),
    )
    config = Config(data=data, model=ModelConfig(seq_length=SEQ, vocab_size=257), seed=3)
    return sources_of(open_corpus(data, SEQ), config).train


def step(source: SampleSource, first: int, dp: int, size: int) -> list[torch.Tensor]:
    """Returns tokens, labels, masks, numbers and documents of a global batch, of all ranks in
    order."""
    count = BATCH // (dp * size)
    ranks = [Batches(source, size, count, rank, "cpu", document_mask=True) for rank in range(dp)]
    batches = [rank.micro_batch(first, m) for rank in ranks for m in range(count)]
    parts = [
        (b.tokens, b.labels, b.loss_mask, b.inputs.samples, b.inputs.documents.starts)
        for b in batches
    ]
    assert sum(rank.token_count(first) for rank in ranks) == sum(int(p[2].sum()) for p in parts)
    return [torch.cat(of) for of in zip(*parts, strict=True)]


@pytest.mark.slow
def test_every_layout_reads_the_same_samples_in_the_same_order(source: SampleSource) -> None:
    usual = [step(source, first * BATCH, 1, BATCH) for first in range(STEPS)]
    for dp, size in LAYOUTS:
        for first, expected in enumerate(usual):
            found = step(source, first * BATCH, dp, size)
            assert all(map(torch.equal, found, expected)), (dp, size, first)


@pytest.mark.slow
def test_a_run_that_changes_its_layout_at_every_step_reads_the_same_samples(
    source: SampleSource,
) -> None:
    consumed = 0
    for first, (dp, size) in enumerate(islice(cycle(LAYOUTS), STEPS)):
        expected = step(source, first * BATCH, 1, 1)
        assert all(map(torch.equal, step(source, consumed, dp, size), expected))
        assert expected[3].tolist() == list(range(consumed, consumed + BATCH))
        consumed += BATCH
