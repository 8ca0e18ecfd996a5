"""Traces the parts of a user's own model in a process that is forked from this one.

The class of such a model may be known to this process alone, as in a script. So the child is a fork
of it, which alone enables the simulated device: this process may train afterwards. Nothing is
remembered on disk, because the code of the class may be another in the next run.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.layout import Layout
from parallel3d.errors import UserError, said_in_full
from parallel3d.models.survey import OwnModelConfig
from parallel3d.trace.layer_trace import LayerPasses

RECORDER = "parallel3d.trace.own_recorder"  # imports torch, which only the child needs


class PartTrace(NamedTuple):
    """What a part of a user's own model does with a micro-batch, and what it keeps.

    Attributes:
        passes: the passes; what they keep is without the part's input, its result, and the batch.
        x: bytes of the tensors of the part's input.
        y: the same of its result; empty for the head, whose result is the loss.
        same: for each tensor of the result, which tensor of the input has the same memory, or None.
        holds_x, holds_y: whether the tensor is kept for the backward.
        holds_batch: the fields of the micro-batch that are kept for the backward.
        waits: bytes of input and batch that wait for the deferred gradients of weights.
        sends_y: whether a message with the result has the memory of the result itself.
    """

    passes: LayerPasses
    x: tuple[int, ...]
    y: tuple[int, ...]
    same: tuple[int | None, ...]
    holds_x: tuple[bool, ...]
    holds_y: tuple[bool, ...]
    holds_batch: frozenset[str]
    waits: float
    sends_y: bool


class ModelTrace(NamedTuple):
    """The parts of a user's own model.

    Attributes:
        blocks: the block of each layer; layers that compute alike share one.
        batch: bytes of each field of a micro-batch.
    """

    embedding: PartTrace
    blocks: tuple[PartTrace, ...]
    head: PartTrace
    batch: dict[str, int]


@dataclass(frozen=True)
class WantedParts:
    """The parts of a rank whose traces are wanted; those with the same `key` have the same.

    Attributes:
        blueprint: a run with such parts; its model is left out.
        sharded: whether FSDP2 gathers the parameters.
        recomputed: whether the backward of a block repeats its forward.
        defers: whether the traces must cover a backward that defers the gradients of weights.
    """

    blueprint: Blueprint
    sharded: bool
    recomputed: bool
    defers: bool

    @classmethod
    def of(cls, blueprint: Blueprint) -> WantedParts:
        """Returns the wanted parts of a run."""
        return cls(
            replace(blueprint, layout=Layout(tp=blueprint.layout.tp)),
            blueprint.data.zero > 1 and blueprint.layout.most_copies > 1,
            blueprint.layer.repeats.layer,
            blueprint.pipeline.may_split,
        )

    @property
    def unsharded(self) -> WantedParts:
        """The same parts with gradients that are added at once to earlier ones."""
        return replace(self, sharded=False)

    @property
    def kept(self) -> WantedParts:
        """The same parts without recomputation."""
        return replace(self, recomputed=False)

    @property
    def key(self) -> tuple[Any, ...]:
        run = self.blueprint
        of_run = run.layout.tp, run.layer.sp, run.micro_batch_size, run.precision.name, run.frozen
        return (*of_run, self.sharded, self.recomputed, self.defers)


class ModelTraces:
    """The traces of one model, each recorded once."""

    def __init__(self, model: OwnModelConfig) -> None:
        self.model = model
        self.known: dict[tuple[Any, ...], ModelTrace] = {}
        self.child: Any = None
        self.pipe: Connection | None = None

    def of(self, wanted: WantedParts) -> ModelTrace:
        """Returns a trace. Raises UserError if a part of the model cannot run."""
        key = wanted.key
        if key not in self.known:
            self.known[key] = self._recorded(wanted)
        return self.known[key]

    def _recorded(self, wanted: WantedParts) -> ModelTrace:
        recorder = importlib.import_module(RECORDER)
        if recorder.is_simulated():  # this process plans and does not train
            here = _found(self.model, wanted)
            if isinstance(here, str):
                raise UserError(here)
            return here
        if self.child is None:
            forks = multiprocessing.get_context("fork")
            self.pipe, other = forks.Pipe()
            ends = other, self.pipe
            made = forks.Process(target=_answer, args=(*ends, self.model), daemon=True)
            made.start()
            self.child = made
            other.close()
        assert self.pipe is not None
        nothing: Any = None  # the child has the model, whose class need not be importable
        self.pipe.send(replace(wanted, blueprint=replace(wanted.blueprint, model=nothing)))
        try:
            found = self.pipe.recv()
        except EOFError:
            self.close()
            raise RuntimeError("the process that runs the parts of a model has ended") from None
        if isinstance(found, str):
            raise UserError(found)
        assert isinstance(found, ModelTrace)
        return found

    def close(self) -> None:
        """Ends the child."""
        if self.child is not None:
            assert self.pipe is not None
            self.pipe.close()
            self.child.join()
            self.child = self.pipe = None


def _answer(pipe: Connection, parents: Connection, model: OwnModelConfig) -> None:
    """Records what is asked for until the pipe ends.

    The fork has a copy of the parent's end too, which would keep the pipe open after the parent.
    """
    parents.close()
    recorder = importlib.import_module(RECORDER)
    recorder.begin()
    while True:
        try:
            wanted: WantedParts = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        run = replace(wanted.blueprint, model=model)
        pipe.send(_found(model, replace(wanted, blueprint=run)))


def _found(model: OwnModelConfig, wanted: WantedParts) -> ModelTrace | str:
    """Returns a trace, or a sentence if the model's code cannot be built or run in the layout."""
    try:
        made: ModelTrace = importlib.import_module(RECORDER).record(model, wanted)
        return made
    except UserError as error:
        return str(error)
    except Exception as error:
        tp = wanted.blueprint.layout.tp
        return f"{model.name} cannot run with tp={tp}: {said_in_full(error)}"


class _Same:
    """A model as a key that is equal only to itself."""

    def __init__(self, model: OwnModelConfig) -> None:
        self.model = model
        self.of = model.instance, model.survey, model.example

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.of)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and all(
            a is b for a, b in zip(self.of, other.of, strict=True)
        )


def traces_of(model: OwnModelConfig) -> ModelTraces:
    """Returns the traces of a model that this process shares."""
    return _traces(_Same(model))


@functools.lru_cache(maxsize=4)
def _traces(same: _Same) -> ModelTraces:
    return ModelTraces(same.model)


def spans(parts: Sequence[PartTrace]) -> tuple[list[float], float]:
    """Returns what each part of a stage frees in its backward, and what its result then is.

    The first are bytes for each part: its own kept tensors, and its input if the part or the one
    before it keeps it. The tensors of the stage's own result count for the last part.
    """
    now = [*range(len(parts[0].x))]
    sizes: dict[int, int] = dict(enumerate(parts[0].x))
    first: dict[int, int] = {}  # tensor → the first part that keeps it, whose backward is last
    fresh = len(now)
    for number, part in enumerate(parts):
        for tensor, held in zip(now, part.holds_x, strict=True):
            if held:
                first.setdefault(tensor, number)
        after = []
        for nbytes, same, held in zip(part.y, part.same, part.holds_y, strict=True):
            tensor = fresh if same is None else now[same]
            fresh += 1
            sizes.setdefault(tensor, nbytes)
            if held:
                first.setdefault(tensor, number)
            after.append(tensor)
        now = after
    freed = [float(sum(part.passes.kept)) for part in parts]
    for tensor, number in first.items():
        freed[number] += sizes[tensor]
    return freed, float(sum(first.get(t) is not None and sizes[t] for t in now))
