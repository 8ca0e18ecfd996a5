"""What every rank sends in one optimizer step, by arithmetic on the configuration alone.

The list mirrors the code call by call; `tests/distributed/test_traffic.py` runs real steps and
compares every call and byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.topology.collective_costs import bus_factor


@dataclass(frozen=True)
class Transfer:
    """`count` equal calls of one collective, or messages, that one rank makes in a step.

    Attributes:
        dim: the group: tp, cp, dp, pp, embedding or model.
        op: as in `collective_costs.OPERATIONS`.
        nbytes: of one call, the whole buffer (see `collective_costs`).
        count: calls in a step; of send_recv, messages that the rank sends.
        what: what travels, in a few words.
    """

    dim: str
    op: str
    nbytes: int
    count: int
    what: str


def wire_bytes(transfer: Transfer, n: int) -> float:
    """What one rank sends for all calls of `transfer` in a ring (or chain) of n ranks."""
    return transfer.count * transfer.nbytes * bus_factor(transfer.op, n)
