"""Counter-based hash of dropout and of stochastic rounding: equal bits for every layout.

A row has a 64-bit key: SplitMix64's finaliser (Steele et al. 2014), modulo 2⁶⁴, of a number that
the caller makes from seed, place and row. Its low and high half L and H and the column c are mixed
like MurmurHash3's finaliser, modulo 2³²:

    x = c · 0x9E3779B9 + L;  x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= x >> 15;
    x ^= H;  x *= 0x735A2D97;  x ^= x >> 15

torch's integers are signed; all arithmetic here wraps around.
"""

from __future__ import annotations

import hashlib

from torch import Tensor, int32

# Factors of the numbers in a key.
SAMPLE = 0xD1B54A32D192ED03
ROW = 0xABC98388FB8FAC03
FINISH = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
CHANNEL = 0x9E3779B9
FIRST = 0x21F0AAAD
SECOND = 0x735A2D97


def signed(value: int, bits: int) -> int:
    """Returns the signed integer with the same bits, as torch's integers are signed."""
    return value - (1 << bits) if value >> (bits - 1) else value


def site_key(text: str) -> int:
    """Returns a signed 64-bit number for a text, such as a seed and a place in the model."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def halves(key: Tensor) -> tuple[Tensor, Tensor]:
    """Returns L and H, int32, of the finished keys of int64 numbers."""
    for by, factor in FINISH:
        key = (key ^ _shifted(key, by, 64)).mul_(signed(factor, 64))
    key = key ^ _shifted(key, 31, 64)
    return ((key << 32) >> 32).to(int32), (key >> 32).to(int32)


def mixed(low: Tensor, high: Tensor, column: Tensor) -> Tensor:
    """Returns 32 random bits for each row and column, int32, broadcast."""
    bits = column * signed(CHANNEL, 32) + low
    bits ^= _shifted(bits, 16, 32)
    bits *= FIRST
    bits ^= _shifted(bits, 15, 32)
    bits ^= high
    bits *= SECOND
    bits ^= _shifted(bits, 15, 32)
    return bits


def _shifted(x: Tensor, by: int, bits: int) -> Tensor:
    """Shifts right without sign extension."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)
