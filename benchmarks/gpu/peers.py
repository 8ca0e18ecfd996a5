"""Trains the same model and batch with trainers that a user might choose instead: transformers,
torchtitan.

Both train in the usual way: fp32 weights under bf16 autocast, fused AdamW, clipping to the same
norm, gradients accumulated over micro-batches. For torchtitan, its model runs in this loop, not in
its trainer.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.rows import (
    MAX_GRAD_NORM,
    RandomTokens,
    Size,
    first_that_fits,
    model_of,
    peak_memory_gb,
    seconds_of,
    speed,
    trainer_of,
)
from parallel3d.device.accelerator import is_accelerator
from parallel3d.models.keys import ModelConfig

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[], object]
Maker = Callable[[ModelConfig, Size, torch.device, int, bool], Step]
# number of rounds in which trainers take turns, so that drifts of clocks and power affect all
# equally
ROUNDS = 3


class Missing(Exception):
    """Raised for a trainer that is not installed here, or whose classes have other names."""


def _training_step(
    model: ModelConfig,
    size: Size,
    device: torch.device,
    micro_batch: int,
    network: nn.Module,
    loss: Loss,
) -> Step:
    """Runs a step of the usual training loop; `loss(tokens, labels)` is a micro-batch's mean."""
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

    return step


def _ours(
    model: ModelConfig, size: Size, device: torch.device, micro_batch: int, compiled: bool
) -> Step:
    """Runs parallel3d's own step."""
    trainer = trainer_of(model, device, micro_batch, size.sequences, size.precision, compiled)
    return trainer.train_step


def _transformers(
    model: ModelConfig, size: Size, device: torch.device, micro_batch: int, compiled: bool
) -> Step:
    """Uses Hugging Face transformers' Llama with its SDPA attention."""
    if importlib.util.find_spec("transformers") is None:
        raise Missing("transformers is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

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
    with device:
        network = LlamaForCausalLM(config)
    call = torch.compile(network) if compiled else network

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = call(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return _training_step(model, size, device, micro_batch, network, loss)


def _titan(
    model: ModelConfig, size: Size, device: torch.device, micro_batch: int, compiled: bool
) -> Step:
    """Uses torchtitan's Llama 3 model.

    Its classes move between releases (0.2.2 is known); an unknown release is reported.
    """
    if importlib.util.find_spec("torchtitan") is None:
        raise Missing("torchtitan is not installed")
    try:
        from torchtitan.models.llama3.model.args import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer
    except ImportError as error:
        why = f"torchtitan {version('torchtitan')} has another structure: {error}"
        raise Missing(why) from None
    args = TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.kv_heads,
        vocab_size=model.vocab_size,
        norm_eps=model.norm_eps,
        rope_theta=model.rotary_base,
        max_seq_len=model.seq_length,
        # torchtitan's MLP has 2/3 of 4 · dim features, times the multiplier, rounded up to a
        # multiple.
        ffn_dim_multiplier=(model.ffn_size - 0.5) / int(8 * model.hidden_size / 3),
        multiple_of=model.ffn_size,
    )
    with device, torch.no_grad():
        network = Transformer(args)
        network.init_weights()
    call = torch.compile(network) if compiled else network

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(call(tokens).float().flatten(0, 1), labels.flatten())

    return _training_step(model, size, device, micro_batch, network, loss)


TRAINERS: dict[str, Maker] = {
    "parallel3d": _ours,
    "transformers": _transformers,
    "torchtitan": _titan,
}


def peer_row(
    trainer: str, name: str, size: Size, device: torch.device, compiled: bool
) -> dict[str, Any]:
    """Measures a peer alone, with the largest micro-batch that fits."""
    model = model_of(name, size)

    def run(micro_batch: int) -> dict[str, Any]:
        step = TRAINERS[trainer](model, size, device, micro_batch, compiled)
        return speed(model, size, seconds_of(step, device, size), device)

    try:
        return first_that_fits(size, device, run)
    except Missing as why:
        return {"skipped": str(why)}


def side_by_side(name: str, size: Size, device: torch.device, compiled: bool) -> dict[str, Any]:
    """Measures whole steps of all installed trainers, in turns: one process, one card, equal
    batches.

    All of them are in memory together, so the micro-batch is smaller than for one trainer alone.
    """
    model, tokens = model_of(name, size), size.sequences * model_of(name, size).seq_length
    few = dataclasses.replace(size, steps=max(2, size.steps // 2))
    absent: dict[str, str] = {}

    def run(micro_batch: int) -> dict[str, Any]:
        steps: dict[str, Step] = {}
        for trainer, make in TRAINERS.items():
            try:
                steps[trainer] = make(model, size, device, micro_batch, compiled)
            except Missing as why:
                absent[trainer] = str(why)
        if len(steps) < 2:
            return {"skipped": "; ".join(absent.values())}
        rounds = [
            {trainer: seconds_of(step, device, few) for trainer, step in steps.items()}
            for _ in range(ROUNDS)
        ]
        found = {}
        for trainer in steps:
            seconds = statistics.median(one[trainer] for one in rounds)
            ratios = [one[trainer] / one["parallel3d"] for one in rounds]
            row: dict[str, Any] = {"step_ms": 1e3 * seconds, "tokens_per_s": tokens / seconds}
            found[trainer] = row | {"times_ours": statistics.median(ratios), "rounds": ratios}
        return {"trainers": found, "absent": absent, "peak_memory_gb": peak_memory_gb(device)}

    return first_that_fits(size, device, run)
