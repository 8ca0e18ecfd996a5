"""Tests which defaults act on finished weights, and what a start says about them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from parallel3d.commands.checkpoint.huggingface import _configuration
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.loop.notices import acts_on_weights
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig
from parallel3d.run_config import Config
from parallel3d.tensor_parallel.keys import LossConfig

DENSE = ModelConfig(num_layers=2)
MIXTURE = replace(
    DENSE, num_experts=8, experts_per_token=2, router_score="sigmoid", router_bias=True
)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            Config(model=DENSE),
            ["optim.lr=0.001", "weight_decay=0.1 takes up to 0.01 % of a matrix"],
        ),
        (
            Config(model=DENSE, optim=OptimConfig(groups={"embedding.*": {"wd_mult": 4}})),
            ["takes up to 0.04 % of a matrix a step"],
        ),
        (
            Config(model=MIXTURE, optim=OptimConfig(weight_decay=0)),
            ["gradients at optim.lr=0.001; moe.bias_update_rate=0.001 moves routers' biases"],
        ),
        (
            Config(model=MIXTURE, moe=ExpertsConfig(bias_update_rate=0, aux_loss=0.01)),
            ["moe.aux_loss=0.01 acts on", "biases stay as they are (moe.bias_update_rate=0)"],
        ),
        (
            Config(model=replace(DENSE, dropout=0.1), loss=LossConfig(z_loss=0.0001)),
            ["model.dropout=0.1, loss.z_loss=0.0001 act on the gradients"],
        ),
    ],
)
def test_a_start_says_what_changes_finished_weights(config: Config, words: list[str]) -> None:
    sentence = acts_on_weights(config)
    assert all(word in sentence for word in words), sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rate"), [([], 0.0), (["moe.bias_update_rate=0.001"], 0.001), (["moe.z_loss=1"], 0.0)]
)
def test_an_imported_router_keeps_its_biases(tmp_path: Path, words: list[str], rate: float) -> None:
    keys = asdict(MIXTURE) | {"norm": "rmsnorm", "bias": False}
    config = _configuration(tmp_path, "new", tmp_path, keys, words)
    assert config.moe.bias_update_rate == rate


def test_other_imports_keep_the_default_rate(tmp_path: Path) -> None:
    config = _configuration(tmp_path, "new", tmp_path, asdict(DENSE), [])
    assert config == replace(config, moe=Config().moe)
