"""A call that a rank makes in a step, and the stage of which it is told."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.schema import Config
from parallel3d.sizes.bus import bus_factor
from parallel3d.sizes.local_shapes import LocalParameter, stage_parameters
from parallel3d.topology.layout import Layout

ACTIVATION_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
SCALAR_BYTES = 8  # losses, token counts and squared norms travel as float64


@dataclass(frozen=True)
class Transfer:
    """`count` equal calls of one collective, or messages, that one rank makes in a step.

    Attributes:
        dim: the group: tp, cp, dp, pp, embedding or world.
        op: as in `bus.OPERATIONS`.
        nbytes: of one call, the whole buffer (see `price.costs`).
        count: calls in a step; of send_recv, messages that the rank sends.
        what: what travels, in a few words.
    """

    dim: str
    op: str
    nbytes: int
    count: int
    what: str


def wire_bytes(transfer: Transfer, n: int) -> float:
    """What one rank sends for all calls of `transfer` in a ring (or chain) of n ranks."""
    return transfer.count * transfer.nbytes * bus_factor(transfer.op, n)


def group_size(dim: str, layout: Layout) -> int:
    """Ranks of a group that a `Transfer` names."""
    if dim == "world":
        return layout.world_size
    if dim == "embedding":
        return min(2, layout.pp)
    return layout.size(dim)


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of a configuration whose tp, pp and dp are `layout`'s."""

    config: Config
    layout: Layout
    index: int
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.layout.pp - 1

    @property
    def sp(self) -> bool:
        return self.config.sp and self.layout.tp > 1

    @property
    def item(self) -> int:
        """Bytes of one activation."""
        return ACTIVATION_BYTES[self.config.precision.name]

    @property
    def grad_item(self) -> int:
        """Bytes of one accumulated gradient: fp32 or better."""
        return max(4, self.item)

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.config.micro_batch_size * self.config.model.seq_length

    @property
    def hidden(self) -> int:
        """Bytes of a micro-batch's whole hidden states (b, s, h)."""
        return self.tokens * self.config.model.hidden_size * self.item

    @property
    def parameters(self) -> list[LocalParameter]:
        model, tp = self.config.model, self.layout.tp
        return stage_parameters(model, tp, self.layers, self.first, self.last)
