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
from parallel3d.device.fused import fused
from parallel3d.device.hashing import ROW, SAMPLE, halves, mixed, signed, site_key
from parallel3d.estimate.traffic import PIECE
from parallel3d.parameters.chunks import Chunk, chunks_of_range
from parallel3d.parameters.sharding import Segment

# Elements of a piece, whose states are widened at once: on a CPU they stay in its cache; on an
# accelerator they are enough that launch overhead is small.
AT_ONCE, AT_ONCE_ON_ACCELERATOR = 1 << 16, PIECE


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
        """Returns 32 bits of each element, int32; of padding any, which leave its zeros."""
        bits = torch.empty(self.end - self.start, dtype=torch.int32, device=device)
        for site, chunk, at in self.chunks:
            first, rows, column, columns = 0, 1, chunk.offsets[-1], chunk.sizes[-1]
            if len(chunk.sizes) == 2:
                first, rows = chunk.offsets[0], chunk.sizes[0]
            start = (site + SAMPLE * update + ROW * first) % (1 << 64)
            # Numbers as tensors on the CPU: arguments of one kernel, not a kernel for each value.
            _fill(
                bits[at : at + chunk.elements].view(rows, columns),
                torch.tensor(signed(start, 64)),
                torch.tensor(column, dtype=torch.int32),
            )
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


@fused
def _fill(out: Tensor, start: Tensor, column: Tensor) -> None:
    rows = torch.arange(out.shape[0], device=out.device).unsqueeze(-1)
    columns = torch.arange(out.shape[1], dtype=torch.int32, device=out.device) + column
    out.copy_(mixed(*halves(rows * signed(ROW, 64) + start), columns))


@fused
def store_rounded(out: Tensor, values: Tensor, bits: Tensor, half: int) -> None:
    """Rounds `values` into `out`, bf16, by a half (0: the low one) of each element's `bits`.

    Those in fp64 are rounded to the nearest of fp32 before.
    """
    some = bits if half == 0 else bits >> 16
    wide = values.to(torch.float32).view(torch.int32) + (some & 0xFFFF)
    out.copy_((wide >> 16).to(torch.int16).view(torch.bfloat16))
