"""How many tokens' logits exist at a time: arithmetic without torch, for the loss and its price."""

from __future__ import annotations

CHUNK_BYTES = 64 << 20
# Each chunk reads the whole table twice and adds to its whole gradient: below about this many
# tokens that takes longer than the multiplications (docs/performance.md).
LEAST_TOKENS = 1024


def loss_chunks(tokens: int, columns: int, chunk_tokens: int | None) -> list[int]:
    """The sizes of the chunks, in order, into which the loss cuts the tokens of a micro-batch.

    Args:
        columns: of the logits that one rank holds.
        chunk_tokens: `loss.chunk_tokens`; None: as many as take 64 MiB in fp32, at least 1,024.
    """
    most = chunk_tokens or max(LEAST_TOKENS, CHUNK_BYTES // (4 * columns))
    count = -(-tokens // most)
    # As equal as can be, the larger ones first: a short rest would run at half the speed.
    return [tokens // count + (i < tokens % count) for i in range(count)]
