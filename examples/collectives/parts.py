"""The ways to send one rank's data to all others, and all ranks' data to each other.

Each function returns rounds for n ranks and `count` elements. Rank 0 is the root. Reductions and
gathers are these run backwards (`messages.backwards`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from examples.collectives.messages import Message, Rounds, backwards, edges

# --- one rank's whole buffer to all -----------------------------------------------------------


def naive_broadcast(n: int, count: int) -> Rounds:
    """The root tells each in turn: n − 1 messages through one port."""
    return [[Message(0, r, 0, count)] for r in range(1, n)]


def tree_broadcast(n: int, count: int) -> Rounds:
    """Binomial tree: in each of ⌈log₂ n⌉ rounds every rank with the data sends it to one more."""
    steps = [1 << k for k in reversed(range((n - 1).bit_length()))]
    return [
        [Message(r, r + step, 0, count) for r in range(0, n - step, 2 * step)] for step in steps
    ]


def chain_broadcast(n: int, count: int, segments: int = 1) -> Rounds:
    """0 → 1 → … → n − 1, in `segments` pieces that follow each other: S + n − 2 rounds."""
    cuts = edges(count, segments)
    return [
        [
            Message(r, r + 1, cuts[turn - r], cuts[turn - r + 1])
            for r in range(n - 1)
            if 0 <= turn - r < segments
        ]
        for turn in range(segments + n - 2)
    ]


def in_order_parent(label: int, n: int) -> int:
    """Returns `label`'s parent in the binary tree with in-order walk 1 … n − 1; 0 above its root.

    With 2ᵏ the lowest bit of the label, the node has height k: leaves are odd, and the parent is 2ᵏ
    to the side on which the sum has its next bit set, or to the left if there is none to the right
    (Sanders, Speck and Träff 2009, section 4).
    """
    low = label & -label
    up = label - low if label & 2 * low else label + low
    return up if up < n else label - low


def double_tree(n: int) -> tuple[dict[int, int], dict[int, int]]:
    """Returns (child → parent) of two binary trees on ranks 1 … n − 1, both under rank 0.

    The second tree is the first, mirrored (n odd) or rotated by one (n even), so that no rank has
    children in both: Sanders, Speck and Träff 2009.
    """
    first = {r: in_order_parent(r, n) for r in range(1, n)}
    move = {r: n - r if n % 2 else r % (n - 1) + 1 for r in first} | {0: 0}
    return first, {move[child]: move[parent] for child, parent in first.items()}


class Edge(NamedTuple):
    """An edge from a rank to its child, in the first or the second of two trees."""

    up: int
    down: int
    tree: int


def two_colours(all_edges: list[Edge]) -> dict[Edge, int]:
    """Returns 0 or 1 for each edge, different for edges that leave or enter the same rank.

    Such edges take turns. This is possible because a rank has at most two children and two parents
    in all, so the edges form paths and even cycles.
    """
    colours: dict[Edge, int] = {}
    for first in all_edges:
        near = [(first, 0)]
        while near:
            edge, colour = near.pop()
            if edge not in colours:
                colours[edge] = colour
                near += [
                    (e, 1 - colour)
                    for e in all_edges
                    if e != edge and (e.up == edge.up or e.down == edge.down)
                ]
    return colours


def double_tree_broadcast(n: int, count: int, segments: int = 1) -> Rounds:
    """Sends half of the buffer through each of two trees, in `segments` pieces.

    Even rounds have one colour and odd rounds the other, so that a rank sends and receives at most
    once in each, and a piece moves every two rounds: about 2S rounds plus twice the depth.
    """
    trees = [
        [Edge(up, down, tree) for down, up in parents.items()]
        for tree, parents in enumerate(double_tree(n))
    ]
    colours = two_colours(trees[0] + trees[1])
    begins: dict[Edge, int] = {}

    def begin(edge: Edge) -> int:
        """Returns the round of the edge's first piece: its colour's next once the parent has it."""
        if edge not in begins:
            above = [e for e in trees[edge.tree] if e.down == edge.up]
            ready = begin(above[0]) + 1 if above else 0
            begins[edge] = ready + (ready + colours[edge]) % 2
        return begins[edge]

    rounds: Rounds = [[] for _ in range(max(map(begin, colours)) + 2 * segments - 1)]
    halves = edges(count, 2)
    for edge in colours:
        start, stop = halves[edge.tree : edge.tree + 2]
        cuts = [start + at for at in edges(stop - start, segments)]
        for piece, (here, there) in enumerate(pairwise(cuts)):
            rounds[begin(edge) + 2 * piece].append(Message(edge.up, edge.down, here, there))
    return rounds


# --- the root's blocks, one to each -------------------------------------------------------------


def naive_scatter(n: int, count: int) -> Rounds:
    """The root hands each its block: n − 1 messages through one port."""
    cuts = edges(count, n)
    return [[Message(0, r, cuts[r], cuts[r + 1])] for r in range(1, n)]


def tree_scatter(n: int, count: int) -> Rounds:
    """Binomial tree: each message holds all blocks of the receiving subtree."""
    cuts = edges(count, n)
    steps = [1 << k for k in reversed(range((n - 1).bit_length()))]
    return [
        [
            Message(r, r + step, cuts[r + step], cuts[min(n, r + 2 * step)])
            for r in range(0, n - step, 2 * step)
        ]
        for step in steps
    ]


def chain_scatter(n: int, count: int) -> Rounds:
    """Each rank keeps its block and passes all later ones on."""
    cuts = edges(count, n)
    return [[Message(r, r + 1, cuts[r + 1], count)] for r in range(n - 1)]


# --- each rank's block to all -------------------------------------------------------------------


def ring_all_gather(n: int, count: int) -> Rounds:
    """Each rank passes blocks from its right neighbour to the left: n − 1 rounds, all ports busy.

    The reduce-scatter is the same run backwards, to the right.
    """
    cuts = edges(count, n)
    return [
        [Message(r, (r - 1) % n, cuts[(r + turn) % n], cuts[(r + turn) % n + 1]) for r in range(n)]
        for turn in range(n - 1)
    ]


def folded(n: int) -> list[tuple[int, int]]:
    """Returns ranks [first, end) that act as one rank each if a power of two is needed, in order.

    With n = 2ᵏ + m the first 2m ranks form pairs, and the first rank of each pair acts for both.
    """
    power = 1 << (n.bit_length() - 1)
    pairs = n - power
    return [(2 * i, 2 * i + 2) if i < pairs else (i + pairs, i + pairs + 1) for i in range(power)]


def doubling_all_gather(n: int, count: int) -> Rounds:
    """In round k partners 2ᵏ apart swap all they have: ⌈log₂ n⌉ rounds if n is a power of two.

    Otherwise the second of each pair first sends its block, and gets the whole in the end. See
    Thakur, Rabenseifner and Gropp 2005 (sections 4.1 and 4.5).
    """
    cuts, team = edges(count, n), folded(n)
    pairs = [(first, first + 1) for first, end in team if end - first == 2]
    rounds: Rounds = []
    if pairs:
        rounds.append([Message(b, a, cuts[b], cuts[b + 1]) for a, b in pairs])
    for step in (1 << k for k in range((len(team) - 1).bit_length())):
        now = []
        for i, (first, _) in enumerate(team):
            low = i // step * step
            span = cuts[team[low][0]], cuts[team[low + step - 1][1]]
            now.append(Message(first, team[i ^ step][0], *span))
        rounds.append(now)
    if pairs:
        rounds.append([Message(a, b, 0, count) for a, b in pairs])
    return rounds


def halving_reduce_scatter(n: int, count: int) -> Rounds:
    """`doubling_all_gather` backwards: halves of ever smaller parts are swapped and summed."""
    rounds = backwards(doubling_all_gather(n, count), adds=True)
    if n & (n - 1):  # the second of a pair gets the whole sum, its own part included
        rounds[-1] = [m._replace(adds=False) for m in rounds[-1]]
    return rounds


def doubling_all_reduce(n: int, count: int) -> Rounds:
    """In round k partners 2ᵏ apart swap their sums, whole: few rounds, many bytes.

    If n is not a power of two, the second of each pair first sends its numbers, and gets the sum in
    the end.
    """
    team = folded(n)
    pairs = [(first, first + 1) for first, end in team if end - first == 2]
    rounds: Rounds = []
    if pairs:
        rounds.append([Message(b, a, 0, count, True) for a, b in pairs])
    for step in (1 << k for k in range((len(team) - 1).bit_length())):
        rounds.append(
            [Message(r, team[i ^ step][0], 0, count, True) for i, (r, _) in enumerate(team)]
        )
    if pairs:
        rounds.append([Message(a, b, 0, count) for a, b in pairs])
    return rounds


def dissemination(n: int, count: int = 0) -> Rounds:
    """A barrier: in round k each rank signals the one 2ᵏ after it (Hensgen et al. 1988)."""
    return [
        [Message(r, (r + (1 << k)) % n, 0, count) for r in range(n)]
        for k in range((n - 1).bit_length())
    ]
