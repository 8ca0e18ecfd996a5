"""Tests that states and tokens handed from piece to piece equal those of whole sequences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.group import Group
from parallel3d.comm.operation_log import LoggedOperation, OperationLog
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.context_parallel.attention import ContextParallel
from parallel3d.context_parallel.documents import Documents, make_documents
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.context_parallel.states import tokens_before
from parallel3d.models import delta_rule
from parallel3d.models.delta_rule import delta_output
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_cases
from tests.distributed.pool import Pool
from tests.distributed.test_gated_deltanet import MODEL
from tests.unit.context_parallel.test_split import starts_of

KEY_HEADS, HEADS, DK, DV = 2, 4, 4, 6
# By number of ranks, a length: pieces of two ranks are several chunks long, those of the others are
# shorter than one.
LENGTHS = {2: 520, 3: 61, 4: 288}
PIECES = {2: 2, 3: 2, 4: 3}  # of a balanced split, in which each has at least eight tokens


def documents_of(length: int, pieces: int) -> list[list[int]]:
    """Returns lengths of documents: whole; with bounds before, at and after each edge of pieces;
    and one long one among short ones, which a balanced split cuts in other pieces."""
    piece = -(-length // pieces)
    edges = {e + by for e in range(piece, length - 1, piece) for by in (-1, 0, 1)}
    found = np.diff([0, *sorted(edges), length]).tolist()
    long = length * 2 // 3
    return [[length], found, [long, *[3] * ((length - long) // 3)]]


def drawn(length: int, rows: int) -> list[Tensor]:
    """Returns q, k, v, g, beta and a gradient of whole sequences; decays are near 1."""
    rng = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, length, *shape, generator=rng, dtype=torch.float64)

    q, k = (normal(KEY_HEADS, DK) for _ in range(2))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -0.002 * normal(HEADS).exp()
    return [q, k, normal(HEADS, DV), g, normal(HEADS).sigmoid(), normal(HEADS, DV)]


class Found(NamedTuple):
    """Errors of outputs and gradients, and how far the loss moves if no state is handed on."""

    pieces: int
    error: float
    moved: float


def documents_on(group: Group, length: int, balanced: bool) -> tuple[np.ndarray, Documents]:
    split = SequenceSplit(length, group.size, group.index, balanced=balanced, hands_states=True)
    packs = documents_of(length, 2 * group.size)
    starts = split.pad_starts(starts_of(*packs, padded=length))
    return starts, make_documents(starts, torch.device("cpu"), split)


def rule_across(group: Group, balanced: bool) -> Found:
    cp = ContextParallel(group)
    starts, documents = documents_on(group, LENGTHS[group.size], balanced)
    shard = documents.shard
    assert shard is not None and shard.pieces is not None
    whole, pieces = drawn(starts.shape[1], len(starts)), shard.pieces
    begins = torch.from_numpy(starts == np.arange(starts.shape[1]))
    rows = torch.arange(len(starts))[:, None]

    def output(parts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        leaves = [x[rows, shard.positions].requires_grad_() for x in parts]
        own = pieces.cut(begins[rows, shard.positions])
        found = delta_output(*map(pieces.cut, leaves), own, cp, pieces)
        return pieces.joined(found), leaves

    *given, grad = whole
    given = [x.requires_grad_() for x in given]
    expected = delta_output(*given, begins)
    theirs = [expected, *torch.autograd.grad(expected, given, grad)]
    out, leaves = output([x.detach() for x in given])
    own_grad = grad[rows, shard.positions]
    ours = [out, *torch.autograd.grad(out, leaves, own_grad)]
    error = max(
        float((a - b[rows, shard.positions]).detach().abs().max())
        for a, b in zip(ours, theirs, strict=True)
    )
    with patch.object(delta_rule, "states_before", lambda move, add, *_: torch.zeros_like(add)):
        alone, _ = output([x.detach() for x in given])
    moved = float((alone.square().mean() - out.square().mean()).detach().abs())
    return Found(pieces.number, error, moved)


def tails_across(group: Group, few: int) -> float:
    """Returns the largest error of the tokens before pieces, and of their gradients."""
    worst, cp = 0.0, ContextParallel(group)
    for length in (LENGTHS[group.size], 5):
        starts, documents = documents_on(group, length, False)
        shard = documents.shard
        assert shard is not None and shard.pieces is not None
        padded, pieces, rows = starts.shape[1], shard.pieces, torch.arange(len(starts))[:, None]
        x = torch.arange(1.0, 1 + len(starts) * padded, dtype=torch.float64)
        x = x.reshape(len(starts), padded, 1).requires_grad_()
        first = pieces.cut(shard.positions)[:, 0]
        row = torch.arange(len(starts)).repeat_interleave(pieces.number)
        places = first[:, None] + torch.arange(few)  # among `few` zeros and the tokens
        before = torch.nn.functional.pad(x, (0, 0, few, 0))
        expected = before[row[:, None], places]
        own = x.detach()[rows, shard.positions].requires_grad_()
        found = tokens_before(own, few, cp, pieces)
        every = torch.zeros(len(starts), few + padded, 1, dtype=torch.float64)
        for rank in range(group.size):  # a rank's tokens are read by the pieces of all ranks
            theirs = documents_on(replace(group, index=rank), length, False)[1].shard
            assert theirs is not None and theirs.pieces is not None
            at = theirs.pieces.cut(theirs.positions)[:, 0, None] + torch.arange(few)
            every.index_put_((row[:, None], at), weights(at), accumulate=True)
        (grad,) = torch.autograd.grad(found, own, weights(places))
        errors = found - expected, grad - every[:, few:][rows, shard.positions]
        worst = max(worst, *(float(e.detach().abs().max()) for e in errors))
    return worst


def weights(places: Tensor) -> Tensor:
    """Returns gradients that differ by place."""
    return places.double().add(1.0).sqrt().unsqueeze(-1)


def across(size: int) -> tuple[list[Found], float]:
    groups = ProcessGroups.create(Layout(1, 1, 1, size), "cpu", 300)
    found = [rule_across(groups.cp, balanced=False)]
    with patch.multiple(delta_rule, AT_ONCE=1, LEAST_CHUNKS=1):  # of a part of a piece
        found.append(rule_across(groups.cp, balanced=True))
    worst = tails_across(groups.cp, 3)
    groups.close()
    return found, worst


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=NIGHTLY), pytest.param(4, marks=NIGHTLY)]
)
def test_states_and_tokens_of_pieces_equal_those_of_whole_sequences(size: int, pool: Pool) -> None:
    for (halves, balanced), tails in pool.run(size, across, size):
        assert tails < 1e-12
        for found in (halves, balanced):
            assert found.error <= 1e-9
            assert found.moved > 1e-3
        assert (halves.pieces, balanced.pieces) == (2, PIECES[size])


def bytes_of(operation: LoggedOperation) -> int:
    item = getattr(torch, operation.dtype.split(".")[-1]).itemsize
    return math.prod(operation.shape) * item


def sent(size: int, lengths: list[int]) -> list[list[tuple[str, int]]]:
    """Returns the collectives, and their bytes, of a forward and backward for each length."""
    groups = ProcessGroups.create(Layout(1, 1, 1, size), "cpu", 300)
    found = []
    for length in lengths:
        log = OperationLog()
        cp = ContextParallel(replace(groups.cp, log=log))
        split = SequenceSplit(length, size, groups.cp.index, hands_states=True)
        starts = split.pad_starts(np.zeros((1, length), dtype=np.int32))
        shard = make_documents(starts, torch.device("cpu"), split).shard
        assert shard is not None and shard.pieces is not None
        parts = [x[:1, : split.local].float() for x in drawn(split.padded, 1)]
        parts = [shard.pieces.cut(x).requires_grad_() for x in parts[:5]]
        delta_output(*parts, None, cp, shard.pieces).sum().backward()
        found.append([(one.name, bytes_of(one)) for one in log.latest(1000)])
    groups.close()
    return found


def test_bytes_of_states_do_not_grow_with_the_sequence(pool: Pool) -> None:
    of_piece = HEADS * DK * (DK + DV) * 4  # M and S' in fp32
    once = [("all_gather", 2 * of_piece)]  # what a rank gives for its two pieces
    for short, long in pool.run(2, sent, 2, [96, 384]):
        assert short == long == 2 * once  # in the forward and in the backward


def sent_before(few: int) -> tuple[list[str], tuple[int, ...]]:
    """Returns the collectives of `tokens_before` and its backward, and its result's shape."""
    groups = ProcessGroups.create(Layout(1, 1, 1, 2), "cpu", 300)
    log = OperationLog()
    cp = ContextParallel(replace(groups.cp, log=log))
    _, documents = documents_on(groups.cp, LENGTHS[2], False)
    shard = documents.shard
    assert shard is not None and shard.pieces is not None
    x = torch.ones(*shard.positions.shape, 1, requires_grad=True)
    found = tokens_before(x, few, cp, shard.pieces)
    (found.sum() + x.sum()).backward()
    groups.close()
    return [one.name for one in log.latest(100)], tuple(found.shape)


def test_a_convolution_of_one_token_sends_no_tokens(pool: Pool) -> None:
    for names, (_, few, _) in pool.run(2, sent_before, 1):
        assert (names, few) == (["reduce_scatter", "all_gather"], 1)  # newest first
    for names, (_, few, _) in pool.run(2, sent_before, 0):
        assert (names, few) == ([], 0)


# Models

SHORT = dict(MODEL) | {"seq_length": 24}  # pieces of cp=4 have three tokens
LONG = dict(MODEL) | {"seq_length": 96, "delta_convolution": 3}
ADAMW = Problem("llama_tiny", "adamw", tied=False, layers=4, model=tuple(SHORT.items()))
PACKS = Problem(
    "llama_tiny", "sgd", tied=True, layers=2, model=tuple(LONG.items()), documents=True, batch=4
)


def by(states: str, *more: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    return (("context_parallel.states", states), *more)


def of_ranks(problem: Problem, ranks: int) -> Problem:
    return replace(problem, ranks=ranks)


def with_heads(keys: int, values: int) -> Problem:
    """Returns `ADAMW` with other numbers of key and value heads."""
    changed = {"delta_key_heads": keys, "delta_value_heads": values, "num_query_groups": None}
    return replace(ADAMW, model=tuple((SHORT | changed).items()))


CASES: dict[Sizes, list[Case]] = {
    (1, 1, 1, 2): [
        Case(of_ranks(PACKS, 2), keys=by("chain")),
        Case(of_ranks(PACKS, 2), keys=by("heads", ("recompute", "[norm,attention]"))),
        Case(of_ranks(ADAMW, 2), keys=by("chain", ("recompute", "full"))),
    ],
    (1, 1, 1, 3): [
        Case(of_ranks(PACKS, 3), keys=by("chain", ("context_parallel.style", "ring"))),
        Case(of_ranks(with_heads(3, 6), 3), keys=by("heads")),
    ],
    (1, 1, 1, 4): [
        Case(of_ranks(PACKS, 4), keys=by("chain")),
        Case(of_ranks(ADAMW, 4), keys=by("auto", ("context_parallel.balance", False))),
        Case(of_ranks(with_heads(4, 4), 4), keys=by("heads")),
    ],
    (2, 1, 1, 2): [Case(of_ranks(PACKS, 2), sp=True, keys=by("chain", ("zero", 3)))],
}


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_states_of_pieces_train_like_the_reference(
    sizes: Sizes, pool: Pool, references: References
) -> None:
    check_cases(sizes, CASES[sizes], pool, references)
