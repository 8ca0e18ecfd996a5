"""Tests the messages for bad overrides."""

from __future__ import annotations

import pytest

from parallel3d.cli.overrides import composed, presets
from parallel3d.config.fields import nearest_key
from parallel3d.errors import UserError
from parallel3d.run_config import Config, check_config

BAD = [
    ("tpp=2", ["tpp=2", "not a key", "nearest is tp."]),
    ("num_layers=4", ["num_layers=4", "nearest is model.num_layers."]),
    ("model.num_layer=3", ["model.num_layer=3", "nearest is model.num_layers."]),
    ("modle.num_layer=3", ["modle.num_layer=3", "nearest is model.num_layers."]),
    ("model.lr=3", ["model.lr=3", "nearest is optim.lr."]),
    ("modl=gpt_tiny", ["modl=gpt_tiny", "nearest is model."]),
    ("xyzzyplugh=1", ["xyzzyplugh=1", "docs/configuration.md"]),
    ("num-layers=4", ["num-layers=4", "nearest is model.num_layers."]),
    ("--num-layers=4", ["--num-layers=4", "nearest is model.num_layers", "without dashes"]),
    ("--tensor-model-parallel-size=4", ["nearest is tp", "without dashes"]),
    ("--fp16", ["--fp16", "precision=fp16"]),
    ("--untie-embeddings-and-output-weights", ["opposite", "model.tie_embeddings=false"]),
    ("trace=true", ["trace=true: trace is now schedule.timeline."]),
    ("bench.algorithms=true", ["is no longer a key", "-m examples.collectives.compare"]),
    ("topology.width=90", ["topology.width=90: topology.width is no longer a key", "COLUMNS"]),
    ("tensor_parallel.symmetric_memory=true", ["is no longer a key; tensor_parallel.chunks"]),
    ("ddp.powersgd_rank=2", ["is no longer a key; PowerSGD is gone, and ddp.comm_hook=bf16"]),
    ("ddp.bucket_order=measured", ["is no longer a key; buckets are in the reverse order of the"]),
    ("train.noise_scale=true", ["is no longer a key; compare the losses of short runs"]),
    ("--profile-step-end=12", ["nearest is profile.steps (", "profile.steps=[11,12]"]),
    ("--profile-ranks=0", ["nearest is profile.ranks,"]),
    ("train-iters=4", ["train-iters=4", "nearest is train.steps."]),
    ("model=gpt_tinny", ["model=gpt_tinny", "llama_tiny", "nearest is model=gpt_tiny."]),
    ("optim=adam", ["optim=adam", "adamw, muon, sgd", "nearest is optim=adamw."]),
    ("experiment=llama3d", ["experiment=llama3d", "nearest is experiment=llama_3d."]),
    ("precision=fp8", ["precision=fp8", "bf16", "nearest is precision=fp64"]),
    ("schedule=interleave", ["schedule=interleave", "zb_h1", "nearest is schedule=interleaved."]),
    ("model=[gpt_tiny,b]", ["model=[gpt_tiny,b] must be one of"]),
    ("model=3", ["model=3", "gpt_tiny"]),
    ("tp=two", ["tp=two", "whole number of at least 1", "default is tp=1."]),
    ("tp=", ["tp=", "whole number", "tp=1."]),
    ("tp=2.5", ["tp=2.5", "whole number", "tp=1."]),
    ("tp=[1,2]", ["tp=[1,2]", "whole number"]),
    ("sp=maybe", ["sp=maybe", "true or false", "sp=false."]),
    ("optim.lr=1e-3x", ["optim.lr=1e-3x", "number above 0", "optim.lr=0.001."]),
    ("model.vocab_size=null", ["model.vocab_size=null", "whole number", "257"]),
    ("model.hidden_size.x=3", ["model.hidden_size.x=3", "not a key"]),
    ("schedule.layers_per_stage=[1,a]", ["[1,a]", "list of whole numbers"]),
    ("schedule.layers_per_stage=3", ["layers_per_stage=3", "list of whole numbers"]),
    ("ddp=3", ["ddp is a group", "ddp.bucket_cap_mb"]),
    ("tp", ["tp is not of the form KEY=VALUE", "tp=1."]),
    ("=3", ["=3 is not of the form KEY=VALUE", "tp=1."]),
    ("tp==2", ["tp==2", "whole number", "default is tp=1."]),
    ("tp=2 pp=2", ["tp=2 pp=2: tp must be a whole number"]),
    (
        'optim.groups={"*":{lr_mult:2}}',
        ["have no quotes", "nearest is 'optim.groups={*:{lr_mult:2}}'"],
    ),
    ("data.path='a", ["data.path='a", "KEY=VALUE", "'data.path=\"a\"'"]),
    ("tp=1,2", ["tp=1,2", "--multirun"]),
    ("tp=${micro_batch}", ["tp=${micro_batch}", "not a key", "micro_batch_size"]),
    ("model.num_layers=${oc.env:NO_SUCH_VARIABLE}", ["model.num_layers", "NO_SUCH_VARIABLE"]),
    ("model.name=???", ["model.name=???", "model.name=custom"]),
    ("+tpp=2", ["nearest is tp."]),
    ("+model.num_layer=3", ["nearest is model.num_layers."]),
    ("~model.name", ["~model.name", "neither added nor deleted"]),
    ("+model=gpt_tiny", ["+model=", "nearest is model="]),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("override", "words"), BAD, ids=[bad[0] for bad in BAD])
def test_a_bad_override_ends_in_one_sentence(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        composed([override])
    sentence = str(raised.value)
    assert [word for word in words if word not in sentence] == [], sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert "The configuration cannot be read" not in sentence


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("tp", "tp"),
        ("--clip-grad", "optim.clip_grad"),
        ("seq_len", "model.seq_length"),
        ("layers_per_stages", "schedule.layers_per_stage"),
        ("batch_size", "micro_batch_size"),
        ("TRAIN.STEPS", "train.steps"),
        ("qqqqqqqq", None),
    ],
)
def test_nearest_key(word: str, key: str | None) -> None:
    assert nearest_key(word, Config) == key


@pytest.mark.nightly
@pytest.mark.parametrize("preset", presets("model"))
def test_every_model_preset_composes_and_checks_under_a_fitting_layout(preset: str) -> None:
    layouts = {"gpt2_1_5b": (1, 4), "gpt2_124m": (4, 4), "qwen2_5_0_5b": (2, 2), "phi4_14b": (2, 2)}
    layouts |= {"gemma3_1b": (1, 2)}
    tp, pp = layouts.get(preset, (4, 2))
    keys = [f"model={preset}", f"tp={tp}", f"pp={pp}", "sp=true"]  # experts need sp with tp
    checked = check_config(composed(keys), 2 * tp * pp)
    assert (checked.model.name, checked.dp, checked.num_microbatches) == (preset, 2, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("group", ["data", "optim", "schedule", "precision", "logger"])
def test_every_preset_of_every_group_composes_and_checks(group: str) -> None:
    assert presets(group)
    for preset in presets(group):
        if (group, preset) == ("schedule", "file"):
            continue  # without a table there is no such key
        needs = {name: "data.path=a" for name in ("text", "corpus", "chat")}
        needs["blend"] = "data.blend={a:1}"
        extra = [needs[preset]] if group == "data" and preset in needs else []
        checked = check_config(composed([f"{group}={preset}", *extra]))
        assert getattr(checked, group).name == preset
