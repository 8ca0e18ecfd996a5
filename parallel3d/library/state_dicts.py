"""Provides state dicts of split modules, either sharded for DCP or whole on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.errors import UserError
from parallel3d.library.module_pipeline import Pipeline, in_order_of_modules, of_all_stages
from parallel3d.tensor_parallel.layers import ShardedModule


def sharded_state_dict(net: nn.Module) -> dict[str, Any]:
    """Returns the state dict of this rank's part, for `torch.distributed.checkpoint`.

    Tensors that tensor-parallel layers or `fully_shard` split over ranks are DTensors with the
    whole shape; all others are plain tensors. A `Pipeline` returns the tensors of this rank's
    stages. The names are those of the whole model. The values share the parameters' memory, so that
    `dcp.load(sharded_state_dict(net))` loads into the module itself, however many ranks saved the
    checkpoint. The call is not collective.
    """
    with _sharded(net):
        return net.state_dict()


def full_state_dict(net: nn.Module) -> dict[str, Any]:
    """Returns the whole model's state dict on rank 0, in CPU memory, and an empty dict elsewhere.

    It equals the state dict of the same model built from PyTorch's layers, and `load_state_dict`
    accepts it under any split. Each device holds only one whole tensor at a time. The call is
    collective over the world.

    Raises UserError, on every rank, if a state on a stage other than rank 0's is not a tensor, or
    if the module contains a `Pipeline` but is not one itself.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    inside = [m for m in net.modules() if isinstance(m, Pipeline) and m.group.size > 1]
    if inside not in ([], [net]):
        raise UserError(
            f"full_state_dict({type(net).__name__}) must get a Pipeline itself, or a module "
            "without one; give the pipeline and the other modules one by one instead"
        )
    sent = bool(inside) and inside[0].group.ranks[0] == 0  # other stages send to rank 0
    found: dict[str, Any] = {}
    for name, value in sharded_state_dict(net).items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if first or sent:
            # The dict gets a copy, which the next training step does not change.
            is_tensor = isinstance(whole, Tensor)
            found[name] = whole.detach().to("cpu", copy=True) if is_tensor else whole
    if sent:
        pp, device = inside[0].group, inside[0].device
        # Entries of rank 0's own stages that are not tensors need not be sent.
        tensors = {name: v for name, v in found.items() if isinstance(v, Tensor)}
        for name, value in of_all_stages(tensors if first else found, pp, device):
            if first:
                found[name] = value.cpu()
        found = in_order_of_modules(found)
    return found if first else {}


@contextmanager
def _sharded(net: nn.Module) -> Iterator[None]:
    """Makes `net.state_dict()` return shards within this context, without gathering them."""
    parts = [m for m in net.modules() if isinstance(m, (ShardedModule, Pipeline))]
    try:
        for part in parts:
            part.gathers_state = False
        yield
    finally:
        for part in parts:
            part.gathers_state = True
