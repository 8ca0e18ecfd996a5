"""Trains tokenizers, and tokenizes text into corpora in several processes.

A killed run can be continued: `<to>.partial/` holds the tokens and lengths written so far, and
journal.json records how many of them are flushed, and the position in the inputs after them. A
new start cuts off everything written after the last flush.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data.cache import digest_of
from parallel3d.data.indexed import CorpusFacts, IndexedWriter, facts_beside, token_type
from parallel3d.data.inputs import (
    BAD,
    FIRST,
    JUDGED,
    SHARD_BYTES,
    Count,
    Input,
    Position,
    Shard,
    cut,
    documents,
    encoded,
    judge,
)
from parallel3d.data.tokenizer import (
    END,
    TOKENIZER,
    ByteTokenizer,
    Tokenizer,
    UnencodableText,
    byte_level,
    open_tokenizer,
    with_end,
)
from parallel3d.errors import UserError
from parallel3d.files import flush_folder, no_link, parse_json, plain, read_bounded, replace_durably
from parallel3d.host.processes import die_with_parent

# Bytes of tokens and seconds between flushes: a kill loses at most this much.
FLUSH_BYTES, FLUSH_S = 64 << 20, 10
JOURNAL = "journal.json"
# The name of each file in the folder, by its final suffix. Files are renamed in this order: the
# index is the last, because it completes the dataset.
PARTS = {
    ".tokenizer": "tokenizer",
    ".json": "facts.json",
    ".bin": "corpus.bin.partial",
    ".idx": "corpus.idx.partial",
}


@dataclass
class JournalEntry:
    """The progress of a corpus.

    Attributes:
        place: position in the inputs after the written documents.
        read: bytes of the inputs before `place`.
        by_label: number of documents of each format and split.
        complete: whether all files are written and only need renaming.
    """

    place: Position = FIRST
    read: int = 0
    documents: int = 0
    tokens: int = 0
    count: Count = field(default_factory=Count)
    by_label: dict[str, int] = field(default_factory=dict)
    complete: bool = False


class Journal:
    """The files of a corpus in progress.

    `job` maps the names of all settings that determine the corpus to their values.
    """

    def __init__(self, to: Path, job: dict[str, Any], dtype: np.dtype, flush_bytes: int) -> None:
        self.to = to
        self.job = job
        self.dtype = np.dtype(dtype)
        self.flush_bytes = flush_bytes
        self.folder = folder_of(to)
        self.done = JournalEntry()
        self._unflushed = 0
        self._flushed_at = time.monotonic()

    @contextmanager
    def held(self) -> Iterator[Journal]:
        """Locks the folder, and reads the progress of an earlier start.

        Raises OSError, and UserError if another process writes the files, if another job began
        them, or if the corpus exists.
        """
        if not is_begun(self.to):
            check_free(self.to)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.folder / "lock", "ab", opener=no_link) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"to={self.to} is being written by another process; wait until that process "
                    "ends, or choose another to="
                ) from None
            try:
                self._resume()
                yield self
            except OSError as error:
                if error.filename is None:  # write errors name no file
                    error.filename = str(self.folder)
                raise
            finally:
                if not is_begun(self.to):  # nothing was written that a new start could continue
                    shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Opens the files, cut to their flushed parts, to add documents."""
        self._writer = IndexedWriter(
            self.folder / "corpus",
            self.dtype,
            partial=self.folder / "corpus",
            documents=self.done.documents,
            tokens=self.done.tokens,
        )
        try:
            yield
        finally:
            self._writer.leave()

    def add(self, made: ShardTokens, shard: Shard) -> None:
        """Adds the documents of a shard, and flushes if it is time to. Raises OSError."""
        self._writer.add_many(made.tokens, made.lengths)
        self.done.count.add(made.rows)
        label, by_label = shard.sources[0].label, self.done.by_label
        by_label[label] = by_label.get(label, 0) + made.lengths.size
        documents, tokens = self._writer.documents, self._writer.tokens
        self.done = JournalEntry(
            shard.after, shard.read, documents, tokens, self.done.count, by_label
        )
        self._unflushed += made.tokens.nbytes + 1
        if self._unflushed > self.flush_bytes or time.monotonic() - self._flushed_at > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Flushes all files, then records their sizes in the journal."""
        self._writer.flush()
        self._write()
        self._unflushed = 0
        self._flushed_at = time.monotonic()

    def complete(self, tokenizer: Tokenizer, begin: Sequence[int] = ()) -> None:
        """Writes the index, the facts and the tokenizer; documents begin with tokens `begin`."""
        self.flush()
        self._writer.write_index()
        own, file = self.folder / PARTS[".tokenizer"], None
        shutil.rmtree(own, ignore_errors=True)
        if not isinstance(tokenizer, ByteTokenizer):
            tokenizer.save(own)
            file = f"{self.to.name}.tokenizer/{TOKENIZER}"
        facts = CorpusFacts(
            tokenizer=tokenizer.digest,
            tokenizer_file=file,
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            documents=self.done.documents,
            tokens=self.done.tokens,
            digest=self._writer.digest,
            begin=tuple(begin),
        )
        content = json.dumps(facts._asdict(), indent=1) + "\n"
        replace_durably(self.folder / PARTS[".json"], content.encode())
        self.done.complete = True
        self._write()

    def finish(self) -> CorpusFacts:
        """Renames the files of the complete corpus to their final places, the index last.

        After an OSError, a new start continues here.
        """
        for end, part in PARTS.items():
            if (self.folder / part).exists():
                os.replace(self.folder / part, f"{self.to}{end}")
                flush_folder(self.to.parent)
        shutil.rmtree(self.folder)
        facts = facts_beside(self.to)
        assert facts is not None
        return facts

    def _write(self) -> None:
        content = json.dumps({"job": self.job, "done": dataclasses.asdict(self.done)})
        replace_durably(self.folder / JOURNAL, content.encode())

    def _resume(self) -> None:
        """Reads the state of an earlier start. Raises UserError for another job's files."""
        path = self.folder / JOURNAL
        try:
            content = parse_json(read_bounded(path, 1 << 24))
            there, done = content["job"], content["done"]
            done |= {"place": Position(*done["place"]), "count": Count(**done["count"])}
            self.done = JournalEntry(**done)
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} cannot be read ({plain(str(error))}): remove {self.folder} to start over"
            ) from None
        differs = [key for key in self.job if there.get(key) != self.job[key]]
        if differs:
            raise UserError(
                f"to={show(str(self.to))} was begun with another {' and '.join(differs)}: run the "
                f"first command again, choose another to=, or remove {self.folder} to start over"
            )


def folder_of(to: Path) -> Path:
    """Returns the folder of a corpus in progress."""
    return to.with_name(f"{to.name}.partial")


def is_begun(to: Path) -> bool:
    """Returns whether an earlier start left a corpus that can be continued."""
    return (folder_of(to) / JOURNAL).exists()


def check_free(to: Path) -> None:
    """Raises UserError if any file of a corpus at `to` exists, since nothing is overwritten."""
    there = [f"{to}{end}" for end in PARTS if os.path.lexists(f"{to}{end}")]
    if there:
        raise UserError(
            f"to={show(str(to))}: {there[0]} exists and is never overwritten; choose another to=, "
            "or remove that corpus"
        )


AHEAD = 3  # number of shards submitted per process before the first result is awaited
LOST = (
    "a worker process was killed, perhaps because memory ran out: run the command again to "
    "continue, with fewer workers= if memory is short"
)


def in_order(
    shards: Iterator[Shard], work: Callable[[Shard], ShardTokens], workers: int
) -> Generator[tuple[Shard, ShardTokens], None, None]:
    """Yields each shard with its result, in order.

    `workers` processes compute the results, or this process if `workers` is 0. Processes are
    spawned, because a lock held by a library's thread would stay locked after a fork.
    Passes on a task's UserError, and raises UserError if a process was killed.
    """
    if not workers:
        yield from ((each, work(each)) for each in shards)
        return
    others = active_children()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), begin_worker, (os.getpid(),))
    pending: deque[tuple[Shard, Future[ShardTokens]]] = deque()
    try:
        for each in shards:
            # The task holds the content, so only the place of the shard is kept here.
            pending.append((each._replace(content=b""), pool.submit(work, each)))
            if len(pending) > AHEAD * workers:
                done, made = pending.popleft()
                yield done, made.result()
        while pending:
            done, made = pending.popleft()
            yield done, made.result()
    except (BrokenProcessPool, MemoryError):
        raise UserError(LOST) from None
    finally:
        if pending:  # aborted
            for process in active_children():
                if process not in others:
                    process.terminate()
        pool.shutdown(cancel_futures=True)


def begin_worker(parent: int) -> None:
    """Prepares a worker process, which ends with its parent and ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run in parallel


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
    """Trains a tokenizer of at most `vocab_size` tokens; returns its tokenizer.json and the counts.

    `progress` gets the bytes of the inputs read so far and the counts of rows. The tokenizer puts
    END before a prompt, since every text but the first follows an END in training. Raises UserError
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
        raise UserError(
            f"input= has no usable text in any of its {count.rows:,} rows; give files that hold "
            "text"
        )
    return with_end(inner), count


def _texts(
    inputs: Sequence[Input],
    text_key: str,
    count: Count,
    progress: Callable[[int, Count], None],
) -> Iterator[str]:
    for each in cut(inputs):
        here = Count()
        for found in documents(each, text_key, here):
            yield found.text
        count.add(here)
        judge(count, JUDGED, BAD, f"{BAD:.0%}", "fix them")
        progress(each.read, count)
    judge(count, 1, BAD, f"{BAD:.0%}", "fix them")


# Tokenizing into a corpus, whose bytes do not depend on the number of processes. One process splits
# the inputs and writes the results in order; the number of waiting results is bounded.


VERSION = 1
REMEDY = "fix them, give their text_key=, or a larger bad="


@dataclass(frozen=True)
class PreprocessJob:
    """A corpus to write.

    Attributes:
        tokenizer: name for `open_tokenizer`.
        to: prefix of the corpus.
        bad: largest allowed share of rows without a document.
        workers: number of processes; 0 if this process does the work.
        add_bos: whether documents begin with the tokens that the tokenizer puts before texts.
    """

    inputs: tuple[Input, ...]
    tokenizer: str
    to: Path
    text_key: str = "text"
    bad: float = BAD
    workers: int = 1
    shard_bytes: int = SHARD_BYTES
    flush_bytes: int = FLUSH_BYTES
    add_bos: bool = True


class ShardTokens(NamedTuple):
    """The documents of a shard: concatenated tokens, lengths, and counts of rows."""

    tokens: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int32]
    rows: Count


@cache
def _tokenizer_of(name: str, digest: str) -> Tokenizer:
    """Opens a tokenizer, once per process. Raises UserError if its digest is not `digest`."""
    tokenizer = open_tokenizer(name, "tokenizer")
    if tokenizer.digest != digest:
        raise UserError(
            f"tokenizer={name} was changed while in use: restore it and run the command again"
        )
    return tokenizer


def made_of(shard: Shard, text_key: str, name: str, digest: str, add_bos: bool) -> ShardTokens:
    """Returns the tokens of a shard's documents, with an end-of-text token after each."""
    tokenizer = _tokenizer_of(name, digest)
    dtype, count = token_type(tokenizer.vocab_size), Count()
    end, parts = np.array([tokenizer.eot], dtype), [np.zeros(0, dtype)]
    begin = np.array(tokenizer.bos if add_bos else [], dtype)
    lengths = []
    for document, tokens in encoded(tokenizer, documents(shard, text_key, count)):
        if isinstance(tokens, UnencodableText):
            count.size -= len(document.text.encode())
            why = f"cannot be encoded by tokenizer={name} ({tokens.why})"
            count.leave_out(document.where, why, document.text)
        else:
            parts += [begin, tokens.astype(dtype, copy=False), end]
            lengths.append(begin.size + tokens.size + 1)
    return ShardTokens(np.concatenate(parts), np.array(lengths, np.int32), count)


def tokenize(
    job: PreprocessJob, progress: Callable[[JournalEntry], None]
) -> tuple[CorpusFacts, JournalEntry]:
    """Writes a corpus, or continues one. Calls `progress` after each shard.

    Raises UserError for unusable inputs or tokenizer, too many bad rows, or an existing corpus. The
    next start continues from the work done, even after a kill.
    """
    if unknown := next((each for each in job.inputs if not each.stamp), None):
        raise UserError(
            f"input={show(unknown.shown)}: its server gives neither an ETag nor a modification "
            "time, so a change would go unnoticed; copy it to this host"
        )
    tokenizer = open_tokenizer(job.tokenizer, "tokenizer")
    own = {"version": VERSION, "tokenizer": tokenizer.digest, "text_key": job.text_key}
    begin = tokenizer.bos if job.add_bos else []
    if tokenizer.bos:  # otherwise documents do not depend on add_bos
        own["add_bos"] = job.add_bos
    own["input"] = digest_of([[i.address, i.kind, i.size, i.stamp] for i in job.inputs])
    journal = Journal(job.to, own, token_type(tokenizer.vocab_size), job.flush_bytes)
    work = partial(
        made_of,
        text_key=job.text_key,
        name=job.tokenizer,
        digest=tokenizer.digest,
        add_bos=job.add_bos,
    )
    limit = f"bad={job.bad:g}"
    with journal.held():
        if not journal.done.complete:
            progress(journal.done)
            shards = cut(job.inputs, journal.done.place, job.shard_bytes)
            with journal.writing(), closing(in_order(shards, work, job.workers)) as results:
                for each, made in results:
                    journal.add(made, each)
                    judge(journal.done.count, JUDGED, job.bad, limit, REMEDY)
                    progress(journal.done)
                judge(journal.done.count, 1, job.bad, limit, REMEDY)
                if not journal.done.documents:
                    raise UserError(
                        "input= has no usable text in any of its "
                        f"{journal.done.count.rows:,} rows; give files that hold text"
                    )
                journal.complete(tokenizer, begin)
        return journal.finish(), journal.done
