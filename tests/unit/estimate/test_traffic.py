"""Tests traffic of a step on large layouts, by hand (tests/distributed has the real steps)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parallel3d.blueprint.collectives import Transfer, wire_bytes
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.parameters import parameter_count, stage_parameters
from parallel3d.estimate.traffic import group_size, transfers
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config


def llama_70b(layout: Layout, sp: bool = False, slices: bool | None = False) -> Config:
    model = ModelConfig(
        num_layers=80, hidden_size=8192, num_attention_heads=64, num_query_groups=8,
        ffn_hidden_size=28672, seq_length=4096, vocab_size=32000, norm="rmsnorm",
        position_embedding="rope", activation="swiglu", bias=False, tie_embeddings=False,
    )  # fmt: skip
    config = Config(
        tp=layout.tp, pp=layout.pp, dp=layout.dp, sp=sp, micro_batch_size=1,
        global_batch_size=8 * layout.dp, model=model,
    )  # fmt: skip
    config.precision.name = "bf16"
    config.schedule.layers_per_stage = [80 // layout.pp] * layout.pp
    config.schedule.slices = slices
    return config


LARGE = Layout(tp=8, pp=4, dp=16)


def total(found: list[Transfer], dim: str, layout: Layout) -> float:
    return sum(wire_bytes(t, group_size(dim, layout)) for t in found if t.dim == dim)


def test_tensor_parallel_volume_is_that_of_the_paper() -> None:
    # Narayanan et al. 2021, §3.2: 8·b·s·h·(t − 1)/t elements per layer, micro-batch and device.
    found = transfers(llama_70b(LARGE), LARGE, stage=1)
    expected = 8 * 4096 * 8192 * 7 / 8 * 2 * (20 * 8)
    assert total(found, "tp", LARGE) == expected


def test_sequence_parallelism_sends_a_quarter_more_for_the_inputs_that_it_does_not_keep() -> None:
    # 4 gathers and 4 scatters per layer have the volume of 4 all-reduces; 2 further gathers in the
    # backward are 2 of 8 halves. In addition: the norms' partial gradients, once per step.
    found = transfers(llama_70b(LARGE, sp=True), LARGE, stage=1)
    layers = sum(wire_bytes(t, 8) for t in found if t.what == "activations of the layers")
    plain = total(transfers(llama_70b(LARGE), LARGE, stage=1), "tp", LARGE)
    assert layers == plain * 10 / 8
    assert total(found, "tp", LARGE) - layers == 2 * 7 / 8 * (40 * 8192 * 4)


def test_messages_between_stages_shrink_by_tp_under_sequence_parallelism_or_in_slices() -> None:
    plain, split, sliced = (
        transfers(llama_70b(LARGE, sp=sp, slices=slices), LARGE, stage=1)
        for sp, slices in ((False, False), (True, None), (False, None))
    )
    whole = 4096 * 8192 * 2
    assert [(t.nbytes, t.count) for t in plain if t.dim == "pp"] == [(whole, 8)] * 2
    assert [(t.nbytes, t.count) for t in split if t.dim == "pp"] == [(whole // 8, 8)] * 2
    assert [(t.nbytes, t.count) for t in sliced if t.dim == "pp"] == [(whole // 8, 8)] * 2
    gathered = [(t.op, t.nbytes, t.count) for t in sliced if t.what == "parts of messages"]
    assert gathered == [("all_gather", whole, 2 * 8)]


def test_buckets_hold_every_gradient_of_the_stage_in_fp32() -> None:
    config = llama_70b(LARGE)
    for stage in range(4):
        layers = range(stage * 20, stage * 20 + 20)
        held = stage_parameters(config.model, 8, layers, stage == 0, stage == 3)
        buckets = [t for t in transfers(config, LARGE, stage) if t.what == "gradient buckets"]
        assert sum(t.nbytes * t.count for t in buckets) == 4 * sum(p.numel for p in held)


def test_gradients_of_key_value_heads_are_summed_if_ranks_share_them() -> None:
    """16 ranks hold 8 such heads of 128 channels; the buffer has a place for each head."""
    what = "gradients of shared key-value heads and of norms of heads"
    assert not [t for t in transfers(llama_70b(LARGE), LARGE, stage=1) if t.what == what]
    shared = Layout(tp=16, pp=4)
    (found,) = (t for t in transfers(llama_70b(shared), shared, stage=1) if t.what == what)
    of_layer = 2 * 8 * 128 * 8192
    assert (found.dim, found.op, found.count) == ("tp", "all_reduce", 1)
    assert found.nbytes == 20 * of_layer * 4


def test_under_fsdp2_the_ranks_that_hold_shared_heads_alone_sum_their_gradients() -> None:
    """Rows of q come first: 512 of 768 on a tp rank, so that rank 0 of 2 has rows of q only."""
    layout = Layout(tp=16, pp=4, dp=2)
    config = llama_70b(layout)
    config.zero = 3
    what = "gradients of shared key-value heads and of norms of heads"
    sent = [
        [t.nbytes for t in transfers(config, layout, 1, index) if t.what == what]
        for index in range(2)
    ]
    assert sent == [[], [20 * 2 * 8 * 128 * 8192 * 4]]


@pytest.mark.parametrize(("zero", "sp", "heads", "experts", "dp"), [
    (1, True, 1, 4, 3), (1, True, 2, 4, 2), (3, False, 2, 0, 4), (3, True, 2, 4, 3),
])  # fmt: skip
def test_without_a_stage_the_sums_over_tp_are_those_of_the_busiest_replica(
    zero: int, sp: bool, heads: int, experts: int, dp: int
) -> None:
    """Four tp ranks share key-value heads, whose gradients are in some replicas' shards alone."""
    model = ModelConfig(
        **{"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64},
        **{"num_query_groups": heads, "norm": "rmsnorm", "qk_norm": True, "bias": False},
        **{"tie_embeddings": False, "num_experts": experts},
    )
    layout = Layout(tp=4, pp=3, dp=dp)
    config = Config(tp=4, pp=3, dp=dp, sp=sp, zero=zero, global_batch_size=4 * dp, model=model)
    config.micro_batch_size = 1
    every = [
        total(transfers(config, layout, stage, replica), "tp", layout)
        for stage in range(3)
        for replica in range(dp)
    ]
    assert total(transfers(config, layout), "tp", layout) == max(every) > min(every)


ATTENTION = ["*.attention.*"]
BEFORE = [*ATTENTION, "embedding.*", "layers.0.*", "layers.1.input_norm.*"]


@pytest.mark.parametrize(
    ("frozen", "recompute", "heads", "results"),
    [
        ([], "[attention]", 12, 12),
        (ATTENTION, "[attention]", 12, 8),
        (ATTENTION, "full", 12, 12),
        (BEFORE, "[attention]", 4, 4),
        (BEFORE, "full", 6, 6),
    ],
)
def test_attention_is_sent_again_where_the_backward_needs_it(
    frozen: list[str], recompute: str, heads: int, results: int
) -> None:
    """Two layers of two micro-batches: a frozen output does not read attention's results again;
    before all trained parameters attention has no backward, but is repeated with its layer."""
    model = ModelConfig(num_layers=2, tie_embeddings=False)
    config = Config(cp=2, micro_batch_size=1, global_batch_size=2, model=model)
    config.recompute, config.context_parallel.style = recompute, "heads"
    config.optim.freeze = frozen
    found = transfers(config, Layout(cp=2), 0)
    sent = {t.what: t.count for t in found if t.dim == "cp"}
    assert sent == {"heads of whole sequences": heads, "results of heads": results}


def test_norms_over_all_heads_sum_in_a_backward_only_if_it_reaches_them() -> None:
    """The first layer trains its last product alone, whose weight needs no gradient of a norm."""
    model = ModelConfig(num_layers=2, norm="rmsnorm", qk_norm=True, qk_norm_width="full")
    config = Config(tp=2, micro_batch_size=1, global_batch_size=3, model=model)
    layer = ("input_norm.*", "attention.q*", "attention.k*", "attention.v*")
    config.optim.freeze = ["embedding.*", *(f"layers.0.{name}" for name in layer)]
    what = "norms over split dimensions"
    found = [t for t in transfers(config, Layout(tp=2), 0) if t.what == what]
    sums = 2 * model.seq_length * 4  # of q and of k, in fp32
    assert {(t.dim, t.op, t.nbytes) for t in found} == {("tp", "all_reduce", sums)}
    assert sorted(t.count for t in found) == [3, 2 * 3]


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_all_stages_add_up_to_the_model(tied: bool) -> None:
    model = ModelConfig(num_layers=6, vocab_size=256, vocab_multiple=8, tie_embeddings=tied)
    whole = stage_parameters(model, 1, range(6), True, True)
    assert sum(p.numel for p in whole) == parameter_count(model)
    stages = [stage_parameters(model, 1, range(3 * i, 3 * i + 3), i == 0, i == 1) for i in range(2)]
    copy = 256 * model.hidden_size if tied else 0  # first and last stage both hold a tied table
    assert sum(p.numel for s in stages for p in s) == parameter_count(model) + copy
    halves = stage_parameters(model, 2, range(6), True, True)
    split = [p.numel for p in halves if not p.replicated]
    assert 2 * sum(split) + sum(p.numel for p in halves if p.replicated) == parameter_count(model)


def test_without_a_stage_each_dimension_is_the_busiest_stage_s() -> None:
    config = llama_70b(LARGE)
    config.schedule.layers_per_stage = [17, 25, 20, 18]
    found = transfers(config, LARGE)
    by_stage = [transfers(config, LARGE, stage) for stage in range(4)]
    for dim in ("tp", "dp"):
        assert total(found, dim, LARGE) == max(total(s, dim, LARGE) for s in by_stage)
    assert [t for t in found if t.dim == "tp"] == [t for t in by_stage[1] if t.dim == "tp"]
    assert [t.what for t in found if t.dim == "pp"] == [
        "activations to the next stage",
        "gradients to the previous stage",
    ]
    pair = Layout(pp=2)
    assert len([t for t in transfers(llama_70b(pair), pair) if t.dim == "pp"]) == 2
    assert len([t for t in transfers(llama_70b(pair), pair, stage=0) if t.dim == "pp"]) == 1


def test_groups_of_one_send_nothing() -> None:
    assert transfers(llama_70b(Layout()), Layout()) == []
    dims = {t.dim for t in transfers(llama_70b(Layout(dp=4)), Layout(dp=4))}
    assert dims == {"dp", "world"}


def test_wire_bytes_of_a_ring() -> None:
    assert wire_bytes(Transfer("tp", "all_reduce", 800, 3, ""), 4) == 3 * 1200
    assert wire_bytes(Transfer("tp", "all_gather", 800, 1, ""), 4) == 600
    assert wire_bytes(Transfer("pp", "send_recv", 800, 2, ""), 4) == 1600
    assert wire_bytes(Transfer("pp", "send_recv", 800, 2, ""), 1) == 0


def test_a_missing_stage_or_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stage 4 is outside of 0\.\.3"):
        transfers(llama_70b(LARGE), LARGE, stage=4)


@pytest.mark.slow
def test_the_price_is_found_without_torch() -> None:
    code = (
        "import sys; from parallel3d.estimate import traffic; "
        "from parallel3d.estimate import network; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 4), ("cuda", 1), ("auto", 1)])
def test_the_loss_is_gathered_once_a_chunk_of_its_device(device: str, chunks: int) -> None:
    """4096 tokens and 131072 / 8 columns: 256 MiB of logits in fp32, 128 in bf16."""
    config = llama_70b(LARGE)
    config.device, config.model.vocab_size = device, 131072
    (found,) = (t for t in transfers(config, LARGE, stage=3) if t.what == "loss")
    assert (found.count, found.nbytes) == (8 * chunks, 8 * 3 * 4 * 4096 // chunks)


def test_a_window_of_1024_sends_a_fortieth_of_what_a_full_layer_of_128k_tokens_does() -> None:
    layout = Layout(cp=8)
    sent = []
    for keys in ({}, {"layer_types": ["sliding"], "sliding_window": 1024}):
        model = ModelConfig(
            num_layers=4, hidden_size=2048, num_attention_heads=16, num_query_groups=8,
            seq_length=131072, position_embedding="rope", **keys,
        )  # fmt: skip
        config = Config(cp=8, dp=1, model=model, micro_batch_size=1, global_batch_size=1)
        config.precision.name = "bf16"
        sent.append(total(transfers(config, layout), "cp", layout))
        of_rank = [total(transfers(config, layout, 0, rank), "cp", layout) for rank in range(8)]
        assert max(of_rank) == sent[-1]
    assert sent[0] >= 40 * sent[1] > 0


def test_muon_sends_each_matrix_of_a_layer_to_one_rank_and_to_all() -> None:
    model = ModelConfig(num_layers=2, vocab_size=256, vocab_multiple=8, bias=False)
    config = Config(model=model, dp=2, global_batch_size=2)
    config.optim.name, config.optim.momentum = "muon", 0.95
    matrices = 2 * 12 * model.hidden_size**2
    sent = [
        t.nbytes * t.count
        for index in range(2)
        for t in transfers(config, Layout(dp=2), 0, index)
        if t.what == "Muon's updates" and t.dim != "tp"
    ]
    assert sum(sent) == 2 * 4 * matrices
