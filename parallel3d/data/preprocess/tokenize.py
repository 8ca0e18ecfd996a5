"""Trains tokenizers, and tokenizes text into corpora by several processes.

A killed run can be continued: `<to>.partial/` holds tokens and lengths, which grow, and
journal.json with how much of them is flushed and the position of the inputs after that; a new start
cuts off the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from parallel3d.config.fields import show
from parallel3d.data.indexed import CorpusFacts, token_type, write_index
from parallel3d.data.preprocess.inputs import (
    FIRST,
    SHARD_BYTES,
    Count,
    Cut,
    Found,
    Input,
    InputPosition,
    InputShard,
    cut,
    digest_of,
    documents,
)
from parallel3d.data.tokenizer import (
    END,
    TOKENIZER,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    Unencodable,
    byte_level,
    open_tokenizer,
    with_end,
)
from parallel3d.errors import UserError
from parallel3d.files import flush_folder, no_link, parse_json, plain, read_bounded, replace_durably
from parallel3d.host.processes import die_with_parent

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


AHEAD = 2  # finished results per process that may wait for an earlier one
LOST = (
    "a process that makes tokens was ended from outside, perhaps as memory ran out: type the line "
    "again to go on, with fewer workers= if memory is short"
)


class Pool:
    """`workers` processes, each of which calls its own `make(*arguments)` for each task.

    A process is sent its next task only when it waits for one, so neither side writes into a full
    pipe whose reader is writing. Processes are spawned: forked, a library's threads could hold a
    lock forever.
    """

    def __init__(self, workers: int, make: Callable[..., Callable[[Any], Any]], *arguments: Any):
        context = get_context("spawn")
        self.workers: dict[Connection, SpawnProcess] = {}
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, os.getpid(), make, arguments), daemon=True
            )
            process.start()
            theirs.close()  # the pipe ends with the process
            self.workers[ours] = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self.workers.items():
            pipe.close()
            process.terminate()
            process.join()

    def in_order(self, tasks: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yields (name, result) for each (name, task), in their order.

        Raises the UserError of a task, or one for a process that is gone.
        """
        idle: list[Connection] = list(self.workers)
        busy: dict[Connection, int] = {}
        names: dict[int, Any] = {}
        results: dict[int, Any] = {}
        given = taken = 0
        more = True
        while more or taken < given:
            while more and idle and given - taken < (1 + AHEAD) * len(self.workers):
                try:
                    names[given], work = next(tasks)
                except StopIteration:
                    more = False
                    break
                pipe = idle.pop()
                busy[pipe], given = given, given + 1
                _talk(pipe.send, work)
            while taken in results:
                yield names.pop(taken), results.pop(taken)
                taken += 1
            for ready in wait(list(busy)) if busy else ():
                assert isinstance(ready, Connection)
                result = _talk(ready.recv)
                if isinstance(result, Exception):
                    raise result
                results[busy.pop(ready)] = result
                idle.append(ready)


def _talk(how: Callable[..., Any], *what: Any) -> Any:
    try:
        return how(*what)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise UserError(LOST) from None


def _serve(
    pipe: Connection, parent: int, make: Callable[..., Callable[[Any], Any]], arguments: Any
) -> None:
    """Runs a worker process, which ends with its parent and leaves signals to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    failed: UserError | None = None
    work: Callable[[Any], Any] | None = None
    try:
        work = make(*arguments)
    except UserError as error:
        failed = error
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            result = failed if work is None else work(task)
        except (UserError, MemoryError) as error:
            result = UserError(LOST) if isinstance(error, MemoryError) else error
        pipe.send(result)


# Training of a tokenizer: byte-level BPE with one special token, which separates documents
#
# Sources: R. Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", ACL
# 2016; bytes and GPT-2's words as in A. Radford et al., "Language Models are Unsupervised Multitask
# Learners", 2019, §2.2.


def train_tokenizer(
    inputs: Sequence[Input],
    vocab_size: int,
    text_key: str,
    progress: Callable[[int, Count], None],
) -> tuple[bytes, Count]:
    """Trains a tokenizer; returns a tokenizer.json of at most `vocab_size` tokens, and its rows.

    `progress` gets the bytes of the inputs that were read, and the counts so far. The tokenizer
    puts END before a prompt, as in training every text but the first follows one. Raises UserError
    for inputs that cannot be read or hold no text.
    """
    from tokenizers import models, pre_tokenizers, trainers

    inner = byte_level(models.BPE(), words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    count = Count()
    inner.train_from_iterator(_texts(inputs, text_key, count, progress), trainer)
    if not count.size:
        raise UserError(f"input: none of its {count.rows:,} rows has a text")
    return with_end(inner), count


def _texts(
    inputs: Sequence[Input],
    text_key: str,
    count: Count,
    progress: Callable[[int, Count], None],
) -> Iterator[str]:
    for each in cut(inputs):
        here = Count()
        for found in documents(inputs, each.shard, text_key, here):
            yield found.text
        count.add(here)
        progress(each.read, count)


# Tokenizing into a corpus, whose bytes do not depend on the number of processes. One process splits
# the inputs and writes the results in order; a bounded number waits, so memory does not grow.


VERSION = 1
AT_ONCE = 256 << 10  # characters tokenized at a time: a tokenizer needs many times as much memory
JUDGED = 1000  # rows before the share of bad ones is checked


@dataclass(frozen=True)
class PreprocessJob:
    """A corpus to make. bad: the largest allowed share of rows without a document. tokenizer: for
    `open_tokenizer`. workers: processes; 0: only this one."""

    inputs: tuple[Input, ...]
    tokenizer: str
    to: Path
    text_key: str = "text"
    bad: float = 0.01
    workers: int = 1
    shard_bytes: int = SHARD_BYTES
    flush_bytes: int = FLUSH_BYTES


class Made(NamedTuple):
    """A shard's documents: tokens as the corpus stores them, lengths int32."""

    tokens: bytes
    lengths: bytes
    rows: Count


class Cutter:
    """Tokenizes shards, in any process."""

    def __init__(self, job: PreprocessJob, digest: str | None = None) -> None:
        """Raises UserError if the tokenizer's digest is no longer `digest`."""
        self.job = job
        self.tokenizer = open_tokenizer(job.tokenizer, "tokenizer")
        if digest not in (None, self.tokenizer.digest):
            raise UserError(f"tokenizer={job.tokenizer} was changed while it was in use")
        self.dtype = token_type(self.tokenizer.vocab_size)

    def __call__(self, shard: InputShard) -> Made:
        """Returns the tokens of a shard's documents, each with an end-of-text."""
        count, parts, lengths = Count(), [], []
        end = np.array([self.tokenizer.eot], dtype=self.dtype).tobytes()
        for some in _batches(documents(self.job.inputs, shard, self.job.text_key, count)):
            for tokens in self._encoded(some, count):
                parts += [tokens.astype(self.dtype, copy=False).tobytes(), end]
                lengths.append(tokens.size + 1)
        return Made(b"".join(parts), np.array(lengths, dtype="<i4").tobytes(), count)

    def _encoded(self, some: list[Found], count: Count) -> list[np.ndarray]:
        """Tokenizes documents; one that the tokenizer cannot encode is a bad row."""
        if not isinstance(self.tokenizer, FileTokenizer):
            return [self.tokenizer.encode(each.text.encode()) for each in some]
        try:
            return self.tokenizer.encode_all([each.text for each in some])
        except Unencodable as error:
            if len(some) > 1:
                return [tokens for each in some for tokens in self._encoded([each], count)]
            (bad,) = some
            count.size -= len(bad.text.encode())
            why = f"cannot be encoded by tokenizer={self.job.tokenizer} ({error.why})"
            count.leave_out(bad.where, why, bad.text)
            return []


def tokenize(
    job: PreprocessJob, progress: Callable[[JournalEntry], None]
) -> tuple[CorpusFacts, JournalEntry]:
    """Makes a corpus, or continues one. Calls `progress` after each shard.

    Raises UserError for unusable inputs or tokenizer, too many bad rows, or an existing corpus. The
    work so far stays for the next start, as it does after a kill.
    """
    cutter = Cutter(job)
    made_of = {"version": VERSION, "tokenizer": cutter.tokenizer.digest, "text_key": job.text_key}
    made_of["input"] = digest_of(list(job.inputs))
    journal = Journal(job.to, made_of, cutter.dtype, job.flush_bytes)
    with journal.held():
        if not journal.done.complete:
            progress(journal.done)
            shards = cut(job.inputs, journal.done.place, job.shard_bytes)
            with _made(cutter, shards) as made:
                for each, result in made:
                    journal.add(*result, each.after, each.read)
                    _judge(journal.done, job.bad, least=JUDGED)
                    progress(journal.done)
            _judge(journal.done, job.bad, least=1)
            if not journal.done.documents:
                raise UserError(f"input: none of its {journal.done.count.rows:,} rows has a text")
        return journal.finish(cutter.tokenizer), journal.done


def _judge(done: JournalEntry, most: float, least: int) -> None:
    """Raises UserError if more than a share `most` of at least `least` rows is bad."""
    count = done.count
    if count.rows >= least and count.bad > most * count.rows:
        raise UserError(
            f"{count.bad:,} of the first {count.rows:,} rows hold no document, more than bad="
            f"{most:g} of them: {'; '.join(count.shown)}; mend them, or give a larger bad="
        )


def _batches(found: Iterator[Found]) -> Iterator[list[Found]]:
    batch: list[Found] = []
    held = 0
    for each in found:
        batch.append(each)
        held += len(each.text)
        if held >= AT_ONCE:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


@contextmanager
def _made(cutter: Cutter, shards: Iterator[Cut]) -> Iterator[Iterator[tuple[Cut, Made]]]:
    """Yields the results of the shards in order, from several processes if there are workers."""
    job = cutter.job
    if not job.workers:
        yield ((each, cutter(each.shard)) for each in shards)
        return
    with Pool(job.workers, Cutter, job, cutter.tokenizer.digest) as pool:
        # The content travels with the task; only its number stays here.
        yield pool.in_order((c._replace(shard=InputShard(c.shard.number)), c.shard) for c in shards)
