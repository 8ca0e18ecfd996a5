"""Reads and writes Megatron's indexed datasets.

`<prefix>.bin` has the tokens, and `<prefix>.idx` the starts of documents.

    .idx, little-endian: "MMIDIDX\0\0" | u64 version 1 | u8 type code | u64 number of sequences
        | u64 number of documents + 1 | i32 number of tokens of each sequence
        | i64 first byte of each sequence in .bin
        | i64 first sequence of each document, then the number of sequences
    .bin: the tokens of the sequences

Source: Megatron-Core, core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.data.tokens import File, LocalFile, Tokens, pread, size_of
from parallel3d.errors import UserError
from parallel3d.files import flush_folder, no_link, parse_json, plain, read_bounded

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Numpy's dtypes by Megatron's type codes; codes of floats are left out.
TYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}

_SAMPLED = 4  # number of places of an index that are checked when it is opened
_RUN = 256  # number of documents at each place
_FEW = 4096  # an index with at most this many documents is checked as a whole
_AT_A_TIME = 1 << 16
_AROUND = 64  # number of documents that one step of a search reads


def opened(path: str, named: str) -> FileIO:
    """Opens the regular file at `path` to read, unbuffered; errors call the dataset `named`.

    Raises UserError.
    """
    try:
        file = LocalFile(path, opener=_no_wait)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{named} does not exist (there is no {path}): give the prefix of an indexed "
            "dataset, its name without .bin and .idx"
        ) from None
    except OSError as error:
        raise UserError(
            f"{named} cannot be read ({path}: {error.strerror}): check the dataset's permissions"
        ) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UserError(f"{named} cannot be read ({path} is not a regular file): give a dataset")
    return file


def _no_wait(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


class IndexedCorpus:
    """An indexed dataset as one stream of tokens in document order, which is read on demand.

    The files are not mapped into memory, because mapped pages that were read would count as this
    process's memory. A corpus may be pickled: the other process opens the files again. `lengths`
    has the number of tokens of each sequence; a document has one or several sequences.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        named: str | None = None,
        opened: Callable[[str, str], File] = opened,
    ) -> None:
        """Opens the dataset at `prefix`, and checks it in time and memory that do not grow with it.

        Checks the header, the files' sizes, and the documents: all of a small index, and some
        evenly spaced ones of a larger one. Raises UserError for a file that is missing, cut short
        or not of an indexed dataset of tokens, and for an index that does not fit the .bin.

        Args:
            named: the dataset's name in errors, such as `data.path=corpora/web`; by default, the
                prefix.
            opened: opens a file, given its path and the dataset's name in errors.
        """
        self.prefix = prefix = os.path.expanduser(os.fspath(prefix))
        self.named = named = named or prefix
        index, file = (opened(f"{prefix}{end}", named) for end in (".idx", ".bin"))
        self.index = index
        self.dtype, self.sequences, self.documents = _header(index, named)
        pointers_at = HEADER.size + 4 * self.sequences
        documents_at = pointers_at + 8 * self.sequences
        self.lengths = Tokens(index, HEADER.size, self.sequences, np.dtype("<i4"))
        self._pointers = Tokens(index, pointers_at, self.sequences, np.dtype("<i8"))
        self._firsts = Tokens(index, documents_at, self.documents + 1, np.dtype("<i8"))
        more = _bytes_beyond(index, documents_at + 8 * (self.documents + 1), named)
        if more:
            raise UserError(
                f"{named} cannot be read, because {index.name} has {more:,} bytes more than an "
                "index of text: indexed datasets with modes (images) are not supported"
            )
        last = int(self._pointers[self.sequences - 1 :][0]) // self.dtype.itemsize
        self._count = last + int(self.lengths[self.sequences - 1 :][0])
        ends = int(self._firsts[:1][0]), int(self._firsts[self.documents :][0])
        if ends != (0, self.sequences):
            raise self.damaged(
                f"its documents span sequences {ends[0]} to {ends[1]}, not 0 to {self.sequences}"
            )
        if first := int(self._pointers[:1][0]):
            raise self.damaged(f"its first sequence begins at byte {first:,} instead of 0")
        self.tokens = Tokens(file, 0, self._count, self.dtype)
        for begin, end in _runs(self.documents):
            self.begins(begin, end)
        needed = self._count * self.dtype.itemsize
        if _bytes_beyond(file, needed, named) or needed <= 0:
            raise self.damaged(f"its sequences end at byte {needed:,} of {size_of(file):,}")

    def __len__(self) -> int:
        """Returns the number of tokens of the whole stream."""
        return self._count

    def starts(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Returns the positions from `begin` up to `end` at which a non-empty document begins.

        Raises UserError if the sequences there do not follow one another.
        """
        first, begins = self._around(begin)
        while begins[-1] < end:
            last = first + begins.size - 1
            more = self.begins(last, min(last + begins.size, self.documents))
            begins = np.append(begins, more[1:])
        return np.unique(begins[slice(*begins.searchsorted((begin, end)))])

    def document_from(self, token: int) -> int:
        """Returns the first document that begins at `token` or later; `documents` if none does."""
        first, begins = self._around(token)
        return first + int(begins.searchsorted(token))

    def begins(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Returns the position at which each of the documents `first` … `last` begins.

        `last` may be the number of documents, whose position is the end of the stream. Raises
        UserError if the sequences of the documents do not follow one another.
        """
        sequences = self._firsts[first : last + 1]
        begin, end = int(sequences[0]), int(sequences[-1])
        if not 0 <= begin <= end <= self.sequences or (sequences[1:] < sequences[:-1]).any():
            raise self.damaged(
                f"documents {first:,} to {last:,} are not in the order of their sequences"
            )
        pointers = self._pointers[begin : end + 1].astype(np.int64, copy=False)
        if end == self.sequences:  # the end of the .bin has no pointer
            pointers = np.append(pointers, self._count * self.dtype.itemsize)
        lengths = self.lengths[begin:end].astype(np.int64)
        ends = pointers[:-1] + lengths * self.dtype.itemsize
        wrong = (ends != pointers[1:]) | (lengths < 0)
        if wrong.any():
            odd = int(wrong.argmax())
            raise self.damaged(
                f"sequence {begin + odd:,} has {int(lengths[odd]):,} tokens and ends at byte "
                f"{int(ends[odd]):,}, but the next begins at byte {int(pointers[odd + 1]):,}"
            )
        return pointers[sequences - begin] // self.dtype.itemsize

    def check_all(self) -> None:
        """Raises UserError if any sequence or document does not follow the previous one."""
        for first in range(0, self.documents, _AT_A_TIME):
            self.begins(first, min(first + _AT_A_TIME, self.documents))

    def _around(self, token: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Returns a document, and the starts of some documents from this one on.

        Among them is the first start at `token` or later. The search interpolates with the mean
        length, and bisects in every third step, because one document may be most of the text.
        """
        low = 0
        high = self.documents
        tries = 0
        guess = token * self.documents // self._count
        while True:
            first = max(low, min(guess - _AROUND // 2, high - _AROUND))
            last = min(first + _AROUND, high)
            begins = self.begins(first, last)
            if begins[0] >= token and first > low:
                high = edge = first
                missed = token - int(begins[0])
            elif begins[-1] < token and last < high:
                low = edge = last
                missed = token - int(begins[-1])
            else:
                return first, begins
            tries += 1
            guess = edge + missed * self.documents // self._count
            if tries % 3 == 2:
                guess = (low + high) // 2

    def damaged(self, what: str) -> UserError:
        return UserError(
            f"{self.named} cannot be read, because {self.index.name} does not match its .bin: "
            f"{what}; make the dataset again"
        )


def _header(file: File, named: str) -> tuple[np.dtype, int, int]:
    """Returns the dtype of the tokens, and the numbers of sequences and documents.

    Raises UserError.
    """
    head = pread(file, HEADER.size, 0)
    if not head.startswith(MAGIC):
        raise UserError(f"{named} is not a Megatron indexed dataset: bad magic in {file.name}")
    _bytes_beyond(file, HEADER.size, named)
    _, version, code, sequences, ends = HEADER.unpack(head)
    if version != VERSION:
        raise UserError(f"{named} has an index of version {version}: it must be {VERSION}")
    if code not in TYPES:
        raise UserError(
            f"{named} holds no tokens: its type code {code} is not one of Megatron's integer types"
        )
    if not sequences or ends < 2:
        raise UserError(f"{named} holds no documents: give an indexed dataset that holds text")
    return TYPES[code], sequences, ends - 1


def _bytes_beyond(file: File, needed: int, named: str) -> int:
    """Returns how many more bytes than needed a file has. Raises UserError if it has fewer."""
    size = size_of(file)
    if size < needed:
        raise UserError(
            f"{named} is cut short: {file.name} has {size:,} bytes but needs {needed:,}; copy the "
            "dataset again"
        )
    return size - needed


def _runs(count: int) -> list[tuple[int, int]]:
    """Returns the begins and ends of evenly spaced runs among `count` items.

    A single run has all items if they are few.
    """
    if count <= _FEW:
        return [(0, count)]
    begins = [i * (count - _RUN) // (_SAMPLED - 1) for i in range(_SAMPLED)]
    return [(begin, begin + _RUN) for begin in begins]


# Writing


_BLOCK = 1 << 20  # bytes, or numbers of an index, that are read or written at a time


def token_type(vocab_size: int) -> np.dtype:
    """Returns the narrowest of Megatron's types that holds the tokens 0 … `vocab_size` - 1."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


class IndexedWriter:
    """Writes an indexed dataset, document after document; `close` moves it into place.

    The dataset replaces an older one. Memory does not grow with the dataset, because lengths go to
    a temporary file. A `with` block that raises leaves no files.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: np.dtype,
        partial: str | os.PathLike[str] | None = None,
        documents: int = 0,
        tokens: int = 0,
    ) -> None:
        """Begins the dataset at `prefix`, or continues an earlier writer's temporary files.

        Raises UserError for temporary files that are too short, and ValueError for a `dtype` that
        is not one of Megatron's integers (see `token_type`).

        Args:
            partial: prefix of the temporary files, or None for a random one next to the dataset.
            documents, tokens: the numbers that the earlier writer flushed.
        """
        self.prefix = os.path.expanduser(os.fspath(prefix))
        self.dtype = np.dtype(dtype)
        if self.dtype not in TYPES.values():
            raise ValueError(f"{self.dtype} is not one of {', '.join(map(str, TYPES.values()))}")
        self.documents = documents
        self.tokens = tokens
        folder, name = os.path.split(self.prefix)
        self._partial = os.fspath(partial or Path(folder, f".{name}.{secrets.token_hex(4)}"))
        self._bin = _begun(f"{self._partial}.bin.partial", tokens * self.dtype.itemsize)
        self._lengths = _begun(f"{self._partial}.lengths.partial", documents * 4)
        self._digest = hashlib.blake2b(digest_size=16)
        for part in _blocks_of(self._bin.name):
            self._digest.update(part)

    @property
    def digest(self) -> str:
        """The 16-byte blake2b digest of the .bin so far, in hex."""
        return self._digest.hexdigest()

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """Adds a document. Raises OSError, and ValueError for a token that `dtype` cannot hold."""
        self.add_many(tokens, np.array([tokens.size]))

    def add_many(
        self, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer] | list[int]
    ) -> None:
        """Adds documents of the given lengths, whose tokens follow one another in `tokens`."""
        lengths, limits = np.asarray(lengths), np.iinfo(self.dtype)
        if int(lengths.sum()) != tokens.size or (lengths.size and lengths.min() < 0):
            raise ValueError(
                f"lengths must be at least 0 and add up to {tokens.size} tokens, but add up to "
                f"{int(lengths.sum())}"
            )
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise ValueError(
                f"a document must have fewer than 2^31 tokens, but has {int(lengths.max()):,}"
            )
        if tokens.size and not limits.min <= int(tokens.min()) <= int(tokens.max()) <= limits.max:
            raise ValueError(
                f"tokens must be from {limits.min} to {limits.max}, but are from "
                f"{int(tokens.min())} to {int(tokens.max())}"
            )
        content = np.ascontiguousarray(tokens, self.dtype).data.cast("B")
        self._bin.write(content)
        self._digest.update(content)
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.documents += lengths.size
        self.tokens += tokens.size

    def flush(self) -> None:
        """Flushes added documents to the disk. Raises OSError."""
        for file in (self._bin, self._lengths):
            file.flush()
            os.fsync(file.fileno())

    def write_index(self) -> None:
        """Writes and flushes the index of the flushed documents."""
        path, lengths = Path(f"{self._partial}.idx.partial"), self._lengths.name
        path.unlink(missing_ok=True)
        code = next(code for code, known in TYPES.items() if known == self.dtype)
        with open(path, "xb", buffering=_BLOCK, opener=no_link) as index:
            ends = self.documents + 1
            index.write(HEADER.pack(MAGIC, VERSION, code, self.documents, ends))
            for part in _blocks_of(lengths):
                index.write(part)
            byte = 0
            for part in _blocks_of(lengths):
                sizes = np.frombuffer(part, "<i4").astype("<i8") * self.dtype.itemsize
                begins = byte + np.cumsum(sizes) - sizes
                index.write(begins.tobytes())
                byte = int(begins[-1] + sizes[-1])
            for first in range(0, ends, _BLOCK):
                index.write(np.arange(first, min(first + _BLOCK, ends), dtype="<i8").tobytes())
            index.flush()
            os.fsync(index.fileno())

    def close(self) -> None:
        """Flushes the dataset to the disk and renames it, the index last. Raises OSError."""
        try:
            self.flush()
            self.write_index()
            for end in (".bin", ".idx"):
                os.replace(f"{self._partial}{end}.partial", f"{self.prefix}{end}")
            flush_folder(Path(self.prefix).parent)
        finally:
            self.discard()

    def discard(self) -> None:
        """Removes all written files that are not in their final places."""
        for end in (".bin", ".lengths", ".idx"):
            Path(f"{self._partial}{end}.partial").unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Closes the temporary files, which stay for a later writer. Raises OSError."""
        self._bin.close()
        self._lengths.close()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _blocks_of(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _begun(path: str, size: int) -> BinaryIO:
    """Opens a private file, which must not be a link, to append after its first `size` bytes.

    Raises OSError, and UserError for a shorter file.
    """
    file = open(path, "ab", buffering=_BLOCK, opener=no_link)  # noqa: SIM115  the caller closes it
    if os.fstat(file.fileno()).st_size < size:
        file.close()
        raise UserError(f"{path} was cut short: remove it and start over")
    file.truncate(size)
    return file


# Files of a corpus: `<prefix>.json` and the tokenizer's files, `<prefix>.tokenizer/`


_LARGEST_FACTS = 1 << 20  # bytes


class CorpusFacts(NamedTuple):
    """The facts in a corpus's `<prefix>.json`.

    Attributes:
        tokenizer: the tokenizer's digest; "byte" for bytes.
        tokenizer_file: path of the tokenizer.json, relative to the corpus; None for bytes.
        digest: the 16-byte blake2b digest of the .bin, in hex.
        begin: the tokens with which each document begins; empty if they are not recorded.
    """

    tokenizer: str
    tokenizer_file: str | None
    vocab_size: int
    eot: int
    documents: int
    tokens: int
    digest: str
    begin: tuple[int, ...] = ()


def facts_beside(
    prefix: str | os.PathLike[str], read: Callable[[str], bytes] | None = None
) -> CorpusFacts | None:
    """Reads `<prefix>.json`; returns None if it is missing, as for datasets of other programs.

    `read` returns the content of a remote file by its name, and raises OSError or ValueError; None
    stands for local files. Raises UserError.
    """
    path = f"{os.fspath(prefix)}.json"
    try:
        content = parse_json(read(path) if read else read_bounded(Path(path), _LARGEST_FACTS))
        named = [name for name in CorpusFacts._fields if name != "begin"]
        begin = tuple(content.get("begin", ()))
        facts = CorpusFacts(**{name: content[name] for name in named}, begin=begin)
        texts = (facts.tokenizer, facts.tokenizer_file or "", facts.digest)
        numbers = (facts.vocab_size, facts.eot, facts.documents, facts.tokens)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("it has no digests")
        if not all(type(number) is int and number >= 0 for number in (*numbers, *begin)):
            raise ValueError("it has no counts")
        beside = Path(facts.tokenizer_file or "")
        if beside.is_absolute() or ".." in beside.parts:
            raise ValueError("its tokenizer is not next to it")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({plain(str(error))}): tokenize the corpus again"
        ) from None
    return facts


def tokenizer_beside(prefix: str | os.PathLike[str], facts: CorpusFacts) -> str:
    """Returns the name under which `open_tokenizer` opens the corpus's tokenizer."""
    if facts.tokenizer_file is None:
        return "byte"
    return str(Path(os.fspath(prefix)).parent / facts.tokenizer_file)
