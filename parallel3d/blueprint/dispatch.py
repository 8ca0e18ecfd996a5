"""Counts the tokens sent by the two ways of reaching experts on other ranks, and chooses between
them."""

from __future__ import annotations

import math

from parallel3d.config.values import AUTO

GATHER, ALL_TO_ALL = "gather", "all_to_all"


def share_sent(experts: int, chosen: int, ep: int) -> float:
    """Returns the probability that a token has an expert on a given rank: 1 − C(E−E/ep, k)/C(E, k).

    This assumes that experts are chosen at random; the choices of trained routers are correlated,
    so that fewer tokens are sent.
    """
    here = experts // ep
    return 1.0 - math.comb(experts - here, chosen) / math.comb(experts, chosen)


def chosen_way(way: str, experts: int, chosen: int, ep: int) -> str:
    """Returns `gather` or `all_to_all`; for auto, the one that sends less.

    All-to-all also sends the choices and weights of tokens, and waits for the counts, so it must
    send a tenth less.
    """
    if way != AUTO:
        return way
    return ALL_TO_ALL if share_sent(experts, chosen, ep) < 0.9 else GATHER
