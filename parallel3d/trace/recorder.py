"""Runs one layer of a rank on tensors without values, and records what it does.

The layer stands alone in a pipeline stage, on the simulated device, in a world whose other ranks do
not exist. A recording starts where the stage's layers begin and ends where their result is ready.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.blueprint.layout import Layout
from parallel3d.build import freeze
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.loader import Batches, MicroBatch
from parallel3d.data_parallel.build import parameters_of_chunks
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.device.precision import compute_dtype, set_matmul_precision
from parallel3d.models.architecture import StageModule, architecture_of
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.parameters.copies import copy_groups
from parallel3d.parameters.gradients import supports_wide_addmm
from parallel3d.parameters.state import WeightGradients, spec_of, state_of
from parallel3d.pipeline.executor import BackwardEnd, BackwardStart, run_deferred
from parallel3d.run.keys import LaunchConfig
from parallel3d.simulated_device.device import TYPE
from parallel3d.simulated_device.machine import Kernel, Observer, SimulatedMachine, StorageMemory
from parallel3d.trace.layer_trace import (
    LayerRecord,
    LayerTrace,
    Line,
    PassRecord,
    RecordedEvents,
    highest,
)
from parallel3d.trace.products import attention_of, product_of
from parallel3d.trace.wanted import WantedTrace
from parallel3d.trace.world import (
    COLLECTIVES,
    Zeros,
    machine_without_values,
    names_of,
    whole_bytes,
    world_of,
)


@dataclass
class RecordedPass:
    """What one pass of a layer did, in order.

    Attributes:
        events: (what, whether in a repeated forward, facts) and numbers of each kernel, collective
            and wait of the host. The facts do not depend on the number of sequences.
        moments: bytes that the pass had allocated at each allocation, less those that it had freed.
        live: the same at its end.
        left: sizes of the tensors that were allocated in the pass and still exist after it.
        before_rest: number of moments before the gradients of the experts were complete.
    """

    events: list[tuple[tuple[str, bool, tuple[Any, ...]], tuple[float, ...]]] = field(
        default_factory=list
    )
    moments: list[int] = field(default_factory=list)
    live: int = 0
    left: dict[StorageMemory, int] = field(default_factory=dict)
    before_rest: int = 0

    @property
    def freed(self) -> list[int]:
        """Sizes of the tensors in `left` that have been freed after the pass."""
        return [block.nbytes for block in self.left if block.is_freed]


class PassRecorder(Observer):
    """Records the kernels, collectives and memory of a pass while one is running."""

    def __init__(self, machine: SimulatedMachine, names: dict[Any, str]) -> None:
        self.machine = machine
        self.names = names
        self.running: RecordedPass | None = None
        self.may_repeat = False

    def record_to(self, now: RecordedPass | None) -> None:
        """Records to a pass from now on; None: records nothing."""
        self.running = now

    def allow_repeats(self, may_repeat: bool) -> None:
        """Sets whether the next pass may repeat a part of the forward."""
        self.may_repeat = may_repeat

    @contextmanager
    def recording(self) -> Iterator[RecordedPass]:
        """Records a forward, or the deferred gradients of weights."""
        self.may_repeat = False
        self.running = now = self._new()
        try:
            yield now
            self.machine.collect()
        finally:
            self.running = None

    @contextmanager
    def recording_backward(self, of: Tensor, may_repeat: bool) -> Iterator[RecordedPass]:
        """Records a backward from when the gradient of the tensor `of` is there.

        `may_repeat`: whether it may repeat a part of the forward.
        """
        self.may_repeat = may_repeat
        now = self._new()

        def begin(_: Tensor) -> None:
            self.running = now

        hook = of.register_hook(begin)
        try:
            yield now
            self.machine.collect()
        finally:
            hook.remove()
            self.running = None

    def _new(self) -> RecordedPass:
        self.machine.collect()
        return RecordedPass()

    def allocated(self, block: StorageMemory) -> None:
        if (now := self.running) is not None:
            now.left[block] = block.nbytes
            now.live += block.nbytes
            now.moments.append(now.live)

    def freed(self, block: StorageMemory) -> None:
        if (now := self.running) is not None:
            now.left.pop(block, None)
            now.live -= block.nbytes

    def kernel(self, kernel: Kernel) -> None:
        if kernel.call is None and kernel.name in COLLECTIVES:
            return  # `collective` records it
        if (attention := attention_of(kernel)) is not None:
            a = attention
            facts: tuple[Any, ...] = (a.products, a.heads, a.key_heads, a.width, a.value_width)
            facts += (a.causal, a.window, a.dtype)
            numbers: tuple[float, ...] = (a.sequences, a.queries, a.keys)
            self._add("attention", facts, (*numbers, kernel.nbytes))
        elif (product := product_of(kernel)) is not None:
            numbers = (product.rows, product.columns, product.inner)
            self._add("product", (product.groups, product.dtype), (*numbers, kernel.nbytes))
        else:
            self._add("other", (kernel.name, kernel.launches), (kernel.nbytes,))

    def collective(self, name: str, group: Any, tensor: Tensor) -> None:
        size = group.size()
        facts = self.names[group], size, COLLECTIVES[name]
        self._add("sent", facts, (whole_bytes(name, size, tensor),))

    def host_wait(self, why: str) -> None:
        self._add("wait", (), ())

    def experts_done(self, _: Tensor) -> None:
        """Is called when a gradient of the experts is complete."""
        if (now := self.running) is not None:
            now.before_rest = len(now.moments)

    def _add(self, what: str, facts: tuple[Any, ...], numbers: tuple[float, ...]) -> None:
        if (now := self.running) is not None:
            again = self.may_repeat and in_recomputation()
            now.events.append(((what, again, facts), numbers))


def in_recomputation() -> bool:
    """Returns whether a checkpoint is repeating a forward; for calls in a backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(CHECKPOINT):
            return True
        frame = frame.f_back
    return False


CHECKPOINT = "torch/utils/checkpoint.py"


class MeasuredLayer(NamedTuple):
    """The passes of a layer, in the order of `PASSES`, and the sizes of tensors that it keeps.

    `defers`: whether the last two passes, which defer gradients of weights, have been run.
    """

    passes: tuple[RecordedPass, ...]
    shared: list[int]
    kept: list[int]
    deferred: list[int]
    defers: bool


class LayerRan(NamedTuple):
    """The records of a forward and a backward of a layer.

    Attributes:
        entered: the layer's input.
        shared: what came before the forward.
        given: the gradient of the result.
        grads: the gradient of the input, if the layer passes one on.
    """

    entered: RecordedPass
    shared: RecordedPass
    given: RecordedPass
    forward: RecordedPass
    backward: RecordedPass
    grads: list[Tensor]


# What has been measured so far: key of a trace → number of sequences → the layer.
Measured: TypeAlias = dict[str, dict[int, MeasuredLayer]]


class LayerRun:
    """Builds a layer of one rank, and runs its passes while `recorder` records them."""

    def __init__(self, wanted: WantedTrace, groups: ProcessGroups, recorder: PassRecorder) -> None:
        blueprint = wanted.blueprint
        self.wanted = wanted
        self.blueprint = blueprint
        self.groups = groups
        self.recorder = recorder
        self.device = torch.device(TYPE, 0)
        self.dtype = dtype = compute_dtype(blueprint.precision)
        wide = torch.promote_types(dtype, torch.float32)
        self.architecture = architecture = architecture_of(blueprint.model)
        initializer, gathers = architecture.initializer(blueprint, self.device), PendingGathers()
        layer, recomputed = wanted.layer, int(wanted.recomputed)
        held = StageBlueprint(range(layer, layer + 1), recomputed, 0, False, False, 0, True)
        stages: Sequence[StageModule] = architecture.stages_of_rank(
            blueprint, [held], initializer, groups, gathers
        )
        freeze(stages, blueprint.frozen)
        (self.stage,) = stages
        self.gradients = WeightGradients()
        if wanted.sharded:  # FSDP2 gathers the parameters, and takes each gradient from `.grad`
            for p in self.stage.parameters():
                held_in = spec_of(p).dtype(dtype)
                p.data = torch.empty(p.shape, dtype=held_in, device=self.device)
                if p.requires_grad and spec_of(p).is_expert:
                    p.register_post_accumulate_grad_hook(recorder.experts_done)
        else:
            self.engine = BucketedDataParallel(
                parameters_of_chunks(stages),
                dtype,
                partial(copy_groups, groups=groups),
                0,
                values=lambda p: torch.empty(p.shape, dtype=wide, device=self.device),
                gathers=gathers,
            )
        for parameter in self.stage.parameters():
            state_of(parameter).weight_gradients = self.gradients
        self.balance = architecture.expert_balance(blueprint, stages, groups)
        supports_wide_addmm(self.device, dtype, wide)  # the first call of a process tries it
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)

    def measured(self, sequences: int) -> MeasuredLayer:
        """Runs the layer's passes over a micro-batch of this many sequences."""
        ran = self._run(sequences)
        forward, backward = ran.forward, ran.backward
        of_all, kept = ran.shared.freed, forward.freed
        if not self.wanted.defers:
            none = RecordedPass(), RecordedPass()
            return MeasuredLayer((forward, backward, *none), of_all, kept, [], False)
        with self.gradients.deferred() as queue:
            again = self._run(sequences)
        inputs = again.backward
        # Without a norm before it, a linear layer's operand is the input of the layer itself.
        waiting = [*again.entered.left, *again.given.left, *again.forward.left, *inputs.left]
        waiting = [block for block in waiting if not block.is_freed]
        with self.recorder.recording() as weights, torch.no_grad():
            run_deferred(queue)
        deferred = [block.nbytes for block in waiting if block.is_freed]
        del again  # the gradient of the input is freed only here, so it is not among the deferred
        return MeasuredLayer((forward, backward, inputs, weights), of_all, kept, deferred, True)

    def _run(self, sequences: int) -> LayerRan:
        """Runs a forward and a backward."""
        stage, records = self.stage, []
        stage.zero_grad()  # FSDP2 reduces each micro-batch's gradients, and starts without any
        grads: list[Tensor] = []
        shape = sequences, self.wanted.tokens, self.blueprint.model.hidden_size
        with self.recorder.recording() as entered:
            x = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.wanted.of_inputs:
            (x,) = BackwardEnd.apply(grads, self.anchor, x)
        (block,) = stage.blocks.values()
        before, of_layer = ExitStack(), ExitStack()

        def begin(_: nn.Module, given: tuple[Tensor, LayerInputs]) -> None:
            if given[1].documents is not None:  # the first layer makes what all layers share
                with torch.no_grad():
                    block.forward(*given)
            before.close()
            records.append(of_layer.enter_context(self.recorder.recording()))

        hooks = [
            block.register_forward_pre_hook(begin),
            block.register_forward_hook(lambda *_: of_layer.close()),
        ]
        try:
            shared = before.enter_context(self.recorder.recording())
            batch = self._batch(sequences)
            y = stage(x, *batch, loss_scale=self.anchor)
        finally:
            for hook in hooks:
                hook.remove()
        del x, batch
        with self.recorder.recording() as given:
            start = BackwardStart.apply([torch.empty_like(y)], y)
        with self.recorder.recording_backward(y, self.wanted.recomputed) as backward:
            del y
            start.backward()
        return LayerRan(entered, shared, given, records[0], backward, grads)

    def _batch(self, sequences: int) -> MicroBatch:
        blueprint, model = self.blueprint, self.blueprint.model
        batches = Batches(
            Zeros(model.seq_length),
            sequences,
            1,
            self.groups.dp.index,
            self.device,
            needs_batch=False,
            split=self.architecture.split(blueprint, self.groups.cp),
            routes=self.balance is not None and bool(self.balance.routers),
            measures=self.architecture.measures(model),
        )
        batch = batches.micro_batch(0, 0)
        assert isinstance(batch, MicroBatch)
        counted = batch.inputs.balance
        if self.balance is None or counted is None:
            return batch
        routed = torch.zeros((), dtype=torch.float64, device=self.device)
        scaled = self.balance.scaled(counted, 1.0, sequences, routed)
        return batch._replace(inputs=replace(batch.inputs, balance=scaled))


def record(wanted: Sequence[WantedTrace], measured: Measured | None = None) -> list[LayerTrace]:
    """Runs a layer for each wanted trace, and returns what the layers do.

    `measured`: what earlier calls have measured, to which this one adds.
    """
    measured = {} if measured is None else measured
    machine = machine_without_values()
    # This imports Dynamo. During a pass, the import would keep tensors of its callers alive.
    torch.empty(1, device=torch.device(TYPE, 0)).norm()
    found: dict[WantedTrace, LayerTrace] = {}
    with released_by_references(machine):
        for layout in dict.fromkeys(each.blueprint.layout for each in wanted):
            mine = [each for each in wanted if each.blueprint.layout == layout]
            with recorder_in(layout, machine) as (groups, recorder):
                for each in mine:
                    known = measured.setdefault(each.key, {})
                    found[each] = _traced(each, groups, recorder, known)
    return [found[each] for each in wanted]


@contextmanager
def released_by_references(machine: SimulatedMachine) -> Iterator[None]:
    """Leaves the order of releases to references in a `with` block, and cleans up at its end."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        machine.collect()
        machine.forget()  # each world adds streams, and every wait visits all streams


@contextmanager
def recorder_in(
    layout: Layout, machine: SimulatedMachine
) -> Iterator[tuple[ProcessGroups, PassRecorder]]:
    """Yields the groups of rank 0 in a world of this layout, and a recorder of its passes."""
    with world_of(0, layout.world_size) as is_made:
        groups = ProcessGroups.single()
        if is_made:
            groups = ProcessGroups.create(layout, TYPE, 60.0, LaunchConfig())
        recorder = PassRecorder(machine, names_of(groups))
        machine.observers.append(recorder)
        try:
            yield groups, recorder
        finally:
            machine.observers.remove(recorder)


def _traced(
    wanted: WantedTrace,
    groups: ProcessGroups,
    recorder: PassRecorder,
    known: dict[int, MeasuredLayer],
) -> LayerTrace:
    """Returns a trace that covers the wanted sizes; adds what it measures to `known`."""
    enough = {n: layer for n, layer in known.items() if layer.defers or not wanted.defers}
    if missing := [n for n in wanted.sizes if n not in enough]:
        set_matmul_precision(wanted.blueprint.precision)
        run = LayerRun(wanted, groups, recorder)
        enough |= {n: run.measured(n) for n in missing}
        known |= enough
    exact = {n: record_of((n, enough[n]), (n + 1, enough[n])) for n in wanted.sizes}
    several = sorted(n for n in enough if n > 1)
    if len(several) < 2:
        return LayerTrace(exact)
    try:
        return LayerTrace(exact, record_of(*((n, enough[n]) for n in (several[0], several[-1]))))
    except NotLinear:
        return LayerTrace(exact)


class NotLinear(ValueError):
    """Means that something else happens with more sequences."""


def record_of(some: tuple[int, MeasuredLayer], more: tuple[int, MeasuredLayer]) -> LayerRecord:
    """Returns the lines through a layer with two numbers of sequences. May raise NotLinear."""
    (n, one), (m, other) = some, more
    line = _Through(n, m)
    forward, backward, inputs, weights = map(line.of_pass, one.passes, other.passes)
    kept = line.of(one.shared, other.shared), line.of(one.kept, other.kept)
    deferred = line.of(one.deferred, other.deferred)
    return LayerRecord(forward, backward, inputs, weights, *kept, deferred, one.defers)


class _Through(NamedTuple):
    """Lines through what is measured with `some` and with `more` sequences."""

    some: int
    more: int

    def of(self, values: Sequence[float], others: Sequence[float]) -> tuple[Line, ...]:
        if len(values) != len(others):
            raise NotLinear(f"{len(values)} numbers and {len(others)}")
        pairs = zip(values, others, strict=True)
        return tuple(Line.through(self.some, a, self.more, b) for a, b in pairs)

    def of_pass(self, one: RecordedPass, other: RecordedPass) -> PassRecord:
        """Returns the pass as a function of the number of sequences. May raise NotLinear."""
        events: Counter[tuple[Any, ...]] = Counter()
        if [what for what, _ in one.events] != [what for what, _ in other.events]:
            raise NotLinear("other events")
        for (what, numbers), (_, more) in zip(one.events, other.events, strict=True):
            events[*what, self.of(numbers, more)] += 1
        (live,) = self.of([one.live], [other.live])
        return PassRecord(
            tuple(RecordedEvents(count, *event) for event, count in events.items()),
            highest(self.of(one.moments, other.moments)),
            highest(self.of(one.moments[one.before_rest :], other.moments[other.before_rest :])),
            live,
        )
