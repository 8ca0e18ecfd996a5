"""Tests indexed datasets: those of another writer are read, and other files are refused."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from parallel3d.data.indexed import IndexedCorpus, IndexedWriter, token_type
from parallel3d.errors import UserError

DOCUMENTS = [[5, 6, 7], [], [300], [1, 2], [], [65535, 0, 9, 4]]


def by_hand(
    prefix: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    code: int = 8,
    letter: str = "H",
    head: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
) -> Path:
    """Writes a pair like Megatron's IndexedDatasetBuilder: documents of sequences of tokens."""
    sequences = [sequence for document in documents for sequence in document]
    width = struct.calcsize(letter)
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(struct.pack(f"<{len(sequence)}{letter}", *sequence))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(head + struct.pack("<Q", version) + struct.pack("<B", code))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1))
        for sequence in sequences:
            file.write(struct.pack("<i", len(sequence)))
        byte = 0
        for sequence in sequences:
            file.write(struct.pack("<q", byte))
            byte += width * len(sequence)
        first = 0
        for document in documents:
            file.write(struct.pack("<q", first))
            first += len(document)
        file.write(struct.pack("<q", first))
    return prefix


def alone(documents: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    return [[document] for document in documents]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return by_hand(tmp_path / "pair", alone(DOCUMENTS))


def stream(corpus: IndexedCorpus) -> list[int]:
    return corpus.tokens[:].tolist()


def test_a_pair_by_megatrons_writer_is_read(pair: Path) -> None:
    corpus = IndexedCorpus(pair)
    assert stream(corpus) == [5, 6, 7, 300, 1, 2, 65535, 0, 9, 4]
    assert corpus.documents == 6 and corpus.dtype == np.uint16
    assert corpus.lengths[:].tolist() == [3, 0, 1, 2, 0, 4]
    assert corpus.tokens[2:5].tolist() == [7, 300, 1]


@pytest.mark.parametrize(
    ("begin", "end", "starts"),
    [
        (0, 10, [0, 3, 4, 6]),
        (1, 4, [3]),
        (4, 6, [4]),
        (5, 6, []),
        (3, 4, [3]),
        (7, 10, []),
        (2, 2, []),
    ],
)
def test_documents_begin_where_they_do(pair: Path, begin: int, end: int, starts: list[int]) -> None:
    assert IndexedCorpus(pair).starts(begin, end).tolist() == starts


@pytest.mark.parametrize(
    ("code", "letter", "tokens"),
    [
        (1, "B", [0, 255]),
        (2, "b", [1, 127]),
        (3, "h", [1, 32767]),
        (4, "i", [7, 2**31 - 1]),
        (5, "q", [7, 2**40]),
        (8, "H", [0, 65535]),
    ],
)
def test_every_type_of_integers_is_read(
    tmp_path: Path, code: int, letter: str, tokens: list[int]
) -> None:
    corpus = IndexedCorpus(by_hand(tmp_path / "p", alone([tokens, tokens[:1]]), code, letter))
    assert stream(corpus) == [*tokens, tokens[0]] and corpus.starts(0, 3).tolist() == [0, 2]


def test_documents_of_several_sentences_begin_with_the_first(tmp_path: Path) -> None:
    documents = [[[1, 2], [3]], [], [[4]], [[5, 6], [], [7]], []]
    corpus = IndexedCorpus(by_hand(tmp_path / "p", documents))
    assert stream(corpus) == [1, 2, 3, 4, 5, 6, 7]
    assert corpus.documents == 5 and corpus.starts(0, 7).tolist() == [0, 3, 4]


def test_many_documents_are_found_at_the_places_of_a_plain_sum(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(0, 9, 20_000)
    tokens = np.arange(lengths.sum()) % 60_000
    with IndexedWriter(tmp_path / "p", np.dtype("<u2")) as writer:
        writer.add_many(tokens, lengths)
    corpus = IndexedCorpus(tmp_path / "p")
    begins = np.cumsum(lengths) - lengths
    whole = sorted({int(b) for b, n in zip(begins, lengths, strict=True) if n})
    for begin in range(0, len(corpus) - 300, 1999):
        inside = [b for b in whole if begin <= b < begin + 300]
        assert corpus.starts(begin, begin + 300).tolist() == inside
    corpus.check_all()


def test_our_files_are_byte_for_byte_megatrons(pair: Path, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "ours", np.dtype("<u2")) as writer:
        for document in DOCUMENTS[:3]:
            writer.add(np.array(document, np.int64))
        writer.add_many(np.array([1, 2, 65535, 0, 9, 4], "<u2"), [2, 0, 4])
    for end in ("bin", "idx"):
        assert (tmp_path / f"ours.{end}").read_bytes() == Path(f"{pair}.{end}").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["ours.bin", "ours.idx", "pair.bin", "pair.idx"]


def test_a_pair_that_was_not_closed_does_not_appear(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "p", np.dtype("<u2")) as writer:
        writer.add(np.array([1]))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_a_pair_replaces_an_older_one(pair: Path) -> None:
    with IndexedWriter(pair, np.dtype("<u2")) as writer:
        writer.add(np.array([3]))
    assert stream(IndexedCorpus(pair)) == [3]


@pytest.mark.parametrize(
    ("tokens", "lengths", "words"),
    [
        ([65536], [1], "from 0 to 65535, but are from 65536 to 65536"),
        ([-1], [1], "but are from -1 to -1"),
        ([1], [2], "add up to 1 tokens, but add up to 2"),
    ],
)
def test_tokens_beyond_the_integer_type_are_refused(
    tmp_path: Path, tokens: list[int], lengths: list[int], words: str
) -> None:
    writer = IndexedWriter(tmp_path / "p", np.dtype("<u2"))
    with pytest.raises(ValueError, match=words):
        writer.add_many(np.array(tokens), lengths)
    writer.discard()


def test_the_type_follows_the_vocabulary() -> None:
    types = {v: token_type(v) for v in (257, 65536, 65537, 128256)}
    assert types == {257: "<u2", 65536: "<u2", 65537: "<i4", 128256: "<i4"}


def refused(prefix: Path) -> str:
    with pytest.raises(UserError) as raised:
        IndexedCorpus(prefix, f"data.path={prefix.name}")
    assert str(raised.value).startswith(f"data.path={prefix.name} ")
    return str(raised.value)


@pytest.mark.parametrize(("end", "left"), [("bin", 19), ("bin", 0), ("idx", 33), ("idx", 100)])
def test_a_pair_cut_short_is_refused(pair: Path, end: str, left: int) -> None:
    os.truncate(f"{pair}.{end}", left)
    assert "is cut short" in refused(pair)


def put(pair: Path, at: int, form: str, value: int) -> None:
    with open(f"{pair}.idx", "r+b") as file:
        file.seek(at)
        file.write(struct.pack(form, value))


LENGTHS, POINTERS, FIRSTS = 34, 34 + 6 * 4, 34 + 6 * 12


@pytest.mark.parametrize(
    ("at", "form", "value", "words"),
    [
        (
            POINTERS + 5 * 8,
            "<q",
            10**9,
            "ends at byte 12, but the next begins at byte 1,000,000,000",
        ),
        (POINTERS + 5 * 8, "<q", -64, "ends at byte 12, but the next begins at byte -64"),
        (LENGTHS + 5 * 4, "<i", 3, "its sequences end at byte 18 of 20"),
        (POINTERS, "<q", 2, "its first sequence begins at byte 2"),
        (
            POINTERS + 2 * 8,
            "<q",
            4,
            "sequence 1 has 0 tokens and ends at byte 6, but the next begins",
        ),
        (LENGTHS + 3 * 4, "<i", 700, "sequence 3 has 700 tokens"),
        (LENGTHS, "<i", -3, "sequence 0 has -3 tokens"),
        (FIRSTS + 2 * 8, "<q", 77, "not in the order of their sequences"),
        (FIRSTS, "<q", 1, "its documents span sequences 1 to 6, not 0 to 6"),
        (FIRSTS + 6 * 8, "<q", 5, "its documents span sequences 0 to 5, not 0 to 6"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(
    pair: Path, at: int, form: str, value: int, words: str
) -> None:
    put(pair, at, form, value)
    with pytest.raises(UserError, match=words):
        IndexedCorpus(pair)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: put(p, 0, "<Q", 0), "bad magic in"),
        (lambda p: put(p, 9, "<Q", 2), "version 2: it must be 1"),
        (
            lambda p: put(p, 17, "<B", 7),
            "no tokens: its type code 7 is not one of Megatron's integer types",
        ),
        (lambda p: put(p, 17, "<B", 9), "its type code 9 is not one"),
        (lambda p: put(p, 18, "<Q", 0), "holds no documents"),
        (lambda p: put(p, 18, "<Q", 2**62), "is cut short"),
        (lambda p: os.truncate(f"{p}.idx", FIRSTS + 7 * 8 + 6), "datasets with modes"),
        (lambda p: os.unlink(f"{p}.idx"), r"there is no .*pair\.idx\): give the prefix"),
        (lambda p: os.unlink(f"{p}.bin"), r"there is no .*pair\.bin"),
    ],
)
def test_a_file_that_is_not_a_corpus_pair_is_refused(
    pair: Path, change: Callable[[Path], None], words: str
) -> None:
    change(pair)
    with pytest.raises(UserError, match=words):
        IndexedCorpus(pair)


def test_a_pipe_is_refused_without_waiting(pair: Path) -> None:
    os.unlink(f"{pair}.idx")
    os.mkfifo(f"{pair}.idx")
    assert "is not a regular file" in refused(pair)


def test_damage_that_opening_does_not_see_is_found_when_it_is_read(
    tmp_path: Path,
) -> None:
    with IndexedWriter(tmp_path / "p", np.dtype("<u2")) as writer:
        writer.add_many(np.zeros(20_000, "<u2"), [2] * 10_000)
    put(tmp_path / "p", 34 + 10_000 * 4 + 8 * 700, "<q", 1402)
    corpus = IndexedCorpus(tmp_path / "p")
    assert corpus.starts(0, 600).size == 300
    for look in (lambda: corpus.starts(1300, 1500), corpus.check_all):
        with pytest.raises(UserError, match="sequence 699 has 2 tokens and ends at byte 2,800"):
            look()


def test_tokens_truncated_in_use_are_an_error_not_a_signal(pair: Path) -> None:
    corpus = IndexedCorpus(pair)
    os.truncate(f"{pair}.bin", 4)
    with pytest.raises(OSError, match="cut short while it was in use"):
        corpus.tokens[0:10]
