"""Trains models of the user's own that the command line names."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from parallel3d.metrics.jsonl import rows_of
from tests.e2e.command import TINY, TORCHRUN, Shell

pytestmark = pytest.mark.nightly

WORDS = [word for word in TINY if not word.startswith("model.")]
WORDS += ["precision=fp64", "optim.lr_decay_style=constant", "checkpoint.every=3"]
MODULE = """
from dataclasses import dataclass

import torch
from torch import nn

import parallel3d as p3d


class Embedding(nn.Embedding):
    def forward(self, inputs):
        return super().forward(inputs.batch["tokens"])


class Block(nn.Linear):
    def forward(self, x, inputs):
        return x + torch.tanh(super().forward(x))


class Head(nn.Linear):
    def forward(self, x, inputs):
        return super().forward(x)


@dataclass
class Chain(p3d.Model):
    hidden: int
    num_layers: int = 2
    seq_length: int = 16
    vocab_size: int = 257

    def embedding(self, parallel):
        return Embedding(self.vocab_size, self.hidden)

    def block(self, number, parallel):
        return Block(self.hidden, self.hidden)

    def head(self, parallel):
        return Head(self.hidden, self.vocab_size)

    def loss(self, outputs, inputs):
        labels, mask = inputs.batch["labels"], inputs.batch["loss_mask"]
        losses = nn.functional.cross_entropy(outputs.mT, labels, reduction="none")
        return p3d.Loss((losses * mask).sum(), mask.sum())
"""
PRESET = "_target_: chains.model.Chain\nhidden: 8\n"


def test_a_model_of_a_preset_is_resumed_under_another_layout_and_refused_with_another_field(
    shell: Shell,
) -> None:
    for name, text in ("chains/model.py", MODULE), ("mine/model/chain.yaml", PRESET):
        path = shell.cwd / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    mine, typed = ("--config-dir=mine", "model=chain"), "model._target_=chains.model.Chain"
    words = (*WORDS, *shell.text())
    train = (sys.executable, "-m", "parallel3d", "train")
    whole = shell.run(*train, typed, "model.hidden=8", "run=whole", *words, "train.steps=6")
    assert whole.code == 0, whole.err
    first = shell.run(*train, *mine, "tp=2", "pp=2", "run=parts", *words)
    assert first.code == 0, first.err
    refused = shell.run(*train, typed, "model.hidden=16", "run=parts", *words, "train.steps=6")
    assert refused.code == 2
    assert "model.hidden is 8 there, now 16" in refused.err
    launched = (*TORCHRUN, "--nproc-per-node", "2", "-m", "parallel3d", "train")
    again = shell.run(*launched, typed, "tp=1", "pp=2", "run=parts", *words, "train.steps=6")
    assert again.code == 0, again.err
    curves = [
        [r["loss"] for r in rows_of(shell.cwd / "runs" / run / "metrics.jsonl") if "loss" in r]
        for run in ("whole", "parts")
    ]
    assert len(curves[0]) == 6
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)
    # The code is gone, and nothing needs it that does not compute with the model.
    shutil.rmtree(shell.cwd / "chains")
    for command in (
        ["report", "run=parts"],
        ["checkpoint", "verify", "run=parts"],
        ["checkpoint", "average", "run=parts", "last=2", "to=mean"],
    ):
        ended = shell.run(sys.executable, "-m", "parallel3d", *command)
        assert ended.code == 0, ended.err
    unnamed = shell.run(*train, "run=parts", "train.steps=9")
    assert unnamed.code == 2
    assert f"give {typed}" in unnamed.err
    written = shell.run(sys.executable, "-m", "parallel3d", "generate", "run=parts")
    assert written.code == 2
    assert "generate run=parts is for text and the transformer of parallel3d" in written.err
    assert all("Traceback" not in each.err for each in (refused, unnamed, written))
    start = (shell.cwd / "runs" / "parts" / "starts.jsonl").read_text().splitlines()[0]
    assert json.loads(start)["layout"]["tp"] == 2
