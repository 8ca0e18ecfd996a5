"""Writes a corpus so that a killed run can continue it.

`<to>.partial/` holds tokens and lengths, which grow, and journal.json with how much of them is
flushed and the position of the inputs after that; a new start cuts off the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.config.fields import show
from parallel3d.data.indexed import write_index
from parallel3d.data.preprocess.inputs import FIRST, Count, InputPosition
from parallel3d.data.text_files import CorpusFacts
from parallel3d.data.tokenizer import TOKENIZER, ByteTokenizer, Tokenizer
from parallel3d.errors import UserError
from parallel3d.files import flush_folder, no_link, parse_json, plain, read_bounded, replace_durably

# Bytes of tokens and seconds between flushes: what a kill may cost.
FLUSH_BYTES, FLUSH_S = 64 << 20, 10
JOURNAL = "journal.json"
READ = 4 << 20
ENDS = (".tokenizer", ".json", ".bin", ".idx")  # in writing order: the index completes the pair


@dataclass
class JournalEntry:
    """The flushed state: `place` after the written documents, `read` bytes of inputs before it."""

    place: InputPosition = FIRST
    read: int = 0
    documents: int = 0
    tokens: int = 0
    count: Count = field(default_factory=Count)
    complete: bool = False  # all files are written and only need renaming


class Journal:
    """The files of a corpus in progress. `job`: its inputs, name → value."""

    def __init__(self, to: Path, job: dict[str, Any], dtype: np.dtype, flush_bytes: int) -> None:
        self.to, self.job, self.dtype, self.flush_bytes = to, job, np.dtype(dtype), flush_bytes
        self.folder = to.with_name(f"{to.name}.partial")
        self.done = JournalEntry()
        self.digest = hashlib.blake2b(digest_size=16)
        self._unflushed, self._flushed_at = 0, time.monotonic()

    @staticmethod
    def begun(to: Path) -> bool:
        """Returns whether an earlier start can be continued."""
        return (to.with_name(f"{to.name}.partial") / JOURNAL).exists()

    @contextlib.contextmanager
    def held(self) -> Iterator[Journal]:
        """Locks and opens the files, cut to the flushed part. Raises OSError, and UserError if
        another process or job has them, or if the corpus exists."""
        if not (self.folder / JOURNAL).exists():
            check_free(self.to)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"to={self.to} is being made by another process") from None
            try:
                self._resume()
                with self._files():
                    yield self
            finally:
                if not (self.folder / JOURNAL).exists():  # nothing to continue
                    shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _files(self) -> Iterator[None]:
        if self.done.complete:
            yield
            return
        self._tokens = self._opened("tokens", self.done.tokens * self.dtype.itemsize)
        self._lengths = self._opened("lengths", self.done.documents * 4)
        try:
            yield
        finally:
            with self._named():
                self._tokens.close()
                self._lengths.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Adds the folder's name to errors of writes, which name no file."""
        try:
            yield
        except OSError as error:
            if error.filename is None:
                error.filename = str(self.folder)
            raise

    def add(
        self, tokens: bytes, lengths: bytes, count: Count, place: InputPosition, read: int
    ) -> None:
        """Adds the documents of a shard that ends at `place`; may flush. Raises OSError."""
        with self._named():
            self._tokens.write(tokens)
            self._lengths.write(lengths)
        self.digest.update(tokens)
        self.done.count.add(count)
        self.done = dataclasses.replace(
            self.done,
            place=place,
            read=read,
            documents=self.done.documents + len(lengths) // 4,
            tokens=self.done.tokens + len(tokens) // self.dtype.itemsize,
        )
        self._unflushed += len(tokens) + 1
        if self._unflushed > self.flush_bytes or time.monotonic() - self._flushed_at > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Flushes all files, then records their sizes in the journal."""
        with self._named():
            for file in (self._tokens, self._lengths):
                file.flush()
                os.fsync(file.fileno())
            self._write()
        self._unflushed, self._flushed_at = 0, time.monotonic()

    def finish(self, tokenizer: Tokenizer) -> CorpusFacts:
        """Renames the complete corpus to its place, the index last. After an OSError a new start
        continues."""
        if not self.done.complete:
            self.flush()
            with self._named():
                self._make_beside(tokenizer)
                self.done.complete = True
                self._write()
        facts = CorpusFacts(**parse_json(read_bounded(self._part(".json"), 1 << 20)))
        for end in ENDS:
            if self._part(end).exists():
                os.replace(self._part(end), f"{self.to}{end}")
                flush_folder(self.to.parent)
        shutil.rmtree(self.folder)
        return facts

    def _part(self, end: str) -> Path:
        """Returns the file that becomes `<to><end>`; the .json stays until the end."""
        names = {".bin": "tokens", ".idx": "index", ".json": "facts.json", ".tokenizer": "cut"}
        here = self.folder / names[end]
        if end == ".json" and not here.exists():
            return Path(f"{self.to}.json")
        return here

    def _make_beside(self, tokenizer: Tokenizer) -> None:
        """Writes index, facts and tokenizer into the folder."""
        for name in ("index", "facts.json"):
            (self.folder / name).unlink(missing_ok=True)
        lengths = self.folder / "lengths"
        write_index(str(self.folder / "index"), lengths, self.done.documents, self.dtype)
        shutil.rmtree(self.folder / "cut", ignore_errors=True)
        file = None
        if not isinstance(tokenizer, ByteTokenizer):
            tokenizer.save(self.folder / "cut")
            file = f"{self.to.name}.tokenizer/{TOKENIZER}"
        facts = CorpusFacts(
            tokenizer.digest,
            file,
            tokenizer.vocab_size,
            tokenizer.eot,
            self.done.documents,
            self.done.tokens,
            self.digest.hexdigest(),
        )
        content = json.dumps(facts._asdict(), indent=1) + "\n"
        replace_durably(self.folder / "facts.json", content.encode())

    def _write(self) -> None:
        content = json.dumps({"job": self.job, "done": dataclasses.asdict(self.done)})
        replace_durably(self.folder / JOURNAL, content.encode())

    def _resume(self) -> None:
        """Reads the state of an earlier start. Raises UserError for another job's files."""
        path = self.folder / JOURNAL
        try:
            content = parse_json(read_bounded(path, 1 << 24))
            there, done = content["job"], JournalEntry(**content["done"])
            self.done = dataclasses.replace(
                done, place=InputPosition(*done.place), count=Count(**content["done"]["count"])
            )
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} cannot be read ({plain(str(error))}): remove {self.folder} to begin again"
            ) from None
        differs = [key for key in self.job if there.get(key) != self.job[key]]
        if differs:
            raise UserError(
                f"to={show(str(self.to))} was begun with another {' and '.join(differs)}: type the "
                f"first line again, choose another to=, or remove {self.folder} to begin anew"
            )

    def _opened(self, name: str, size: int) -> Any:
        """Opens a file, cut to `size` bytes, for appending. Raises UserError if it is shorter."""
        path = self.folder / name
        file = open(path, "a+b", opener=no_link)  # noqa: SIM115  the caller closes it
        if os.fstat(file.fileno()).st_size < size:
            file.close()
            raise UserError(f"{path} was cut short: remove {self.folder} to begin again")
        file.truncate(size)
        if name == "tokens":
            file.seek(0)
            while block := file.read(READ):
                self.digest.update(block)
        file.seek(size)
        return file


def check_free(to: Path) -> None:
    """Raises UserError if any file of a corpus at `to` exists: nothing is overwritten."""
    there = [f"{to}{end}" for end in ENDS if os.path.lexists(f"{to}{end}")]
    if there:
        raise UserError(
            f"to={show(str(to))}: {there[0]} is there and stays as it is; choose another to=, or "
            "remove that corpus"
        )
