"""Seconds that a collective takes by the α–β model: α for each message, bytes / B for their size.

`n` ranks, each with one full-duplex port of `link.gb_per_s` (B) and `link.latency_us` (α) for each
message. `nbytes` is the whole buffer, as nccl-tests counts it: what a rank holds before an
all-reduce, a broadcast or a send; all that is gathered by all-gather and gather; all that is there
before reduce-scatter, scatter and all-to-all. Arithmetic on the data costs nothing here. Every
function gives 0 for one rank, and raises ValueError for fewer, or for less than no bytes.

docs/collectives.md draws what each collective does.
"""

from __future__ import annotations

import math

from parallel3d.sizes.bus import OPERATIONS, check_sizes
from parallel3d.topology.cluster.parts import Link


def _message(nbytes: float, link: Link) -> float:
    return link.latency_us * 1e-6 + nbytes / (link.gb_per_s * 1e9)


def send_recv(nbytes: float, link: Link) -> float:
    """One message: α + N/B (Hockney 1994)."""
    check_sizes(2, nbytes)
    return _message(nbytes, link)


def broadcast(n: int, nbytes: float, link: Link, segments: int = 1) -> float:
    """Along a chain, in `segments` pieces that follow each other: (S + n − 2)(α + N/(S·B)).

    Whole (S = 1) it is store and forward, (n − 1)(α + N/B); with many pieces every link of the
    chain works at once and the time tends to N/B, whatever n is. Source: Woolley, "NCCL:
    Accelerated Multi-GPU Collective Communications", 2015, with α added.
    """
    check_sizes(n, nbytes)
    if segments < 1:
        raise ValueError(f"a broadcast in {segments} segments")
    if n == 1:
        return 0.0
    return (segments + n - 2) * _message(nbytes / segments, link)


def best_segments(n: int, nbytes: float, link: Link) -> int:
    """The S that makes `broadcast` fastest: √((n − 2)·N / (α·B)), to the better whole number.

    At least 1, and at most one segment a byte (α = 0 would make it endless). From the derivative of
    (S + n − 2)(α + N/(S·B)) in S.
    """
    check_sizes(n, nbytes)
    most = max(1, int(nbytes))
    if n <= 2 or nbytes == 0:
        return 1
    if link.latency_us == 0:
        return most
    wire = nbytes / (link.gb_per_s * 1e9)
    exact = math.sqrt((n - 2) * wire / (link.latency_us * 1e-6))
    around = {min(most, max(1, s)) for s in (math.floor(exact), math.ceil(exact))}
    return min(around, key=lambda s: broadcast(n, nbytes, link, s))


def reduce(n: int, nbytes: float, link: Link, segments: int = 1) -> float:
    """A broadcast run backwards: each rank of the chain adds its own part and passes the sum on."""
    return broadcast(n, nbytes, link, segments)


def reduce_scatter(n: int, nbytes: float, link: Link) -> float:
    """Ring: n − 1 messages of N/n: (n − 1)·α + (n − 1)/n · N/B.

    Source: nccl-tests, doc/PERFORMANCE.md (the factor); Patarasuk and Yuan 2009 (the ring).
    """
    check_sizes(n, nbytes)
    return (n - 1) * _message(nbytes / n, link)


def all_gather(n: int, nbytes: float, link: Link) -> float:
    """Ring: n − 1 messages of N/n, as `reduce_scatter`; `nbytes` is the gathered buffer."""
    return reduce_scatter(n, nbytes, link)


def ring_all_reduce(n: int, nbytes: float, link: Link) -> float:
    """A reduce-scatter and an all-gather: 2(n − 1)·α + 2(n − 1)/n · N/B.

    No algorithm that adds on the ranks sends less (Patarasuk and Yuan 2009), but α counts
    2(n − 1) times.
    """
    return reduce_scatter(n, nbytes, link) + all_gather(n, nbytes, link)


def tree_all_reduce(n: int, nbytes: float, link: Link) -> float:
    """Double binary tree, pipelined: 2⌈log₂ n⌉·α + 2·N/B.

    Two trees carry half of the bytes each, a rank that is a leaf in one is inner in the other, so
    all ports are busy (Sanders, Speck and Träff 2009; NCCL since 2.4). α counts log n times: for
    many ranks and little data this beats the ring, for much data it sends n/(n − 1) times as much.
    """
    check_sizes(n, nbytes)
    if n == 1:
        return 0.0
    return 2 * math.ceil(math.log2(n)) * link.latency_us * 1e-6 + 2 * _message(nbytes, _free(link))


def _free(link: Link) -> Link:
    return Link(link.gb_per_s, 0.0)


def hierarchical_all_reduce(
    inner: int, outer: int, nbytes: float, inner_link: Link, outer_link: Link
) -> float:
    """Reduce-scatter inside, all-reduce of each N/inner between, all-gather inside.

    For `inner` ranks of one NVLink domain and `outer` domains: each rank reduces its own part along
    its own rail, so the network carries N/inner a NIC and no rail is crossed:
    2(g − 1)(α₁ + N/(g·B₁)) + 2(m − 1)(α₂ + N/(g·m·B₂)). Source: the hierarchical form in
    ml-engineering's network notes; Jia et al. 2018 (arXiv:1807.11205) §3.
    """
    check_sizes(inner, nbytes)
    inside = reduce_scatter(inner, nbytes, inner_link) + all_gather(inner, nbytes, inner_link)
    return inside + ring_all_reduce(outer, nbytes / inner, outer_link)


def all_to_all(n: int, nbytes: float, link: Link) -> float:
    """n − 1 messages of N/n, each to another rank: (n − 1)·α + (n − 1)/n · N/B.

    Source: nccl-tests, doc/PERFORMANCE.md. It takes a network on which all pairs can talk at once.
    """
    return reduce_scatter(n, nbytes, link)


def scatter(n: int, nbytes: float, link: Link) -> float:
    """The root sends n − 1 messages of N/n through its one port, which is what takes the time.

    (n − 1)·α + (n − 1)/n · N/B. Source: nccl-tests, src/scatter.cu (the factor).
    """
    return reduce_scatter(n, nbytes, link)


def gather(n: int, nbytes: float, link: Link) -> float:
    """A scatter run backwards: the root receives n − 1 messages of N/n.

    Source: nccl-tests, src/gather.cu (the factor).
    """
    return scatter(n, nbytes, link)


def barrier(n: int, link: Link) -> float:
    """Dissemination: in round k a rank signals the one 2ᵏ further on; ⌈log₂ n⌉·α.

    Source: Hensgen, Finkel and Manber 1988, which gloo's barrier follows. On NCCL PyTorch's barrier
    is an all-reduce of one element instead.
    """
    check_sizes(n)
    return math.ceil(math.log2(n)) * link.latency_us * 1e-6


def all_reduce(n: int, nbytes: float, link: Link) -> float:
    """The faster of ring and tree."""
    return min(ring_all_reduce(n, nbytes, link), tree_all_reduce(n, nbytes, link))


def collective_time(op: str, n: int, nbytes: float, link: Link) -> float:
    """Any of `OPERATIONS` by name; broadcast and reduce in their best number of segments.

    Raises ValueError for another name.
    """
    if op == "send_recv":
        check_sizes(n, nbytes)
        return send_recv(nbytes, link) if n > 1 else 0.0
    if op == "barrier":
        return barrier(n, link)
    if op in ("broadcast", "reduce"):
        return broadcast(n, nbytes, link, best_segments(n, nbytes, link))
    if op == "all_reduce":
        return all_reduce(n, nbytes, link)
    if op in OPERATIONS:  # the rest: n − 1 messages of N/n through the busiest port
        return reduce_scatter(n, nbytes, link)
    raise ValueError(f"{op!r} is none of {', '.join(OPERATIONS)}")
