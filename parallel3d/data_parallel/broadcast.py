"""Makes the values of replicas equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel3d.comm.collectives import broadcast
from parallel3d.comm.exchange import messages
from parallel3d.comm.group import Group
from parallel3d.private_names import unsafe_preserve_version_counter

MESSAGE_BYTES = 64 << 20


@torch.no_grad()
def broadcast_all(tensors: Sequence[Tensor], source: int, group: Group) -> None:
    """Broadcasts tensors of one device, of any dtypes and strides, from member `source`, in place.

    The version counters that autograd checks stay: a forward whose graph still waits for its
    backward may have saved a buffer that the next forward's broadcast writes.
    """
    if group.size == 1:
        return
    for span in messages([t.nbytes for t in tensors], MESSAGE_BYTES):
        part = [tensors[i] for i in span]
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in part])
        broadcast(flat, source, group)
        if group.index == source:
            continue
        with unsafe_preserve_version_counter(tuple(part)):
            for tensor, piece in zip(part, flat.split([t.nbytes for t in part]), strict=True):
                # The clone begins at an address that suits its dtype.
                tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
