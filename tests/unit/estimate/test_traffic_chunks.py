"""Tests traffic of ranks that hold several stages of a pipeline, counted by hand from lists of
ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.parameters import parameter_count
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.estimate.search import planned
from parallel3d.estimate.traffic import transfers
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config

MICROBATCHES = 6
# The rank of each stage, in the order of the model.
LOOPS = {
    (2, 2): [0, 1, 0, 1],
    (3, 2): [0, 1, 2, 0, 1, 2],
    (2, 3): [0, 1, 0, 1, 0, 1],
    (1, 4): [0, 0, 0, 0],
    (4, 1): [0, 1, 2, 3],
}
VS = {(2, 2): [0, 1, 1, 0], (3, 2): [0, 1, 2, 2, 1, 0], (1, 2): [0, 0]}
PIPELINES = [("interleaved", *sizes, ranks) for sizes, ranks in LOOPS.items()]
PIPELINES += [("zbv", *sizes, ranks) for sizes, ranks in VS.items()]
pipelines = pytest.mark.parametrize(("name", "pp", "vpp", "ranks"), PIPELINES)


def config_of(
    name: str, layout: Layout, vpp: int, split: list[int] | None = None, tied: bool = True
) -> Config:
    model = ModelConfig(
        num_layers=sum(split) if split else 13, hidden_size=16, num_attention_heads=4,
        seq_length=8, vocab_size=32, vocab_multiple=8, tie_embeddings=tied,
    )  # fmt: skip
    config = Config(
        tp=layout.tp, pp=layout.pp, dp=layout.dp, vpp=vpp, micro_batch_size=2, device="cpu",
        global_batch_size=2 * MICROBATCHES * layout.dp, model=model,
    )  # fmt: skip
    config.schedule.name, config.schedule.layers_per_stage = name, split
    return config


def calls(found: list[Transfer], dim: str, what: str = "") -> int:
    return sum(t.count for t in found if t.dim == dim and what in t.what)


def of_ranks(config: Config, layout: Layout) -> list[list[Transfer]]:
    return [transfers(config, layout, index) for index in range(layout.pp)]


@pipelines
def test_each_boundary_between_two_ranks_is_a_message_a_microbatch_and_direction(
    name: str, pp: int, vpp: int, ranks: list[int]
) -> None:
    layout = Layout(pp=pp)
    ahead, back = [0] * pp, [0] * pp
    for here, there in pairwise(ranks):
        if here != there:
            ahead[here] += MICROBATCHES
            back[there] += MICROBATCHES
    found = of_ranks(config_of(name, layout, vpp), layout)
    assert [calls(sent, "pp", "activations") for sent in found] == ahead
    assert [calls(sent, "pp", "gradients") for sent in found] == back
    assert {t.nbytes for sent in found for t in sent if t.dim == "pp"} <= {2 * 8 * 16 * 4}


@pipelines
def test_a_rank_s_layers_head_and_embedding_are_those_of_its_stages(
    name: str, pp: int, vpp: int, ranks: list[int]
) -> None:
    layout = Layout(tp=2, pp=pp, dp=2)
    split = [1 + (3 * stage) % 4 for stage in range(pp * vpp)]
    found = of_ranks(config_of(name, layout, vpp, split), layout)
    for index, sent in enumerate(found):
        layers = sum(count for rank, count in zip(ranks, split, strict=True) if rank == index)
        assert calls(sent, "tp", "activations of the layers") == 4 * layers * MICROBATCHES
        has_head, has_table = index == ranks[-1], index == ranks[0]
        assert calls(sent, "tp", "loss") == MICROBATCHES * has_head
        assert calls(sent, "dp", "token count") == has_head
        assert calls(sent, "tp", "embedding") == MICROBATCHES * has_table
        apart = has_head != has_table
        assert calls(sent, "embedding", "gradient of the tied table") == apart


@pipelines
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_all_ranks_add_up_to_the_model(
    name: str, pp: int, vpp: int, ranks: list[int], tied: bool
) -> None:
    layout = Layout(pp=pp, dp=2)
    config = config_of(name, layout, vpp, tied=tied)
    blueprint = planned(config, layout)
    held = [PipelineRank(blueprint, index).parameters for index in range(layout.pp)]
    copy = 32 * 16 if tied and ranks[0] != ranks[-1] else 0
    assert sum(p.numel for mine in held for p in mine) == parameter_count(config.model) + copy
    buckets = [t for sent in of_ranks(config, layout) for t in sent if t.what == "gradient buckets"]
    assert sum(t.nbytes * t.count for t in buckets) == 4 * (parameter_count(config.model) + copy)


LAYER = 12 * 16 * 16 + 13 * 16  # four matrices with biases, two norms
EMBEDDING, POSITIONS, NORM = 32 * 16, 8 * 16, 2 * 16


@pytest.mark.parametrize(
    ("name", "tied", "rank", "numels"),
    [
        ("interleaved", False, 0, [3 * LAYER, LAYER + EMBEDDING + POSITIONS]),
        ("interleaved", False, 1, [4 * LAYER + NORM + EMBEDDING, 2 * LAYER]),
        # A copy of the table that another rank has, too, is cut in the same way on both: it has its
        # own bucket.
        ("interleaved", True, 0, [3 * LAYER, LAYER, EMBEDDING, POSITIONS]),
        ("interleaved", True, 1, [NORM, EMBEDDING, 4 * LAYER, 2 * LAYER]),
        # In a V one rank has both ends, and one table for the two.
        ("zbv", True, 0, [4 * LAYER + NORM, LAYER + EMBEDDING + POSITIONS]),
        ("zbv", True, 1, [3 * LAYER, 2 * LAYER]),
        ("zbv", False, 0, [4 * LAYER + NORM + EMBEDDING, LAYER + EMBEDDING + POSITIONS]),
    ],
)
def test_no_bucket_holds_parameters_of_two_chunks(
    name: str, tied: bool, rank: int, numels: list[int]
) -> None:
    layout = Layout(pp=2, dp=2)
    config = config_of(name, layout, 2, [1, 2, 3, 4], tied)
    config.ddp.bucket_cap_mb = 100.0
    sent = transfers(config, layout, rank)
    found = [t.nbytes // 4 for t in sent if t.what == "gradient buckets" for _ in range(t.count)]
    assert sorted(found) == sorted(numels)


def test_each_chunk_begins_with_a_small_bucket() -> None:
    """Each chunk has its own backward, whose reduction starts while the next one runs."""
    layout = Layout(pp=2, dp=2)
    config = config_of("interleaved", layout, 2, [2, 2, 2, 2])
    config.model.hidden_size = 256  # 3 MiB per layer, of which a GEMM's gradient reaches 1 MiB
    buckets = [t for t in transfers(config, layout, 1) if t.what == "gradient buckets"]
    small = 4 * (256 * 1024 + 256)  # the last matrix of a layer, and its bias
    # The other bucket has head and norm.
    assert sum(t.count for t in buckets if t.nbytes == small) == 1


@pytest.mark.parametrize(
    ("name", "pp", "vpp", "boundaries"),
    [
        ("interleaved", 4, 2, 2),  # and one message from the last rank to the first
        ("interleaved", 2, 2, 3),  # forth and back
        ("interleaved", 2, 3, 5),
        ("interleaved", 1, 4, 0),
        ("zbv", 2, 2, 2),
        ("zbv", 4, 2, 2),
        ("1f1b", 4, 1, 1),
    ],
)
def test_without_a_stage_pp_has_the_traffic_between_two_neighbours(
    name: str, pp: int, vpp: int, boundaries: int
) -> None:
    layout = Layout(pp=pp)
    found = transfers(config_of(name, layout, vpp), layout)
    assert calls(found, "pp", "activations") == boundaries * MICROBATCHES
    assert calls(found, "pp", "gradients") == boundaries * MICROBATCHES


@pytest.mark.parametrize("name", ["interleaved", "zbv"])
def test_without_a_stage_the_other_dimensions_are_those_of_the_busiest_rank(name: str) -> None:
    layout = Layout(tp=2, pp=4, dp=2)
    config = config_of(name, layout, 2, [1, 2, 1, 3, 1, 2, 6, 1])
    busiest = {"interleaved": 2, "zbv": 1}[name]
    found = transfers(config, layout)
    mine = transfers(config, layout, busiest)
    assert [t for t in found if t.dim == "tp"] == [t for t in mine if t.dim == "tp"]


EXPERTS = {"num_experts": 4, "dense_layers": [0, 1, 4, 5, 6, 7], "bias": False}


@pytest.mark.parametrize(
    ("dim", "model", "keys"),
    [
        ("ep", EXPERTS, {"dp": 2, "ep": 2}),
        ("tp", {}, {"tp": 2, "recompute": "full", "recompute_layers": [0, 2, 0, 0]}),
        ("dp", {}, {"dp": 2, "frozen": [f"layers.{i}.*" for i in (0, 1, 4, 5, 6, 7)]}),
    ],
)
def test_the_busiest_rank_is_found_between_equally_many_layers_of_other_kinds(
    dim: str, model: dict[str, Any], keys: dict[str, Any]
) -> None:
    """Only the second of four ranks has such layers; the third has equally many layers."""
    sizes = {name: keys[name] for name in ("tp", "dp", "ep") if name in keys}
    layout = Layout(pp=4, **sizes)
    config = config_of("1f1b", layout, 1, [2, 2, 2, 2])
    config.model = replace(config.model, **model)
    config.recompute = keys.get("recompute", "none")
    config.recompute_layers = keys.get("recompute_layers")
    config.optim.freeze = keys.get("frozen")
    found, second = (transfers(config, layout, stage) for stage in (None, 1))
    assert [t for t in found if t.dim == dim] == [t for t in second if t.dim == dim] != []
