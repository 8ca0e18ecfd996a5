"""Every collective in every form, built from the parts, by name.

| form               | algorithm                                                                 |
|--------------------|---------------------------------------------------------------------------|
| naive              | one rank talks to each in turn; all-reduce: such a reduce, then broadcast |
| chain              | 0 → 1 → … → n − 1, whole; a reduction runs backwards                      |
| segmented          | a chain in S pieces that follow each other, with the cheapest S           |
| tree               | binomial tree                                                             |
| double_tree        | two binary trees, each with half of the buffer, in S pieces               |
| ring               | blocks go round; broadcast: a tree scatters, the ring gathers             |
| recursive_doubling | partners 2ᵏ apart swap all they have; a barrier signals 2ᵏ further on     |
| recursive_halving  | all-reduce: doubling backwards (reduce-scatter), then doubling            |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from examples.collectives import parts
from examples.collectives.messages import Rounds, backwards, edges, price
from parallel3d.blueprint.cluster import Link
from parallel3d.errors import nearest
from parallel3d.estimate.network import best_segments, check_sizes

NAIVE, CHAIN, TREE, RING = "naive", "chain", "tree", "ring"
SEGMENTED, DOUBLE_TREE = "segmented", "double_tree"
DOUBLING, HALVING = "recursive_doubling", "recursive_halving"
OF_BLOCKS = (NAIVE, CHAIN, TREE)
OF_ALL = (*OF_BLOCKS, RING, DOUBLING)
OF_WHOLE = (NAIVE, CHAIN, SEGMENTED, TREE, DOUBLE_TREE, RING, DOUBLING)

FORMS = {
    "broadcast": OF_WHOLE,
    "reduce": OF_WHOLE,
    "scatter": OF_BLOCKS,
    "gather": OF_BLOCKS,
    "all_gather": OF_ALL,
    "reduce_scatter": OF_ALL,
    "all_reduce": (*OF_WHOLE, HALVING),
    "barrier": OF_ALL,
}
IN_SEGMENTS = (SEGMENTED, DOUBLE_TREE)
# With more segments, the cost of a message outweighs what it saves.
MOST_SEGMENTS = {SEGMENTED: 1024, DOUBLE_TREE: 64}

_SCATTERS: dict[str, Callable[[int, int], Rounds]] = {
    NAIVE: parts.naive_scatter,
    CHAIN: parts.chain_scatter,
    TREE: parts.tree_scatter,
}


def check_form(collective: str, form: str) -> None:
    """Raises ValueError with the nearest name for an unknown collective or form."""
    check_name("collective", collective, tuple(FORMS))
    check_name(f"form of {collective}", form, FORMS[collective])


def check_name(what: str, name: str, known: tuple[str, ...]) -> None:
    """Raises ValueError with the nearest name if `name` is not among the `known` ones."""
    if name not in known:
        likely = nearest(str(name), known) or known[0]
        raise ValueError(
            f"{name!r} is no {what}: it must be one of {', '.join(known)}; the nearest is {likely}."
        )


def rounds_of(collective: str, form: str, n: int, count: int, segments: int = 1) -> Rounds:
    """Returns the messages of a collective of n ranks on `count` elements; the root is rank 0.

    Only the forms `IN_SEGMENTS` use `segments`; a double tree sends that many of each half. Raises
    ValueError for an unknown name, fewer than one rank or segment, or a negative count.
    """
    check_form(collective, form)
    check_sizes(n, count)
    if segments < 1:
        raise ValueError(f"a {collective} in {segments} segments")
    return [] if n == 1 else _rounds(collective, form, n, count, segments)


def _rounds(collective: str, form: str, n: int, count: int, segments: int) -> Rounds:
    if collective == "broadcast":
        return _broadcast(form, n, count, segments)
    if collective == "reduce":
        return _reduce(form, n, count, segments)
    if collective == "scatter":
        return _SCATTERS[form](n, count)
    if collective == "gather":
        return backwards(_SCATTERS[form](n, count), adds=False)
    if collective == "all_gather":
        return _all_gather(form, n, count)
    if collective == "reduce_scatter":
        return _reduce_scatter(form, n, count)
    if collective == "barrier" and form == DOUBLING:
        return parts.dissemination(n)
    if collective == "barrier" and form == RING:
        return parts.ring_all_gather(n, 0)
    if form == DOUBLING:
        return parts.doubling_all_reduce(n, count)
    if form in (RING, HALVING):
        half = RING if form == RING else DOUBLING
        return _reduce_scatter(half, n, count) + _all_gather(half, n, count)
    # An all-reduce reduces to rank 0 and then tells all; a barrier does so without data.
    count = 0 if collective == "barrier" else count
    return _reduce(form, n, count, segments) + _broadcast(form, n, count, segments)


def _broadcast(form: str, n: int, count: int, segments: int) -> Rounds:
    if form == SEGMENTED:
        return parts.chain_broadcast(n, count, segments)
    if form == DOUBLE_TREE:
        return parts.double_tree_broadcast(n, count, segments)
    if form in (RING, DOUBLING):
        return parts.tree_scatter(n, count) + _all_gather(form, n, count)
    whole = {NAIVE: parts.naive_broadcast, CHAIN: parts.chain_broadcast, TREE: parts.tree_broadcast}
    return whole[form](n, count)


def _reduce(form: str, n: int, count: int, segments: int) -> Rounds:
    if form in (RING, DOUBLING):  # rank 0 collects the sums of blocks
        collecting = backwards(parts.tree_scatter(n, count), adds=False)
        return _reduce_scatter(form, n, count) + collecting
    return backwards(_broadcast(form, n, count, segments), adds=True)


def _all_gather(form: str, n: int, count: int) -> Rounds:
    if form == RING:
        return parts.ring_all_gather(n, count)
    if form == DOUBLING:
        return parts.doubling_all_gather(n, count)
    return backwards(_SCATTERS[form](n, count), adds=False) + _broadcast(form, n, count, 1)


def _reduce_scatter(form: str, n: int, count: int) -> Rounds:
    if form == RING:
        return backwards(parts.ring_all_gather(n, count), adds=True)
    if form == DOUBLING:
        return parts.halving_reduce_scatter(n, count)
    return _reduce(form, n, count, 1) + _SCATTERS[form](n, count)


def own_block(rank: int, n: int, count: int) -> slice:
    """Returns the elements of `rank` in a scatter, a gather and collectives built from them."""
    cuts = edges(count, n)
    return slice(cuts[rank], cuts[rank + 1])


@lru_cache(maxsize=4096)
def segments_of(form: str, n: int, count: int, itemsize: int, link: Link | None) -> int:
    """Returns the cheapest number of segments, at most `MOST_SEGMENTS`; 1 for other forms.

    A chain's follows from a formula, a double tree's is the best of 1, 2, 4, … A reduction has the
    number of the broadcast that it runs backwards.
    """
    if form not in IN_SEGMENTS or link is None or count == 0 or n <= 2:
        return 1
    most = min(MOST_SEGMENTS[form], count)
    if form == SEGMENTED:
        return min(most, best_segments(n, count * itemsize, link))
    tried = [1 << k for k in range(most.bit_length()) if 1 << k <= most]
    return min(
        tried,
        key=lambda s: price(_broadcast(form, n, count, s), n, itemsize, link),
    )


def price_of(collective: str, form: str, n: int, count: int, itemsize: int, link: Link) -> float:
    """Returns seconds by the α–β model with the best number of segments; see `rounds_of`."""
    segments = segments_of(form, n, count, itemsize, link)
    return price(rounds_of(collective, form, n, count, segments), n, itemsize, link)
