"""What a user would pick instead, on the same model and batch: transformers and torchtitan.

Both train as they are meant to: fp32 weights under bf16 autocast (transformers), torchtitan's own
model likewise, fused AdamW, clipping to the same norm, gradients accumulated over micro-batches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_rows import (
    MAX_GRAD_NORM,
    RandomTokens,
    Size,
    first_that_fits,
    model_of,
    seconds_of,
    speed,
)
from parallel3d.config.schema import ModelConfig
from parallel3d.device.accelerator import is_accelerator

Loss = Callable[[Tensor, Tensor], Tensor]


def train(
    model: ModelConfig,
    size: Size,
    device: torch.device,
    micro_batch: int,
    network: nn.Module,
    loss: Loss,
) -> dict[str, Any]:
    """Times the usual training loop; `loss(tokens, labels)` is a micro-batch's mean."""
    fused = is_accelerator(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=fused)
    source, parts = RandomTokens(model), size.sequences // micro_batch
    tokens = torch.stack(
        [torch.from_numpy(source.sample(i).tokens) for i in range(size.sequences)]
    ).to(device)

    def step() -> None:
        for part in tokens.split(micro_batch):
            with torch.autocast(device.type, torch.bfloat16):
                value = loss(part[:, :-1], part[:, 1:])
            (value / parts).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return speed(model, size, seconds_of(step, device, size), device)


def transformers_row(name: str, size: Size, device: torch.device, compiled: bool) -> dict[str, Any]:
    """Hugging Face transformers' Llama with its SDPA attention."""
    if importlib.util.find_spec("transformers") is None:
        return {"skipped": "transformers is not installed"}
    from transformers import LlamaConfig, LlamaForCausalLM

    model = model_of(name, size)
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.seq_length,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
    )

    def run(micro_batch: int) -> dict[str, Any]:
        with device:
            network = LlamaForCausalLM(config)
        call = torch.compile(network) if compiled else network

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            logits = call(input_ids=tokens).logits
            return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

        return train(model, size, device, micro_batch, network, loss)

    return first_that_fits(size, device, run)


def titan(name: str, size: Size, device: torch.device) -> dict[str, Any]:
    """torchtitan's Llama 3 model, compiled, in the loop above (not its trainer).

    Its classes move between releases; one that this does not know says so in the row. Not run so
    far.
    """
    if importlib.util.find_spec("torchtitan") is None:
        return {"skipped": "torchtitan is not installed"}
    from importlib.metadata import version

    try:
        from torchtitan.models.llama3.model.args import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer
    except ImportError as error:
        return {"skipped": f"torchtitan {version('torchtitan')} is laid out otherwise: {error}"}
    model = model_of(name, size)
    args = TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.kv_heads,
        vocab_size=model.vocab_size,
        norm_eps=model.norm_eps,
        rope_theta=model.rotary_base,
        max_seq_len=model.seq_length,
        # Its hidden size is 2/3 of 4 · dim, times the multiplier, rounded up to the multiple.
        ffn_dim_multiplier=(model.ffn_size - 0.5) / int(8 * model.hidden_size / 3),
        multiple_of=model.ffn_size,
    )

    def run(micro_batch: int) -> dict[str, Any]:
        with device:
            network = Transformer(args)
            network.init_weights()
        compiled = torch.compile(network)

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(compiled(tokens).float().flatten(0, 1), labels.flatten())

        return train(model, size, device, micro_batch, network, loss)

    return first_that_fits(size, device, run)
