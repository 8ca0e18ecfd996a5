"""Remembers the shapes of results of operators on meta tensors, whose kernels are slow.

Most meta kernels are Python and take longer than everything else the simulated device does for an
operator. A step repeats the same operators with the same shapes in every layer, so each is run
once, and its results are made directly from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.private_names import storage_address
from parallel3d.simulated_device.recurrent_cells import CELLS


class _New(NamedTuple):
    """Describes a result with memory of its own."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class Unknown(Exception):
    """Means that the results may depend on more than shapes."""


class MetaResults:
    """Runs operators on meta tensors, each only once for the same shapes and other arguments.

    After `most` different calls all are forgotten, because numbers that change at every step, such
    as a learning rate, would fill the memory.
    """

    def __init__(self, most: int = 20_000) -> None:
        self.most = most
        # Results of operators: new tensors, positions of arguments, or both in a tuple. None
        # stands for operators that must always run.
        self._known: dict[Any, tuple[Any] | None] = {}

    def run(self, operator: Callable[..., Any], data: list[Any], named: dict[str, Any]) -> Any:
        """Returns what `operator(*data, **named)` returns; the operator must be no view."""
        compute = CELLS.get(operator, operator)
        try:
            key = operator, key_of(data), key_of([*named.items()]), torch.get_default_dtype()
            known = self._known.get(key)
        except (Unknown, TypeError):  # TypeError: an argument is not hashable
            return compute(*data, **named)
        if known is not None:
            return _made(known[0], data)
        out = compute(*data, **named)
        if key not in self._known:
            if len(self._known) >= self.most:
                self._known.clear()
            is_reshaped = key_of(data) != key[1]  # by an operator such as transpose_
            self._known[key] = None if is_reshaped else _described(out, data, named)
        return out


def key_of(value: Any) -> Any:
    """Returns what results depend on, of arguments whose tensors are on the meta device.

    Raises Unknown if they depend on more.
    """
    if isinstance(value, Tensor):
        if value.dim() and not value.is_meta:
            raise Unknown
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(key_of, value))
    return type(value), value  # 1, 1.0 and True are equal, but make different types


def _made(description: Any, data: list[Any]) -> Any:
    if isinstance(description, _New):
        return description.make()
    if isinstance(description, int):
        return data[description]
    if description is None:
        return None
    return tuple(_made(item, data) for item in description)


def _described(out: Any, data: list[Any], named: dict[str, Any]) -> tuple[Any] | None:
    """Returns the description of results, in a tuple; None if they cannot be made again."""
    given = [id(value) for value in data if isinstance(value, Tensor)]
    positions = {id(value): at for at, value in enumerate(data)}
    taken = {storage_address(t.untyped_storage()) for t in _tensors((data, *named.values()))}

    def describe(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, Tensor):
            if id(value) in given:
                if given.count(id(value)) > 1:  # another call may pass two different tensors
                    raise Unknown
                return positions[id(value)]
            storage = value.untyped_storage()
            new = _New(value.shape, value.stride(), value.dtype)
            address = storage_address(storage)
            if address in taken or new.make().untyped_storage().nbytes() != storage.nbytes():
                raise Unknown
            taken.add(address)
            return new
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(map(describe, value))
        raise Unknown

    try:
        return (describe(out),)
    except Unknown:
        return None


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
