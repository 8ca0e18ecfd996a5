"""Runs one rank of a world without its peers, on a device whose tensors have no values."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.comm.process_groups import ProcessGroups, shards_and_replicas
from parallel3d.commands.dryrun.counting import Counts, Gpu, OpCounter, Sums
from parallel3d.config.schema import Config
from parallel3d.data.sampler import Sample
from parallel3d.device import accelerator
from parallel3d.estimate.balance import run_schedule
from parallel3d.estimate.network import two_levels
from parallel3d.schedules.walk import walk
from parallel3d.simulated_device.device import TYPE
from parallel3d.simulated_device.enable import enable
from parallel3d.simulated_device.machine import SimulatedMachine
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


@dataclass
class Dry:
    """Results of one rank.

    Attributes:
        stage: index along pp; stages: its stages of the model.
        peak: bytes at the peak of a step, in `peak_phase`; `at_peak` by kind.
        live: bytes between two steps, by kind. start_peak: the peak while the trainer is built.
    """

    rank: int
    stage: int
    stages: list[int]
    counts: Counts
    peak: int
    at_peak: dict[str, int]
    peak_phase: str
    live: dict[str, int]
    start_peak: int


def dry_step(config: Config, rank: int, gpu: Gpu, placement: RankMapping | None = None) -> Dry:
    """Builds the trainer of `rank` and counts one step, after a step that allocates lazily.

    Of many micro-batches only as many run as fill the pipeline; the others cost the difference of
    steps with one and with two.

    Args:
        config: checked. gpu: prices the kernels.
        placement: the rank mapping, for two levels of dp.
    """
    machine = enable(data="meta", checks_races=False)
    if machine.data != "meta":
        raise RuntimeError("this process has the simulated device with values already")
    precision = config.precision.name
    watch = OpCounter(machine, gpu, config.compile, precision == "tf32")
    machine.observers.append(watch)
    try:
        with _groups(config, rank, placement) as groups:
            return _steps(dataclasses.replace(config, compile=False), groups, watch, machine)
    finally:
        machine.observers.remove(watch)
        gc.collect()
        machine.collect()
        machine.forget()  # each dry run has its own streams, and every wait visits all of them


def _device() -> torch.device:
    """Returns the device; torch knows its name once it is enabled."""
    return torch.device(TYPE, 0)


@contextmanager
def _groups(config: Config, rank: int, placement: RankMapping | None) -> Iterator[ProcessGroups]:
    device = _device()
    accelerator.make_current(device)
    layout, levels = layout_of(config), None
    if layout.world_size == 1:
        yield ProcessGroups.single()
        return
    if config.ddp.hierarchical and placement is not None:
        levels = two_levels(placement, "dp")
    if config.zero > 1 and config.ddp.shard_size is not None:
        levels = shards_and_replicas(layout, config.ddp.shard_size)
    dist.init_process_group(
        BACKEND,
        store=dist.HashStore(),
        rank=rank,
        world_size=layout.world_size,
        device_id=device,
    )
    try:
        timeout_s, launch = config.launch.timeout_s, config.launch
        yield ProcessGroups.create(layout, device.type, timeout_s, launch, levels=levels)
    finally:
        dist.destroy_process_group()


def _steps(
    config: Config, groups: ProcessGroups, watch: OpCounter, machine: SimulatedMachine
) -> Dry:
    memory = watch.memory
    trainer = Trainer(config, groups, _device(), train_source=Zeros(config.model.seq_length))
    trainer.rebuilds_buckets = False  # ready order would need timings
    machine.collect()
    start_peak = memory.peak
    kinds = ("world", "embedding", "pp", "dp", "dp_inner", "dp_outer", "tp")
    watch.names = {groups.pp_backward.handle: "pp"}  # counted as pp
    watch.names |= {getattr(groups, kind).handle: kind for kind in kinds}
    memory.phase = None
    microbatches, stage = config.num_microbatches, groups.coordinates.pp
    few = _fewest(config, stage)

    def counted(count: int) -> Counts:
        trainer.use(run_schedule(config, count))
        memory.label_state(trainer)
        watch.start()
        trainer.train_step()
        return watch.end()

    counted(1 if microbatches > few else few)
    # Under zero=2 the second micro-batch casts the gradients to fp32; the others only add to them.
    one = 2 if config.zero == 2 else 1
    differences = (counted(one), counted(one + 1)) if microbatches > few else None
    counts = counted(few)
    if differences is not None:
        counts = grown(counts, *differences, microbatches - few)
    machine.collect()
    placement = trainer.schedule.placement
    held = [placement.stage(stage, chunk) for chunk in range(placement.chunks)]
    return Dry(
        groups.rank, stage, held, counts, memory.peak, memory.at_peak, memory.peak_phase,
        dict(memory.live), start_peak,
    )  # fmt: skip


def _fewest(config: Config, index: int) -> int:
    """Returns the fewest micro-batches with the same peak of activations on rank `index`."""
    count = config.num_microbatches
    if config.schedule.name in ("gpipe", "auto", "file"):
        return count  # memory grows with each, or the orders depend on their number

    def live(microbatches: int) -> int:
        made = run_schedule(config, microbatches)
        return walk(made.orders, made.placement).peaks[index]

    most = live(count)
    return next((few for few in range(config.pp + MORE, count) if live(few) == most), count)


def grown(counts: Counts, one: Counts, two: Counts, times: int) -> Counts:
    """Returns `counts` with `times` more micro-batches, each of which adds `two` - `one`."""
    found = Counts()
    names = [f.name for f in dataclasses.fields(Sums)]
    for part in counts.parts:
        base, less, more = (c.parts.get(part, Sums()) for c in (counts, one, two))
        sums = [getattr(base, n) + times * (getattr(more, n) - getattr(less, n)) for n in names]
        found.parts[part] = Sums(*sums)
    for name in ("sent", "calls", "waits"):
        before, less_of, more_of = (getattr(c, name) for c in (counts, one, two))
        for key in before:
            getattr(found, name)[key] = before[key] + times * (more_of[key] - less_of[key])
    return found
