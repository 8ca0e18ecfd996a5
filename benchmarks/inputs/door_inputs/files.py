"""Draws files and folders, correctly named or not, for the doors that read them.

The right answer follows from how a file was made: its content, its compression, and its ending;
never from the package's own tables.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import zstandard

from benchmarks.inputs.door_inputs.answers import REFUSAL, Input
from parallel3d.commands.evaluate.rows import read_rows
from parallel3d.data.corpus import Corpus, open_corpus, sets_of
from parallel3d.data.inputs import BAD, Count, cut, documents, find_inputs, judge
from parallel3d.data.keys import DataConfig
from parallel3d.data.preprocess import train_tokenizer


def _listed(text: str) -> list[str]:
    return text.split(" ")


WORDS = _listed("the of wörld 漢字 and 😀 is naïve to a in that it\nwas for on as")
PACK: dict[str, tuple[tuple[str, ...], Callable[[bytes], bytes]]] = {
    "gzip": ((".gz", ".gzip"), gzip.compress),
    "zstd": ((".zst", ".zstd"), zstandard.ZstdCompressor().compress),
    "xz": ((".xz",), lzma.compress),
    "bzip2": ((".bz2",), bz2.compress),
}
ROWS_ENDS, TEXT_ENDS = (".jsonl", ".ndjson", ".json"), (".txt", ".text", "", ".md", ".de", ".log")
OTHERS = _listed(
    ".tar .tar.gz .tgz .zip .7z .rar .jsonl.lz4 .jsonl.br .jsonl.snappy .jsonl.Z .arrow .feather "
    ".ipc .orc .avro .csv .tsv .csv.gz .xlsx .bin .idx .npy .npy.gz .npz .pt .pth .safetensors "
    ".pkl .h5 .sqlite .db .pdf .docx .epub .png .jpg .wav .mp4 .tfrecord .warc.gz .wet.gz .mds "
    ".jsonl.gz.gz .jsonl.gz.zst .parquet.gz .parquet.zst .jsonl.md5 .jsonl.sha256 .jsonl.crc "
    ".jsonl.tmp .jsonl.part .jsonl.incomplete .jsonl.gpg .gguf .tar.zst .jsonl.bak"
)
SPLITS = ("test", "validation", "valid", "dev", "eval", "holdout", "val", "heldout")


def _case(rng: random.Random, text: str) -> str:
    return text.upper() if rng.random() < 0.15 else text


def _texts(rng: random.Random) -> list[str]:
    return [" ".join(rng.choices(WORDS, k=rng.randint(9, 30))) for _ in range(rng.randint(1, 5))]


def _jsonl(texts: list[str], rng: random.Random) -> bytes:
    end = rng.choice(["\n", "\n", "\n", "\r\n", "\n\n"])
    rows = [{"id": k, "text": text} for k, text in enumerate(texts)]
    ascii_ = rng.random() < 0.5
    lines = (json.dumps(row, ensure_ascii=ascii_) for row in rows)
    return (end.join(lines) + rng.choice(["", end])).encode()


def _parquet(texts: list[str]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), out)
    return out.getvalue()


def _arrow(texts: list[str]) -> bytes:
    out = io.BytesIO()
    pyarrow.feather.write_feather(pyarrow.table({"text": texts}), out)
    return out.getvalue()


def _tar(content: bytes, mode: Literal["w", "w:gz", "w:bz2", "w:xz"]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as made:
        info = tarfile.TarInfo("rows.jsonl")
        info.size = len(content)
        made.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _zip(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("rows.jsonl", content)
    return out.getvalue()


def _binary(rng: random.Random, texts: list[str]) -> tuple[str, bytes]:
    """Returns bytes that are not text, and a description of them."""
    rows = _jsonl(texts, rng)
    numbers = np.random.default_rng(rng.getrandbits(32)).integers(0, 60_000, 500)
    saved = io.BytesIO()
    np.save(saved, numbers)
    made = {
        "tar": _tar(rows, "w"),
        "tar.gz": _tar(rows, "w:gz"),
        "zip": _zip(rows),
        "arrow": _arrow(texts),
        "npy": saved.getvalue(),
        "tokens u16": numbers.astype("<u2").tobytes(),
        "tokens i32": numbers.astype("<i4").tobytes(),
        "noise": rng.randbytes(3000),
        "lz4": b"\x04\x22\x4d\x18" + rng.randbytes(900),
        "gzip twice": gzip.compress(gzip.compress(rows)),
        "zstd of tar": PACK["zstd"][1](_tar(rows, "w")),
        "a login page": b"<!DOCTYPE html>\n<html><title>Log in</title></html>",
        "a pointer of LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "latin-1": ("äöü ß " * 40).encode("latin-1"),
        "UTF-16 without a mark": "\n".join(texts).encode("utf-16-le"),
        "Shift-JIS": ("日本語の文" * 20).encode("shift-jis"),
        "GBK": ("汉字文本" * 20).encode("gbk"),
        "JSON list": json.dumps([{"text": text} for text in texts], indent=2).encode(),
        "pretty JSON": json.dumps({"text": texts[0]}, indent=2).encode(),
    }
    name = rng.choice(list(made))
    return name, made[name]


# The doors; each returns the texts that it reads


def tokenized(path: str) -> list[str]:
    """Returns the documents that are read by `data tokenize`."""
    count, found = Count(), []
    for shard in cut(find_inputs(path), size=300):
        here = Count()
        found += [one.text for one in documents(shard, "text", here)]
        count.add(here)
    judge(count, 1, BAD, "bad=0.01", "fix them")
    return found


def learned(path: str) -> list[str]:
    """Returns the documents, after `data train-tokenizer` has read them."""
    train_tokenizer(find_inputs(path), 257, "text", lambda *_: None)
    return tokenized(path)


def texts_in(data: DataConfig) -> list[str]:
    """Returns the documents of bytes that a run reads."""
    corpus = open_corpus(data, 1)
    assert isinstance(corpus, Corpus)
    tokens = np.concatenate([corpus.train[:], corpus.valid[:]])
    assert tokens[-1] == 256
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    return [bytes(part[:-1].astype(np.uint8)).decode() for part in parts]


def trained(path: str, cache: Path) -> list[str]:
    """Returns the documents that data=text trains on."""
    return texts_in(DataConfig(name="text", path=path, cache_dir=str(cache), valid_fraction=0.0))


def evaluated(path: str, cache: Path) -> list[str]:
    """Returns the documents of a set of data.valid."""
    data = DataConfig(name="text", valid={"v": path}, cache_dir=str(cache))
    return texts_in(sets_of(data)["v"])


def asked(path: str) -> list[str]:
    """Returns the contexts of `eval tasks=`."""
    return [row.context for row in read_rows(path)]


def inputs(rng: random.Random, folder: Path) -> Iterator[Input]:
    """Yields files and folders without end."""
    number = 0
    while True:
        number += 1
        root = folder / str(number)
        root.mkdir()
        make = rng.choice([_named_well, _named_well, _named_badly, _of_others, _folder, _questions])
        yield from make(rng, root)
        if number > 4:
            shutil.rmtree(folder / str(number - 4), ignore_errors=True)


def _at_a_door(
    rng: random.Random, path: Path, right: object, what: str, common: bool
) -> Iterator[Input]:
    cache = path.parent / ".cache" if path.is_file() else path.parent / f".cache-{path.name}"
    doors: dict[str, Callable[[], object]] = {
        "tokenized": partial(tokenized, str(path)),
        "learned": partial(learned, str(path)),
        "trained": partial(trained, str(path), cache),
        "evaluated": partial(evaluated, str(path), cache),
    }
    door = rng.choice([*doors])
    yield Input(f"{door}: {path.name!r}, {what}", doors[door], right, common)


def _named_well(rng: random.Random, root: Path) -> Iterator[Input]:
    """Yields a file whose name is right."""
    texts = _texts(rng)
    kind = rng.choice(["rows", "rows", "text", "parquet"])
    stem = rng.choice(
        ["a", "part-00000", "c4-train.00000-of-00512", "my data", "ünï", "v1.2", "x?y"]
    )
    if kind == "parquet":
        end, content, right = rng.choice([".parquet", ".snappy.parquet"]), _parquet(texts), texts
    elif kind == "rows":
        end, content, right = rng.choice(ROWS_ENDS), _jsonl(texts, rng), texts
        if rng.random() < 0.1:
            content = b"\xef\xbb\xbf" + content
    else:
        text = "\n".join(texts)
        end, right = rng.choice(TEXT_ENDS), [text]
        coding = rng.choice(["utf-8"] * 5 + ["utf-8-sig", "utf-16", "utf-32"])
        content = text.encode(coding)
        if end == "" and "." in stem:
            stem = "a"
    packed = "" if kind == "parquet" else rng.choice(["", "", *PACK])
    if packed:
        ends, pack = PACK[packed]
        end += rng.choice(ends)
        cut_at = rng.randrange(len(content))
        many = packed != "zstd" or rng.random() < 0.5
        content = pack(content[:cut_at]) + pack(content[cut_at:]) if many else pack(content)
    path = root / f"{stem}{_case(rng, end)}"
    path.write_bytes(content)
    yield from _at_a_door(rng, path, right, f"{kind} {packed}", True)
    if packed and rng.random() < 0.3:
        path.write_bytes(content[: -rng.randint(1, min(8, len(content) - 1))])
        yield from _at_a_door(rng, path, REFUSAL, f"{kind} {packed}, cut short", False)


def _named_badly(rng: random.Random, root: Path) -> Iterator[Input]:
    """Yields a file whose ending and bytes contradict each other; only a sentence is right."""
    texts = _texts(rng)
    rows = _jsonl(texts, rng)
    packed, (ends, pack) = rng.choice(list(PACK.items()))
    wrong = next(p for p in rng.sample(list(PACK), 4) if p != packed)
    end, content, what = rng.choice(
        [
            (".jsonl", pack(rows), f"{packed} inside"),
            (".txt", pack(rows), f"{packed} inside"),
            (f".jsonl{PACK[wrong][0][0]}", pack(rows), f"{packed} inside"),
            (f".jsonl{ends[0]}", rows, "not packed"),
            (f".txt{ends[0]}", b"\n".join(t.encode() for t in texts), "not packed"),
            (".jsonl", _parquet(texts), "parquet inside"),
            (".txt", _parquet(texts), "parquet inside"),
            ("", _parquet(texts), "parquet inside"),
            (".parquet", rows, "jsonl inside"),
            (".parquet", pack(_parquet(texts)), f"{packed} inside"),
            (f".jsonl{ends[0]}", pack(_parquet(texts)), "parquet inside"),
            (f".jsonl{ends[0]}", pack(pack(rows)), "packed twice"),
            (".txt", rows, "jsonl inside"),
            ("", rows, "jsonl inside"),
        ]
    )
    path = root / f"a{_case(rng, end)}"
    path.write_bytes(content)
    yield from _at_a_door(rng, path, REFUSAL, what, False)


def _of_others(rng: random.Random, root: Path) -> Iterator[Input]:
    """Yields a file of another format, under its own name or another one."""
    texts = _texts(rng)
    if rng.random() < 0.5:
        end = rng.choice(OTHERS)
        content = rng.choice([rng.randbytes(2000), _jsonl(texts, rng), _tar(b"x" * 99, "w")])
        path = root / f"a{_case(rng, end)}"
        path.write_bytes(content)
        yield from _at_a_door(rng, path, REFUSAL, "its name ends as another format does", False)
        return
    what, content = _binary(rng, texts)
    end = rng.choice([".txt", "", ".jsonl", ".parquet", ".jsonl.gz", ".txt.zst", ".dump", ".md"])
    if what in ("JSON list", "pretty JSON", "a login page") and end in (".txt", "", ".dump", ".md"):
        end = ".jsonl"  # read as text, they are valid text
    if what in ("tar.gz", "gzip twice", "zstd of tar") and rng.random() < 0.3:
        end = ".jsonl.gz" if what != "zstd of tar" else ".jsonl.zst"
    path = root / f"a{end}"
    path.write_bytes(content)
    right: object = REFUSAL
    if what in ("JSON list", "pretty JSON") and end == ".jsonl":
        right = texts if what == "JSON list" else texts[:1]
    yield from _at_a_door(rng, path, right, what, False)


def _folder(rng: random.Random, root: Path) -> Iterator[Input]:
    """Yields a folder with the usual contents of folders."""
    place = root / "in"
    files: dict[str, bytes] = {}
    right: list[str] = []
    train = rng.random() < 0.6
    for k in range(rng.randint(1, 3)):
        texts = [f"{text} {k}" for text in _texts(rng)]
        packed = rng.choice(["", "gzip", "zstd"])
        end = f".jsonl{PACK[packed][0][0] if packed else ''}"
        stem = (
            f"train-{k:05}-of-00003" if train else rng.choice(["web", "latest", "contest"]) + str(k)
        )
        content = _jsonl(texts, rng)
        files[rng.choice(["", "data/"]) + stem + end] = (
            PACK[packed][1](content) if packed else content
        )
        right += texts
    beside = {
        "README.md": b"# about",
        "LICENSE": b"free",
        ".gitattributes": b"*",
        "dataset_infos.json": b'{"a": 1}',
        "_SUCCESS": b"",
        "x.jsonl.md5": b"d4",
        "y.jsonl.crc": b"crc\x00\x01",
        "z.jsonl.tmp": b'{"text": "half',
        "load.py": b"import x\n",
        "logo.png": b"\x89PNG\r\n\x1a\n\x00",
        ".hidden.jsonl": b'{"text": "hidden"}\n',
    }
    for name in rng.sample(list(beside), rng.randint(0, 6)):
        files[name] = beside[name]
    for word in rng.sample(SPLITS, rng.randint(0, 2)):
        name = rng.choice([f"{word}-00000-of-1.jsonl", f"{word}/a.jsonl", f"en_{word}.jsonl"])
        files[name] = b'{"text": "held out"}\n'
    answer: object = sorted(right)
    trouble = rng.random()
    name = next(iter(files))
    if trouble < 0.12:
        whole = name.removesuffix(".gz").removesuffix(".zst")
        files[whole if whole != name else f"{name}.gz"] = b'{"text": "twice"}\n'
        if whole == name:
            files[f"{name}.gz"] = gzip.compress(files[name])
        answer = REFUSAL
    elif trouble < 0.24:
        files[f"more{rng.choice(OTHERS[:20])}"] = rng.randbytes(500)  # left out, with a line
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    listed = ", ".join(sorted(files))
    cache = root / ".cache"
    door = rng.choice([tokenized, trained])
    take = {
        tokenized: lambda: sorted(tokenized(str(place))),
        trained: lambda: sorted(trained(str(place), cache)),
    }[door]
    yield Input(f"{door.__name__}: a folder of {listed}", take, answer, answer is not REFUSAL)


def _questions(rng: random.Random, root: Path) -> Iterator[Input]:
    """Yields a file of questions, whose numbers count from 0, from 1 or arbitrarily."""
    choices = [f"choice {letter}" for letter in "abcd"[: rng.randint(2, 4)]]
    count, from_1 = rng.randint(6, 20), rng.random() < 0.4
    answers = [rng.randrange(len(choices)) for _ in range(count)]
    answers[rng.randrange(count)] = 0
    if from_1:
        answers = [answer + 1 for answer in answers]
    rows = [
        {"context": f"question {k}", "choices": choices, "answer": answer}
        for k, answer in enumerate(answers)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    packed = rng.choice(["", "gzip", "zstd", "xz"])
    path = root / f"q.jsonl{PACK[packed][0][0] if packed else ''}"
    path.write_bytes(PACK[packed][1](content) if packed else content)
    right: object = REFUSAL if from_1 else [f"question {k}" for k in range(count)]
    what = f"answers from {int(from_1)}"
    yield Input(f"asked: {path.name}, {what}", lambda: asked(str(path)), right, not from_1)
    if rng.random() < 0.5:
        other = root / rng.choice(["q.csv", "q.txt", "q.tar", "q.json"])
        other.write_bytes(json.dumps(rows).encode() if other.suffix == ".json" else os.urandom(99))
        right = right if other.suffix == ".json" else REFUSAL
        yield Input(f"asked: {other.name}", lambda: asked(str(other)), right)
