"""Whether the ranks wrapped the same module, said before anything of it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence, Set
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import Group

Entry = list[object]  # kind, name, shape, type, strides, whether it is trained
T = TypeVar("T", bound=Tensor)
IGNORED = "_ddp_params_and_buffers_to_ignore"  # PyTorch's name of what is left to each rank
FACTS = ("name", "shape", "type", "strides", "requires_grad")


def left(named: Iterable[tuple[str, T]], ignored: Set[str]) -> list[tuple[str, T]]:
    """Those that are not ignored."""
    return [(name, tensor) for name, tensor in named if name not in ignored]


def described(module: nn.Module, ignored: Set[str]) -> list[Entry]:
    """What must be the same on all ranks: parameters and buffers in their order."""
    return [
        *(_entry("parameter", name, p) for name, p in left(module.named_parameters(), ignored)),
        *(_entry("buffer", name, b) for name, b in left(module.named_buffers(), ignored)),
    ]


def _entry(kind: str, name: str, tensor: Tensor) -> Entry:
    if is_lazy(tensor):
        return [kind, name, "not known yet", str(tensor.dtype), None, tensor.requires_grad]
    shape, strides = list(tensor.shape), list(tensor.stride())
    return [kind, name, shape, str(tensor.dtype), strides, tensor.requires_grad]


def check_agreement(
    module: nn.Module, group: Group, device: torch.device, ignored: Set[str] = frozenset()
) -> None:
    """Collective. Raises ValueError on every rank, the same sentence, where two ranks differ."""
    mine = described(module, ignored)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(all_gather_json(digest, group.handle, device))) == 1:
        return
    everyone = all_gather_json(mine, group.handle, device)
    for rank, theirs in zip(group.ranks[1:], everyone[1:], strict=True):
        if theirs != everyone[0]:
            first = _difference(everyone[0], theirs, group.ranks[0], rank)
            raise ValueError(f"the ranks' modules differ: {first}")


def _difference(ours: list[Entry], theirs: list[Entry], rank: int, other: int) -> str:
    for a, b in zip(ours, theirs, strict=False):
        if a == b:
            continue
        if a[:2] != b[:2]:
            return f"rank {rank} has {a[0]} {a[1]} where rank {other} has {b[0]} {b[1]}"
        what = next(i for i in range(2, len(a)) if a[i] != b[i])
        return (
            f"{a[0]} {a[1]} has {FACTS[what - 1]} {a[what]} on rank {rank} "
            f"and {b[what]} on rank {other}"
        )
    longer, who, lacks = (ours, rank, other) if len(ours) > len(theirs) else (theirs, other, rank)
    kind, name = longer[min(len(ours), len(theirs))][:2]
    return f"rank {who} has {kind} {name}, which rank {lacks} has not"


def check_optimizers(trained: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raises ValueError for a parameter that is stepped before its gradient is reduced."""
    for name, parameter in trained:
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"parameter {name} has an optimizer that steps in the backward "
                "(_apply_optimizer_in_backward), with this rank's gradient alone; step it after "
                "the backward instead"
            )


def check_trainable(trained: Sequence[tuple[str, nn.Parameter]], module: nn.Module) -> None:
    """After `check_agreement`, so that all ranks raise alike, for what cannot train: ValueError, or
    as PyTorch's class RuntimeError where nothing is to be trained."""
    if not trained:
        raise RuntimeError(
            "the module has no parameter that requires a gradient: nothing is there to reduce"
        )
    for name, parameter in trained:
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name} has no shape yet; run a forward pass before wrapping the module"
            )
    check_optimizers(trained)
    devices = sorted({str(parameter.device) for _, parameter in trained})
    if len(devices) > 1:
        raise ValueError(
            f"the module's parameters are on {' and '.join(devices)}; they must be on one device"
        )
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise ValueError(
                f"{name} has sparse gradients, which are not reduced; sparse=False are"
            )
