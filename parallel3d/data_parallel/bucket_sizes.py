"""Which parameters share a gradient bucket: arithmetic without torch, for reducer and price."""

from __future__ import annotations

from collections.abc import Iterable

MIB = 1024 * 1024
FIRST_BUCKET_MIB = 1.0
DEFAULT_CAP_MIB = 25.0


def assign(sizes: Iterable[int], bucket_cap_mb: float | None) -> list[list[int]]:
    """Groups parameters, given by their bytes in the order of readiness, into buckets.

    As PyTorch's DDP means `bucket_cap_mb`: parameters are never split, and a bucket closes with
    the parameter that makes it reach the cap. With None the first bucket closes at 1 MiB, so that
    communication starts early, and the others at 25 MiB (Li et al. 2020, §3.2.3).
    """
    caps = [FIRST_BUCKET_MIB, DEFAULT_CAP_MIB] if bucket_cap_mb is None else [bucket_cap_mb]
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for i, size in enumerate(sizes):
        current.append(i)
        filled += size
        if filled >= caps[min(len(buckets), len(caps) - 1)] * MIB:
            buckets.append(current)
            current, filled = [], 0
    if current:
        buckets.append(current)
    return buckets
