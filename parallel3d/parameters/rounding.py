"""Stochastic rounding of optimizer states to bf16, the same for every layout.

16 random bits are added to the bits of an fp32 value, and the low 16 bits of the sum are cut off.
So the value becomes its upper neighbour in bf16 with a probability proportional to its distance
from the lower one. The mean of many roundings is the value itself, and a moment that grows by less
than half a step of bf16 still grows. Values that bf16 can represent stay unchanged.

The random bits are a hash (`device/hashing.py`) of the column and the row's key, which is
site + A · update + B · row, modulo 2⁶⁴. The site is a hash of the seed and the name of the full
tensor. The hash has 32 bits: an optimizer's first state takes the low half, and its second state
takes the high half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.blueprint.buckets import PIECE
from parallel3d.device.accelerator import is_accelerator
from parallel3d.device.fused import fused
from parallel3d.device.hashing import ROW, SAMPLE, halves, mixed, signed, site_key
from parallel3d.parameters.segments import Chunk, Segment, chunks_of_range

# Elements of a piece, whose states are converted to fp32 together: on a CPU they stay in its cache;
# on an accelerator there are enough of them to make launch overhead small.
AT_ONCE = 1 << 16
AT_ONCE_ON_ACCELERATOR = PIECE


@dataclass
class Piece:
    """Elements [start, end) of a segment, with the chunks of full tensors that they hold.

    Attributes:
        places: for each chunk, its first element, counted from `start`, and its numbers of rows and
            columns. Elements outside of all chunks are padding.
        numbers: int64 tensor (chunks, 3) that holds site + B · first row, the first column, and B
            of each chunk. B is in the tensor, because TorchInductor would multiply by a constant in
            32 bits.
    """

    start: int
    end: int
    places: list[tuple[int, int, int]]
    numbers: Tensor

    def random_bits(self, update: int) -> Tensor:
        """Returns 32 random bits, an int32, for each element.

        Padding gets arbitrary bits, which leave its zeros unchanged.
        """
        device = self.numbers.device
        bits = torch.empty(self.end - self.start, dtype=torch.int32, device=device)
        # A kernel fills the tensor, because copying a number to the device would block the host.
        shift = torch.full((), signed(SAMPLE * update % (1 << 64), 64), device=device)
        for (at, rows, columns), number in zip(self.places, self.numbers, strict=True):
            _fill(bits[at : at + rows * columns].view(rows, columns), number, shift)
        return bits


def pieces_of(segment: Segment, seed: int) -> list[Piece]:
    """Cuts a segment into pieces of about `AT_ONCE` elements, at rows of full tensors."""
    device = segment.master.device
    most = AT_ONCE_ON_ACCELERATOR if is_accelerator(device) else AT_ONCE
    # By piece: (first element, site, chunk, shape of the full tensor).
    chunks: list[list[tuple[int, int, Chunk, tuple[int, ...]]]] = [[]]
    offset = 0
    for span in segment.spans:
        for shard, chunk, at in chunks_of_range(span.spec, span.start, span.numel):
            site = site_key(f"{seed}/rounding/{shard.name}")
            for inner, first in _cut(chunk, most):
                begin = offset + at + first
                if chunks[-1] and begin + inner.elements - chunks[-1][0][0] > most:
                    chunks.append([])
                chunks[-1].append((begin, site, inner, shard.full_shape))
        offset += span.numel
    # Padding belongs to the piece before it.
    starts = [0, *(some[0][0] for some in chunks[1:]), segment.master.numel()]
    pieces = []
    for some, start, end in zip(chunks, starts, starts[1:], strict=False):
        places, numbers = [], []
        for begin, site, chunk, full_shape in some:
            row, rows = 0, math.prod(chunk.sizes[:-1])
            for offset, size in zip(chunk.offsets[:-1], full_shape[:-1], strict=True):
                row = row * size + offset
            places.append((begin - start, rows, chunk.sizes[-1]))
            key = signed((site + ROW * row) % (1 << 64), 64)
            numbers.append([key, chunk.offsets[-1], signed(ROW, 64)])
        known = torch.tensor(numbers, dtype=torch.int64, device=device).view(-1, 3)
        pieces.append(Piece(start, end, places, known))
    return pieces


def _cut(chunk: Chunk, most: int) -> list[tuple[Chunk, int]]:
    """Cuts a chunk along its first dimension into parts of about `most` elements.

    It returns each part with the index of its first element in the flattened chunk.
    """
    width = chunk.elements // chunk.sizes[0]
    step = max(1, most // width)
    return [
        (
            Chunk(
                (chunk.offsets[0] + i, *chunk.offsets[1:]),
                (min(step, chunk.sizes[0] - i), *chunk.sizes[1:]),
            ),
            i * width,
        )
        for i in range(0, chunk.sizes[0], step)
    ]


@fused
def _fill(out: Tensor, number: Tensor, shift: Tensor) -> None:
    rows = torch.arange(out.shape[0], device=out.device).unsqueeze(-1)
    columns = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    key = rows * number[2] + (number[0] + shift)
    out.copy_(mixed(*halves(key), columns + number[1].to(torch.int32)))


@fused
def store_rounded(out: Tensor, values: Tensor, bits: Tensor, half: int) -> None:
    """Rounds `values` stochastically to bf16 and writes them to `out`.

    The random bits are the low half of each element's `bits` if `half` is 0, else the high half.
    Values in fp64 are first rounded to the nearest fp32.
    """
    some = bits if half == 0 else bits >> 16
    wide = values.to(torch.float32).view(torch.int32) + (some & 0xFFFF)
    out.copy_((wide >> 16).to(torch.int16).view(torch.bfloat16))
