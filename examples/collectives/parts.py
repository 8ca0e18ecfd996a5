"""The ways by which one rank's data reach all others, and all ranks' data each other.

Each function gives rounds for n ranks and `count` elements. Rank 0 is the root; what reduces and
gathers is one of these run backwards (`messages.backwards`).
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
    """Binomial tree: whoever knows tells one more in each round, ⌈log₂ n⌉ of them."""
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
    """The node above `label` in the binary tree whose in-order walk is 1 … n − 1; 0 above its root.

    With 2ᵏ the lowest bit of the label, the node has height k: leaves are odd, and the parent is
    2ᵏ to that side where the sum has its next bit set, or to the left if there is none to the right
    (Sanders, Speck and Träff 2009, section 4).
    """
    low = label & -label
    up = label - low if label & 2 * low else label + low
    return up if up < n else label - low


def double_tree(n: int) -> tuple[dict[int, int], dict[int, int]]:
    """(child → parent) of two binary trees on ranks 1 … n − 1, both under rank 0.

    The second one is the first, mirrored (n odd) or turned by one (n even), so that no rank has
    children in both: Sanders, Speck and Träff 2009.
    """
    first = {r: in_order_parent(r, n) for r in range(1, n)}
    move = {r: n - r if n % 2 else r % (n - 1) + 1 for r in first} | {0: 0}
    return first, {move[child]: move[parent] for child, parent in first.items()}


class Edge(NamedTuple):
    """From a rank to its child, in the first or the second of two trees."""

    up: int
    down: int
    tree: int


def two_colours(all_edges: list[Edge]) -> dict[Edge, int]:
    """0 or 1 for each, unlike where edges leave one rank or enter one: they take turns there.

    A rank has at most two children in all and hears from two parents, so it can be done: the edges
    form paths and even cycles.
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
    """Each of two trees carries half of the buffer, in `segments` pieces.

    Even rounds are of one colour and odd ones of the other, so that a rank sends and receives at
    most once in each, and a piece moves on every two: 2S rounds and twice the depth, about.
    """
    trees = [
        [Edge(up, down, tree) for down, up in parents.items()]
        for tree, parents in enumerate(double_tree(n))
    ]
    colours = two_colours(trees[0] + trees[1])
    begins: dict[Edge, int] = {}

    def begin(edge: Edge) -> int:
        """The round of the edge's first piece: the next of its colour when its parent has it."""
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
    """Binomial tree: each message is all blocks of the part of the tree that it goes to."""
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
    """To the left neighbour goes what came from the right: n − 1 rounds, all ports busy.

    Run backwards it is the reduce-scatter, which goes to the right.
    """
    cuts = edges(count, n)
    return [
        [Message(r, (r - 1) % n, cuts[(r + turn) % n], cuts[(r + turn) % n + 1]) for r in range(n)]
        for turn in range(n - 1)
    ]


def folded(n: int) -> list[tuple[int, int]]:
    """Ranks [first, end) that stand for one each where a power of two is needed, in order.

    Of n = 2ᵏ + m ranks the first 2m pair up; the first of each pair speaks for both.
    """
    power = 1 << (n.bit_length() - 1)
    pairs = n - power
    return [(2 * i, 2 * i + 2) if i < pairs else (i + pairs, i + pairs + 1) for i in range(power)]


def doubling_all_gather(n: int, count: int) -> Rounds:
    """In round k partners 2ᵏ apart swap all they have: ⌈log₂ n⌉ rounds where n is a power of two.

    Else the second of each pair hands its block in before, and has the whole after. Source: Thakur,
    Rabenseifner and Gropp 2005 (sections 4.1 and 4.5).
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
    if n & (n - 1):  # what the second of a pair is handed is the whole sum, its own part in it
        rounds[-1] = [m._replace(adds=False) for m in rounds[-1]]
    return rounds


def doubling_all_reduce(n: int, count: int) -> Rounds:
    """In round k partners 2ᵏ apart swap their sums, whole: few rounds, many bytes.

    Where n is no power of two the second of each pair hands its numbers in before, and is told the
    sum after.
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
    """A barrier: in round k each signals the one 2ᵏ further on: Hensgen, Finkel and Manber 1988."""
    return [
        [Message(r, (r + (1 << k)) % n, 0, count) for r in range(n)]
        for k in range((n - 1).bit_length())
    ]
