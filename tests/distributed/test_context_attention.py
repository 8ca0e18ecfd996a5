"""Every style of context parallelism is explicit attention, and sends the bytes of its formula."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from parallel3d.comm.group import Group
from parallel3d.comm.operation_log import LoggedOperation, OperationLog
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import LaunchConfig
from parallel3d.context_parallel import attention
from parallel3d.context_parallel.attention import ContextParallel
from parallel3d.context_parallel.documents import SequenceSplit, make_documents
from parallel3d.models.attention import attend_split
from parallel3d.models.recompute import recomputed
from parallel3d.topology.layout import Layout
from tests.distributed.pool import Pool
from tests.unit.test_context_attention import PACKS, explicit, random_inputs
from tests.unit.test_context_split import starts_of

STYLES = ("gather", "ring", "heads")
HEADS, KV_HEADS = 12, {2: 4, 3: 1, 4: 2}  # by the number of ranks: also fewer than ranks


def size_of(operation: LoggedOperation) -> int:
    return math.prod(operation.shape) * getattr(torch, operation.dtype.split(".")[-1]).itemsize


def sent(operation: LoggedOperation, size: int) -> float:
    """Bytes that a rank sends: of the whole tensor, or, in a ring, of its own."""
    if operation.name == "ring_shift":
        return size_of(operation)
    assert operation.name in ("all_gather", "reduce_scatter", "all_to_all")
    return size_of(operation) * (size - 1) / size


def expected(style: str, size: int, again: bool, queries: int, keys: int) -> float:
    """The formula of `context_parallel.attention` in fp64; bytes of all q, and of all k and v."""
    part = (size - 1) / size
    if style == "gather":
        return 3 * part * keys
    if style == "ring":
        return (3 + again) * part * keys
    more = max(1, size // KV_HEADS[size])
    return (2 + again) * part * (2 * queries + keys * more) / size


def attended(
    size: int, shared_memory: bool, least_bytes: int, again: bool
) -> list[tuple[str, float, float]]:
    """By style: its name, the largest error, and what was sent over what the formula says."""
    launch = LaunchConfig(shared_memory=shared_memory)
    groups = ProcessGroups.create(Layout(1, 1, 1, size), "cpu", 300, launch)
    with patch.object(attention, "LEAST_BYTES", least_bytes):
        found = [(style, *attended_by(style, groups.cp, again)) for style in STYLES]
    groups.close()
    return found


def attended_by(style: str, group: Group, again: bool) -> tuple[float, float]:
    """`again`: the forward is recomputed in the backward."""
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

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # As the linear layer behind it, this reads the result in the backward.
        return attend_split(q, k, v, documents, cp=cp) @ identity

    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = recomputed(attend, *leaves) if again else attend(*leaves)
    ours = [out, *torch.autograd.grad(out, leaves, grad)]
    theirs = map(take, explicit(inputs, PACKS, split.padded))
    error = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    queries, keys = (x.numel() * x.itemsize for x in (inputs[0], torch.cat(inputs[1:3])))
    formula = expected(style, group.size, again, queries, keys)
    return error, sum(sent(operation, group.size) for operation in log.recent(1000)) / formula


@pytest.mark.parametrize(
    ("size", "shared_memory", "least_bytes", "again"),
    [
        (2, True, 1, False),  # a head after the other
        (2, False, 1 << 30, True),
        (3, True, 1 << 30, True),
        (4, True, 1, True),  # fewer key-value heads than ranks
        (4, False, 1, False),
    ],
)
def test_styles_attend_alike_and_send_what_their_formula_says(
    size: int, shared_memory: bool, least_bytes: int, again: bool, pool: Pool
) -> None:
    for rank in pool.run(size, attended, size, shared_memory, least_bytes, again):
        for style, error, bytes in rank:
            assert error < 1e-12, (style, error)
            assert bytes == pytest.approx(1, rel=1e-12), style
