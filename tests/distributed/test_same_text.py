"""Tests ranks whose texts differ: they are refused before the first step, under any layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel3d.blueprint.layout import Layout
from parallel3d.commands.train import train
from parallel3d.data.corpus import Corpus
from parallel3d.data.keys import DataConfig
from parallel3d.data.loader import check_same_text
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config
from tests.distributed.harness import plain_groups
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly


def refusal(folder: Path, layout: dict[str, int], texts: list[str]) -> str | None:
    """Returns the error of `train` on this rank; None if it gets as far as the model."""
    rank = dist.get_rank()
    data = DataConfig(name="text", path=str(folder / texts[rank]), cache_dir=str(folder / "cache"))
    config = Config(
        model=ModelConfig(name="gpt_tiny", seq_length=32),
        data=data,
        launch=LaunchConfig(shared_memory=False),
        runs_dir=str(folder),
        **layout,
    )
    worker = Worker(rank, rank, len(texts), len(texts), folder, "local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "parallel3d.loop.open_data.Trainer", lambda *_, **__: (_ for _ in ()).throw(EOFError)
        )
        try:
            train(config, worker)
        except EOFError:
            return None
        except UserError as error:
            return str(error)
    raise AssertionError("it trained")


def answers(of_ranks: list[list[str]]) -> list[str | None]:
    """Returns this rank's errors for equal tokens, for each list of tokenizers by rank."""
    tokens, world, found = np.zeros(9, np.int64), plain_groups(Layout(dp=2)).world, []
    for tokenizers in of_ranks:
        corpus = Corpus(tokens, tokens, "f" * 32, 257, 256, tokenizers[dist.get_rank()])
        try:
            found.append(check_same_text(corpus, world, torch.device("cpu")))
        except UserError as error:
            found.append(str(error))
    return found


def test_ranks_with_other_tokenizers_for_the_same_tokens_are_refused(pool: Pool) -> None:
    mine, theirs = pool.run(2, answers, [["a" * 32, "a" * 32], ["a" * 32, "b" * 32]])
    assert mine == theirs
    same, first = mine
    assert same is None and first is not None
    assert "tokenizer aaaaaaaaaaaa) and rank 1" in first and "tokenizer bbbbbbbbbbbb)" in first


def test_ranks_with_other_text_are_refused_with_two_of_them(pool: Pool, tmp_path: Path) -> None:
    text = b"abcdefgh" * 200
    for name, content in (("a", text), ("longer", text + b"x"), ("other", text[::-1])):
        (tmp_path / name).write_bytes(content)
    stages, replicas = {"pp": 2, "dp": 1}, {"dp": 2}
    assert pool.run(2, refusal, tmp_path, stages, ["a", "a"]) == [None, None]
    for layout, name, tokens in ((stages, "longer", "1,602"), (replicas, "other", "1,601")):
        first, second = pool.run(2, refusal, tmp_path, layout, ["a", name])
        assert first == second
        assert "rank 0 on " in first and f"reads {tokens} tokens (fingerprint " in first
        assert "rank 1 on " in first and "reads 1,601 tokens (" in first
