"""Compares random Hugging Face folders with transformers: each is imported equal, or refused.

    python -m benchmarks.fuzz_huggingface --count 300 --seed 1 [--families qwen3_moe mixtral]

A folder is a tiny model of one of the families, with random changes of config.json, tensors and
files: keys are renamed, moved, doubled, contradictory, unknown or absurd. The model that
`checkpoint import` reads from it, without its own comparison, is compared with transformers'
logits. The exit code is 1 if any folder is read as another model, or if reading it breaks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel3d.checkpoint.hf.config import ABOUT, EXPECTED, FIXED
from parallel3d.checkpoint.hf.folder import read_hf_config, tensors_of
from parallel3d.checkpoint.hf.their_code import check_unread
from parallel3d.commands.checkpoint import proof
from parallel3d.commands.generate import state_of
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.models.transformer import Stage

DENSE = ("llama", "qwen2", "qwen3", "gpt2")
DIALECTS = (
    *("mistral", "ministral3", "smollm3", "phi3", "granite", "glm4", "seed_oss", "olmo2", "olmo3"),
    *("exaone4", "gemma2", "gemma3_text"),
)
WITH_EXPERTS = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "dots1", "glm4_moe", "minimax_m2"),
    "gpt_oss",
)
# Families with a gated DeltaNet in some layers.
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
KINDS = DENSE + DIALECTS + WITH_EXPERTS + HYBRIDS
# Families that use_sliding_window gives a window.
SWITCHED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
# Families with separate rope_parameters for each kind of layer.
BY_KIND = ("olmo3", "gemma3_text")
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
}
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.0}
# Keys that have a meaning for other families, versions or programs.
FOREIGN = """
    logit_scale embedding_multiplier attention_multiplier residual_multiplier logits_scaling
    final_logit_softcapping query_pre_attn_scalar attention_chunk_size sliding_window
    use_sliding_window max_window_layers layer_types partial_rotary_factor rope_theta
    rope_scaling rope_parameters original_max_position_embeddings rope_interleaved head_dim
    mlp_bias attention_bias attention_out_bias clip_qkv n_embd n_head n_layer n_inner
    n_positions n_ctx hidden_size num_attention_heads num_hidden_layers hidden_act
    activation_function hidden_activation layer_norm_epsilon rms_norm_eps per_layer_config
    text_config auto_map configuration_files transformers_weights model_type fusion_config
    distributed_config use_qk_norm qk_norm scale_attn_weights scale_attn_by_inverse_layer_idx
    tie_word_embeddings tie_encoder_decoder parallel_attn num_local_experts num_experts
    n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    shared_expert_intermediate_size first_k_dense_replace decoder_sparse_step mlp_only_layers
    routed_scaling_factor n_group topk_group router_jitter_noise router_aux_loss_coef
    output_router_logits scoring_func topk_method moe_layer_freq num_nextn_predict_layers
    no_rope_layers no_rope_layer_interval sliding_window_pattern rope_local_base_freq
    query_pre_attn_scalar attn_logit_softcapping use_bidirectional_attention residual_multiplier
    attention_out_bias llama_4_scaling_beta cache_implementation _sliding_window_pattern
    num_mtp_layers qkv_bias rotary_dim attn_type_list use_routing_bias moe_router_dtype
    quantization_config linear_num_key_heads linear_num_value_heads linear_key_head_dim
    linear_value_head_dim linear_conv_kernel_dim linear_allow_neg_eigval linear_a_log_min
    full_attention_interval attn_output_gate output_gate_type mamba_ssm_dtype
    mtp_num_hidden_layers mtp_use_dedicated_embeddings mrope_section mrope_interleaved
    swiglu_limit swiglu_alpha experts_per_token initial_context_length
"""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 4, 8, 16, 48, 96, 1000, 0.5, 1.0, 2.0, -2.0, 1e-5, 1e30),
    *(
        "4",
        "",
        "silu",
        "swish",
        "gelu",
        "gelu_new",
        "gelu_fast",
        "relu",
        "llama3",
        "default",
        "eager",
    ),
    *([], [4], ["full_attention"] * 2, ["sliding_attention", "full_attention"], {}, {"a": 1}),
    *({"rope_theta": 700.0}, {"type": "linear", "factor": 2.0}, dict(LLAMA3)),
    *(["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2, [1, 0, 1, 0], "LG"),
    *(dict(YARN), dict(LINEAR), {"full_attention": dict(LINEAR)}, {"sliding_attention": None}),
    *(["linear_attention", "full_attention"] * 2, "float32", {"mrope_section": [1, 1]}),
    *([0], [1, 1], [0, 1, 2], "sigmoid", "softmax", "noaux_tc", 2.5, 0.25, 12),
)
# Text models → the vision models that wrap them, with the rest of their config.json.
VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
PIXTRAL = {"vision_config": VISION | {"model_type": "pixtral", "head_dim": 8}}
QWEN = {
    "vision_config": {
        **{"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2},
        **{"patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 16},
    }
}
WHOLES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"model_type": "qwen3_5", **QWEN},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe", **QWEN},
    "gemma3_text": {"model_type": "gemma3", "vision_config": VISION, "mm_tokens_per_image": 4},
    "mistral": {"model_type": "mistral3", **PIXTRAL},
    "ministral3": {"model_type": "mistral3", **PIXTRAL},
    "llama": {
        "model_type": "llava",
        "vision_config": VISION | {"model_type": "clip_vision_model"},
    },
}
PLAUSIBLE = (True, False, 0, 1, 2, 0.1, 0.9, None, "x")


@dataclass
class Case:
    """A folder before it is written.

    `doubled`: keys that occur once more in the text, before the others; `files`: name → its
    tensors; `whole`: config.json of the vision model around it, without the text part.
    """

    kind: str
    rng: random.Random
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    doubled: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    whole: dict[str, Any] = field(default_factory=dict)
    # Quantized tensors as plain numbers, by this file's own arithmetic.
    plain: dict[str, Tensor] = field(default_factory=dict)
    # prefixes of the text model's tensors, and of its head
    prefixes: tuple[str, str] = ("model.", "")

    def write(self, folder: Path) -> None:
        text = json.dumps(self.config)
        for key, value in self.doubled.items():
            text = f"{{{json.dumps(key)}: {json.dumps(value)}, {text[1:]}"
        if self.whole:
            text = f'{json.dumps(self.whole)[:-1]}, "text_config": {text}}}'
        (folder / "config.json").write_text(text)
        for name, content in self.texts.items():
            (folder / name).write_text(content)
        for name, tensors in (self.files or {"model.safetensors": self.tensors}).items():
            copies = {
                self.name(key): tensor.clone().contiguous() for key, tensor in tensors.items()
            }
            save_file(copies, folder / name, metadata={"format": "pt"})

    def name(self, key: str) -> str:
        """Returns a tensor's name in the file."""
        if not self.whole:
            return key
        inner, head = self.prefixes
        return f"{head}{key}" if key.startswith("lm_head") else inner + key.removeprefix("model.")

    @property
    def embedding(self) -> str:
        return next(
            key for key in self.tensors if key.endswith(("embed_tokens.weight", "wte.weight"))
        )


def experts(kind: str, rng: random.Random, layers: int) -> dict[str, Any]:
    """Returns random options of a family with experts and `layers` layers."""
    count = rng.choice((4, 6, 8))
    found: dict[str, Any] = {"num_experts_per_tok": rng.choice((2, 3))}
    by_number = dict.fromkeys(("mixtral", "minimax_m2", "gpt_oss"), "num_local_experts")
    by_number |= dict.fromkeys(("dots1", "glm4_moe"), "n_routed_experts")
    found[by_number.get(kind, "num_experts")] = count
    if kind not in ("mixtral", "minimax_m2", "olmoe", "gpt_oss"):
        found["moe_intermediate_size"] = rng.choice((12, 20))
    if kind not in ("mixtral", "minimax_m2", "gpt_oss"):
        found["norm_topk_prob"] = rng.random() < 0.5
    if kind in ("qwen3_moe", "qwen2_moe"):
        found |= rng.choice(({}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}))
    if kind == "qwen2_moe":
        found |= {"shared_expert_intermediate_size": 28, "qkv_bias": rng.random() < 0.5}
    if kind in ("dots1", "glm4_moe"):
        found |= {
            "n_shared_experts": rng.choice((1, 2)),
            "first_k_dense_replace": rng.choice((0, 1)),
        }
        found |= {"routed_scaling_factor": rng.choice((1.0, 2.5))}
        found |= rng.choice(({}, {"n_group": 2, "topk_group": 1}, {"n_group": 2, "topk_group": 2}))
    if kind == "glm4_moe":
        found |= {"use_qk_norm": rng.random() < 0.5, "num_nextn_predict_layers": rng.choice((0, 1))}
    if kind == "gpt_oss":
        found |= {"swiglu_limit": rng.choice((0.3, 7.0)), "sliding_window": rng.choice((3, 7))}
        found |= {"head_dim": rng.choice((8, 12)), "attention_bias": rng.random() < 0.7}
        words = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
        found |= rng.choice(({}, {}, {"layer_types": words}))
    if kind == "minimax_m2":
        found |= {"head_dim": 16, **rng.choice(({}, {"rotary_dim": 8}))}
    return found


def dialect(kind: str, rng: random.Random, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns random options of a dense family with windows, norms or scales."""
    found: dict[str, Any] = {}
    scaled = rng.choice(({}, {}, YARN, LINEAR, LLAMA3))
    if kind in BY_KIND:
        sliding = {"rope_theta": rng.choice((500.0, 10000.0))}
        found["rope_parameters"] = rng.choice(
            (
                {"full_attention": rope | scaled, "sliding_attention": sliding},
                {"full_attention": rope | scaled, "sliding_attention": rope | scaled},
                None,
            )
        )
    elif kind == "phi3":
        part = rng.choice((0.5, 0.75, 1.0))
        long = {"rope_type": "longrope", "partial_rotary_factor": part}
        found["rope_parameters"] = rope | {"partial_rotary_factor": part}
        if rng.random() < 0.5:
            found["original_max_position_embeddings"] = rng.choice((16, 32, 64))
            found["rope_parameters"] = rope | long  # its lists are added when the heads are known
    else:
        found["rope_parameters"] = rope | scaled
    if kind == "ministral3":
        beta = {"llama_4_scaling_beta": rng.choice((0.0, 0.3))}
        found["rope_parameters"] = rope | (scaled or YARN) | beta
        found["rope_parameters"].setdefault("original_max_position_embeddings", 16)
    if kind in ("mistral", "phi3", "ministral3", "exaone4", "gemma2", "gemma3_text", "olmo3"):
        found["sliding_window"] = rng.choice((3, 7, 20))
    if kind in ("mistral", "phi3", "ministral3") and rng.random() < 0.3:
        found["sliding_window"] = None
    if kind in ("olmo3", "exaone4", "gemma2", "gemma3_text"):
        words = ("full_attention", "sliding_attention")
        found["layer_types"] = rng.choice((None, None, [rng.choice(words) for _ in range(4)]))
    if kind == "smollm3":
        found["no_rope_layers"] = rng.choice((None, [1, 0, 0, 1], [1] * 4))
        found["no_rope_layer_interval"] = rng.choice((2, 3))
        found |= rng.choice(({}, {"use_sliding_window": True, "sliding_window": 5}))
    if kind == "granite":
        found |= {"embedding_multiplier": rng.choice((1.0, 3.0)), "attention_multiplier": 0.3}
        found |= {"residual_multiplier": rng.choice((1.0, 0.25)), "logits_scaling": 0.5}
    if kind in ("gemma2", "gemma3_text"):
        found |= {"attn_logit_softcapping": None, "query_pre_attn_scalar": rng.choice((8, 20))}
        if kind == "gemma2":
            found["attn_logit_softcapping"] = rng.choice((None, 0.5, 50.0))
        found["final_logit_softcapping"] = rng.choice((None, 3.0))
        found["hidden_activation"] = rng.choice(("gelu_pytorch_tanh", "silu"))
    if kind in ("glm4", "ministral3", "gemma2", "gemma3_text", "seed_oss", "mistral"):
        found["head_dim"] = rng.choice((8, 16))
    if kind in ("smollm3", "granite", "glm4", "seed_oss", "olmo2", "olmo3", "gemma2"):
        found["attention_bias"] = rng.random() < 0.5
    if kind in ("smollm3", "granite", "seed_oss"):
        found["mlp_bias"] = rng.random() < 0.5
    return found


def hybrid(kind: str, rng: random.Random, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns random options of a family with a gated DeltaNet in some layers."""
    words = ("linear_attention", "full_attention")
    types = [rng.choice(words) for _ in range(4)]
    if kind == "olmo_hybrid":  # needs both
        types[:2] = rng.sample(words, 2)
    found: dict[str, Any] = {
        "layer_types": rng.choice((None, types)),
        "attention_bias": rng.random() < 0.3,
        "linear_conv_kernel_dim": rng.choice((2, 4)),
        # In fp32, the norm of a head's small output multiplies its rounding by up to eps^-½.
        "rms_norm_eps": 0.1,
    }
    heads = rng.choice((1, 2))
    sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": heads * rng.choice((1, 2))}
    sizes |= {"linear_key_head_dim": rng.choice((8, 12)), "linear_value_head_dim": 8}
    if kind != "olmo_hybrid" or rng.random() < 0.5:
        found |= sizes
    if kind == "olmo_hybrid":
        found |= {"linear_allow_neg_eigval": rng.random() < 0.5}
        found["rope_parameters"] = rng.choice((rope, rope, rope | {"rope_theta": None}))
        return found
    found["head_dim"] = rng.choice((8, 16))
    if rng.random() < 0.3:
        found["full_attention_interval"] = rng.choice((2, 3))
    share = rng.choice((None, 0.25, 0.5, 1.0))
    found["rope_parameters"] = rope | ({} if share is None else {"partial_rotary_factor": share})
    if kind != "qwen3_next" and rng.random() < 0.5:
        found["rope_parameters"] |= {"mrope_section": rng.choice(([11, 11, 10], [1, 1, 0]))}
    if kind != "qwen3_5_text":
        found |= {"num_experts": rng.choice((4, 6)), "num_experts_per_tok": 2}
        found |= {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 28}
    if kind == "qwen3_next":
        found |= {"norm_topk_prob": rng.random() < 0.5}
        found |= rng.choice(({}, {"mlp_only_layers": [0, 3]}, {"decoder_sparse_step": 2}))
    return found


def on_disk(model: Any) -> dict[str, Tensor]:
    """Returns the tensors as transformers saves them: each expert apart."""
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        return load_file(Path(name, "model.safetensors"))


def base(rng: random.Random, kinds: Sequence[str] = KINDS) -> Case:
    """Returns a folder without a fault, of a random family, sizes and options."""
    kind = rng.choice(kinds)
    sizes: dict[str, Any] = dict(SIZES)
    sizes["hidden_size"] = rng.choice((32, 48, 64))
    # With experts, one layer must not be dense.
    sizes["num_hidden_layers"] = rng.choice((2, 3) if kind in WITH_EXPERTS else (1, 2))
    sizes["num_key_value_heads"] = rng.choice((1, 2, 4))
    options: dict[str, Any] = {"tie_word_embeddings": rng.random() < 0.5}
    if kind == "gpt2":
        sizes = {key: value for key, value in sizes.items() if key not in list(SIZES)[2:6:3]}
        options["activation_function"] = rng.choice(("gelu", "gelu_new", "relu", "gelu_fast"))
        options["n_inner"] = rng.choice((None, 40))
    else:
        rope: dict[str, Any] = {"rope_theta": rng.choice((500.0, 10000.0, 12345.0))}
        rope |= rng.choice(({"rope_type": "default"}, LLAMA3, YARN, LINEAR))
        options["rope_parameters"] = rope
        options["rms_norm_eps"] = rng.choice((1e-6, 1e-4))
    if kind in SWITCHED and rng.random() < 0.4:
        options |= {"use_sliding_window": True, "sliding_window": rng.choice((3, 7))}
        options["max_window_layers"] = rng.choice((0, 1, 3))
    if kind in DIALECTS:
        sizes["num_hidden_layers"] = 4
        options |= dialect(kind, rng, {"rope_theta": options["rope_parameters"]["rope_theta"]})
        rope = options["rope_parameters"] or {}
        width = sizes["hidden_size"] // 4
        if int(width * rope.get("partial_rotary_factor", 1.0)) % 2:
            rope["partial_rotary_factor"] = 1.0
        if rope.get("rope_type") == "longrope":
            turned = int(width * rope["partial_rotary_factor"])
            for name in ("short_factor", "long_factor"):
                rope[name] = [rng.choice((1.0, 1.5, 3.0)) for _ in range(turned // 2)]
        options = {key: value for key, value in options.items() if value is not None} | {
            key: None
            for key in ("sliding_window", "attn_logit_softcapping")
            if key in options and options[key] is None
        }
        options["pad_token_id"] = None  # such a small vocabulary lacks the default token
    if kind == "gpt_oss":
        sizes["intermediate_size"] = rng.choice((32, 44))  # the first is a whole block of MXFP4
        if options["rope_parameters"].get("rope_type") == "yarn":
            options["rope_parameters"] |= rng.choice(({}, {"truncate": False}))
        elif rng.random() < 0.3:
            del options["rope_parameters"]
    if kind in WITH_EXPERTS:
        options |= experts(kind, rng, sizes["num_hidden_layers"])
    if kind in HYBRIDS:
        sizes["num_hidden_layers"] = 4
        options |= hybrid(kind, rng, options["rope_parameters"]) | {"pad_token_id": None}
    if kind in ("qwen3", "glm4_moe") or (
        kind in ("llama", "mixtral", "qwen3_moe", "dots1") and rng.random() < 0.3
    ):
        options["head_dim"] = rng.choice((8, 12)) if kind != "glm4_moe" else rng.choice((8, 16))
    if kind == "mixtral":  # transformers' YaRN does not take the default
        options.setdefault("head_dim", 8)
    if kind in ("llama", "qwen3", "qwen3_moe", "olmoe", "dots1", "glm4_moe"):
        options["attention_bias"] = rng.random() < 0.3
    if kind == "llama":
        options["mlp_bias"] = rng.random() < 0.3
    given = transformers.AutoConfig.for_model(kind, **sizes, **options, initializer_range=0.2)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    model = transformers.AutoModelForCausalLM.from_config(given)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
            value.add_(("norm" in key or ".ln_" in key) and not kind.startswith("gemma"))
            if key.endswith(".A_log"):  # some heads forget slowly
                value.sub_(2.0)
    tensors = on_disk(model)
    if options["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    config = {"model_type": kind, **sizes, **options}
    if kind == "gpt2":
        config = {GPT2_NAMES.get(key, key): value for key, value in config.items()}
    return Case(kind, rng, config, tensors)


def aliases(case: Case) -> None:
    """Gives GPT-2's sizes the general names, instead of its own or in addition; other families must
    refuse the other names."""
    for general, own in GPT2_NAMES.items():
        where = case.rng.choice(("left", "renamed", "both", "contradicting"))
        if where == "left":
            continue
        here, other = (own, general) if case.kind == "gpt2" else (general, own)
        value = case.config.get(here)
        if value is None:
            continue
        case.config[other] = value
        if where == "renamed":
            del case.config[here]
        if where == "contradicting":
            case.config[case.rng.choice((here, other))] = value + case.rng.choice((-2, 2, 4))


def rope_moved(case: Case) -> None:
    """Writes the base and the scaling in the other spelling, in both, or with a contradiction."""
    rope = case.config.pop("rope_parameters", None)
    if rope is None:
        case.config["rope_theta"] = 500.0
        return
    rng, rope = case.rng, dict(rope)
    if case.kind in BY_KIND and rng.random() < 0.5:
        kind = rng.choice(("full_attention", "sliding_attention"))
        rope[kind] = rng.choice((None, {"rope_theta": 777.0}, dict(LINEAR), dict(YARN), {}))
    for _ in range(rng.choice((1, 2, 3))):
        move = rng.randrange(8)
        if move == 0 and "rope_theta" in rope:
            case.config["rope_theta"] = rope.pop("rope_theta")
        elif move == 1:
            case.config["rope_theta"] = rng.choice((777.0, 500, 1e6))
        elif move == 2 and "rope_type" in rope:
            rope["type"] = rope.pop("rope_type")
        elif move == 3:
            rope["type"] = rng.choice(("default", "llama3", "linear", "yarn", "su"))
        elif move == 4:
            case.config["original_max_position_embeddings"] = rng.choice((4, 16, 64, 1024))
        elif move == 5:
            rope.pop("original_max_position_embeddings", None)
        elif move == 6:
            rope[rng.choice(list(LLAMA3)[1:])] = rng.choice(
                (0.5, 1.0, 4.0, 8.0, 16, 32, None, "8", 2.5)
            )
        else:
            rope["rope_theta"] = rng.choice((700, 700.0, 0.5, None, "700"))
    key = rng.choice(("rope_scaling", "rope_parameters", "both"))
    if key != "both":
        case.config[key] = rope
        return
    other = rng.choice(({}, None, {"rope_theta": 900.0}, dict(LLAMA3), {"rope_type": "default"}))
    pair = [rope, other]
    rng.shuffle(pair)
    case.config["rope_scaling"], case.config["rope_parameters"] = pair


def absurd(case: Case) -> None:
    """Gives one of its keys a value of any kind, or removes it."""
    key = case.rng.choice(list(case.config))
    if case.rng.random() < 0.3:
        case.config.pop(key)
    else:
        case.config[key] = case.rng.choice(VALUES)


def unknown(case: Case) -> None:
    """Adds a key of another family."""
    case.config[case.rng.choice((*FOREIGN.split(), *EXPECTED, *FIXED))] = case.rng.choice(VALUES)


def harmless(case: Case) -> None:
    """Gives ignored keys any value."""
    for key in case.rng.sample(sorted(ABOUT), 4):
        case.config[key] = case.rng.choice((*PLAUSIBLE, case.rng.choice(VALUES)))


def doubled(case: Case) -> None:
    """Writes a key twice into the text; every reader takes the last one."""
    case.doubled[case.rng.choice(list(case.config))] = case.rng.choice(VALUES)


def head(case: Case) -> None:
    """Changes the head: next to a tied embedding, in its place, of another shape, or none."""
    name, table = "lm_head.weight", case.tensors[case.embedding]
    what = case.rng.choice(("equal", "other", "nearly", "alone", "wide", "missing"))
    case.tensors.pop(name, None)
    if what == "equal":
        case.tensors[name] = table
    elif what == "other":
        case.tensors[name] = table.flip(0)
    elif what == "nearly":
        case.tensors[name] = table.clone()
        case.tensors[name][-1, -1] += 1
    elif what == "alone":
        case.tensors[name] = case.tensors.pop(case.embedding)
    elif what == "wide":
        case.tensors[name] = torch.zeros(table.shape[0] + 1, table.shape[1])


def prefixes(case: Case) -> None:
    """Names all or some tensors as a bare model does, or one of them twice."""
    bare = {key: key.split(".", 1)[1] for key in case.tensors if not key.startswith("lm_head")}
    some = list(bare) if case.rng.random() < 0.5 else case.rng.sample(list(bare), 3)
    for key in some:
        case.tensors[bare[key]] = case.tensors.pop(key)
    if case.rng.random() < 0.3:
        case.tensors[some[0]] = case.tensors[bare[some[0]]].clone()


def wrapped(case: Case) -> None:
    """Makes it the text part of a vision model, in either layout of names; tensors of the encoder
    are missing, and do not change the text model's results."""
    if case.kind not in WHOLES:
        return
    rng = case.rng
    case.whole = dict(WHOLES[case.kind])
    case.prefixes = rng.choice(
        (("language_model.model.", "language_model."), ("model.language_model.", ""))
    )
    tied = rng.choice((case.config.get("tie_word_embeddings"), True, False, None))
    if tied is not None:
        case.whole["tie_word_embeddings"] = tied
    if rng.random() < 0.3:
        case.whole[rng.choice(("image_token_index", "vocab_size", *EXPECTED, *FIXED))] = rng.choice(
            VALUES
        )
    if rng.random() < 0.2:
        case.config["model_type"] = rng.choice(("llama", "mistral", "gemma3_text", "gemma3", None))


def convolutions(case: Case) -> None:
    """Writes OLMo Hybrid's convolutions joined, cut elsewhere, or one of them too short."""
    name = "model.layers.{}.linear_attn.{}_conv1d.weight"
    for layer in range(4):
        names = [name.format(layer, part) for part in "qkv"]
        if names[0] not in case.tensors:
            continue
        whole = torch.cat([case.tensors.pop(one) for one in names])
        how = case.rng.choice(("joined", "cut", "short"))
        if how == "joined":
            case.tensors[names[0].replace("q_conv1d", "conv1d")] = whole
            continue
        first = case.rng.randrange(1, len(whole) // 2)
        rows = (first, case.rng.randrange(1, len(whole) // 2))
        parts = whole.split((*rows, len(whole) - sum(rows)))
        case.tensors |= dict(zip(names, parts, strict=True))
        if how == "short":
            case.tensors[names[2]] = parts[2][:-1]


def more_tensors(case: Case) -> None:
    """Adds masks and tables of old checkpoints, or an unknown tensor."""
    if case.kind in HYBRIDS and case.rng.random() < 0.7:
        of_mtp = ("mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "model.mtp.fc.weight")
        more = ("linear_attn.norm.bias", "linear_attn.conv1d.bias", "linear_attn.D")
        name = case.rng.choice((*of_mtp, *(f"model.layers.0.{one}" for one in more)))
        case.tensors[name] = torch.ones(4)
        return
    if case.kind in WITH_EXPERTS and case.rng.random() < 0.5:
        block = "block_sparse_moe" if case.kind in ("mixtral", "minimax_m2") else "mlp"
        more = (f"{block}.e_score_correction_bias", f"{block}.gate.bias", f"{block}.experts.99.w1")
        name = f"model.layers.{case.rng.choice((0, 1, 2, 3))}.{case.rng.choice(more)}"
        case.tensors[name] = torch.ones(4)
        return
    names = {
        "gpt2": ("transformer.h.0.attn.bias", "h.0.attn.masked_bias"),
        "other": ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    }["gpt2" if case.kind == "gpt2" else "other"]
    case.tensors[case.rng.choice((*names, "model.layers.0.self_attn.sinks"))] = torch.ones(4)


def types(case: Case) -> None:
    """Writes tensors in other dtypes, one of them with NaN or too large a number."""
    kinds = (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.float8_e4m3fn)
    for key in case.rng.sample(list(case.tensors), min(3, len(case.tensors))):
        case.tensors[key] = case.tensors[key].to(case.rng.choice(kinds[:3]))
    if case.rng.random() < 0.5:
        key = case.rng.choice(list(case.tensors))
        tensor = case.tensors[key].double()
        tensor.view(-1)[0] = case.rng.choice((float("nan"), float("inf"), 1e300, 1e30))
        case.tensors[key] = tensor.to(case.rng.choice((torch.float64, *kinds)))


def files(case: Case) -> None:
    """Writes several files and an index, two alternative sets of files, or a name in
    config.json."""
    rng, names = case.rng, sorted(case.tensors)
    middle = rng.randrange(1, len(names))
    parts = {"model-1.safetensors": names[:middle], "model-2.safetensors": names[middle:]}
    split = {file: {key: case.tensors[key] for key in keys} for file, keys in parts.items()}
    index = {key: file for file, keys in parts.items() for key in keys}
    stale = {key: t.double().flip(0).to(t.dtype) for key, t in case.tensors.items()}
    what = rng.randrange(6)
    case.files = split if what else {"model.safetensors": case.tensors}
    case.texts["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": index})
    if what == 0:
        del case.texts["model.safetensors.index.json"]
        case.files["consolidated.safetensors"] = stale
    elif what == 1:  # as if saved again over an old download
        case.files = {"model.safetensors": case.tensors} | {
            file: {key: stale[key] for key in keys} for file, keys in parts.items()
        }
    elif what == 2:  # a key is in both files
        case.files["model-2.safetensors"][names[0]] = stale[names[0]]
    elif what == 3:
        named = rng.choice(("other.safetensors", "../x.safetensors", "other.bin", 7, None, ""))
        case.config["transformers_weights"] = named
        case.files = {"model.safetensors": stale, "other.safetensors": case.tensors}
        del case.texts["model.safetensors.index.json"]
    elif what == 4:
        case.files["model.safetensors"] = stale
        case.config["transformers_weights"] = "model.safetensors.index.json"


def beside(case: Case) -> None:
    """Adds files that do not belong to the model, some of which are read nevertheless."""
    name = case.rng.choice(
        ("adapter_config.json", "pytorch_model.bin", "generation_config.json", "config.5.0.0.json")
    )
    case.texts[name] = "{}"
    if name.startswith("config."):
        case.texts[name] = json.dumps(case.config | {"rms_norm_eps": 0.5})
        case.config["configuration_files"] = [name]
    if case.rng.random() < 0.2:
        case.files = {"model.safetensors": case.tensors}
        case.files["shard-00000-model-00001-of-00001.safetensors"] = case.tensors


def in_mxfp4(case: Case) -> None:
    """Writes the experts' matrices in MXFP4, sound or with one fault."""
    rng = case.rng
    names = [
        key
        for key, tensor in case.tensors.items()
        if tensor.dim() == 3 and "proj" in key and tensor.shape[1] % 32 == 0
    ]
    if case.files or not names:
        return
    random_codes = torch.Generator().manual_seed(rng.randrange(2**31))
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    numbers = torch.cat((numbers, -numbers))
    for key in names:
        count, inputs, outputs = case.tensors.pop(key).shape
        codes = torch.randint(0, 16, (count, outputs, inputs), generator=random_codes)
        grid = (count, outputs, inputs // 32)
        exponents = torch.randint(122, 127, grid, generator=random_codes)
        pairs = codes[..., 0::2] + 16 * codes[..., 1::2]
        case.tensors[f"{key}_blocks"] = pairs.view(*grid, 16).to(torch.uint8)
        case.tensors[f"{key}_scales"] = exponents.to(torch.uint8)
        scales = 2.0 ** (exponents.double() - 127).repeat_interleave(32, -1)
        case.plain[key] = (numbers[codes] * scales).transpose(1, 2).float()
    name, about = rng.choice(names), dict[str, Any](quant_method="mxfp4")
    fault = rng.choice((*[None] * 6, "scales", "missing", "type", "both", "key", "method", "none"))
    if fault == "scales":
        case.tensors[f"{name}_scales"] = case.tensors[f"{name}_scales"][..., :1, :]
    elif fault == "missing":
        del case.tensors[name + rng.choice(("_scales", "_blocks"))]
    elif fault == "type":
        part = name + rng.choice(("_scales", "_blocks"))
        case.tensors[part] = case.tensors[part].to(rng.choice((torch.int32, torch.float32)))
    elif fault == "both":
        case.tensors[name] = case.plain[name] + 1
    elif fault == "key":
        about[rng.choice(("bits", "weight_block_size", "modules_to_convert"))] = rng.choice(VALUES)
    elif fault == "method":
        about["quant_method"] = rng.choice(("fp8", "nvfp4", None))
    if fault != "none":
        case.config["quantization_config"] = about


def quantized(case: Case) -> None:
    """Writes matrices in fp8 blocks with scales, sound or with one fault.

    A fault is another scale, block, key or value, or a missing one.
    """
    if case.kind == "gpt_oss" and case.rng.random() < 0.7:
        return in_mxfp4(case)
    rng, block = case.rng, case.rng.choice(((16, 24), (128, 128), (7, 5), None))
    matrices = [
        key
        for key, tensor in case.tensors.items()
        if tensor.dim() == 2 and "proj" in key and tensor.isfinite().all()
    ]
    if case.files or not matrices:
        return
    random_scales = torch.Generator().manual_seed(rng.randrange(2**31))
    for key in matrices if rng.random() < 0.7 else matrices[::2]:
        tensor = case.tensors[key]
        high, wide = block or tensor.shape
        grid = (-(-tensor.shape[0] // high), -(-tensor.shape[1] // wide))
        scale = torch.rand(grid, generator=random_scales) * 0.4 + 0.05
        case.tensors[key] = (tensor.float() * 4).clamp(-448, 448).to(torch.float8_e4m3fn)
        spread = torch.kron(scale.double(), torch.ones(high, wide, dtype=torch.float64))
        numbers = case.tensors[key].double() * spread[: tensor.shape[0], : tensor.shape[1]]
        case.plain[key] = numbers.float()
        case.tensors[f"{key}_scale_inv"] = scale
    name = f"{rng.choice(list(case.plain))}_scale_inv"
    about: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": block and [*block]}
    fault = rng.choice((*[None] * 6, "shape", "missing", "other", "key", "value", "method", "none"))
    if fault == "shape":
        case.tensors[name] = torch.ones(2, 9)
    elif fault == "missing":
        del case.tensors[name]
    elif fault == "other":
        case.tensors[name.removesuffix("_scale_inv")] = torch.ones(3, 3)
    elif fault == "key":
        about[rng.choice(("bits", "group_size", "weight_block", "config_groups"))] = 4
    elif fault == "value":
        keys = ("activation_scheme", "fmt", "scale_fmt", "expert_dtype", "weight_block_size")
        about[rng.choice((*keys, "modules_to_not_convert"))] = rng.choice(VALUES)
    elif fault == "method":
        about["quant_method"] = rng.choice(("mxfp4", "compressed-tensors", "gptq", None, 8))
    if fault != "none":
        (case.whole or case.config)["quantization_config"] = about


CHANGES: tuple[Callable[[Case], None], ...] = (
    *(aliases, rope_moved, absurd, unknown, harmless, doubled, head, prefixes, wrapped),
    *(convolutions, more_tensors, types, files, beside, quantized),
)


def random_case(seed: int, number: int, kinds: Sequence[str] = KINDS) -> Case:
    """Returns the folder `number` of a seed: up to three changes of a sound one."""
    rng = random.Random(f"{seed} {number}")
    case = base(rng, kinds)
    chosen = rng.sample(CHANGES, rng.choice((0, 1, 1, 1, 2, 2, 3)))
    for change in sorted(
        chosen, key=CHANGES.index
    ):  # files come last, because they are made from the final tensors
        change(case)
        case.changes.append(change.__name__)
    return case


def read_import(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Returns the model and the tensors that `checkpoint import` reads. Raises UserError."""
    found = read_hf_config(folder)
    check_unread("from=…", found.kind, found.unread, "no logits are compared", "compare them")
    model = replace(ModelConfig(), **found.keys)
    tensors = tensors_of(
        folder,
        model,
        found.kind,
        dtype=torch.float32,
        mtp=found.mtp,
        wrapped=found.wrapped,
        quantization=found.quantization,
    )
    return model, dict(tensors)


def outcome(case: Case) -> tuple[str, str]:
    """Returns the outcome of reading a folder ("equal", "refused", "unproven", "rounding",
    "DIFFERENT", "CRASH") and its message.

    Unproven: transformers does not load or run it, so the proof refuses it. Rounding: the proof
    refuses it, but in fp64 our logits are transformers'.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case.write(folder)
        try:
            model, weights = read_import(folder)
        except UserError as error:
            return "refused", str(error).replace(name, "…")
        except Exception:
            return "CRASH", traceback.format_exc()

        def fill(stage: Stage) -> None:
            names = {key.partition("/")[2]: state for key, state in state_of(stage).items()}
            assert names.keys() == weights.keys()
            for tensor, state in names.items():
                for chunk, values in state.chunks:
                    values.copy_(chunk.of(weights[tensor]))

        try:
            numbers = None
            if case.plain:
                numbers = {
                    case.name(key): tensor
                    for key, tensor in (case.tensors | case.plain).items()
                    if not key.endswith(("_scale_inv", "_blocks", "_scales"))
                }
            theirs = proof.their_side(folder, model, wrapped=bool(case.whole), weights=numbers)
        except UserError as error:
            return "unproven", str(error).replace(name, "…")
        try:
            return "equal", proof.verdict(folder, model, theirs, fill)
        except UserError as error:
            words = str(error).replace(name, "…")
        try:
            proof.verdict(folder, model, theirs, fill, torch.float64)
        except UserError:
            return "DIFFERENT", words
        return "rounding", words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--show", nargs="*", default=["DIFFERENT", "CRASH"], help="outcomes to tell"
    )
    parser.add_argument("--families", nargs="*", default=KINDS, choices=KINDS, help="which ones")
    given = parser.parse_args()
    found: Counter[str] = Counter()
    for number in range(given.count):
        case = random_case(given.seed, number, given.families)
        how, words = outcome(case)
        found[how] += 1
        if how in given.show:
            print(f"{number} {case.kind} {'+'.join(case.changes)}: {how}: {words}\n{case.config}")
    print(f"seed {given.seed}: {given.count} folders, {dict(found.most_common())}")
    return int(bool(found["DIFFERENT"] or found["CRASH"]))


if __name__ == "__main__":
    sys.exit(main())
