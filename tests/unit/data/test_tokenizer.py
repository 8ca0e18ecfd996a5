"""Tests tokenizers from files: their tokens, the token that ends a text, each sentence about bad
ones."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from parallel3d.data.corpus import check_data, open_corpus
from parallel3d.data.keys import DataConfig
from parallel3d.data.own_tokenizer import with_own_tokenizer
from parallel3d.data.tokenizer import (
    ByteTokenizer,
    keep_tokenizer,
    open_tokenizer,
    tokenizer_of,
)
from parallel3d.errors import UserError
from tests.corpora import heard
from tests.tokenizers import END, PANIC, TEXT, folder, panicking, trained

SPECIALS = (END, "</s>", "<|user|>")


def text(tmp_path: Path, path: Path, **kwargs: object) -> DataConfig:
    settings = {"cache_dir": str(tmp_path / "cache"), "path": str(path)} | kwargs
    return DataConfig(name="text", **settings)


@pytest.mark.parametrize("spelled", ["folder", "file", "other name"])
def test_text_comes_back_from_tokens(tmp_path: Path, spelled: str) -> None:
    path = folder(tmp_path / "tok")
    if spelled == "other name":
        path = (path / "tokenizer.json").rename(tmp_path / "mine.json")
    tokenizer = open_tokenizer(str(path / "tokenizer.json" if spelled == "file" else path))
    for original in TEXT:
        tokens = tokenizer.encode(original.encode())
        assert tokens.dtype == np.uint16
        assert len(tokens) < len(original.encode()), "nothing was merged"
        assert tokenizer.decode(tokens) == original
        assert tokenizer.decode([*tokens, tokenizer.eot, 10**6]) == original
    assert tokenizer.vocab_size == 1 + max(json.loads(trained())["model"]["vocab"].values())


@pytest.mark.slow
def test_a_document_on_which_the_tokenizer_fails_is_named(tmp_path: Path) -> None:
    tokenizer = str(folder(tmp_path / "tok", panicking()))
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, content in (("a.txt", "x" * 90), ("b.txt", PANIC), ("c.txt", "y" * 90)):
        (texts / name).write_text(content)
    with pytest.raises(UserError) as caught:
        open_corpus(text(tmp_path, texts, tokenizer=tokenizer), 4)
    assert f"data file {texts / 'b.txt'} cannot be encoded by data.tokenizer=" in str(caught.value)
    with pytest.raises(UserError) as caught:
        open_tokenizer(tokenizer).encode_prompt(PANIC.encode())
    same = pickle.loads(pickle.dumps(caught.value))
    assert str(same) == str(caught.value) and "cannot encode a text (Onig: Regex" in str(same)


def test_a_document_that_spells_special_tokens_cannot_end_itself(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(folder(tmp_path, trained(320, SPECIALS), eos_token=END)))
    spelled = f"a{END}b</s><|user|>"
    tokens = tokenizer.encode(spelled.encode())
    assert not set(tokens.tolist()) & set(range(len(SPECIALS)))
    assert tokenizer.decode(tokens) == spelled


def test_invalid_utf8_is_read_as_replacement_characters(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(folder(tmp_path)))
    assert tokenizer.decode(tokenizer.encode(b"a\xffb\xe6\xbc")) == "a�b�"
    assert tokenizer.encode(b"").tolist() == []


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, "</s>"),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|user|>"}}}, "<|user|>"),
        ({"special_tokens_map.json": {"eos_token": "</s>"}}, "</s>"),
        ({"generation_config.json": {"eos_token_id": [2, 1]}}, SPECIALS[2]),
        ({"config.json": {"eos_token_id": 1}}, "</s>"),
    ],
)
def test_the_end_of_text_is_the_one_named_in_the_files(
    tmp_path: Path, files: dict[str, object], end: str
) -> None:
    folder(tmp_path / "tok", trained(320, SPECIALS))
    for name, content in files.items():
        (tmp_path / "tok" / name).write_text(json.dumps(content))
    tokenizer = open_tokenizer(str(tmp_path / "tok"))
    assert tokenizer.eot == SPECIALS.index(end)
    tokenizer.save(tmp_path / "copy")
    copy = open_tokenizer(str(tmp_path / "copy"))
    assert (copy.eot, copy.digest) == (tokenizer.eot, tokenizer.digest)


def test_the_digest_covers_the_file_and_the_end_of_text(tmp_path: Path) -> None:
    content = trained(320, SPECIALS)
    digests = {
        open_tokenizer(str(folder(tmp_path / name, made, **config))).digest
        for name, made, config in (
            ("a", content, {"eos_token": "</s>"}),
            ("b", content, {"eos_token": END}),
            ("c", trained(), {}),
        )
    }
    assert len(digests) == 3
    assert ByteTokenizer().digest == "byte"


@pytest.mark.parametrize(
    ("content", "config", "words"),
    [
        ("{}", {}, ["is not a tokenizer.json"]),
        ("{", {}, ["is not a tokenizer.json"]),
        (trained(320, ()), {}, ["does not define the token that ends a text", "eos_token"]),
        (trained(320, SPECIALS), {}, ["several usual ends of text", f"{END} and </s>"]),
        (
            trained(),
            {"eos_token": "</s>"},
            ["is </s>, which must be a token of its tokenizer.json"],
        ),
        (trained()[:900], {}, ["is not a tokenizer.json"]),
    ],
)
def test_a_bad_tokenizer_is_one_sentence(
    tmp_path: Path, content: str, config: dict[str, str], words: list[str]
) -> None:
    path = folder(tmp_path / "tok", content, **config)
    with pytest.raises(UserError) as caught:
        open_tokenizer(str(path))
    assert all(word in str(caught.value) for word in [f"data.tokenizer={path}", *words])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bite", ["the nearest is byte"]),
        ("tok.jsn", ["the nearest is", "tok.json"]),
        ("empty", ["holds no tokenizer.json"]),
        ("sentencepiece", ["holds no tokenizer.json", "AutoTokenizer.from_pretrained("]),
        ("tok/nothing.json", ["does not exist"]),
    ],
)
def test_an_unknown_tokenizer_is_refused_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok.json").write_text(trained())
    (tmp_path / "empty").mkdir()
    (tmp_path / "sentencepiece").mkdir()
    (tmp_path / "sentencepiece" / "tokenizer.model").write_bytes(b"\n\x0e")
    (tmp_path / "tok").mkdir()
    with pytest.raises(UserError) as caught:
        open_tokenizer(name)
    assert all(word in str(caught.value) for word in words)


def test_broken_files_next_to_the_corpus_are_refused_in_one_sentence(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match=r"tokenizer_config\.json cannot be read"):
        open_tokenizer(str(tmp_path))


# ---- text of a run through a tokenizer


def written(tmp_path: Path) -> Path:
    for i in range(7):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{i}.txt").write_text(TEXT[i % 2] * (i + 2), encoding="utf-8")
    return tmp_path / "text"


def test_files_are_documents_in_byte_order_of_their_names(tmp_path: Path) -> None:
    path, tok = written(tmp_path), folder(tmp_path / "tok")
    tokenizer = open_tokenizer(str(tok))
    with heard() as said:
        for _ in range(2):
            corpus = open_corpus(text(tmp_path, path, tokenizer=str(tok)), 20)
    bytes_ = open_corpus(text(tmp_path, path), 20)
    stream = np.concatenate([corpus.train, corpus.valid])
    ends = np.flatnonzero(stream == tokenizer.eot)
    texts = [tokenizer.decode(part) for part in np.split(stream, ends + 1)[:-1]]
    plain = np.concatenate([bytes_.train, bytes_.valid])
    byte_texts = [
        ByteTokenizer().decode(part) for part in np.split(plain, np.flatnonzero(plain == 256) + 1)
    ][:-1]
    assert texts == byte_texts
    assert ends[-1] == len(stream) - 1
    assert len(said) == 1, "the second one found the cache"
    assert corpus.tokenizer == tokenizer.digest and bytes_.tokenizer == "byte"
    assert corpus.fingerprint != bytes_.fingerprint


def test_a_damaged_pair_is_made_again(tmp_path: Path) -> None:
    data = text(tmp_path, written(tmp_path), tokenizer=str(folder(tmp_path / "tok")))
    first = open_corpus(data, 20)
    tokens = first.train[:]
    (pair,) = (tmp_path / "cache").glob("*.bin")
    content = bytearray(pair.read_bytes())
    content[40] ^= 1
    pair.write_bytes(content)
    with heard() as said:
        again = open_corpus(data, 20)
    assert "is damaged" in said[0]
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(again.train, tokens)


def test_a_vocabulary_larger_than_the_models_is_refused_with_both_numbers(tmp_path: Path) -> None:
    data = text(tmp_path, written(tmp_path), tokenizer=str(folder(tmp_path / "tok")))
    size = open_tokenizer(data.tokenizer).vocab_size
    with pytest.raises(UserError) as caught:
        check_data(data, 20, vocab_size=size - 1)
    assert f"model.vocab_size={size - 1}" in str(caught.value)
    assert f"at least {size}" in str(caught.value)
    check_data(data, 20, vocab_size=size)
    check_data(data, 20, vocab_size=size + 1)


def test_too_few_tokens_are_refused_as_too_few_bytes_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 9)
    data = text(tmp_path, tmp_path / "a.txt", tokenizer=str(folder(tmp_path / "tok")))
    with pytest.raises(UserError, match=r"is too short for model.seq_length=20: it has \d+ tokens"):
        open_corpus(data, 20)


def test_a_run_keeps_its_tokenizer_and_refuses_another(tmp_path: Path) -> None:
    run, tok = tmp_path / "runs" / "a", folder(tmp_path / "tok")
    run.mkdir(parents=True)
    data = DataConfig(tokenizer=str(tok))
    assert with_own_tokenizer(data, run) == data
    keep_tokenizer(data, run, open_tokenizer(str(tok)).digest)
    keep_tokenizer(data, run, open_tokenizer(str(tok)).digest)
    kept = with_own_tokenizer(DataConfig(), run)
    assert kept.tokenizer == str(run / "tokenizer") and not kept.reads_bytes
    assert with_own_tokenizer(data, run) == kept
    assert tokenizer_of(DataConfig(), run).digest == open_tokenizer(str(tok)).digest
    for other in ("byte", str(folder(tmp_path / "other", trained(300)))):
        with pytest.raises(UserError, match="differs from the tokenizer of run=a"):
            with_own_tokenizer(DataConfig(tokenizer=other), run)
    (run / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    chat = DataConfig("chat", "a.jsonl", tokenizer=str(tok))
    assert with_own_tokenizer(chat, run).tokenizer == kept.tokenizer
    for template, is_same in (("{{ messages }}", True), ("{{ messages[0] }}", False)):
        (tok / "chat_template.jinja").write_text(template)
        with nullcontext() if is_same else pytest.raises(UserError, match="another chat template"):
            assert with_own_tokenizer(chat, run).tokenizer == kept.tokenizer
        assert with_own_tokenizer(data, run) == kept
    (tmp_path / "b").mkdir()
    keep_tokenizer(DataConfig(), tmp_path / "b", "byte")
    assert not any((tmp_path / "b").iterdir())


@pytest.mark.slow
def test_checking_a_byte_tokenizer_imports_no_tokenizer_package() -> None:
    code = (
        "import sys; from parallel3d.cli.command_line import check_data;"
        "from parallel3d.data.keys import DataConfig; check_data(DataConfig(), 16);"
        "heavy = 'torch tokenizers huggingface_hub fsspec zstandard pyarrow jinja2'.split();"
        "print([name for name in heavy if name in sys.modules])"
    )
    ended = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)
    assert ended.stdout.strip() == "[]", ended.stderr
