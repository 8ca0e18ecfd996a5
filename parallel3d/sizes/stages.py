"""The layer numbers of each pipeline stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from parallel3d.config.recompute import parts_of
from parallel3d.config.schema import Config
from parallel3d.schedules.placement import StageAssignment
from parallel3d.schedules.schedule import NAMED_SCHEDULES, V_SHAPED
from parallel3d.sizes.balance import balance_chunks, layers_per_stage_given
from parallel3d.sizes.recompute import flops_again, recomputing
from parallel3d.sizes.run_schedule import run_schedule
from parallel3d.sizes.stage_costs import head_cost, layer_cost
from parallel3d.topology.layout import Layout, layout_of


def placement_of(config: Config) -> StageAssignment:
    """Which rank of the pipeline holds which stage: vpp stages each, in loops or as a V."""
    name = config.schedule.name
    if name not in NAMED_SCHEDULES:
        return run_schedule(config).placement
    return StageAssignment(config.pp, config.vpp, "v" if name in V_SHAPED else "loop")


def layout_with_loops(config: Config) -> Layout:
    """`layout_of`, and how often the stages of a pipeline go round its ranks."""
    placement = placement_of(config)
    loops = 1 if placement.shape == "v" else placement.chunks
    return replace(layout_of(config), loops=loops)


def layers_of_stages(config: Config) -> list[range]:
    """Global layer numbers of every stage, in the order of the model:
    `schedule.layers_per_stage`, or balanced by what each rank's stages cost together.

    Raises:
        UserError: the given split does not fit the model, or a stage would be empty.
    """
    model, given, placement = config.model, config.schedule.layers_per_stage, placement_of(config)
    if given is not None:
        sizes = placement.ranks, placement.chunks
        counts = layers_per_stage_given(given, model.num_layers, *sizes)
    else:
        cost, head = layer_cost(model), head_cost(model)
        counts = balance_chunks(cost, model.num_layers, placement, last_extra=head)
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def forwards_again(config: Config) -> list[float]:
    """By stage, how many times its layers' forward their backward computes again."""
    whole = flops_again(config.model, parts_of(config.recompute)) / layer_cost(config.model)
    counts = map(len, layers_of_stages(config))
    return [
        whole * recomputing(config.recompute_layers, stage, count) / count
        for stage, count in enumerate(counts)
    ]
