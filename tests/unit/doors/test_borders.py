"""Tests documents in pairs of every kind: which labels count, how they begin and end, the
messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.data.boundary_tokens import look_at_turns
from parallel3d.data.chat import SPOKEN, TOKEN
from parallel3d.data.corpus import Corpus, open_corpus
from parallel3d.data.indexed import IndexedCorpus, IndexedWriter
from parallel3d.data.inputs import take_inputs
from parallel3d.data.keys import DataConfig
from parallel3d.data.loader import Batches, checked
from parallel3d.data.preprocess import PreprocessJob, tokenize
from parallel3d.data.sampler import Sample, Sampler
from parallel3d.data.tokenizer import FileTokenizer, Roles, open_tokenizer
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.sources import part_of
from tests.tokenizers import END, trained
from tests.unit.doors.test_tokenizer import LLAMA_ROW, QWEN, content, made

SEQ, LENGTH, COUNT = 64, 40, 50
WORDS = "def encode(text): return [ord(c) for c in text] " * 4


def pair(prefix: Path, documents: Sequence[Sequence[int]]) -> Path:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for document in documents:
            writer.add(np.array(document, "<u2"))
    return prefix


def file(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def documents(
    tokenizer: FileTokenizer, end: int | None, begin: Sequence[int] = ()
) -> list[list[int]]:
    """Returns documents of 40 tokens, whose last token is `end`."""
    words = tokenizer.encode(WORDS.encode()).tolist()
    made = []
    for number in range(COUNT):
        own = words[number % 7 :][: LENGTH - len(begin)]
        made.append([*begin, *own][: LENGTH - (end is not None)] + ([] if end is None else [end]))
    return made


def opened(prefix: Path, tokenizer: str, **more: Any) -> Corpus:
    data = DataConfig(
        name="corpus", path=str(prefix), tokenizer=tokenizer, valid_fraction=0.0, **more
    )
    corpus = open_corpus(data, SEQ)
    assert isinstance(corpus, Corpus)
    return corpus


# The end of each document → the messages, and the ends that are learned in addition to the
# tokenizer's.
ENDS = (
    ("own", 0, (), ()),
    ("none", None, ("0 of 50 sampled documents end in token <|endoftext|> (0)", "end a text"), ()),
    ("a word", 300, ("0 of 50", "50 in token"), ()),
    (
        "of turns",
        2,
        ("0 of 50", "50 in token <|im_end|> (2)", "the .idx defines the boundaries"),
        (2,),
    ),
)


@pytest.mark.parametrize(("name", "end", "said", "learned"), ENDS, ids=[row[0] for row in ENDS])
def test_labels_at_borders_are_masked_by_the_index(
    tmp_path: Path, name: str, end: int | None, said: tuple[str, ...], learned: tuple[int, ...]
) -> None:
    path = file(tmp_path / "tok.json", content(QWEN, ""))
    tokenizer = open_tokenizer(path)
    assert isinstance(tokenizer, FileTokenizer)
    prefix = pair(tmp_path / "p", documents(tokenizer, end))
    corpus = opened(prefix, path)
    assert len(corpus.told) == bool(said) and all(word in "".join(corpus.told) for word in said)
    assert corpus.roles == Roles((), learned)
    model = ModelConfig(seq_length=SEQ)
    for masks in (False, True):
        data = DataConfig(eod_mask_loss=masks, document_mask=True)
        source = part_of(corpus, Config(data=data, model=model), held_out=False)
        samples = [source.sample(i) for i in range(source.windows)]
        windows = sorted(sample.tokens.tolist() for sample in samples)
        assert len(windows) == (COUNT * LENGTH - 1) // SEQ
        counted = sum(int(sample.loss_mask.sum()) for sample in samples)
        borders = len([b for b in range(LENGTH, len(windows) * SEQ + 1, LENGTH)])
        assert counted == len(windows) * SEQ - masks * borders
    if end == 0:  # the same as with the token, if there is one
        by_token = Sampler(corpus.train, SEQ, 1, False, 0, True, document_mask=True)
        by_index = Sampler(corpus.train, SEQ, 1, False, 0, True, True, corpus.starts(False))
        for i in range(by_index.windows):
            ours, before = by_index.sample(i), by_token.sample(i)
            assert np.array_equal(ours.loss_mask, before.loss_mask)
            assert ours.starts is not None and np.array_equal(ours.starts, before.starts)


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1, 7, 1, 5, 9, 1), (8, 8, 8, 8), (3, 5, 8, 1, 6, 2, 30)])
def test_the_index_and_the_end_token_give_the_same_borders(
    tmp_path: Path, lengths: tuple[int, ...], held_out: bool
) -> None:
    """Includes documents that only consist of an end, in the last window and in a part that is cut
    inside a document."""
    rng = np.random.default_rng(0)
    stream = [[*rng.integers(1, 9, length - 1).tolist(), 0] for length in lengths]
    index = IndexedCorpus(pair(tmp_path / "p", stream))
    half = len(index) // 2
    first, last = (half, len(index)) if held_out else (0, half)
    tokens = index.tokens.part(first, last)
    starts = lambda a, b: index.starts(first + a, first + b) - first  # noqa: E731
    ours = Sampler(tokens, 8, 0, False, 0, True, True, starts, whole=True)
    theirs = Sampler(tokens, 8, 0, False, 0, True, True, whole=True)
    for i in range(ours.windows):
        one, other = ours.sample(i), theirs.sample(i)
        there = len(tokens) - 1 - i * 8  # labels in the last window
        assert np.array_equal(one.loss_mask, other.loss_mask)
        assert one.starts is not None and other.starts is not None
        assert np.array_equal(one.starts[:there], other.starts[:there])


@pytest.mark.parametrize("packing", ["best_fit", "padded"])
def test_packed_documents_without_an_end_have_no_label_at_their_first_token(
    tmp_path: Path, packing: str
) -> None:
    path = file(tmp_path / "tok.json", trained())
    tokenizer = open_tokenizer(path)
    assert isinstance(tokenizer, FileTokenizer)
    prefix = pair(tmp_path / "p", [d[:20] for d in documents(tokenizer, None)])
    more = {"packing": packing, "cache_dir": str(tmp_path / "cache"), "eod_mask_loss": True}
    corpus = opened(prefix, path, **more)
    config = Config(data=DataConfig(eod_mask_loss=True), model=ModelConfig(seq_length=SEQ))
    source = part_of(corpus, config, held_out=False)
    counted = sum(int(source.sample(i).loss_mask.sum()) for i in range(source.windows))
    assert counted == COUNT * 19


@pytest.mark.parametrize("cp", [1, 2])
def test_a_split_sequence_has_the_same_masks(cp: int) -> None:
    tokens = np.arange(1, 130)
    starts = lambda a, b: np.array([n for n in range(a, b) if n and n % 40 == 0])  # noqa: E731
    source = Sampler(tokens, SEQ, 0, False, 0, True, True, starts)
    whole = [source.sample(i) for i in range(2)]
    found = []
    for index in range(cp):
        split = SequenceSplit(SEQ, cp, index) if cp > 1 else None
        batches = Batches(source, 2, 1, 0, "cpu", document_mask=True, split=split)
        batch = batches.micro_batch(0, 0)
        assert batch.labels is not None and batch.loss_mask is not None
        found += batch.labels[batch.loss_mask].tolist()
    expected = np.concatenate([s.tokens[1:][s.loss_mask] for s in whole]).tolist()
    assert sorted(found) == sorted(expected) and len(found) == 2 * SEQ - 3


# Beginning of foreign documents → the learned beginning, or words of a refusal.
BEGINS = (
    ([0] * COUNT, (0,), ""),
    ([None] * COUNT, (), ""),
    ([0] * 20 + [None] * 30, None, "20 of 50 sampled documents begin with <s> (0)"),
)


@pytest.mark.parametrize(("firsts", "begin", "words"), BEGINS)
def test_foreign_documents_must_all_begin_in_the_same_way(
    tmp_path: Path, firsts: list[int | None], begin: tuple[int, ...] | None, words: str
) -> None:
    path = str(made(tmp_path / "tok", LLAMA_ROW))
    tokenizer = open_tokenizer(path)
    assert isinstance(tokenizer, FileTokenizer)
    own = documents(tokenizer, 1)
    both = [d if f is None else [f, *d] for f, d in zip(firsts, own, strict=True)]
    prefix = pair(tmp_path / "p", both)
    if begin is None:
        with pytest.raises(UserError, match=r"begin with <s>") as caught:
            opened(prefix, path)
        assert words in str(caught.value)
    else:
        corpus = opened(prefix, path)
        assert (corpus.roles, corpus.told) == (Roles(begin, ()), ())


def test_end_tokens_inside_documents_are_reported(tmp_path: Path) -> None:
    path = file(tmp_path / "tok.json", content(QWEN, ""))
    tokenizer = open_tokenizer(path)
    assert isinstance(tokenizer, FileTokenizer)
    own = documents(tokenizer, 0)
    joined = [[token for one in own[:5] for token in one], *own[5:], [0, *own[0]]]
    (line,) = opened(pair(tmp_path / "p", joined), path).told
    assert "1 of 47 sampled documents contain the end-of-text token <|endoftext|> (0)" in line


def test_tokens_of_another_tokenizer_are_reported(tmp_path: Path) -> None:
    path = file(tmp_path / "tok.json", trained())
    rng = np.random.default_rng(0)
    alien = [[*rng.integers(1, 300, 60).tolist(), 0] for _ in range(COUNT)]
    (sentence,) = opened(pair(tmp_path / "alien", alien), path).told
    assert "differ from the tokens that data.tokenizer=" in sentence
    beyond = [[*rng.integers(1, 300, 60).tolist(), 400, 0] for _ in range(COUNT)]
    with pytest.raises(UserError, match=r"has token 400 in document 0, but data.tokenizer="):
        opened(pair(tmp_path / "beyond", beyond), path)


@pytest.mark.parametrize("add_bos", [True, False])
def test_documents_of_a_corpus_begin_as_its_json_says(tmp_path: Path, add_bos: bool) -> None:
    """Writes documents by `data tokenize`, and by data=text."""
    path = str(made(tmp_path / "tok", LLAMA_ROW))
    (tmp_path / "a.txt").write_text(WORDS * 9)
    inputs = tuple(take_inputs(str(tmp_path / "a.txt"), None).inputs)
    job = PreprocessJob(inputs, path, tmp_path / "c", workers=0, add_bos=add_bos)
    facts, _ = tokenize(job, lambda _: None)
    assert facts.begin == ((0,) if add_bos else ())
    data = DataConfig(
        *("text", str(tmp_path / "a.txt")),
        tokenizer=path,
        add_bos=add_bos,
        valid_fraction=0.0,
        cache_dir=str(tmp_path / "cache"),
    )
    text = open_corpus(data, SEQ)
    assert isinstance(text, Corpus)
    corpus = open_corpus(DataConfig("corpus", str(tmp_path / "c"), valid_fraction=0.0), SEQ)
    assert isinstance(corpus, Corpus)
    for one in (corpus, text):
        assert one.roles == Roles(facts.begin, ())
        first, last = one.train[:1].tolist(), one.train[len(one.train) - 1 :].tolist()
        assert (first == [0]) == add_bos and last == [1]
    assert text.train[:].tolist() == corpus.train[:].tolist()


def turns(tokenizer: FileTokenizer, end: Sequence[int], blank: bool) -> list[list[int]]:
    """Returns conversations as data=chat stores them; `blank`: a learned line end follows the
    turn."""
    line = tokenizer.encode(b"\n").tolist()
    said, asked = (tokenizer.encode(text).tolist() for text in (b"yes, it is", b"is it?"))
    spoken = [token | SPOKEN for token in [*said, *end, *(line if blank else [])]]
    return [[1, *asked, 2, *line, 1, *spoken, *([] if blank else line)]] * 20


TURNS = (((2,), False, (2,)), ((2,), True, (2,)), ((), False, ()), ((0,), False, (0,)))


@pytest.mark.parametrize(("end", "blank", "learned"), TURNS)
def test_the_token_that_ends_turns_is_found(
    tmp_path: Path, end: tuple[int, ...], blank: bool, learned: tuple[int, ...]
) -> None:
    tokenizer = open_tokenizer(file(tmp_path / "tok.json", content(QWEN, "")))
    assert isinstance(tokenizer, FileTokenizer) and tokenizer.eot_text == END
    with IndexedWriter(tmp_path / "p", np.dtype("<i4")) as writer:
        for one in turns(tokenizer, end, blank):
            writer.add(np.array(one))
    seen = look_at_turns(IndexedCorpus(tmp_path / "p"), tokenizer, SPOKEN, TOKEN, "data.path=x")
    assert seen.roles == Roles((), learned)
    assert len(seen.sentences) == (not learned)


def sample(tokens: Any = None, mask: Any = None) -> Sample:
    tokens = np.arange(9) if tokens is None else np.asarray(tokens)
    return Sample(tokens, np.ones(8, bool) if mask is None else np.asarray(mask))


OWN = (
    (sample(), ""),
    (sample(np.arange(9, dtype=np.uint16)), ""),
    (sample(mask=[1.0] * 4 + [0.0] * 4), ""),
    (sample(mask=[1] * 4 + [0] * 4), ""),
    (sample(mask=[0.5] * 8), "float64 must be bool, or hold only the numbers 0 and 1"),
    (sample(mask=[2] * 8), "must be bool, or hold only the numbers 0 and 1"),
    (sample(mask=[np.nan] * 8), "must be bool, or hold only the numbers 0 and 1"),
    (sample(np.arange(9) + 8), "has token 16"),
    (sample([0] * 8 + [-100]), "has token -100"),
    (sample(np.arange(9.0)), "of type float64"),
    (sample(np.zeros(9, bool)), "of type bool"),
    (sample(mask=np.ones(9, bool)), r"\(9,\)"),
    (sample(np.zeros((9, 1), int)), r"\(9, 1\)"),
)


@pytest.mark.parametrize(("given", "words"), OWN)
def test_samples_of_the_user_are_checked_on_the_host(given: Sample, words: str) -> None:
    if words:
        with pytest.raises(UserError, match=words) as caught:
            checked(given, 7, 16)
        assert "sample 7 of" in str(caught.value)
    else:
        found = checked(given, 7, 16)
        assert found.loss_mask.dtype == np.bool_
        assert np.array_equal(found.loss_mask, np.asarray(given.loss_mask) != 0)


def test_a_bad_token_outside_the_sample_is_refused_when_it_is_read(tmp_path: Path) -> None:
    path = file(tmp_path / "tok.json", trained())
    long = [[5] * 150 + [400] + [5] * 49 + [0]] * 3
    with pytest.raises(UserError, match="holds the token 400 at position 150, but its"):
        opened(pair(tmp_path / "p", long), path).train[:]
