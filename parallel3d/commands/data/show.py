"""Runs `parallel3d data show`: prints a corpus, and checks every byte of it."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from parallel3d.commands.data.preprocess import BytesBar
from parallel3d.data.indexed import CorpusFacts, IndexedCorpus, facts_beside, tokenizer_beside
from parallel3d.data.tokenizer import Tokenizer, open_tokenizer
from parallel3d.errors import UserError, print_line
from parallel3d.files import plain

DAMAGED = 1  # the exit code
READ = 1 << 20  # tokens, or lengths, at a time
SHOWN = 200  # characters of a document
BARS = 40  # characters


def show(prefix: str, given: str | None, documents: int) -> int:
    """Prints the corpus at `prefix`; `given`: a tokenizer to use instead of the corpus's own.

    Returns the exit code, 1 for a damaged corpus. Raises UserError for an invalid one.
    """
    prefix = os.path.expanduser(prefix)
    corpus, facts = IndexedCorpus.open(prefix), facts_beside(prefix)
    tokenizer = _tokenizer(prefix, given, facts)
    corpus.index.check_all()
    lengths, counts = length_counts(_lengths(corpus))
    _print(f"{prefix}: {corpus.documents:,} documents, {len(corpus):,} tokens, {corpus.dtype}")
    if tokenizer is not None:
        sizes = f"{tokenizer.vocab_size:,} tokens, {tokenizer.eot} ends a document"
        _print(f"tokenizer: {tokenizer.name}, {sizes}")
    for line in _statistics(lengths, counts):
        _print(line)
    _print("")
    for line in histogram(lengths, counts):
        _print(line)
    if tokenizer is None:
        print_line("no tokenizer lies beside it: give tokenizer=… to see text")
    else:
        for number in range(min(documents, corpus.documents)):
            _print("")
            _print(f"document {number}: {_text(corpus, tokenizer, number)}")
    return _proved(corpus, facts, tokenizer)


def _tokenizer(prefix: str, given: str | None, facts: CorpusFacts | None) -> Tokenizer | None:
    if given is not None:
        tokenizer = open_tokenizer(given, "tokenizer")
        if facts is not None and tokenizer.digest != facts.tokenizer:
            raise UserError(
                f"tokenizer={given} is not the one that {prefix} was made with: leave it out, that "
                "one lies beside the corpus"
            )
        return tokenizer
    return None if facts is None else open_tokenizer(tokenizer_beside(prefix, facts), "tokenizer")


def length_counts(
    parts: Iterable[npt.NDArray[np.integer]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns each length that occurs, ascending, and its count; memory grows with neither n."""
    values, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for part in parts:
        more, times = np.unique(part, return_counts=True)
        both, places = np.unique(np.concatenate([values, more]), return_inverse=True)
        totals = np.zeros(len(both), np.int64)
        np.add.at(totals, places, np.concatenate([counts, times]))
        values, counts = both.astype(np.int64), totals
    return values, counts


def _lengths(corpus: IndexedCorpus) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the documents' lengths, a part at a time."""
    for first in range(0, corpus.documents, READ):
        last = min(first + READ, corpus.documents)
        yield np.diff(corpus.index.begins(first, last))


def _statistics(lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Iterator[str]:
    ends = np.cumsum(counts)
    if not len(lengths):
        return
    number = int(ends[-1])

    def at(share: float) -> int:
        return int(lengths[np.searchsorted(ends, share * (number - 1), side="right")])

    mean = float((lengths * counts).sum()) / number
    yield (
        f"tokens a document: least {lengths[0]:,}, median {at(0.5):,}, mean {mean:,.1f}, "
        f"90 % {at(0.9):,}, 99 % {at(0.99):,}, most {lengths[-1]:,}"
    )


def histogram(lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> list[str]:
    """Returns a line for each power of two of lengths: documents, and their share of the tokens."""
    kinds = np.array([int(length).bit_length() for length in lengths], dtype=np.int64)
    tokens = int((lengths * counts).sum())
    rows = []
    for kind in range(int(kinds.min(initial=64)), int(kinds.max(initial=-1)) + 1):
        here = kinds == kind
        rows.append((kind, int(counts[here].sum()), int((lengths[here] * counts[here]).sum())))
    most = max((row[1] for row in rows), default=1) or 1
    lines = [f"{'tokens':>21}  {'documents':>13}  of all tokens"] if rows else []
    for kind, documents, there in rows:
        low, high = (1 << kind - 1, (1 << kind) - 1) if kind else (0, 0)
        bar = "█" * -(-documents * BARS // most)
        share = f"{there / max(1, tokens):6.1%}"
        lines.append(f"{low:>10,}–{high:<10,}  {documents:>13,}  {share}  {bar}".rstrip())
    return lines


def _text(corpus: IndexedCorpus, tokenizer: Tokenizer, number: int) -> str:
    """Returns the beginning of a document, on one line."""
    begin, end = corpus.index.begins(number, number + 1).tolist()
    # A character of real text is at most four tokens.
    text = tokenizer.decode(corpus.read(begin, min(end, begin + 4 * SHOWN)))
    return plain(text[:SHOWN]) + ("…" if len(text) > SHOWN else "")


def _proved(corpus: IndexedCorpus, facts: CorpusFacts | None, tokenizer: Tokenizer | None) -> int:
    """Reads every token and prints whether the bytes are as written. Returns the exit code."""
    digest, largest = hashlib.blake2b(digest_size=16), -1
    width = corpus.dtype.itemsize
    with BytesBar("prove", len(corpus) * width) as bar:
        for begin in range(0, len(corpus), READ):
            tokens = corpus.read(begin, min(begin + READ, len(corpus)))
            digest.update(tokens.data)
            largest = max(largest, int(tokens.max()))
            bar.update((begin + len(tokens)) * width, f"{begin + len(tokens):,} tokens")
    _print("")
    made = digest.hexdigest()
    if tokenizer is not None and largest >= tokenizer.vocab_size:
        _print(f"DAMAGED: it holds token {largest}, the tokenizer has {tokenizer.vocab_size}")
        return DAMAGED
    if facts is None:
        _print(
            f"digest {made}: made elsewhere, nothing to prove it by; its largest token is {largest}"
        )
        return 0
    if (made, corpus.documents, len(corpus)) != (facts.digest, facts.documents, facts.tokens):
        _print(f"DAMAGED: its digest is {made}, it was made with {facts.digest}")
        return DAMAGED
    _print(f"proved: every byte is as it was made (digest {made})")
    return 0


def _print(line: str) -> None:
    """Prints a line, cut to a terminal's width."""
    width = shutil.get_terminal_size((100, 40)).columns if sys.stdout.isatty() else None
    print(line[:width])
