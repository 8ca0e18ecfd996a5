"""Text into a corpus, on as many processes as are wanted: the same bytes with any number of them.

One process cuts the inputs and writes; others make tokens of a piece each. Pieces are written in
their order, at most a few wait: memory does not grow with the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallel3d.data.indexed import token_type
from parallel3d.data.making.documents import Count, Found, documents
from parallel3d.data.making.inputs import Input, digest_of
from parallel3d.data.making.journal import FLUSHED, Journal, JournalEntry
from parallel3d.data.making.pieces import PIECE, Cut, InputShard, cut
from parallel3d.data.making.pool import Pool
from parallel3d.data.text.facts import CorpusFacts
from parallel3d.data.text.file_tokenizer import FileTokenizer, Unencodable
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.errors import UserError

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
