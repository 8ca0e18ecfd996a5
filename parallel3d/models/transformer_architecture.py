"""The transformer as an `Architecture`, behind which the trainer does not know it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from parallel3d.blueprint.blueprint import Blueprint, StageBlueprint
from parallel3d.comm.batch_overlap import BatchOverlap
from parallel3d.comm.group import SINGLE, Group
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.data_parallel.interface import ShardedLayer
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.device import accelerator
from parallel3d.device.precision import compute_dtype
from parallel3d.experts.balance import BalanceOfRun
from parallel3d.models.architecture import Architecture
from parallel3d.models.attention import LEAST_KV_HEADS, avoids_cudnn
from parallel3d.models.delta_kernel import AUTO_TAKES_TORCH, torch_form_instead
from parallel3d.models.experts import MixtureOfExperts
from parallel3d.models.flops import FLOPS_FORMULA, TrainedShares, flops_per_token
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layers import BuildContext
from parallel3d.models.rotary import rope_switch
from parallel3d.models.transformer import Stage, compile_blocks, stages_of_rank
from parallel3d.parameters.initializer import Initializer
from parallel3d.pipeline.executor import PipelineStage
from parallel3d.pipeline.offload import ActivationOffload
from parallel3d.pipeline.p2p import StageOutputs

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups


class TransformerArchitecture(Architecture[Stage]):
    """Builds the transformer's stages; the methods do what `Architecture` says."""

    counts_loss = False

    def initializer(self, blueprint: Blueprint, device: torch.device) -> Initializer:
        wide = torch.promote_types(compute_dtype(blueprint.precision), torch.float32)
        return Initializer(blueprint.seed, wide, device, deferred=True)

    def stages_of_rank(
        self,
        blueprint: Blueprint,
        held: Sequence[StageBlueprint],
        initializer: Initializer,
        groups: ProcessGroups,
        gathers: PendingGathers,
        overlap: BatchOverlap | None = None,
        offload: ActivationOffload | None = None,
    ) -> list[Stage]:
        of_layers = groups.tp, groups.cp, groups.ep, overlap, gathers, offload, groups.world
        context = BuildContext.of_run(blueprint, initializer, *of_layers)
        return stages_of_rank(blueprint.model, held, context)

    def sharded_layers(self, stages: Sequence[Stage]) -> list[ShardedLayer]:
        return [
            ShardedLayer(
                block,
                block.mlp.experts if isinstance(block.mlp, MixtureOfExperts) else None,
                index >= stage.without_backward,
            )
            for stage in stages
            for index, block in enumerate(stage.blocks.values())
        ]

    def messages(
        self,
        blueprint: Blueprint,
        stages: Sequence[Stage],
        run: Sequence[PipelineStage],
        groups: ProcessGroups,
        device: torch.device,
        example: Callable[[], tuple[Any, ...]],
    ) -> list[StageOutputs]:
        tp = groups.tp
        sliced = blueprint.sends_slices(accelerator.is_accelerator(device))
        sequence = blueprint.local_seq_length // (tp.size if blueprint.layer.sp else 1)
        hidden = (blueprint.micro_batch_size, sequence, blueprint.model.hidden_size)
        dtype = compute_dtype(blueprint.precision)
        outputs = StageOutputs((hidden,), dtype, tp if sliced else SINGLE)
        return [outputs] * (blueprint.assignment.stages - 1)

    def compile(self, stages: Sequence[Stage], saves_operands: bool) -> None:
        compile_blocks(stages, saves_operands=saves_operands)

    def expert_balance(
        self, blueprint: Blueprint, stages: Sequence[Stage], groups: ProcessGroups
    ) -> BalanceOfRun | None:
        model = blueprint.model
        if not model.num_experts:
            return None
        blocks = [item for stage in stages for item in stage.blocks.items()]
        return BalanceOfRun(
            blueprint.balance,
            {int(n): b.mlp.router for n, b in blocks if isinstance(b.mlp, MixtureOfExperts)},
            model.expert_layers,
            model.num_experts,
            model.experts_per_token,
            (groups.tp, groups.cp),
            has_biases=model.router_bias,
            fixed=blueprint.fixed_states,
            is_first=groups.tp.index == groups.dp_cp.index == 0,
        )

    def sums_replicated(self, blueprint: Blueprint) -> bool:
        return blueprint.layer.sp

    def split(self, blueprint: Blueprint, cp: Group) -> SequenceSplit | None:
        if cp.size == 1 and blueprint.model.sliding_window is None:
            return None
        return SequenceSplit.of_run(blueprint, cp.index)

    def flops_per_token(
        self, model: ModelConfig, shares: TrainedShares, example: Callable[[], tuple[Any, ...]]
    ) -> tuple[float, str]:
        return flops_per_token(model, model.seq_length, shares), FLOPS_FORMULA

    def measures(self, model: ModelConfig) -> bool:
        return any(rope_switch(model, rope) for rope in model.ropes)

    def notices(self, blueprint: Blueprint, device: torch.device) -> Iterator[str]:
        if avoids_cudnn(blueprint, device):
            yield (
                "attention_kernel=auto excludes cuDNN: PyTorch issue 193893 reports wrong results "
                f"on this GPU with fewer than {LEAST_KV_HEADS} key-value heads"
            )
        if (why := torch_form_instead(blueprint, device)) is not None:
            yield f"{AUTO_TAKES_TORCH}: {why}"
