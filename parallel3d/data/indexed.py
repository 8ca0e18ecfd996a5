"""Megatron's pairs of files, read and written as one stream of tokens."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from parallel3d.data.pair_index import HEADER, MAGIC, TYPES, VERSION, PairIndex, opened
from parallel3d.data.tokens import File, Tokens
from parallel3d.errors import UserError
from parallel3d.files.durable import flush_folder, no_link

_WRITTEN = 1 << 20  # numbers of an index that are made at a time


def token_type(vocab_size: int) -> np.dtype:
    """The narrowest of Megatron's types that holds the tokens 0 … `vocab_size` - 1."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


class IndexedCorpus:
    """A pair as one stream of tokens in the order of its documents, none of it resident.

    The size of both files is proved first; the rest is read when asked for.
    """

    def __init__(self, prefix: str, named: str, index: PairIndex, file: File) -> None:
        self.prefix, self.named, self.index = prefix, named, index
        self.dtype, self.documents = index.dtype, index.documents
        self.tokens = Tokens(file, 0, index.tokens, index.dtype)

    @classmethod
    def open(
        cls,
        prefix: str | os.PathLike[str],
        named: str | None = None,
        opened: Callable[[str, str], File] = opened,
    ) -> IndexedCorpus:
        """The pair at `prefix`; `named` is what its errors call it, as `data.path=corpora/web`;
        `opened` opens a file by its name.

        Takes a time and a memory that do not grow with it. Raises UserError for what is missing,
        cut short, or no pair of tokens whose index fits.
        """
        prefix = os.path.expanduser(os.fspath(prefix))
        named = named or prefix
        index = PairIndex(opened(f"{prefix}.idx", named), named)
        corpus = cls(prefix, named, index, opened(f"{prefix}.bin", named))
        corpus._prove_size()
        return corpus

    def __len__(self) -> int:
        """Tokens of the whole stream."""
        return len(self.tokens)

    @property
    def lengths(self) -> Tokens:
        """Tokens of each sequence, int32, in slices: a document is one, or (sentences) several."""
        return self.index.lengths

    def read(self, begin: int, end: int) -> npt.NDArray[np.integer]:
        """Tokens `begin` … `end` - 1 of the stream. Raises OSError if the file has them no more."""
        if not 0 <= begin <= end <= len(self):
            raise IndexError(f"tokens {begin} to {end} of {len(self)}")
        return self.tokens[begin:end]

    def starts(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens, of `begin` … `end` - 1, at which a document begins; empty documents have none.

        Raises UserError where the sequences there do not lie one after another.
        """
        found = self.index.begins_within(begin, end)
        if found.size > 1:
            kept = np.ones(found.size, np.bool_)
            np.not_equal(found[1:], found[:-1], out=kept[1:])
            found = found[kept]
        return found

    def close(self) -> None:
        """Closes both files: nothing can be read any more."""
        self.tokens.close()
        self.index.lengths.close()

    def _prove_size(self) -> None:
        """The stream is the whole .bin. Raises UserError."""
        size, needed = self.tokens.file_size(), len(self) * self.dtype.itemsize
        if size < needed:
            raise UserError(
                f"{self.named} is cut short: {self.prefix}.bin has {size:,} bytes, its index needs "
                f"{needed:,}; copy the pair again"
            )
        if size > needed or needed <= 0:
            raise self.index.damaged(f"its sequences end at byte {needed:,} of {size:,}")


class IndexedWriter:
    """Writes a pair, document after document: `close` puts it there whole; without it none is.

    Holds no memory that grows: lengths go to a file of their own until the end. As a context, a
    block that raises leaves nothing behind.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype, replace: bool = False):
        """Raises UserError if there is such a pair, or half of one, unless it is to be replaced.

        Args:
            dtype: integers that Megatron's readers know, see `token_type`; else ValueError.
        """
        self.prefix, self.dtype = os.path.expanduser(os.fspath(prefix)), np.dtype(dtype)
        if self.dtype not in TYPES.values():
            raise ValueError(f"{self.dtype} is none of {', '.join(map(str, TYPES.values()))}")
        there = [f"{self.prefix}{end}" for end in (".bin", ".idx")]
        if not replace and (old := [path for path in there if os.path.lexists(path)]):
            raise UserError(f"{old[0]} is there already: give another name, or remove the pair")
        self._digest = hashlib.blake2b(digest_size=16)
        self.documents = self.tokens = 0
        folder, name = os.path.split(self.prefix)
        self._partial = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
        self._bin = _new(f"{self._partial}.bin.partial")
        self._lengths = _new(f"{self._partial}.lengths.partial")

    @property
    def digest(self) -> str:
        """blake2b-16 of the .bin so far, in hex."""
        return self._digest.hexdigest()

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """A document. Raises ValueError for a token that the pair's type cannot hold, OSError."""
        self.add_many(tokens, np.array([tokens.size]))

    def add_many(
        self, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer] | list[int]
    ) -> None:
        """Documents of these lengths, whose tokens lie in `tokens` one after another."""
        lengths, limits = np.asarray(lengths), np.iinfo(self.dtype)
        if int(lengths.sum()) != tokens.size or (lengths.size and lengths.min() < 0):
            raise ValueError(f"lengths of {int(lengths.sum())} tokens for {tokens.size}")
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise ValueError(f"a document of {int(lengths.max()):,} tokens: Megatron's have < 2^31")
        if tokens.size and not limits.min <= int(tokens.min()) <= int(tokens.max()) <= limits.max:
            raise ValueError(f"token {int(tokens.max())} does not fit {self.dtype}")
        content = np.ascontiguousarray(tokens, self.dtype).data.cast("B")
        self._bin.write(content)
        self._digest.update(content)
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.documents += lengths.size
        self.tokens += tokens.size

    def close(self) -> None:
        """Puts the pair in its place, flushed to the disk; the index last. Raises OSError."""
        try:
            index = f"{self._partial}.idx.partial"
            self._lengths.flush()
            write_index(index, self._lengths.name, self.documents, self.dtype)
            for file in (self._bin, self._lengths):
                file.flush()
                os.fsync(file.fileno())
                file.close()
            os.replace(self._bin.name, f"{self.prefix}.bin")
            os.replace(index, f"{self.prefix}.idx")
            os.unlink(self._lengths.name)
            flush_folder(Path(self.prefix).parent)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Leaves nothing of what was added."""
        for end in (".bin", ".lengths", ".idx"):
            Path(f"{self._partial}{end}.partial").unlink(missing_ok=True)
        self._bin.close()
        self._lengths.close()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def write_index(
    path: str, lengths: str | os.PathLike[str], documents: int, dtype: np.dtype
) -> None:
    """A new index at `path`, flushed, of the documents whose lengths (int32) a file holds."""
    code = next(code for code, known in TYPES.items() if known == dtype)
    with _new(path) as index:
        index.write(HEADER.pack(MAGIC, VERSION, code, documents, documents + 1))
        for part in _read_lengths(lengths):
            index.write(part)
        byte = 0
        for part in _read_lengths(lengths):
            ends = byte + np.cumsum(np.frombuffer(part, "<i4"), dtype="<i8") * dtype.itemsize
            index.write(np.append(byte, ends[:-1]).astype("<i8").tobytes())
            byte = int(ends[-1])
        for first in range(0, documents + 1, _WRITTEN):
            last = min(first + _WRITTEN, documents + 1)
            index.write(np.arange(first, last, dtype="<i8").tobytes())
        index.flush()
        os.fsync(index.fileno())


def _read_lengths(path: str | os.PathLike[str]) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while lengths := file.read(4 * _WRITTEN):
            yield lengths


def _new(path: str) -> BinaryIO:
    """A new private file to write, which is no link. Raises OSError."""
    return open(path, "xb", buffering=1 << 20, opener=no_link)
