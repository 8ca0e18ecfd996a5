"""Tests which samples of a script are taken, and what is said of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from parallel3d.data.loader import with_length
from parallel3d.errors import UserError
from parallel3d.loop.own_parts import opened
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.own_model import Model, Parallel, own_config
from parallel3d.run_config import Config


class Part(nn.Module):
    def forward(self, x: Any, inputs: LayerInputs | None = None) -> Tensor:
        raise NotImplementedError


@dataclass
class Points(Model):
    num_layers: int = 1

    def embedding(self, parallel: Parallel) -> nn.Module:
        return Part()

    def block(self, number: int, parallel: Parallel) -> nn.Module:
        return Part()

    def head(self, parallel: Parallel) -> nn.Module:
        return nn.Linear(1, 1)


@dataclass
class Text(Points):
    seq_length: int = 32


class Source:
    windows = 10

    def sample(self, i: int) -> dict[str, float]:
        return {"x": 1.0 * i}


class Long(Source):
    seq_length = 64


def config_of(model: Model | None, **train: Any) -> Config:
    config = Config()
    if model is not None:
        config.model = own_config(ModelConfig(), model)
    for name, value in train.items():
        setattr(config.train, name, value)
    return config


def test_samples_of_an_own_model_need_no_length() -> None:
    config, source = config_of(Points()), Source()
    assert opened(source, "train", config) is source  # type: ignore[arg-type]
    assert isinstance(opened(lambda config: Source(), "train", config), Source)
    assert opened(Source(), "train", config_of(Text())) is not None
    long = Long()  # what a sample consists of is the model's business
    assert opened(long, "train", config) is long  # type: ignore[arg-type]


def test_an_epoch_of_samples_without_tokens_counts_each_as_one() -> None:
    config = config_of(Points(), steps=1, epochs=1.5)
    assert with_length(config.train, Source(), config.model.seq_length).tokens == 15.0
    config = config_of(Text(), epochs=1.5)
    assert with_length(config.train, Source(), config.model.seq_length).tokens == 15.0 * 32


BAD: dict[str, tuple[Any, Model | None, str]] = {
    "no samples": (lambda config: [1], Points(), r"must give an object with sample\(i\), or a fun"),
    "no method": (
        lambda config: type("Odd", (), {"sample": 3})(), Points(), r"with sample\(i\), .*gives Odd"
    ),
    "no length": (Source(), None, r"must give an object with seq_length and sample\(i\)"),
    "another length": (
        Long(), Text(), "samples of 64 tokens, but must have model.seq_length=32; the nearest is"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_other_samples_are_refused(name: str) -> None:
    given, model, said = BAD[name]
    with pytest.raises(UserError, match=said):
        opened(given, "train", config_of(model))


def test_an_evaluation_of_all_samples_needs_their_number() -> None:
    class Endless:
        def sample(self, i: int) -> dict[str, float]:
            return {"x": 1.0 * i}

    config = config_of(Points(), eval_batches=None)
    assert opened(Source(), "valid", config) is not None  # type: ignore[arg-type]
    with pytest.raises(UserError, match="must have their number as windows"):
        opened(Endless(), "valid", config)
