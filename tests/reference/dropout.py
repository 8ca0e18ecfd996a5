"""Which elements dropout drops: parallel3d/models/dropout.py's formula once more, number by number.

Python's integers never overflow, so every step says `% 2**64` or `% 2**32` itself; loops run over
rows, numpy over the channels of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def row_key(site: int, sample: int, head: int, position: int) -> int:
    """The key of one row of channels."""
    key = site + 0xD1B54A32D192ED03 * sample + 0xABC98388FB8FAC03 * (2**32 * head + position)
    key %= 2**64
    key = (key ^ key // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ key // 2**27) * 0x94D049BB133111EB % 2**64
    return key ^ key // 2**31


def kept(key: int, channels: int, p: float) -> np.ndarray:
    """Which channels of a row stay."""
    low, high = key % 2**32, key // 2**32
    x = (np.arange(channels, dtype=object) * 0x9E3779B9 + low) % 2**32
    x = (x ^ x // 2**16) * 0x21F0AAAD % 2**32
    x = x ^ x // 2**15 ^ high
    x = x * 0x735A2D97 % 2**32
    x = x ^ x // 2**15
    return (x % 2**31 >= round(p * 2**31)).astype(bool)


def dropped(x: Tensor, samples: Sequence[int], p: float, seed: int, site: str) -> Tensor:
    """`x` (batch, sequence, channels) or (batch, heads, sequence, channels) after dropout.

    Row i of the batch is sample `samples[i]` of the run.
    """
    if p == 0.0:
        return x
    digest = hashlib.blake2b(f"{seed}/dropout/{site}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    headed = x if x.dim() == 4 else x.unsqueeze(1)
    _, heads, length, channels = headed.shape
    mask = [
        [
            [kept(row_key(number, sample, head, t), channels, p) for t in range(length)]
            for head in range(heads)
        ]
        for sample in samples
    ]
    mask = torch.as_tensor(np.array(mask)).view(x.shape)
    return torch.where(mask, x / (1 - p), 0.0)
