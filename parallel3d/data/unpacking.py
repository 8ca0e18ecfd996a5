"""Unpacks files of gzip, zstd, xz and bzip2, whole: each member, frame or stream up to its end."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from typing import Any, BinaryIO

TAKEN = 1 << 12  # packed bytes read at a time; zstd may unpack them to 128 MB, held in memory
MOST = 1 << 20  # bytes unpacked at a time by the other formats
PADDED = (".gz", ".xz")  # formats that allow zeros after a frame


class Frame:
    """A decompressor of one frame, member or stream.

    `inner` is the library's object, with `eof` and `unused_data`.
    """

    def __init__(self, packed: str) -> None:
        """`packed`: ".gz", ".zst", ".xz" or ".bz2"."""
        self._packed = packed
        self.inner: Any
        if packed == ".gz":
            self.inner = zlib.decompressobj(wbits=31)
        elif packed == ".xz":
            self.inner = lzma.LZMADecompressor()
        elif packed == ".bz2":
            self.inner = bz2.BZ2Decompressor()
        else:
            import zstandard

            # Frames of `zstd --long=31`, found in public dumps, need 2 GiB; others declare less.
            self.inner = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    def take(self, packed: bytes, most: int) -> bytes:
        """Unpacks bytes kept from earlier calls and then `packed`, to at most `most` bytes.

        The limit does not hold for zstd, which keeps no bytes.
        """
        if self._packed == ".zst":
            return self.inner.decompress(packed)
        if self._packed == ".gz":
            packed = self.inner.unconsumed_tail + packed
        return self.inner.decompress(packed, most)


class Unpacked(io.RawIOBase):
    """The content of a packed file.

    Raises EOFError if the file ends inside a frame, and the library's error for bytes that are not
    a frame; the libraries' own readers take both for the end of the file.
    """

    def __init__(self, file: BinaryIO, packed: str) -> None:
        """`packed`: ".gz", ".zst", ".xz" or ".bz2"."""
        self._file = file
        self._packed = packed
        self._frame: Frame | None = None
        self._rest = b""
        self._ready = memoryview(b"")
        self._full = False  # the last call gave `MOST` bytes, so the frame may hold more

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads like io.RawIOBase; returns 0 at the end."""
        while not self._ready:
            packed = b"" if self._full else self._rest or self._file.read(TAKEN)
            self._rest = b""
            if not packed and not self._full:
                if self._frame is not None:
                    raise EOFError(f"it was cut short: its last {self._packed} frame has no end")
                return 0
            if self._frame is None:
                if self._packed in PADDED and not (packed := packed.lstrip(b"\0")):
                    continue
                self._frame = Frame(self._packed)
            made = self._frame.take(packed, MOST)
            self._ready = memoryview(made)
            self._full = len(made) >= MOST
            if self._frame.inner.eof:
                self._rest = self._frame.inner.unused_data
                self._frame = None
                self._full = False
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def first_unpacked(packed: str, head: bytes, most: int) -> bytes:
    """Unpacks the first bytes `head` of a file to at most `most` bytes; b"" if it needs more bytes.

    `packed` is "" for a file that is not packed. Raises the error of the library.
    """
    if not packed:
        return head
    one = Frame(packed)
    made = one.take(head, most)
    if one.inner.eof and not made and one.inner.unused_data:  # an empty frame
        return first_unpacked(packed, one.inner.unused_data, most)
    return made[:most]
