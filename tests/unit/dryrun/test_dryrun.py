"""Tests that the counts of `parallel3d dryrun` equal arithmetic, for layouts of any size.

The simulated device is enabled once and for all in a process, so the dry runs have one of their
own: a list of configurations goes in, their facts come out.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.blueprint.collectives import wire_bytes
from parallel3d.blueprint.parameters import stage_parameters, trained_shares
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.build import Trainer
from parallel3d.cli.command_line import main
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.estimate.memory import peak_memory
from parallel3d.estimate.search import planned
from parallel3d.estimate.traffic import transfers
from parallel3d.models.flops import flops_per_token
from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config, check_config
from parallel3d.schedules.messages import SENDS
from parallel3d.trace.world import Zeros
from tests.e2e.ready import run_code

pytestmark = pytest.mark.nightly

MODEL = {
    "num_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 4,
    "ffn_hidden_size": 512, "seq_length": 512, "vocab_size": 1024, "norm": "rmsnorm",
    "position_embedding": "rope", "activation": "swiglu", "bias": False, "tie_embeddings": False,
}  # fmt: skip
ONE = {"micro_batch_size": 2, "global_batch_size": 4, "dp": 1}
BUT_THE_HEAD = ["embedding.*", "layers.*", "final_norm.*"]
FIRST_HALF = ["embedding.*", "layers.0.*"]

# name → keys of Config; "model" overrides MODEL.
CASES: dict[str, dict[str, Any]] = {
    "one": ONE,
    "many": ONE | {"global_batch_size": 64},
    "apart": ONE | {"sums_apart": True},
    "full": ONE | {"recompute": "full"},
    "documents": ONE | {"data": {"document_mask": True}},
    "fp32": ONE | {"precision": "fp32"},
    "sgd": ONE | {"optim": "sgd"},
    "zero1": ONE | {"dp": 4, "zero": 1, "global_batch_size": 16},
    "head": ONE | {"freeze": BUT_THE_HEAD},
    "head zero1": ONE | {"dp": 4, "zero": 1, "global_batch_size": 16, "freeze": BUT_THE_HEAD},
    "half zero2": ONE | {"dp": 4, "zero": 2, "global_batch_size": 16, "freeze": FIRST_HALF},
    "half zero3": ONE | {"dp": 4, "zero": 3, "global_batch_size": 16, "freeze": FIRST_HALF},
    "matrices": ONE | {"freeze": ["*.attention.*", "*.mlp.*"]},
    "zero3": ONE | {"dp": 4, "zero": 3, "global_batch_size": 16},
    "3d": ONE | {"tp": 2, "pp": 2, "dp": 2, "sp": True, "global_batch_size": 16},
    "whole": ONE | {"tp": 2, "pp": 2, "dp": 2, "global_batch_size": 16},
    "gpipe": ONE | {"pp": 2, "schedule": "gpipe", "global_batch_size": 16},
    "1f1b": ONE | {"pp": 2, "global_batch_size": 16},
    "loops": ONE
    | {"pp": 2, "vpp": 2, "dp": 2, "schedule": "interleaved", "global_batch_size": 64}
    | {"model": {"num_layers": 6}},
    "experts": ONE | {"model": {"num_experts": 8, "expert_ffn_size": 128}},
    "gathered": ONE
    | {"dp": 4, "ep": 4, "global_batch_size": 16, "moe": {"dispatch": "gather"}}
    | {"model": {"num_experts": 8, "expert_ffn_size": 128}},
    "sent": ONE
    | {"dp": 4, "ep": 4, "global_batch_size": 16, "moe": {"dispatch": "all_to_all"}}
    | {"model": {"num_experts": 8, "expert_ffn_size": 128}},
    "world": ONE
    | {"tp": 4, "pp": 4, "dp": 1024, "zero": 1, "global_batch_size": 16384}
    | {"model": {"num_layers": 4}},
}
SCRIPT = """
import json, sys
from omegaconf import OmegaConf
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.data.keys import DataConfig
from parallel3d.data_parallel.keys import DataParallelConfig
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config, conf_dir
from unittest.mock import patch
from parallel3d.commands.dry_ranks import find_facts
from parallel3d.models.layers import Norm

given = json.loads(sys.argv[1])
cluster = OmegaConf.to_container(OmegaConf.load(conf_dir() / "cluster" / "dgx_h100.yaml"))
for name, keys in given.items():
    config = Config(cluster=ClusterConfig(**cluster), model=ModelConfig(**keys.pop("model")))
    config.precision.name = keys.pop("precision", "bf16")
    config.schedule.name = keys.pop("schedule", "1f1b")
    config.optim.name = keys.pop("optim", "adamw")
    config.optim.freeze = keys.pop("freeze", None)
    config.ddp = DataParallelConfig(**keys.pop("ddp", {}))
    config.data = DataConfig(**keys.pop("data", {}))
    config.moe = ExpertsConfig(**keys.pop("moe", {}))
    plain = Norm.is_fused_with_sum
    fuses = (lambda *_: False) if keys.pop("sums_apart", False) else plain
    for key, value in keys.items():
        setattr(config, key, value)
    with patch.object(Norm, "is_fused_with_sum", fuses):
        print(json.dumps([name, find_facts(config)]), flush=True)
"""


def complete(keys: dict[str, Any]) -> dict[str, Any]:
    return keys | {"model": MODEL | keys.get("model", {})}


def config_of(name: str) -> Config:
    keys = complete(CASES[name])
    apart = ("precision", "schedule", "optim", "freeze")
    named = {k: v for k, v in keys.items() if k not in apart}
    config = Config(**named | {"model": ModelConfig(**keys["model"])})
    config.optim.freeze = keys.get("freeze")
    config.precision.name = keys.get("precision", "bf16")
    config.schedule.name = keys.get("schedule", "1f1b")
    return check_config(config, own_samples=True)


@pytest.fixture(scope="module")
def facts() -> dict[str, dict[str, Any]]:
    done = run_code(SCRIPT, json.dumps({name: complete(keys) for name, keys in CASES.items()}))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def local_numel(config: Config, stage: int) -> int:
    layers = blueprint_of(config).stages[stage].layers
    ends = stage == 0, stage == config.pp - 1
    return sum(p.numel for p in stage_parameters(config.model, config.tp, layers, *ends))


def near(value: float, expected: float, share: float = 0.01) -> bool:
    """Asserts equality up to the allocator's rounding and a bucket's padding."""
    return expected <= value <= expected * (1 + share)


def state(found: dict[str, Any]) -> tuple[int, ...]:
    kinds = ("parameters", "gradients", "masters", "optimizer")
    return tuple(found["live_bytes"][kind] for kind in kinds)


def test_residuals_in_the_kernels_of_norms_save_launches_and_passes(facts) -> None:
    """Counts for one layer: in the forward a launch and a read of the sum; in the backward two
    launches, and for each norm a write and a read of its gradient."""
    config = config_of("one")
    model, passed = config.model, config.num_microbatches * config.model.num_layers
    stream = 2 * config.micro_batch_size * model.seq_length * model.hidden_size
    apart, joined = facts["apart"], facts["one"]
    assert apart["launches"] - joined["launches"] == 3 * passed
    assert apart["bytes"] - joined["bytes"] == 5 * passed * stream
    assert apart["peak_bytes"] == joined["peak_bytes"]


@pytest.mark.parametrize("name", ["one", "3d"])
def test_state_in_bf16_is_18_bytes_a_parameter(facts, name) -> None:
    found = facts[name]
    numel = local_numel(config_of(name), found["stage"])
    expected = (2 * numel, 4 * numel, 4 * numel, 8 * numel)
    assert all(map(near, state(found), expected)), (state(found), expected)


def test_zero_1_shards_masters_and_optimizer(facts) -> None:
    numel = local_numel(config_of("zero1"), 0)
    assert all(map(near, state(facts["zero1"]), (2 * numel, 4 * numel, numel, 2 * numel)))


def test_zero_3_shards_everything_and_gathers_parameters(facts) -> None:
    found, numel = facts["zero3"], local_numel(config_of("zero3"), 0)
    assert all(map(near, state(found), (0, numel, numel, 2 * numel)))
    assert found["parameters_bytes"] > 0
    assert found["start_peak_bytes"] < found["between_steps_bytes"] + 4 * numel / 2


def numels(name: str) -> tuple[int, int]:
    """Returns the elements of all parameters of a rank, and of those that are trained."""
    rank = PipelineRank(planned(config_of(name)), 0)
    return sum(p.numel for p in rank.parameters), sum(p.numel for p in rank.trained)


def test_state_of_what_is_frozen_is_2_bytes_a_parameter(facts) -> None:
    numel, trained = numels("head")
    assert 0 < trained < numel / 5
    expected = 2 * numel, 4 * trained, 4 * trained, 8 * trained
    assert all(map(near, state(facts["head"]), expected)), state(facts["head"])
    expected = 2 * numel, 4 * trained, trained, 2 * trained
    assert all(map(near, state(facts["head zero1"]), expected)), state(facts["head zero1"])


def test_zero_2_holds_what_is_frozen_whole_and_zero_3_shards_it(facts) -> None:
    numel, trained = numels("half zero2")
    frozen = numel - trained
    for name, held in (("half zero2", 2 * frozen), ("half zero3", frozen / 2)):
        expected = held, trained, trained, 2 * trained
        assert all(map(near, state(facts[name]), expected)), (name, state(facts[name]))


@pytest.mark.parametrize("name", ["head", "matrices"])
def test_a_trainer_holds_what_the_dry_run_of_a_frozen_run_counts(facts, name) -> None:
    """Compares the bytes of every kind of state with a trainer's on the CPU."""
    config = dataclasses.replace(config_of(name), device="cpu")
    trainer = Trainer(config, ProcessGroups.single(), torch.device("cpu"), train_source=Zeros(512))
    trainer.train_step()
    segments, groups = trainer.data_parallel.segments, trainer.optimizer.groups
    states = (t for group in groups for ts in (*group.state.values(), group.steps) for t in ts)
    tensors = (
        trainer.parameters.values(),
        (s.grad for s in segments),
        (s.master for s in segments),
        states,
    )
    measured = [sum(t.nbytes for t in some) for some in tensors]
    assert state(facts[name]) == pytest.approx(measured, rel=0.03)


def test_what_is_frozen_has_no_weight_gradient_and_nothing_before_it_a_backward(facts) -> None:
    """Compares FLOPs with all GEMMs (two thirds belong to the backward), and activations at the
    peak with a whole step's, including temporary ones."""
    config = config_of("one")
    model, tokens = config.model, config.global_batch_size * config.model.seq_length
    shares = {name: trained_shares(model, config_of(name).optim) for name in ("head", "matrices")}
    for name, share in shares.items():
        whole = flops_per_token(model, model.seq_length)
        less = tokens * (whole - flops_per_token(model, model.seq_length, share))
        # Attention's flash kernel counts half of the square, and 7 of 12 matmuls of both ways.
        assert facts["one"]["flops"] - facts[name]["flops"] == pytest.approx(less, rel=0.12)
    assert facts["head"]["activations_bytes"] < 0.5 * facts["one"]["activations_bytes"]
    assert facts["matrices"]["activations_bytes"] < 0.9 * facts["one"]["activations_bytes"]
    for name in ("head", "head zero1", "half zero2", "half zero3", "matrices"):
        bound = peak_memory(config_of(name), 0).total
        assert facts[name]["peak_bytes"] <= 1.03 * bound, name


def test_in_fp32_the_parameters_are_the_masters(facts) -> None:
    numel = local_numel(config_of("fp32"), 0)
    assert all(map(near, state(facts["fp32"]), (4 * numel, 4 * numel, 0, 8 * numel)))
    assert facts["sgd"]["live_bytes"]["optimizer"] < numel / 10  # without momentum


@pytest.mark.parametrize("name", CASES)
def test_step_time_kinds_add_up_and_steps_begin_and_end_together(facts, name) -> None:
    found = facts[name]
    kinds = [k for k in found if k.endswith("_bytes") and k.removesuffix("_bytes") in KINDS]
    assert sum(found[k] for k in kinds) == found["peak_bytes"]
    assert found["between_steps_bytes"] <= found["peak_bytes"]
    assert found["live_bytes"]["activations"] == found["live_bytes"]["logits"] == 0
    assert all(value >= 0 for value in found["live_bytes"].values())


KINDS = ("parameters", "gradients", "masters", "optimizer", "activations", "logits", "buffers")


def test_activations_of_a_layer_are_those_of_a_hand_count(facts) -> None:
    """Counts the kept tensors in bf16, in units of a hidden state: input, its norm, q, k, v,
    attention's output, the residual, its norm, gate and up, their product; at the end the last
    hidden state, its norm and its gradient."""
    tokens, hidden, ffn = 2 * 512, 256, 512
    unit = 2 * tokens * hidden
    layer = 1 + 1 + (1 + 2 * 4 / 8) + 1 + 1 + 1 + 2 * ffn / hidden + ffn / hidden
    expected = (MODEL["num_layers"] * layer + 3) * unit
    assert facts["one"]["activations_bytes"] == pytest.approx(expected, rel=0.05)


def test_full_recomputation_keeps_only_a_layers_input(facts) -> None:
    unit = 2 * 2 * 512 * 256
    layers, whole = MODEL["num_layers"] * unit, facts["one"]["activations_bytes"]
    one = whole / MODEL["num_layers"]
    # One whole layer is in memory while its backward runs, with its gradients.
    assert layers < facts["full"]["activations_bytes"] < layers + one + 6 * unit < whole
    parts = facts["full"]["parts"], facts["one"]["parts"]
    again, once = (p["gemm_layers"]["flops"] for p in parts)
    assert 1.2 * once < again < 4 / 3 * once  # all but the last GEMM of each layer


@pytest.mark.parametrize("name", ["one", "many", "zero1", "zero3"])
def test_flops_are_those_of_the_model_with_half_of_attention(facts, name) -> None:
    """`metrics.flops` counts attention in full, as 6 GEMMs over the scores; a causal kernel
    computes half of 7, because flash attention's backward recomputes the scores."""
    found, model = facts[name], config_of(name).model
    tokens = found["tokens"] / found["world_size"]
    attention = 12.0 * model.num_layers * model.hidden_size * model.seq_length
    expected = tokens * (flops_per_token(model, model.seq_length) - attention * (1 - 7 / 12))
    assert found["flops"] == pytest.approx(expected, rel=0.01)


def test_document_masks_are_one_kernel_and_no_wait(facts) -> None:
    """Without data, documents are as long as samples, which is the most expensive case of
    attention."""
    plain, masked = facts["one"], facts["documents"]
    assert masked["parts"]["attention"]["flops"] == plain["parts"]["attention"]["flops"]
    assert masked["parts"]["attention"]["launches"] == plain["parts"]["attention"]["launches"]
    assert masked["host_syncs"] == 1
    assert near(masked["peak_bytes"], plain["peak_bytes"])


def test_many_micro_batches_are_as_many_times_one(facts) -> None:
    """Compares a step of 32 micro-batches, of which 2 ran, with a step of 2 that both ran."""
    many, two = facts["many"], facts["one"]
    for what in ("flops", "launches", "bytes"):
        once = two["parts"]["optimizer"][what]
        ratio = (many[what] - once) / (two[what] - once)
        assert ratio == pytest.approx(16, rel=0.05), what
    assert many["peak_bytes"] == two["peak_bytes"]
    assert many["host_syncs"] == two["host_syncs"] == 1


def test_the_time_is_the_sum_of_its_parts(facts) -> None:
    for name, found in facts.items():
        peak = 66.9e12 if name == "fp32" else 989.4e12
        assert found["seconds"] == pytest.approx(sum(p["seconds"] for p in found["parts"].values()))
        for part in found["parts"].values():
            most = part["bytes"] / 2.5e12
            assert part["seconds"] <= most + part["flops"] / (peak * 0.3) + 1e-12


def test_sums_of_partial_gradients_over_tp_are_part_of_the_update(facts) -> None:
    """Under sequence parallelism the gradients of norms are summed over tp before the update."""
    update, whole = (facts[name]["parts"]["optimizer"]["launches"] for name in ("3d", "whole"))
    assert update > whole


def test_gpipe_keeps_all_micro_batches_and_1f1b_those_in_flight(facts) -> None:
    gpipe, one = facts["gpipe"], facts["1f1b"]
    sent = SENDS * 2 * 2 * 512 * 256  # messages in flight
    ratio = (gpipe["activations_bytes"] - sent) / (one["activations_bytes"] - sent)
    assert ratio == pytest.approx(8 / 2, rel=0.15)
    for rows in zip(gpipe["rows"], one["rows"], strict=True):
        assert rows[0]["flops"] == pytest.approx(rows[1]["flops"])
    assert gpipe["step_seconds"] > gpipe["seconds"]  # idle in the bubble


def test_bytes_that_a_rank_sends(facts) -> None:
    found, config = facts["zero1"], config_of("zero1")
    numel = local_numel(config, 0)
    # A reduce-scatter of fp32 gradients, an all-gather of bf16 parameters; a ring sends 3/4 of
    # them.
    assert near(found["groups"]["dp"]["bytes_sent"], 0.75 * (4 + 2) * numel)
    found = facts["3d"]
    unit = 2 * 2 * 512 * 256 // 2  # bytes of a hidden state on one tp rank
    assert found["groups"]["pp"]["bytes_sent"] == 4 * unit  # 4 micro-batches are sent one way
    assert {"tp", "pp", "dp", "world"} == set(found["groups"])


def test_a_rank_has_all_of_its_chunks_and_sends_for_them(facts) -> None:
    """The ranks hold chunks in loops; estimate/test_plan_own.py runs the V."""
    found, config = facts["loops"], config_of("loops")
    layout = blueprint_of(config).looped_layout
    rank = PipelineRank(planned(config), found["stage"])
    numel = sum(p.numel for p in rank.parameters)
    assert near(state(found)[0], 2 * numel) and near(state(found)[1], 4 * numel)
    assert [row["stages"] for row in found["rows"]] == [[0, 2], [1, 3]]
    # Only a few of 16 micro-batches run, plus the difference between two and one.
    sent = [t for t in transfers(config, layout, rank.index) if t.dim == "pp"]
    assert found["groups"]["pp"]["bytes_sent"] == sum(wire_bytes(t, 2) for t in sent)
    buckets = [t for t in transfers(config, layout, rank.index) if t.dim == "dp"]
    assert found["groups"]["dp"]["bytes_sent"] == sum(wire_bytes(t, 2) for t in buckets)
    assert found["groups"]["dp"]["calls"] == sum(t.count for t in buckets)


def test_the_bubble_of_loops_is_the_simulators(facts) -> None:
    """With 16 micro-batches on 2 ranks with 2 chunks, the bubble is (2 − 1) / (2 · 16) of the
    compute."""
    found = facts["loops"]
    slowest = max(row["seconds"] for row in found["rows"])
    over = found["step_seconds"] / slowest - 1
    assert 0.8 / 32 < over <= 1 / 32 * (1 + 1e-9)  # the optimizer is not repeated in the bubble


def test_a_row_for_the_first_a_middle_and_the_last_stage(facts) -> None:
    assert [row["stage"] for row in facts["world"]["rows"]] == [0, 2, 3]
    assert [row["rank"] for row in facts["world"]["rows"]] == [0, 8192, 12288]
    assert facts["world"]["peak_bytes"] == max(r["peak_bytes"] for r in facts["world"]["rows"])
    assert facts["world"]["world_size"] == 16384


def test_experts_get_equally_many_rows_and_are_called_total_and_active(facts) -> None:
    """The GEMMs of a layer's experts have 2 rows for each token, which chooses 2 of 8 experts."""
    one, gathered, sent = (facts[name] for name in ("experts", "gathered", "sent"))
    unused = 2 * 6 * 3 * 128 * 256  # layers, experts, matrices
    assert one["parameters"] - one["active_parameters"] == unused
    expected = 3 * (2 * 2 * 3 * 128 * 256) * 2  # rows of a token in 2 layers: 2 rows, both passes
    for found in (one, gathered, sent):
        dense = found["parts"]["gemm_layers"]["flops"] / 2048 - expected
        attention = 2 * 3 * 2 * 256 * (256 + 2 * 128 + 256)
        # the last product has the FLOPs of the router
        assert dense == attention + 2 * 3 * 2 * 256 * 8
    waits = [f["host_waits"] for f in (one, gathered, sent)]
    assert [sum(n for why, n in w.items() if "experts/" in why) for w in waits] == [0, 4, 4]


def test_every_file_that_the_counter_sorts_by_exists() -> None:
    """If a file were moved, its time would silently count as a part of the blocks."""
    done = run_code(
        "import json; from parallel3d.dryrun.counting import _FRAMES; "
        "print(json.dumps(sorted({row[0] for row in _FRAMES})))"
    )
    roots = {"parallel3d": Path("parallel3d"), "torch": Path(torch.__file__).parent}
    for name in json.loads(done.stdout):
        _, package, inside = name.split("/", 2)
        assert (roots[package] / inside).exists(), name


# --- the command line ----------------------------------------------------------------------------


ANSWERS = """
import contextlib, io, json, sys
from parallel3d.cli.command_line import main

for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["dryrun", *words])
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def answers(*commands: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """Returns exit code, stdout and stderr of each command, all in one process."""
    done = run_code(ANSWERS, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_the_page_and_its_file(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    small = ("cluster=dgx_h200", "precision=bf16", f"dryrun.json={file}", "model.num_layers=1")
    (code, out, err), (again, other, _) = answers(small, (*small, "dryrun.reserve_gb=200"))
    assert code == again == 0, err
    assert "It fits" in out and "GEMMs of the layers" in out
    assert "\x1b[" not in out and not err
    found = json.loads(file.read_text())
    keys = [f"{kind}_bytes" for kind in KINDS]
    keys += ["peak_bytes", "launches", "bytes", "flops", "host_syncs", "seconds", "fits"]
    assert not [key for key in (*keys, "groups", "parts", "rows", "made_by") if key not in found]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["facts.json"]
    # the file of the second command, which replaced the first command's
    assert "does not fit" in other and found["fits"] is False


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("tp=3",), "tp=3 must divide"),
        (("tp=2", "dryrun.rank=2"), "must be less than 2, the number of ranks"),
        (("cluster=laptop",), "does not say what its GPUs are"),
        (("cluster=dgx_h100", "cluster.gpu=Abacus"), "launch.peak_tflops"),
        (("dryrun.json=.",), "is a folder"),
        (("dryrun.json=pyproject.toml",), "was not written by parallel3d dryrun"),
    ],
)
def test_impossible_input_is_refused_in_a_sentence(words, sentence, capsys) -> None:
    assert main(["dryrun", *words]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and len(said.err.splitlines()) == 1
    assert not said.out
