"""Unpacks gzip, zstd, xz and bzip2 files with all their members, frames or streams."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from typing import Any, BinaryIO

TAKEN = 1 << 12  # packed bytes read at a time; zstd may unpack them to 128 MB in memory
MOST = 1 << 20  # largest number of bytes that formats other than zstd unpack at a time
PADDED = (".gz", ".xz")  # formats that allow zero bytes after a frame


class Frame:
    """A decompressor of one frame, member or stream.

    `inner` is the library's decompressor, which has `eof` and `unused_data`.
    """

    def __init__(self, packed: str) -> None:
        """Makes a decompressor for the format `packed`: ".gz", ".zst", ".xz" or ".bz2"."""
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
        """Unpacks bytes left from earlier calls, then `packed`; returns at most `most` bytes.

        zstd ignores the limit, so it leaves no bytes for the next call.
        """
        if self._packed == ".zst":
            return self.inner.decompress(packed)
        if self._packed == ".gz":
            packed = self.inner.unconsumed_tail + packed
        return self.inner.decompress(packed, most)


class UnpackedStream(io.RawIOBase):
    """A stream of the unpacked content of a file.

    Reading raises EOFError if the file ends inside a frame, and the library's error for bytes that
    are not a frame. Some of the libraries' own readers treat either as the end of the file.
    """

    def __init__(self, file: BinaryIO, packed: str) -> None:
        """Reads `file`, whose format `packed` is ".gz", ".zst", ".xz" or ".bz2"."""
        self._file = file
        self._packed = packed
        self._frame: Frame | None = None
        self._rest = b""
        self._ready = memoryview(b"")
        self._full = False  # the last call gave `MOST` bytes, so the frame may hold more

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer` as in io.RawIOBase; returns the number of bytes, which is 0 at the end."""
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
    """Unpacks `head`, the first bytes of a file, and returns at most `most` bytes.

    Returns b"" if `head` is too short to unpack anything, and `head` itself if `packed` is "",
    which means that the file is not packed. Raises the library's error for bytes that it refuses.
    """
    if not packed:
        return head
    one = Frame(packed)
    made = one.take(head, most)
    if one.inner.eof and not made and one.inner.unused_data:  # an empty frame
        return first_unpacked(packed, one.inner.unused_data, most)
    return made[:most]
