"""Sums partial gradients over the ranks of tp, or over the first and the last stage."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.parameters.segments import Segment
from parallel3d.parameters.spec import ParameterSpec, ShardSpec, tp_replicas_of
from parallel3d.tensor_parallel.mappings import sum_over_replicas


def is_partial(spec: ParameterSpec, shard: ShardSpec, sp: bool) -> bool:
    """Returns whether each rank that holds a copy of a shard has only a part of its gradient.

    `sp`: whether sequence parallelism is on, over several ranks.
    """
    return spec.tied or shard.tp_replicas > 1 or (spec.replicated and sp)


@torch.no_grad()
def all_reduce_layernorm_grads(segments: list[Segment], tp: Group) -> None:
    """All-reduces the gradients of replicated parameters over tp, for sequence parallelism.

    Norms, biases of row-parallel layers and position embeddings have only processed this rank's
    tokens (Korthikanti et al. 2022, §4.2.2). One all-reduce sums all of their gradients.
    """
    partial = [s.grad for s in segments if s.spec.replicated]
    if tp.size == 1 or not partial:
        return
    flat = collectives.all_reduce(torch.cat(partial), tp)
    for grad, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
        grad.copy_(total)


@torch.no_grad()
def all_reduce_shared_kv_grads(segments: list[Segment], tp: Group) -> None:
    """All-reduces the gradients of shared key-value heads and of head norms over their replicas.

    These are the parts of parameters with `tp_replicas` > 1. One all-reduce over tp sums all of
    them.
    """
    shared: dict[int, list[Tensor]] = {}
    for segment in segments:
        for tp_replicas, run in segment.by_kind(tp_replicas_of):
            shared.setdefault(tp_replicas, []).append(run.grad)
    sum_over_replicas(shared, tp)


@torch.no_grad()
def all_reduce_embedding_grads(table_grad: Tensor | None, embedding: Group) -> None:
    """All-reduces the gradient of a tied table over the first and the last stage.

    Megatron-LM does the same. `table_grad` is None on other stages and without tied embeddings.
    """
    if table_grad is not None and embedding.size > 1:
        # A small all-reduce first absorbs the wait for the other stage, so that the time of the
        # large one is communication only.
        number = torch.zeros(1, dtype=torch.float64, device=table_grad.device)
        collectives.all_reduce_few(number, embedding)
        collectives.all_reduce(table_grad, embedding)
