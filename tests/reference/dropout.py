"""Computes the masks of dropout by the formula of models/dropout.py, in numpy.

numpy's unsigned integers wrap around and shift in zeros by themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def row_keys(site: int, samples: Sequence[int], heads: int, length: int) -> np.ndarray:
    """Returns uint64 keys (samples, heads, length)."""
    sample = np.array(samples, dtype=np.uint64)[:, None, None]
    row = np.arange(heads, dtype=np.uint64)[:, None] * np.uint64(2**32)
    row = row + np.arange(length, dtype=np.uint64)
    return finished(site, sample, row)


def finished(site: int, number: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Returns uint64 keys, broadcast, for uint64 numbers of samples (or updates) and rows."""
    key = np.uint64(site) + np.uint64(0xD1B54A32D192ED03) * number
    key = key + np.uint64(0xABC98388FB8FAC03) * row
    key = (key ^ key >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ key >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return key ^ key >> np.uint64(31)


def kept(keys: np.ndarray, channels: int, p: float) -> np.ndarray:
    """Returns a mask of the elements that stay: (*keys.shape, channels)."""
    return (random_bits(keys, channels) & np.uint32(2**31 - 1)) >= round(p * 2**31)


def random_bits(keys: np.ndarray, channels: int) -> np.ndarray:
    """Returns uint32 bits (*keys.shape, channels)."""
    low = (keys & np.uint64(2**32 - 1)).astype(np.uint32)[..., None]
    high = (keys >> np.uint64(32)).astype(np.uint32)[..., None]
    x = np.arange(channels, dtype=np.uint32) * np.uint32(0x9E3779B9) + low
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x21F0AAAD)
    x = (x ^ x >> np.uint32(15) ^ high) * np.uint32(0x735A2D97)
    return x ^ x >> np.uint32(15)


def dropped(x: Tensor, samples: Sequence[int], p: float, seed: int, site: str) -> Tensor:
    """Returns `x` (batch, sequence, channels) or (batch, heads, sequence, channels) after dropout.

    Row i of the batch is sample `samples[i]` of the run.
    """
    if p == 0.0:
        return x
    digest = hashlib.blake2b(f"{seed}/dropout/{site}".encode(), digest_size=8).digest()
    headed = x if x.dim() == 4 else x.unsqueeze(1)
    _, heads, length, channels = headed.shape
    keys = row_keys(int.from_bytes(digest, "little"), samples, heads, length)
    mask = torch.as_tensor(kept(keys, channels, p)).view(x.shape)
    return torch.where(mask, x / (1 - p), 0.0)
