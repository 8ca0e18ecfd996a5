"""The stages of a user's own model, behind which the trainer does not know it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parallel3d.blueprint.blueprint import Blueprint, StageBlueprint
from parallel3d.blueprint.parameters import parameter_count
from parallel3d.comm.batch_overlap import BatchOverlap
from parallel3d.comm.exchange import all_gather_json, dtype_of
from parallel3d.comm.group import SINGLE, Group
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.data_parallel.build import ShardedLayer
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.device import accelerator
from parallel3d.device.precision import compute_dtype
from parallel3d.errors import UserError, users_place
from parallel3d.experts.balance import BalanceOfRun
from parallel3d.models.architecture import Architecture, StageModule
from parallel3d.models.checkpointing import recomputed
from parallel3d.models.flops import TrainedShares
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.own_loss import LossSums, SumsOfLosses
from parallel3d.models.own_model import (
    EMBEDDING,
    HEAD,
    Model,
    OwnValues,
    Parallel,
    built,
    name_of,
    parts_of,
    take_parameters,
)
from parallel3d.models.survey import OwnModelConfig
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.state import state_of
from parallel3d.pipeline.executor import PipelineStage
from parallel3d.pipeline.offload import ActivationOffload
from parallel3d.pipeline.p2p import StageOutputs
from parallel3d.private_names import version_of
from parallel3d.tensor_parallel.layers import ShardedModule

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups


class OwnStage(StageModule):
    """Runs contiguous blocks of a user's own model, and its embedding or its head at the ends.

    Args:
        model: builds the parts.
        held: the stage's layers, and what is done with them.
        values: gets the initial values of the parameters.
        recomputes: whether a block that is recomputed keeps its input alone.
        gathers: the all-gathers of parameters for which the stage waits before it reads them.
        offload: moves saved tensors to the host, or None.
    """

    reads_batch = True
    tied_table = None

    def __init__(
        self,
        model: Model,
        held: StageBlueprint,
        parallel: Callable[[str], Parallel],
        values: OwnValues,
        recomputes: bool,
        gathers: PendingGathers,
        offload: ActivationOffload | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.first, self.last = held.first, held.last
        self.without_backward = held.without_backward
        self.recomputed = held.recomputed if recomputes else 0
        self.offloaded = held.offloaded
        self.gathers, self.offload = gathers, offload
        self.sums = SumsOfLosses()
        device = "cpu" if accelerator.has_values(values.device) else "meta"
        made: dict[str, nn.Module] = {}
        for part in parts_of(held.layers, held.first, held.last):
            made[part] = built(model, part, parallel(part), values.dtype, device)
            take_parameters(made[part], part, parallel(part).tp, values)
        # This is also the order of the parameters.
        self.embedding = made.get(EMBEDDING)
        self.layers = nn.ModuleDict({str(n): made[f"layers.{n}"] for n in held.layers})
        self.head = made.get(HEAD)

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        return dict(self.layers.items())

    @contextmanager
    def graphs_within(
        self, around: Callable[[str], AbstractContextManager[object]]
    ) -> Iterator[None]:
        """Runs nothing in `around`, because blocks of a user's own are not compiled."""
        yield

    def forward(self, x: Any, inputs: LayerInputs, loss_scale: Tensor | None = None) -> Any:
        """Returns the output of the last block or, on the last stage, the sum of the losses.

        Args:
            x: what the stage before returned; None on the first stage.
            inputs: the samples of the micro-batch, and their numbers.
            loss_scale: None for an evaluation.
        """
        trains = loss_scale is not None
        if not trains:
            inputs = replace(inputs, samples=None)
        if self.training != trains:
            self.train(trains)
        if self.embedding is not None:
            self.gathers.wait_for(EMBEDDING)
            x = self.run_part(EMBEDDING, self.embedding, inputs, x=None)
        for place, (number, block) in enumerate(self.layers.items()):
            part = f"layers.{number}"
            self.gathers.wait_for(part)
            frozen, offloads = place < self.without_backward, self.offload is not None and trains
            last = place == len(self.layers) - 1
            with (
                torch.no_grad() if frozen else nullcontext(),
                self.offload.layer(block, (inputs,), stays=place >= self.offloaded, is_last=last)
                if self.offload is not None and offloads
                else nullcontext(),
            ):
                if place < self.recomputed and not frozen:
                    run = partial(self.run_part, part, block, inputs)
                    x = recomputed(lambda x, run=run: run(x=x), x, draws=True)
                else:
                    x = self.run_part(part, block, inputs, x=x)
        if self.head is None:
            return x
        self.gathers.wait_for(HEAD)
        return self.sums.add(self.run_loss(self.run_part(HEAD, self.head, inputs, x=x), inputs))

    def take_sums(self) -> LossSums:
        """Returns and clears what the losses have counted since the last call."""
        return self.sums.take()

    def run_part(self, part: str, module: nn.Module, inputs: LayerInputs, *, x: Any) -> Any:
        """Runs a part. Raises UserError if it changes its input, or a buffer, in place."""
        given = [*_tensors(x), *inputs.batch.values()]
        before = [version_of(tensor) for tensor in given]
        buffers = [(name, b, version_of(b)) for name, b in module.named_buffers()]
        with self._named(part, x):
            out = module(inputs) if part == EMBEDDING else module(x, inputs)
        if [version_of(tensor) for tensor in given] != before:
            raise UserError(
                f"{part} of {name_of(self.model)} changes its input in place, which other parts "
                "and a repeated forward still read; give back a new tensor, as x + y for x.add_(y)"
            )
        now = dict(module.named_buffers())
        for name, buffer, version in buffers:
            if now.get(name) is not buffer or version_of(buffer) != version:
                raise UserError(
                    f"{part} of {name_of(self.model)} changes its buffer {name} in a forward: it "
                    "would depend on the split of the batch over ranks and micro-batches, and is "
                    "not saved; leave such statistics out, as nn.GroupNorm or nn.LayerNorm in "
                    "place of nn.BatchNorm"
                )
        return out if part == HEAD else _checked_output(out, part, name_of(self.model))

    def run_loss(self, outputs: Any, inputs: LayerInputs) -> Any:
        """Returns the loss of what the head gave. Raises UserError if it changes a sample."""
        before = {name: version_of(field) for name, field in inputs.batch.items()}
        with self._named("loss"):
            loss = self.model.loss(outputs, inputs)
        for name, field in inputs.batch.items():
            if before.get(name) != version_of(field):
                raise UserError(
                    f'the loss of {name_of(self.model)} changes inputs.batch["{name}"] in place, '
                    "which a repeated call still reads; make a new tensor, as by x.clone()"
                )
        return loss

    @contextmanager
    def _named(self, part: str, x: Any = None) -> Iterator[None]:
        """Adds the name of a part, and the shape of its input, to an error of the user's code."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in _tensors(x))
            given = f", which was given x of shape {shapes}" if shapes else ""
            place = f"{part} of {name_of(self.model)}{users_place(error)}"
            error.add_note(f"The error was raised in {place}{given}.")
            raise


def _tensors(x: Any) -> Sequence[Tensor]:
    return [value for value in (x if isinstance(x, tuple | list) else (x,)) if value is not None]


def _checked_output(out: Any, part: str, model: str) -> Any:
    """Returns a part's output as the part behind it gets it, on this or another stage.

    Raises UserError if it is neither a tensor nor a tuple of several ones.
    """
    if isinstance(out, Tensor):
        return out
    values = tuple(out) if isinstance(out, tuple | list) else (out,)
    if not values or not all(isinstance(value, Tensor) for value in values):
        kinds = ", ".join(type(value).__name__ for value in values) or "nothing"
        raise UserError(
            f"{part} of {model} must return a tensor or a tuple of tensors, not {kinds}"
        )
    if len(values) == 1:
        raise UserError(
            f"{part} of {model} must return a tensor or a tuple of several tensors, not a "
            f"{type(out).__name__} of one; give back the tensor itself"
        )
    return values


class OwnArchitecture(Architecture[OwnStage]):
    """Builds the stages of a user's own model; the methods do what `Architecture` says."""

    counts_loss = True

    def initializer(self, blueprint: Blueprint, device: torch.device) -> OwnValues:
        computes_in = compute_dtype(blueprint.precision)
        return OwnValues(torch.promote_types(computes_in, torch.float32), device, computes_in)

    def stages_of_rank(
        self,
        blueprint: Blueprint,
        held: Sequence[StageBlueprint],
        initializer: Initializer,
        groups: ProcessGroups,
        gathers: PendingGathers,
        overlap: BatchOverlap | None = None,
        offload: ActivationOffload | None = None,
    ) -> list[OwnStage]:
        assert isinstance(initializer, OwnValues)
        model = model_of(blueprint.model)

        def parallel(part: str) -> Parallel:
            return Parallel(groups.tp, blueprint.layer.sp, blueprint.seed, part)

        how = initializer, blueprint.layer.repeats.layer, gathers, offload
        return [OwnStage(model, one, parallel, *how) for one in held]

    def sharded_layers(self, stages: Sequence[OwnStage]) -> list[ShardedLayer]:
        return [
            ShardedLayer(block, None, index >= stage.without_backward)
            for stage in stages
            for index, block in enumerate(stage.layers.values())
            if any(True for _ in block.parameters())
        ]

    def messages(
        self,
        blueprint: Blueprint,
        stages: Sequence[OwnStage],
        run: Sequence[PipelineStage],
        groups: ProcessGroups,
        device: torch.device,
        example: Callable[[], tuple[Any, ...]],
    ) -> list[StageOutputs]:
        """Runs every stage once without gradients, and describes what each but the last one sends.

        It also counts how often a forward uses each of this package's layers. Raises UserError, or
        the error of the user's code, if a stage fails.
        """
        (inputs,) = example()
        sends: list[StageOutputs] = []
        places = blueprint.assignment.places
        if not accelerator.has_values(device):
            return self._messages_alone(blueprint, groups, device, inputs)
        for number, (rank, chunk) in enumerate(places):
            facts: Any = None
            failure: Exception | None = None
            if rank == groups.pp.index:
                x = sends[-1].zeros(device) if number else (None,)
                try:
                    with torch.no_grad(), _counted_uses(stages[chunk]):
                        out = run[chunk](x[0] if len(x) == 1 else x, inputs, None)
                    if number < len(places) - 1:
                        made = StageOutputs.of(out, number)
                        facts = made.shapes, str(made.dtype)
                    else:
                        facts = (), ""
                except Exception as error:
                    failure = error
                    facts = str(error) if isinstance(error, UserError) else None
            facts = all_gather_json(facts, groups.pp.handle, device)[rank]
            if failure is not None:
                raise failure
            if isinstance(facts, str):
                raise UserError(facts)
            if facts is None:
                raise RuntimeError(f"stage {number} of the pipeline failed on a remote rank")
            if number < len(places) - 1:
                shapes, dtype = facts
                sends.append(StageOutputs(tuple(map(tuple, shapes)), dtype_of(dtype)))
        return sends

    def _messages_alone(
        self, blueprint: Blueprint, groups: ProcessGroups, device: torch.device, inputs: LayerInputs
    ) -> list[StageOutputs]:
        """Does the same as `messages` without the other ranks, on a device without values."""
        # The engine would cast the parameters to the compute dtype.
        computes_in = compute_dtype(blueprint.precision)
        values = OwnValues(computes_in, device, computes_in)
        sends: list[StageOutputs] = []
        x: Any = None
        for number, held in enumerate(blueprint.stages[:-1]):
            (stage,) = self.stages_of_rank(blueprint, [held], values, groups, PendingGathers())
            with torch.no_grad():
                x = stage(x, inputs, None)
            sends.append(StageOutputs.of(x, number))
        return sends

    def compile(self, stages: Sequence[OwnStage], saves_operands: bool) -> None:
        raise AssertionError("check_own_model refuses compile=true")

    def expert_balance(
        self, blueprint: Blueprint, stages: Sequence[OwnStage], groups: ProcessGroups
    ) -> BalanceOfRun | None:
        return None

    def sums_replicated(self, blueprint: Blueprint) -> bool:
        return False  # the model says for each parameter whether its gradient is a part

    def split(self, blueprint: Blueprint, cp: Group) -> SequenceSplit | None:
        return None

    def flops_per_token(
        self, model: ModelConfig, shares: TrainedShares, example: Callable[[], tuple[Any, ...]]
    ) -> tuple[float, str]:
        (inputs,) = example()
        of_batch, formula = forward_flops(model_of(model), inputs), COUNTED
        forward = 2.0 * parameter_count(model)
        if of_batch is None:
            formula = BY_PARAMETERS
        else:
            forward = of_batch / (len(inputs.samples) * model.seq_length)
        return forward * (1 + shares.backward + shares.weights), formula

    def measures(self, model: ModelConfig) -> bool:
        return False

    def notices(self, blueprint: Blueprint, device: torch.device) -> Iterator[str]:
        yield from ()


@contextmanager
def _counted_uses(stage: nn.Module) -> Iterator[None]:
    """Counts the calls of this package's layers in a forward, and sets the uses of parameters.

    A layer adds its weight's gradient in each of its backwards (`ParameterSpec.uses`).
    """
    calls = dict.fromkeys((m for m in stage.modules() if isinstance(m, ShardedModule)), 0)

    def count(module: nn.Module, _: Any) -> None:
        calls[module] += 1  # type: ignore[index]

    hooks = [module.register_forward_pre_hook(count) for module in calls]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    uses = Counter[nn.Parameter]()  # several layers may share a parameter
    for module, times in calls.items():
        uses.update(dict.fromkeys(module.parameters(recurse=False), times))
    for parameter, times in uses.items():
        state = state_of(parameter)
        if state.spec is not None:
            state.spec = replace(state.spec, uses=max(1, times))


COUNTED = "3 × the forward's products, as PyTorch's FlopCounterMode counts them"
BY_PARAMETERS = "6 × parameters, as the model does not run on the meta device"


def forward_flops(model: Model, inputs: LayerInputs) -> float | None:
    """Counts the FLOPs of a forward of the whole model, which runs on the meta device.

    It returns None for a model that needs values, such as one whose shapes depend on them.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports a second's worth of modules

    batch = {name: tensor.to("meta") for name, tensor in inputs.batch.items()}
    wide = {n: t.float() if t.is_floating_point() else t for n, t in batch.items()}
    inputs = replace(inputs, batch=wide, samples=None)
    x: Any = None
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            for part in parts_of(range(model.num_layers), True, True):
                alone = Parallel(SINGLE, False, 0, part)
                module = built(model, part, alone, torch.float32, "meta").eval()
                x = module(inputs) if part == EMBEDDING else module(x, inputs)
    except Exception as error:  # whatever the user's code raises without values
        log.info("FLOPs are not counted, because the model needs values: %s", error)
        return None
    return float(counter.get_total_flops())


def model_of(config: ModelConfig) -> Model:
    """Returns the model of a run of a user's own model."""
    assert isinstance(config, OwnModelConfig)
    assert isinstance(config.instance, Model)
    return config.instance
