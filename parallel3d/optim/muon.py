"""Muon (Jordan et al. 2024), which steps matrices by their orthogonalised momentum.

Each logical matrix (q, k, v, gate and up are separate ones) has one home among the ranks of its
stage. Its update is assembled there and made orthogonal by Newton-Schulz iterations. Momentum and
master weights stay where the shards are, so ZeRO and checkpoints still see flat ranges. A step
sends the shards of each update to its home, and the shards of the orthogonal matrix back. Each
direction takes one all-to-all along tp (inside a node) and one along dp (on a rail).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from parallel3d.blueprint.buckets import homes
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.parameters.copies import CopyGroups
from parallel3d.parameters.segments import ParameterSpan, Segment
from parallel3d.parameters.spec import ParameterSpec, ShardSpec

# Coefficients of the quintic polynomial of an iteration (Jordan et al. 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST_NORM = 1e-7  # smallest norm that divides an update, as in torch.optim.Muon


def newton_schulz(update: Tensor) -> Tensor:
    """Returns the matrix (m, n) with its singular values moved to about 1 (0.68 to 1.14).

    Singular values that are tiny compared with the largest one stay smaller. All iterations compute
    in the dtype of the matrix.
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
    """Returns the factor that multiplies an orthogonal update of this shape.

    `mode` is `optim.muon_scale`, whose values have the names of torch.optim.Muon. match_rms_adamw
    (Liu et al. 2025 §2.2) makes steps as large as AdamW's usually are.
    """
    rows, columns = shape
    if mode == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class HiddenMatrix:
    """A logical matrix as the tp ranks of a stage hold it, cut along `axis` or whole.

    `full` is the shape of the matrix, and `local` that of a rank's shard, which `copies`
    consecutive ranks hold.
    """

    full: tuple[int, ...]
    local: tuple[int, ...]
    axis: int
    copies: int

    @classmethod
    def of(cls, spec: ParameterSpec, shard: ShardSpec, tp: Group) -> HiddenMatrix:
        sizes = zip(shard.full_shape, shard.shape, strict=True)
        cut = [i for i, (full, own) in enumerate(sizes) if full != own]
        copies = CopyGroups(tp=tp).over_tp(spec, shard)
        found = cls(shard.full_shape, shard.shape, cut[0] if cut else 0, copies)
        assert len(cut) <= 1 and shard.start[found.axis] == found.start(tp.index), shard
        return found

    def start(self, tp_index: int) -> int:
        return tp_index // self.copies * self.local[self.axis]


class MatrixRange(NamedTuple):
    """Elements [first, end) of a rank's flattened shard of the matrix with this name."""

    matrix: str
    first: int
    end: int


def ranges_of(
    spans: Iterable[ParameterSpan],
) -> list[tuple[MatrixRange, int, ParameterSpec, ShardSpec]]:
    """Returns the ranges of hidden matrices in these spans, each with its place and its specs.

    The place of a range is the index of its first element in the concatenated spans.
    """
    found = []
    offset = 0
    for span in spans:
        for shard, first, end, at in span.spec.shards_in(span.start, span.numel):
            if shard.muon:
                found.append((MatrixRange(shard.name, first, end), offset + at, span.spec, shard))
        offset += span.numel
    return found


class Muon:
    """Makes the updates of a stage's hidden matrices orthogonal, each on its home rank.

    Args:
        spans: for each rank of dp, the spans that it steps, in order
            (`BucketedDataParallel.spans_of`).
        mode: `optim.muon_scale`.
        dtype: the dtype in which matrices are sent and made orthogonal.
        tp, dp: this rank's groups. Several ranks of dp may hold the same elements with equal bits.
    """

    def __init__(
        self,
        spans: Sequence[Sequence[ParameterSpan]],
        mode: str,
        dtype: torch.dtype,
        tp: Group,
        dp: Group,
        device: torch.device,
    ) -> None:
        self.mode = mode
        self.tp = tp
        self.dp = dp
        self.empty = torch.empty(0, dtype=dtype, device=device)
        found = [ranges_of(each) for each in spans]
        self.pieces = [[piece for piece, *_ in each] for each in found]
        self.matrices = {
            shard.name: HiddenMatrix.of(spec, shard, tp)
            for each in found
            for *_, spec, shard in each
        }
        shapes = {name: matrix.full for name, matrix in self.matrices.items()}
        self.homes = homes(shapes, tp.size, dp.size)
        self.holders: dict[MatrixRange, list[int]] = {}
        for index, held in enumerate(self.pieces):
            for piece in held:
                self.holders.setdefault(piece, []).append(index)
        # If every dp rank holds all elements, none are sent along dp before Newton-Schulz.
        self.gathers = any(len(each) < dp.size for each in self.holders.values())

    def takes(self, shard: ShardSpec) -> bool:
        """Returns whether this full tensor is a hidden matrix, whose updates are made here."""
        return shard.muon

    def orthogonalize(self, segments: Iterable[Segment]) -> None:
        """Replaces the updates in the gradients of these segments by scaled orthogonal ones.

        This is collective over tp and dp, so a rank without hidden matrices must call it too.
        """
        views: dict[MatrixRange, Tensor] = {}
        for segment in segments:
            for piece, first, *_ in ranges_of(segment.spans):
                views[piece] = segment.grad[first : first + piece.end - piece.first]
        whole = self.gather_over_tp(self._gather_over_dp(views))
        for name, matrix in whole.items():
            whole[name] = newton_schulz(matrix) * scale(tuple(matrix.shape), self.mode)
        self._scatter_over_dp(self.scatter_over_tp(whole), views)

    def _gather_over_dp(self, views: dict[MatrixRange, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's flat shards of the matrices whose home has this rank's dp index."""

        def moved(source: int, target: int) -> dict[MatrixRange, int]:
            found = {}
            for piece in self.pieces[source]:
                holders = self.holders[piece]  # their bits are equal, so only one of them sends
                sender = target if target in holders else holders[target % len(holders)]
                if self.homes[piece.matrix].dp == target and sender == source:
                    found[piece] = piece.end - piece.first
            return found

        if self.gathers:
            got = _exchange(moved, lambda piece, _: views[piece], self.empty, self.dp)
        else:
            got = [(piece, views[piece]) for piece in moved(self.dp.index, self.dp.index)]
        shards = {
            name: self.empty.new_empty(math.prod(matrix.local))
            for name, matrix in self.matrices.items()
            if self.homes[name].dp == self.dp.index
        }
        for piece, tensor in got:
            shards[piece.matrix][piece.first : piece.end] = tensor
        return shards

    def _at_home(self, tp_index: int) -> dict[str, int]:
        """Returns the number of elements in a shard of each matrix with this home.

        The home is the rank with this index along tp, and with this rank's index along dp.
        """
        return {
            name: math.prod(matrix.local)
            for name, matrix in self.matrices.items()
            if self.homes[name] == (tp_index, self.dp.index)
        }

    def gather_over_tp(self, shards: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the whole matrices whose home is this rank."""

        def moved(source: int, target: int) -> dict[str, int]:
            # The first of the ranks that hold a shard sends it.
            home = self._at_home(target)
            return {n: home[n] for n in home if source % self.matrices[n].copies == 0}

        found: dict[str, list[Tensor]] = {name: [] for name in self._at_home(self.tp.index)}
        for name, tensor in _exchange(moved, lambda n, _: shards[n], self.empty, self.tp):
            found[name].append(tensor.view(self.matrices[name].local))
        return {name: torch.cat(t, self.matrices[name].axis) for name, t in found.items()}

    def scatter_over_tp(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's flat shards of the matrices whose home has the same index along dp.

        `whole`: the matrices whose home is this rank.
        """

        def shard(name: str, target: int) -> Tensor:
            matrix = self.matrices[name]
            start, length = matrix.start(target), matrix.local[matrix.axis]
            return whole[name].narrow(matrix.axis, start, length)

        return dict(_exchange(lambda source, _: self._at_home(source), shard, self.empty, self.tp))

    def _scatter_over_dp(self, shards: dict[str, Tensor], views: dict[MatrixRange, Tensor]) -> None:
        def moved(source: int, target: int) -> dict[MatrixRange, int]:
            pieces = self.pieces[target]
            return {p: p.end - p.first for p in pieces if self.homes[p.matrix].dp == source}

        def values(piece: MatrixRange, _: int) -> Tensor:
            return shards[piece.matrix][piece.first : piece.end]

        for piece, tensor in _exchange(moved, values, self.empty, self.dp):
            views[piece].copy_(tensor)


class MuonByKind:
    """Makes updates orthogonal with one `Muon` for experts and one for all other matrices.

    The two kinds of matrices are sharded over different ranks.

    Args:
        experts: updates the matrices of experts, which are whole on every rank of edp.
        others: updates all other matrices.
    """

    def __init__(self, experts: Muon, others: Muon) -> None:
        self.parts = {True: experts, False: others}

    def takes(self, shard: ShardSpec) -> bool:
        """Returns whether this full tensor is a hidden matrix, whose updates are made here."""
        return shard.muon

    def orthogonalize(self, segments: Iterable[Segment]) -> None:
        """Orthogonalizes the updates in these segments' gradients, like `Muon.orthogonalize`."""
        given = list(segments)
        for is_expert, muon in self.parts.items():
            muon.orthogonalize([s for s in given if s.spec.is_expert is is_expert])


Name = TypeVar("Name", str, MatrixRange)


def _exchange(
    moved: Callable[[int, int], dict[Name, int]],
    tensor_of: Callable[[Name, int], Tensor],
    empty: Tensor,
    group: Group,
) -> list[tuple[Name, Tensor]]:
    """Sends tensors to each rank of a group; returns the names and flat values of those received.

    Args:
        moved: maps (source, target) to the names of the tensors to send and their numbers of
            elements.
        tensor_of: maps (name, target) to the tensor that this rank sends.
        empty: an empty tensor of the dtype in which tensors are sent.
    """
    ranks = range(group.size)
    sent = [moved(group.index, target) for target in ranks]
    due = [moved(source, group.index) for source in ranks]
    given: list[Tensor] = [tensor_of(name, target) for target in ranks for name in sent[target]]
    flat = torch.cat([empty, *(t.reshape(-1).to(empty.dtype) for t in given)])
    counts, received = ([sum(each.values()) for each in ways] for ways in (sent, due))
    got = collectives.all_to_all_uneven(flat, group, counts, received)
    names = [name for each in due for name in each]
    sizes = [size for each in due for size in each.values()]
    return list(zip(names, got.split(sizes), strict=True))
