"""Rounds stochastically to bf16 like parallel3d/parameters/rounding.py, but by distances."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from tests.reference.dropout import finished, random_bits


def chances(shape: tuple[int, ...], seed: int, update: int, name: str, which: int) -> np.ndarray:
    """Returns numbers in [0, 1), multiples of 2^-16, for the elements of a full tensor's state
    `which`."""
    digest = hashlib.blake2b(f"{seed}/rounding/{name}".encode(), digest_size=8).digest()
    rows, columns = math.prod(shape[:-1]), shape[-1]
    row = np.arange(rows, dtype=np.uint64)
    keys = finished(int.from_bytes(digest, "little"), np.array([update], dtype=np.uint64), row)
    bits = random_bits(keys, columns) >> np.uint32(16 * which) & np.uint32(0xFFFF)
    return (bits / 2.0**16).reshape(shape)


def rounded(values: Tensor, chance: np.ndarray) -> Tensor:
    """Returns `values`, each rounded to one of its two neighbours in bf16, in their own dtype."""
    size = values.abs().float().double()
    # Multiples of the spacing of bf16's numbers around each value: 8 significant bits.
    exponent = torch.frexp(size).exponent.clamp(min=-125).double()
    step = torch.exp2(exponent - 8)
    steps = (size / step).floor()
    up = size / step - steps + torch.from_numpy(chance) >= 1
    return ((steps + up) * step).copysign(values).to(values.dtype)
