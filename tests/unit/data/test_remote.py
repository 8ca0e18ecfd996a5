"""Tests pairs at an address: their blocks are fetched once, verified, bounded, and never
partial."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from parallel3d.data import remote
from parallel3d.data.corpus import check_data, open_corpus
from parallel3d.data.indexed import IndexedCorpus
from parallel3d.data.keys import DataConfig
from parallel3d.data.remote import BlockCache, BlockFile
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.corpora import pair
from tests.sources import sources_of

SEQ, BLOCK = 16, 1000


class Served:
    """Holds the files at the addresses, and records the pieces that were requested; the first
    request may fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.failures = 0
        self.short = False

    def cat_file(self, plain: Any, path: str, start: int, end: int) -> bytes:
        self.asked.append((start, end))
        if self.failures:
            self.failures -= 1
            raise TimeoutError("no answer")
        return plain(path, start=start, end=end)[: -3 if self.short else None]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Serves memory://web.bin, .idx and .json, in blocks of a thousand bytes and with ETags."""
    served, plain, info = Served(), MemoryFileSystem.cat_file, MemoryFileSystem.info
    monkeypatch.setattr(remote, "BLOCK", BLOCK)
    monkeypatch.setattr(remote, "PAUSES_S", (0.0, 0.0))

    def cat_file(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        return served.cat_file(lambda *a, **k: plain(self, *a, **k), path, start, end)

    def with_etag(self: MemoryFileSystem, path: str) -> dict[str, Any]:
        content = plain(self, path)
        return info(self, path) | {"ETag": f'"{hashlib.blake2b(content).hexdigest()}"'}

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(MemoryFileSystem, "info", with_etag)
    prefix, files = pair(tmp_path / "web", 1, documents=300), fsspec.filesystem("memory")
    for end in (".bin", ".idx", ".json"):
        files.pipe_file(f"/web{end}", Path(f"{prefix}{end}").read_bytes())
    yield served
    for end in (".bin", ".idx", ".json"):
        files.rm_file(f"/web{end}")


def data_of(tmp_path: Path, path: str = "memory://web", **more: Any) -> DataConfig:
    return DataConfig(name="corpus", path=path, cache_dir=str(tmp_path / "cache"), **more)


def samples(data: DataConfig) -> list[bytes]:
    config = Config(data=data, model=ModelConfig(seq_length=SEQ, vocab_size=257))
    source = sources_of(open_corpus(data, SEQ), config).train
    return [source.sample(i).tokens.tobytes() for i in range(50)]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_remote_pair_gives_the_samples_of_the_local_one(
    served: Served, tmp_path: Path, packing: str
) -> None:
    more = {"packing": packing, "cut_documents": True}
    assert check_data(data_of(tmp_path, **more), SEQ, vocab_size=257) == []
    usual = samples(data_of(tmp_path, str(tmp_path / "web"), **more))
    assert samples(data_of(tmp_path, **more)) == usual
    fetched = Counter(served.asked)
    assert fetched and max(fetched.values()) <= 3  # a block of each of the three files
    assert samples(data_of(tmp_path, **more)) == usual and Counter(served.asked) == fetched


def test_a_damaged_block_in_the_cache_is_fetched_again(served: Served, tmp_path: Path) -> None:
    usual = samples(data_of(tmp_path))
    for number, path in enumerate(sorted((tmp_path / "cache" / "blocks").glob("*/*.block"))):
        content = bytearray(path.read_bytes())
        content[number % len(content)] ^= 1
        path.write_bytes(content if number % 2 else content[: len(content) // 2])
    before = len(served.asked)
    assert samples(data_of(tmp_path)) == usual
    assert len(served.asked) > before


def test_a_block_that_others_may_write_is_not_taken(served: Served, tmp_path: Path) -> None:
    usual = samples(data_of(tmp_path))
    for path in (tmp_path / "cache" / "blocks").glob("*/*.block"):
        path.chmod(0o666)
    before = len(served.asked)
    assert samples(data_of(tmp_path)) == usual and len(served.asked) > before


def test_a_failing_fetch_is_retried_and_reported_in_the_end(served: Served, tmp_path: Path) -> None:
    served.failures = 2
    assert len(samples(data_of(tmp_path))) == 50
    cache = BlockCache(tmp_path / "other", 10**9)
    file = BlockFile("memory://web.bin", cache, "data.path=memory://web")
    served.failures = 3
    with pytest.raises(OSError, match=r"memory://web\.bin cannot be read at byte 0: no answer"):
        file.pread(10, 0)
    assert len(file.pread(10, 0)) == 10
    served.short = True
    with pytest.raises(OSError, match="997 of 1,000 bytes arrived"):
        file.pread(10, 2 * BLOCK)
    served.short = False
    assert len(file.pread(10, 2 * BLOCK)) == 10
    assert not list((tmp_path / "other").glob("*/*.partial"))


def test_missing_or_truncated_files_are_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"memory://wob does not exist: no file at memory://wob\.idx"
    ):
        check_data(data_of(tmp_path, "memory://wob"), SEQ)
    with pytest.raises(UserError, match=r"nowhere://x\.idx cannot be read"):
        check_data(data_of(tmp_path, "nowhere://x"), SEQ)
    files = fsspec.filesystem("memory")
    files.pipe_file("/web.bin", files.cat_file("/web.bin", start=0, end=500))
    with pytest.raises(UserError, match=r"is cut short: memory://web\.bin has 500 bytes"):
        check_data(data_of(tmp_path), SEQ)


def test_the_cache_stays_within_its_size_and_keeps_the_latest_blocks(
    served: Served, tmp_path: Path
) -> None:
    cache = BlockCache(tmp_path / "small", 5 * BLOCK)
    file = BlockFile("memory://web.bin", cache, "it")
    for number in range(10):
        file.pread(BLOCK, number * BLOCK)
        held = {path.name: path for path in (tmp_path / "small").glob("*/*.block")}
        os.utime(held[f"{number}.block"], (number, number))
        assert sum(path.stat().st_size for path in held.values()) <= 5 * BLOCK
    assert "9.block" in held and "0.block" not in held
    again = BlockCache(tmp_path / "small", 5 * BLOCK)
    assert np.frombuffer(BlockFile("memory://web.bin", again, "it").pread(8, 0), "<u2").size == 4


def test_many_threads_fetch_a_block_once(served: Served, tmp_path: Path) -> None:
    file = BlockFile("memory://web.bin", BlockCache(tmp_path / "c", 10**9), "it")
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(file.pread(900, 50))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and served.asked.count((0, BLOCK)) == 1


def killed_while_keeping(address: str, folder: Path) -> None:
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    BlockFile(address, BlockCache(folder, 10**9), "it").pread(10, 0)


@pytest.mark.nightly
def test_a_kill_during_a_download_leaves_no_partial_block(tmp_path: Path) -> None:
    prefix, folder = pair(tmp_path / "web", 1, documents=300), tmp_path / "blocks"
    address = f"file://{prefix}.bin"
    child = multiprocessing.get_context("spawn").Process(
        target=killed_while_keeping, args=(address, folder)
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert list(folder.glob("*/*.partial")) and not list(folder.glob("*/*.block"))
    file = BlockFile(address, BlockCache(folder, 10**9), "it")
    whole = Path(f"{prefix}.bin").read_bytes()
    assert file.pread(len(whole), 0) == whole
    (left,) = folder.glob("*/*.partial")
    os.utime(left, (0, 0))
    BlockCache(folder, 10**9)
    assert not left.exists()


def test_corpus_of_another_content_under_the_same_address_is_another(
    served: Served, tmp_path: Path
) -> None:
    first = samples(data_of(tmp_path))
    prefix, files = pair(tmp_path / "new" / "web", 2, documents=310), fsspec.filesystem("memory")
    for end in (".bin", ".idx", ".json"):
        files.pipe_file(f"/web{end}", Path(f"{prefix}{end}").read_bytes())
    assert samples(data_of(tmp_path)) == samples(data_of(tmp_path, str(prefix))) != first


def test_only_the_needed_part_of_the_index_is_fetched(served: Served, tmp_path: Path) -> None:
    here = IndexedCorpus(tmp_path / "web")
    cache = BlockCache(tmp_path / "c", 10**9)
    there = IndexedCorpus("memory://web", "it", lambda name, named: BlockFile(name, cache, named))
    assert np.array_equal(there.starts(100, 2000), here.starts(100, 2000))
