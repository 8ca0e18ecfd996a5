"""The interface of engines that shard or replicate a trainer's parameters over dp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor, nn

from parallel3d.parameters.segments import Constant, ParameterSpan, Segment

T = TypeVar("T")


@dataclass(frozen=True)
class ShardedLayer:
    """A layer that FSDP2 gathers and frees as a whole.

    Attributes:
        module: the layer.
        experts: the part of it that only the ranks of `edp` hold alike, or None.
        has_backward: whether a parameter in or before the layer is trained.
    """

    module: nn.Module
    experts: nn.Module | None = None
    has_backward: bool = True


class DataParallel(Protocol):
    """Reduces the gradients of a rank's stages over dp, and distributes the stepped parameters.

    A step calls `start_step`, the forwards and backwards, `start_last_microbatch` before the last
    backward, `finish_step`, and after the optimizer `all_gather_params`.

    Attributes:
        parameters: the parameters of all stages of this rank, by name.
        segments: flat shards that this rank steps.
        constants: this rank's parts of the frozen parameters, without `requires_grad`.
    """

    parameters: dict[str, nn.Parameter]
    segments: list[Segment]
    constants: list[Constant]

    def spans_of(self, index: int) -> list[ParameterSpan]:
        """Returns the spans that rank `index` of dp steps, in the order of its segments."""
        ...

    def callable_stages(self, stages: Sequence[T]) -> Sequence[T]:
        """Returns the objects that the pipeline calls for these stages."""
        ...

    def start_step(self, microbatches: int) -> None:
        """Clears the gradients for a step of `microbatches` micro-batches."""
        ...

    def start_last_microbatch(self) -> None:
        """Prepares for the last backward of a step, which the trainer is about to run."""
        ...

    def finish_step(self) -> list[str]:
        """Completes the reductions; returns the names of parameters without a gradient."""
        ...

    def tied_gradient(self, name: str) -> Tensor:
        """Returns the flat shard of a tied table's gradient that this rank steps."""
        ...

    def all_gather_params(self) -> None:
        """Updates the parameters from the stepped masters, for the next forward.

        The gathering may still be running when this method returns.
        """
        ...

    def wait_for_all_gathers(self) -> None:
        """Waits until all parameters are complete."""
        ...
