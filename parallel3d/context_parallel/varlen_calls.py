"""Plans the calls of the varlen kernel, which reads concatenated sequences of different lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int32]


def plan_calls(
    segments: Sequence[tuple[int, int, int, int]], causal: bool, calls: Ints, edges: Ints
) -> None:
    """Writes as few calls as possible into `calls` and `edges`, in order of their queries.

    A call reads consecutive queries and keys. Its sequences are the segments and, between them,
    runs of keys to which none of its queries attends.

    Args:
        segments: (first query, number of queries, first key, number of keys before the queries'
            own) of each segment.
        causal: whether the queries also attend to the keys of their own segment.
        calls, edges: the outputs, which must be zero at first; see `documents.AttentionBlocks`.
    """
    # Each call is (first query, first key, numbers of queries and keys of each sequence).
    planned: list[tuple[int, int, list[tuple[int, int]]]] = []
    next_query = next_key = -1
    for query, number, key, before in segments:
        if query != next_query or key < next_key:
            planned.append((query, key, []))
        elif key > next_key:
            planned[-1][2].append((0, key - next_key))
        count = before + number if causal else before
        planned[-1][2].append((number, count))
        next_query, next_key = query + number, key + count
    calls[0] = len(planned)
    place = 0
    for i, (query, key, lengths) in enumerate(planned, 1):
        ends = np.cumsum(lengths, axis=0)
        calls[i] = query, ends[-1, 0], key, ends[-1, 1], len(lengths), *np.max(lengths, axis=0)
        end = place + len(lengths)
        edges[:, place + 1 : end + 1] = ends.T
        place = end + 1


def calls_of(calls: Tensor, edges: Tensor) -> Iterator[tuple[slice, slice, tuple[Any, ...]]]:
    """Yields the queries, the keys and the kernel's further arguments for each call."""
    place = 0
    for query, queries, key, keys, count, *longest in rows_of(calls):
        of_call = edges[:, place : place + count + 1]
        place += count + 1
        arguments = (of_call[0], of_call[1], *longest)
        yield slice(query, query + queries), slice(key, key + keys), arguments


def rows_of(table: Tensor) -> list[list[int]]:
    """Returns the rows of a table after its first row, which contains their number."""
    return table[1 : int(table[0, 0]) + 1].tolist()
