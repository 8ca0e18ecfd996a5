"""The layer numbers of each pipeline stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from parallel3d.config.schema import Config, ModelConfig
from parallel3d.schedules.placement import Placement
from parallel3d.schedules.schedule import FORMS, V_SHAPED
from parallel3d.sizes.balance import balance_chunks, layers_per_stage_given
from parallel3d.sizes.run_schedule import run_schedule
from parallel3d.topology.layout import Layout, layout_of


def layer_cost(model: ModelConfig) -> float:
    """Forward FLOPs of one layer and token: its matrices, and causal attention's two products."""
    queries = model.num_attention_heads * model.head_size
    attention = model.hidden_size * 2 * (queries + model.kv_heads * model.head_size)
    matrices = 3 if model.activation == "swiglu" else 2
    weights = attention + matrices * model.hidden_size * model.ffn_size
    return 2.0 * weights + 2.0 * queries * model.seq_length


def head_cost(model: ModelConfig) -> float:
    """Forward FLOPs of the output head for one token, padding included."""
    return 2.0 * model.hidden_size * model.padded_vocab_size


def placement_of(config: Config) -> Placement:
    """Which rank of the pipeline holds which stage: vpp stages each, in loops or as a V."""
    name = config.schedule.name
    if name not in FORMS:
        return run_schedule(config).placement
    return Placement(config.pp, config.vpp, "v" if name in V_SHAPED else "loop")


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
