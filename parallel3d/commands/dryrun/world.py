"""Runs one rank of a world without its peers, on a device whose tensors have no values."""

from __future__ import annotations

import dataclasses
import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.dryrun.counting import (
    COMMUNICATION,
    KINDS,
    OF_KERNELS,
    PARTS,
    Counts,
    Gpu,
    StepCounter,
)
from parallel3d.config.schema import Config
from parallel3d.data.sampler import Sample
from parallel3d.device import accelerator
from parallel3d.estimate.analytic_memory import states_of
from parallel3d.estimate.balance import run_schedule
from parallel3d.simulated_device.device import TYPE
from parallel3d.simulated_device.enable import enable
from parallel3d.simulated_device.nccl import BACKEND
from parallel3d.topology.layout import layout_of
from parallel3d.topology.tiling import RankMapping
from parallel3d.trainer import Trainer

MORE = 1  # micro-batches beyond those that fill the pipeline; more do not change the peak


class Zeros:
    """Samples of one token, all unmasked."""

    masks = False

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length
        tokens = np.zeros(seq_length + 1, dtype=np.int64)
        self._sample = Sample(tokens, np.ones(seq_length, dtype=bool))

    def sample(self, i: int) -> Sample:
        return self._sample


def dry_step(
    config: Config, rank: int, gpu: Gpu, placement: RankMapping | None = None
) -> dict[str, Any]:
    """Builds the trainer of `rank`, and returns the facts of one step, after one that allocates
    lazily.

    Args:
        config: checked. gpu: prices the kernels.
        placement: the rank mapping, for two levels of dp.
    """
    machine = enable(data="meta", checks_races=False)
    if machine.data != "meta":
        raise RuntimeError("this process has the simulated device with values already")
    counter = StepCounter(machine, gpu, config.compile, config.precision.name == "tf32")
    machine.observers.append(counter)
    try:
        with _groups(config, rank, placement) as groups:
            return _step(dataclasses.replace(config, compile=False), groups, counter)
    finally:
        machine.observers.remove(counter)
        gc.collect()
        machine.collect()
        machine.forget()  # each dry run has its own streams, and every wait visits all of them


@contextmanager
def _groups(config: Config, rank: int, placement: RankMapping | None) -> Iterator[ProcessGroups]:
    device = torch.device(TYPE, 0)  # torch knows its name once it is enabled
    accelerator.make_current(device)
    world = layout_of(config).world_size
    if world == 1:
        yield ProcessGroups.single()
        return
    ranks: dict[str, Any] = {"rank": rank, "world_size": world}
    dist.init_process_group(BACKEND, store=dist.HashStore(), device_id=device, **ranks)
    try:
        yield ProcessGroups.of_run(config, device.type, placement)
    finally:
        dist.destroy_process_group()


def _step(config: Config, groups: ProcessGroups, counter: StepCounter) -> dict[str, Any]:
    """Of many micro-batches only as many run as fill the pipeline; the others cost the difference
    of steps with one and with two."""
    device = torch.device(TYPE, 0)
    train = dataclasses.replace(config.train, batch_schedule=None)  # its last size counts
    config = dataclasses.replace(config, train=train)
    trainer = Trainer(config, groups, device, train_source=Zeros(config.model.seq_length))
    trainer.rebuilds_buckets = False  # ready order would need timings
    counter.machine.collect()
    start_peak, counter.building = counter.peak, False
    kinds = ("world", "embedding", "pp", "dp_cp", "dp", "dp_inner", "dp_outer", "cp", "tp")
    counter.names = {groups.pp_backward.handle: "pp"}  # counted as pp
    of_kinds = (getattr(groups, kind) for kind in kinds)
    counter.names |= {group.handle: group.name for group in of_kinds}  # dp_cp may be dp
    stage = groups.coordinates.pp
    few = _fewest(config, stage)
    more = config.num_microbatches - few

    def counted(count: int) -> Counts:
        trainer.use(run_schedule(config, count))
        counter.label_state(trainer)
        counter.start()
        trainer.train_step()
        return counter.end()

    counted(1 if more else few)
    # Under zero=2 the second micro-batch casts the gradients to fp32; the others only add to them.
    first = 2 if config.zero == 2 else 1
    one, two = (counted(first), counted(first + 1)) if more else (Counts(), Counts())
    counts = counted(few)
    counts = Counts({key: n + more * (two[key] - one[key]) for key, n in counts.items()})
    counter.machine.collect()
    placement, offload = trainer.schedule.placement, trainer.executor.offload
    parts = {
        part: {what: counts[what, part] for what in OF_KERNELS} for part in (*PARTS, COMMUNICATION)
    }
    return {
        "rank": groups.rank,
        "stage": stage,
        "stages": [placement.stage(stage, chunk) for chunk in range(placement.chunks)],
        **{f"{kind}_bytes": counter.at_peak[kind] for kind in KINDS},
        "peak_bytes": counter.peak,
        "peak_in": counter.peak_phase,
        "live_bytes": dict(counter.live),
        "between_steps_bytes": sum(counter.live.values()),
        "start_peak_bytes": start_peak,
        "host_bytes": 0 if offload is None else offload.host.nbytes,
        "offloaded": counts.of("copied"),
        **{what: counts.sum(what) for what in OF_KERNELS},
        "bytes": counts.sum("bytes") - parts[COMMUNICATION]["bytes"],
        "host_syncs": counts.sum("waits"),
        "host_waits": counts.of("waits"),
        "groups": {
            group: {"bytes_sent": counts["sent", group], "calls": calls}
            for group, calls in counts.of("calls").items()
        },
        "parts": parts,
    }


def _fewest(config: Config, index: int) -> int:
    """Returns the fewest micro-batches that keep as many activations on rank `index` as all, with
    as many weight gradients deferred."""
    count, name = config.num_microbatches, config.schedule.name
    if name in ("gpipe", "auto", "file"):
        return count  # memory grows with each, or the orders depend on their number

    def most(microbatches: int) -> tuple[dict[tuple[Any, ...], float], float]:
        held: dict[tuple[Any, ...], float] = defaultdict(float)
        waits = 0.0
        for action, seen in states_of(config, index, microbatches).items():
            deferred = seen.deferred.sum(axis=1)
            waits = max(waits, deferred.max())
            # FSDP2's gradients add to it from a chunk's first backward on.
            begun = map(tuple, seen.begun & (config.zero > 1))
            for chunks, live in zip(begun, seen.live.sum(axis=1) + deferred, strict=True):
                held[action, chunks] = max(held[action, chunks], live)
        return held, waits

    all_of = most(count)
    return next((few for few in range(config.pp + MORE, count) if most(few) == all_of), count)
