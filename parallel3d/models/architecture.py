"""What a run asks of its model's architecture, which the class of the model's configuration names.

The transformer (`transformer_architecture.py`) is one architecture. Trainer, engines, executor,
checkpoints and hooks know no other classes of a model than those of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from parallel3d.blueprint.blueprint import Blueprint, StageBlueprint
from parallel3d.comm.batch_overlap import BatchOverlap
from parallel3d.comm.group import Group
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.data_parallel.interface import ShardedLayer
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.experts.balance import BalanceOfRun
from parallel3d.models.flops import TrainedShares
from parallel3d.models.keys import ModelConfig
from parallel3d.models.own_loss import LossSums
from parallel3d.parameters.initializer import Initializer
from parallel3d.pipeline.executor import PipelineStage
from parallel3d.pipeline.offload import ActivationOffload
from parallel3d.pipeline.p2p import StageOutputs

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups


class StageModule(nn.Module):
    """Consecutive layers of a model, which one rank runs as a stage of the pipeline.

    It is called as `executor.PipelineStage` says: with the output of the stage before it (None on
    the first stage), the loaded micro-batch, and the scale of the loss. Its parameters have the
    names that the model's declaration gives them (`models/declared.py`), and each has its
    `ParameterSpec` (`state_of`). This is a class and no Protocol because it must be a module.

    Attributes:
        last: whether the stage returns the loss.
        reads_batch: whether the stage reads a micro-batch's samples; others get only what is known
            without them.
        tied_table: local name of a table whose copy another rank holds and trains too, else None.
    """

    last: bool
    reads_batch: bool
    tied_table: str | None

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        """The layers of the stage by their number in the model."""
        raise NotImplementedError

    def graphs_within(
        self, around: Callable[[str], AbstractContextManager[object]]
    ) -> AbstractContextManager[None]:
        """Runs each compiled graph of layers in `around(its name)`, during a `with` block."""
        raise NotImplementedError

    def take_sums(self) -> LossSums:
        """Returns and clears what the losses have counted; only with `Architecture.counts_loss`."""
        raise NotImplementedError


S = TypeVar("S", bound=StageModule)


class Architecture(Protocol, Generic[S]):
    """Builds the stages of a model, and knows what depends on how they compute.

    Attributes:
        counts_loss: whether the last stage counts the items over which the loss is a mean. Without
            it, these are the unmasked tokens of the samples, which are known before the step.
    """

    counts_loss: bool

    def initializer(self, blueprint: Blueprint, device: torch.device) -> Initializer:
        """Returns what creates the parameters.

        If it is `deferred`, the data-parallel engine draws the values that this rank keeps.
        Otherwise the stages come with their values.
        """
        ...

    def stages_of_rank(
        self,
        blueprint: Blueprint,
        held: Sequence[StageBlueprint],
        initializer: Initializer,
        groups: ProcessGroups,
        gathers: PendingGathers,
        overlap: BatchOverlap | None = None,
        offload: ActivationOffload | None = None,
    ) -> Sequence[S]:
        """Creates the stages that a rank of a pipeline holds, by chunk.

        Args:
            gathers: the all-gathers of parameters for which a stage waits before it reads them.
            overlap: lets a forward and a backward take turns, or None.
            offload: moves saved tensors to the host, or None.
        """
        ...

    def sharded_layers(self, stages: Sequence[S]) -> list[ShardedLayer]:
        """Returns the blocks of all stages, which FSDP2 shards one by one."""
        ...

    def messages(
        self,
        blueprint: Blueprint,
        stages: Sequence[S],
        run: Sequence[PipelineStage],
        groups: ProcessGroups,
        device: torch.device,
        example: Callable[[], tuple[Any, ...]],
    ) -> list[StageOutputs]:
        """Describes what each stage of the pipeline but the last one sends to the next.

        Args:
            run: the stages of this rank, as the executor calls them.
            example: loads a micro-batch as the executor gets it; all ranks of pp call it, or none.
        """
        ...

    def compile(self, stages: Sequence[S], saves_operands: bool) -> None:
        """Compiles the blocks; `saves_operands`: whether weight gradients may be deferred."""
        ...

    def expert_balance(
        self, blueprint: Blueprint, stages: Sequence[S], groups: ProcessGroups
    ) -> BalanceOfRun | None:
        """Creates the load balancing of a rank's experts; None for a model without experts."""
        ...

    def sums_replicated(self, blueprint: Blueprint) -> bool:
        """Returns whether gradients of parameters that all tp ranks hold are to be summed over tp.

        They are parts if each rank sees only its own tokens (sequence parallelism).
        """
        ...

    def split(self, blueprint: Blueprint, cp: Group) -> SequenceSplit | None:
        """Returns which part of a sample this rank reads; None: all of it, without windows."""
        ...

    def flops_per_token(
        self, model: ModelConfig, shares: TrainedShares, example: Callable[[], tuple[Any, ...]]
    ) -> tuple[float, str]:
        """Returns the model FLOPs of training on one token, and the formula that gives them.

        `shares`: which shares of the model are trained; `example`: as for `messages`.
        """
        ...

    def measures(self, model: ModelConfig) -> bool:
        """Returns whether the stages depend on the length of a sample without its padding."""
        ...

    def notices(self, blueprint: Blueprint, device: torch.device) -> Iterator[str]:
        """Yields sentences about choices that the stages make on a device."""
        ...


def architecture_of(model: ModelConfig) -> Architecture[Any]:
    """Returns a model's architecture, which the class of its configuration names."""
    module, _, of = model.ARCHITECTURE.partition(":")
    made: Architecture[Any] = getattr(import_module(f"parallel3d.{module}"), of)()
    return made
