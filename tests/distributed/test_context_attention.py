"""Tests that every style of context parallelism equals explicit attention, and sends the bytes of
its formula."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import parallel3d as p3d
from parallel3d.blueprint import sizes
from parallel3d.blueprint.layout import Layout
from parallel3d.comm.collectives import all_reduce
from parallel3d.comm.group import Group
from parallel3d.comm.operation_log import LoggedOperation, OperationLog
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.context_parallel.attention import ContextParallel
from parallel3d.context_parallel.documents import make_documents
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.models.attention import AttentionOptions, attend_split
from parallel3d.models.checkpointing import recomputed
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.run.keys import LaunchConfig
from tests.distributed.pool import Pool
from tests.unit.context_parallel.test_attention import PACKS, explicit, random_inputs
from tests.unit.context_parallel.test_document_attention import square
from tests.unit.context_parallel.test_split import starts_of

STYLES = ("gather", "ring", "heads")
HEADS, KV_HEADS = 12, {2: 4, 3: 1, 4: 2}  # by number of ranks; some have fewer heads than ranks


def size_of(operation: LoggedOperation) -> int:
    return math.prod(operation.shape) * getattr(torch, operation.dtype.split(".")[-1]).itemsize


def sent(operation: LoggedOperation, size: int) -> float:
    """Returns the bytes that a rank sends: the whole tensor's or, in a ring, its own part's."""
    if operation.name == "ring_shift":
        return size_of(operation)
    assert operation.name in ("all_gather", "reduce_scatter", "all_to_all")
    return size_of(operation) * (size - 1) / size


def expected(style: str, size: int, again: bool, queries: int, keys: int) -> float:
    """Returns the formula of `context_parallel.attention` in fp64, for the bytes of all q, and of
    all k and v."""
    part = (size - 1) / size
    if style == "gather":
        return 3 * part * keys
    if style == "ring":
        return (3 + again) * part * keys
    more = max(1, size // KV_HEADS[size])
    return (2 + again) * part * (2 * queries + keys * more) / size


def attended(size: int) -> list[tuple[str, float, float]]:
    """Returns, by style, its name, the largest error, and the ratio of sent bytes to the
    formula."""
    found = []
    for shared_memory, least_bytes, again, sinks in WAYS[size]:
        launch = LaunchConfig(shared_memory=shared_memory)
        groups = ProcessGroups.create(Layout(1, 1, 1, size), "cpu", 300, launch)
        with patch.object(sizes, "LEAST_BYTES", least_bytes):
            found += [(style, *attended_by(style, groups.cp, again, sinks)) for style in STYLES]
        groups.close()
    return found


def attended_by(style: str, group: Group, again: bool, has_sinks: bool) -> tuple[float, float]:
    """Computes forward and backward; with `again` the backward recomputes the forward."""
    log = OperationLog()
    cp = ContextParallel(replace(group, log=log), style, keeps=again)
    split = SequenceSplit(61, group.size, group.index, ring=style == "ring")
    starts = split.pad_starts(starts_of(*PACKS, padded=61))
    documents = make_documents(starts, torch.device("cpu"), split)
    assert documents.shard is not None
    held, rows = documents.shard.held[group.index].long(), torch.arange(len(PACKS))[:, None]

    def take(x: Tensor) -> Tensor:
        return x.transpose(1, 2)[rows, held].transpose(1, 2)

    heads = HEADS, KV_HEADS[group.size]
    inputs = random_inputs(split.padded, len(PACKS), torch.float64, heads)
    *leaves, grad = map(take, inputs)
    identity = torch.eye(grad.shape[-1], dtype=grad.dtype, requires_grad=True)

    inputs_of_layer, options = LayerInputs(documents=documents), AttentionOptions(cp=cp)
    sinks = [torch.linspace(-2, 3, HEADS, dtype=torch.float64)] if has_sinks else []

    def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        # This reads the result in the backward, like the linear layer after attention.
        return attend_split(q, k, v, inputs_of_layer, options, *sinks) @ identity

    leaves = [leaf.requires_grad_() for leaf in (*leaves, *sinks)]
    out = recomputed(attend, *leaves) if again else attend(*leaves)
    ours = [out, *torch.autograd.grad(out, leaves, grad)]
    theirs = explicit(inputs, PACKS, split.padded, *sinks)
    if has_sinks:  # the ranks' gradients are parts of one sum
        ours[4:] = [all_reduce(ours[4], group)]
    theirs[:4] = map(take, theirs[:4])
    error = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    queries, keys = (x.numel() * x.itemsize for x in (inputs[0], torch.cat(inputs[1:3])))
    formula = expected(style, group.size, again, queries, keys)
    return error, sum(sent(operation, group.size) for operation in log.latest(1000)) / formula


# By number of ranks: whether memory is shared, the bytes that are gathered together (1: head by
# head), whether the forward is recomputed, and whether heads have sinks, for which nothing more is
# sent. Among four ranks, some share a key-value head.
WAYS = {
    2: [(True, 1, False, True), (False, 1 << 30, True, False)],
    3: [(True, 1 << 30, True, False)],
    4: [(True, 1, True, True), (False, 1, False, False)],
}


@pytest.mark.parametrize("size", WAYS)
def test_styles_attend_equally_and_send_the_bytes_of_their_formula(size: int, pool: Pool) -> None:
    for rank in pool.run(size, attended, size):
        for style, error, bytes in rank:
            assert error < 1e-12, (style, error)
            assert bytes == pytest.approx(1, rel=1e-12), style


LENGTHS = [[13, 1, 1, 5, 21], [41]]


def of_a_model_of_ones_own(size: int) -> tuple[float, list[str]]:
    """Tests the largest error against PyTorch's attention, and the messages for a user's
    mistakes."""
    groups = p3d.init(cp=size, dp=1)
    split = p3d.SplitSequences(LENGTHS, groups.cp, balanced=True)
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, 41, heads, 8) for heads in (6, 3, 3, 6)]
    *whole, grad = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    whole = [x.requires_grad_() for x in whole]
    q, k, v = (x.transpose(1, 2) for x in whole)
    seen = square([np.cumsum(row)[:-1].tolist() for row in LENGTHS], 41)
    expected = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2)
    theirs = [split.take(expected), *torch.autograd.grad(expected, whole, grad)]
    error = 0.0
    parts = [split.take(x).transpose(1, 2) for x in whole]
    for style in STYLES if size == 3 else ("gather", "ring"):
        how = {"documents": split, "style": style}
        out = p3d.context_parallel_attention(*parts, groups.cp, **how).transpose(1, 2)
        real = split.take(torch.ones(2, 41))[:, :, None, None]
        out = out * real  # the padding may attend to anything
        grads = torch.autograd.grad(out, whole, split.take(grad), retain_graph=True)
        ours = [out, *(all_reduce(x.contiguous(), groups.cp) for x in grads)]
        off = [(a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)]
        error = max(error, *off)
    positions = torch.cat([torch.arange(n) for row in LENGTHS for n in row]).view(2, 41)
    assert torch.equal(split.take(positions), split.positions * real[:, :, 0, 0])
    said = []
    short = [x[:, :, 1:] for x in parts]
    for call in (
        lambda: p3d.SplitSequences([[4, 0], [4]], groups.cp),
        lambda: p3d.SplitSequences([[4], [5]], groups.cp),
        lambda: split.take(torch.ones(2, 40)),
        lambda: p3d.context_parallel_attention(*parts, groups.cp, documents=split, style="rings"),
        lambda: p3d.context_parallel_attention(*parts, groups.tp, documents=split),
        lambda: p3d.context_parallel_attention(*short, groups.cp, documents=split),
        lambda: p3d.context_parallel_attention(
            parts[0], parts[1][:, :2], parts[2], groups.cp, documents=split
        ),
        lambda: p3d.context_parallel_attention(
            *(x[:, :1] for x in parts), groups.cp, documents=split, style="heads"
        ),
    ):
        with pytest.raises(p3d.Parallel3dError) as raised:
            call()
        said.append(str(raised.value))
    groups.close()
    return error, said


@pytest.mark.parametrize("size", [2, 3])
def test_a_users_model_attends_like_pytorch(size: int, pool: Pool) -> None:
    for error, said in pool.run(size, of_a_model_of_ones_own, size):
        assert error < 1e-12
        begins = [
            "SplitSequences(lengths=[[4, 0], [4]]) must have a list of whole numbers from 1 on",
            "SplitSequences(lengths=…) must be of sequences of equal length, not of 4 and 5 tokens",
            "take(x) of shape [2, 40] must begin with 2 sequences of 41 tokens",
            "context_parallel_attention(style='rings') must be gather, heads or ring; the nearest "
            "is style='ring'",
            "context_parallel_attention(group=…) of ranks [",
            "context_parallel_attention(q) of shape [2, 6, ",
            "context_parallel_attention(k, v) of 2 and 3 heads must have as many heads each",
            f"context_parallel_attention(style='heads') over {size} ranks must divide 1 query",
        ]
        for sentence, begin in zip(said, begins, strict=True):
            assert sentence.startswith(begin) and ("give" in sentence or "nearest" in sentence)
