"""A model of the user's own: an embedding, a row of blocks and a head, each of any modules.

A class of `Model` builds the modules; everything else here is about what they hold. Modules of
plain PyTorch are whole on every tensor-parallel rank, and the layers of this package are split.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from parallel3d.comm.group import SINGLE, Group
from parallel3d.device import accelerator
from parallel3d.errors import UserError
from parallel3d.models.dropout import Dropout
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.survey import ModelSurvey, OwnModelConfig
from parallel3d.parameters.declaration import Dimension, FullTensor, Held
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ParameterSpec
from parallel3d.parameters.state import state_of
from parallel3d.private_names import tables_of
from parallel3d.tensor_parallel.layers import ColumnParallelLinear, ShardedModule

EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True)
class Parallel:
    """What a part of a user's own model may know of the layout.

    Attributes:
        tp: the ranks over which the layers of this package split the part.
        sequence_parallel: whether these ranks also divide the sequence (`sp=true`).
        seed: the run's seed.
        part: name of the part: embedding, layers.3 or head.
    """

    tp: Group
    sequence_parallel: bool
    seed: int
    part: str

    def dropout(self, name: str, p: float) -> Dropout:
        """Creates a dropout, called as module(x, inputs), that drops the same in every layout.

        Args:
            name: a name that no other dropout of the part has.
            p: probability that an element is dropped.

        Shapes: (b, s, channels), under sequence parallelism this rank's part of the sequence.
        """
        part = self.tp.index if self.sequence_parallel and self.tp.size > 1 else 0
        return Dropout(self.seed, f"{self.part}.{name}", p, part=part)


class Model:
    """A model of the user's own, for `p3d.fit(model=…)` and `model._target_`.

    A subclass, best a dataclass, has fields, which are the keys `model.<field>`, among them
    `num_layers`, the number of blocks. A rank builds only the parts that it holds, each with the
    same initial values in every layout. Besides, all parts are built once on the meta device, to
    find the names and shapes of their parameters.
    """

    num_layers: int

    def embedding(self, parallel: Parallel) -> nn.Module:
        """Returns a module that is called with `inputs`, and returns x: a tensor or a tuple."""
        raise NotImplementedError

    def block(self, number: int, parallel: Parallel) -> nn.Module:
        """Returns block `number`, a module that is called with (x, inputs) and returns x."""
        raise NotImplementedError

    def head(self, parallel: Parallel) -> nn.Module:
        """Returns a module that is called with (x, inputs); its result goes to `loss`."""
        raise NotImplementedError

    def loss(self, outputs: Any, inputs: LayerInputs) -> Any:
        """Returns the `p3d.Loss` of a micro-batch from the result of the head."""
        raise NotImplementedError


def name_of(model: Model) -> str:
    return type(model).__name__


def built(
    model: Model, part: str, parallel: Parallel, dtype: torch.dtype, device: str
) -> nn.Module:
    """Builds a part of a model, with initial values that depend only on seed and part.

    Raises UserError if the model does not say the part, or the part is no module.
    """
    method = part if part in (EMBEDDING, HEAD) else "block"
    if getattr(type(model), method, None) is getattr(Model, method):
        given = "self, number, parallel" if method == "block" else "self, parallel"
        raise UserError(
            f"{name_of(model)} has no {method}: write {method}({given}), which returns an nn.Module"
        )
    with _seeded(f"{parallel.seed}/{part}"), _default_dtype(dtype), torch.device(device):
        if part == EMBEDDING:
            made: Any = model.embedding(parallel)
        elif part == HEAD:
            made = model.head(parallel)
        else:
            made = model.block(int(part.rpartition(".")[2]), parallel)
    if not isinstance(made, nn.Module):
        raise UserError(
            f"{name_of(model)}.{method} must return an nn.Module, but returned "
            f"{type(made).__name__}"
        )
    return made


@contextmanager
def _seeded(text: str) -> Iterator[None]:
    """Seeds the process's generators of random numbers, and restores them at the end."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def declared_by(module: nn.Module, part: str) -> Held:
    """Declares the parameters that a part holds, by their names within it.

    The layers of this package say how they are split; other parameters are whole on every rank.
    Full tensors are named by their place in the part. Raises UserError for a parameter that cannot
    be trained here.
    """
    found: dict[nn.Parameter, tuple[FullTensor, ...]] = {}
    names: dict[nn.Parameter, str] = {}
    for path, owner in module.named_modules():
        for key, parameter in owner.named_parameters(recurse=False):
            if parameter in found:
                continue
            name = f"{path}.{key}" if path else key
            if isinstance(parameter, UninitializedParameter):
                raise UserError(
                    f"{part}.{name} has no shape before the first forward; give the layer its "
                    "sizes in place of nn.Lazy…"
                )
            if not parameter.requires_grad:
                raise UserError(
                    f"{part}.{name} does not require a gradient; keep it in a buffer if it is a "
                    "constant, or freeze it with optim.freeze if it is not trained in this run"
                )
            if not parameter.is_floating_point():
                raise UserError(
                    f"{part}.{name} is a parameter of {parameter.dtype}, but must be of a "
                    "floating-point type; keep it in a buffer instead"
                )
            if not parameter.dim():
                raise UserError(
                    f"{part}.{name} is a parameter without dimensions, but must have one at least; "
                    "give it the shape (1,)"
                )
            names[parameter] = name
            if isinstance(owner, ShardedModule):
                tensors = _of_split_layer(owner, key, path)
            else:
                tensors = (_whole(name, owner, key, parameter),)
            if part in (EMBEDDING, HEAD):  # Muon is for the matrices of the layers
                tensors = tuple(tensor._replace(muon=False) for tensor in tensors)
            if state_of(parameter).is_partial:
                tensors = tuple(tensor._replace(of_heads=True) for tensor in tensors)
            found[parameter] = tensors
    return {names[parameter]: tensors for parameter, tensors in found.items()}


def _of_split_layer(layer: ShardedModule, key: str, path: str) -> tuple[FullTensor, ...]:
    def renamed(tensor: FullTensor) -> FullTensor:
        of_layer = tensor.name.removeprefix(layer.name).lstrip(".")
        return tensor._replace(name=f"{path}.{of_layer}" if path else of_layer)

    return tuple(renamed(tensor) for tensor in layer.held[key])


def _whole(name: str, owner: nn.Module, key: str, parameter: nn.Parameter) -> FullTensor:
    dims = tuple(Dimension(f"dim{i}", size) for i, size in enumerate(parameter.shape))
    is_matrix = isinstance(owner, nn.Linear) and key == "weight"
    return FullTensor(name, dims, decays=len(dims) > 1, muon=is_matrix)


def parts_of(layers: Sequence[int] | range, first: bool, last: bool) -> list[str]:
    """Returns the names of the parts of a stage, in the order in which they run."""
    return [*[EMBEDDING] * first, *(f"layers.{number}" for number in layers), *[HEAD] * last]


def check_dropouts(module: nn.Module, part: str, model: Model) -> None:
    """Raises UserError if two dropouts of a part have one name."""
    seen: set[str] = set()
    for dropout in module.modules():
        if not isinstance(dropout, Dropout):
            continue
        name = dropout.named.removeprefix(f"{part}.")
        if name in seen:
            raise UserError(
                f"{part} of {name_of(model)} has two dropouts named {name}, which would drop the "
                "same elements; give each parallel.dropout(name, p) of a part a name of its own"
            )
        seen.add(name)


def survey_of_model(model: Model, dtype: torch.dtype = torch.float32) -> ModelSurvey:
    """Builds every part of a model once without memory, and returns what they hold.

    Raises UserError if two parts share a parameter, or if a part is no module.
    """
    count = model.num_layers
    held: dict[str, Held] = {}
    owners: dict[nn.Parameter, str] = {}
    kept = []  # parts live until the end, so that no two parameters have one identity
    for part in parts_of(range(count), True, True):
        module = built(model, part, Parallel(SINGLE, False, 0, part), dtype, "meta")
        kept.append(module)
        held[part] = declared_by(module, part)
        check_dropouts(module, part, model)
        for name, parameter in module.named_parameters():
            place = f"{part}.{name}"
            other = owners.setdefault(parameter, place)
            if other != place:
                raise UserError(
                    f"{place} is the same parameter as {other}, but parts of {name_of(model)} may "
                    "lie on different ranks, where its copies would drift apart; give each part a "
                    "parameter of its own"
                )
    blocks: list[Held] = []
    of_layer = []
    for number in range(count):
        mine = held[f"layers.{number}"]
        if mine not in blocks:
            blocks.append(mine)
        of_layer.append(blocks.index(mine))
    embedding = {name: _named(EMBEDDING, tensors) for name, tensors in held[EMBEDDING].items()}
    head = {name: _named(HEAD, tensors) for name, tensors in held[HEAD].items()}
    return ModelSurvey(embedding, tuple(blocks), tuple(of_layer), head)


def _named(part: str, tensors: tuple[FullTensor, ...]) -> tuple[FullTensor, ...]:
    return tuple(tensor._replace(name=f"{part}.{tensor.name}") for tensor in tensors)


def own_config(
    base: ModelConfig, model: Model, loss: Callable[[Any, LayerInputs], Any] | None = None
) -> OwnModelConfig:
    """Returns the configuration of a run of `model`, made from the keys of `model.*`.

    `loss` takes the place of the model's own.

    Raises UserError if the model's parts or its numbers are not usable.
    """
    values = {f.name: getattr(base, f.name) for f in dataclasses.fields(ModelConfig)}
    for name in ("num_layers", "seq_length", "vocab_size"):
        number = getattr(model, name, 1)
        least = 2 if name == "vocab_size" else 1
        if name != "num_layers" and not hasattr(model, name):
            number = least
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise UserError(
                f"{name_of(model)}.{name}={number!r} must be a whole number from {least} on"
            )
        values[name] = number
    values |= {"name": name_of(model), "max_position_embeddings": None}
    if loss is not None:
        model = copy.copy(model)
        object.__setattr__(model, "loss", loss)  # a dataclass may be frozen
    return OwnModelConfig(**values, instance=model, survey=survey_of_model(model))


class OwnValues(Initializer):
    """Holds the initial values of the parameters that a rank's parts were built with.

    `computes_in` is the compute dtype, which floating buffers have.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, computes_in: torch.dtype) -> None:
        super().__init__(0, dtype, device, deferred=True)
        object.__setattr__(self, "computes_in", computes_in)
        object.__setattr__(self, "held", dict[ParameterSpec, Tensor]())

    held: dict[ParameterSpec, Tensor]
    computes_in: torch.dtype

    def fill_rows(self, spec: ParameterSpec, first: int, out: Tensor) -> None:
        """Writes the initial values of a local parameter's rows from `first` on into `out`."""
        if accelerator.has_values(out.device):
            out.copy_(self.held[spec][first : first + len(out)])


def take_parameters(module: nn.Module, part: str, tp: Group, values: OwnValues) -> None:
    """Gives each parameter of a built part its spec, and moves its values to `values`.

    The parameters then have no memory, and the buffers are on the device of the run.
    """
    held = {name: _named(part, tensors) for name, tensors in declared_by(module, part).items()}
    specs: dict[nn.Parameter, ParameterSpec] = {}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for parameter, name in names.items():
        spec = ParameterSpec.of(held[name], tp.size, tp.index)
        if tuple(parameter.shape) != spec.shape:
            raise UserError(
                f"{part}.{name} has shape {tuple(parameter.shape)} on this rank, but must have "
                f"{spec.shape} with tp={tp.size}: only the layers of parallel3d, made with "
                "parallel.tp, are split over ranks"
            )
        specs[parameter] = spec
        values.held[spec] = parameter.detach()
    made = {parameter: _without_values(parameter, values) for parameter in specs}
    for owner in module.modules():
        if isinstance(owner, ShardedModule):
            owner.held = {key: held[names[owner.get_parameter(key)]] for key in owner.held}
        if isinstance(owner, ColumnParallelLinear):
            owner.sums_shared = False  # the trainer sums the gradients of all such parameters
        parameters, _ = tables_of(owner)
        for key, parameter in [*parameters.items()]:
            if parameter is not None:
                setattr(owner, key, made[parameter])
        for key, buffer in owner.named_buffers(recurse=False):
            setattr(owner, key, _on_device(buffer, values))
    for parameter, spec in specs.items():  # a split layer has set that of its parameters
        state_of(made[parameter]).spec = spec


def _without_values(parameter: nn.Parameter, values: OwnValues) -> nn.Parameter:
    """Returns the parameter with one element of memory, on the device of the run.

    It stays the same object if it can, because a module may hold it in a list of its own too.
    """
    state_of(parameter).unhook()
    empty = torch.zeros((), dtype=values.dtype, device=values.device).expand(parameter.shape)
    try:
        parameter.data = empty
    except RuntimeError:  # tensors of the device are of another kind than those of the CPU
        return nn.Parameter(empty)
    return parameter


def _on_device(buffer: Tensor, values: OwnValues) -> Tensor:
    """Returns a buffer on the device of the run, of the compute dtype if it is floating."""
    dtype = values.computes_in if buffer.is_floating_point() else buffer.dtype
    if buffer.device.type == "meta":  # the run computes without values
        return torch.zeros(buffer.shape, dtype=dtype, device=values.device)
    return buffer.to(values.device, dtype)
