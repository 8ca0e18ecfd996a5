"""Groups gradients into buckets and assigns Muon's matrices to ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

MIB = 1024 * 1024
FIRST_BUCKET_MIB = 1.0
CPU_CAP_MIB = 25.0
# NVLink and InfiniBand need 100 MiB and more to approach their bandwidth, TCP far less.
ACCELERATOR_CAP_MIB = 128.0
SHARD_ALIGNMENT = 32  # in elements, so that shards in fp32 begin at a multiple of 128 bytes


def padded_numel(numel: int, shards: int) -> int:
    """Returns the number of elements of a bucket, with padding if there are several shards."""
    unit = shards * SHARD_ALIGNMENT if shards > 1 else 1
    return -(-numel // unit) * unit


def assign(
    sizes: Iterable[int],
    bucket_cap_mb: float | None,
    alone: Collection[int] = (),
    accelerated: bool = False,
) -> list[list[int]]:
    """Groups parameters into buckets, and returns the indices of the parameters of each bucket.

    `sizes` are the bytes of the gradients, in the order in which they become ready. The rules are
    those of PyTorch's DDP: parameters are never split, and a bucket closes with the parameter that
    makes it reach its cap. If `bucket_cap_mb` is None, the first bucket closes at 1 MiB, so that
    communication starts early, and all others at 25 MiB (Li et al. 2020, §3.2.3), or at 128 MiB on
    an accelerator (`accelerated`). Each parameter whose index is in `alone` gets a bucket of its
    own, because both copies of a tied weight must be sharded in the same way.
    """
    cap = bucket_cap_mb
    if cap is None:
        cap = ACCELERATOR_CAP_MIB if accelerated else CPU_CAP_MIB
    first = FIRST_BUCKET_MIB if bucket_cap_mb is None else cap
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for i, size in enumerate(sizes):
        if i in alone and current:
            buckets.append(current)
            current, filled = [], 0
        current.append(i)
        filled += size
        if i in alone or filled >= (cap if buckets else first) * MIB:
            buckets.append(current)
            current, filled = [], 0
    if current:
        buckets.append(current)
    return buckets


PIECE = 1 << 24  # number of elements with bf16 states that a GPU updates at a time, in fp32
# Number of tokens whose gradients are cast to the embedding table's dtype at a time. Casting
# all tokens of a long sequence together would create the largest tensor of a step.
LOOKUP_TOKENS = 1 << 16


class Home(NamedTuple):
    """The rank of a stage that orthogonalises a matrix, by its indices along tp and dp."""

    tp: int
    dp: int


def homes(shapes: Mapping[str, tuple[int, ...]], tp: int, dp: int) -> dict[str, Home]:
    """Returns the home of each matrix; the result is the same on all ranks.

    The most expensive matrices are assigned first, each to the least busy rank. So the busiest rank
    has at most 4/3 of the least possible work (Graham 1969). A matrix of m × n costs
    max(m, n) · min(m, n)².
    """
    cost = {name: max(shape) * min(shape) ** 2 for name, shape in shapes.items()}
    busy = {Home(t, d): 0 for d in range(dp) for t in range(tp)}
    found = {}
    for name in sorted(cost, key=lambda name: (-cost[name], name)):
        found[name] = min(busy, key=lambda home: (busy[home], home))
        busy[found[name]] += cost[name]
    return found
