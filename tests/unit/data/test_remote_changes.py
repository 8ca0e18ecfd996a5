"""Tests pairs behind HTTP that are replaced while a run has them open, and between its starts."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from parallel3d.data import remote
from parallel3d.data.corpus import Corpus, open_corpus
from parallel3d.data.inputs import take_inputs
from parallel3d.data.keys import DataConfig
from parallel3d.data.remote import BlockCache, BlockFile
from parallel3d.data.tokens import compare, marks_of
from parallel3d.errors import UserError
from tests.corpora import like_pair
from tests.http_files import ETAG, MODIFIED, WEAK, Server, use_some_http

SEQ, ENDS, BLOCK, LATER = 16, (".bin", ".idx", ".json"), 4000, 1_700_000_000
SERVERS = [(ETAG,), (MODIFIED,), (ETAG, MODIFIED), (WEAK, MODIFIED)]
every_server = pytest.mark.parametrize("tells", SERVERS, ids=["etag", "modified", "both", "weak"])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes two pairs, a and b, whose files have the same sizes; a is served at the addresses of
    `web`."""
    monkeypatch.setattr(remote, "BLOCK", BLOCK)
    monkeypatch.setattr(remote, "PAUSES_S", (0.0, 0.0))
    use_some_http()
    for seed, name in enumerate("ab"):
        like_pair(tmp_path / name, seed)
    for end in ENDS:
        assert len({Path(f"{tmp_path / name}{end}").stat().st_size for name in "ab"}) == 1
    put(tmp_path, "a", 0)
    return tmp_path


def put(home: Path, name: str, age: int, ends: tuple[str, ...] = ENDS) -> None:
    """Replaces the served files by pair `name`, with a modification time `age` s later."""
    (home / "served").mkdir(exist_ok=True)
    for end in ends:
        made = shutil.copy(f"{home / name}{end}", home / f"new{end}")
        os.utime(made, (LATER + age, LATER + age))
        os.replace(made, home / "served" / f"web{end}")


def edit(home: Path, name: str, at: int) -> None:
    """Changes a token of the served .bin, in place."""
    path = home / "served" / name
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def opened(home: Path, server: Server, cache: str = "cache") -> Corpus:
    data = DataConfig(name="corpus", path=f"{server.address}/web", cache_dir=str(home / cache))
    corpus = open_corpus(data, SEQ)
    assert isinstance(corpus, Corpus)
    return corpus


def tokens_of(home: Path, name: str) -> np.ndarray:
    return np.fromfile(home / f"{name}.bin", "<u2")


@pytest.mark.nightly
@every_server
def test_pair_that_is_replaced_under_a_run_ends_it_before_a_token_of_the_new_one(
    home: Path, tells: tuple[str, ...]
) -> None:
    right = tokens_of(home, "a")
    with Server(home / "served", tells).serving() as server:
        corpus = opened(home, server)
        assert np.array_equal(corpus.train[:5000], right[:5000])
        put(home, "b", 10)
        read = 0
        with pytest.raises(UserError) as raised:
            while read < len(corpus.train):
                assert np.array_equal(corpus.train[read : read + 500], right[read : read + 500])
                read += 500
        assert str(raised.value) == (
            f"{server.address}/web.bin was changed while the run was reading it: restore the "
            "version that the run began with and start again, or choose another run="
        )
        assert read >= 4500


@pytest.mark.nightly
@every_server
def test_a_later_run_uses_no_block_of_a_replaced_pair(home: Path, tells: tuple[str, ...]) -> None:
    with Server(home / "served", tells).serving() as server:
        first = opened(home, server)
        put(home, "b", 10)
        with contextlib.suppress(UserError):
            first.train[:]
        put(home, "a", 0)
        again = opened(home, server)
        assert again.fingerprint == first.fingerprint
        split = len(again.train)
        assert np.array_equal(again.train[:], tokens_of(home, "a")[:split])


@pytest.mark.nightly
@every_server
@pytest.mark.parametrize("age", [10, 0])
def test_new_pair_of_equal_size_is_read_by_the_next_run(
    home: Path, tells: tuple[str, ...], age: int
) -> None:
    with Server(home / "served", tells).serving() as server:
        old = opened(home, server)
        old.train[:], old.valid[:]
        put(home, "b", age)
        new = opened(home, server)
        assert new.fingerprint != old.fingerprint
        assert np.array_equal(new.train[:], tokens_of(home, "b")[: len(new.train)])


@pytest.mark.nightly
@every_server
@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_remote_file_of_another_size_ends_the_run(
    home: Path, tells: tuple[str, ...], change: str
) -> None:
    with Server(home / "served", tells).serving() as server:
        corpus = opened(home, server)
        path = home / "served" / "web.bin"
        content = path.read_bytes()
        path.write_bytes(content[:-2000] if change == "shorter" else content + content[:2000])
        with pytest.raises(UserError, match=r"web\.bin was changed while the run was reading it"):
            corpus.train[:]


def test_index_and_tokens_must_be_of_one_version(home: Path) -> None:
    server = Server(home / "served", (ETAG,))
    server.before = lambda method, name, _: (
        put(home, "b", 10) if (method, name) == ("HEAD", "web.bin") else None
    )
    with server.serving(), pytest.raises(UserError, match=r"web\.idx was changed while"):
        opened(home, server)


def test_a_single_block_of_another_version_is_not_used(home: Path) -> None:
    server, times = Server(home / "served", (ETAG,)), iter([True])

    def before(method: str, name: str, piece: str) -> None:
        put(home, "b" if method == "GET" and next(times, False) else "a", 0)

    with server.serving():
        file = BlockFile(f"{server.address}/web.bin", BlockCache(home / "c", 10**9), "it")
        server.before = before
        assert file.pread(100, 0) == (home / "a.bin").read_bytes()[:100]
    assert [method for method, _, _ in server.asked] == ["HEAD", *["GET", "HEAD"] * 2]


@pytest.mark.nightly
def test_a_check_costs_a_head_request_and_three_small_pieces_a_block(home: Path) -> None:
    cache = BlockCache(home / "c", 10**9)
    size = (home / "served" / "web.bin").stat().st_size
    count = -(-size // BLOCK)
    for tells, pieces in (((ETAG,), 0), ((MODIFIED,), 3)):
        with Server(home / "served", tells).serving() as server:
            file = BlockFile(f"{server.address}/web.bin", cache, "it")
            file.pread(size, 0)
            methods = [method for method, _, _ in server.asked]
            assert methods.count("HEAD") == 1 + count
            assert methods.count("GET") == count + pieces * (count + 1)
            before = len(server.asked)
            BlockFile(f"{server.address}/web.bin", cache, "it").pread(size, 0)
            assert len(server.asked) == before + 1 + pieces  # all blocks are cached


def test_a_server_without_any_version_is_refused(home: Path) -> None:
    refusal = pytest.raises(UserError, match=r"web\.idx cannot be read safely: its server gives n")
    with Server(home / "served", (WEAK,)).serving() as server, refusal:
        opened(home, server)


@pytest.mark.nightly
def test_a_changed_remote_pair_is_verified_at_the_next_start_or_reported(home: Path) -> None:
    for facts in (True, False):
        put(home, "a", 0)
        if not facts:
            (home / "served" / "web.json").unlink()
        with Server(home / "served", (ETAG,)).serving() as server:
            data = DataConfig(
                *("corpus", f"{server.address}/web"),
                cache_dir=str(home / "cache"),
                tokenizer="byte",
            )
            before = open_corpus(data, SEQ)
            marks = marks_of(before.watched)
            assert compare(open_corpus(data, SEQ).watched, marks) == (None, None)
            edit(home, "web.bin", 3000)
            after = open_corpus(data, SEQ)
            assert after.fingerprint == before.fingerprint  # verified at eight places
            refusal, note = compare(after.watched, marks)
        if facts:  # a small file is verified by its digest
            assert "web.bin was changed since the last checkpoint: restore the dataset" in refusal
        else:
            assert refusal is None and "web.bin may have changed since the last checkp" in note


@pytest.mark.parametrize("tells", [(ETAG,), (MODIFIED,)])
def test_an_unfinished_corpus_refuses_an_input_with_another_modification_time(
    home: Path, tells: tuple[str, ...]
) -> None:
    with Server(home / "served", tells).serving() as server:
        (before,) = take_inputs(f"{server.address}/web.json", "text").inputs
        put(home, "b", 10)
        (after,) = take_inputs(f"{server.address}/web.json", "text").inputs
    assert before.stamp and before.stamp != after.stamp


@pytest.mark.nightly
def test_a_file_that_disappears_is_an_error_with_its_name(home: Path) -> None:
    with Server(home / "served", (ETAG,)).serving() as server:
        corpus = opened(home, server)
        (home / "served" / "web.bin").unlink()
        with pytest.raises(OSError, match=r"web\.bin cannot be read at byte "):
            corpus.train[:]
