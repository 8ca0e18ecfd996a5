"""Tests best-fit packs: whole documents, packs as full as possible, plans that are complete or
absent."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel3d.data.corpus import Corpus, check_data, open_corpus
from parallel3d.data.keys import DataConfig
from parallel3d.data.packing import StreamPieces, best_fit, kept_plan, pieces_of
from parallel3d.data.sampler import Sample
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.corpora import heard, pair
from tests.sources import sources_of

SEQ = 31
EOT = 256


def fills(lengths: list[int], room: int) -> list[int]:
    """Returns the tokens in each pack, one document after the other: the longest first, into the
    least space."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(free, pack) for pack, free in enumerate(left) if free >= length]
        if fitting:
            left[min(fitting)[1]] -= length
        else:
            left.append(room - length)
    return sorted(room - free for free in left)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_packs_are_as_full_as_by_placing_documents_one_by_one(first: int) -> None:
    for seed in range(first, first + 20):
        random = np.random.default_rng(seed)
        room, count = int(random.integers(1, 60)), int(random.integers(0, 200))
        lengths = random.integers(1, room + 1, count)
        if seed % 3 == 0:
            lengths = np.minimum(room, 1 + random.geometric(0.2, count))
        packs = best_fit(lengths, room)
        assert sorted(packs.items.tolist()) == list(range(count)), seed
        made = [packs.items[a:b] for a, b in zip(packs.first[:-1], packs.first[1:], strict=True)]
        filled = sorted(int(lengths[pack].sum()) for pack in made)
        assert filled == fills(lengths.tolist(), room), seed


def test_many_documents_that_do_not_fit_are_packed_quickly() -> None:
    with pytest.raises(ValueError, match="1 to 8 tokens, but have 1 to 9"):
        best_fit(np.array([1, 9]), 8)


def test_long_documents_are_cut_so_that_each_token_but_the_first_is_a_label_once() -> None:
    begins = np.array([0, 1, 5, 14, 23, 40])
    found = pieces_of(begins, 49, capacity=5)
    assert found.cut == 4
    labels = Counter(
        token
        for start, length in zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
        for token in range(start + 1, start + length)
    )
    assert labels == Counter(set(range(49)) - set(begins.tolist()))
    assert 2 <= found.lengths.min() <= found.lengths.max() <= 5


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    prefix = pair(tmp_path / "pair", 5, documents=150, longest=30)
    cache = str(tmp_path / "cache")
    return DataConfig(name="corpus", path=str(prefix), packing="best_fit", cache_dir=cache)


def train(data: DataConfig, seed: int = 1) -> Any:
    config = Config(data=data, model=ModelConfig(seq_length=SEQ, vocab_size=257), seed=seed)
    return sources_of(open_corpus(data, SEQ), config).train


def documents_of(sample: Sample) -> list[tuple[int, ...]]:
    """Returns the content of a sample by its starts, without the padding; checks its mask."""
    found = []
    firsts = sorted(set(sample.starts.tolist()))
    for begin, end in zip(firsts, [*firsts[1:], SEQ], strict=True):
        assert (sample.starts[begin:end] == begin).all()
        mask = sample.loss_mask[begin:end]
        if not mask.any():
            assert end == SEQ and (sample.tokens[begin:] == EOT).all()
            continue
        last = end if mask.all() else end - 1
        assert mask[: last - begin].all() and (mask.all() or end != SEQ or not mask[-1])
        found.append(tuple(sample.tokens[begin : last + 1].tolist()))
    return found


def test_an_epoch_has_each_document_once_and_whole(data: DataConfig) -> None:
    corpus = open_corpus(data, SEQ)
    assert isinstance(corpus, Corpus)
    stream = corpus.train[:].tolist()
    begins = [0, *(k + 1 for k, token in enumerate(stream[:-1]) if token == EOT)]
    ends = [*begins[1:], len(stream)]
    whole = Counter(tuple(stream[a:b]) for a, b in zip(begins, ends, strict=True) if b - a > 1)
    source = train(data)
    for epoch in (0, 1):
        samples = [source.sample(epoch * source.windows + i) for i in range(source.windows)]
        assert Counter(d for sample in samples for d in documents_of(sample)) == whole
    assert source.windows <= 1.1 * sum(len(d) * n for d, n in whole.items()) / (SEQ + 1) + 1


def test_text_without_an_index_is_split_at_its_end_tokens(tmp_path: Path) -> None:
    for name in range(40):
        (tmp_path / f"{name}.txt").write_text("x" * (name % 25 + 1))
    data = DataConfig(
        *("text", str(tmp_path / "*.txt")), packing="best_fit", cache_dir=str(tmp_path / "cache")
    )
    source = train(data)
    lengths = [len(d) for i in range(source.windows) for d in documents_of(source.sample(i))]
    assert max(lengths) <= 26 and len(lengths) >= 35


def test_a_document_longer_than_a_sample_is_refused_or_cut(data: DataConfig) -> None:
    with pytest.raises(UserError) as raised:
        check_data(data, 15)
    assert "documents longer than the 16 tokens of a sample" in str(raised.value)
    assert "give data.cut_documents=true" in str(raised.value)
    data.cut_documents = True
    assert check_data(data, 15) == []
    plan = open_corpus(data, 15).plans[0]
    assert max(length for k in range(plan.packs) for length in plan.pack(k)[1]) == 16
    data.cut_documents = False
    with pytest.raises(UserError, match="does not cut"):
        open_corpus(data, 15)


def test_a_file_longer_than_a_sample_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("x" * 500)
    data = DataConfig("text", str(tmp_path / "book.txt"), packing="best_fit")
    with pytest.raises(UserError, match="a document longer than the 32 tokens"):
        check_data(data, SEQ)


@pytest.mark.parametrize("at", [3, 20, 60, 130, -3])
def test_a_damaged_plan_is_made_again(data: DataConfig, at: int) -> None:
    usual = [train(data).sample(i).tokens.tobytes() for i in range(20)]
    for path in Path(data.cache_dir).glob("*.packs"):
        content = bytearray(path.read_bytes())
        content[at] ^= 16
        path.write_bytes(content)
    with heard() as said:
        open_corpus(data, SEQ)
    assert sum("is damaged" in sentence for sentence in said) >= 2
    assert [train(data).sample(i).tokens.tobytes() for i in range(20)] == usual


def test_a_plan_that_others_may_write_is_not_taken(data: DataConfig) -> None:
    train(data)
    for path in Path(data.cache_dir).glob("*.packs"):
        path.chmod(0o666)
    with heard() as said:
        open_corpus(data, SEQ)
    assert any("can be changed by other users" in sentence for sentence in said)


def killed_while_writing(data: DataConfig) -> None:
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    open_corpus(data, SEQ)


def test_a_kill_leaves_no_half_plan_and_the_next_makes_the_same(data: DataConfig) -> None:
    cache = Path(data.cache_dir)
    child = multiprocessing.get_context("fork").Process(target=killed_while_writing, args=(data,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not list(cache.glob("*.packs")) and list(cache.glob(".*.partial"))
    train(data)
    after = {path.name: path.read_bytes() for path in cache.glob("*.packs")}
    assert len(after) == 2 and not list(cache.glob(".*.partial"))
    for name in after:
        (cache / name).unlink()
    train(data)
    assert {path.name: path.read_bytes() for path in cache.glob("*.packs")} == after


@pytest.mark.slow
def test_one_of_several_processes_makes_the_plan(tmp_path: Path) -> None:
    made = multiprocessing.get_context("fork").Value("i", 0)
    begins = np.arange(0, 3000, 10)

    def pieces() -> StreamPieces:
        with made.get_lock():
            made.value += 1
        return pieces_of(begins, 3000, SEQ + 1)

    def come() -> None:
        kept_plan(tmp_path / "cache", "one", pieces, SEQ + 1)

    come_all = [multiprocessing.get_context("fork").Process(target=come) for _ in range(4)]
    for process in come_all:
        process.start()
    for process in come_all:
        process.join()
    assert [process.exitcode for process in come_all] == [0] * 4 and made.value == 1
