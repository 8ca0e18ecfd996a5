"""Makes folders like those of transformers, for tests of `checkpoint import` and `export`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
import transformers

from parallel3d.commands.generate import state_of
from parallel3d.models.transformer import Stage

SIZES = {
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 44}


def save_model(folder: Path, kind: str, **config: Any) -> torch.nn.Module:
    """Saves a model of that kind, with `config` over `SIZES`; every tensor is random, also norms
    and biases, those of routers included."""
    made = transformers.AutoConfig.for_model(kind, **SIZES | config)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return model


def fill(stage: Stage, weights: Mapping[str, Tensor]) -> None:
    """Fills a stage with full tensors by name; it must hold all of them."""
    held = set()
    for kind_and_name, tensor in state_of(stage).items():
        name = kind_and_name.partition("/")[2]
        for chunk, values in tensor.chunks:
            values.copy_(chunk.of(weights[name]))
        held.add(name)
    assert held == weights.keys()
