"""Checks the keys of data parallelism."""

from __future__ import annotations

from parallel3d.data_parallel.keys import DataParallelConfig
from parallel3d.errors import UserError, closest


def check_data_parallel(ddp: DataParallelConfig, *, dp: int, cp: int) -> None:
    """Raises UserError unless ddp.shard_size divides the data-parallel ranks."""
    ranks = dp * cp
    size = ddp.shard_size
    if size is not None and ranks > 1 and (size < 2 or ranks % size):
        near = closest(size, lambda n: n > 1 and ranks % n == 0, ranks) or ranks
        of = f"dp={ranks}" if cp == 1 else f"dp · cp = {ranks}"
        raise UserError(
            f"ddp.shard_size={size} must divide {of} and be at least 2; the nearest is "
            f"ddp.shard_size={near}."
        )
