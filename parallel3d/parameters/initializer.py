"""Creates parameters with initial values that do not depend on the layout."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from parallel3d.device import accelerator
from parallel3d.host.quotas import available_cores
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from parallel3d.parameters.state import state_of

if TYPE_CHECKING:
    from parallel3d.parameters.declaration import Drawn

TILE = 256  # side of the square tiles in which random matrices are drawn
# number of elements drawn at a time: 64 MiB of host memory, enough for a transfer at full speed
BAND = 1 << 24


@dataclass(frozen=True)
class Initializer:
    """Creates parameters whose values depend on (seed, name, index) alone, not on the layout.

    A matrix is drawn in tiles of 256 × 256, each from a counter-based stream (Philox, Salmon et al.
    2011) keyed by (seed, name, tile). `drawing_threads` threads draw the tiles of one band at a
    time; a band of at most `BAND` elements bounds the extra memory.

    With `deferred`, parameters have their shape and dtype but only one element of memory. The
    data-parallel engine later calls `values` or `fill_rows`, for one parameter at a time.
    """

    seed: int
    dtype: torch.dtype
    device: torch.device
    deferred: bool = False

    def parameter(self, spec: ParameterSpec) -> nn.Parameter:
        if self.deferred:
            local = torch.zeros((), dtype=self.dtype, device=self.device).expand(spec.shape)
        else:
            local = self.values(spec)
        parameter = nn.Parameter(local)
        state_of(parameter).spec = spec
        return parameter

    def values(self, spec: ParameterSpec) -> Tensor:
        local = torch.empty(spec.shape, dtype=self.dtype, device=self.device)
        if self.device.type != "meta":
            self.fill_rows(spec, 0, local)
        return local

    def fill_rows(self, spec: ParameterSpec, first: int, out: Tensor) -> None:
        """Writes the initial values of a local parameter's rows from `first` on into `out`."""
        out.zero_()  # rows outside all shards are padding
        end = first + out.shape[0]
        for shard in spec.shards:
            top, bottom = max(first, shard.row), min(end, shard.row + shard.shape[0])
            if top < bottom:
                start = (shard.start[0] + top - shard.row, *shard.start[1:])
                inside = replace(shard, start=start, shape=(bottom - top, *shard.shape[1:]))
                self.fill(inside, out[top - first : bottom - first])

    def fill(self, shard: ShardSpec, out: Tensor) -> None:
        """Writes the initial values of a shard into `out`, a tensor of its shape."""
        if not accelerator.has_values(out.device):
            return
        if shard.std == 0.0 and shard.drawn is None:
            out.fill_(shard.fill)
            return
        if len(shard.shape) == 1:  # a vector is drawn as one row
            shard = replace(shard, start=(0, *shard.start), shape=(1, *shard.shape))
            out = out.unsqueeze(0)
        row0, (rows, cols) = shard.start[0], shard.shape
        # The number of rows in a band is a multiple of that in a tile.
        height = max(1, BAND // (TILE * cols)) * TILE
        for i in range(row0 // TILE * TILE, row0 + rows, height):
            top, bottom = max(row0, i), min(row0 + rows, i + height)
            # A whole band is copied at once, because each copy to a GPU blocks the host.
            out[top - row0 : bottom - row0] = torch.from_numpy(self._band(shard, top, bottom))

    def _band(self, shard: ShardSpec, top: int, bottom: int) -> np.ndarray:
        """Returns rows [top, bottom) of the full matrix in the shard's columns, in float32."""
        left, cols = shard.start[1], shard.shape[1]
        band = np.empty((bottom - top, cols), dtype=np.float32)

        def draw(tile: tuple[int, int]) -> None:
            i, j = tile
            up, down = max(top, i * TILE), min(bottom, (i + 1) * TILE)
            west, east = max(left, j * TILE), min(left + cols, (j + 1) * TILE)
            values = self._tile(shard, i, j, rows=down - i * TILE)
            inside = values[up - i * TILE : down - i * TILE, west - j * TILE : east - j * TILE]
            out = band[up - top : down - top, west - left : east - left]
            np.multiply(inside, np.float32(1.0 if shard.drawn else shard.std), out=out)

        down = range(top // TILE, (bottom - 1) // TILE + 1)
        across = range(left // TILE, (left + cols - 1) // TILE + 1)
        tiles = [(i, j) for i in down for j in across]
        threads = min(drawing_threads(self.device), len(tiles))
        if threads == 1:
            for tile in tiles:
                draw(tile)
        else:  # NumPy releases the GIL while it draws
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(draw, tiles))
        return band

    def _tile(self, shard: ShardSpec, i: int, j: int, rows: int) -> np.ndarray:
        """Returns the first rows of a tile, in float32 for all dtypes.

        The values are standard normal, or those that `shard.drawn` says. Rows are drawn in order,
        so `rows` changes no value.
        """
        site = f"{self.seed}/{shard.name}/{i}/{j}".encode()
        key = np.frombuffer(hashlib.blake2b(site, digest_size=16).digest(), dtype=np.uint64)
        stream = np.random.Generator(np.random.Philox(key=key))
        if shard.drawn is None:
            return stream.standard_normal((rows, TILE), dtype=np.float32)
        return between(shard.drawn, stream.random((rows, TILE)))


def between(drawn: Drawn, uniform: np.ndarray) -> np.ndarray:
    """Maps uniform numbers in [0, 1) to initial values, in float32."""
    low, high = drawn.low, drawn.high
    uniform = 1.0 - uniform  # in (0, 1], so that no logarithm is infinite if `low` is 0
    if drawn.value == "log":
        return np.log(low + (high - low) * uniform).astype(np.float32)
    softplus = low * (high / low) ** uniform
    return np.log(np.expm1(softplus)).astype(np.float32)


def drawing_threads(device: torch.device) -> int:
    """Returns the number of threads on which a rank on `device` draws its parameters.

    This is torch's number of threads, but on an accelerator at least the rank's share of the cores,
    because torchrun sets OMP_NUM_THREADS=1 and one thread takes minutes for an 8B model.
    """
    threads = torch.get_num_threads()
    if not accelerator.is_accelerator(device) or "LOCAL_WORLD_SIZE" not in os.environ:
        return threads
    return max(threads, available_cores() // int(os.environ["LOCAL_WORLD_SIZE"]))
