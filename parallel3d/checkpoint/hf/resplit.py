"""Reads tensors of a file under names that cut them elsewhere, without a copy of the whole.

OLMo Hybrid has a convolution each for queries, keys and values in its published files. transformers
joins the three, and saves thirds of the joined tensor under the same names, or the joined tensor
itself under its own name. It reads all of these forms alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

PARTS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
JOINED = "conv1d.weight"


@dataclass(frozen=True)
class _Rows:
    """Takes the place of a file and of its slice: rows of concatenated tensors.

    Attributes:
        pieces: file and name of each concatenated tensor, with its number of rows.
        begin, end: the first of the rows, and the one behind the last.
    """

    pieces: Sequence[tuple[Any, str, int]]
    begin: int
    end: int

    def get_tensor(self, key: str) -> Tensor:
        return self[(slice(None),)]

    def get_slice(self, key: str) -> _Rows:
        return self

    def get_shape(self) -> list[int]:
        file, name, _ = self.pieces[0]
        return [self.end - self.begin, *file.get_slice(name).get_shape()[1:]]

    def get_dtype(self) -> str:
        types = {file.get_slice(name).get_dtype() for file, name, _ in self.pieces}
        return str(types.pop() if len(types) == 1 else " and ".join(sorted(types)))

    def __getitem__(self, at: tuple[slice, ...]) -> Tensor:
        first, end, _ = at[0].indices(self.end - self.begin)
        first, end, before, found = self.begin + first, self.begin + end, 0, []
        for file, name, rows in self.pieces:
            low, high = max(first, before), min(end, before + rows)
            if low < high:
                found.append(file.get_slice(name)[(slice(low - before, high - before), *at[1:])])
            before += rows
        return torch.cat(found)


def convolutions_apart(
    where: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Replaces convolutions that are joined, or cut elsewhere, by readers of the wanted tensors.

    Args:
        where: the file of each tensor.
        wanted: names that the tensors may have in a folder, with their shapes.
    """
    found = dict(where)
    for name in wanted:
        prefix = name.removesuffix(PARTS[0])
        names = [prefix + part for part in PARTS]
        if prefix == name or not all(part in wanted for part in names):
            continue
        given = [prefix + JOINED] if prefix + JOINED in where else names
        if not all(one in where for one in given):
            continue
        shapes = [tuple(where[one].get_slice(one).get_shape()) for one in given]
        shapes_wanted = [wanted[one] for one in names]
        heights = [shape[0] for shape in shapes_wanted]
        fits = all(len(shape) == 3 and shape[1:] == shapes_wanted[0][1:] for shape in shapes)
        if shapes == shapes_wanted or not fits or sum(s[0] for s in shapes) != sum(heights):
            continue
        pieces = [(where[one], one, shape[0]) for one, shape in zip(given, shapes, strict=True)]
        for one in given:
            del found[one]
        ends = list(accumulate(heights))
        for part, height, end in zip(names, heights, ends, strict=True):
            found[part] = _Rows(pieces, end - height, end)
    return found
