"""Tests cross-checks of a configuration: every rule refuses in one sentence, and valid ones
pass."""

from __future__ import annotations

import copy
import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.fields import all_keys, show
from parallel3d.config.values import INTERVAL
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.models.repeats import parts_of
from parallel3d.run.checks import START_VARIABLE, check_batch_process
from parallel3d.run_config import Config, check_config
from tests.pace import in_time


def config(**changes: Any) -> Config:
    """Returns the default configuration with dotted keys changed: config(**{"model.num_layers":
    8})."""
    made = Config()
    for name, value in changes.items():
        target: Any = made
        *sections, leaf = name.split(".")
        for section in sections:
            target = getattr(target, section)
        setattr(target, leaf, value)
    return made


def sentence_of(made: Config, world_size: int | None = None) -> str:
    with pytest.raises(UserError) as raised:
        check_config(made, world_size)
    return str(raised.value)


TP = "tp=3 must divide"
# widths that three tensor-parallel ranks divide, but for those of MLPs
EXPERTS = {
    **{"model.num_experts": 4, "model.bias": False, "model.hidden_size": 96, "sp": True},
    **{"model.num_attention_heads": 6, "model.vocab_multiple": 96, "model.seq_length": 96},
}
ROPE = {"model.position_embedding": "rope"}
BIASED = {
    "model.norm": "rmsnorm",
    "model.num_experts": 8,
    "model.experts_per_token": 2,
    "model.bias": False,
    "model.router_score": "sigmoid",
    "model.router_bias": True,
}
LONGROPE = {
    "model.rope_scaling": "longrope",
    "model.rope_short_factors": [1.0] * 8,
    "model.rope_long_factors": [2.0] * 8,
}


# (changes, world size, what the sentence must contain: key and value, what is allowed, nearest)
def blend(**weights: Any) -> dict[str, Any]:
    return {"data.name": "blend", "data.blend": weights}


def stages(given: dict[Any, Any]) -> dict[str, Any]:
    return blend(a=1) | {"data.blend_stages": given}


BAD: list[tuple[dict[str, Any], int | None, list[str]]] = [
    # checks of one key at a time
    ({"checkpoint.every": -1}, None, ["checkpoint.every=-1", "nearest is checkpoint.every=0"]),
    ({"checkpoint.every": 1e3}, None, ["every=1000.0 must", "nearest is checkpoint.every=1000"]),
    ({"checkpoint.every": "10m"}, None, ["=10m must be", "nearest is checkpoint.every=10min"]),
    ({"checkpoint.every": "autp"}, None, ["10min, 90s or 2h", "nearest is checkpoint.every=auto"]),
    (
        {"checkpoint.every": None},
        None,
        ["checkpoint.every=null", "nearest is checkpoint.every=500"],
    ),
    ({"recovery.node_days": 0}, None, ["recovery.node_days=0", "above 0"]),
    ({"launch.spares": -1}, None, ["launch.spares=-1", "nearest is launch.spares=0"]),
    ({"recovery.heartbeat_s": 30}, None, ["heartbeat_s=30", "nearest is recovery.heartbeat_s=10"]),
    ({"recovery.exclude_days": -1}, None, ["exclude_days=-1", "nearest is recovery.exclude_days="]),
    ({"tp": 0}, None, ["tp=0", "at least 1", "nearest is tp=1"]),
    ({"tp": "two"}, None, ["tp=two", "whole number", "nearest is tp=1"]),
    ({"tp": 2.0}, None, ["tp=2.0", "whole number"]),
    ({"tp": True}, None, ["tp=true", "whole number"]),
    ({"tp": None}, None, ["tp=null", "whole number"]),
    ({"sp": 1}, None, ["sp=1", "true or false"]),
    (
        {"tensor_parallel.attention": "gather_qk", "compile": True},
        None,
        ["tensor_parallel.attention=gather_qk", "nearest is tensor_parallel.attention=heads"],
    ),
    (
        {"attention_kernel": "cudnn", "device": "cpu"},
        None,
        ["attention_kernel=cudnn", "device=cpu", "nearest is attention_kernel=flash"],
    ),
    (
        {"attention_kernel": "flash", "device": "cuda", "precision.name": "tf32"},
        None,
        ["attention_kernel=flash", "precision=tf32", "nearest is attention_kernel=auto"],
    ),
    (
        {"attention_kernel": "cudnn", "precision.name": "bf16", "data.document_mask": True},
        None,
        ["attention_kernel=cudnn", "data.document_mask=true", "attention_kernel=flash"],
    ),
    ({"attention_kernel": "fa2"}, None, ["attention_kernel=fa2", "auto, flash, cudnn, math, fa3"]),
    (
        {"ddp.hierarchical": True, "zero": 1},
        None,
        ["ddp.hierarchical=true", "zero=1 scatters", "nearest is zero=0,"],
    ),
    (
        {"ddp.hierarchical": True, "zero": 3},
        None,
        [
            "ddp.hierarchical=true",
            "zero=3 scatters",
            "nearest is zero=0, or ddp.hierarchical=false",
        ],
    ),
    (
        {"precision.name": "tf32", "device": "cpu"},
        None,
        ["precision=tf32 is a mode of a GPU's", "nearest is precision=fp32"],
    ),
    ({"zero": 7}, None, ["zero=7", "at most 3", "nearest is zero=3"]),
    ({"launch.master_port": 70000}, None, ["launch.master_port=70000", "=65535"]),
    ({"device": "gpu"}, None, ["device=gpu", "auto, cpu, cuda, simulated"]),
    ({"device": "pretend"}, None, ["device=pretend: pretend is now simulated", "device=simulated"]),
    ({"optim.name": "adam"}, None, ["optim.name=adam", "adamw, sgd", "nearest is optim=adamw"]),
    ({"model.norm": "rms"}, None, ["model.norm=rms", "nearest is model.norm=rmsnorm"]),
    ({"optim.lr": 0.0}, None, ["optim.lr=0.0", "above 0", "0.001"]),
    ({"optim.lr": float("nan")}, None, ["optim.lr=nan", "above 0"]),
    ({"optim.lr": float("inf")}, None, ["optim.lr=inf", "above 0"]),
    ({"optim.beta2": 1.0}, None, ["optim.beta2=1.0", "below 1", "0.95"]),
    ({"model.rotary_percent": 1.5}, None, ["model.rotary_percent=1.5", "at most 1", "=1"]),
    ({"logger.tags": ["a", 3]}, None, ["logger.tags=[a,3]", "list of words"]),
    ({"schedule.layers_per_stage": 4}, None, ["layers_per_stage=4", "list of whole numbers"]),
    ({"tpp": 2}, None, ["tpp=2", "not a key", "nearest is tp"]),
    ({"model.num_layer": 2}, None, ["model.num_layer=2", "not a key", "model.num_layers"]),
    ({"model": None}, None, ["model=null", "ModelConfig"]),
    ({"recompute": "norms"}, None, ["recompute=norms must be one of", "nearest is recompute=norm"]),
    ({"recompute": 3}, None, ["recompute=3", "list of norm,", "nearest is recompute=none"]),
    (
        {"recompute": ["norm", "atention"]},
        None,
        ["recompute=[norm,atention]", "nearest is recompute=[norm,attention]"],
    ),
    (
        {"recompute": ["full", "norm"]},
        None,
        ["recompute=[full,norm]", "nearest is recompute=[norm]"],
    ),
    (
        {"recompute_layers": [2]},
        None,
        ["recompute_layers=[2]", "recompute=none", "nearest is recompute_layers=null"],
    ),
    (
        {"recompute": "full", "recompute_layers": [5], "pp": 2},
        None,
        ["recompute_layers=[5]", "from 0 to model.num_layers=4", "recompute_layers=[4]"],
    ),
    (
        {"recompute": "full", "recompute_layers": []},
        None,
        ["recompute_layers=[]", "must be numbers of layers", "recompute_layers=[4]"],
    ),
    (
        {"mlp_chunk_tokens": 8, "recompute": "full"},
        1,
        ["mlp_chunk_tokens=8", "recompute=full", "recompute=[norm,attention,mlp]"],
    ),
    (
        {"mlp_chunk_tokens": 8, "recompute": "[mlp]", "compile": True},
        1,
        ["mlp_chunk_tokens=8", "compile=true", "nearest is compile=false"],
    ),
    (
        {"offload_layers": [5]},
        1,
        ["offload_layers=[5]", "from 0 to model.num_layers=4", "offload_layers=[4]"],
    ),
    (
        {"recompute": "full", "recompute_layers": [2, 1, 0], "pp": 2},
        None,
        ["recompute_layers=[2,1,0]", "1 entry for all stages or 2", "recompute_layers=[2]"],
    ),
    (
        {"recompute": "full", "recompute_layers": [2, 1], "pp": 2, "schedule.name": "auto"},
        None,
        ["recompute_layers=[2,1]", "must have 1 entry;", "recompute_layers=[2]"],
    ),
    # schedules
    ({"vpp": 2}, None, ["schedule=1f1b", "vpp=2", "nearest is vpp=1, or schedule=interleaved"]),
    ({"schedule.name": "zbv"}, None, ["schedule=zbv", "vpp=1 must be 2", "nearest is vpp=2"]),
    (
        {"schedule.name": "interleaved", "pp": 2, "vpp": 4},
        None,
        ["pp=2 times 4 chunks", "model.num_layers=4", "nearest is pp=1, or vpp=2"],
    ),
    (
        {"schedule.name": "interleaved", "vpp": 2, "schedule.layers_per_stage": [4]},
        None,
        ["schedule.layers_per_stage=[4]", "1 entries", "even split", "[2,2]"],
    ),
    (
        BIASED | {"optim.freeze": ["*.weight"]},
        None,
        ["optim.freeze=[*.weight]", "must leave a parameter"],
    ),
    (
        BIASED | {"optim.groups": {"*.router.bias": {"lr_mult": 0.5}}},
        None,
        ["matches only layers.0.mlp.router.bias", "moe.bias_update_rate", "lr_mult:0"],
    ),
    ({"optim.freeze": ["*"]}, None, ["optim.freeze=[*]", "must leave a parameter", "such as"]),
    (
        {"optim.freeze": ["embeding.*"]},
        None,
        ["optim.freeze=[embeding.*]", "must match a parameter", "nearest is embedding.*"],
    ),
    (
        {"optim.groups": {"layers.0.atention.q.weight": {"lr_mult": 2}}},
        None,
        ["layers.0.atention.q.weight", "nearest is layers.0.attention.q.weight"],
    ),
    (
        {"optim.groups": {"head.*": {"lr": 2}}},
        None,
        ["optim.groups={head.*:{lr:2}}", "must be lr_mult or wd_mult", "nearest is lr_mult"],
    ),
    ({"optim.groups": {"head.*": {"wd_mult": -1}}}, None, ["at least 0", "nearest is wd_mult:0"]),
    ({"optim.groups": {"head.*": 3}}, None, ["must hold lr_mult or wd_mult", "nearest is"]),
    (
        {"optim.groups": {"layers.*": {"lr_mult": 2}, "layers.0.*": {"lr_mult": 1}}},
        None,
        ["optim.groups={layers.0.*:", "the first that matches counts; give it first"],
    ),
    ({"init_optimizer": True}, None, ["init_optimizer=true", "nearest is init_optimizer=false"]),
    (
        {"schedule.name": "auto", "zero": 2, "dp": 2},
        2,
        ["zero=2", "schedule=auto", "nearest is zero=1, or schedule=1f1b"],
    ),
    ({"schedule.name": "auto", "zero": 2, "cp": 2}, 2, ["zero=2", "schedule=auto", "zero=1"]),
    (
        {"schedule.name": "auto", "schedule.costs": [1.0, 0.0, 1.0]},
        None,
        ["schedule.costs=[1.0,0.0,1.0]", "three positive numbers"],
    ),
    (
        {"schedule.name": "auto", "pp": 2, "schedule.memory": 0.2},
        2,
        ["schedule.memory=0.2", "less than one", "nearest is schedule.memory=0.5"],
    ),
    ({"schedule.name": "file"}, None, ["schedule=file needs schedule.file=", "schedule=1f1b"]),
    (
        {"schedule.name": "file", "schedule.file": "no such.csv"},
        None,
        ["schedule.file='no such.csv' cannot be read", "No such file"],
    ),
    (
        {"schedule.file": "plan.csv"},
        None,
        ["schedule.file=plan.csv", "schedule=1f1b", "nearest is schedule=file"],
    ),
    (
        {"cp": 2, "tensor_parallel.attention": "gather_qk"},
        None,
        ["gather_qk", "cp=2", "tensor_parallel.attention=heads"],
    ),
    (
        {"cp": 2, "context_parallel.style": "ring", "model.dropout": 0.1},
        None,
        ["context_parallel.style=ring", "model.dropout=0.1", "context_parallel.style=gather"],
    ),
    (
        {"cp": 3, "context_parallel.style": "heads"},
        None,
        ["context_parallel.style=heads", "cp=3", "context_parallel.style=gather"],
    ),
    (
        {
            **{"cp": 2, "context_parallel.states": "heads", "model.delta_key_heads": 1},
            "model.layer_types": ["gated_deltanet", "full"],
        },
        None,
        ["context_parallel.states=heads", "cp=2", "rank, 1;", "context_parallel.states=chain"],
    ),
    (
        {"delta_kernel": "torch"},
        None,
        ["delta_kernel=torch is a kernel of gated_deltanet", "nearest is delta_kernel=auto"],
    ),
    (
        {"attention_kernel": "math", "model.layer_types": ["gated_deltanet"]},
        None,
        ["attention_kernel=math", "[gated_deltanet] has none", "nearest is attention_kernel=auto"],
    ),
    (
        {
            "delta_kernel": "fla",
            "device": "cpu",
            "precision.name": "bf16",
            "model.layer_types": ["gated_deltanet"],
        },
        None,
        ["delta_kernel=fla", "device=cpu", "nearest is delta_kernel=torch"],
    ),
    (
        {
            "delta_kernel": "fla",
            "device": "cuda",
            "precision.name": "fp32",
            "model.layer_types": ["gated_deltanet"],
        },
        None,
        ["delta_kernel=fla", "precision=fp32", "nearest is delta_kernel=torch"],
    ),
    ({"precision.name": "fp8"}, None, ["precision.name=fp8", "bf16", "nearest is precision=fp64"]),
    (
        {"precision.loss_scale": 8.0},
        None,
        ["precision.loss_scale=8", "precision=fp32", "null, or precision=fp16"],
    ),
    (
        {"precision.name": "fp16", "precision.min_loss_scale": 1e6},
        None,
        ["precision.min_loss_scale=1000000", "65536"],
    ),
    (
        {"precision.lm_cross_entropy": "fp16"},
        None,
        ["precision=fp32", "nearest is precision.lm_cross_entropy=fp32"],
    ),
    # the model
    (
        {"model.hidden_size": 130},
        None,
        ["model.hidden_size=130", "num_attention_heads=8", "nearest is model.hidden_size=128"],
    ),
    (
        {"model.num_query_groups": 3},
        None,
        ["model.num_query_groups=3", "model.num_attention_heads=8", "model.num_query_groups=2"],
    ),
    (
        {"model.head_dim": 1} | ROPE,
        None,
        ["fewer than 2 of the 1 dimensions", "nearest is model.head_dim=2"],
    ),
    (
        {"model.rope_scaling_factor": 8.0, "model.rope_low_freq_factor": 4.0} | ROPE,
        None,
        ["model.rope_low_freq_factor=4.0", "below", "nearest is model.rope_low_freq_factor=1.0"],
    ),
    (
        {"model.rope_scaling": "yarn", "model.rope_beta_slow": 64.0} | ROPE,
        None,
        ["model.rope_beta_slow=64.0", "below model.rope_beta_fast=32.0", "rope_beta_slow=1.0"],
    ),
    (
        {"model.rope_scaling": "longrope", "model.rope_short_factors": [1.0, 2.0]} | ROPE,
        None,
        ["model.rope_short_factors has 2 numbers", "8 pairs", "nearest is model.rope_scaling=yarn"],
    ),
    (
        {"model.rope_scaling": "longrope", "model.rope_short_factors": [1.0] * 8} | ROPE,
        None,
        ["model.rope_long_factors has 0 numbers", "8 pairs"],
    ),
    (
        LONGROPE | {"model.rope_long_factors": [1.0] * 7 + [0.0]} | ROPE,
        None,
        ["model.rope_long_factors has 0.0", "above 0", "nearest is 1"],
    ),
    (
        LONGROPE | {"model.rope_original_length": 1} | ROPE,
        None,
        ["model.rope_original_length=1", "at least 2", "nearest is model.rope_original_length=2"],
    ),
    (
        {"model.layer_types": ["full", "slidng"]},
        None,
        ["model.layer_types=[full,slidng]", "nearest is model.layer_types=[full,sliding]"],
    ),
    (
        {"model.layer_types": ["full", "sliding"]},
        None,
        ["need model.sliding_window", "nearest is model.sliding_window=256"],
    ),
    (
        {"model.layer_types": ["full"] * 9 + ["sliding"], "model.sliding_window": 8},
        None,
        ["model.sliding_window=8", "among 4 layers", "nearest is model.sliding_window=null"],
    ),
    (
        {"model.layer_types": ["full", "full_nope"]},
        None,
        ["model.position_embedding=learned", "nearest is model.layer_types=[full,full]"],
    ),
    (
        {"model.layer_types": ["sliding_nope"], "model.sliding_window": 8}
        | {"model.sliding_rotary_base": 50.0}
        | ROPE,
        None,
        ["model.sliding_rotary_base=50.0", "none is rotated", "sliding_rotary_base=null"],
    ),
    (
        {"model.max_position_embeddings": 128},
        None,
        ["model.seq_length=256", "max_position_embeddings=128", "nearest is model.seq_length=128"],
    ),
    (
        ROPE | {"model.rotary_percent": 0.1},
        None,
        ["model.rotary_percent=0.1", "16 dimensions", "nearest is model.rotary_percent=0.125"],
    ),
    (
        ROPE | {"model.hidden_size": 8},
        None,
        ["of a head to RoPE, which rotates pairs", "nearest is model.head_dim=2"],
    ),
    # tensor parallelism
    (
        {"tp": 3},
        None,
        [TP, "num_attention_heads=8", "model.hidden_size=128", "ffn_hidden_size=512", "tp=2"],
    ),
    ({"tp": 16}, None, ["tp=16", "model.num_attention_heads=8", "tp=8"]),
    ({"tp": 4, "model.ffn_hidden_size": 342}, None, ["tp=4", "model.ffn_hidden_size=342", "tp=2"]),
    (
        EXPERTS | {"tp": 3, "model.shared_expert_size": 56},
        None,
        ["tp=3 must divide", "model.shared_expert_size=56", "nearest that fits this model is tp=2"],
    ),
    *(
        ({f"model.{name}": True}, None, [f"model.{name}=true", "num_experts=0", f"{name}=false."])
        for name in ("expert_bias", "router_logit_bias", "router_bias", "shared_expert_gate")
    ),
    *(
        (
            {f"model.{name}": value, "model.layer_types": ["gated_deltanet"]},
            None,
            [
                f"model.{name}={show(value)}",
                "[gated_deltanet] has none",
                f"{name}={show(without)}.",
            ],
        )
        for name, value, without in (
            ("attention_sinks", True, False),
            ("attention_gate", True, False),
            ("attention_logit_cap", 50.0, None),
        )
    ),
    (  # a layer without experts has an MLP
        EXPERTS | {"tp": 3, "model.ffn_hidden_size": 56, "model.dense_layers": [0]},
        None,
        ["tp=3 must divide", "model.ffn_hidden_size=56"],
    ),
    (
        {"tp": 2, "model.num_attention_heads": 6, "model.hidden_size": 96}
        | {"model.num_query_groups": 3},
        None,
        ["tp=2", "model.num_query_groups=3", "tp=1"],
    ),
    (
        {"tp": 8, "model.vocab_multiple": 1},
        None,
        ["tp=8", "vocabulary=257", "is tp=1, or model.vocab_multiple=8"],
    ),
    # sequence parallelism
    (
        {"tp": 4, "sp": True, "model.seq_length": 254},
        None,
        ["sp=true", "tp=4", "model.seq_length=254", "model.seq_length=252", "tp=2"],
    ),
    # pipeline
    ({"pp": 5}, None, ["pp=5", "model.num_layers=4", "nearest is pp=4"]),
    (
        {"pp": 2, "schedule.layers_per_stage": [4]},
        None,
        ["layers_per_stage=[4]", "1 entries", "pp=2", "layers_per_stage=[2,2]"],
    ),
    (
        {"pp": 2, "schedule.layers_per_stage": [4, 0]},
        None,
        ["layers_per_stage=[4,0]", "at least 1", "layers_per_stage=[2,2]"],
    ),
    (
        {"pp": 3, "schedule.layers_per_stage": [1, 1, 1]},
        None,
        ["layers_per_stage=[1,1,1]", "up to 3", "model.num_layers=4", "layers_per_stage=[2,1,1]"],
    ),
    # world size
    ({"tp": 2, "pp": 2, "dp": 1}, 8, ["world size of 8", "dp=1", "must be 4", "dp=2"]),
    ({"tp": 4, "pp": 2}, 4, ["world size of 4", "multiple of 8", "8 ranks"]),
    ({"tp": 2}, 3, ["world size of 3", "multiple of 2", "2 ranks"]),
    ({"cp": 3, "tp": 2}, 4, ["world size of 4", "tp=2, pp=1, cp=3", "6 ranks"]),
    ({}, 0, ["world size of 0", "at least 1", "nearest is 1"]),
    ({}, True, ["world size of true", "whole number"]),
    # batch
    (
        {"dp": 3},
        None,
        ["global_batch_size=16", "multiple of 12", "micro_batch_size=4", "global_batch_size=12"],
    ),
    (
        {"micro_batch_size": 3, "global_batch_size": 16},
        2,
        ["multiple of 6", "dp=2", "global_batch_size=18", "micro_batch_size=2"],
    ),
    (
        {"schedule.num_microbatches": 3, "micro_batch_size": 2, "dp": 2},
        None,
        ["schedule.num_microbatches=3", "except in `parallel3d schedule`", "global_batch_size=12"],
    ),
    # data
    ({"model.vocab_size": 256}, None, ["model.vocab_size=256", "data.tokenizer=byte", "=257"]),
    ({"data.name": "text"}, None, ["data=text", "data.path", "null", "data.path=book.txt"]),
    ({"data.path": "a.txt"}, None, ["data.path=a.txt", "data=stdlib", "data=text"]),
    ({"data.name": "corpus"}, None, ["data=corpus", "data.path", "null", "corpora/web"]),
    ({"data.name": "blend"}, None, ["data=blend", "data.blend", "null", "corpora/web:0.7"]),
    (blend(a=0), None, ["data.blend", "a the weight 0", "above 0 or tokens", "nearest is 1"]),
    (blend(a=1, b=-2.5), None, ["b the weight -2.5", "above 0 or tokens", "leave b out"]),
    (blend(a=math.nan), None, ["a the weight nan", "above 0 or tokens", "nearest is 1"]),
    (blend(a=math.inf), None, ["a the weight inf", "above 0 or tokens", "nearest is 1"]),
    (blend(a=True), None, ["a the weight true", "above 0 or tokens", "nearest is 1"]),
    (blend(a="token"), None, ["a the weight token", "above 0 or tokens", "nearest is tokens"]),
    (blend(a="tokens", b=0.5), None, ["b the weight 0.5", "number of tokens", "is tokens"]),
    (blend(a=1) | {"data.path": "a"}, None, ["data.path=a", "data=blend", "data.blend={a:1}"]),
    ({"data.blend": {"a": 1}}, None, ["data.blend={a:1}", "data=stdlib", "data=blend"]),
    ({"data.blend": 3}, None, ["data.blend=3", "names and values in braces", "data.blend=null"]),
    (
        stages({0: {"a": 1}}),
        None,
        ["data.blend_stages at 0", "stage before it, 0;", "nearest is 1"],
    ),
    (stages({9: 1}), None, ["data.blend_stages at 9 is 1", "weights by prefix", "{9:"]),
    (stages({9: {"a": 1}, 8: {"a": 1}}), None, ["at 8", "stage before it, 9;", "nearest is 10"]),
    (stages({"soon": {"a": 1}}), None, ["at soon", "number of tokens", "nearest is 1"]),
    (stages({9: {}}), None, ["data.blend_stages at 9 is {}", "weights by prefix", "math:0.5"]),
    (stages({9: {"a": 0}}), None, ["data.blend_stages at 9", "a the weight 0", "nearest is 1"]),
    # learning rate
    (
        {"optim.min_lr": 0.1},
        None,
        ["optim.min_lr=0.1", "optim.lr=0.001", "nearest is optim.min_lr=0.001"],
    ),
    (
        {"optim.lr_warmup_fraction": 0.1, "optim.lr_warmup_steps": 5},
        None,
        ["optim.lr_warmup_fraction=0.1", "optim.lr_warmup_steps=5", "one of them"],
    ),
    (
        {"optim.lr_warmup_steps": 600},
        None,
        ["optim.lr_warmup_steps=600", "train.steps=600", "=599"],
    ),
    (
        {"optim.lr_warmup_steps": 60, "optim.lr_decay_steps": 50},
        None,
        ["optim.lr_warmup_steps=60", "optim.lr_decay_steps=50", "=49"],
    ),
    (
        {"optim.lr_decay_style": "wsd", "optim.lr_warmup_fraction": 0.9},
        None,
        ["optim.wsd_decay_fraction=0.2", "0.9", "nearest is optim.wsd_decay_fraction=0.1"],
    ),
    (
        {"optim.lr_decay_style": "wsd", "optim.lr_warmup_steps": 60, "optim.wsd_decay_steps": 541},
        None,
        ["optim.wsd_decay_steps=541", "at most 540", "nearest is optim.wsd_decay_steps=540."],
    ),
    # length
    (
        {"train.steps": 9, "train.tokens": 1e6},
        None,
        ["train.steps=9 and train.tokens=1000000.0", "nearest is train.tokens=null."],
    ),
    (
        {"train.epochs": 2.0, "data.name": "blend", "data.blend": {"a": 1}},
        None,
        ["train.epochs=2.0", "data=blend", "give train.tokens instead"],
    ),
    (
        {"dp": 2, "train.batch_schedule": {0: 8, 100: 20, 200: 16}},
        None,
        ["train.batch_schedule={0:8,100:20,200:16}", "batch 20", "multiple of 8", "dp=2", "is 16."],
    ),
    (
        {"train.batch_schedule": {0: 4, 100: 8}},
        None,
        ["must end with global_batch_size=16", "nearest is global_batch_size=8."],
    ),
    (
        {"train.batch_schedule": {1: 8, 9: 16}},
        None,
        ["the first of them 0", "batch_schedule={0:16}."],
    ),
    ({"train.batch_schedule": {0: 8, 9: 8, 4: 16}}, None, ["the first of them 0"]),
    ({"train.batch_schedule": {0: 8, "soon": 16}}, None, ["the first of them 0"]),
    ({"train.batch_schedule": {0: 8.5, 9: 16}}, None, ["the global batch 8.5", "is 4."]),
    (
        {"pp": 2, "schedule.name": "auto", "train.batch_schedule": {0: 8, 9: 16}},
        None,
        ["schedule=auto", "nearest is schedule=1f1b."],
    ),
    # profile
    ({"profile.steps": [4]}, None, ["profile.steps=[4]", "two numbers", "profile.steps=[4,4]."]),
    ({"profile.steps": [0, 2, 9]}, None, ["two numbers", "nearest is profile.steps=[1,9]."]),
    ({"profile.steps": [5, 3]}, None, ["profile.steps=[5,3]", "profile.steps=[3,5]."]),
    (
        {"profile.steps": [9, 700]},
        None,
        ["profile.steps=[9,700]", "from 1 to train.steps=600", "nearest is profile.steps=[9,600]."],
    ),
    ({"profile.steps": [0, 2]}, None, ["profile.steps=[0,2]", "nearest is profile.steps=[1,2]."]),
    (
        {"profile.steps": [0, 2], "train.steps": None, "train.epochs": 1.0},
        None,
        ["must be two numbers from 1 on, the first", "nearest is profile.steps=[1,2]."],
    ),
    (
        {"profile.steps": [1, 2], "profile.ranks": [1, 4]},
        4,
        ["profile.ranks=[1,4]", "from 0 to 3", "nearest is profile.ranks=[1]."],
    ),
    (
        {"profile.steps": [1, 2], "profile.ranks": [9], "dp": 2},
        None,
        ["profile.ranks=[9]", "nearest is profile.ranks=[1]."],
    ),
    ({"profile.ranks": "some"}, None, ["profile.ranks=some", "nearest is profile.ranks=[0]."]),
    ({"profile.ranks": [0, -1]}, None, ["profile.ranks=[0,-1]", "nearest is profile.ranks=[0]."]),
    ({"profile.ranks": []}, None, ["profile.ranks=[]", "all or a list", "profile.ranks=[0]."]),
    ({"profile.ranks": 2}, None, ["profile.ranks=2", "nearest is profile.ranks=[0]."]),
    ({"profile.memory": True}, None, ["profile.memory=true", "example, profile.steps=[10,12]."]),
    # run
    ({"run": ""}, None, ["run=''", "plain name"]),
    ({"run": "../elsewhere"}, None, ["run=../elsewhere", "runs_dir=runs"]),
]


@pytest.mark.parametrize(
    ("changes", "world_size", "words"), BAD, ids=[re.sub(r"\W+", "-", str(b[0])) for b in BAD]
)
def test_a_bad_configuration_ends_in_one_sentence_with_key_value_and_nearest_choice(
    changes: dict[str, Any], world_size: int | None, words: list[str]
) -> None:
    sentence = sentence_of(config(**changes), world_size)
    assert [word for word in words if word not in sentence] == [], sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert not sentence.endswith("..")


@pytest.mark.parametrize(
    ("given", "spelled", "parts"),
    [
        ([], "none", ()),
        ("norm", "[norm]", ("norm",)),
        (["attention"], "selective", ("attention",)),
        (["norm", "layer"], "full", ("layer",)),
        (["mlp", "activation", "norm", "norm"], "[norm,mlp]", ("norm", "mlp")),
        ("[norm,mlp]", "[norm,mlp]", ("norm", "mlp")),
    ],
)
def test_parts_that_recompute_are_spelled_in_one_way(
    given: object, spelled: str, parts: tuple[str, ...]
) -> None:
    assert check_config(config(recompute=given)).recompute == spelled
    assert parts_of(spelled) == {*parts}


@pytest.mark.parametrize(
    ("changes", "world_size", "dp"),
    [
        ({}, None, 1),
        ({}, 1, 1),
        ({"tp": 2, "pp": 2}, 8, 2),
        ({"tp": 2, "pp": 2, "dp": 2}, 8, 2),
        ({"tp": 8, "global_batch_size": 4}, 8, 1),
        ({"dp": 4}, None, 4),
        ({"sp": True}, 2, 2),  # nothing to split with tp=1
        ({"sp": True, "tp": 4}, 4, 1),
        (ROPE | {"model.rotary_percent": 0.125}, None, 1),
        ({"model.layer_types": ["sliding", "full"], "model.sliding_window": 9999}, None, 1),
        # a table of positions only limits models with learned positions
        (ROPE | {"model.max_position_embeddings": 8}, None, 1),
        # without rope its keys have no effect
        ({"model.rotary_percent": 0.01, "model.rotary_base": 2.0}, None, 1),
        ({"pp": 3, "schedule.layers_per_stage": [1, 2, 1]}, 3, 1),
        ({"pp": 3}, 3, 1),
        ({"data.name": "text", "data.path": "a.txt,b.txt"}, None, 1),
        ({"optim.lr": 1, "optim.min_lr": 1}, None, 1),  # whole numbers are accepted as numbers
        ({"optim.lr_decay_style": "wsd", "optim.lr_warmup_fraction": 0.8}, None, 1),
        (
            {"optim.lr_decay_style": "wsd", "optim.lr_warmup_steps": 100}
            | {"optim.wsd_decay_fraction": 0.666666667},  # 2/3 of 600 steps, rounded up
            None,
            1,
        ),
        ({"optim.lr_warmup_steps": 400, "optim.lr_decay_steps": 500}, None, 1),
        ({"tp": 2, "model.vocab_size": 1001, "model.vocab_multiple": 2}, None, 1),
        ({"profile.steps": []}, None, 1),
        ({"profile.steps": [600, 600], "profile.ranks": "all", "profile.memory": True}, 4, 4),
        ({"profile.steps": [1, 2], "profile.ranks": [3]}, None, 1),  # the world size is unknown
    ],
)
def test_a_good_configuration_passes_with_its_data_parallel_size(
    changes: dict[str, Any], world_size: int | None, dp: int
) -> None:
    assert check_config(config(**changes), world_size).dp == dp


def test_derived_values_are_filled_in_and_the_argument_is_left_alone() -> None:
    given = config(tp=2)
    before = copy.deepcopy(given)
    checked = check_config(given, 4)
    assert given == before
    assert (checked.dp, checked.num_microbatches) == (2, 2)
    model = checked.model
    assert (model.num_query_groups, model.ffn_hidden_size) == (8, 512)
    assert model.max_position_embeddings == 256
    assert check_config(checked, 4) == checked


def test_own_samples_need_no_vocabulary_of_the_tokenizer() -> None:
    small = config(**{"model.vocab_size": 50})
    assert check_config(small, own_samples=True).model.vocab_size == 50
    assert "model.vocab_size=50" in sentence_of(small)


def test_given_values_are_not_replaced_by_derived_ones() -> None:
    model = ModelConfig(num_query_groups=4, ffn_hidden_size=344, max_position_embeddings=300)
    checked = check_config(Config(model=model)).model
    assert (checked.kv_heads, checked.ffn_size, checked.max_positions) == (4, 344, 300)
    assert (checked.num_query_groups, checked.ffn_hidden_size) == (4, 344)


def test_a_shorter_model_keeps_the_keys_of_its_family() -> None:
    """The fourth layer has the attention whose parts the keys name."""
    types = ["gated_deltanet"] * 3 + ["full"]
    model = ModelConfig(num_layers=2, layer_types=types, attention_gate=True)
    made = Config(model=model, attention_kernel="math")
    assert check_config(made).model.num_layers == 2


def test_an_object_that_is_not_a_config_is_refused() -> None:
    assert "dict is not a Config" in sentence_of({"tp": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1X1\n", "line 2: '1X1' is not an action"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "rank 1 never does 1B1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F0,1B0,1F1,1B1\n", "rank 1 has 1F0 twice"),
        ("0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1\n", "rank 0 does 0B1 before 0F1"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "rank 0 waits for ever for the input of 0B0"),
    ],
)
def test_a_table_that_cannot_run_is_refused_by_rank_action_and_reason(
    tmp_path: Path, table: str, wrong: str
) -> None:
    file = tmp_path / "own.csv"
    file.write_text(table)
    made = config(pp=2, dp=1, global_batch_size=8, micro_batch_size=4)
    made.schedule.name, made.schedule.file = "file", str(file)
    assert wrong in sentence_of(made, 2)


@pytest.mark.nightly
def test_the_nearest_choice_of_a_sentence_is_itself_valid() -> None:
    """Tests that each single change that a sentence proposes leads to a configuration that
    passes."""
    followed = 0
    for changes, world_size, _ in BAD:
        sentence = sentence_of(config(**changes), world_size)
        if "nearest" not in sentence or world_size is True:
            continue
        advice = sentence.rpartition("nearest")[2]
        for name, value in re.findall(r"([a-z_][\w.]*)=(1f1b|\d+min|[\d.]+\d|\d|[a-z]\w*)", advice):
            key = all_keys(Config)[name if name in all_keys(Config) else f"{name}.name"]
            if key.name == "data.name" or "schedule.file" in changes:
                continue  # the key is also given otherwise, or another file is
            typed = None
            if key.holds == INTERVAL:
                typed = int(value) if value.isdigit() else value
            elif value != "null":
                typed = value == "true" if key.kind is bool else key.kind(value)
            fixed = config(**{**changes, key.name: typed})
            check_config(fixed, world_size)
            followed += 1
    assert followed > 20


def _random_config(rng: random.Random) -> Config:
    """Draws values that are mostly plausible and sometimes absurd: each key may be drawn from any
    range."""
    small = [1, 1, 1, 2, 2, 3, 4, 8]
    made = config(
        tp=rng.choice(small),
        pp=rng.choice(small),
        dp=rng.choice([None, *small]),
        sp=rng.random() < 0.5,
        micro_batch_size=rng.choice(small),
        global_batch_size=rng.choice([24, 48, 96, 100]),
        **{
            "model.num_layers": rng.randint(1, 12),
            "model.num_attention_heads": rng.choice([4, 8, 12]),
            "model.num_query_groups": rng.choice([None, None, 1, 2, 3, 4]),
            "model.hidden_size": rng.choice([48, 96, 192, 200]),
            "model.ffn_hidden_size": rng.choice([None, 96, 344]),
            "model.seq_length": rng.choice([60, 64, 96]),
            "model.vocab_multiple": rng.choice([1, 24, 128]),
            "model.position_embedding": rng.choice(["learned", "rope", "none"]),
            "optim.lr_warmup_steps": rng.choice([0, 10, 10, 400]),
        },
    )
    if rng.random() < 0.2:
        made.schedule.layers_per_stage = [rng.randint(0, 4) for _ in range(rng.randint(0, 4))]
    absurd = [None, -1, 0, 10**12, 0.5, float("nan"), float("-inf"), "", "x\ny", True, [], [None]]
    for key in rng.sample(list(all_keys(Config).values()), k=rng.choice([0, 0, 1, 3])):
        target: Any = made
        *sections, leaf = key.name.split(".")
        for section in sections:
            target = getattr(target, section)
        setattr(target, leaf, rng.choice(absurd))
    return made


@pytest.mark.nightly
def test_random_configurations_are_refused_in_one_line_or_satisfy_every_invariant() -> None:
    rng = random.Random(20)
    passed = refused = 0
    for _ in range(4000):
        made = _random_config(rng)
        world_size = rng.choice([None, None, None, 2, 4, 8, 24])
        try:
            checked = check_config(made, world_size)
        except UserError as error:
            assert "\n" not in str(error)
            assert str(error).endswith(".")
            refused += 1
            continue
        passed += 1
        model, tp, dp = checked.model, checked.tp, checked.dp
        assert dp is not None
        assert world_size in (None, tp * checked.pp * checked.cp * dp)
        assert checked.num_microbatches * checked.micro_batch_size * dp == checked.global_batch_size
        for size in (
            model.num_attention_heads,
            model.hidden_size,
            model.ffn_size,
            model.padded_vocab_size,
            model.seq_length if checked.sp else tp,
        ):
            assert size % tp == 0
        assert model.kv_heads % tp == 0 or tp % model.kv_heads == 0
        assert model.num_attention_heads % model.kv_heads == 0
        assert model.head_dim or model.head_size * model.num_attention_heads == model.hidden_size
        assert model.padded_vocab_size >= model.vocab_size >= 257
        assert checked.pp <= model.num_layers
        stages = checked.schedule.layers_per_stage
        if stages is not None:
            assert (len(stages), sum(stages)) == (checked.pp, model.num_layers)
            assert min(stages) >= 1
    assert passed > 100
    assert refused > 100


def test_a_check_takes_milliseconds() -> None:
    check_config(Config())  # this fills the cached list of keys
    start = time.perf_counter()
    for _ in range(20):
        check_config(Config())
    assert in_time((time.perf_counter() - start) / 20, 0.05)


@pytest.mark.parametrize("name", ["global_batch_size", "micro_batch_size", "tp", "pp"])
def test_an_absurdly_large_value_is_answered_at_once(name: str) -> None:
    start = time.perf_counter()
    sentence_of(config(**{name: 10**15 + 1}), 10**6)
    assert in_time(time.perf_counter() - start, 2)


@pytest.mark.nightly
def test_neither_the_schema_nor_its_checks_nor_its_page_import_torch() -> None:
    page = Path(__file__).parents[3] / "docs" / "configuration.py"
    code = (
        f"import runpy, sys, parallel3d.run_config; runpy.run_path({str(page)!r}); "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize(
    "changes",
    [
        EXPERTS | {"tp": 3, "model.ffn_hidden_size": 56},  # every layer has experts
        EXPERTS | {"tp": 3, "model.expert_ffn_size": 56, "model.shared_expert_size": 57},
        {"model.shared_expert_size": 57, "tp": 2},  # there are no experts
        {"sp": True, "tensor_parallel.chunks": 7},  # nothing is split over one rank
        {"context_parallel.style": "heads", "model.num_attention_heads": 1},
    ],
)
def test_sizes_without_effect_in_a_configuration_refuse_nothing(changes: dict[str, Any]) -> None:
    check_config(config(**changes))


def test_spares_and_a_smaller_dp_need_a_batch_process() -> None:
    check_batch_process(0, False, {})
    check_batch_process(2, True, {START_VARIABLE: "1"})
    with pytest.raises(UserError, match=r"launch\.spares=2 is for .*the nearest .*launch.spares=0"):
        check_batch_process(2, False, {"SLURM_JOB_ID": "1"})
    with pytest.raises(UserError, match=r"shrink=true is for .*the nearest .*shrink=false"):
        check_batch_process(0, True, {"SLURM_JOB_ID": "1"})
