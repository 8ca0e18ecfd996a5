"""Describes a user's own model: what each of its parts holds. No torch.

`own_model.survey_of_model` builds every part once without memory to fill it in. Blueprint, stages,
buckets and checkpoints read it by the functions of `declared.py`, as they read the transformer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from parallel3d.models.keys import ModelConfig
from parallel3d.parameters.declaration import FullTensor, Held


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

    The class is `_target_`, and its fields are `fields`; `instance` is the model itself, and
    `survey` what it holds. The transformer's keys have no effect, except `num_layers`, the number
    of blocks, `seq_length` and `vocab_size`: these are those of the model if it has them, and
    otherwise a sample counts as one token.
    """

    ARCHITECTURE: ClassVar[str] = "models.own_model:OwnArchitecture"
    instance: Any = field(default=None, compare=False, repr=False)
    survey: ModelSurvey | None = field(default=None, compare=False, repr=False)


def survey_of(model: ModelConfig) -> ModelSurvey | None:
    """Returns the survey of a user's own model, or None for the transformer."""
    return model.survey if isinstance(model, OwnModelConfig) else None
