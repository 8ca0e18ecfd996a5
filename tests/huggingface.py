"""Makes folders like those of transformers, for tests of `checkpoint import` and `export`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
import transformers

SIZES = {
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 44}


def save_model(folder: Path, kind: str, **config: Any) -> torch.nn.Module:
    """Saves a model of that kind, with `config` over `SIZES`; every tensor is random, also norms
    and biases."""
    made = transformers.AutoConfig.for_model(kind, **SIZES | config)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model
