"""Unpacks files of gzip, zstd, xz and bzip2, whole: each member, frame or stream up to its end."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from typing import Any, BinaryIO, Protocol

TAKEN = (
    1 << 12
)  # packed bytes read at a time: all that zstd unpacks them to, at most 128 MB, is held
MOST = 1 << 20  # bytes unpacked at a time by the others
PADDED = (".gz", ".xz")  # after whose frames zeros may follow


class Frame(Protocol):
    """A decompressor of one frame, member or stream."""

    eof: bool
    unused_data: bytes

    def take(self, packed: bytes, most: int) -> bytes: ...


class _Zlib:
    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def take(self, packed: bytes, most: int) -> bytes:
        """Unpacks what was kept of earlier bytes and then `packed`, to at most `most` bytes."""
        return self._inner.decompress(self._inner.unconsumed_tail + packed, most)


class _Bounded:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def take(self, packed: bytes, most: int) -> bytes:
        """Unpacks what was kept of earlier bytes and then `packed`, to at most `most` bytes."""
        return self._inner.decompress(packed, most)


class _Zstd:
    """The library's object has no bound: what few packed bytes unpack to is held."""

    def __init__(self) -> None:
        import zstandard

        # Frames of `zstd --long=31`, as public dumps have them, need 2 GiB; others what they say.
        self._inner = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def take(self, packed: bytes, most: int) -> bytes:
        """Unpacks `packed`."""
        return self._inner.decompress(packed)


def frame(packed: str) -> Frame:
    """Returns a decompressor of one frame."""
    if packed == ".gz":
        return _Zlib()
    if packed == ".zst":
        return _Zstd()
    if packed == ".xz":
        return _Bounded(lzma.LZMADecompressor())
    assert packed == ".bz2", packed
    return _Bounded(bz2.BZ2Decompressor())


class Unpacked(io.RawIOBase):
    """The content of a packed file. Raises EOFError where the file ends inside a frame, and what
    the libraries raise for bytes that are no frame: their own readers take both for the end."""

    def __init__(self, file: BinaryIO, packed: str) -> None:
        """`packed`: ".gz", ".zst", ".xz" or ".bz2"."""
        self._file, self._packed = file, packed
        self._frame: Frame | None = None
        self._rest, self._ready = b"", memoryview(b"")
        self._full = False  # the last call gave as much as it may, so the frame may hold more

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads as io.RawIOBase does; 0 at the end."""
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
                self._frame = frame(self._packed)
            made = self._frame.take(packed, MOST)
            self._ready, self._full = memoryview(made), len(made) >= MOST
            if self._frame.eof:
                self._rest, self._frame, self._full = self._frame.unused_data, None, False
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def first_unpacked(packed: str, head: bytes, most: int) -> bytes:
    """Returns the beginning of what the first bytes `head` of a file unpack to, at most `most`
    bytes; b"" where that needs more of them. `packed`: "" for a file that is not. Raises what the
    libraries raise."""
    if not packed:
        return head
    one = frame(packed)
    made = one.take(head, most)
    if one.eof and not made and one.unused_data:  # a frame without content
        return first_unpacked(packed, one.unused_data, most)
    return made[:most]
