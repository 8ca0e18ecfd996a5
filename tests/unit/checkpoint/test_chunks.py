"""Tests chunks of flat ranges: every element of a full tensor is in exactly one, wherever it is
cut."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from parallel3d.checkpoint.storage import SHARED_ELEMENTS, chunks_by_name, share
from parallel3d.parameters.copies import Copies
from parallel3d.parameters.segments import Chunk, chunks_of_range
from parallel3d.parameters.spec import ParameterSpec, ShardSpec


@dataclass
class Part:
    """Returns a slice of a local parameter."""

    name: str
    spec: ParameterSpec
    start: int
    values: dict[str, Tensor]
    copies: Copies = field(default_factory=lambda: Copies(0, 1))


def fused(rows: int, width: int, padding: int) -> tuple[ParameterSpec, dict[str, Tensor], Tensor]:
    """Returns a local parameter with rows 2 … of `a`, columns 1 … of `b`, and padding; the full
    tensors; the local values."""
    full = {
        "a": torch.arange(1.0, 1 + (rows + 4) * width).view(rows + 4, width),
        "b": -torch.arange(1.0, 1 + rows * (width + 3)).view(rows, width + 3),
    }
    pieces = (
        ShardSpec("a", (rows + 4, width), (2, 0), (rows, width), row=0),
        ShardSpec("b", (rows, width + 3), (0, 1), (rows, width), row=rows),
    )
    padded = torch.zeros(padding, width)
    local = torch.cat((full["a"][2 : 2 + rows], full["b"][:, 1 : 1 + width], padded))
    return ParameterSpec(tuple(local.shape), pieces, replicated=False), full, local


def test_any_cut_of_a_fused_matrix_is_at_most_three_boxes_a_piece() -> None:
    draw = random.Random(3)
    for _ in range(300):
        rows, width = draw.randint(1, 6), draw.randint(1, 6)
        spec, full, local = fused(rows, width, padding=draw.randint(0, 2))
        cuts = sorted(draw.randint(0, local.numel()) for _ in range(draw.randint(0, 4)))
        seen = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
        for start, end in zip([0, *cuts], [*cuts, local.numel()], strict=True):
            values = local.flatten()[start:end]
            by_piece = {"a": 0, "b": 0}
            for piece, box, at in chunks_of_range(spec, start, end - start):
                by_piece[piece.name] += 1
                (r, c), (h, w) = box.offsets, box.sizes
                theirs = full[piece.name][r : r + h, c : c + w]
                assert torch.equal(values[at : at + box.elements].view(h, w), theirs)
                seen[piece.name][r : r + h, c : c + w] += 1
            assert max(by_piece.values()) <= 3
        assert bool((seen["a"][2 : 2 + rows] == 1).all()) and seen["a"].sum() == rows * width
        assert bool((seen["b"][:, 1 : 1 + width] == 1).all()) and seen["b"].sum() == rows * width


def test_chunks_overlap_where_both_hold_an_element() -> None:
    draw = random.Random(7)
    whole = torch.arange(48).view(6, 8)
    for _ in range(300):
        first, second = (random_chunk(draw, whole.shape) for _ in range(2))
        both = first.overlap(second)
        common = {*first.of(whole).flatten().tolist()} & {*second.of(whole).flatten().tolist()}
        if both is None:
            assert not common
            continue
        assert {*both.of(whole).flatten().tolist()} == common
        assert torch.equal(both.of(first.of(whole), first.offsets), both.of(whole))


def random_chunk(draw: random.Random, shape: torch.Size) -> Chunk:
    offsets = tuple(draw.randrange(n) for n in shape)
    return Chunk(
        offsets, tuple(draw.randint(1, n - at) for n, at in zip(shape, offsets, strict=True))
    )


def test_a_vector_is_cut_into_one_chunk() -> None:
    vector = ParameterSpec((6,), (ShardSpec("v", (12,), (6,), (6,)),), replicated=False)
    ((_, box, at),) = chunks_of_range(vector, 2, 3)
    assert (box.offsets, box.sizes, at) == ((8,), (3,), 0)


@pytest.mark.parametrize("shape", [(3, 2, 4), (2, 1, 3, 2)])
def test_tensors_of_convolutions_are_cut_into_boxes(shape: tuple[int, ...]) -> None:
    full = torch.arange(math.prod(shape)).view(shape)
    spec = ParameterSpec(shape, (ShardSpec("c", shape, (0,) * len(shape), shape),), False)
    for low in range(full.numel()):
        for high in range(low + 1, full.numel() + 1):
            found = [
                (at, box.of(full).flatten().tolist())
                for _, box, at in chunks_of_range(spec, low, high - low)
            ]
            # Each box is whole, and lies where its elements lie in the range.
            assert all(values == [*range(low + at, low + at + len(values))] for at, values in found)
            assert sorted(v for _, values in found for v in values) == [*range(low, high)]


@pytest.mark.parametrize("rows", [3, 4 * SHARED_ELEMENTS // 8])
def test_holders_write_each_element_once_for_any_cuts(rows: int) -> None:
    """A small slice is written by one holder, a large one is divided about evenly."""
    width, holders = 8, 4
    spec = ParameterSpec(
        (rows, width), (ShardSpec("w", (rows, width), (0, 0), (rows, width)),), False
    )
    draw = random.Random(5)
    written = torch.zeros(rows * width)
    shares = []
    for holder in range(holders):
        # parts with none, one, two and three
        cuts = sorted(draw.sample(range(1, rows * width), holder))
        mine = 0
        for start, end in zip([0, *cuts], [*cuts, rows * width], strict=True):
            values = {"parameter": torch.empty(end - start)}
            copies = Copies(holder, holders)
            first, count = share(Part(f"local-{holder}", spec, start, values, copies))
            written[start + first : start + first + count] += 1
            mine += count
        shares.append(mine)
    assert bool((written == 1).all())
    if rows > 3:
        assert max(shares) - min(shares) <= width
    else:
        assert sorted(shares) == [0, 0, 0, rows * width]


def test_a_state_holds_live_views_of_every_kind() -> None:
    spec, _, local = fused(2, 3, padding=1)
    flat = local.flatten().clone()
    part = Part("x", spec, 4, {"parameter": flat[4:], "exp_avg": flat[4:] * 2})
    state = chunks_by_name([part], shared=False)
    assert set(state) == {"parameter/a", "exp_avg/a", "parameter/b", "exp_avg/b"}
    for _, view in state["parameter/a"].chunks:
        view.fill_(7)
    assert flat.tolist()[4:6] == [7, 7] and flat[3] != 7
    assert state["parameter/b"].full_shape == (2, 6)
