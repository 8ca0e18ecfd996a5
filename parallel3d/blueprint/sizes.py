"""Derives sizes of a step: chunks of the loss, groups of heads, recomputed and offloaded layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

Number = Any  # int, float or a numpy array

STYLES = ("gather", "heads", "ring")
# A rank gathers at least this many bytes of its keys and values together, so that bandwidth and not
# latency is the limit.
LEAST_BYTES = 4 << 20


def heads_at_once(heads: int, of_head: float) -> int:
    """Returns the number of key-value heads that are gathered together, a divisor of `heads`.

    `of_head` is the number of bytes of one head's keys and values on a rank.
    """
    enough = (n for n in range(1, heads) if heads % n == 0 and n * of_head >= LEAST_BYTES)
    return next(enough, heads)


def splits_heads(heads: Number, kv_heads: Number, cp: Number) -> Any:
    """Returns whether style=heads can divide the heads of a tensor-parallel rank over cp ranks."""
    even = (np.mod(kv_heads, cp) == 0) | (np.mod(cp, kv_heads) == 0)
    return (np.mod(heads, cp) == 0) & even


def recomputing(given: Sequence[int] | None, stage: int, layers: int) -> int:
    """Returns how many of a stage's `layers` layers are recomputed.

    `given` is the key `recompute_layers`; if it is null, all layers are recomputed.
    """
    return offloading(given, stage, layers) if given else layers


def offloading(given: Sequence[int] | None, stage: int, layers: int) -> int:
    """Returns how many of a stage's `layers` layers are offloaded.

    `given` is the key `offload_layers`; if it is null, no layers are offloaded.
    """
    if not given:
        return 0
    return min(layers, given[0] if len(given) == 1 else given[stage])


CPU_BYTES = 64 << 20  # bytes of a chunk's fp32 logits
# Each chunk reads the whole output weight twice and adds to its whole gradient. With fewer tokens
# than about this number, that takes longer than the matmuls (docs/performance.md).
CPU_LEAST_TOKENS = 1024
# Bytes of a chunk's logits in the compute dtype, such as 8,372 tokens of Llama 3's vocabulary in
# bf16. Reading the weight twice and accumulating its fp32 gradient takes an H100 as long as the
# matmuls of 400 tokens (3.35 TB/s, 700 TFLOP/s; the width cancels out). That adds 5 % to the time
# of such a chunk, but 40 % to that of 1,024 tokens. Beyond 2³¹ elements kernels would need 64-bit
# indices.
ACCELERATOR_BYTES = 2 << 30


def loss_chunks(
    tokens: int, columns: int, chunk_tokens: int | None, *, item: int, on_accelerator: bool
) -> Counter[int]:
    """Returns the sizes of a micro-batch's loss chunks: {tokens of a chunk: number of such chunks}.

    Args:
        columns: columns of the logits that one rank holds.
        chunk_tokens: `loss.chunk_tokens`, or None if the size follows from CPU_BYTES and
            CPU_LEAST_TOKENS on a CPU, and from ACCELERATOR_BYTES on an accelerator.
        item: bytes of an element in the compute dtype.
    """
    if on_accelerator:
        most = chunk_tokens or max(1, ACCELERATOR_BYTES // (item * columns))
    else:
        most = chunk_tokens or max(CPU_LEAST_TOKENS, CPU_BYTES // (4 * columns))
    count = -(-tokens // most)
    # Chunks are as equal as possible, because a short last chunk would run at half the speed.
    size, larger = divmod(tokens, count)
    return +Counter({size + 1: larger, size: count - larger})
