"""Tests common files at the five doors that read files: they are recognised, or refused in one
sentence. A new case is one line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard

from parallel3d.commands.data import _run
from parallel3d.commands.evaluate.rows import read_rows
from parallel3d.data import formats
from parallel3d.data.chat import _rows
from parallel3d.data.corpus import Corpus, open_corpus, sets_of
from parallel3d.data.folders import sort_out, split_of
from parallel3d.data.formats import Form, file_name
from parallel3d.data.indexed import IndexedCorpus
from parallel3d.data.inputs import Count, cut, documents, take_inputs
from parallel3d.data.keys import DataConfig
from parallel3d.data.preprocess import PreprocessJob, tokenize, train_tokenizer
from parallel3d.data.sampler import Sampler
from parallel3d.data.sources import take_documents
from parallel3d.errors import UserError
from tests.corpora import pair
from tests.http_files import ETAG, Server, use_some_http
from tests.unit.doors.files import asked, texts_in, tokenized

TEXTS = ["one wörd", "two 漢字 words\nand a line"]
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
# A row that each door can read: it has a text, a conversation and a question.
ROWS = [
    {"text": text, "messages": MESSAGES, "context": text, "continuation": " so"} for text in TEXTS
]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PROSE = "Ein längerer Text, 漢字 and all.\n" * 3
TXT = PROSE.encode()
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".gzip": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".zstd": zstandard.ZstdCompressor().compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


def parquet(rows: list[dict] = ROWS) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def arrow() -> bytes:
    out = io.BytesIO()
    pyarrow.feather.write_feather(pyarrow.Table.from_pylist(ROWS), out)
    return out.getvalue()


def archive(kind: str) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as made:
            made.writestr("a.jsonl", JSONL)
    else:
        with tarfile.open(fileobj=out, mode=kind) as made:
            info = tarfile.TarInfo("a.jsonl")
            info.size = len(JSONL)
            made.addfile(info, io.BytesIO(JSONL))
    return out.getvalue()


def array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(90, dtype=np.uint16))
    return out.getvalue()


TOKENS = np.arange(1000, 2000, dtype=np.uint16).tobytes()
PAGE = b"<!DOCTYPE html>\n<html><body>Please sign in</body></html>\n"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n"
LIST = json.dumps(ROWS, indent=1).encode()
LATIN = ("Wörter über Türme, " * 9).encode("latin-1")
RANDOM = np.random.default_rng(0).bytes(4000).replace(b"\x00", b"\x01")
LZ4 = b"\x04\x22\x4d\x18" + RANDOM
RECORDS = (12).to_bytes(8, "little") + bytes(4) + b"\x0a\x0atextual data" + bytes(4)
TENSORS = (99).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1]}}' + bytes(9)

ROW, WHOLE, WORD = "rows", "text", "text of "  # the result for a file
# name, content, the result or words of the sentence
FILES: list[tuple[str, bytes, str]] = [
    ("a.jsonl", JSONL, ROW),
    ("a.JSONL", JSONL, ROW),
    ("a.ndjson", JSONL, ROW),
    ("a.json", JSONL, ROW),
    ("c4-train.00000-of-01024.json.gz", gzip.compress(JSONL), ROW),
    *((f"a.jsonl{end}", pack(JSONL), ROW) for end, pack in PACK.items()),
    *((f"a.JSONL{end.upper()}", pack(JSONL), ROW) for end, pack in PACK.items()),
    *((f"a.txt{end}", pack(TXT), WHOLE) for end, pack in PACK.items()),
    *((f"x{end}", pack(TXT), WHOLE) for end, pack in PACK.items()),
    ("two members.jsonl.gz", gzip.compress(JSONL[:60]) + gzip.compress(JSONL[60:]), ROW),
    ("padded.jsonl.gz", gzip.compress(JSONL) + bytes(512), ROW),
    ("bom.jsonl", b"\xef\xbb\xbf" + JSONL, ROW),
    ("crlf.jsonl", JSONL.replace(b"\n", b"\r\n"), ROW),
    ("a.parquet", parquet(), ROW),
    ("a.PQ", parquet(), ROW),
    ("part-00000-c000.snappy.parquet", parquet(), ROW),
    ("book.txt", TXT, WHOLE),
    ("book.TEXT", TXT, WHOLE),
    ("book", TXT, WHOLE),
    ("pg100.de", TXT, WHOLE),
    ("wiki.train.tokens", TXT, WHOLE),
    ("train.br", TXT, WHOLE),
    ("notes.md", TXT, WHOLE),
    ("page.html", PAGE + TXT, WHOLE),
    ("main.py", b"x = {}\n" * 9, WHOLE),
    ("what?.txt", TXT, WHOLE),
    ("a::b#c%41.txt", TXT, WHOLE),
    *((f"{word}.txt", f"{word} is a word\n".encode() + TXT, WORD + word) for word in
      ("ORC", "GIF89a", "RIFF", "ID3", "PAR1", "BZh9", "OggS")),
    ("bom.txt", b"\xef\xbb\xbf" + TXT, WHOLE),
    ("utf16.txt", PROSE.encode("utf-16"), WHOLE),
    ("utf32.txt", PROSE.encode("utf-32"), WHOLE),
    # Files whose names and bytes contradict each other.
    ("a.jsonl", gzip.compress(JSONL), "is gzip by its first bytes but not by its name"),
    ("a.jsonl", parquet(), "is parquet by its first bytes"),
    ("a.jsonl.gz", JSONL, "is gzip by its name but JSON lines by its first bytes"),
    ("a.jsonl.zst", gzip.compress(JSONL), "is zstd by its name but gzip by its first bytes"),
    ("a.jsonl.gz", gzip.compress(gzip.compress(JSONL)), "holds gzip inside its gzip"),
    ("a.jsonl.gz.gz", gzip.compress(gzip.compress(JSONL)), "ends in .gz.gz, which is not read"),
    ("a.jsonl.gz", gzip.compress(archive("w")), "is not text: it has a NUL"),
    ("a.jsonl.gz", gzip.compress(parquet()), "holds parquet inside its gzip"),
    ("a.jsonl.gz", gzip.compress(JSONL)[:-9], "a.jsonl.gz cannot be read (it was cut short"),
    ("a.jsonl.zst", PACK[".zst"](JSONL * 99)[:-4], "a.jsonl.zst cannot be read (it was cut"),
    ("a.jsonl.xz", lzma.compress(JSONL)[:-4], "a.jsonl.xz cannot be read (it was cut short"),
    ("a.jsonl.bz2", bz2.compress(JSONL)[:-4], "a.jsonl.bz2 cannot be read (it was cut short"),
    ("a.parquet", LFS, "is a Git LFS pointer"),
    ("a.parquet", PAGE, "is parquet by its name but a page of HTML by its first bytes"),
    ("a.parquet", JSONL, "is parquet by its name but JSON lines by its first bytes"),
    ("a.parquet.gz", gzip.compress(parquet()), "ends in .parquet.gz, which is not read"),
    ("a.jsonl", PAGE, "is a page of HTML"),
    ("a.jsonl", LFS, "is a Git LFS pointer"),
    ("a.txt", LFS, "is a Git LFS pointer"),
    ("a.txt", PAGE, "is a page of HTML"),
    ("a.txt", JSONL, "holds JSON lines"),
    ("part-00000", JSONL, "holds JSON lines"),
    ("rows.jl", JSONL, "holds JSON lines"),
    ("rows.jsonl.1", JSONL, "holds JSON lines"),
    # JSON in other forms than one object per line.
    ("a.json", LIST, ROW),
    ("a.json", json.dumps(ROWS).encode(), ROW),
    ("a.jsonl", b"\xef\xbb\xbf" + LIST.replace(b"\n", b"\r\n"), ROW),
    ("a.json.gz", gzip.compress(LIST), ROW),
    ("a.json", b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS), ROW),
    ("a.json", LIST[:-3], "is not JSON: it ends inside an item"),
    ("a.json", LIST[:-20], "if it was cut short"),
    ("a.json", LIST + LIST, "is not JSON: its list ends before"),
    ("a.json", LIST[:-1] + b",]", "is not JSON: its list has an empty item"),
    ("a.json", b'[{"text": "a\nb"}]', "is not JSON: the text at byte"),
    # Endings that the grammar lacks: text beyond doubt is read, all else has one sentence.
    ("a.corpus", TXT, WHOLE),
    ("a.en-US", TXT, WHOLE),
    ("a.corpus.gz", gzip.compress(TXT), WHOLE),
    ("a.tar", archive("w"), "ends in .tar, which is not read"),
    ("a.tar.gz", archive("w:gz"), "ends in .tar.gz, which is not read"),
    ("a.tgz", archive("w:gz"), "ends in .tgz, which is not read, and holds gzip"),
    ("a", archive("w"), "is not text: it has a NUL"),
    ("a.zip", archive("zip"), "ends in .zip, which is not read"),
    ("a.txt", archive("zip"), "is not text: it has a NUL"),
    ("a.arrow", arrow(), "ends in .arrow, which is not read"),
    ("data-00000-of-00001", arrow(), "is not text: it has a NUL"),
    ("a.orc", b"ORC" + RANDOM, "and holds bytes that are not text: rows are read from .jsonl"),
    ("a.csv", b"text,n\nhello,1\n", "holds what may be a table, separated by ','"),
    ("a.csv", b'text,n\n"hello, you",1\n', "holds what may be a table, separated by ','"),
    ("a.tsv.gz", gzip.compress(b"text\tn\nhello\t1\n"), "may be a table, separated by '\\t'"),
    ("a.jsonl.lz4", LZ4, "ends in .lz4, which is not read"),
    ("a.jsonl.br", RANDOM, "is not"),
    ("a.dump", LZ4, "ends in .dump, which is not read"),
    ("train.bin", TOKENS, "ends in .bin, which is not read"),
    ("train", TOKENS, "is not text: it has a NUL"),
    ("a.npy", array(), "ends in .npy, which is not read"),
    ("a.safetensors", TENSORS, "ends in .safetensors, which is not read"),
    ("model", TENSORS, "is not text: it has a NUL"),
    ("a.pkl", pickle.dumps(ROWS), "ends in .pkl, which is not read"),
    ("a.tfrecord", RECORDS, "ends in .tfrecord, which is not read"),
    ("a.pdf", b"%PDF-1.7\n" + RANDOM, "ends in .pdf, which is not read"),
    ("a.png", b"\x89PNG\r\n" + RANDOM, "ends in .png, which is not read"),
    ("a.ipynb", b'{"cells": [{"source": ["x"]}]}', "holds JSON lines"),
    ("a.ipynb", b'{\n "cells": [\n]}', "not read, and holds what may be JSON"),
    ("a.jsonl.tmp", JSONL, "holds JSON lines"),
    ("a.jsonl~", JSONL, "holds JSON lines"),
    ("a.webpage", PAGE, "is a page of HTML"),
    ("a.dump", LFS, "is a Git LFS pointer"),
    # Encodings.
    ("latin.txt", LATIN, "is not utf-8"),
    ("gbk.txt", "汉字文本，" .encode("gbk") * 9, "iconv"),
    ("sjis.txt", "日本語の文章です。".encode("shift-jis") * 9, "is not utf-8"),
    ("jis.txt", "日本語の文章です。".encode("iso-2022-jp") * 9, "is ISO-2022-JP"),
    ("nobom.txt", PROSE.encode("utf-16-le"), "has a NUL at byte 1"),
    ("late.txt", TXT * 99 + b"\x00" + TXT, f"has a NUL at byte {len(TXT) * 99:,}"),
    ("u16.jsonl", JSONL.decode().encode("utf-16"), "is UTF-16, but jsonl must be UTF-8"),
    ("noise", RANDOM, "control characters"),
    ("numbers.txt", bytes(range(1, 32)) * 20, "control characters"),
    ("ansi.txt", b"\x1b[1mbold\x1b[0m\x0c\n" + TXT, WORD),
]  # fmt: skip


def read_inputs(path: Path) -> list[str]:
    return tokenized(str(path))


def tokenizer_of(path: Path) -> list[str]:
    content, count = train_tokenizer(take_inputs(str(path)).inputs, 257, "text", lambda *_: None)
    if count.bad:
        raise UserError("; ".join(count.shown))
    assert content and count.size
    return read_inputs(path)


def trained_on(path: Path) -> list[str]:
    return texts_in(DataConfig(name="text", path=str(path), cache_dir=str(path.parent / ".c")))


def evaluated(path: Path) -> list[str]:
    data = DataConfig(name="text", valid={"v": str(path)}, cache_dir=str(path.parent / ".c"))
    return texts_in(sets_of(data)["v"])


def conversations(path: Path) -> list[str]:
    found = take_documents(DataConfig(name="chat", path=str(path))).documents
    rows = [row for _, row in _rows(found)]
    rows = [json.loads(row) if isinstance(row, bytes) else row for row in rows]
    assert all(row["messages"] == MESSAGES for row in rows)
    return [row["text"] for row in rows]


def questions(path: Path) -> list[str]:
    return asked(str(path))


DOORS = [read_inputs, tokenizer_of, trained_on, evaluated, conversations, questions]


@pytest.mark.nightly
@pytest.mark.parametrize("door", DOORS)
def test_a_file_is_recognised_by_name_and_bytes_or_refused(
    tmp_path: Path, door: Callable[[Path], list[str]]
) -> None:
    for number, (name, content, right) in enumerate(FILES):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        path.write_bytes(content)
        try:
            found = door(path)
        except UserError as error:
            sentence = str(error)
            assert "\n" not in sentence and name in sentence, sentence
            others = door in (conversations, questions) and right != ROW
            is_kind = others and "is text, but" in sentence and "takes jsonl or parq" in sentence
            assert (right in sentence and right not in (ROW, WHOLE)) or is_kind, (name, sentence)
        else:
            if right.startswith(WORD):
                assert found == [content.decode()]
                continue
            expected = {ROW: TEXTS, WHOLE: [content.decode()] if name.endswith((".html", ".py"))
                        else [PROSE]}  # fmt: skip
            assert found == expected.get(right), (name, right)


@pytest.mark.parametrize(
    "head", [b"a,b\n1,2\n", b"{\n", b"\x00\x01", gzip.compress(b"a", mtime=0), b"PAR1\x00"]
)
def test_an_unknown_ending_is_renamed_to_text_only_if_that_is_read(head: bytes) -> None:
    with pytest.raises(formats.UnsupportedFile) as caught:
        formats.judged("a.xyz", head)
    _, offers, name = str(caught.value).partition("if it is text, name it ")
    assert bool(offers) == (head.isascii() and b"\x00" not in head)
    assert not offers or formats.judged(name, head) == Form("text")


def test_the_page_on_data_names_every_ending() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text("utf-8")
    section = page.split("### Formats")[1].split("\n## ")[0]
    told = set(re.findall(r"`(\.\w+)`", section))
    assert {*formats.ROWS_ENDS, *formats.PROSE, *formats.OTHER_TEXT, *formats.PACKED} <= told
    assert all(formats.named(f"a{end}") for end in told)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://hub/d/resolve/main/a.jsonl?download=true", "a.jsonl"),
        ("https://s3.host/b/a.jsonl.gz?X-Amz-Date=1&X-Amz-Signature=a.b/c", "a.jsonl.gz"),
        ("https://host/a.parquet#part", "a.parquet"),
        ("https://host/a%2Ejsonl", "a.jsonl"),
        ("https://host/what%3F.txt?x=.gz", "what?.txt"),
        ("https://host/get?file=a.jsonl", "get"),
        ("hf://datasets/u/d@main/data/train-0.parquet", "train-0.parquet"),
        ("s3://bucket/odd? name#1.jsonl", "odd? name#1.jsonl"),
        ("s3://bucket/a.jsonl?versionId=3sL4", "a.jsonl"),
        ("file:///home/me/a?b.txt", "a?b.txt"),
        ("/home/me/a.txt?download=true", "a.txt?download=true"),
    ],
)
def test_the_ending_of_an_address_is_taken_from_its_path(address: str, name: str) -> None:
    assert file_name(address) == name


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00010.parquet", "train"),
        ("validation-00000-of-00001.parquet", "validation"),
        ("data/test/a.jsonl", "test"),
        ("en_test.jsonl", "test"),
        ("wiki.valid.txt", "valid"),
        ("held-out.jsonl", "heldout"),
        ("webTest.jsonl", "test"),
        ("DEV.jsonl", "dev"),
        ("newstest2014.en", "newstest"),
        ("tst2012.en", "tst"),
        ("test/train.jsonl", "train"),
        ("train_test_mix.jsonl", ""),
        ("latest.jsonl", ""),
        ("contest/attestation.jsonl", ""),
        ("devices.jsonl", ""),
        ("evaluable.txt", ""),
        ("protests.txt", ""),
    ],
)
def test_the_split_of_a_name(name: str, split: str) -> None:
    assert split_of(name) == split


def rows_of(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


TRAIN, TEST = rows_of("train"), rows_of("test")
SHARDS = {
    "data/train-00000-of-00002.jsonl": rows_of("a"),
    "data/train-00001-of-00002.jsonl": rows_of("b"),
    "data/validation-00000-of-00001.jsonl": rows_of("v"),
    "data/test-00000-of-00001.jsonl": rows_of("t"),
}
BESIDE = {
    "README.md": b"# About",
    "LICENSE": b"free",
    ".gitattributes": b"*.parquet filter=lfs",
    "dataset_infos.json": b'{"default": {}}',
    "_SUCCESS": b"",
    "data/.part-0.jsonl.crc": b"crc\x00\x00\x01",
    "data/train-00000-of-00002.jsonl.md5": b"d41d8",
    "data/x.jsonl.crc": b"crc\x00",
    "data/b.jsonl.tmp": rows_of("x"),
    "load.py": b"import datasets\n",
    "config.json": b"{}",
}
# files, the used files (in their order) or words of the sentence, words of the lines
FOLDERS: dict[str, tuple[dict[str, bytes], list[str] | str, list[str]]] = {
    "a snapshot of the hub": (
        SHARDS | BESIDE,
        ["a", "b"],
        ["jsonl, train: 2 files", "named test", "named validation", "README, LICENSE and the like",
         "endings that are not read (.crc 1, .md5 1, .tmp 1): 3", "text next to rows: 1 (load.py)",
         "JSON that holds no rows: 2"],
    ),
    "the hub's cache": (
        {"blobs/ab12": TRAIN, "snapshots/c0ffee/train.jsonl": TRAIN, "refs/main": b"c0ffee"},
        "give one of its snapshots, such as snapshots/c0ffee",
        [],
    ),
    "gzip -k": ({"x.jsonl": TRAIN, "x.jsonl.gz": gzip.compress(TRAIN)}, "the same content", []),
    "gzip -k, in capitals": ({"x.TXT": b"a", "x.txt.gz": gzip.compress(b"a")}, "same content", []),
    "two formats": ({"x.jsonl": TRAIN, "x.parquet": parquet()}, "the same content", []),
    "a job of Spark": (
        {"part-0.json": rows_of("a"), ".part-0.json.crc": b"crc\x00", "_SUCCESS": b"",
         "_committed_12": b"{}"},
        ["a"],
        ["jsonl: 1 file", "names that begin with _: 2"],
    ),
    "long names that begin like those of files about others": (
        {"a.txt": b"a", "b2.txt": b"b", "security_news.txt": b"news", "notice.txt": b"n",
         "authors-of-rome.txt": b"rome", "LICENSE-MIT.txt": b"l", "sha256sums.txt": b"5",
         "MD5SUMS": b"5"},
        ["a", "b", "news", "rome"],
        ["README, LICENSE and the like: 4"],
    ),
    "a mixture": (
        {"a.jsonl": rows_of("row"), "b.txt": b"text", "c.jsonl.zst": PACK[".zst"](rows_of("z"))},
        ["row", "text", "z"],
        ["jsonl: 1 file; text: 1 file (.txt 1); jsonl.zst: 1 file"],
    ),
    "test beside others": (
        {"web.jsonl": TRAIN, "web_test.jsonl": TEST, "latest.jsonl": rows_of("l")},
        ["l", "train"],
        ["named test (to train on such files, name them", "(web_test.jsonl)"],
    ),
    "configurations": (
        {"de/train-0.jsonl": rows_of("d"), "en/train-0.jsonl": rows_of("e")},
        ["d", "e"],
        ["jsonl, train: 2 files in 2 folders (de, en)"],
    ),
    "test alone": ({"test-0.jsonl": TEST, "test-1.jsonl": TRAIN}, ["test", "train"], []),
    "code": (
        {"a.py": b"a = 1\n", "test_a.py": b"import a\n", "logo.png": b"\x89PNG\r\n\x00",
         "b.rs": b"fn\n", "c.go": b"go\n", "package.json": b'{\n "name": "a"\n}', "x.csv": b"a,b",
         "__pycache__/a.pyc": b"\x00"},
        ["a = 1\n", "import a\n", "fn\n", "go\n"],
        ["text: 4 files (.py 2, .rs 1, .go 1)", "not read (.csv 1, .png 1, .pyc 1): 3",
         "JSON that holds no rows: 1 (package.json)"],
    ),
    "code, opened by Windows and macOS": (
        {"a.py": b"a = 1\n", "Desktop.ini": b"[.ShellClassInfo]\r\n", "Thumbs.db": b"\xd0\xcf\x00",
         ".DS_Store": b"\x00\x00\x00\x01Bud1"},
        ["a = 1\n"],
        ["files of the operating system: 2"],
    ),
    "documents, opened by Windows and macOS": (
        {"a.txt": b"a", "b/desktop.ini": b"[.ShellClassInfo]\r\n", "b/Thumbs.db": b"\xd0\xcf\x00",
         ".DS_Store": b"\x00\x00\x00\x01Bud1", "Icon\r": b""},
        ["a"],
        ["files of the operating system: 3"],
    ),
    "an archive among rows": (
        {"a.jsonl": TRAIN, "b.tar.gz": archive("w:gz")},
        ["train"],
        ["left out, endings that are not read (.tar.gz 1): 1 (b.tar.gz)"],
    ),
    "pages of languages": (
        {"train.de": b"eins", "dev.de": b"zwei", "train.cs": b"jedna", "dev.cs": b"dve"},
        ["jedna", "eins"],
        ["named dev"],
    ),
    "a pair": ({"web.bin": TOKENS, "web.idx": b"MMIDIDX\x00\x00"}, "data=corpus", []),
    "checksums alone": ({"a.md5": b"d4"}, "holds no documents", []),
    "nothing": ({".hidden": b"x"}, "holds no files", []),
    "empty ones": ({"a.jsonl": b"", "b.txt": b""}, "only empty files", []),
}  # fmt: skip


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_reports_the_formats_of_its_files(tmp_path: Path, what: str) -> None:
    files, right, words = FOLDERS[what]
    root = write(tmp_path / "in", files)
    more = {"path": str(root), "cache_dir": str(tmp_path / ".c"), "valid_fraction": 0.0}
    data = DataConfig(name="text", **more)
    if isinstance(right, str):
        for door in (lambda: read_inputs(root), lambda: texts_in(data)):
            with pytest.raises(UserError) as caught:
                door()
            assert right in str(caught.value) and "\n" not in str(caught.value)
        return
    assert sorted(read_inputs(root)) == sorted(right)
    lines = "\n".join(take_inputs(str(root)).lines)
    assert all(word in lines for word in words), lines
    assert sorted(text[:20] for text in texts_of(data)) == sorted(text[:20] for text in right)


LONG = "x" * 5000  # a row longer than the inspected bytes


@pytest.mark.parametrize(
    ("beside", "row", "door"),
    [
        ({"content": "a"}, {"content": LONG}, formats.INPUT),
        ({"content": "a"}, {"id": 1, "content": LONG}, formats.INPUT._replace(keys=("content",))),
        ({"id": 1, "content": "a"}, {"id": 2, "meta": LONG, "content": "a"}, formats.INPUT),
        ({"messages": []}, {"id": 1, "conversation": [LONG]}, formats.CHAT),
        ({"messages": []}, {"prompt": [LONG], "completion": []}, formats.CHAT),
    ],
)
def test_long_rows_of_json_are_read_next_to_other_rows(
    beside: Any, row: Any, door: formats.InputRules
) -> None:
    head = (json.dumps(row) + "\n").encode()[: formats.HEAD]
    files = {"a.json": head, "b.jsonl": json.dumps(beside).encode(), "c.json": b'{"splits": {}}'}
    found = sort_out(files, door)
    assert [*found.taken] == ["a.json", "b.jsonl"]
    assert found.left_out == {"JSON that holds no rows": ["c.json"]}


def test_a_json_file_with_the_given_key_holds_rows(tmp_path: Path) -> None:
    write(tmp_path, {"a.json": b'{"content": "row"}', "b.txt": b"text"})
    taken = [each.name for each in take_inputs(str(tmp_path), text_key="content").inputs]
    assert sorted(taken) == ["a.json", "b.txt"]


def texts_of(data: DataConfig) -> list[str]:
    corpus = open_corpus(data, 1)
    assert isinstance(corpus, Corpus)
    whole = bytes(np.where(corpus.train[:] == 256, 0, corpus.train[:]).astype(np.uint8))
    return [part.decode() for part in whole.split(b"\x00")[:-1]]


def column(*names: str) -> bytes:
    out = io.BytesIO()
    table = pyarrow.table([pyarrow.array([name]) for name in names], names=["text"] * len(names))
    pyarrow.parquet.write_table(table, out)
    return out.getvalue()


# name, content, the texts or words of the sentence
ROWS_OF_TEXT: list[tuple[str, bytes, list[str] | str]] = [
    ("a.jsonl", b'{"text": "a", "text": "b"}\n', "has the key text twice"),
    ("a.jsonl", b'{"text": "a", "more": {"text": "b"}}\n', ["a"]),
    ("a.jsonl", b'{"text": "a \\"text\\" b", "x": "text"}\n', ['a "text" b']),
    ("a.jsonl", b'{"body": "a", "id": 1}\n', "has no key text; its keys are body, id"),
    ("a.jsonl", b"{}\n", "has no key text; its keys are none"),
    ("a.jsonl", b'{"text": ["a"]}\n', "has no text at text"),
    ("a.jsonl", b'"a"\n', "is not an object"),
    ("a.parquet", column("a"), ["a"]),
    ("a.parquet", column("a", "b"), "has several columns text"),
]


@pytest.mark.parametrize(("name", "content", "right"), ROWS_OF_TEXT)
def test_a_row_has_one_text_at_its_key(
    tmp_path: Path, name: str, content: bytes, right: list[str] | str
) -> None:
    (tmp_path / name).write_bytes(content)
    if isinstance(right, list):
        assert read_inputs(tmp_path / name) == right == evaluated(tmp_path / name)
        return
    for door in (read_inputs, evaluated):
        with pytest.raises(UserError) as caught:
            door(tmp_path / name)
        assert right in str(caught.value)


def test_links_are_followed_once(tmp_path: Path) -> None:
    root = write(tmp_path, {"in/a.jsonl": TRAIN, "other/deep/b.jsonl": TEST})
    (root / "in/linked").symlink_to("../other")
    (root / "in/again.jsonl").symlink_to("a.jsonl")
    (root / "other/back").symlink_to("../in")
    assert sorted(read_inputs(root / "in")) == ["test", "train"]
    assert sorted(evaluated(root / "in")) == ["test", "train"]
    before = take_inputs(f"{root}/in/again.jsonl").inputs[0].stamp
    os.utime(root / "in/a.jsonl", (1, 1))
    (after,) = take_inputs(f"{root}/in/again*").inputs
    assert before != after.stamp == "1.0"


def test_explicitly_named_files_are_read(tmp_path: Path) -> None:
    root = write(tmp_path / "in", SHARDS | BESIDE)
    everything = [*SHARDS]
    for given, right in (
        (f"{root}/data/test-00000-of-00001.jsonl", ["t"]),
        (f"{root}/data/test-*", ["t"]),
        (f"{root}/data/train-*.jsonl,{root}/data/test-*", ["a", "b", "t"]),
        (f"{root}/data/*.jsonl", ["a", "b"]),
        (",".join(f"{root}/{name}" for name in everything), ["a", "b", "v", "t"]),
        (f"{root}/README.md", ["# About"]),
    ):
        found = [
            one.text
            for shard in cut(take_inputs(given).inputs)
            for one in documents(shard, "text", Count())
        ]
        assert found == right, given


def test_a_set_of_a_folder_with_both_splits_must_say_which(tmp_path: Path) -> None:
    root = write(tmp_path / "in", SHARDS)

    def texts(path: str) -> list[str]:
        data = DataConfig(name="text", valid={"v": path}, cache_dir=str(tmp_path / ".c"))
        return texts_in(sets_of(data)["v"])

    with pytest.raises(UserError, match="name the files to evaluate"):
        texts(str(root))
    assert texts(f"{root}/data/test-*") == ["t"]


def test_a_set_is_a_pair_by_its_prefix_or_one_of_its_files(tmp_path: Path) -> None:
    pair(tmp_path / "c" / "web", 1)
    for name in ("web", "web.bin", "web.idx"):
        (found,) = sets_of(DataConfig(name="text", valid={"v": f"{tmp_path}/c/{name}"})).values()
        assert (found.name, found.path) == ("corpus", f"{tmp_path}/c/web")
    for path, words in (
        (f"{tmp_path}/c", "is a folder of indexed datasets (web): give each"),
        ("https://host/a.jsonl?download=true", "is the address of a jsonl file"),
        ("s3://bucket/a.parquet", "is the address of a parquet file"),
    ):
        with pytest.raises(UserError, match="set v of data") as caught:
            sets_of(DataConfig(name="text", valid={"v": path}))
        assert words in str(caught.value)
    remote = {"a": "s3://b/c/web", "b": "s3://b/c/web.bin", "c": "s3://b/c/v1.5"}
    found = sets_of(DataConfig(name="text", valid=remote))
    assert [one.path for one in found.values()] == ["s3://b/c/web", "s3://b/c/web", "s3://b/c/v1.5"]


def test_a_given_format_is_used_unless_the_bytes_contradict_it(tmp_path: Path) -> None:
    for name, content, kind, right in (
        ("a", JSONL, "jsonl", Form("jsonl")),
        ("a.dump", gzip.compress(JSONL), "jsonl", Form("jsonl", ".gz")),
        ("a.jsonl", JSONL, "text", Form("text")),
        ("a.csv", b"a,b\n1,2\n", "text", Form("text")),
        ("a.txt", PAGE, "text", Form("text")),
        ("a.bin", parquet(), "parquet", Form("parquet")),
        ("a.txt", archive("w"), "text", "has a NUL"),
        ("a.txt", TOKENS, "text", "has a NUL"),
        ("a.txt", LFS, "text", "Git LFS"),
        ("a.jsonl", JSONL, "parquet", "is parquet by format= but JSON lines"),
        ("a.parquet", parquet(), "jsonl", "is parquet by its first bytes"),
    ):
        (tmp_path / name).write_bytes(content)
        if isinstance(right, Form):
            assert take_inputs(str(tmp_path / name), kind).inputs[0].form == right
        else:
            with pytest.raises(UserError) as caught:
                take_inputs(str(tmp_path / name), kind)
            assert right in str(caught.value), str(caught.value)


def test_addresses_with_queries_are_read_and_pages_are_not(tmp_path: Path) -> None:
    use_some_http()
    rows, page = "a.jsonl?download=true", "book"
    write(tmp_path, {rows: JSONL, "b.jsonl.gz?X-Sig=a.b": gzip.compress(JSONL), page: PAGE})
    with Server(tmp_path, (ETAG,)).serving() as server:
        for name in (rows, "b.jsonl.gz?X-Sig=a.b"):
            (source,) = take_inputs(f"{server.address}/{name}").inputs
            found = (one.text for each in cut([source]) for one in documents(each, "text", Count()))
            assert list(found) == TEXTS and source.kind == "jsonl" and "ETag" in source.stamp
        with pytest.raises(UserError, match="is a page of HTML, perhaps a server's answer"):
            take_inputs(f"{server.address}/{page}")
        with pytest.raises(UserError, match="does not exist"):
            take_inputs(f"{server.address}/none.jsonl?download=true")
        data = DataConfig(name="text", path=f"{server.address}/{page}")
        with pytest.raises(UserError, match="is an address, but only files of this host are read"):
            take_documents(data)


def test_a_file_that_changes_between_check_and_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(JSONL)
    inputs = take_inputs(str(path)).inputs
    path.write_bytes(gzip.compress(JSONL))
    with pytest.raises(UserError, match="is gzip by its first bytes"):
        list(cut(inputs))


@pytest.mark.slow
def test_bad_documents_of_a_folder_are_left_out_up_to_a_share(tmp_path: Path) -> None:
    root = write(tmp_path / "in", {f"{k}.txt": TXT for k in range(150)} | {"x.txt": LATIN})
    data = DataConfig(name="text", path=str(root), cache_dir=str(tmp_path / ".c"))
    assert texts_in(data) == [PROSE] * 150 == read_inputs(root)
    write(root, {"y.txt": LATIN, "z.txt": TOKENS[:1] + b"a"})
    with pytest.raises(UserError, match=r"x\.txt is not utf-8"):
        read_inputs(root)


def test_parquet_that_cannot_tell_null_from_absent_is_refused(tmp_path: Path) -> None:
    def calling(arguments: object) -> list[dict]:
        return [*MESSAGES, {"role": "tool", "content": "x", "calls": [{"arguments": arguments}]}]

    rows = [{"messages": calling({"a": 1})}, {"messages": calling({"b": 2})}]
    (tmp_path / "a.parquet").write_bytes(parquet(rows))
    with pytest.raises(UserError, match="column messages has nested objects"):
        conversations(tmp_path / "a.parquet")


def test_answers_that_count_from_1_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"

    def rows(answers: list[object], choices: tuple[str, ...] = ("a", "b", "c")) -> int:
        made = ({"context": "q", "choices": choices, "answer": answer} for answer in answers)
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
        return len(read_rows(str(path)))

    assert rows([0, 1, 2, 1]) == rows([1, 1, 2, 0]) == 4
    assert rows(["b", "c", "b", "c"]) == 4 and rows([1]) == 1
    for answers, words in (
        ([1, 2, 3], "answer=3 must be the number of a choice, from 0 to 2"),
        ([1, 2, 1, 2], "none of the 4 numeric answers of task q is 0"),
    ):
        with pytest.raises(UserError, match=words):
            rows(answers)
    with pytest.raises(UserError, match="the number of a choice, but is the text of another"):
        rows([1], ("1", "2"))


def test_a_remote_file_without_a_version_is_refused_before_tokenizing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (source,) = take_inputs(str(tmp_path / "a.txt")).inputs
    odd = source.__class__("https://h/a.txt", "text", "", 1, "")
    with pytest.raises(UserError, match="neither an ETag nor a modification time"):
        tokenize(PreprocessJob((odd,), "byte", tmp_path / "to"), lambda _: None)


def test_a_corpus_and_its_sampler_may_be_given_to_another_process(tmp_path: Path) -> None:
    prefix = pair(tmp_path / "p", 1)
    corpus = IndexedCorpus(prefix)
    sampler = Sampler(corpus.tokens, 8, 1, True, 0, False, True, corpus.starts)
    there, again = pickle.loads(pickle.dumps((corpus, sampler)))
    assert np.array_equal(there.tokens[:], corpus.tokens[:])
    for i in range(20):
        assert np.array_equal(again.sample(i).tokens, sampler.sample(i).tokens)
        assert np.array_equal(again.sample(i).starts, sampler.sample(i).starts)
    kept = pickle.dumps(corpus)
    os.utime(f"{prefix}.bin", (1, 1))
    with pytest.raises(UserError, match="was changed since it was opened"):
        pickle.loads(kept)


@pytest.mark.nightly
def test_tokenizing_a_folder_prints_a_line_a_kind_and_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "in", SHARDS | {"c.txt": b"c", "README.md": b"#"})
    assert (
        _run("tokenize", {"input": str(root), "to": str(tmp_path / "o"), "workers": "1"}, []) == 0
    )
    out, err = capsys.readouterr()
    assert "jsonl, train: 2 files, 2 documents\n" in out and "text: 1 file, 1 document\n" in out
    assert "left out, README, LICENSE and the like: 1 (README.md)" in err
    assert "left out, named test (to train on such files" in err
