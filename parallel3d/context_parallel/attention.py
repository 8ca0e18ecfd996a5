"""Causal attention of a sequence that is split over context-parallel ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.context_parallel.documents import SequenceShard


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, shard: SequenceShard) -> Tensor:
        ctx.group, ctx.shard, ctx.shape = group, shard, x.shape
        tokens = x.transpose(1, 2)  # (b, n, heads, head_dim)
        gathered = collectives.all_gather(tokens.unsqueeze(0), group)
        whole = gathered.flatten(0, 2).index_select(0, shard.order)
        return whole.unflatten(0, (len(x), -1)).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        by_rank = grad.transpose(1, 2).flatten(0, 1).index_select(0, ctx.shard.places)
        b, heads, n, size = ctx.shape
        own = collectives.reduce_scatter(by_rank.view(-1, b, n, heads, size), ctx.group)
        return own.squeeze(0).transpose(1, 2), None, None


def gather_sequence(x: Tensor, group: Group, shard: SequenceShard) -> Tensor:
    """All-gathers (b, heads, n, head_dim) to (b, heads, padded, head_dim), in sequence order."""
    return _Gather.apply(x, group, shard)


def attend_across(q: Tensor, k: Tensor, v: Tensor, group: Group, shard: SequenceShard) -> Tensor:
    """Attends from this rank's queries to the keys of all ranks, each within its own document."""
    k, v = (gather_sequence(x, group, shard) for x in (k, v))
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    at = torch.arange(k.shape[2], device=q.device)
    unseen = (at > shard.positions.unsqueeze(-1)) | (at < shard.starts.unsqueeze(-1))
    return scores.masked_fill(unseen.unsqueeze(1), -torch.inf).softmax(-1) @ v
