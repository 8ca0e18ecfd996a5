"""What a local parameter is a piece of, and its initial values.

Every local parameter is described by the boxes of the *logical* full matrices that it holds: q, k
and v apart, gate and up apart, the vocabulary without its padding. Initialisation, gathering,
comparison and resharding read this one description, so a layout can change nothing but where the
numbers sit.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from parallel3d.device import accelerator
from parallel3d.host.devices import available_cores

WORD_TABLE = "embedding.word.weight"
TILE = 256  # side of the square tiles in which random matrices are drawn
BAND = 1 << 24  # elements drawn at a time: 64 MiB of host memory, a transfer at full speed


@dataclass(frozen=True)
class ShardSpec:
    """A box of one full logical tensor inside a local parameter.

    Attributes:
        name: logical name, `layers.3.attention.q.weight`.
        full_shape: shape of the unsharded, unpadded tensor.
        start: first row (and column) of the box in the full tensor.
        shape: rows (and columns) of the box.
        row: first row of the local parameter that the box occupies.
        std: standard deviation of the initial values around 0; 0 for a constant.
        fill: the constant.
        copies: tp ranks in a row that hold this very box: key-value heads of which there are fewer
            than ranks, norms of heads. Each has the gradient of its own heads alone, to be added.
    """

    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    row: int = 0
    std: float = 0.0
    fill: float = 0.0
    copies: int = 1

    def of_full(self, full: Tensor) -> Tensor:
        """The box as a view of the full tensor."""
        for dim, (start, length) in enumerate(zip(self.start, self.shape, strict=True)):
            full = full.narrow(dim, start, length)
        return full

    def of_local(self, local: Tensor) -> Tensor:
        """The box as a view of the local parameter."""
        return local.narrow(0, self.row, self.shape[0])


@dataclass(frozen=True)
class ParameterSpec:
    """How a local parameter relates to the model.

    Attributes:
        shape: local shape, vocabulary padding included.
        pieces: the boxes it holds; rows that no box covers are padding and stay zero.
        replicated: every tp rank holds the same values. Under sequence parallelism its gradient is
            a partial sum over the rank's tokens (Korthikanti et al. 2022 §4.2.2), to be added.
        tied_lm_head: the last stage's copy of a table that the first stage owns.
        uses: how often one forward pass reads it: 2 for a tied table on a single stage.
    """

    shape: tuple[int, ...]
    pieces: tuple[ShardSpec, ...]
    replicated: bool
    tied_lm_head: bool = False
    uses: int = 1

    @property
    def is_word_table(self) -> bool:
        """Whether this is the word embedding or a tied head's copy of it."""
        return any(piece.name == WORD_TABLE for piece in self.pieces)

    def is_whole(self, tp: int) -> bool:
        """Whether each of `tp` ranks holds the same values."""
        return self.replicated or all(piece.copies == tp for piece in self.pieces)

    def runs(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Elements [start, start + numel) of the flattened local parameter, cut where the number
        of their `copies` changes: (first, end, copies), counted from `start`."""
        width = math.prod(self.shape[1:])
        cuts: list[tuple[int, int, int]] = []
        for piece in self.pieces or (ShardSpec("", (), (), self.shape),):
            end = (piece.row + piece.shape[0]) * width
            first = cuts[-1][1] if cuts else 0  # padding in between goes with what follows
            if cuts and cuts[-1][2] == piece.copies:
                first = cuts.pop()[0]
            cuts.append((first, end, piece.copies))
        cuts[-1] = (cuts[-1][0], math.prod(self.shape), cuts[-1][2])
        for first, end, copies in cuts:
            first, end = max(first - start, 0), min(end - start, numel)
            if first < end:
                yield first, end, copies

    @property
    def decays(self) -> bool:
        """Weight decay leaves out biases and norms, alike on all ranks."""
        return len(self.shape) > 1


def spec_of(parameter: Tensor) -> ParameterSpec:
    """Returns the sharding spec that `Initializer.parameter` attached to a parameter."""
    spec: ParameterSpec = parameter.spec  # type: ignore[attr-defined]
    return spec


@dataclass(frozen=True)
class Initializer:
    """Makes parameters whose values are a function of (seed, name, index) alone.

    A matrix is drawn in tiles of 256 × 256, each from its own counter-based stream (Philox, Salmon
    et al. 2011) keyed by (seed, name, tile). A rank draws the tiles that its boxes touch, on
    `drawing_threads` threads and a band of at most `BAND` elements at a time: beside its slice it
    holds one band, and no layout changes a value.

    With `deferred`, parameters have their shape and type but one element of memory: whoever
    decides where they live asks for `values` or `fill_rows`, one parameter at a time.
    """

    seed: int
    dtype: torch.dtype
    device: torch.device
    deferred: bool = False

    def parameter(self, spec: ParameterSpec) -> nn.Parameter:
        """A parameter with its `spec` attached, and its initial values unless `deferred`."""
        if self.deferred:
            local = torch.zeros((), dtype=self.dtype, device=self.device).expand(spec.shape)
        else:
            local = self.values(spec)
        parameter = nn.Parameter(local)
        parameter.spec = spec  # type: ignore[attr-defined]
        return parameter

    def values(self, spec: ParameterSpec) -> Tensor:
        """The initial values of a whole local parameter."""
        local = torch.empty(spec.shape, dtype=self.dtype, device=self.device)
        if self.device.type != "meta":
            self.fill_rows(spec, 0, local)
        return local

    def fill_rows(self, spec: ParameterSpec, first: int, out: Tensor) -> None:
        """Writes the initial values of a local parameter's rows from `first` on into `out`."""
        out.zero_()  # what no box covers is padding
        end = first + out.shape[0]
        for piece in spec.pieces:
            top, bottom = max(first, piece.row), min(end, piece.row + piece.shape[0])
            if top < bottom:
                start = (piece.start[0] + top - piece.row, *piece.start[1:])
                box = replace(piece, start=start, shape=(bottom - top, *piece.shape[1:]))
                self.fill(box, out[top - first : bottom - first])

    def fill(self, piece: ShardSpec, out: Tensor) -> None:
        """Writes the initial values of a box into `out`, a tensor of the box's shape."""
        if not accelerator.has_values(out.device):
            return
        if piece.std == 0.0:
            out.fill_(piece.fill)
            return
        row0, (rows, cols) = piece.start[0], piece.shape
        height = max(1, BAND // (TILE * cols)) * TILE  # rows of a band: whole tiles
        for i in range(row0 // TILE * TILE, row0 + rows, height):
            top, bottom = max(row0, i), min(row0 + rows, i + height)
            # One copy a band: on a GPU each is a transfer that the host waits for.
            out[top - row0 : bottom - row0] = torch.from_numpy(self._band(piece, top, bottom))

    def _band(self, piece: ShardSpec, top: int, bottom: int) -> np.ndarray:
        """Rows [top, bottom) of the full matrix in the box's columns, float32."""
        left, cols = piece.start[1], piece.shape[1]
        band = np.empty((bottom - top, cols), dtype=np.float32)

        def draw(tile: tuple[int, int]) -> None:
            i, j = tile
            up, down = max(top, i * TILE), min(bottom, (i + 1) * TILE)
            west, east = max(left, j * TILE), min(left + cols, (j + 1) * TILE)
            values = self._tile(piece.name, i, j, rows=down - i * TILE)
            box = values[up - i * TILE : down - i * TILE, west - j * TILE : east - j * TILE]
            out = band[up - top : down - top, west - left : east - left]
            np.multiply(box, np.float32(piece.std), out=out)

        down = range(top // TILE, (bottom - 1) // TILE + 1)
        across = range(left // TILE, (left + cols - 1) // TILE + 1)
        tiles = [(i, j) for i in down for j in across]
        threads = min(drawing_threads(self.device), len(tiles))
        if threads == 1:
            for tile in tiles:
                draw(tile)
        else:  # NumPy lets go of the interpreter while it draws
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(draw, tiles))
        return band

    def _tile(self, name: str, i: int, j: int, rows: int = TILE) -> np.ndarray:
        """The first rows of (256, 256) standard normal values, float32 whatever the compute type
        is; they are drawn row by row, so how many is all that this changes."""
        digest = hashlib.blake2b(f"{self.seed}/{name}/{i}/{j}".encode(), digest_size=16).digest()
        key = np.frombuffer(digest, dtype=np.uint64)
        stream = np.random.Generator(np.random.Philox(key=key))
        return stream.standard_normal((rows, TILE), dtype=np.float32)


def drawing_threads(device: torch.device) -> int:
    """Threads on which a rank on `device` draws its parameters: torch's own.

    On an accelerator no fewer than the rank's share of its host's cores. torchrun sets
    OMP_NUM_THREADS=1 for CPU kernels, and one thread draws an 8B model in minutes.
    """
    threads = torch.get_num_threads()
    if not accelerator.is_accelerator(device) or "LOCAL_WORLD_SIZE" not in os.environ:
        return threads
    return max(threads, available_cores() // int(os.environ["LOCAL_WORLD_SIZE"]))


# Flat runs of parameters that are treated alike: what holds them makes these, the optimizer steps
# them, and checkpoints save what lies in them.


class SegmentPart(NamedTuple):
    """Elements `start` … `start + numel` of a flattened local parameter, inside a segment."""

    name: str
    spec: ParameterSpec
    start: int
    numel: int


@dataclass
class Segment:
    """A run of parameters that are treated alike, as far as this rank steps them.

    Attributes:
        param: flat, in the compute type; grad: flat, fp32 or better.
        master: what the optimizer steps: `param` itself where that is fp32 or better.
        decays: weight decay applies.
        replicated: every tp rank holds the same values (see ParameterSpec).
        tied_lm_head: belongs to a table that the first stage owns.
        parts: what lies in it, in order.
    """

    param: Tensor
    grad: Tensor
    master: Tensor
    decays: bool
    replicated: bool
    tied_lm_head: bool
    parts: list[SegmentPart] = field(default_factory=list)

    def runs(self) -> list[tuple[slice, int]]:
        """All elements in order, cut where the number of tp ranks in a row that share them changes
        (`Piece.copies`)."""
        found: list[tuple[slice, int]] = []
        offset = 0
        for part in self.parts:
            for first, end, copies in part.spec.runs(part.start, part.numel):
                begin = offset + first
                if found and found[-1][1] == copies:
                    begin = found.pop()[0].start
                found.append((slice(begin, offset + end), copies))
            offset += part.numel
        return found
