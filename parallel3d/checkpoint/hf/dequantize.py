"""Reads quantized tensors of safetensors as the exact numbers that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.hf.quantization import FP8, QUANTIZED, Quantization
from parallel3d.errors import UserError
from parallel3d.files import plain

SCALE = "_scale_inv"  # a scale's name is that of its weight with this end
ACTIVATION_SCALE = ".activation_scale"
BLOCKS, EXPONENTS = "_blocks", "_scales"
GROUP = 32  # weights of a row in MXFP4 that share an exponent, in 16 bytes
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
# The numbers of e2m1 by their code: sign, two bits of exponent, one bit of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def from_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int], first: int = 0) -> Tensor:
    """Multiplies rows of fp8 weights (…, rows, columns) by the scales of their blocks, in fp32.

    Args:
        scale: the scales (…, blocks of rows, blocks of columns) that these rows meet.
        first: place of the first row in its block.
    """
    found = weight.float()
    rows = (torch.arange(found.shape[-2]) + first) // block[0]
    of_rows = scale.float().index_select(-2, rows)
    # One block of columns after the other, so that no scale per weight is held.
    for number, part in enumerate(found.split(block[1], -1)):
        part.mul_(of_rows[..., number : number + 1])
    return found


def from_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Returns the numbers (…, 32 · groups) of MXFP4 in fp32, without any rounding.

    Args:
        blocks: bytes (…, groups, 16) of two e2m1 numbers each, the first in the low four bits.
        exponents: bytes (…, groups): e8m0 exponents with a bias of 127, of which 255 is NaN.
    """
    magnitudes = torch.tensor(_E2M1, dtype=torch.float64)
    codes = torch.cat([magnitudes, -magnitudes])
    scales = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    scales[255] = torch.nan
    table = torch.outer(scales, codes).float().flatten()
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    return table[exponents.int().unsqueeze(-1) * 16 + pairs].flatten(-2)


@dataclass(frozen=True)
class _Fp8Tensor:
    """Takes the place of a file and of its slice, for one tensor in fp8 blocks."""

    file: Any
    scales: Any
    key: str
    block: tuple[int, int]

    def get_tensor(self, key: str) -> Tensor:
        return self[()]

    def get_slice(self, key: str) -> _Fp8Tensor:
        return self

    def get_shape(self) -> list[int]:
        return list(self.file.get_slice(self.key).get_shape())

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, at: tuple[slice, ...]) -> Tensor:
        """Returns a part, cut in all dimensions but the last; only its own blocks are read."""
        shape, name = self.get_shape(), self.key + SCALE
        *outer, rows = _ranges(at, shape[:-1])
        height = self.block[0]
        first, end = rows.start // height, -(-rows.stop // height)
        weight = self.file.get_slice(self.key)[(*outer, rows)]
        if prod(self.scales.get_slice(name).get_shape()) == 1:  # it may have no dimensions
            scale = self.scales.get_tensor(name).reshape([1] * len(shape))
        else:
            scale = self.scales.get_slice(name)[(*outer, slice(first, end))]
        return from_fp8(weight, scale, self.block, rows.start - first * height)


@dataclass(frozen=True)
class _Mxfp4Tensor:
    """Takes the place of a file and of its slice, for one tensor in MXFP4.

    Attributes:
        transposed: whether the tensor has the transposes of the matrices in the file.
    """

    file: Any
    exponents: Any
    key: str
    transposed: bool = False

    def get_tensor(self, key: str) -> Tensor:
        return self[()]

    def get_slice(self, key: str) -> _Mxfp4Tensor:
        return self

    def get_shape(self) -> list[int]:
        *outer, rows, groups, _ = self.file.get_slice(self.key + BLOCKS).get_shape()
        sizes = [rows, groups * GROUP]
        return [*outer, *(sizes[::-1] if self.transposed else sizes)]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, at: tuple[slice, ...]) -> Tensor:
        """Returns a part, cut in all dimensions but the last."""
        cut, inputs = tuple(_ranges(at, self.get_shape()[:-1])), slice(None)
        if self.transposed:
            *outer, inputs = cut
            cut = (*outer, slice(None))
        blocks = self.file.get_slice(self.key + BLOCKS)[cut]
        found = from_mxfp4(blocks, self.exponents.get_slice(self.key + EXPONENTS)[cut])
        return found.transpose(-1, -2)[..., inputs, :] if self.transposed else found


def _ranges(at: tuple[slice, ...], sizes: list[int]) -> list[slice]:
    """Returns a slice with its bounds for each dimension; the last ones may be left out."""
    given = [*at, *[slice(None)] * (len(sizes) - len(at))]
    return [slice(*part.indices(size)[:2]) for part, size in zip(given, sizes, strict=True)]


def dequantized(
    folder: Path, where: Mapping[str, Any], quantization: Quantization
) -> dict[str, Any]:
    """Replaces the files of quantized tensors by readers of the numbers that they stand for.

    `where` maps the names of the tensors to their files. Scales are left out of the result. A
    tensor without scales stays as it is. Raises UserError if a scale does not fit its tensor.
    """
    found = dict(where)
    if quantization.method == FP8:
        for name in [name for name in where if name.endswith(SCALE)]:
            key = name.removesuffix(SCALE)
            if key in where:
                found[key] = _fp8_tensor(folder, where, key, quantization)
                del found[name]
            if quantization.static:
                found.pop(key.rpartition(".")[0] + ACTIVATION_SCALE, None)
        return found
    for name in [name for name in where if name.endswith(BLOCKS)]:
        key = name.removesuffix(BLOCKS)
        if key + EXPONENTS in where and key not in where:
            found[key] = _mxfp4_tensor(folder, where, key, quantization.transposed)
            del found[name], found[key + EXPONENTS]
    return found


def _fp8_tensor(
    folder: Path, where: Mapping[str, Any], key: str, quantization: Quantization
) -> _Fp8Tensor:
    name = key + SCALE
    shape = _checked(folder, where, key, ("F8_E4M3",))
    scale = _checked(folder, where, name, _SCALE_TYPES)
    if len(shape) < 2:
        raise UserError(
            f"from={folder}: {plain(key)} in fp8 has shape {shape}: it must be a matrix"
        )
    block = quantization.block or (max(1, *shape[-2:]),) * 2
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    if scale != grid and not (prod(grid) == prod(scale) == 1 and quantization.block is None):
        raise UserError(
            f"from={folder}: {plain(name)} has shape {scale}, but the blocks of {plain(key)}, "
            f"{shape}, need {grid} by {QUANTIZED} of config.json"
        )
    return _Fp8Tensor(where[key], where[name], key, block)


def _mxfp4_tensor(
    folder: Path, where: Mapping[str, Any], key: str, transposed: bool
) -> _Mxfp4Tensor:
    blocks = _checked(folder, where, key + BLOCKS, ("U8",))
    exponents = _checked(folder, where, key + EXPONENTS, ("U8",))
    if len(blocks) < 3 or blocks[-1] != GROUP // 2 or exponents != blocks[:-1]:
        raise UserError(
            f"from={folder}: {plain(key)}{BLOCKS} has shape {blocks} and {plain(key)}{EXPONENTS} "
            f"{exponents}: they must be (…, rows, groups, 16) and (…, rows, groups)"
        )
    return _Mxfp4Tensor(where[key + BLOCKS], where[key + EXPONENTS], key, transposed)


def _checked(
    folder: Path, where: Mapping[str, Any], name: str, types: tuple[str, ...]
) -> tuple[int, ...]:
    """Returns a tensor's shape. Raises UserError unless its type is one of `types`."""
    there = where[name].get_slice(name)
    if there.get_dtype() not in types:
        raise UserError(
            f"from={folder}: {plain(name)} is of type {there.get_dtype()}; with {QUANTIZED} of "
            f"config.json it must be {' or '.join(types)}"
        )
    return tuple(there.get_shape())
