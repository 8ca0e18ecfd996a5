"""Runs the parts of a user's own model on tensors without values, and records what they do.

Each part stands alone in a pipeline stage, as the layer of `recorder.py` does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel3d.blueprint.blueprint import Blueprint, StageBlueprint
from parallel3d.build import freeze
from parallel3d.comm.group import SINGLE
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.loader import Batches, OwnMicroBatch
from parallel3d.data_parallel.build import parameters_of_chunks
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.device.precision import compute_dtype, set_matmul_precision
from parallel3d.models.architecture import StageModule, architecture_of
from parallel3d.models.own_model import Model, Parallel, built
from parallel3d.models.survey import OwnModelConfig
from parallel3d.parameters.copies import copy_groups
from parallel3d.parameters.gradients import supports_wide_addmm
from parallel3d.parameters.state import WeightGradients, spec_of, state_of
from parallel3d.pipeline.executor import BackwardEnd, BackwardStart, run_deferred
from parallel3d.pipeline.p2p import as_tuple
from parallel3d.simulated_device.device import TYPE
from parallel3d.simulated_device.machine import SimulatedMachine, StorageMemory
from parallel3d.trace.alike import facts_of
from parallel3d.trace.own_trace import ModelTrace, PartTrace, WantedParts
from parallel3d.trace.recorder import (
    MeasuredLayer,
    PassRecorder,
    RecordedPass,
    record_of,
    recorder_in,
    released_by_references,
)
from parallel3d.trace.world import machine_without_values, samples_for


def is_simulated() -> bool:
    """Returns whether this process has the simulated device."""
    return hasattr(torch, TYPE)


def begin() -> None:
    """Prepares a process that only records."""
    torch.set_num_threads(1)


def record(model: OwnModelConfig, wanted: WantedParts) -> ModelTrace:
    """Runs the parts of a model, and returns what they do.

    Raises UserError, or the error of the user's code, if a part fails.
    """
    machine = machine_without_values()
    torch.empty(1, device=torch.device(TYPE, 0)).norm()  # imports what would keep tensors alive
    with (
        released_by_references(machine),
        recorder_in(wanted.blueprint.layout, machine) as (groups, recorder),
    ):
        set_matmul_precision(wanted.blueprint.precision)
        made = _Parts(model, wanted, groups, recorder, machine).all()
    gc.collect()  # modules of a user's own may hold each other in circles
    machine.collect()
    return made


class _Parts:
    def __init__(
        self,
        model: OwnModelConfig,
        wanted: WantedParts,
        groups: ProcessGroups,
        recorder: PassRecorder,
        machine: SimulatedMachine,
    ) -> None:
        self.model = model
        self.wanted = wanted
        self.groups = groups
        self.recorder = recorder
        self.machine = machine
        self.device = torch.device(TYPE, 0)
        self.dtype = compute_dtype(wanted.blueprint.precision)
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        run = wanted.blueprint
        self.batches = Batches(
            samples_for(model),
            run.micro_batch_size,
            1,
            0,
            self.device,
            vocab_size=model.vocab_size if model.has_vocabulary else None,
            fields_in=self.dtype,
        )
        self.sizes: dict[str, int] = {}
        supports_wide_addmm(self.device, self.dtype, self.wide)  # a process tries it once

    def all(self) -> ModelTrace:
        """Runs the parts in the order of the model, each on the shapes of the one before it."""
        run, last = self.wanted.blueprint, self.model.num_layers - 1
        shapes: tuple[torch.Size, ...] = ()
        embedding, shapes = self._part(StageBlueprint.plain(range(0), first=True), shapes)
        alike: dict[Any, tuple[PartTrace, tuple[torch.Size, ...]]] = {}
        blocks = []
        for layer in range(last + 1):
            frozen = layer < run.first_trained
            key = shapes, frozen, run.first_trained < layer, *self._kind_of(layer)
            if key not in alike:
                again = int(self.wanted.recomputed)
                held = StageBlueprint(
                    range(layer, layer + 1), again, 0, False, False, int(frozen), not frozen
                )
                alike[key] = self._part(held, shapes)
            trace, shapes = alike[key]
            blocks.append(trace)
        head, _ = self._part(StageBlueprint.plain(range(0), last=True), shapes)
        return ModelTrace(embedding, tuple(blocks), head, self.sizes)

    def _kind_of(self, layer: int) -> tuple[Any, ...]:
        """Returns what must be equal in blocks that compute alike."""
        part, instance = f"layers.{layer}", self.model.instance
        assert isinstance(instance, Model)
        module = built(instance, part, Parallel(SINGLE, False, 0, part), torch.float32, "meta")
        survey = self.model.survey
        assert survey is not None
        frozen = sorted(
            name.removeprefix(f"{part}.")
            for name in self.wanted.blueprint.frozen
            if name.startswith(f"{part}.")
        )
        alike = repr((module, facts_of(module, layer))).replace(part, "layer")
        return survey.block_of_layer[layer], alike, str(frozen)

    def _part(
        self, held: StageBlueprint, shapes: tuple[torch.Size, ...]
    ) -> tuple[PartTrace, tuple[torch.Size, ...]]:
        """Runs a part on tensors of these shapes, and returns its trace and its result's shapes."""
        made = _PartRun(self, held, shapes)
        trace = made.trace()
        self.sizes |= made.batch_sizes
        return trace, made.result

    def batch(self) -> tuple[OwnMicroBatch, dict[str, StorageMemory]]:
        """Loads a micro-batch; returns it with the memory of its fields."""
        batch = self.batches.micro_batch(0, 0)
        assert isinstance(batch, OwnMicroBatch)
        tensors = dict(batch.inputs.batch)
        if batch.inputs.samples is not None:
            tensors["samples of the run"] = batch.inputs.samples
        return batch, {name: self.block_of(tensor) for name, tensor in tensors.items()}

    def block_of(self, tensor: Any) -> StorageMemory:
        return self.machine.block_of(tensor.data_)


class _PartRun:
    """Builds a part of one rank, and runs its passes while they are recorded."""

    def __init__(self, parts: _Parts, held: StageBlueprint, shapes: tuple[torch.Size, ...]) -> None:
        run: Blueprint = parts.wanted.blueprint
        self.parts = parts
        self.held = held
        self.shapes = shapes
        self.result: tuple[torch.Size, ...] = ()
        self.batch_sizes: dict[str, int] = {}
        architecture = architecture_of(parts.model)
        initializer, gathers = architecture.initializer(run, parts.device), PendingGathers()
        stages = architecture.stages_of_rank(run, [held], initializer, parts.groups, gathers)
        freeze(stages, run.frozen)
        self.stage: StageModule = stages[0]
        self.gradients = WeightGradients()
        if parts.wanted.sharded:  # FSDP2 gathers the parameters, and takes each gradient
            for p in self.stage.parameters():
                held_in = spec_of(p).dtype(parts.dtype)
                p.data = torch.empty(p.shape, dtype=held_in, device=parts.device)
        elif any(True for _ in self.stage.parameters()):
            self.engine = BucketedDataParallel(
                parameters_of_chunks(stages),
                parts.dtype,
                partial(copy_groups, groups=parts.groups),
                0,
                values=lambda p: torch.empty(p.shape, dtype=parts.wide, device=parts.device),
                gathers=gathers,
            )
        for parameter in self.stage.parameters():
            state_of(parameter).weight_gradients = self.gradients
        number = next(iter(held.layers), run.model.num_layers if held.last else -1)
        self.of_inputs = run.first_trained < number

    def trace(self) -> PartTrace:
        """Runs the part, and returns what it does."""
        ran = self._run()
        inputs, weights, deferred, waits = RecordedPass(), RecordedPass(), list[int](), 0.0
        defers = self.parts.wanted.defers and ran.has_backward
        if defers:
            with self.gradients.deferred() as queue:
                again = self._run()
            inputs = again.backward
            inner = (*again.of_gradients, *again.forward.left, *inputs.left)
            inner = tuple(block for block in inner if not block.is_freed)
            outer = [b for b in (*again.of_x, *again.of_batch.values()) if not b.is_freed]
            with self.parts.recorder.recording() as weights, torch.no_grad():
                run_deferred(queue)
            deferred = [block.nbytes for block in inner if block.is_freed]
            waits = float(sum(block.nbytes for block in outer if block.is_freed))
        passes = ran.forward, ran.backward, inputs, weights
        measured = MeasuredLayer(passes, [], ran.kept, deferred, defers)
        count = self.parts.wanted.blueprint.micro_batch_size
        record = record_of((count, measured), (count + 1, measured))
        return PartTrace(
            record.at(count),
            x=tuple(block.nbytes for block in ran.of_x),
            y=tuple(block.nbytes for block in ran.of_y),
            same=tuple(ran.of_x.index(y) if y in ran.of_x else None for y in ran.of_y),
            holds_x=ran.holds_x,
            holds_y=ran.holds_y,
            holds_batch=ran.holds_batch,
            waits=waits,
            sends_y=ran.sends_y,
        )

    def _run(self) -> _Ran:
        """Runs a forward and, if the part has one, a backward."""
        parts, stage, grads = self.parts, self.stage, list[Tensor]()
        stage.zero_grad()  # FSDP2 reduces each micro-batch's gradients, and starts without any
        xs: tuple[Tensor, ...] = tuple(
            torch.empty(shape, dtype=parts.dtype, device=parts.device) for shape in self.shapes
        )
        ran = _Ran(of_x=[parts.block_of(x) for x in xs])
        if xs and self.of_inputs:
            xs = BackwardEnd.apply(grads, parts.anchor, *xs)
        batch, ran.of_batch = parts.batch()
        self.batch_sizes = {name: block.nbytes for name, block in ran.of_batch.items()}
        with parts.recorder.recording() as ran.forward:
            x: Any = xs[0] if len(xs) == 1 else xs or None
            ys = as_tuple(stage(x, *batch, loss_scale=parts.anchor))
        if not self.held.last:
            ran.of_y = [parts.block_of(y) for y in ys]
            self.result = tuple(y.shape for y in ys)
            ran.sends_y = len(ys) == 1 and ys[0].is_contiguous()
        del x, xs, batch
        ran.has_backward = ys[0].requires_grad
        begin = _Begin(parts.recorder, self.held.recomputed > 0)
        if ran.has_backward:
            given = [torch.empty_like(y) for y in ys]
            ran.of_gradients = [parts.block_of(gradient) for gradient in given]
            start = BackwardStart.apply(given, *ys)
            del given
            ys[0].register_hook(begin)
        del ys
        parts.machine.collect()
        ran.look()
        if ran.has_backward:
            with begin.recorded() as ran.backward:
                start.backward()
        return ran


@dataclass
class _Ran:
    """What a forward and a backward of a part did.

    Attributes:
        forward, backward: the passes.
        has_backward: whether the second one was run.
        of_x, of_y, of_batch: the memory of the part's input, of its result, and of the batch.
        of_gradients: the memory of the gradient of its result.
        holds_x, holds_y, holds_batch, sends_y: as in `PartTrace`.
        kept: sizes of what else was kept for the backward.
    """

    of_x: list[StorageMemory]
    of_y: list[StorageMemory] = field(default_factory=list)
    of_batch: dict[str, StorageMemory] = field(default_factory=dict)
    of_gradients: list[StorageMemory] = field(default_factory=list)
    forward: RecordedPass = field(default_factory=RecordedPass)
    backward: RecordedPass = field(default_factory=RecordedPass)
    has_backward: bool = False
    sends_y: bool = False
    holds_x: tuple[bool, ...] = ()
    holds_y: tuple[bool, ...] = ()
    holds_batch: frozenset[str] = frozenset()
    kept: list[int] = field(default_factory=list)

    def look(self) -> None:
        """Finds what exists between the forward and the backward."""
        self.holds_x = tuple(not block.is_freed for block in self.of_x)
        self.holds_y = tuple(not block.is_freed for block in self.of_y)
        exist = (name for name, block in self.of_batch.items() if not block.is_freed)
        self.holds_batch = frozenset(exist)
        left = (b for b in self.forward.left if not b.is_freed and b not in self.of_y)
        self.kept = [block.nbytes for block in left] if self.has_backward else []


class _Begin:
    """Records a backward from when the gradient of a tensor, whose hook this is, is there."""

    def __init__(self, recorder: PassRecorder, may_repeat: bool) -> None:
        self.recorder = recorder
        self.may_repeat = may_repeat
        self.now = RecordedPass()

    def __call__(self, _: Tensor) -> None:
        self.recorder.record_to(self.now)

    @contextmanager
    def recorded(self) -> Iterator[RecordedPass]:
        self.recorder.machine.collect()
        self.recorder.allow_repeats(self.may_repeat)
        try:
            yield self.now
            self.recorder.machine.collect()
        finally:
            self.recorder.record_to(None)
