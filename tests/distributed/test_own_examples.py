"""Tests the scripts with a model of their own, in examples/ and docs/own_model.md: their training
does not depend on the layout."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import parallel3d as p3d
from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.config.fields import with_values
from parallel3d.models.keys import ModelConfig
from parallel3d.models.own_model import own_config
from parallel3d.optim.keys import OWN
from parallel3d.run_config import Config
from tests.distributed.harness import plain_groups
from tests.distributed.own_models import Result, arrays, differences
from tests.distributed.pool import Pool
from tests.distributed.simulated import here

pytestmark = pytest.mark.nightly

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "own_model.md"
NAMES = ("own_llama", "own_recurrence", "own_two_losses", "own_vision", PAGE.stem)
STEPS, BATCH, LIMIT = 3, 16, 1e-9
# Sizes (tp, pp, dp) and keys of trainings on 2, 4 and 8 ranks.
LAYOUTS: Sequence[tuple[tuple[int, ...], Mapping[str, Any]]] = (
    ((2, 1, 1), {"recompute": "full"}),
    ((1, 2, 1), {"schedule.name": "zb_h1"}),
    ((1, 1, 2), {"zero": 3}),
    ((2, 2, 1), {"schedule.name": "interleaved", "vpp": 2}),
    ((1, 2, 2), {"zero": 2, "schedule.name": "zbv", "vpp": 2}),
    ((2, 2, 2), {"zero": 1}),
    ((4, 1, 2), {"zero": 2}),
)


class Bytes:
    """Text of few bytes, for the example that reads one."""

    seq_length, windows = 32, 64

    def sample(self, i: int) -> p3d.Sample:
        rng = np.random.default_rng(i)
        return p3d.Sample(rng.integers(0, 9, self.seq_length + 1), rng.random(32) < 0.8)


def script_of(name: str, folder: Path) -> Path:
    """Returns an example, or the first script of the page, which it writes to `folder`."""
    if name != PAGE.stem:
        return EXAMPLES / f"{name}.py"
    code = PAGE.read_text("utf-8").split("```python\n")[1].split("```")[0]
    (folder / "my_train.py").write_text(code, encoding="utf-8")
    return folder / "my_train.py"


def parts_of(script: Path) -> dict[str, Any]:
    """Returns what a script gives `p3d.fit`."""
    given: dict[str, Any] = {}
    with patch.object(p3d, "fit", lambda words, **parts: given.update(words=words, **parts)):
        runpy.run_path(str(script), run_name="__main__")
    return given


def train(sizes: tuple[int, ...], keys: Mapping[str, Any], script: Path) -> Result:
    """Trains a script's model with its own keys, on every rank."""
    given, groups = parts_of(script), plain_groups(Layout(*sizes))
    words = dict(word.split("=", 1) for word in given["words"])
    own = {"optim.name": OWN} if "optimizer" in given else {}
    values = {
        **{key: float(value) if "e-" in value else int(value) for key, value in words.items()},
        **{"tp": groups.layout.tp, "pp": groups.layout.pp},
        **{"global_batch_size": BATCH, "micro_batch_size": 2, "precision.name": "fp64"},
        **{
            "train.steps": STEPS,
            "train.eval_every": 0,
            "sp": script.stem == "own_llama" and sizes[0] > 1,
        },
        **own,
        **keys,
    }
    small = {"seq_length": 32} if script.stem == "own_llama" else {}
    config = with_values(Config(), values)
    config = dataclasses.replace(config, model=own_config(ModelConfig(), given["model"](**small)))
    source = given.get("train", Bytes())
    parts = {"valid_source": given.get("valid", source), "optimizer": given.get("optimizer")}
    trainer = Trainer(config, groups, here(), train_source=source, **parts)
    found = Result()
    for _ in range(STEPS):
        step = trainer.train_step()
        found.losses.append(step.loss)
        found.grad_norms.append(step.grad_norm)
        found.terms.append(dict(step.terms))
    found.weights = arrays(trainer.full_parameters())
    groups.close()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains_equally_on_one_rank_and_on_several(
    name: str, pool: Pool, tmp_path: Path
) -> None:
    script = script_of(name, tmp_path)
    (alone,) = pool.run(1, train, (1, 1, 1), {}, script)
    for sizes, keys in LAYOUTS:
        found = pool.run(Layout(*sizes).world_size, train, sizes, keys, script)[0]
        assert differences(found, alone, LIMIT) == [], (sizes, keys)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_an_example_has_less_than_a_hundred_lines(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text("utf-8").splitlines()) < 100
