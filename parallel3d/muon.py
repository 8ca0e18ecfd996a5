"""Muon (Jordan et al. 2024): matrices step by their momentum, made orthogonal by Newton-Schulz.

Each logical matrix (q, k, v, gate and up apart, uncut) has one home among the ranks of its stage.
Momentum and master stay where the shards are, so ZeRO and checkpoints see flat ranges as ever. A
step sends the shards of each update to its home and the orthogonal matrix back, along tp inside a
node and along dp on its rail: one all-to-all each way and dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.estimate.buckets import homes, is_hidden
from parallel3d.parameters.sharding import Segment, SegmentPart, ShardSpec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, Jordan et al. 2024
STEPS = 5
SMALLEST_NORM = 1e-7  # by which an update of less is divided, as in torch.optim.Muon


def is_hidden_shard(shard: ShardSpec) -> bool:
    return is_hidden(shard.name, len(shard.shape))


def newton_schulz(update: Tensor) -> Tensor:
    """Returns the matrix (m, n) with its singular values moved to about 1 (0.68 to 1.14).

    Those that are tiny beside the largest one stay smaller. Computes in the matrix's own type.
    """
    a, b, c = COEFFICIENTS
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def scale(shape: tuple[int, ...], mode: str) -> float:
    """Returns the factor of an orthogonal update, by the names of torch.optim.Muon.

    match_rms_adamw (Liu et al. 2025 §2.2): steps as large as AdamW's usually are.
    """
    rows, columns = shape
    if mode == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class HiddenMatrix:
    """A logical matrix as the tp ranks of a stage hold it, cut along `axis` or whole.

    `local` is the shape of a rank's shard, which `replicas` consecutive ranks hold.
    """

    full: tuple[int, ...]
    local: tuple[int, ...]
    axis: int
    replicas: int

    @classmethod
    def of(cls, shard: ShardSpec, tp: Group) -> HiddenMatrix:
        cut = [i for i, (full, own) in enumerate(zip(shard.full_shape, shard.shape, strict=True))
               if full != own]  # fmt: skip
        axis = cut[0] if cut else 0
        shards = shard.full_shape[axis] // shard.shape[axis]
        found = cls(shard.full_shape, shard.shape, axis, tp.size // shards)
        assert len(cut) <= 1 and shard.start[axis] == found.start(tp.index), shard
        return found

    def start(self, tp_index: int) -> int:
        return tp_index // self.replicas * self.local[self.axis]


class MatrixRange(NamedTuple):
    """Elements [first, end) of a rank's flattened shard of a matrix."""

    matrix: str
    first: int
    end: int


def ranges_of(parts: Iterable[SegmentPart]) -> list[tuple[MatrixRange, int, ShardSpec]]:
    """Returns the ranges of hidden matrices in these parts, with their first element there."""
    found = []
    offset = 0
    for part in parts:
        for shard in filter(is_hidden_shard, part.spec.shards):
            base = shard.row * math.prod(shard.shape[1:])
            first = max(part.start, base)
            end = min(part.start + part.numel, base + math.prod(shard.shape))
            if first < end:
                piece = MatrixRange(shard.name, first - base, end - base)
                found.append((piece, offset + first - part.start, shard))
        offset += part.numel
    return found


class Muon:
    """Makes the updates of a stage's hidden matrices orthogonal, each on its home rank.

    Args:
        parts: of each dp rank, what it steps, in order (`DataParallel.parts_of`).
        dtype: in which matrices are sent and made orthogonal.
        tp, dp: this rank's groups. Ranks of dp may hold the same elements with equal bits.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[SegmentPart]],
        mode: str,
        dtype: torch.dtype,
        tp: Group,
        dp: Group,
        device: torch.device,
    ) -> None:
        self.mode, self.tp, self.dp = mode, tp, dp
        self.empty = torch.empty(0, dtype=dtype, device=device)
        found = [ranges_of(each) for each in parts]
        self.pieces = [[piece for piece, _, _ in each] for each in found]
        self.matrices = {s.name: HiddenMatrix.of(s, tp) for each in found for _, _, s in each}
        shapes = {name: matrix.full for name, matrix in self.matrices.items()}
        self.homes = homes(shapes, tp.size, dp.size)
        self.holders: dict[MatrixRange, list[int]] = {}
        for index, held in enumerate(self.pieces):
            for piece in held:
                self.holders.setdefault(piece, []).append(index)
        # Where each dp rank holds everything, nothing is sent before Newton-Schulz along dp.
        self.gathers = any(len(each) < dp.size for each in self.holders.values())

    def orthogonalize(self, segments: Iterable[Segment]) -> None:
        """Replaces the gradients of these segments, which are updates, by orthogonal ones, scaled.

        Collective over tp and dp, also where a rank has no segment of hidden matrices.
        """
        views: dict[MatrixRange, Tensor] = {}
        for segment in segments:
            for piece, first, _ in ranges_of(segment.parts):
                views[piece] = segment.grad[first : first + piece.end - piece.first]
        whole = self._gather_over_tp(self._gather_over_dp(views))
        for name, matrix in whole.items():
            whole[name] = newton_schulz(matrix) * scale(tuple(matrix.shape), self.mode)
        self._scatter_over_dp(self._scatter_over_tp(whole), views)

    def _column(self, dp_index: int) -> list[str]:
        """Returns the matrices whose homes have this index along dp."""
        return [name for name in self.matrices if self.homes[name].dp == dp_index]

    def _is_sent(self, piece: MatrixRange, source: int, target: int) -> bool:
        """Whether rank `source` of dp gives its `piece` to `target`, which passes it home."""
        holders = self.holders[piece]
        given = target if target in holders else holders[target % len(holders)]
        return self.homes[piece.matrix].dp == target and given == source

    def _gather_over_dp(self, views: dict[MatrixRange, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's shards, flat, of the matrices whose home is in its column."""
        me, ranks = self.dp.index, range(self.dp.size)
        sent = [[p for p in self.pieces[me] if self._is_sent(p, me, d)] for d in ranks]
        due = [[p for p in self.pieces[d] if self._is_sent(p, d, me)] for d in ranks]
        if self.gathers:
            lengths = [[p.end - p.first for p in each] for each in due]
            given = [[views[p] for p in each] for each in sent]
            got = _exchange(given, lengths, self.empty, self.dp)
        else:
            got = [[views[p].to(self.empty.dtype) for p in each] for each in due]
        shards = {
            name: self.empty.new_empty(math.prod(self.matrices[name].local))
            for name in self._column(me)
        }
        for pieces, tensors in zip(due, got, strict=True):
            for piece, tensor in zip(pieces, tensors, strict=True):
                shards[piece.matrix][piece.first : piece.end] = tensor
        return shards

    def _at_home(self, tp_index: int) -> list[str]:
        column = self._column(self.dp.index)
        return [name for name in column if self.homes[name].tp == tp_index]

    def _gives(self, tp_index: int, name: str) -> bool:
        """Whether a rank is the first of those that hold its shard."""
        return tp_index % self.matrices[name].replicas == 0

    def _gather_over_tp(self, shards: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the whole matrices whose home is this rank."""
        me, ranks = self.tp.index, range(self.tp.size)
        sent = [[shards[n] for n in self._at_home(t) if self._gives(me, n)] for t in ranks]
        due = [[n for n in self._at_home(me) if self._gives(t, n)] for t in ranks]
        sizes = [[math.prod(self.matrices[n].local) for n in each] for each in due]
        got = _exchange(sent, sizes, self.empty, self.tp)
        found: dict[str, list[Tensor]] = {name: [] for name in self._at_home(me)}
        for names, tensors in zip(due, got, strict=True):
            for name, tensor in zip(names, tensors, strict=True):
                found[name].append(tensor.view(self.matrices[name].local))
        return {name: torch.cat(t, self.matrices[name].axis) for name, t in found.items()}

    def _scatter_over_tp(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's shards, flat, of the matrices of its column."""

        def shard(name: str, tp_index: int) -> Tensor:
            matrix = self.matrices[name]
            start, length = matrix.start(tp_index), matrix.local[matrix.axis]
            return whole[name].narrow(matrix.axis, start, length)

        ranks = range(self.tp.size)
        sent = [[shard(name, t) for name in self._at_home(self.tp.index)] for t in ranks]
        due = [self._at_home(t) for t in ranks]
        sizes = [[math.prod(self.matrices[n].local) for n in each] for each in due]
        got = _exchange(sent, sizes, self.empty, self.tp)
        return {
            name: tensor
            for names, tensors in zip(due, got, strict=True)
            for name, tensor in zip(names, tensors, strict=True)
        }

    def _scatter_over_dp(self, shards: dict[str, Tensor], views: dict[MatrixRange, Tensor]) -> None:
        me, ranks = self.dp.index, range(self.dp.size)

        def of_column(held: int, column: int) -> list[MatrixRange]:
            return [p for p in self.pieces[held] if self.homes[p.matrix].dp == column]

        sent = [[shards[p.matrix][p.first : p.end] for p in of_column(d, me)] for d in ranks]
        due = [of_column(me, d) for d in ranks]
        sizes = [[p.end - p.first for p in each] for each in due]
        got = _exchange(sent, sizes, self.empty, self.dp)
        for pieces, tensors in zip(due, got, strict=True):
            for piece, tensor in zip(pieces, tensors, strict=True):
                views[piece].copy_(tensor)


def _exchange(
    sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], empty: Tensor, group: Group
) -> list[list[Tensor]]:
    """Sends some tensors to each rank of a group; returns the flat ones that each gave.

    `sizes` are the elements of those; all are of the type of `empty`.
    """
    counts = [sum(t.numel() for t in each) for each in sent]
    given = [t.reshape(-1).to(empty.dtype) for each in sent for t in each]
    flat = torch.cat(given) if given else empty
    received = [sum(each) for each in sizes]
    got = collectives.all_to_all_uneven(flat, group, counts, received)
    return [
        list(part.split(list(each))) for part, each in zip(got.split(received), sizes, strict=True)
    ]
