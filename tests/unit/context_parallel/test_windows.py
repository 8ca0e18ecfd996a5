"""Tests the tables of windows against brute force, and attention through them against a mask."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel3d.config.values import AUTO, MATH
from parallel3d.context_parallel.documents import make_documents
from parallel3d.context_parallel.halo import Segments, needed_of_others
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.context_parallel.window_attention import attend_in_window
from parallel3d.context_parallel.windows import chunks_of

WINDOWS = (1, 2, 3, 5, 8, 16, 40)
CPU = torch.device("cpu")


def random_starts(rows: int, length: int, seed: int) -> np.ndarray:
    """Returns where the document of each position begins, in documents of random lengths."""
    chance, begins = random.Random(seed), np.zeros((rows, length), dtype=np.int32)
    for row in begins[chance.randint(0, 1) :]:  # a row may also be one document
        for cut in sorted(chance.sample(range(1, length), chance.randint(0, 6))):
            row[cut:] = cut
    return begins


def seen(query: int, starts: np.ndarray, window: int) -> set[int]:
    """Returns the keys of a query by the definition."""
    return {j for j in range(query + 1) if j >= starts[query] and j >= query - window + 1}


def check_keys(seed: int) -> None:
    """Asserts that each rank gets the keys that its queries see, with a random length, window,
    split and documents."""
    chance = random.Random(seed)
    size, window = chance.choice((2, 3, 4, 6)), chance.choice(WINDOWS)
    length, balanced = chance.randint(7, 61), chance.random() < 0.5
    split = SequenceSplit(length, size, balanced=balanced, window=window)
    starts = split.pad_starts(random_starts(2, length, seed))
    held = split.held(starts)
    owner = np.zeros(starts.shape, dtype=np.int32)
    for rank, row in np.ndindex(held.shape[:2]):
        owner[row, held[rank, row]] = rank
    segments = Segments.of(held, starts)
    everyone = []
    for rank in range(size):
        needed = sorted(
            row * split.padded + key
            for row in range(2)
            for key in set().union(*(seen(q, starts[row], window) for q in held[rank, row]))
            if owner[row, key] != rank
        )
        everyone.append(needed)
        assert needed_of_others(segments, owner, window, rank).tolist() == needed
    for rank in range(size):
        of_rank = SequenceSplit(length, size, rank, balanced=balanced, window=window)
        shard = make_documents(starts, CPU, of_rank).shard
        assert shard is not None and shard.window is not None and shard.window.halo is not None
        halo = shard.window.halo
        given, taken, *totals = halo.counts.tolist()
        owners = owner.reshape(-1)
        assert given == [sum(owners[t] == rank for t in needed) for needed in everyone]
        assert taken == np.bincount(owners[everyone[rank]], minlength=size).tolist()
        assert totals[1] == [len(needed) for needed in everyone]
        rows = np.arange(2)[:, None] * split.padded
        own = (held[rank] + rows).reshape(-1)
        asked = [t for needed in everyone for t in needed if owners[t] == rank]
        assert own[halo.sent[: sum(given)].numpy()].tolist() == asked
        # After the exchange the keys are in order, and each query's chunk holds the keys that it
        # sees.
        received = sorted(everyone[rank], key=lambda t: (owners[t], t))
        keys = np.concatenate((own, received)).astype(int)[
            halo.order.numpy()[: len(own) + len(received)]
        ]
        assert sorted(keys) == keys.tolist() == sorted({*own, *received})
        assert (keys[halo.places.numpy()[: len(keys)]] == [*own, *received]).all()
        queries = []
        for chunks in chunks_of(shard.window.table):
            for i in range(chunks.chunks):
                first = chunks.query + i * chunks.number
                key = chunks.key + i * chunks.number
                read = keys[key : key + chunks.before + chunks.number]
                for place in range(first, first + chunks.number):
                    row, query = divmod(own[place], split.padded)
                    wanted = {row * split.padded + j for j in seen(query, starts[row], window)}
                    near = {int(j) for j in read if own[place] - window < j <= own[place]}
                    assert near == wanted
                    queries.append(place)
        assert queries == list(range(2 * split.local))


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_a_rank_gets_exactly_the_keys_that_its_queries_see(first: int) -> None:
    for seed in range(first, first + 10):
        check_keys(seed)


@pytest.mark.parametrize("kernel", [AUTO, MATH])
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_through_a_window_is_that_of_a_mask(window: int, kernel: str) -> None:
    for seed in range(2):
        starts = random_starts(2, 37, seed)
        generator = torch.Generator().manual_seed(seed)

        def drawn(heads: int, generator: torch.Generator = generator) -> Tensor:
            shape = (2, 37, heads, 8)
            return torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2)

        inputs = [drawn(heads).requires_grad_() for heads in (4, 2, 2)]
        grad = drawn(4)
        blocks = make_documents(starts, CPU, SequenceSplit(37, window=window)).window
        assert blocks is not None
        out = attend_in_window(*inputs, blocks, kernel=kernel)
        found = out, *torch.autograd.grad(out, inputs, grad)
        visible = torch.zeros(2, 1, 37, 37, dtype=torch.bool)
        for row, query in np.ndindex(2, 37):
            visible[row, 0, query, list(seen(query, starts[row], window))] = True
        q, k, v = inputs
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ k.mT / 8**0.5).masked_fill(~visible, -torch.inf)
        expected = scores.softmax(-1) @ v
        of_mask = expected, *torch.autograd.grad(expected, inputs, grad)
        for a, b in zip(found, of_mask, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
