"""The hash for dropout and stochastic rounding, which gives the same bits in every layout.

Each row has a 64-bit key. The key is the result of SplitMix64's finaliser (Steele et al. 2014),
modulo 2⁶⁴, of a number that the caller computes from the seed, the place in the model and the row.
The key's low half L and high half H and the column c are then mixed, modulo 2³², by a function like
MurmurHash3's finaliser:

    x = c · 0x9E3779B9 + L;  x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= x >> 15;
    x ^= H;  x *= 0x735A2D97;  x ^= x >> 15

The integers of torch are signed, and their arithmetic wraps around.
"""

from __future__ import annotations

import hashlib

from torch import Tensor, int32

# The caller multiplies the numbers in a key by these factors.
SAMPLE = 0xD1B54A32D192ED03
ROW = 0xABC98388FB8FAC03
FINISH = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
CHANNEL = 0x9E3779B9
FIRST = 0x21F0AAAD
SECOND = 0x735A2D97


def signed(value: int, bits: int) -> int:
    """Returns the signed integer that has the same bits as an unsigned one."""
    return value - (1 << bits) if value >> (bits - 1) else value


def site_key(text: str) -> int:
    """Returns a signed 64-bit hash of a text, such as a seed and a place in the model."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def halves(key: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the keys of int64 numbers, and returns their halves L and H in int32."""
    for by, factor in FINISH:
        key = (key ^ _shifted(key, by, 64)).mul_(signed(factor, 64))
    key = key ^ _shifted(key, 31, 64)
    return ((key << 32) >> 32).to(int32), (key >> 32).to(int32)


def mixed(low: Tensor, high: Tensor, column: Tensor) -> Tensor:
    """Returns 32 pseudorandom bits, int32, for each pair of a key (`low`, `high`) and a column.

    The arguments are broadcast against each other.
    """
    bits = column * signed(CHANNEL, 32) + low
    bits ^= _shifted(bits, 16, 32)
    bits *= FIRST
    bits ^= _shifted(bits, 15, 32)
    bits ^= high
    bits *= SECOND
    bits ^= _shifted(bits, 15, 32)
    return bits


def _shifted(x: Tensor, by: int, bits: int) -> Tensor:
    """Shifts the `bits`-bit integers in x right by `by` bits, without sign extension."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)
