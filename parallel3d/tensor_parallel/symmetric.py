"""GEMMs fused with their all-gather or reduce-scatter in PyTorch's symmetric memory.

`torch.ops.symm_mem` cuts the communication by ranks: a GEMM runs on the shard at hand while copy
engines fetch the next one straight from its owner's memory over NVLink. It takes CUDA devices that
can read each other's memory; ranks of one host are accepted here, where that can be asked for.

This module has not run on such hardware yet: that is why `tensor_parallel.symmetric_memory` is off
by default. The tests run its calls through PyTorch's own plain versions of the same operators.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.device import accelerator
from parallel3d.tensor_parallel.mappings import sequence_first

MODULE = "torch.distributed._symmetric_memory"  # defines the operators where it is imported
OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


@dataclass(frozen=True)
class Member:
    """What one rank of a tensor group tells the others about its device.

    Attributes:
        host: a number that the ranks of one host share.
        device: its index, −1 on a CPU.
        operators: this PyTorch has the fused operators.
    """

    host: int
    device: int
    operators: bool


def may_share(members: Sequence[Member]) -> bool:
    """Whether the group can be asked for peer access: one host, a device each, the operators."""
    devices = [m.device for m in members]
    return (
        len(members) > 1
        and min(devices) >= 0
        and len(set(devices)) == len(devices)
        and len({m.host for m in members}) == 1
        and all(m.operators for m in members)
    )


def is_usable(group: Group, device: torch.device) -> bool:
    """Whether all ranks of the group can use this module, the same answer on each; collective."""
    if group.size == 1 or not accelerator.is_accelerator(device):  # the same on all ranks of a run
        return False
    # Of torch.cuda's names, one that few other devices have.
    can_reach = getattr(accelerator.module(device), "can_device_access_peer", None)
    if can_reach is None:
        return False
    members = [Member(h, d, bool(o)) for h, d, o in _all(group, device, _facts(device))]
    if not may_share(members):
        return False
    others = [m.device for m in members if m.device != device.index]
    reaches = all(can_reach(device.index, other) for other in others)
    return all(answer for (answer,) in _all(group, device, [int(reaches)]))


def _facts(device: torch.device) -> list[int]:
    host = int.from_bytes(socket.gethostname().encode()[-7:], "little")
    return [host, device.index, int(has_operators())]


def has_operators() -> bool:
    """Whether this PyTorch has the fused operators; makes them known if it has."""
    if importlib.util.find_spec(MODULE) is None:
        return False
    importlib.import_module(MODULE)
    return all(hasattr(torch.ops.symm_mem, name) for name in OPERATORS)


def _all(group: Group, device: torch.device, numbers: list[int]) -> list[list[int]]:
    mine = torch.tensor([numbers], dtype=torch.int64, device=device)
    return collectives.all_gather(mine, group).tolist()


def gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """`overlap.gather_linear`, fused."""
    full, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
        sequence_first(x), [weight.t()], 0, group.handle.group_name, return_A=keep
    )
    y = y.transpose(0, 1).contiguous()
    if bias is not None:
        y += bias
    return y, full.transpose(0, 1).contiguous() if keep else None


def linear_scatter(x: Tensor, weight: Tensor, group: Group) -> Tensor:
    """`overlap.linear_scatter`, fused."""
    y = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        sequence_first(x), weight.t(), "sum", 0, group.handle.group_name
    )
    return y.transpose(0, 1).contiguous()
