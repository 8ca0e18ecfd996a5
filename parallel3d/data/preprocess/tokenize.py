"""Processes that each do a piece of work when they have nothing to do; results come in order.

A process is sent its next piece only when it waits for one: neither side ever writes into a full
pipe whose reader writes itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from parallel3d.data.indexed import token_type
from parallel3d.data.preprocess.inputs import (
    PIECE,
    Count,
    Cut,
    Found,
    Input,
    InputShard,
    cut,
    digest_of,
    documents,
)
from parallel3d.data.preprocess.journal import FLUSHED, Journal, JournalEntry
from parallel3d.data.text_files import CorpusFacts
from parallel3d.data.tokenizer import FileTokenizer, Unencodable, open_tokenizer
from parallel3d.errors import UserError
from parallel3d.host.processes import die_with_parent

AHEAD = 2  # results for each process that wait for an earlier one
LOST = (
    "a process that makes tokens was ended from outside, perhaps as memory ran out: type the line "
    "again to go on, with fewer workers= if memory is short"
)


class Pool:
    """`workers` processes, each with a `make(*arguments)` of its own, which does the work.

    Started by spawn: forked, a library's threads could be caught holding a lock.
    """

    def __init__(self, workers: int, make: Callable[..., Callable[[Any], Any]], *arguments: Any):
        context = get_context("spawn")
        self.workers = {}
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, os.getpid(), make, arguments), daemon=True
            )
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self.workers[ours] = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self.workers.items():
            pipe.close()
            process.terminate()
            process.join()

    def in_order(self, pieces: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """(name, result) for each (name, piece of work), in their order.

        Raises UserError that a piece raised, and for a process that is gone.
        """
        idle, busy = list(self.workers), {}
        names: dict[int, Any] = {}
        results: dict[int, Any] = {}
        given = taken = 0
        more = True
        while more or taken < given:
            while more and idle and given - taken < (1 + AHEAD) * len(self.workers):
                try:
                    names[given], work = next(pieces)
                except StopIteration:
                    more = False
                    break
                pipe = idle.pop()
                busy[pipe], given = given, given + 1
                _talk(pipe.send, work)
            while taken in results:
                yield names.pop(taken), results.pop(taken)
                taken += 1
            for pipe in wait(list(busy)) if busy else ():
                result = _talk(pipe.recv)
                if isinstance(result, Exception):
                    raise result
                results[busy.pop(pipe)] = result
                idle.append(pipe)


def _talk(how: Callable[..., Any], *what: Any) -> Any:
    try:
        return how(*what)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise UserError(LOST) from None


def _serve(
    pipe: Connection, parent: int, make: Callable[..., Callable[[Any], Any]], arguments: Any
) -> None:
    """A process: it ends with its parent, whatever ends that, and leaves signals to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    failed, work = None, None
    try:
        work = make(*arguments)
    except UserError as error:
        failed = error
    while True:
        try:
            piece = pipe.recv()
        except EOFError:
            return
        try:
            result = failed or work(piece)
        except (UserError, MemoryError) as error:
            result = UserError(LOST) if isinstance(error, MemoryError) else error
        pipe.send(result)


# A tokenizer trained on text: byte-level BPE, whose only special token parts documents.
#
# Source: R. Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", ACL
# 2016; over bytes and GPT-2's words as in A. Radford et al., "Language Models are Unsupervised
# Multitask Learners", 2019, §2.2. Trained by Hugging Face's `tokenizers`, on all cores.


END = "<|endoftext|>"


def train_tokenizer(
    inputs: Sequence[Input],
    vocab_size: int,
    text_key: str,
    progress: Callable[[int, Count], None],
) -> tuple[bytes, Count]:
    """The content of a tokenizer.json of at most `vocab_size` tokens, and what it was trained on.

    `progress` is told the bytes of the inputs that are read, and what came of them. The tokenizer
    itself puts END before a prompt, as in training every text but the first follows one. Raises
    UserError for inputs that cannot be read or hold no text.
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
        for found in documents(inputs, each.piece, text_key, here):
            yield found.text
        count.add(here)
        progress(each.read, count)


# Text into a corpus, on as many processes as are wanted: the same bytes with any number of them.
#
# One process cuts the inputs and writes; others make tokens of a piece each. Pieces are written in
# their order, at most a few wait: memory does not grow with the inputs.


VERSION = 1
AT_ONCE = 256 << 10  # characters that a tokenizer is given at a time: it needs many times as much
JUDGED = 1000  # rows, before which no share of bad ones is judged


@dataclass(frozen=True)
class PreprocessJob:
    """What is to be made. bad: the largest share of rows that may hold no document.

    tokenizer: what `open_tokenizer` takes. workers: processes; 0: none but this one.
    """

    inputs: tuple[Input, ...]
    tokenizer: str
    to: Path
    text_key: str = "text"
    bad: float = 0.01
    workers: int = 1
    piece: int = PIECE
    flushed: int = FLUSHED


class Made(NamedTuple):
    """A piece's documents: tokens as the corpus stores them, lengths int32."""

    tokens: bytes
    lengths: bytes
    count: Count


class Cutter:
    """Makes tokens of pieces, in whichever process."""

    def __init__(self, job: PreprocessJob, digest: str | None = None) -> None:
        """Raises UserError if the tokenizer has not the `digest` that it had."""
        self.job = job
        self.tokenizer = open_tokenizer(job.tokenizer, "tokenizer")
        if digest not in (None, self.tokenizer.digest):
            raise UserError(f"tokenizer={job.tokenizer} was changed while it was in use")
        self.dtype = token_type(self.tokenizer.vocab_size)

    def __call__(self, piece: InputShard) -> Made:
        """The tokens of its documents, each with its end of text."""
        count, parts, lengths = Count(), [], []
        end = np.array([self.tokenizer.eot], dtype=self.dtype).tobytes()
        for some in _batches(documents(self.job.inputs, piece, self.job.text_key, count)):
            for tokens in self._encoded(some, count):
                parts += [tokens.astype(self.dtype, copy=False).tobytes(), end]
                lengths.append(tokens.size + 1)
        return Made(b"".join(parts), np.array(lengths, dtype="<i4").tobytes(), count)

    def _encoded(self, some: list[Found], count: Count) -> list[np.ndarray]:
        """The tokens of documents; one that the tokenizer breaks off on is a bad row."""
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
    """Makes the corpus, or goes on with one that was begun. `progress` is told after each piece.

    Raises UserError: inputs or a tokenizer that cannot be used, too many bad rows, a corpus that is
    there. What is done so far then stays for the next start, and so it does after a kill.
    """
    cutter = Cutter(job)
    made_of = {"version": VERSION, "tokenizer": cutter.tokenizer.digest, "text_key": job.text_key}
    made_of["input"] = digest_of(list(job.inputs))
    journal = Journal(job.to, made_of, cutter.dtype, job.flushed)
    with journal.held():
        if not journal.done.complete:
            progress(journal.done)
            pieces = cut(job.inputs, journal.done.place, job.piece)
            with _made(cutter, pieces) as made:
                for each, result in made:
                    journal.add(*result, each.after, each.read)
                    _judge(journal.done, job.bad, least=JUDGED)
                    progress(journal.done)
            _judge(journal.done, job.bad, least=1)
            if not journal.done.documents:
                raise UserError(f"input: none of its {journal.done.count.rows:,} rows has a text")
        return journal.finish(cutter.tokenizer), journal.done


def _judge(done: JournalEntry, most: float, least: int) -> None:
    """Raises UserError where more than a share `most` of at least `least` rows is bad."""
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
def _made(cutter: Cutter, pieces: Iterator[Cut]) -> Iterator[Iterator[tuple[Cut, Made]]]:
    """What becomes of the pieces, in their order, of several processes if they are wanted."""
    job = cutter.job
    if not job.workers:
        yield ((each, cutter(each.piece)) for each in pieces)
        return
    with Pool(job.workers, Cutter, job, cutter.tokenizer.digest) as pool:
        # Its content is on its way to a process: here only its place is of use any more.
        yield pool.in_order((c._replace(piece=InputShard(c.piece.number)), c.piece) for c in pieces)
