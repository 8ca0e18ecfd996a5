"""Input files as streams of bytes, unpacked on the way; one that was cut short is an error."""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Iterator
from typing import Any, BinaryIO

import fsspec

from parallel3d.data.making.inputs import Input

TAKEN = 1 << 12  # packed bytes at a time: what they unpack to, 128 MB at most, is held at once


@contextlib.contextmanager
def opened(source: Input) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The unpacked content of a file, and the file itself, whose position tells the progress."""
    files, path = fsspec.core.url_to_fs(source.address)
    with files.open(path, "rb") as file:
        if source.packed == ".gz":
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked, file
        elif source.packed == ".zst":
            yield io.BufferedReader(Unpacked(file), 1 << 20), file
        else:
            yield file, file


class Unpacked(io.RawIOBase):
    """A zstd file's content. Raises EOFError where the file ends inside a frame.

    The library's own reader takes a file that was cut short for a whole one.
    """

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file, self._zstandard = file, zstandard
        self._frame: Any = None
        self._rest, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase has it; 0 at the end."""
        while not self._ready:
            packed = self._rest or self._file.read(TAKEN)
            self._rest = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("it was cut short: its last zstd frame has no end")
                return 0
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(packed))
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
