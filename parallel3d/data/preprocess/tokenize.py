"""Trains tokenizers, and tokenizes text into corpora by several processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from parallel3d.data.indexed import token_type
from parallel3d.data.preprocess.inputs import (
    SHARD_BYTES,
    Count,
    Cut,
    Found,
    Input,
    InputShard,
    cut,
    digest_of,
    documents,
)
from parallel3d.data.preprocess.journal import FLUSH_BYTES, Journal, JournalEntry
from parallel3d.data.text_files import CorpusFacts
from parallel3d.data.tokenizer import FileTokenizer, Unencodable, open_tokenizer
from parallel3d.errors import UserError
from parallel3d.host.processes import die_with_parent

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


END = "<|endoftext|>"


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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
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
    end = inner.token_to_id(END)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, end)]
    )
    return _with_newline(inner), count


def _with_newline(inner: Any) -> bytes:
    return f"{inner.to_str(pretty=True)}\n".encode()


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
