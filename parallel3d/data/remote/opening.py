"""The files of a pair at an address, through one cache for all of them."""

from __future__ import annotations

from pathlib import Path

from parallel3d.data.cache import unusable
from parallel3d.data.remote.blocks import BlockCache, BlockFile
from parallel3d.errors import UserError

_LARGEST = 1 << 20  # bytes of a file that is read whole


class Remote:
    """Opens files elsewhere; their blocks are kept in `folder`, at most `most` bytes of them."""

    def __init__(self, folder: Path, most: int) -> None:
        """Raises UserError for a folder that cannot hold them."""
        try:
            self._cache = BlockCache(folder, most)
        except OSError as error:
            raise unusable(folder, error.strerror or str(error)) from error

    def opened(self, address: str, named: str) -> BlockFile:
        """The file at `address`; `named` is what errors call it. Raises UserError."""
        return BlockFile(address, self._cache, named)

    def read(self, address: str) -> bytes:
        """A small file's content. Raises FileNotFoundError, and OSError or ValueError."""
        try:
            file = self.opened(address, address)
        except UserError as error:
            if isinstance(error.__context__, FileNotFoundError):
                raise FileNotFoundError(address) from None
            raise OSError(str(error)) from error
        if file.size > _LARGEST:
            raise ValueError(f"{address} has {file.size:,} bytes, more than {_LARGEST:,}")
        return file.pread(file.size, 0)
