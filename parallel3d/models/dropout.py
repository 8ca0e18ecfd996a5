"""Dropout whose masks are a function of what is computed, never of where or in which order.

Whether an element is dropped is a hash of (seed, site, sample of the run, head, position, channel).
A site is a place in the model, `layers.3.mlp`. So every split of the batch, the sequence, the heads
or the layers drops the same elements, nothing is stored from forward to backward, recomputation
needs no generator's state, and a resumed run goes on with the masks of the uninterrupted one.

Of each row (all but the channel) a 64-bit key is made:

    key = finish(site + A · sample + B · (2³² · head + position))            modulo 2⁶⁴

with `finish` the end of SplitMix64 (Steele et al. 2014), and of its low and high half L and H and
the channel c 31 bits by a 32-bit mixing in the manner of MurmurHash3's end:

    x = c · 0x9E3779B9 + L;  x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= x >> 15;
    x ^= H;  x *= 0x735A2D97;  x ^= x >> 15                                  modulo 2³²

An element is dropped if the low 31 bits of x are below p · 2³¹; the others are divided by 1 − p.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.device.fused import fused
from parallel3d.device.operators import define, differentiate

SAMPLE, ROW = 0xD1B54A32D192ED03, 0xABC98388FB8FAC03  # A and B
FINISH = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
CHANNEL, FIRST, SECOND = 0x9E3779B9, 0x21F0AAAD, 0x735A2D97


class Dropout(nn.Module):
    """Drops elements of one site in training; what else is given passes unchanged.

    Args:
        seed: of the run.
        site: place in the model, the same for every layout.
        p: probability.
        first_head, first_position: of this rank's part of the heads or the sequence.
    """

    def __init__(
        self, seed: int, site: str, p: float, first_head: int = 0, first_position: int = 0
    ) -> None:
        super().__init__()
        self.p, self.first_head, self.first_position = p, first_head, first_position
        digest = hashlib.blake2b(f"{seed}/dropout/{site}".encode(), digest_size=8).digest()
        # A tensor, so that compiled code of one layer serves the others.
        self.site = torch.tensor(int.from_bytes(digest, "little", signed=True))

    def forward(self, x: Tensor, samples: Tensor | None) -> Tensor:
        """
        Args:
            x: (b, s, channels) or (b, heads, s, channels).
            samples: (b,) int64, numbers of the samples in the run; None: nothing is dropped.
        """
        if samples is None or self.p == 0.0:
            return x
        where = (self.first_head, self.first_position, self.p)
        if torch.compiler.is_compiling():
            return torch.ops.parallel3d.dropout(x, samples, self.site, *where)
        return _Dropout.apply(x, samples, self.site, *where)


class _Dropout(torch.autograd.Function):
    """The mask is made again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *where: Any) -> Tensor:
        ctx.where = where  # not a saved tensor: recomputation need not come this far
        return _dropped(x, *where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _dropped(grad, *ctx.where), *(None for _ in ctx.where)


def _signed(value: int, bits: int) -> int:
    """The same bits as a signed number, which torch's integers are."""
    return value - (1 << bits) if value >> (bits - 1) else value


def _shifted(x: Tensor, by: int, bits: int) -> Tensor:
    """A logical shift to the right."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)


@functools.partial(fused, least=0)  # small, and else fifteen launches
def row_keys(
    start: Tensor, rows: tuple[int, ...], first_head: int, places: Tensor
) -> tuple[Tensor, Tensor]:
    """L and H of the keys, (b, *rows, 1) int32 each; rows are (s,) or (heads, s).

    Args:
        start: (b,) site + A · sample.
        places: (s,) positions.
    """
    number = places.to(torch.int64)
    if len(rows) == 2:
        heads = torch.arange(first_head, first_head + rows[0], device=places.device)
        number = number + (heads << 32).unsqueeze(1)
    key = start.view(-1, *(1 for _ in rows)) + number * _signed(ROW, 64)
    for by, factor in FINISH:
        key = (key ^ _shifted(key, by, 64)).mul_(_signed(factor, 64))
    key = (key ^ _shifted(key, 31, 64)).unsqueeze(-1)
    return ((key << 32) >> 32).to(torch.int32), (key >> 32).to(torch.int32)


def starts_of_keys(samples: Tensor, site: Tensor) -> Tensor:
    """site + A · sample, (b,) int64.

    `site` stays on the CPU: of no dimensions, it goes to a device as a kernel's argument, where a
    copy of its own would make the host wait for the device.
    """
    return site + samples * _signed(SAMPLE, 64)


def are_dropped(low: Tensor, high: Tensor, channels: int, p: float) -> Tensor:
    """Which elements of rows with these keys: (*rows, channels) bool."""
    channel = torch.arange(channels, dtype=torch.int32, device=low.device)
    bits = channel * _signed(CHANNEL, 32) + low
    bits ^= _shifted(bits, 16, 32)
    bits *= FIRST
    bits ^= _shifted(bits, 15, 32)
    bits ^= high
    bits *= SECOND
    bits ^= _shifted(bits, 15, 32)
    # Not < round(p · 2³¹): for p next to 1 that is 2³¹, which int32 does not have.
    return bits.bitwise_and_(0x7FFFFFFF) <= round(p * (1 << 31)) - 1


def without(x: Tensor, dropped: Tensor, p: float) -> Tensor:
    """`x` over 1 − p with zeros where `dropped`, contiguous."""
    return (x.contiguous() / (1.0 - p)).masked_fill_(dropped, 0.0)


@fused
def drop(x: Tensor, low: Tensor, high: Tensor, p: float) -> Tensor:
    return without(x, are_dropped(low, high, x.shape[-1], p), p)


def _dropped(
    x: Tensor, samples: Tensor, site: Tensor, first_head: int, first_position: int, p: float
) -> Tensor:
    rows = tuple(x.shape[1:-1])
    places = torch.arange(first_position, first_position + rows[-1], device=x.device)
    return drop(x, *row_keys(starts_of_keys(samples, site), rows, first_head, places), p)


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, samples, site, *ctx.where = inputs
    ctx.save_for_backward(samples, site)


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    given = torch.ops.parallel3d.dropout(grad, *ctx.saved_tensors, *ctx.where)
    return given, None, None, None, None, None


# In a compiled block an operator of its own: the hash relies on integers that wrap around, which
# the compiler's C++ does not promise.
define(
    "dropout",
    "(Tensor x, Tensor samples, Tensor site, int head, int position, float p) -> Tensor",
    _dropped,
    lambda x, *_: x.new_empty(x.shape),
)
differentiate("dropout", _differentiate, _remember)
