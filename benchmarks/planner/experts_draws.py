"""Draws random mixtures of experts and layouts of up to eight ranks for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.commands.options import CommandConfig
from parallel3d.data_parallel.keys import DataParallelConfig
from parallel3d.errors import UserError
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig
from parallel3d.run_config import check_config
from parallel3d.schedules.schedule import LOOPED, NAMED_SCHEDULES, V_SHAPED
from parallel3d.topology.assumptions import preset

WORLDS = (1, 2, 4, 4, 8)
EXPERTS = ((4, 2), (8, 1), (8, 2), (8, 4), (16, 4), (16, 8))  # of a layer, and of a token
RECOMPUTE = (
    *("none", "none", "full", "[mlp]", "[norm]", "[norm,activation]", "selective"),
    "[norm,attention,mlp]",
)
Keys = dict[str, Any]


def configured(keys: Keys) -> CommandConfig:
    """Returns the checked configuration of a draw. Raises UserError if it cannot run."""
    keys = dict(keys)
    config = CommandConfig(
        cluster=ClusterConfig(**preset("cluster", "dgx_h100")),
        model=ModelConfig(**keys.pop("model")),
        moe=ExpertsConfig(**{"routing": "balanced"} | keys.pop("moe", {})),
        ddp=DataParallelConfig(reduce_every_microbatch=keys.pop("every", None)),
        # A dry run counts a step that clips.
        optim=OptimConfig(name=keys.pop("optim", "adamw"), clip_grad=1e-4),
    )
    config.precision.name = keys.pop("precision", "bf16")
    config.schedule.name = keys.pop("schedule", "1f1b")
    config.context_parallel.style = keys.pop("style", "gather")
    for key, value in keys.items():
        setattr(config, key, value)
    return check_config(config, own_samples=True)


def draws(seed: int) -> Iterator[Keys]:
    """Yields keys of configurations without end, each of which can run; equal seeds give equal
    draws."""
    chance = random.Random(seed)
    while True:
        keys = _layout(chance)
        keys |= {"model": _model(chance, keys), "moe": _balance(chance)}
        try:
            configured(keys)
        except UserError:
            continue
        yield keys


PLAIN: Keys = {
    "tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1, "vpp": 1, "zero": 0, "sp": False, "every": None,
    "schedule": "1f1b", "recompute": "none", "style": "gather", "bias": False, "qk_norm": False,
    "norm_position": "before", "attention_bias": None, "shared_expert_size": 0,
    "shared_expert_gate": False, "router_bias": False, "aux_loss": 0.0, "z_loss": 0.0,
}  # fmt: skip


def shown(keys: Keys) -> str:
    """Returns the keys that are not plain, in words."""
    every = keys | keys["model"] | keys.get("moe", {})
    named = {k: v for k, v in every.items() if k not in ("model", "moe") and PLAIN.get(k) != v}
    return " ".join(f"{key}={value}" for key, value in named.items())


def _layout(chance: random.Random) -> Keys:
    world, sizes = chance.choice(WORLDS), (1, 2, 4)
    pp = chance.choice([n for n in sizes if world % n == 0])
    tp = chance.choice([n for n in sizes if world // pp % n == 0])
    cp = chance.choice([n for n in (1, 1, 2) if world // pp // tp % n == 0])
    dp = world // pp // tp // cp
    schedule = chance.choice(NAMED_SCHEDULES) if pp > 1 else "1f1b"
    batch = chance.choice((1, 1, 2))
    count = pp * chance.choice((1, 2, 3))
    keys: Keys = {
        "tp": tp, "pp": pp, "cp": cp, "dp": dp, "sp": tp > 1, "schedule": schedule,
        "vpp": 2 if schedule in (*V_SHAPED, *LOOPED) else 1,
        "ep": chance.choice([n for n in (1, 2, 4, 8) if tp * cp * dp % n == 0]),
        "zero": chance.choice((0, 1, 2, 3)),
        "recompute": chance.choice(RECOMPUTE), "precision": chance.choice(("bf16", "bf16", "fp32")),
        "micro_batch_size": batch, "global_batch_size": batch * dp * count,
        "optim": chance.choice(("adamw", "adamw", "sgd")),
    }  # fmt: skip
    if cp > 1:
        keys["style"] = chance.choice(("gather", "heads", "ring"))
    if keys["zero"] > 1:
        keys["every"] = chance.choice((None, True, False))
    return keys


def _model(chance: random.Random, keys: Keys) -> Keys:
    heads = chance.choice((4, 8))
    experts, chosen = chance.choice(EXPERTS)
    sigmoid = chance.random() < 0.5
    layers = keys["pp"] * keys["vpp"] * chance.choice((1, 2)) + chance.choice((0, 0, 1))
    shared = chance.choice((0, 0, 32, 64))
    norms = chance.choice(("rmsnorm", "rmsnorm", "layernorm"))
    model: Keys = {
        "num_layers": max(2, layers), "hidden_size": chance.choice((64, 96)),
        "num_attention_heads": heads,
        "num_query_groups": chance.choice([n for n in (2, 4, 8) if heads % n == 0]),
        "head_dim": chance.choice((16, 16, 24)), "ffn_hidden_size": chance.choice((96, 160)),
        "seq_length": chance.choice((64, 128)), "vocab_size": 250, "vocab_multiple": 32,
        "norm": norms, "position_embedding": chance.choice(("rope", "rope", "learned", "none")),
        "activation": chance.choice(("swiglu", "swiglu", "geglu", "gelu", "relu")),
        "bias": False, "attention_bias": chance.choice((None, None, "qkv", "all")),
        "tie_embeddings": chance.choice((True, False)),
        "norm_position": chance.choice(("before", "before", "before", "after", "both")),
        "qk_norm": chance.random() < 0.4,
        "num_experts": experts, "experts_per_token": chosen,
        "expert_ffn_size": chance.choice((32, 48, 96)), "shared_expert_size": shared,
        "shared_expert_gate": shared > 0 and chance.random() < 0.5,
        "router_score": "sigmoid" if sigmoid else "softmax",
        "router_normalize": chosen > 1 and chance.random() < 0.7,
        "router_scale": chance.choice((1.0, 2.5)), "router_bias": chance.random() < 0.4,
    }  # fmt: skip
    if model["qk_norm"]:
        model["qk_norm_width"] = chance.choice(("head", "full"))
    if chance.random() < 0.3:
        model |= {"router_groups": 4 if experts > 4 else 2, "router_top_groups": 2}
    if chance.random() < 0.4:
        model["dense_layers"] = list(range(chance.choice((1, 2))))
    if chance.random() < 0.3:
        model |= {"layer_types": ["sliding", "full"], "sliding_window": chance.choice((24, 40))}
    return model


def _balance(chance: random.Random) -> Keys:
    return {
        "dispatch": chance.choice(("auto", "gather", "all_to_all")),
        "aux_loss": chance.choice((0.0, 0.01)),
        "z_loss": chance.choice((0.0, 0.001)),
    }
