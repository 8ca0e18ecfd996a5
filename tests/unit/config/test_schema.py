"""Tests the dataclasses: derived sizes, and that OmegaConf accepts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from parallel3d import run_config
from parallel3d.config.fields import all_keys
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config, conf_dir, register_schema


def test_derived_sizes_of_a_model_with_everything_left_out() -> None:
    model = ModelConfig(hidden_size=96, num_attention_heads=6, seq_length=64, vocab_size=300)
    assert (model.head_size, model.kv_heads, model.ffn_size) == (16, 6, 384)
    assert (model.max_positions, model.padded_vocab_size) == (64, 384)


def test_derived_sizes_of_a_model_with_everything_given() -> None:
    model = ModelConfig(num_query_groups=2, ffn_hidden_size=100, max_position_embeddings=512)
    assert (model.kv_heads, model.ffn_size, model.max_positions) == (2, 100, 512)
    assert ModelConfig(hidden_size=50, num_attention_heads=4, head_dim=16).head_size == 16


@pytest.mark.parametrize(
    ("bias", "attention", "qkv", "out"),
    [
        (True, None, True, True),
        (False, None, False, False),
        (False, "qkv", True, False),
        (False, "all", True, True),
        (True, "none", False, False),
    ],
)
def test_biases_of_attention_are_those_of_the_model_unless_given(
    bias: bool, attention: str | None, qkv: bool, out: bool
) -> None:
    model = ModelConfig(bias=bias, attention_bias=attention)
    assert (model.qkv_bias, model.out_bias) == (qkv, out)


@pytest.mark.parametrize(
    ("vocab", "multiple", "padded"), [(256, 128, 256), (257, 128, 384), (257, 1, 257), (5, 8, 8)]
)
def test_the_vocabulary_is_padded_up_to_the_next_multiple(
    vocab: int, multiple: int, padded: int
) -> None:
    assert ModelConfig(vocab_size=vocab, vocab_multiple=multiple).padded_vocab_size == padded


def test_micro_batches_need_the_data_parallel_size() -> None:
    config = Config(micro_batch_size=2, global_batch_size=24, dp=3)
    assert config.num_microbatches == 4
    with pytest.raises(ValueError, match="check_config"):
        _ = Config().num_microbatches


def test_the_schema_survives_a_round_trip_through_omegaconf() -> None:
    assert OmegaConf.to_object(OmegaConf.structured(Config)) == Config()


def test_lists_are_not_shared_between_configurations() -> None:
    Config().logger.tags.append("mine")
    assert Config().logger.tags == []


def test_registering_twice_leaves_one_schema_with_every_key() -> None:
    register_schema()
    register_schema()
    stored = ConfigStore.instance().load("schema.yaml").node
    assert OmegaConf.to_container(stored) == OmegaConf.to_container(OmegaConf.structured(Config))


def test_the_packages_own_conf_folder_wins_over_the_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "parallel3d"
    package.mkdir()
    (tmp_path / "conf").mkdir()
    monkeypatch.setattr(run_config, "__file__", str(package / "run_config.py"))
    assert conf_dir() == tmp_path / "conf"
    (package / "conf").mkdir()
    assert conf_dir() == package / "conf"


def test_a_runs_keys_are_frozen() -> None:
    """Keys are permanent, since old runs have them for ever. A new key must be added to this file
    deliberately.

    The command that prints the list is
    python -c "from parallel3d.config.fields import *; from parallel3d.run_config import Config;
    print(*all_keys(Config), sep='\n')".
    """
    frozen = Path(__file__).with_name("run_keys.txt").read_text(encoding="utf-8").split()
    assert list(all_keys(Config)) == frozen
