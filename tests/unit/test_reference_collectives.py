"""Tests reference collectives without a network: results, messages, costs."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from examples.collectives.forms import FORMS, own_block, price_of, rounds_of, segments_of
from examples.collectives.messages import price, sent
from examples.collectives.parts import double_tree
from parallel3d.blueprint.cluster import Link
from parallel3d.estimate import network
from tests.reference import collectives as formulas

pytestmark = pytest.mark.more

ALL = [(name, form) for name, forms in formulas.FORMS.items() for form in forms]
LINK = Link(gb_per_s=10.0, latency_us=5.0)
N = 840 * 1024  # divisible by 2 … 8


def test_every_collective_has_its_forms() -> None:
    assert {name: sorted(forms) for name, forms in FORMS.items()} == {
        name: sorted(forms) for name, forms in formulas.FORMS.items()
    }


def played(name: str, form: str, n: int, count: int, segments: int) -> list[list[Counter]]:
    """Returns [rank][element] → how often each rank's number is in it, after all messages."""
    held = [[Counter({rank: 1}) for _ in range(count)] for rank in range(n)]
    for messages in rounds_of(name, form, n, count, segments):
        under_way = [(m, [held[m.source][i].copy() for i in range(m.start, m.stop)])
                     for m in messages]  # fmt: skip
        for m, parts in under_way:
            for i, part in enumerate(parts, m.start):
                held[m.target][i] = held[m.target][i] + part if m.adds else part
    return held


@pytest.mark.parametrize("name, form", ALL)
def test_each_number_arrives_once_at_its_destination(name: str, form: str) -> None:
    for n, segments in product(range(1, 10), (1, 3)):
        for count in (0, 1, n + 1, 19):
            held = played(name, form, n, count, segments)
            total = Counter(range(n))
            owner = [next(r for r in range(n) if i in range(count)[own_block(r, n, count)])
                     for i in range(count)]  # fmt: skip
            for rank, i in product(range(n), range(count)):
                mine, root = owner[i] == rank, rank == 0
                wanted = {
                    "broadcast": Counter([0]),
                    "reduce": total if root else None,
                    "scatter": Counter([0]) if mine else None,
                    "gather": Counter([owner[i]]) if root else None,
                    "all_gather": Counter([owner[i]]),
                    "reduce_scatter": total if mine else None,
                    "all_reduce": total,
                    "barrier": Counter([rank]),  # a barrier carries no data
                }[name]
                assert wanted is None or held[rank][i] == wanted, (n, count, segments, rank, i)


def test_no_rank_leaves_a_barrier_before_all_have_arrived() -> None:
    for form, n in product(FORMS["barrier"], range(2, 10)):
        heard = [{rank} for rank in range(n)]
        for messages in rounds_of("barrier", form, n, 0):
            under_way = [(m.target, set(heard[m.source])) for m in messages]
            for target, ranks in under_way:
                heard[target] |= ranks
        assert heard == [set(range(n))] * n, (form, n)


@pytest.mark.parametrize("name, form", ALL)
def test_messages_and_elements_are_those_of_the_formula(name: str, form: str) -> None:
    draw = random.Random(f"{name} {form}")
    for n in range(1, 18):
        count, segments = draw.randint(0, 5000), draw.randint(1, 9)
        counted = sent(rounds_of(name, form, n, count, segments), n)
        assert counted == formulas.sends(name, form, n, count, segments), (n, count, segments)


def test_no_rank_has_children_in_both_trees() -> None:
    for n in range(2, 40):
        parents = [set(tree.values()) - {0} for tree in double_tree(n)]
        assert not parents[0] & parents[1]
        assert [sorted(tree) for tree in double_tree(n)] == [list(range(1, n))] * 2


def test_a_rank_sends_and_receives_at_most_one_message_a_round() -> None:
    for (name, form), n, segments in product(ALL, range(2, 12), (1, 5)):
        for messages in rounds_of(name, form, n, 1000, segments):
            assert len({m.source for m in messages}) == len(messages)
            assert len({m.target for m in messages}) == len(messages)


def test_a_double_tree_needs_two_rounds_a_piece_and_its_depth() -> None:
    for n, segments in product(range(3, 34), (1, 8)):
        rounds = len(rounds_of("broadcast", "double_tree", n, 1000, segments))
        depth = (n - 1).bit_length()  # depth of one tree under rank 0
        assert 2 * segments <= rounds <= 2 * segments + 2 * depth


@pytest.mark.parametrize("n", range(1, 9))
def test_prices_equal_the_closed_formulas(n: int) -> None:
    formulas = {
        ("broadcast", "chain", 1): network.broadcast(n, N, LINK),
        ("broadcast", "segmented", 8): network.broadcast(n, N, LINK, 8),
        ("reduce", "segmented", 8): network.broadcast(n, N, LINK, 8),
        ("all_gather", "ring", 1): network.ring_time("all_gather", n, N, LINK),
        ("reduce_scatter", "ring", 1): network.ring_time("reduce_scatter", n, N, LINK),
        ("all_reduce", "ring", 1): network.ring_time("all_reduce", n, N, LINK),
        ("scatter", "naive", 1): network.collective_time("scatter", n, N, LINK),
        ("gather", "naive", 1): network.collective_time("gather", n, N, LINK),
        ("barrier", "recursive_doubling", 1): network.collective_time("barrier", n, 0, LINK),
    }
    for (name, form, segments), seconds in formulas.items():
        rounds = rounds_of(name, form, n, N, segments)
        assert price(rounds, n, 1, LINK) == pytest.approx(seconds), (name, form)


def test_prices_by_hand() -> None:
    # By B, 1,000,000 bytes take 100 µs, and each message takes another 5 µs.
    whole = 105.0
    for name, form, n, microseconds in (
        ("broadcast", "naive", 8, 7 * whole),
        ("all_reduce", "naive", 8, 14 * whole),
        ("broadcast", "tree", 8, 3 * whole),
        ("all_reduce", "tree", 8, 6 * whole),
        ("broadcast", "tree", 5, 3 * whole),
        ("all_reduce", "chain", 4, 6 * whole),
        ("all_reduce", "recursive_doubling", 8, 3 * whole),
        ("all_reduce", "recursive_doubling", 6, 4 * whole),
        ("all_reduce", "recursive_halving", 4, 2 * (5 + 50) + 2 * (5 + 25)),
        ("scatter", "tree", 4, 5 + 50 + 5 + 25),
        ("broadcast", "ring", 4, 5 + 50 + 5 + 25 + 3 * (5 + 25)),
        ("barrier", "naive", 5, 8 * 5),
    ):
        seconds = price_of(name, form, n, 10**6, 1, LINK)
        assert seconds == pytest.approx(microseconds * 1e-6), (name, form, n)


def test_two_trees_in_many_segments_approach_the_ideal_price() -> None:
    fast = Link(10.0, 0.01)
    for n in range(3, 9):
        ideal = network.tree_all_reduce(n, 1e9, fast)
        assert ideal < price_of("all_reduce", "double_tree", n, 10**9, 1, fast) < 1.12 * ideal


def test_the_number_of_segments_is_the_cheapest() -> None:
    for form, n in product(("segmented", "double_tree"), (2, 3, 5, 8)):
        best = segments_of(form, n, N, 4, LINK)
        assert best == 1 or n > 2
        prices = {s: price(rounds_of("broadcast", form, n, N, s), n, 4, LINK)
                  for s in (1, best // 2, best - 1, best, best + 1, 2 * best) if s > 0}  # fmt: skip
        if form == "segmented":
            assert min(prices.values()) == prices[best]
        else:  # the number of segments is a power of two
            assert prices[best] <= min(prices[1], prices[2 * best])
    # each segment has at least one element
    assert segments_of("segmented", 8, 3, 4, Link(1e-9, 1.0)) == 3
    assert segments_of("tree", 8, N, 4, LINK) == segments_of("segmented", 8, N, 4, None) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("all_redcue", "ring", 4, 8), "no collective: it must be one of broadcast,.*is all_reduc"),
        (("gather", "rings", 4, 8), "no form of gather: .* naive, chain, tree; the nearest is"),
        (("all_reduce", "rings", 4, 8), "the nearest is ring"),
        (("all_reduce", "ring", 0, 8), "a collective of 0 ranks"),
        (("all_reduce", "ring", 4, -8), "a message of -8"),
        (("all_reduce", "segmented", 4, 8, 0), "in 0 segments"),
    ],
)
def test_unknown_forms_are_refused(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rounds_of(*arguments)
