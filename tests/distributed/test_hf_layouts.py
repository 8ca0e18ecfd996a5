"""Tests Hugging Face models under several layouts.

After an import and an export, they have the logits of transformers under tp=2 pp=2; and runs begin
from a folder with experts over ep.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.checkpoint.hf.folder import export_hf, read_hf_config, tensors_of
from parallel3d.checkpoint.init_from import load_initial
from parallel3d.checkpoint.storage import chunks_by_name
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.generate import state_of
from parallel3d.models.declared import states_of
from parallel3d.models.decoding import Decoder, blank_stage
from parallel3d.models.keys import ModelConfig
from parallel3d.parameters.gather import gather_parameters
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config
from tests.distributed.cases import Case, Problem, UnequalMasks
from tests.distributed.harness import plain_groups
from tests.distributed.pool import Pool
from tests.huggingface import DIALECTS, EXPERTS, save_model

pytestmark = pytest.mark.nightly

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network

LAYOUT = Layout(tp=2, pp=2, ep=1)
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
    "pad_token_id": None,
}
# Families that are cut differently into stages and shards: patterns of layers, joined tensors,
# pairs.
DENSE = ("phi3_longrope", "smollm3", "glm4", "olmo3", "exaone4", "gemma3_text")
DENSE += ("qwen3_5", "olmo_hybrid", "olmo_hybrid_nope")
DELTA_EXPERTS = ("qwen3_next", "qwen3_5_moe_text")
THEIRS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_theta": 500.0, **SCALING}},
    # both tensor ranks hold the only key-value head
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 12},
    **{kind: EXPERTS[kind] for kind in ("qwen2_moe", "olmoe", "glm4_moe", "minimax_m2", "gpt_oss")},
    **{name: {**DIALECTS[name][1], "num_hidden_layers": 4} for name in DENSE},
}


def read_and_give_back(folders: list[Path], tokens: list[int]) -> list[tuple[Any, Any]]:
    """Returns, for each folder, the logits of every position on the last stage, token by token from
    the cache after a prompt of four, and all parameters on rank 0."""
    groups = ProcessGroups.create(LAYOUT, "cpu", timeout_s=300)
    found = []
    for folder in folders:
        source = read_hf_config(folder)
        config = Config(model=ModelConfig(**source.keys), tp=LAYOUT.tp, pp=LAYOUT.pp, dp=1)
        stage = blank_stage(blueprint_of(config), groups, torch.device("cpu"))
        held = {name.partition("/")[2]: state for name, state in state_of(stage).items()}
        biases = {}
        for name, full in tensors_of(folder, config.model, source.kind):
            for chunk, values in held[name].chunks if name in held else []:
                values.copy_(chunk.of(full))
            if name in states_of(config.model):
                biases[name] = full
        decoder = Decoder(config.model, groups, stage)
        logits = [decoder.logits(tokens[:n]) for n in range(4, len(tokens) + 1)]
        weights = gather_parameters(stage.parameters(), groups)
        found.append((torch.stack(logits) if stage.last else None, weights | biases))
    groups.close()
    return found


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    """Returns the logits of the tokens from the fourth on, each after the text up to itself.

    LongRoPE's factors change after 8 tokens, for all tokens of a text.
    """
    model.eval()
    with torch.no_grad():
        short, long = (model(torch.tensor([text])).logits[0] for text in (tokens[:8], tokens))
    return torch.cat((short[3:], long[8:]))


def test_logits_are_those_of_transformers_in_both_directions(pool: Pool, tmp_path: Path) -> None:
    # Importing it takes seconds, which a selection of other tests need not spend.
    import transformers

    torch.manual_seed(5)
    models = {}
    for kind, changes in THEIRS.items():
        model_type = DIALECTS[kind][0] if kind in DENSE else kind
        config = transformers.AutoConfig.for_model(model_type, **SIZES | changes)
        models[kind] = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in models[kind].parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))  # norms and biases, too
            for name, buffer in models[kind].named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(0.3 * torch.randn_like(buffer))
        models[kind].save_pretrained(tmp_path / kind)
    tokens = torch.randint(0, 61, (24,)).tolist()
    folders = [tmp_path / kind for kind in models]
    by_rank = pool.run(LAYOUT.world_size, read_and_give_back, folders, tokens)
    for (kind, theirs), of_ranks in zip(models.items(), zip(*by_rank, strict=True), strict=True):
        expected = logits_of(theirs, tokens)
        assert expected.std() > 0.3
        near = 1e-5 * float(expected.abs().max())
        last = [logits for logits, _ in of_ranks if logits is not None]
        assert len(last) == LAYOUT.tp
        for ours in last:
            torch.testing.assert_close(ours, expected, rtol=0, atol=near)
        weights = of_ranks[0][1]
        keys = read_hf_config(tmp_path / kind).keys
        back = tmp_path / f"{kind}_back"
        export_hf(
            replace(ModelConfig(), **keys),
            lambda names, weights=weights: {name: weights[name] for name in names},
            back,
            dtype="fp32",
            end_of_text=60,
            kept={"model_type": theirs.config.model_type},
        )
        again = transformers.AutoModelForCausalLM.from_pretrained(back)
        assert type(again) is type(theirs)
        torch.testing.assert_close(logits_of(again, tokens), last[0], rtol=0, atol=near)


# Sizes (tp, pp, dp, cp, ep) and the other keys of a run.
BEGUN: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((1, 1, 1, 1, 1), {}),
    ((2, 1, 2, 1, 4), {"sp": True, "keys": (("zero", 1),)}),
    ((1, 2, 2, 1, 2), {"keys": (("zero", 2),)}),
]


def begin(sizes: tuple[int, ...], way: dict[str, Any], folder: Path) -> tuple[Any, list[str], Any]:
    """Begins a run from a folder, and trains a step. Returns the full parameters before it, the
    states that this rank read wrongly, and the loss."""
    groups = plain_groups(Layout(*sizes))
    source = read_hf_config(folder)
    config = Case(Problem("olmoe_tiny", "sgd", tied=False), **way).config(groups.layout)
    config = replace(config, model=ModelConfig(**source.keys), init_from=str(folder))
    samples = UnequalMasks(config.model.vocab_size, config.model.seq_length)
    trainer = Trainer(config, groups, torch.device("cpu"), train_source=samples)
    load_initial(trainer, groups)
    weights = {name: w.float() for name, w in trainer.full_parameters().items()}
    quantization = source.quantization
    expected = dict(tensors_of(folder, config.model, source.kind, quantization=quantization))
    wrong = []
    for name, state in chunks_by_name(trainer.parameter_slices(), shared=False).items():
        if name.startswith("state/"):
            full = expected[name.removeprefix("state/")]
            wrong += [name for box, v in state.chunks if not torch.equal(v.float(), box.of(full))]
    loss = trainer.train_step().loss
    groups.close()
    return weights, wrong, loss


def quantize(folder: Path) -> None:
    """Writes projections of a folder in fp8; no rank's rows begin with a block."""
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if "_proj" in key]:
        tensors[key] = (tensors[key] * 4).to(torch.float8_e4m3fn)
        grid = (-(-tensors[key].shape[0] // 7), -(-tensors[key].shape[1] // 5))
        tensors[f"{key}_scale_inv"] = torch.rand(grid) * 0.3 + 0.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [7, 5]}
    (folder / "config.json").write_text(json.dumps(config))


def test_runs_begin_from_a_folder_with_experts_over_ep(pool: Pool, tmp_path: Path) -> None:
    for kind in ("glm4_moe", "qwen3_moe", "qwen3_next"):
        save_model(tmp_path / kind, kind, **SIZES | EXPERTS[kind])
        if kind == "qwen3_moe":
            quantize(tmp_path / kind)
        source = read_hf_config(tmp_path / kind)
        model, quantization = ModelConfig(**source.keys), source.quantization
        assert (quantization is not None) == (kind == "qwen3_moe")
        stored = tensors_of(tmp_path / kind, model, source.kind, quantization=quantization)
        expected = dict(stored)
        losses = []
        for sizes, way in BEGUN:
            if model.num_experts % sizes[-1]:
                continue
            by_rank = pool.run(math.prod(sizes[:4]), begin, sizes, way, tmp_path / kind)
            weights = by_rank[0][0]
            assert weights.keys() == expected.keys() - states_of(model)
            assert all(torch.equal(weights[name], expected[name]) for name in weights)
            assert [wrong for _, wrong, _ in by_rank if wrong] == []
            losses.append(by_rank[-1][2])
        assert len(losses) > 1
        assert all(abs(loss - losses[0]) < 1e-9 for loss in losses)
