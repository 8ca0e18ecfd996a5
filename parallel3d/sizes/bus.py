"""Collectives by name, and how many bytes of each go through the busiest rank's port.

No torch and no cluster: `sizes.traffic` counts with it, `topology.price.costs` turns it into time.
"""

from __future__ import annotations

OPERATIONS = (
    "broadcast",
    "reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "scatter",
    "gather",
    "all_to_all",
    "send_recv",
    "barrier",
)


def check_sizes(n: int, nbytes: float = 0.0) -> None:
    """Raises ValueError for fewer than one rank, or less than no bytes."""
    if n < 1:
        raise ValueError(f"a collective of {n} ranks")
    if not nbytes >= 0:
        raise ValueError(f"a message of {nbytes} bytes")


def bus_factor(op: str, n: int) -> float:
    """Bytes that the busiest port carries over `nbytes`: bus bandwidth = factor · nbytes / time.

    Bus bandwidth can be held against the link's own, whatever the operation and n. Source:
    nccl-tests, doc/PERFORMANCE.md, and src/scatter.cu, src/gather.cu. 0 for one rank, and for a
    barrier, which moves no data. Raises ValueError for a name that is not in `OPERATIONS`.
    """
    check_sizes(n)
    if op not in OPERATIONS:
        raise ValueError(f"{op!r} is none of {', '.join(OPERATIONS)}")
    if n == 1 or op == "barrier":
        return 0.0
    if op == "all_reduce":
        return 2 * (n - 1) / n
    if op in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (n - 1) / n
