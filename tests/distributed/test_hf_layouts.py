"""Tests Hugging Face models under tp=2 pp=2: the logits of transformers, after an import and an
export."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.layout import Layout
from parallel3d.checkpoint.hf.folder import export_hf, read_hf_config, tensors_of
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.models.transformer import Decoder, blank_stage
from parallel3d.parameters.gather import gather_parameters
from parallel3d.parameters.state import spec_of
from tests.distributed.pool import Pool

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network

LAYOUT = Layout(tp=2, pp=2)
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "initializer_range": 0.2,
    "bos_token_id": 60,
    "eos_token_id": 60,
}
THEIRS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_theta": 500.0, **SCALING}},
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 1},  # on both tensor ranks
    "qwen3": {"head_dim": 12},
}


def read_and_give_back(folders: list[Path], tokens: list[int]) -> list[tuple[Any, Any]]:
    """Returns, for each folder, the logits of every position on the last stage, token by token from
    the cache after a prompt of four, and all parameters on rank 0."""
    groups = ProcessGroups.create(LAYOUT, "cpu", timeout_s=300)
    found = []
    for folder in folders:
        source = read_hf_config(folder)
        config = Config(model=ModelConfig(**source.keys), tp=LAYOUT.tp, pp=LAYOUT.pp, dp=1)
        stage = blank_stage(Blueprint.of(config), groups, torch.device("cpu"))
        held = {p.name: (p, local) for local in stage.parameters() for p in spec_of(local).shards}
        with torch.no_grad():
            for name, full in tensors_of(folder, config.model, source.kind):
                if name in held:
                    piece, local = held[name]
                    piece.of_local(local).copy_(piece.of_full(full))
        decoder = Decoder(config.model, groups, stage)
        logits = [decoder.logits(tokens[:n]) for n in range(4, len(tokens) + 1)]
        weights = gather_parameters(stage.parameters(), groups)
        found.append((torch.stack(logits) if stage.last else None, weights))
    groups.close()
    return found


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0, 3:]


def test_logits_are_those_of_transformers_in_both_directions(pool: Pool, tmp_path: Path) -> None:
    # Importing it takes seconds, which a selection of other tests need not spend.
    import transformers

    torch.manual_seed(5)
    models = {}
    for kind, changes in THEIRS.items():
        config = transformers.AutoConfig.for_model(kind, **SIZES | changes)
        models[kind] = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in models[kind].parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))  # norms and biases, too
        models[kind].save_pretrained(tmp_path / kind)
    tokens = torch.randint(0, 61, (24,)).tolist()
    folders = [tmp_path / kind for kind in models]
    by_rank = pool.run(LAYOUT.world_size, read_and_give_back, folders, tokens)
    for (kind, theirs), of_ranks in zip(models.items(), zip(*by_rank, strict=True), strict=True):
        expected = logits_of(theirs, tokens)
        assert expected.std() > 0.3
        last = [logits for logits, _ in of_ranks if logits is not None]
        assert len(last) == LAYOUT.tp
        for ours in last:
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
        weights = of_ranks[0][1]
        keys = read_hf_config(tmp_path / kind).keys
        back = tmp_path / f"{kind}_back"
        export_hf(
            replace(ModelConfig(), **keys),
            lambda names, weights=weights: {name: weights[name] for name in names},
            back,
            dtype="fp32",
            end_of_text=60,
        )
        again = transformers.AutoModelForCausalLM.from_pretrained(back)
        assert type(again) is type(theirs)
        torch.testing.assert_close(logits_of(again, tokens), last[0], rtol=0, atol=1e-5)
