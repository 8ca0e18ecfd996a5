"""Mixtures of experts of transformers and torchtitan, with the initial weights of our model.

Both are OLMoE's or Qwen3-MoE's model: softmax routers, SwiGLU experts, and norms of q and k over
all heads or over each. torchtitan is fetched by whoever compares with it
(`pip install torchtitan==0.2.2`); its classes move between releases, so others are refused.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.models.keys import ModelConfig

Weights = Mapping[str, Tensor]  # our full names → full tensors


class Missing(Exception):
    """Raised for a trainer that is not installed here, or whose classes have other names."""


def transformers_mixture(model: ModelConfig, way: str, device: torch.device) -> nn.Module:
    """Returns transformers' OLMoE or Qwen3-MoE of these sizes; `way`: implementation of its
    experts."""
    if importlib.util.find_spec("transformers") is None:
        raise Missing("transformers is not installed")
    if device.type not in ("cpu", "cuda"):
        raise Missing(f"transformers makes no parameters on {device.type}")
    import transformers

    shared = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.router_normalize,
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rotary_base,
        "tie_word_embeddings": False,
        "use_cache": False,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
        "experts_implementation": way,
    }
    kind, more = "Qwen3Moe", {"moe_intermediate_size": model.expert_size, "mlp_only_layers": []}
    more |= {"head_dim": model.head_size}
    if model.qk_norm_width == "full":
        kind, more = "Olmoe", {"intermediate_size": model.expert_size}
    config = getattr(transformers, f"{kind}Config")(**shared, **more)
    with device:
        return getattr(transformers, f"{kind}ForCausalLM")(config)


def titan_mixture(model: ModelConfig, device: torch.device) -> nn.Module:
    """Returns torchtitan's Qwen3 with its layers of experts, by its grouped GEMM."""
    if importlib.util.find_spec("torchtitan") is None:
        raise Missing("torchtitan is not installed")
    if device.type != "cuda":
        raise Missing("torchtitan sorts the rows of experts by a Triton kernel: it needs a GPU")
    try:
        from torchtitan.models.moe import MoEArgs
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
        from torchtitan.models.qwen3.model.model import Qwen3Model
    except ImportError as error:
        why = f"torchtitan {version('torchtitan')} has another structure: {error}"
        raise Missing(why) from None
    experts = MoEArgs(
        num_experts=model.num_experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=model.router_normalize,
        score_before_experts=False,
        top_k=model.experts_per_token,
        load_balance_coeff=None,
    )
    args = Qwen3ModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.kv_heads,
        vocab_size=model.vocab_size,
        head_dim=model.head_size,
        hidden_dim=model.ffn_size,
        norm_eps=model.norm_eps,
        rope_theta=model.rotary_base,
        max_seq_len=model.seq_length,
        moe_enabled=True,
        moe_inter_dim=model.expert_size,
        moe_args=experts,
    )
    with device:
        network = Qwen3Model(args)
        if model.qk_norm_width == "full":
            for layer in network.layers.values():
                attention = layer.attention
                for name in ("q_norm", "k_norm"):
                    heads = attention.n_heads if name == "q_norm" else attention.n_kv_heads
                    setattr(attention, name, NormOfHeads(heads * args.head_dim, model.norm_eps))
    return network


class NormOfHeads(nn.RMSNorm):
    """Normalises all heads of a token as one vector: (b, s, heads, d) → the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


ATTENTION = {"q": "q", "k": "k", "v": "v", "o": "out"}


def of_transformers(model: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Returns transformers' parameters by name, of our weights."""
    found = {
        "model.embed_tokens.weight": weights["embedding.word.weight"],
        "model.norm.weight": weights["final_norm.weight"],
        "lm_head.weight": weights["head.weight"],
    }
    for i in range(model.num_layers):
        there, here = f"model.layers.{i}", f"layers.{i}"
        for theirs, ours in ATTENTION.items():
            ours = f"{here}.attention.{ours}.weight"
            found[f"{there}.self_attn.{theirs}_proj.weight"] = weights[ours]
        for part in ("q_norm", "k_norm"):
            found[f"{there}.self_attn.{part}.weight"] = weights[f"{here}.attention.{part}.weight"]
        found[f"{there}.input_layernorm.weight"] = weights[f"{here}.input_norm.weight"]
        found[f"{there}.post_attention_layernorm.weight"] = weights[f"{here}.mlp_norm.weight"]
        found[f"{there}.mlp.gate.weight"] = weights[f"{here}.mlp.router.weight"]
        gate, up, down = (_stacked(model, weights, here, p) for p in ("gate", "up", "down"))
        found[f"{there}.mlp.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        found[f"{there}.mlp.experts.down_proj"] = down
    return found


def of_titan(model: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Returns torchtitan's parameters by name, of our weights."""
    found = {
        "tok_embeddings.weight": weights["embedding.word.weight"],
        "norm.weight": weights["final_norm.weight"],
        "output.weight": weights["head.weight"],
    }
    for i in range(model.num_layers):
        layer = f"layers.{i}"
        for theirs, ours in ATTENTION.items():
            found[f"{layer}.attention.w{theirs}.weight"] = weights[
                f"{layer}.attention.{ours}.weight"
            ]
        for part in ("q_norm", "k_norm"):
            found[f"{layer}.attention.{part}.weight"] = weights[f"{layer}.attention.{part}.weight"]
        found[f"{layer}.attention_norm.weight"] = weights[f"{layer}.input_norm.weight"]
        found[f"{layer}.ffn_norm.weight"] = weights[f"{layer}.mlp_norm.weight"]
        found[f"{layer}.moe.router.gate.weight"] = weights[f"{layer}.mlp.router.weight"]
        for theirs, ours in {"w1": "gate", "w3": "up", "w2": "down"}.items():
            found[f"{layer}.moe.experts.{theirs}"] = _stacked(model, weights, layer, ours)
    return found


def _stacked(model: ModelConfig, weights: Weights, layer: str, part: str) -> Tensor:
    experts = range(model.num_experts)
    return torch.stack([weights[f"{layer}.mlp.experts.{e}.{part}.weight"] for e in experts])


@torch.no_grad()
def take(network: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copies values into all parameters. Raises ValueError if the names are not the same."""
    own: dict[str, Any] = dict(network.named_parameters())
    if own.keys() != values.keys():
        raise ValueError(f"other parameters: {sorted(own.keys() ^ values.keys())[:4]}")
    for name, parameter in own.items():
        parameter.copy_(values[name])
