"""Describes and cuts the tensors that travel between the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.errors import UserError

StageValues = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class StageOutputs:
    """Describes the outputs of a stage; `single`: a tensor, not a tuple of one type."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    single: bool

    @classmethod
    def of(cls, values: Any, stage: int) -> StageOutputs:
        """Describes `values`. Raises UserError for results that cannot be sent."""
        several = values if isinstance(values, tuple | list) else (values,)
        rule = f"stage {stage} of the pipeline must return a tensor or a tuple of them"
        if not several or not all(isinstance(value, Tensor) for value in several):
            raise UserError(f"{rule}, not {type(values).__name__}")
        kinds = {value.dtype for value in several}
        if len(kinds) > 1 or not several[0].is_floating_point():
            names = " and ".join(sorted(str(kind) for kind in kinds))
            raise UserError(f"{rule} of one floating-point type, not {names}")
        shapes = tuple(tuple(value.shape) for value in several)
        return cls(shapes, several[0].dtype, isinstance(values, Tensor))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0] if self.single else (sum(map(math.prod, self.shapes)),)

    def zeros(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=self.dtype, device=device) for shape in self.shapes)

    def message(self, values: StageValues) -> Tensor:
        if isinstance(values, Tensor) or self.single:
            (values,) = values if isinstance(values, tuple | list) else (values,)
            return values.contiguous()
        return torch.cat([value.reshape(-1) for value in values])

    def values(self, message: Tensor) -> tuple[Tensor, ...]:
        if self.single:
            return (message,)
        parts = message.split([math.prod(shape) for shape in self.shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))

    def facts(self) -> list:
        return [self.shapes, str(self.dtype), self.single]

    @classmethod
    def from_facts(cls, facts: Sequence) -> StageOutputs:
        shapes, dtype, single = facts
        kind = getattr(torch, dtype.removeprefix("torch."))
        return cls(tuple(map(tuple, shapes)), kind, single)

    def __str__(self) -> str:
        return " and ".join(f"{self.dtype}{list(shape)}" for shape in self.shapes)


def cut(given: Any, count: int, what: str) -> list[tuple[Tensor, ...]]:
    """Returns `count` micro-batches of equal shapes.

    Args:
        given: a batch to be cut along its first dimension (a tensor, or a tuple of tensors of the
            same length), or a list of micro-batches.
        what: inputs or targets.

    Raises:
        UserError: a batch that does not divide, shapes that differ between micro-batches.
    """
    if isinstance(given, list):
        if len(given) != count:
            raise UserError(
                f"{what} is a list of {len(given)} micro-batches, which must be "
                f"num_microbatches={count}"
            )
        parts = [part if isinstance(part, tuple) else (part,) for part in given]
    else:
        tensors = given if isinstance(given, tuple) else (given,)
        sizes = {t.shape[0] if isinstance(t, Tensor) and t.dim() else 0 for t in tensors}
        size = min(sizes, default=0)
        if len(sizes) != 1 or not size or size % count:
            near = max(1, round(size / count)) * count
            raise UserError(
                f"{what} with {' and '.join(map(str, sorted(sizes)))} samples must be tensors of a "
                f"length that num_microbatches={count} divides; the nearest is {near}"
            )
        parts = list(zip(*(tensor.chunk(count) for tensor in tensors), strict=True))
    first = shapes_of(parts[0])
    for number, part in enumerate(parts):
        if shapes_of(part) != first:
            raise UserError(
                f"micro-batch {number} of {what} has {shapes_of(part)}, but must have {first} as "
                "micro-batch 0: the shapes of a pipeline are fixed"
            )
    return parts


def shapes_of(values: Sequence[Any]) -> list[list]:
    """Returns shape and type of each tensor; for another value its type."""
    return [
        [list(v.shape), str(v.dtype)] if isinstance(v, Tensor) else [[], type(v).__name__]
        for v in values
    ]
