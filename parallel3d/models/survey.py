"""Describes a user's own model: what each of its parts holds. No torch.

`own_model.survey_of_model` builds every part once without memory to fill it in. Blueprint, stages,
buckets and checkpoints read it by the functions of `declared.py`, as they read the transformer.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig, OwnModelKeys
from parallel3d.parameters.declaration import FullTensor, Held

TARGET = "model._target_"


@dataclass(frozen=True)
class ModelSurvey:
    """Holds what the parts of a user's own model hold.

    Attributes:
        embedding, head: the parameters of these parts, as `declared.embedding` returns them.
        blocks: the parameters of each block that differs from those before it, by their names
            within the block.
        block_of_layer: for each layer, which of `blocks` is its own.
    """

    embedding: Held
    blocks: tuple[Held, ...]
    block_of_layer: tuple[int, ...]
    head: Held

    @cached_property
    def digest(self) -> str:
        """A text that two surveys share only if their models hold the same."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()

    @property
    def head_elements(self) -> int:
        return elements_of(self.head.values())

    def elements_of_block(self, block: int) -> int:
        return elements_of(self.blocks[block].values())


def elements_of(held: Iterable[tuple[FullTensor, ...]]) -> int:
    """Counts the elements of full tensors."""
    return sum(math.prod(tensor.shape) for tensors in held for tensor in tensors)


@dataclass
class OwnModelConfig(ModelConfig):
    """The keys of a run of a user's own model.

    The class is `_target_`, and its fields are `fields`; `instance` is the model itself, `example`
    a sample of its data (None: of a text), and `survey` what it holds. The transformer's keys have
    no effect, except `num_layers`, the number of blocks, `seq_length` and `vocab_size`: these are
    those of the model if it has them, and otherwise a sample counts as one token.
    """

    ARCHITECTURE: ClassVar[str] = "models.own_stage:OwnArchitecture"
    instance: Any = field(default=None, compare=False, repr=False)
    example: Any = field(default=None, compare=False, repr=False)
    survey: ModelSurvey | None = field(default=None, compare=False, repr=False)

    @property
    def has_vocabulary(self) -> bool:
        """Whether samples have tokens below `vocab_size`: whether the model has this field."""
        return hasattr(self.instance, "vocab_size")

    @property
    def is_of_text(self) -> bool:
        """Whether a sample has `seq_length` tokens: whether the model has this field."""
        return hasattr(self.instance, "seq_length")


def survey_of(model: ModelConfig) -> ModelSurvey | None:
    """Returns the survey of a user's own model, or None for the transformer.

    Raises UserError for a model of the user's own of which only the class's name is known, as this
    start has not named it.
    """
    if not isinstance(model, OwnModelConfig):
        return None
    if model.survey is None:
        raise UserError(
            f"the model is {TARGET}={model._target_}, a class of your own, and its code is only "
            f"run where the command names it: give {TARGET}={model._target_}"
        )
    return model.survey


def loss_of(model: ModelConfig) -> str | None:
    """Returns the name of a user's own loss, a method or a function; None for the transformer.

    The name is all that a checkpoint can know of it.
    """
    if not isinstance(model, OwnModelConfig) or model.instance is None:
        return None
    loss = model.instance.loss
    while isinstance(loss, functools.partial):
        loss = loss.func
    return str(getattr(loss, "__qualname__", type(loss).__qualname__))


def refuse_own(model: ModelConfig, command: str) -> None:
    """Raises UserError if a model is the user's own, for a command that only has the transformer.

    `command` begins the sentence, such as "generate".
    """
    if isinstance(model, OwnModelConfig):
        raise UserError(
            f"{command} is for text and the transformer of parallel3d, but the model is "
            f"{TARGET}={model._target_}, a class of your own"
        )


def unbound(target: str, fields: Mapping[str, Any]) -> OwnModelConfig:
    """Returns the configuration of a user's own model without the model, whose code is not run."""
    least = {"num_layers": 1, "seq_length": 1, "vocab_size": 2}
    found = {name: fields.get(name) for name in least}
    sizes: dict[str, Any] = {n: v if type(v) is int else least[n] for n, v in found.items()}
    name = target.rpartition(".")[2]
    return OwnModelConfig(name=name, _target_=target, fields=dict(fields), **sizes)


def tree_of(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of a model as a run saves them.

    A user's own model has its fields in place of the transformer's keys.
    """
    if isinstance(model, OwnModelConfig):
        return {"_target_": model._target_, **model.fields}
    tree = dataclasses.asdict(model)
    return {name: value for name, value in tree.items() if name not in OwnModelKeys.__annotations__}


def model_of_tree(tree: Mapping[str, Any]) -> OwnModelConfig | None:
    """Returns a user's own model as `tree_of` has saved it; None for the transformer."""
    target = tree.get("_target_")
    if not isinstance(target, str):
        return None
    return unbound(target, {name: value for name, value in tree.items() if name != "_target_"})
