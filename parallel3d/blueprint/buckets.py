"""Rules by which training code and estimates distribute tensors: gradients into buckets, optimizer
states into pieces, Muon's matrices to home ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

MIB = 1024 * 1024
FIRST_BUCKET_MIB = 1.0
CPU_CAP_MIB = 25.0
# NVLink and InfiniBand approach their bandwidth at 100 MiB and more, TCP far below.
ACCELERATOR_CAP_MIB = 128.0
SHARD_ALIGNMENT = 32  # elements: shards in fp32 begin at a multiple of 128 bytes


def padded_numel(numel: int, shards: int) -> int:
    """Returns the elements of a bucket padded to `shards` equal shards; no padding for one."""
    unit = shards * SHARD_ALIGNMENT if shards > 1 else 1
    return -(-numel // unit) * unit


def caps_of(bucket_cap_mb: float | Sequence[float] | None, accelerated: bool) -> Sequence[float]:
    """Returns the MiB at which each bucket closes; the last number holds for all that follow."""
    if bucket_cap_mb is None:
        return [FIRST_BUCKET_MIB, ACCELERATOR_CAP_MIB if accelerated else CPU_CAP_MIB]
    return bucket_cap_mb if isinstance(bucket_cap_mb, Sequence) else [bucket_cap_mb]


def assign(
    sizes: Iterable[int],
    bucket_cap_mb: float | Sequence[float] | None,
    alone: Collection[int] = (),
    accelerated: bool = False,
) -> list[list[int]]:
    """Groups parameters, given by their bytes in the order of readiness, into buckets.

    Like `bucket_cap_mb` of PyTorch's DDP: parameters are never split, and a bucket closes with the
    parameter that makes it reach its cap. With None the first bucket closes at 1 MiB, so that
    communication starts early, and the others at 25 MiB (Li et al. 2020, §3.2.3), or at 128 MiB on
    an accelerator (`accelerated`). Several caps are for one bucket each, the last one for all that
    follow.

    Parameters numbered in `alone` get their own buckets: both copies of a tied weight must be
    sharded in the same way.
    """
    caps = caps_of(bucket_cap_mb, accelerated)
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for i, size in enumerate(sizes):
        if i in alone and current:
            buckets.append(current)
            current, filled = [], 0
        current.append(i)
        filled += size
        if i in alone or filled >= caps[min(len(buckets), len(caps) - 1)] * MIB:
            buckets.append(current)
            current, filled = [], 0
    if current:
        buckets.append(current)
    return buckets


PIECE = 1 << 24  # elements whose bf16 states are converted to fp32 and updated together on a GPU
# Tokens whose gradients are cast to the table's dtype at a time: all tokens of a long sequence
# would make the largest tensor of a step.
LOOKUP_TOKENS = 1 << 16


def is_hidden(name: str, dims: int) -> bool:
    """Returns whether Muon steps a tensor: only matrices of the layers, without routers, tables and
    the head."""
    return dims == 2 and name.startswith("layers.") and not name.endswith(".router.weight")


class Home(NamedTuple):
    """The rank of a stage that orthogonalises a matrix."""

    tp: int
    dp: int


def homes(shapes: Mapping[str, tuple[int, ...]], tp: int, dp: int) -> dict[str, Home]:
    """Returns each matrix's home, the same on all ranks: the longest task goes to the least busy
    rank.

    A matrix of m × n costs max(m, n) · min(m, n)² (Graham 1969: at most 4/3 of the best balance).
    """
    cost = {name: max(shape) * min(shape) ** 2 for name, shape in shapes.items()}
    busy = {Home(t, d): 0 for d in range(dp) for t in range(tp)}
    found = {}
    for name in sorted(cost, key=lambda name: (-cost[name], name)):
        found[name] = min(busy, key=lambda home: (busy[home], home))
        busy[found[name]] += cost[name]
    return found
