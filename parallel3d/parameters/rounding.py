"""Stochastic rounding of optimizer states to bf16, the same for every layout.

16 random bits are added to those of an fp32 value, and the low 16 are cut off: it becomes its upper
neighbour in bf16 with the probability of its distance from the lower one, so the mean of many
roundings is the value, and a moment that grows by less than half a step of bf16 still grows. Values
of bf16 stay as they are.

The random bits are a hash (`device/hashing.py`) of seed, update, name of the full tensor, row and
column, with the row's number, modulo 2⁶⁴, site + A · update + B · row. Of its 32 bits an
optimizer's first state takes the low half, its second the high half.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel3d.device.accelerator import is_accelerator
from parallel3d.device.hashing import ROW, SAMPLE, halves, mixed, signed, site_key
from parallel3d.parameters.chunks import Chunk, chunks_of_range
from parallel3d.parameters.sharding import Segment

# Elements of a piece, whose states are widened at once: on a CPU they stay in its cache; on an
# accelerator they are enough that launch overhead is small.
AT_ONCE, AT_ONCE_ON_ACCELERATOR = 1 << 16, 1 << 22


@dataclass
class Piece:
    """Elements [start, end) of a segment, with the chunks of full tensors that they hold.

    Attributes:
        chunks: (site, chunk, first element, counted from `start`); other elements are padding.
    """

    start: int
    end: int
    chunks: list[tuple[int, Chunk, int]] = field(default_factory=list)

    def random_bits(self, update: int, device: torch.device) -> Tensor:
        """Returns 32 bits of each element, int32; zeros for padding."""
        bits = torch.zeros(self.end - self.start, dtype=torch.int32, device=device)
        for site, chunk, at in self.chunks:
            first, rows, column, columns = 0, 1, chunk.offsets[-1], chunk.sizes[-1]
            if len(chunk.sizes) == 2:
                first, rows = chunk.offsets[0], chunk.sizes[0]
            number = torch.arange(first, first + rows, device=device) * signed(ROW, 64)
            start = signed((site + SAMPLE * update) % (1 << 64), 64)
            low, high = halves((number + start).unsqueeze(-1))
            inside = torch.arange(column, column + columns, dtype=torch.int32, device=device)
            bits[at : at + chunk.elements].view(rows, columns).copy_(mixed(low, high, inside))
        return bits


def pieces_of(segment: Segment, seed: int) -> list[Piece]:
    """Cuts a segment into pieces of about `AT_ONCE` elements, at rows of full tensors."""
    most = AT_ONCE_ON_ACCELERATOR if is_accelerator(segment.master.device) else AT_ONCE
    pieces, offset = [Piece(0, 0)], 0
    for part in segment.parts:
        for shard, chunk, at in chunks_of_range(part.spec, part.start, part.numel):
            site = site_key(f"{seed}/rounding/{shard.name}")
            for inner, first in _cut(chunk, most):
                begin = offset + at + first
                if begin + inner.elements - pieces[-1].start > most and pieces[-1].chunks:
                    pieces[-1].end = begin
                    pieces.append(Piece(begin, begin))
                pieces[-1].chunks.append((site, inner, begin - pieces[-1].start))
        offset += part.numel
    pieces[-1].end = segment.master.numel()
    return pieces


def _cut(chunk: Chunk, most: int) -> list[tuple[Chunk, int]]:
    """Cuts a chunk along its first dimension, with the first element of each part."""
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


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Rounds to bf16 by 16 random bits of each element, the low half of `bits` (int32)."""
    wide = values.to(torch.float32, copy=True).view(torch.int32)
    wide += bits & 0xFFFF
    return (wide >> 16).to(torch.int16).view(torch.bfloat16)
