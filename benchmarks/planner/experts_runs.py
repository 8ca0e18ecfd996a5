"""Runs a configuration on all of its ranks, on simulated devices with values, and measures a step.

A module of its own, which the processes of ranks import.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.dryrun.counting import (
    COLLECTIVES,
    COMMUNICATION,
    PARTS,
    StepCounter,
    gpu_of,
    names_of,
)
from parallel3d.estimate.search import with_style
from parallel3d.experts import choice
from parallel3d.models.experts import MixtureOfExperts
from parallel3d.run_config import Config
from parallel3d.simulated_device.device import TYPE, this_machine
from parallel3d.simulated_device.machine import Observer
from parallel3d.trainer import Trainer

# (group, operation, bytes of the whole) → calls
Sent = Counter[tuple[str, str, int]]
# (layer, how many numbers) → the numbers of rows that the host read of the device.
Rows = dict[tuple[int, int], tuple[int, ...]]


class Ran(NamedTuple):
    """What one rank did in a step.

    Attributes:
        launches: by part of the step.
        groups: calls and bytes sent, by group, as the dry run counts them.
        sent: collectives and messages.
        peak: most bytes of memory.
        rows: numbers of rows that the host read.
        names: kind of group → its name among `groups`; kinds may share a communicator.
    """

    launches: dict[str, float]
    groups: dict[str, dict[str, float]]
    sent: Sent
    peak: int
    rows: Rows
    names: dict[str, str]


class Ramp:
    """Has different samples; all tokens count."""

    masks = False

    def __init__(self, config: Config) -> None:
        self.seq_length, self.vocabulary = config.model.seq_length, config.model.vocab_size

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(self.seq_length + 1) * (i + 1)) % self.vocabulary
        return Sample(tokens, np.ones(self.seq_length, dtype=bool))


class Collectives(Observer):
    """Counts collectives and messages that a rank sends, each with its bytes."""

    def __init__(self, names: dict[Any, str]) -> None:
        self.names = names
        self.found: Sent = Counter()

    def collective(self, name: str, group: Any, tensor: Tensor) -> None:
        if name != "receive":
            whole = tensor.nbytes * (group.size() if name == "all_gather" else 1)
            kind = self.names.get(group, group.description)
            self.found[kind, COLLECTIVES[name], whole] += 1


@contextmanager
def numbers_of_rows(change: Callable[[int, Sequence[int]], Sequence[int]]) -> Iterator[None]:
    """Passes the numbers of rows that the host reads through `change`, with their layer."""
    reading, inner = choice._reading, MixtureOfExperts.inner
    layers: list[int] = []

    def reading_of_layer(numbers: Tensor, balanced: Sequence[int]) -> Callable[[], tuple[int, ...]]:
        layer, read = layers[-1], reading(numbers, balanced)
        return lambda: tuple(change(layer, read()))

    def inner_of_layer(self: MixtureOfExperts, *args: Any) -> Tensor:
        layers.append(self.router.layer)
        try:
            return inner(self, *args)
        finally:
            layers.pop()

    with (
        patch.object(choice, "_reading", reading_of_layer),
        patch.object(MixtureOfExperts, "inner", inner_of_layer),
    ):
        yield


def measured(config: Config) -> Ran:
    """Runs two steps on this rank of a world of simulated devices, and measures the second."""
    config = with_style(config)
    gc.collect()  # earlier runs leave cycles
    alone = config.world_size == 1
    groups = ProcessGroups.single() if alone else ProcessGroups.of_run(config, TYPE, None)
    rows: Rows = {}

    def seen(layer: int, numbers: Sequence[int]) -> Sequence[int]:
        known = rows.setdefault((layer, len(numbers)), tuple(numbers))
        assert known == tuple(numbers), "balanced routing is the same in all micro-batches"
        return numbers

    with numbers_of_rows(seen):
        ran = _second_step(config, groups, rows)
    groups.close()
    return ran


def _second_step(config: Config, groups: ProcessGroups, rows: Rows) -> Ran:
    machine, api = this_machine(), torch.get_device_module(TYPE)
    earlier = api.memory_allocated()  # FSDP2's modules outlive their run
    gpu = gpu_of(config.cluster, config.precision.name, None)
    counter = StepCounter(machine, gpu, config.precision.name == "tf32")
    counter.names = names = names_of(groups)
    collectives = Collectives(names)
    device = torch.device(TYPE, machine.device)
    trainer = Trainer(config, groups, device, train_source=Ramp(config))
    trainer.train_step()
    machine.observers += [counter, collectives]
    api.reset_peak_memory_stats()
    counter.start()
    trainer.train_step()
    counts = counter.end()
    machine.observers.remove(counter)
    machine.observers.remove(collectives)
    made = (group for group in vars(groups).values() if isinstance(group, Group) and group.handle)
    return Ran(
        {part: counts["launches", part] for part in (*PARTS, COMMUNICATION)},
        {
            name: {"bytes_sent": counts["sent", name], "calls": calls}
            for name, calls in counts.of("calls").items()
        },
        collectives.found,
        api.max_memory_allocated() - earlier,
        rows,
        {group.name: names[group.handle] for group in made},
    )
