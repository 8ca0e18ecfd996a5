"""Collectives by name, their busbw factor, and the calls that a pipeline rank makes in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallel3d.config.schema import Config
from parallel3d.config.sections import parts_of
from parallel3d.schedules.orders import StageAssignment
from parallel3d.sizes.balance import sends_slices
from parallel3d.sizes.model import LocalParameter, recomputing, stage_parameters
from parallel3d.topology.layout import Layout

OPERATIONS = (
    "broadcast",
    "reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "scatter",
    "gather",
    "all_to_all",
    "send_recv",
    "barrier",
)


def check_sizes(n: int, nbytes: float = 0.0) -> None:
    """Raises ValueError for fewer than one rank or a negative number of bytes."""
    if n < 1:
        raise ValueError(f"a collective of {n} ranks")
    if not nbytes >= 0:
        raise ValueError(f"a message of {nbytes} bytes")


def bus_factor(op: str, n: int) -> float:
    """Returns the busbw factor: bus bandwidth = factor · nbytes / time (nccl-tests' busbw).

    Bytes through the busiest port over `nbytes`, so that busbw is comparable with the link's
    bandwidth for any operation and n. Source: nccl-tests, doc/PERFORMANCE.md, src/scatter.cu and
    src/gather.cu. 0 for one rank and for a barrier. Raises ValueError for an unknown name.
    """
    check_sizes(n)
    if op not in OPERATIONS:
        raise ValueError(f"{op!r} is none of {', '.join(OPERATIONS)}")
    if n == 1 or op == "barrier":
        return 0.0
    if op == "all_reduce":
        return 2 * (n - 1) / n
    if op in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (n - 1) / n


ACTIVATION_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
SCALAR_BYTES = 8  # losses, token counts and squared norms are float64


@dataclass(frozen=True)
class Transfer:
    """`count` equal calls of one collective, or messages, of one rank in a step.

    Attributes:
        dim: the group: tp, cp, dp, pp, embedding or world.
        op: one of OPERATIONS.
        nbytes: of one call, the whole buffer (see `topology.price.costs`).
        count: calls in a step; of send_recv, messages that the rank sends.
        what: the content, in a few words.
    """

    dim: str
    op: str
    nbytes: int
    count: int
    what: str


def wire_bytes(transfer: Transfer, n: int) -> float:
    """Returns the bytes that one rank sends for all calls in a ring (or chain) of n ranks."""
    return transfer.count * transfer.nbytes * bus_factor(transfer.op, n)


def group_size(dim: str, layout: Layout) -> int:
    """Returns the ranks of a group that a `Transfer` names."""
    if dim == "world":
        return layout.world_size
    if dim == "embedding":
        return min(2, layout.pp)
    return layout.size(dim)


@dataclass(frozen=True)
class PipelineRank:
    """One rank of a pipeline with all of its stages.

    Attributes:
        config: its tp, pp and dp are `layout`'s.
        index: along pp.
        placement, split: the pipeline's stage assignment and the layers of each stage.
    """

    config: Config
    layout: Layout
    index: int
    placement: StageAssignment
    split: Sequence[range]

    @property
    def stages(self) -> list[int]:
        return [self.placement.stage(self.index, c) for c in range(self.placement.chunks)]

    @property
    def layers(self) -> list[range]:
        return [self.split[stage] for stage in self.stages]

    @property
    def layer_count(self) -> int:
        return sum(map(len, self.layers))

    @property
    def recompute(self) -> frozenset[str]:
        """Parts of the layers that the backward recomputes."""
        return parts_of(self.config.recompute)

    @property
    def recomputed_layers(self) -> int:
        """Number of layers that recompute."""
        if not self.recompute:
            return 0
        given = self.config.recompute_layers
        return sum(recomputing(given, stage, len(self.split[stage])) for stage in self.stages)

    @property
    def first(self) -> bool:
        return 0 in self.stages

    @property
    def last(self) -> bool:
        return self.placement.stages - 1 in self.stages

    @property
    def is_tied_to_another(self) -> bool:
        """Whether two ranks hold a copy of the tied weight each, and this is one of them."""
        return self.config.model.tie_embeddings and self.first != self.last

    def neighbours(self, offset: int) -> int:
        """Counts its stages whose next (+1) or previous (-1) stage is on another rank."""
        around = (
            self.placement.neighbour(self.index, chunk, offset)
            for chunk in range(self.placement.chunks)
        )
        return sum(place is not None and place[0] != self.index for place in around)

    @property
    def sp(self) -> bool:
        return self.config.sp and self.layout.tp > 1

    @property
    def sends_slices(self) -> bool:
        # device=auto: a topology describes accelerators.
        return sends_slices(self.config, on_accelerator=self.config.device != "cpu")

    @property
    def item(self) -> int:
        """Bytes of an element of the activations."""
        return ACTIVATION_BYTES[self.config.precision.name]

    @property
    def grad_item(self) -> int:
        """Bytes of an element of the accumulated gradients: fp32 or better."""
        return max(4, self.item)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.config.micro_batch_size * self.config.model.seq_length

    @property
    def hidden(self) -> int:
        """Bytes of a micro-batch's full hidden states (b, s, h)."""
        return self.tokens * self.config.model.hidden_size * self.item

    @cached_property
    def chunks(self) -> list[list[LocalParameter]]:
        """Parameters by chunk."""
        model, tp, last = self.config.model, self.layout.tp, self.placement.stages - 1
        return [
            stage_parameters(
                model,
                tp,
                self.split[stage],
                stage == 0,
                stage == last,
                borrows_table=self.first,
            )
            for stage in self.stages
        ]

    @property
    def parameters(self) -> list[LocalParameter]:
        return [parameter for chunk in self.chunks for parameter in chunk]
