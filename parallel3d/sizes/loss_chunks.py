"""How many tokens' logits exist at a time: arithmetic without torch, for the loss and its price."""

from __future__ import annotations

CPU_BYTES = 64 << 20  # of the logits in fp32
# Each chunk reads the whole table twice and adds to its whole gradient: below about this many
# tokens that takes longer than the multiplications (docs/performance.md).
CPU_LEAST_TOKENS = 1024
# Of the logits in the compute type, on an accelerator: 8,372 tokens of Llama 3's vocabulary in
# bf16. To read the table twice, and read and write its fp32 gradient, takes an H100 as long as the
# products of 400 tokens (3.35 TB/s and 700 TFLOP/s; the width cancels out): 5 % of such a chunk,
# 40 % of one of 1,024 tokens. Beyond 2³¹ elements kernels would need 64-bit indices.
ACCELERATOR_BYTES = 2 << 30


def loss_chunks(
    tokens: int, columns: int, chunk_tokens: int | None, *, item: int, on_accelerator: bool
) -> list[int]:
    """The sizes of the chunks, in order, into which the loss cuts the tokens of a micro-batch.

    Arguments as those of `loss_chunk_counts`.
    """
    counts = loss_chunk_counts(
        tokens, columns, chunk_tokens, item=item, on_accelerator=on_accelerator
    )
    return [size for size, count in counts.items() for _ in range(count)]


def loss_chunk_counts(
    tokens: int, columns: int, chunk_tokens: int | None, *, item: int, on_accelerator: bool
) -> dict[int, int]:
    """How many chunks of which size the loss makes of a micro-batch's tokens, the larger first.

    Args:
        columns: of the logits that one rank holds.
        chunk_tokens: `loss.chunk_tokens`; None: as many as take 64 MiB in fp32 on a CPU, at least
            1,024, and 2 GiB in the compute type on an accelerator.
        item: bytes of the compute type.
    """
    if on_accelerator:
        most = chunk_tokens or max(1, ACCELERATOR_BYTES // (item * columns))
    else:
        most = chunk_tokens or max(CPU_LEAST_TOKENS, CPU_BYTES // (4 * columns))
    count = -(-tokens // most)
    # As equal as can be: a short rest would run at half the speed.
    size, larger = divmod(tokens, count)
    counts = {size + 1: larger, size: count - larger}
    return {size: count for size, count in counts.items() if count}
