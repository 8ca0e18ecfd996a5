"""Makes the pretended backend known to torch.distributed, and to DTensor's collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.pretend.communicator import BACKEND, Options
from parallel3d.pretend.device import TYPE
from parallel3d.pretend.nccl import PretendedNCCL
from parallel3d.pretend.works import Together


def register() -> None:
    """Makes the backend known to torch.distributed, and batches of messages go out as one."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[TYPE])
    dist.Backend.default_device_backend_map[TYPE] = BACKEND
    plain = dist.batch_isend_irecv

    def batched(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, PretendedNCCL):
            return plain(operations)
        with nullcontext() if group.wire is None else group.wire.batch():
            works = plain(operations)
        return [Together(works)]  # NCCL hands out one handle for all

    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batched


def functional() -> dict[Any, Callable[..., Any]]:
    """DTensor's collectives, which find their group by its name in C++: operator → what it does.

    Each is waited for at once.
    """
    ops = torch.ops._c10d_functional

    def all_gather(_: Any, tensor: Tensor, size: int, name: str) -> Tensor:
        group = _named(name)
        out = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
        group.all_gather_single(out, tensor.contiguous()).wait()
        return out

    def all_reduce(_: Any, tensor: Tensor, op: str, name: str) -> Tensor:
        out = tensor.clone()
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
        _named(name).allreduce([out], options).wait()
        return out

    return {
        ops.all_gather_into_tensor.default: all_gather,
        ops.all_reduce.default: all_reduce,
        ops.wait_tensor.default: lambda _, tensor: tensor,
    }


def _named(name: str) -> PretendedNCCL:
    names = dist.distributed_c10d._world.pg_names
    return next(group for group, known in names.items() if known == name)


def _create(asked: Any, options: Options | None) -> PretendedNCCL:
    group = PretendedNCCL(asked.store, asked.group_rank, asked.group_size, options, asked.timeout)
    group.meet()
    return group
