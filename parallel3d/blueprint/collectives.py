"""Describes the collectives and messages of a rank, and the bytes that it sends for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPERATIONS = (
    *("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter", "scatter", "gather"),
    *("all_to_all", "send_recv", "barrier"),
)


def bus_factor(op: str, n: Any) -> Any:
    """Returns the bytes through the busiest port, divided by the bytes of the buffer.

    `n` is the number of ranks, or an array of such numbers. The result is the busbw factor of
    nccl-tests (doc/PERFORMANCE.md, src/scatter.cu and src/gather.cu): the bus bandwidth, factor ·
    bytes / time, can be compared with the link's bandwidth for any operation and n. The factor is 0
    for one rank and for a barrier. Raises ValueError for an unknown operation.
    """
    if op not in OPERATIONS:
        raise ValueError(f"{op!r} is not one of {', '.join(OPERATIONS)}")
    if op == "all_reduce":
        return 2 * (n - 1) / n
    if op in ("broadcast", "reduce", "send_recv"):
        return 1.0 * (n > 1)
    return 0.0 * n if op == "barrier" else (n - 1) / n


@dataclass(frozen=True)
class Transfer:
    """Identical collective calls, or identical messages, of one rank in a step.

    Attributes:
        dim: name of the group, such as tp or dp_cp (see `groups.members`).
        op: one of `OPERATIONS`.
        nbytes: bytes of one call's whole buffer, as nccl-tests counts them.
        count: number of calls in a step; for send_recv, the number of messages that the rank sends.
        what: a description of the content.
    """

    dim: str
    op: str
    nbytes: int
    count: int
    what: str


def wire_bytes(transfer: Transfer, n: int) -> float:
    """Returns the bytes that one rank sends for all calls in a ring (or chain) of n ranks."""
    return transfer.count * transfer.nbytes * bus_factor(transfer.op, n)
