"""Tests sources of documents: formats, compressions, places, left-out files, and each sentence
about them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from parallel3d.data import inputs as preprocess_inputs
from parallel3d.data.inputs import (
    FIRST,
    SHARD_BYTES,
    Count,
    Position,
    cut,
    documents,
    opened,
    take_inputs,
    whole_lines,
)
from parallel3d.errors import UserError
from tests.tokenizers import lines

TEXTS = [f"document {i}: " + "wörter " * (i * 7 % 11) for i in range(40)]
PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


def parquet(texts: Sequence[object], **columns: Sequence[object]) -> bytes:
    out = io.BytesIO()
    table = pyarrow.table({"text": texts} | columns)
    pyarrow.parquet.write_table(table, out, row_group_size=7)
    return out.getvalue()


def read(
    given: str, size: int = SHARD_BYTES, text_key: str = "text", start: Position = FIRST
) -> tuple[list[str], Count]:
    inputs, count, found = take_inputs(given).inputs, Count(), []
    for each in cut(inputs, start, size):
        here = Count()
        found += [one.text for one in documents(each, text_key, here)]
        count.add(here)
    return found, count


def refused(given: str, **kwargs: object) -> str:
    with pytest.raises(UserError) as caught:
        read(given, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("size", [1, 100, SHARD_BYTES])
def test_jsonl_gives_its_rows_for_any_cut_into_shards(
    tmp_path: Path, packed: str, size: int
) -> None:
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(PACK[packed](lines(TEXTS)[:-1]))  # the last line has no line end
    found, count = read(str(path), size=size)
    assert found == TEXTS
    assert (count.rows, count.bad, count.size) == (40, 0, sum(len(t.encode()) for t in TEXTS))


@pytest.mark.nightly
@pytest.mark.parametrize("size", [1, 300])
def test_reading_can_start_at_any_row(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS)))
    (tmp_path / "b.jsonl").write_bytes(lines(TEXTS[::-1]))
    (tmp_path / "c.parquet").write_bytes(parquet(TEXTS))
    for i in range(5):
        (tmp_path / f"d{i}.txt").write_text(TEXTS[i])
    inputs = take_inputs(str(tmp_path)).inputs
    shards = list(cut(inputs, size=size))
    assert len(shards) > 10
    assert shards[-1].read == sum(each.size for each in inputs)
    whole, done = read(str(tmp_path))[0], 0
    for each in shards:
        done += sum(1 for _ in documents(each, "text", Count()))
        assert read(str(tmp_path), start=Position(*each.after), size=size)[0] == whole[done:]
    assert done == len(whole)


class Endless(io.RawIOBase):
    """A stream whose line never ends."""

    def __init__(self) -> None:
        self.given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        self.given += len(buffer)
        buffer[:] = b"x" * len(buffer)
        return len(buffer)


@pytest.mark.parametrize("size", [10, 2000])
def test_a_line_is_read_no_further_than_the_largest_document(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes may unpack to any number of bytes."""
    monkeypatch.setattr(preprocess_inputs, "LARGEST_DOCUMENT", 100_000)
    (tmp_path / "a.jsonl").write_bytes(b"x")
    (source,), stream = take_inputs(str(tmp_path / "a.jsonl")).inputs, Endless()
    with pytest.raises(UserError, match="has a line of more than 100,000 bytes"):
        whole_lines(source, io.BufferedReader(stream, 1000), size)
    assert stream.given <= 101_000


@pytest.mark.nightly
def test_a_compressed_file_is_unpacked_in_small_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(PACK[".zst"](b"x" * (1 << 28)))  # 8 kB
    (source,) = take_inputs(str(path)).inputs
    with opened(source) as (content, _):
        assert content.read(10) == b"x" * 10
        assert len(content.raw._ready) <= 1 << 27


def test_empty_lines_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" * 5000 + b" \r\n" + lines(["a"]) + b"\n\n{\n" + b"\n" * 5000 + b"[")
    for size in (1, 100, SHARD_BYTES):
        found, count = read(str(path), size=size)
        assert found == ["a"] and (count.rows, count.bad) == (3, 2)
        assert [said.split()[0] for said in count.shown] == ["a.jsonl:5005", "a.jsonl:10006"]


@pytest.mark.parametrize("packed", PACK)
def test_a_text_file_is_a_document(tmp_path: Path, packed: str) -> None:
    for i in range(9):
        (tmp_path / f"{i}.txt{packed}").write_bytes(PACK[packed](TEXTS[i].encode()))
    for size in (1, 100, SHARD_BYTES):
        assert read(str(tmp_path), size=size)[0] == TEXTS[:9]


def test_parquet_gives_a_column_row_group_by_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet([*TEXTS[:9], None], other=TEXTS[:10]))
    found, count = read(str(path))
    assert found == TEXTS[:9]
    assert (count.rows, count.bad) == (10, 1)
    assert count.shown == ["a.parquet, row 3 of group 1 has no text at text"]
    assert read(str(path), text_key="other")[0] == TEXTS[:10]
    sentence = refused(str(path), text_key="words")
    assert "no column words" in sentence and "text, other" in sentence


@pytest.mark.nightly
def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(TEXTS))
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from parallel3d.data.inputs import take_inputs\n"
        "from parallel3d.data.inputs import cut\n"
        f"list(cut(take_inputs({str(tmp_path)!r}).inputs))"
    )
    ended = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)
    assert "Parallel3dError" in ended.stderr and "parallel3d[parquet]" in ended.stderr


def test_several_zstd_frames_and_gzip_members_are_one_file(tmp_path: Path) -> None:
    half = len(lines(TEXTS)) // 2
    for packed in (".gz", ".zst", ".xz", ".bz2"):
        parts = lines(TEXTS)[:half], lines(TEXTS)[half:]
        path = tmp_path / f"{packed[1:]}.jsonl{packed}"
        path.write_bytes(b"".join(PACK[packed](part) for part in parts))
        assert read(str(path))[0] == TEXTS


@pytest.mark.parametrize("packed", [".gz", ".zst", ".xz", ".bz2"])
@pytest.mark.parametrize("kept", [0.5, -1])
def test_a_truncated_compressed_file_is_an_error(tmp_path: Path, packed: str, kept: float) -> None:
    content = PACK[packed](lines(TEXTS * 50))
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(content[:-1] if kept == -1 else content[: int(len(content) * kept)])
    assert f"a.jsonl{packed} cannot be read" in refused(str(path))
    path.write_bytes(content + b"no such thing" * 9)
    assert f"a.jsonl{packed} cannot be read" in refused(str(path))


# ---- rows


def test_bad_rows_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    rows = [b"{", b"[1]", b'{"txt": "a"}', b'{"text": 3}', b'{"text": "\xff"}', b"\x1b[2J", b"{"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([*lines(TEXTS).splitlines(), b"", b"  ", *rows, b""]))
    for size in (1, SHARD_BYTES):
        found, count = read(str(path), size=size)
        assert found == TEXTS
        assert (count.rows, count.bad) == (47, 7)
        assert count.shown == [
            "a.jsonl:43 is not JSON: {",
            "a.jsonl:44 is not an object: [1]",
            'a.jsonl:45 has no key text; its keys are txt: {"txt": "a"}',
            'a.jsonl:46 has no text at text: {"text": 3}',
            'a.jsonl:47 is not UTF-8: {"text": "�"}',
        ]


def test_deep_nesting_and_huge_numbers_are_bad_rows_and_end_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["good"]) + b"[" * 10**6 + b"\n" + b'{"text": ' + b"9" * 10**4 + b"}\n")
    found, count = read(str(path))
    assert found == ["good"] and count.bad == 2


def test_an_empty_document_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["", "a", ""]))
    (tmp_path / "b.txt").write_bytes(b"")
    found, count = read(str(tmp_path))
    assert found == ["a"]
    assert (count.rows, count.empty, count.bad) == (4, 3, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_document_of_ten_million_characters_is_whole(tmp_path: Path, packed: str) -> None:
    long = "0123456789é\n" * (10_000_000 // 12 + 1)
    (tmp_path / f"a.jsonl{packed}").write_bytes(PACK[packed](lines(["a", long, "b"])))
    (tmp_path / f"b.txt{packed}").write_bytes(PACK[packed](long.encode()))
    found, _ = read(str(tmp_path), size=1000)
    assert len(long) > 10_000_000
    assert found == ["a", long, "b", long]


def test_invalid_utf8_and_halves_of_characters_become_replacement_characters(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 999 + b"\xffb")
    row = json.dumps({"text": "x\ud83dy \U0001f600"})
    (tmp_path / "b.jsonl").write_text(row)
    found, count = read(str(tmp_path))
    assert found == ["a" * 999 + "�b", "x�y \U0001f600"]
    assert (count.broken, count.bad) == (2, 0)


# ---- paths


def test_items_keep_their_order_and_files_come_once(tmp_path: Path) -> None:
    for name in ("z.txt", "sub/b.txt", "sub/a.txt", "sub/.hidden/c.txt", "odd,name.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    given = f"{tmp_path}/z.txt, {tmp_path}/sub, {tmp_path}/*/a.txt"
    assert read(given)[0] == ["z.txt", "sub/a.txt", "sub/b.txt"]
    assert read(f"{tmp_path}/odd,name.txt")[0] == ["odd,name.txt"]
    assert read(f"file://{tmp_path}/sub/*.txt")[0] == ["sub/a.txt", "sub/b.txt"]
    assert read(f"{tmp_path}/**/*.txt")[0] == ["odd,name.txt", "sub/a.txt", "sub/b.txt", "z.txt"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("webb", ["input=", "webb does not exist", "the nearest is", "/web"]),
        ("none/*.txt", ["matches no file"]),
        ("hollow", ["holds no files"]),
        ("empty.txt", ["only empty files, pipes or devices (1)"]),
        ("web,,web", ["has an empty item: give files"]),
        ("nowhere://a/b", ["cannot be read", "nowhere"]),
        ("a.parquet.gz", ["ends in .parquet.gz, which is not read, and holds parquet"]),
        ("broken.parquet", ["broken.parquet cannot be read"]),
    ],
)
def test_a_bad_input_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.txt").write_text("a")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / ".hidden").write_text("a")
    (tmp_path / "empty.txt").touch()
    for name in ("a.parquet.gz", "broken.parquet"):
        (tmp_path / name).write_bytes(b"PAR1 no more\x00")
    sentence = refused(given)
    assert all(word in sentence for word in words), sentence
