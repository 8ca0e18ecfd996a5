"""Tests `parallel3d data`: its arguments, its messages about corpora and tokenizers, its
refusals."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from parallel3d.__main__ import main
from parallel3d.data.indexed import IndexedWriter
from parallel3d.data.tokenizer import open_tokenizer
from tests.tokenizers import TEXT, folder, lines

TEXTS = [TEXT[i % 2] * (1 + i) for i in range(12)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    folder(tmp_path / "tok")
    return tmp_path


def typed(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr(sys, "argv", ["parallel3d", *line.split()])
    return main()


@pytest.mark.nightly
def test_a_corpus_is_made_shown_and_verified(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "data tokenize input=a.jsonl tokenizer=tok to=corpora/web workers=1"
    assert typed(monkeypatch, line) == 0
    said = capsys.readouterr().out
    assert "corpora/web: 12 documents" in said
    size = open_tokenizer("tok").vocab_size
    assert f"data=corpus data.path=corpora/web model.vocab_size={size}" in said
    (here / "tok").rename(here / "gone")  # the corpus has a copy of the tokenizer
    assert typed(monkeypatch, "data show corpora/web documents=2") == 0
    out = capsys.readouterr().out
    lengths = [len(open_tokenizer("gone").encode(text.encode())) + 1 for text in TEXTS]
    assert f"minimum {min(lengths)}, median {sorted(lengths)[5]}," in out
    assert f"maximum {max(lengths)}" in out
    assert "document 0: def encode(text)" in out and "document 1: héllo" in out
    assert "document 2" not in out
    assert "verified: every byte" in out
    monkeypatch.setattr("parallel3d.commands.data.READ", 5)
    assert typed(monkeypatch, "data show corpora/web documents=2") == 0
    assert capsys.readouterr().out == out
    content = bytearray(Path("corpora/web.bin").read_bytes())
    content[-4] ^= 1
    Path("corpora/web.bin").write_bytes(content)
    assert typed(monkeypatch, "data show corpora/web") == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_a_foreign_pair_is_shown_with_a_given_tokenizer(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = open_tokenizer("tok")
    with IndexedWriter("pair", np.dtype("<u2")) as writer:
        for text in TEXTS:
            writer.add(np.append(tokenizer.encode(text.encode()), np.uint16(tokenizer.eot)))
    assert typed(monkeypatch, "data show pair") == 0
    captured = capsys.readouterr()
    assert "the corpus has no tokenizer next to it" in captured.err
    assert "it cannot be verified" in captured.out
    assert typed(monkeypatch, "data show prefix=pair tokenizer=tok documents=1") == 0
    assert "document 0: def encode(text)" in capsys.readouterr().out
    assert typed(monkeypatch, "data show pair tokenizer=byte") == 1
    assert "DAMAGED: the corpus holds token" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["tok.json", "made"])
def test_a_tokenizer_is_trained_as_a_file_or_a_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    line = f"data train-tokenizer input=a.jsonl vocab_size=300 to={to}"
    assert typed(monkeypatch, line) == 0
    assert "300 tokens, from" in capsys.readouterr().out
    tokenizer = open_tokenizer(to)
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.begin) == (300, 0, [0])
    for text in TEXTS:
        tokens = tokenizer.encode(text.encode())
        assert tokenizer.decode(tokens) == text and 0 not in tokens
    assert typed(monkeypatch, line.replace(f"to={to}", "to=again.json")) == 0
    assert open_tokenizer("again.json").digest == tokenizer.digest
    assert typed(monkeypatch, line) == 2
    assert "exists and is never overwritten" in capsys.readouterr().err


def test_a_tokenizer_with_fewer_tokens_than_asked_for_is_reported(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "data train-tokenizer input=a.jsonl vocab_size=9000 to=t.json") == 0
    assert "not for vocab_size=9000" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("data tokenise", ["tokenise is not a verb", "the nearest is tokenize"]),
        ("data tokenize input=a.jsonl", ["needs to=…"]),
        ("data tokenize input=a.jsonl to=x tokeniser=tok", ["the nearest is tokenizer"]),
        ("data tokenize input=b.jsonl to=x", ["input=b.jsonl does not exist", "a.jsonl"]),
        ("data tokenize input=a.jsonl to=x tokenizer=tik", ["tokenizer=tik", "the nearest is tok"]),
        ("data tokenize input=a.jsonl to=x workers=0", ["workers=0", "at least 1"]),
        ("data tokenize input=a.jsonl to=x bad=2", ["bad=2 must be", "the nearest is bad=1"]),
        (
            "data tokenize input=a.jsonl to=x format=json",
            ["format=json", "the nearest is", "jsonl"],
        ),
        ("data tokenize input=a.jsonl to=x.bin", ["must be a prefix", "the nearest is to=x.\n"]),
        (
            "data tokenize input=a.jsonl to=x.bin.idx",
            ["must be a prefix", "the nearest is to=x.\n"],
        ),
        ("data tokenize input=a.jsonl to=x text_key=t workers=1", ["12 of the first 12 rows"]),
        ("data train-tokenizer input=a.jsonl vocab_size=9 to=t.json", ["at least 257"]),
        ("data show", ["needs prefix=…"]),
        ("data show nothing", ["nothing"]),
        ("date show", ["the nearest is data"]),
    ],
)
def test_a_line_that_cannot_work_is_one_sentence(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    words: list[str],
) -> None:
    assert typed(monkeypatch, line) == 2
    said = capsys.readouterr().err
    assert said.startswith("parallel3d: ") and said.count("\n") == 1
    assert all(word in said for word in words), said
    assert not [name for name in os.listdir() if name.startswith("x")]


def test_verbs_and_their_keys_are_completed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, wanted in (
        ("parallel3d da", "data"),
        ("parallel3d data t", "tokenize train-tokenizer"),
        ("parallel3d data tokenize t", "to= tokenizer= text_key="),
    ):
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        assert typed(monkeypatch, "-sc query=bash") == 0
        assert capsys.readouterr().out.split() == wanted.split()
