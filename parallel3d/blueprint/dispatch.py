"""Counts the tokens that `gather` and `all_to_all` send to experts, and chooses one of the two."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parallel3d.config.values import AUTO
from parallel3d.models.keys import ModelConfig

GATHER, ALL_TO_ALL = "gather", "all_to_all"


def share_sent(experts: Any, chosen: Any, ep: Any) -> Any:
    """Returns the probability that a token has an expert on a given rank: 1 − C(E−E/ep, k)/C(E, k).

    This assumes that experts are chosen at random. The choices of trained routers are correlated,
    so fewer tokens are sent. The arguments are integers, or numpy arrays of integers.
    """
    if any(isinstance(of, np.ndarray) for of in (experts, chosen, ep)):
        return np.vectorize(_share_sent, otypes=[float])(experts, chosen, ep)
    return _share_sent(experts, chosen, ep)


@functools.lru_cache(maxsize=1024)
def _share_sent(experts: float, chosen: float, ep: float) -> float:
    every, k = int(experts), int(chosen)
    return 1.0 - math.comb(every - every // int(ep), k) / math.comb(every, k)


def largest_load(experts: Any, chosen: Any, ep: Any) -> Any:
    """Returns the largest load of a rank: all tokens of its group choose as many of its experts as
    they can.

    The load is the number of rows of the rank's experts, divided by the mean over `ep` ranks.
    """
    return ep * np.minimum(chosen, experts // ep) / chosen


def most_load(model: ModelConfig, ep: int) -> float:
    """Returns the largest possible load of a rank (see `largest_load`)."""
    return float(largest_load(model.num_experts, model.experts_per_token, ep))


def load_of_tokens(load: Any, share: Any) -> Any:
    """Returns the number of tokens that a rank with this load receives, divided by the mean.

    A rank receives one copy of a token, however many of its experts the token has chosen, so it
    never receives more than all tokens. `share`: see `share_sent`; 1 if ranks get every token.
    """
    return np.minimum(load, 1 / share)


def rank_load(counts: Sequence[int], ep: int) -> float:
    """Returns the tokens of the fullest of `ep` ranks, divided by the mean over these ranks.

    `counts` are the tokens of each expert of a layer.
    """
    of_ranks = np.reshape(np.asarray(counts), (ep, -1)).sum(axis=1)
    return float(of_ranks.max() / max(of_ranks.mean(), 1e-9))


def chosen_way(way: str, experts: int, chosen: int, ep: int) -> str:
    """Returns `gather` or `all_to_all`: the configured way, or for auto the one that sends less.

    All-to-all also sends the choices and weights of tokens, and waits for the counts, so auto
    chooses it only if it sends less than 0.9 of the tokens that gather sends.
    """
    if way != AUTO:
        return way
    return ALL_TO_ALL if share_sent(experts, chosen, ep) < 0.9 else GATHER
