"""Sharding specs of local parameters, the state kept about each, and their initial values.

A spec lists the shards of *full* matrices that a local parameter holds: q, k and v apart, gate and
up apart, the vocabulary without its padding. Initialisation, gathering, comparison and resharding
read this one description, so a layout changes only where the numbers are stored.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from parallel3d.comm.group import SINGLE, Group
from parallel3d.device import accelerator
from parallel3d.host.quotas import available_cores

WORD_EMBEDDING = "embedding.word.weight"
TILE = 256  # side of the square tiles in which random matrices are drawn
BAND = 1 << 24  # elements drawn at a time: 64 MiB of host memory, a transfer at full speed


@dataclass(frozen=True)
class ShardSpec:
    """A shard of one full tensor inside a local parameter.

    Attributes:
        name: of the full tensor, `layers.3.attention.q.weight`.
        start: first row (and column) of the shard in the full tensor.
        row: first row of the shard in the local parameter.
        std: standard deviation of the initial values around 0; 0 for the constant `fill`.
        tp_replicas: consecutive tp ranks that hold this same shard: key-value heads when there are
            fewer than ranks, norms of heads. Each rank has the gradient of its own query heads
            alone, so the gradients are summed.
    """

    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    row: int = 0
    std: float = 0.0
    fill: float = 0.0
    tp_replicas: int = 1

    def of_full(self, full: Tensor) -> Tensor:
        """Returns the shard as a view of the full tensor."""
        for dim, (start, length) in enumerate(zip(self.start, self.shape, strict=True)):
            full = full.narrow(dim, start, length)
        return full

    def of_local(self, local: Tensor) -> Tensor:
        """Returns the shard as a view of the local parameter."""
        return local.narrow(0, self.row, self.shape[0])


Kind = TypeVar("Kind")
NO_SHARD = ShardSpec("", (), (), ())  # of padding alone


def tp_replicas_of(shard: ShardSpec) -> int:
    return shard.tp_replicas


@dataclass(frozen=True)
class ParameterSpec:
    """Maps a local parameter to full tensors.

    Attributes:
        shape: local shape, vocabulary padding included.
        shards: the shards it holds; rows outside of them are padding and stay zero.
        replicated: every tp rank holds the same values. Under sequence parallelism its gradient is
            a partial sum over the rank's tokens (Korthikanti et al. 2022 §4.2.2).
        tied_lm_head: the last stage's copy of the word embedding that the first stage owns.
        uses: reads per forward pass: 2 for a tied table on a single stage.
    """

    shape: tuple[int, ...]
    shards: tuple[ShardSpec, ...]
    replicated: bool
    tied_lm_head: bool = False
    uses: int = 1

    @property
    def is_word_embedding(self) -> bool:
        """Whether this is the word embedding or a tied head's copy of it."""
        return any(shard.name == WORD_EMBEDDING for shard in self.shards)

    def is_whole(self, tp: int) -> bool:
        return self.replicated or all(shard.tp_replicas == tp for shard in self.shards)

    def split(
        self, kind_of: Callable[[ShardSpec], Kind], start: int, numel: int
    ) -> Iterator[tuple[Kind, int, int]]:
        """Yields (kind, first, end), counted from `start`, of runs of shards of one kind.

        Together they are elements [start, start + numel) of the flattened local parameter. Padding
        goes with the shard before it.
        """
        width = math.prod(self.shape[1:])
        rows = [(kind_of(shard), shard.row) for shard in self.shards or (NO_SHARD,)]
        runs = [(kind, next(run)[1]) for kind, run in groupby(rows, itemgetter(0))]
        ends = [row for _, row in runs[1:]] + [self.shape[0] if self.shape else 1]
        for i, ((kind, row), end) in enumerate(zip(runs, ends, strict=True)):
            first = max(row * width - start, 0) if i else 0
            last = min(end * width - start, numel)
            if first < last:
                yield kind, first, last

    def runs(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yields (tp_replicas, first, end) of equally replicated elements, as `split`."""
        return self.split(tp_replicas_of, start, numel)

    def shards_in(self, start: int, numel: int) -> Iterator[tuple[ShardSpec, int, int, int]]:
        """Yields (shard, first, end, at) of the shards in a range of the flattened parameter.

        Elements [first, end) of the flattened shard, which stand `at` elements behind `start`.
        """
        for shard in self.shards:
            begin = shard.row * math.prod(shard.shape[1:])
            first, end = max(start, begin), min(start + numel, begin + math.prod(shard.shape))
            if first < end:
                yield shard, first - begin, end - begin, first - start

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: not to biases and norms."""
        return len(self.shape) > 1


DeferredGradient = Callable[[], None]  # adds one deferred weight gradient to its bucket


class WeightGradients:
    """Queues deferred weight gradients of linear layers.

    Zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241) compute the gradient of a stage's input
    first (I) and those of its weights later (W), where the rank would idle. All linear layers call
    `add_weight_gradient`, so deferring these calls splits a backward. Between I and W only the
    layer's input and its output gradient are kept. Norms, biases and embeddings belong to I.
    """

    def __init__(self) -> None:
        self.queue: list[DeferredGradient] | None = None  # None: gradients are computed at once

    @contextmanager
    def deferred(self) -> Iterator[list[DeferredGradient]]:
        """Defers weight gradients inside the block; yields their queue, to be called in order."""
        queue: list[DeferredGradient] = []
        self.queue = queue
        try:
            yield queue
        finally:
            self.queue = None


@dataclass
class ParameterState:
    """All that parallel training keeps about one parameter (see `state_of`).

    Attributes:
        spec: the shards of full tensors that it holds; None for a parameter of a user's module.
        tp: the group of the tensor-parallel layer of `import parallel3d` that it belongs to.
        pp: the group of the `Pipeline` that it belongs to, whose other ranks do not hold it.
        main_grad: view of a gradient bucket to which its gradients are added; None: to `.grad`.
        parts: additions to `main_grad` that are one gradient; added: so many since the last one.
        register_grad_ready: notifies the reducer of a gradient that was added to `main_grad`.
        weight_gradients: queue of its pipeline stage; None: its gradients are never deferred.
        compute_dtype: type in which FSDP2 gathers it for the model; None: FSDP2 does not shard it.
    """

    spec: ParameterSpec | None = None
    tp: Group = SINGLE
    pp: Group = SINGLE
    main_grad: Tensor | None = None
    parts: int = 1
    added: int = 0
    register_grad_ready: Callable[[], None] = lambda: None
    weight_gradients: WeightGradients | None = None
    compute_dtype: torch.dtype | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as nothing: groups end with their process, and parameters are saved without."""
        return OrderedDict, ()  # a type that `torch.load(weights_only=True)` admits


def state_of(parameter: Tensor) -> ParameterState:
    """Returns the parameter's state: the one attribute that this package hangs on a tensor."""
    state = getattr(parameter, "parallel_state", None)
    if not isinstance(state, ParameterState):  # none, or that of a parameter from a file
        state = ParameterState()
        parameter.parallel_state = state  # type: ignore[attr-defined]
    return state


def spec_of(parameter: Tensor) -> ParameterSpec:
    """Returns the spec of a parameter of our own layers, which all have one."""
    spec = state_of(parameter).spec
    assert spec is not None
    return spec


@dataclass(frozen=True)
class Initializer:
    """Creates parameters whose values depend on (seed, name, index) alone, on no layout.

    A matrix is drawn in tiles of 256 × 256, each from its own counter-based stream (Philox, Salmon
    et al. 2011) keyed by (seed, name, tile), on `drawing_threads` threads, in bands of at most
    `BAND` elements that bound the extra memory.

    With `deferred`, parameters have their shape and dtype but one element of memory, and the
    data-parallel engine asks for `values` or `fill_rows`, one parameter at a time.
    """

    seed: int
    dtype: torch.dtype
    device: torch.device
    deferred: bool = False

    def parameter(self, spec: ParameterSpec) -> nn.Parameter:
        if self.deferred:
            local = torch.zeros((), dtype=self.dtype, device=self.device).expand(spec.shape)
        else:
            local = self.values(spec)
        parameter = nn.Parameter(local)
        state_of(parameter).spec = spec
        return parameter

    def values(self, spec: ParameterSpec) -> Tensor:
        local = torch.empty(spec.shape, dtype=self.dtype, device=self.device)
        if self.device.type != "meta":
            self.fill_rows(spec, 0, local)
        return local

    def fill_rows(self, spec: ParameterSpec, first: int, out: Tensor) -> None:
        """Writes the initial values of a local parameter's rows from `first` on into `out`."""
        out.zero_()  # rows outside of all shards are padding
        end = first + out.shape[0]
        for shard in spec.shards:
            top, bottom = max(first, shard.row), min(end, shard.row + shard.shape[0])
            if top < bottom:
                start = (shard.start[0] + top - shard.row, *shard.start[1:])
                inside = replace(shard, start=start, shape=(bottom - top, *shard.shape[1:]))
                self.fill(inside, out[top - first : bottom - first])

    def fill(self, shard: ShardSpec, out: Tensor) -> None:
        """Writes the initial values of a shard into `out`, a tensor of its shape."""
        if not accelerator.has_values(out.device):
            return
        if shard.std == 0.0:
            out.fill_(shard.fill)
            return
        row0, (rows, cols) = shard.start[0], shard.shape
        height = max(1, BAND // (TILE * cols)) * TILE  # rows of a band: whole tiles
        for i in range(row0 // TILE * TILE, row0 + rows, height):
            top, bottom = max(row0, i), min(row0 + rows, i + height)
            # One copy per band: on a GPU each is a transfer that blocks the host.
            out[top - row0 : bottom - row0] = torch.from_numpy(self._band(shard, top, bottom))

    def _band(self, shard: ShardSpec, top: int, bottom: int) -> np.ndarray:
        """Returns rows [top, bottom) of the full matrix in the shard's columns, float32."""
        left, cols = shard.start[1], shard.shape[1]
        band = np.empty((bottom - top, cols), dtype=np.float32)

        def draw(tile: tuple[int, int]) -> None:
            i, j = tile
            up, down = max(top, i * TILE), min(bottom, (i + 1) * TILE)
            west, east = max(left, j * TILE), min(left + cols, (j + 1) * TILE)
            values = self._tile(shard.name, i, j, rows=down - i * TILE)
            inside = values[up - i * TILE : down - i * TILE, west - j * TILE : east - j * TILE]
            out = band[up - top : down - top, west - left : east - left]
            np.multiply(inside, np.float32(shard.std), out=out)

        down = range(top // TILE, (bottom - 1) // TILE + 1)
        across = range(left // TILE, (left + cols - 1) // TILE + 1)
        tiles = [(i, j) for i in down for j in across]
        threads = min(drawing_threads(self.device), len(tiles))
        if threads == 1:
            for tile in tiles:
                draw(tile)
        else:  # NumPy releases the GIL while it draws
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(draw, tiles))
        return band

    def _tile(self, name: str, i: int, j: int, rows: int = TILE) -> np.ndarray:
        """Returns the first rows of a tile of standard normal values, float32 for all dtypes.

        Rows are drawn in order, so their number changes no value.
        """
        digest = hashlib.blake2b(f"{self.seed}/{name}/{i}/{j}".encode(), digest_size=16).digest()
        key = np.frombuffer(digest, dtype=np.uint64)
        stream = np.random.Generator(np.random.Philox(key=key))
        return stream.standard_normal((rows, TILE), dtype=np.float32)


def drawing_threads(device: torch.device) -> int:
    """Returns the number of threads on which a rank on `device` draws its parameters.

    torch's number; on an accelerator at least the rank's share of the host's cores, because
    torchrun sets OMP_NUM_THREADS=1 and one thread takes minutes for an 8B model.
    """
    threads = torch.get_num_threads()
    if not accelerator.is_accelerator(device) or "LOCAL_WORLD_SIZE" not in os.environ:
        return threads
    return max(threads, available_cores() // int(os.environ["LOCAL_WORLD_SIZE"]))


class SegmentPart(NamedTuple):
    """Holds elements [start, start + numel) of a flattened local parameter, inside a segment."""

    name: str
    spec: ParameterSpec
    start: int
    numel: int

    def split(self, kind_of: Callable[[ShardSpec], Kind]) -> Iterator[tuple[Kind, SegmentPart]]:
        """Yields the part in runs of shards of one kind, as q, k and v lie in one parameter."""
        for kind, first, end in self.spec.split(kind_of, self.start, self.numel):
            yield kind, self._replace(start=self.start + first, numel=end - first)


@dataclass
class Segment:
    """A flat shard of parameters with equal optimizer settings, the part that this rank steps.

    Attributes:
        param: flat, in the compute type; grad: flat, fp32 or better.
        master: flat tensor that the optimizer steps: `param` itself if that is fp32 or better.
    """

    param: Tensor
    grad: Tensor
    master: Tensor
    parts: list[SegmentPart]

    @property
    def spec(self) -> ParameterSpec:
        """The spec of its first parameter: all decay, and are replicated and tied, alike."""
        return self.parts[0].spec

    def split(self, kind_of: Callable[[ShardSpec], Kind]) -> Iterator[tuple[Kind, Segment]]:
        """Yields the segment in runs of one kind, as views; whole if there is one kind alone."""
        pieces = [pair for part in self.parts for pair in part.split(kind_of)]
        runs = [(kind, [part for _, part in run]) for kind, run in groupby(pieces, itemgetter(0))]
        if len(runs) == 1:
            yield runs[0][0], self
            return
        first = 0
        for kind, parts in runs:
            own = slice(first, first + sum(part.numel for part in parts))
            first = own.stop
            param, grad, master = (t[own] for t in (self.param, self.grad, self.master))
            yield kind, replace(self, param=param, grad=grad, master=master, parts=parts)


@dataclass(frozen=True)
class Chunk:
    """Locates a part of a full tensor: its first index and its sizes, per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))

    def overlap(self, other: Chunk) -> Chunk | None:
        """Returns the part that is in both chunks; None if there is none."""
        first = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        sizes = tuple(end - start for start, end in zip(first, ends, strict=True))
        return Chunk(first, sizes) if min(sizes) > 0 else None

    def of(self, values: Tensor, start: tuple[int, ...] | None = None) -> Tensor:
        """Returns the view of this chunk in `values`, whose first element has the index `start`."""
        start = (0,) * len(self.offsets) if start is None else start
        places = zip(self.offsets, self.ends, start, strict=True)
        return values[tuple(slice(first - s, end - s) for first, end, s in places)]


def chunks_of_range(
    spec: ParameterSpec, start: int, count: int
) -> Iterator[tuple[ShardSpec, Chunk, int]]:
    """Yields the chunks in elements [start, start + count) of the flattened local parameter.

    A bucket's shard may begin in the middle of a row, so a range of a matrix is at most three
    chunks: the rest of a row, whole rows, the beginning of a row.

    Each as (shard, chunk, first element of the chunk, counted from `start`). Elements outside of
    all shards are padding. Raises ValueError for tensors of more than two dimensions and for shards
    that are not whole rows of the local parameter.
    """
    width = math.prod(spec.shape[1:])
    for shard in spec.shards:
        if len(shard.shape) > 2 or math.prod(shard.shape[1:]) != width:
            raise ValueError(f"{shard.name}: {shard.shape} is not whole rows of {spec.shape}")
    for shard, low, high, at in spec.shards_in(start, count):
        for chunk, first in _rectangles(shard, low, high):
            yield shard, chunk, at + first - low


def _rectangles(shard: ShardSpec, low: int, high: int) -> Iterator[tuple[Chunk, int]]:
    """Yields elements [low, high) of a shard as chunks of the full tensor, with first elements."""
    if len(shard.shape) == 1:
        yield Chunk((shard.start[0] + low,), (high - low,)), low
        return
    width = shard.shape[1]
    # The rest of the first row, whole rows, and the beginning of the last row.
    cuts = [low, min(high, -(-low // width) * width), max(low, high // width * width), high]
    for a, b in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
        if a == b:
            continue
        row, column = divmod(a, width)
        rows = (b - a) // width
        sizes = (rows, width) if rows else (1, b - a)
        yield Chunk((shard.start[0] + row, shard.start[1] + column), sizes), a
