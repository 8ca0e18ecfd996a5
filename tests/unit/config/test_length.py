"""Tests the length of a run in steps, tokens and epochs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.values import BatchSizes
from parallel3d.data.loader import with_length
from parallel3d.data.sampler import Sample
from parallel3d.errors import UserError
from parallel3d.loop.keys import TrainConfig
from parallel3d.metrics.screen import length_words
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config, check_config


class Windows:
    seq_length, windows, masks = 64, 10, False

    def sample(self, i: int) -> Sample:
        return Sample(np.arange(65) + i % self.windows, np.ones(64, bool))


def test_tokens_are_steps_of_the_batch_schedule() -> None:
    config = run_of(tokens=64 * 100)
    config.train.batch_schedule = {0: 4, "40.0": 16}  # 4e1 in a manifest
    assert check_config(config).train_steps == 14  # ten steps of 4, then four of 16
    assert config.batch_sizes.samples(14) == 104
    short = dataclasses.replace(run_of(steps=1), global_batch_size=4)
    assert (
        length_words(short.model.seq_length, short.planned_length.after()) == "1 steps · 256 tokens"
    )
    assert (
        length_words(config.model.seq_length, config.planned_length.after(), 200)
        == "14 steps · 6.66 k tokens · 0.52 epochs"
    )


def run_of(**length: float) -> Config:
    model = ModelConfig(seq_length=64)
    return Config(dp=1, model=model, train=TrainConfig(**length))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({}, 600),
        ({"steps": 7}, 7),
        ({"tokens": 16 * 64 * 5}, 5),
        ({"tokens": 16 * 64 * 5 + 1}, 6),
        ({"tokens": 1}, 1),
        ({"tokens": 2e12}, 1_953_125_000),
        ({"epochs": 1.6}, 1),  # 16 samples of ten tokens are exactly a step
        ({"epochs": 1.61}, 2),
        ({"epochs": 1.1}, 1),  # 1.1 · 10 is above 11 in floating point
    ],
)
def test_tokens_and_epochs_round_up_to_whole_steps(length: dict[str, float], steps: int) -> None:
    config = check_config(run_of(**length))
    config = dataclasses.replace(config, train=with_length(config.train, Windows(), 64))
    assert config.train_steps == steps
    assert check_config(config) == config  # a checked configuration passes unchanged


def test_epochs_become_the_tokens_of_their_samples() -> None:
    train = with_length(run_of(epochs=1.1).train, Windows(), 64)
    assert (train.epochs, train.tokens) == (None, 11 * 64)


def test_epochs_of_a_source_of_unknown_size_are_refused() -> None:
    with pytest.raises(UserError, match="needs a source that has its number of samples"):
        with_length(run_of(epochs=2).train, object(), 64)  # type: ignore[arg-type]


def test_the_steps_of_epochs_are_unknown_before_the_data_is_open() -> None:
    config = check_config(dataclasses.replace(run_of(epochs=2), dp=1))
    with pytest.raises(ValueError, match="data is open"):
        _ = config.train_steps


def test_batch_sizes_are_counted_like_a_loop_over_the_steps() -> None:
    overtaken = (0, 20), (3, 1), (5, 7)
    for entries in (((0, 16),), ((0, 3), (10, 5)), ((0, 8), (4, 2), (9, 4)), overtaken):
        sizes, read = BatchSizes(entries), [0]
        while len(read) < 40:
            read.append(read[-1] + max(e for e in entries if e[0] <= read[-1])[1])
        assert [sizes.samples(n) for n in range(40)] == read
        for samples in range(40):
            assert sizes.steps(samples) == next(n for n, r in enumerate(read) if r >= samples)


def test_a_trainer_counts_the_epochs_of_its_own_samples() -> None:
    config = run_of(epochs=6.5)
    config.model.hidden_size, config.model.num_layers = 16, 1
    config.optim.lr_decay_style, config.optim.lr_decay_steps = "linear", None
    trainer = Trainer(config, ProcessGroups.single(), torch.device("cpu"), train_source=Windows())
    assert trainer.config.train_steps == 5  # 65 samples
    assert trainer.train_step().lr == pytest.approx(config.optim.lr * 4 / 5)
    config.optim.lr_warmup_steps = 5
    with pytest.raises(UserError, match=r"must be below train\.steps=5"):
        Trainer(config, ProcessGroups.single(), torch.device("cpu"), train_source=Windows())
