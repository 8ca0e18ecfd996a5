"""Provides what a rank needs to run without its peers on the simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample, SampleSource
from parallel3d.device import accelerator
from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import OwnModelConfig
from parallel3d.simulated_device.device import TYPE
from parallel3d.simulated_device.enable import enable
from parallel3d.simulated_device.machine import SimulatedMachine
from parallel3d.simulated_device.nccl import BACKEND

COLLECTIVES = {  # the simulated device's names → the names that `bus_factor` uses
    **{op: op for op in ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")},
    # A message counts only at its sender, so a receive counts as a barrier, which has no bytes.
    **{"allreduce": "all_reduce", "send": "send_recv", "receive": "barrier"},
}


def machine_without_values() -> SimulatedMachine:
    """Returns this process's simulated machine, whose tensors have no values.

    Raises RuntimeError if it has the simulated device with values already.
    """
    machine = enable(data="meta", checks_races=False)
    if machine.data != "meta":
        raise RuntimeError("this process already has the simulated device, but with values")
    return machine


@contextmanager
def world_of(rank: int, size: int) -> Iterator[bool]:
    """Makes this process rank `rank` of a world of `size` ranks, whose other ranks do not exist.

    Yields whether torch.distributed was initialised, which a world of one rank does not need.
    """
    device = torch.device(TYPE, 0)  # torch only knows the device's name once it is enabled
    accelerator.make_current(device)
    if size == 1:
        yield False
        return
    ranks: dict[str, Any] = {"rank": rank, "world_size": size}
    dist.init_process_group(BACKEND, store=dist.HashStore(), device_id=device, **ranks)
    try:
        yield True
    finally:
        dist.destroy_process_group()


def names_of(groups: ProcessGroups) -> dict[Any, str]:
    """Returns the names under which a run's communicators are counted.

    If several groups share a communicator, the name of the last of them in `kinds` is used.
    """
    of_data = ("dp_cp", "dp", "dp_inner", "dp_outer")
    kinds = ("world", "embedding", "pp", *of_data, "cp", "tp", "edp", "ep")
    of_kinds = (getattr(groups, kind) for kind in kinds)
    # Gradients that are sent to earlier stages count as pp. Without cp, dp_cp is the group dp.
    return {groups.pp_backward.handle: "pp"} | {group.handle: group.name for group in of_kinds}


def whole_bytes(name: str, size: int, tensor: torch.Tensor) -> int:
    """Returns the bytes to which `bus_factor` refers for a collective over `size` ranks.

    `tensor` is the input of this rank, and an all-gather's bytes are those of its result.
    """
    return tensor.nbytes * (size if name == "all_gather" else 1)


class Zeros:
    """Provides samples that consist of token 0 only, without a mask."""

    masks = False

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length
        tokens = np.zeros(seq_length + 1, dtype=np.int64)
        self._sample = Sample(tokens, np.ones(seq_length, dtype=bool))

    def sample(self, i: int) -> Sample:
        return self._sample


class OneSample:
    """Provides one sample of a user's own data again and again."""

    def __init__(self, example: Any, seq_length: int) -> None:
        self.seq_length = seq_length
        self._sample = example

    def sample(self, i: int) -> Any:
        return self._sample


def samples_for(model: ModelConfig) -> SampleSource:
    """Returns samples that have the shapes of a model's data, and no meaning."""
    example = model.example if isinstance(model, OwnModelConfig) else None
    if example is None:
        return Zeros(model.seq_length)
    return OneSample(example, model.seq_length)
