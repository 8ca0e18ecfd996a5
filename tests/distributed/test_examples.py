"""Tests the scripts of examples/ on real ranks: their training does not depend on the layout."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from difflib import ndiff
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.more

EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 1e-9  # they compute in fp64


def run(name: str, *words: str) -> tuple[list[float], dict[str, Any]]:
    """Returns the losses that a script prints on this rank, and its full weights."""
    before, said = sys.argv, io.StringIO()
    sys.argv = [name, *words]
    try:
        with contextlib.redirect_stdout(said):
            names = runpy.run_path(str(EXAMPLES / name))
    finally:
        sys.argv = before
        torch.set_default_dtype(torch.float32)
    weights = names["weights"] if "weights" in names else names["net"].state_dict()
    weights = {name: value.cpu() for name, value in weights.items()}
    losses = re.findall(r"^step \d+: loss (.*)$", said.getvalue(), re.MULTILINE)
    return [float(loss) for loss in losses], weights


def on_every_rank(runs: list[tuple[str, ...]]) -> list[tuple[list[float], dict[str, Any]]]:
    return [run(*words) for words in runs]


def agree(found: dict[str, Any], wanted: dict[str, Any], what: object) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert float((found[name] - value).abs().max()) < TOLERANCE, (what, name)


ALONE = [
    ("image_classifier.py",),
    ("mlp_tensor_parallel.py",),
    ("cnn_pipeline.py",),
    ("all_three.py",),
    ("long_sequence.py",),
]
TOGETHER = {
    2: [
        ("image_classifier_ddp.py",),
        ("mlp_tensor_parallel.py",),
        ("cnn_pipeline.py", "zb_h1"),
        ("all_three.py", "2", "1"),
        ("long_sequence.py", "gather"),
        ("long_sequence.py", "heads"),
    ],
    3: [("long_sequence.py", "ring")],
    4: [("image_classifier_ddp.py",), ("mlp_tensor_parallel.py",), ("all_three.py", "1", "2")],
    8: [("all_three.py", "2", "2")],
}


def test_scripts_train_equally_on_one_rank_and_on_several(pool) -> None:
    (first,) = pool.run(1, on_every_rank, ALONE)
    alone = {words[0]: result for words, result in zip(ALONE, first, strict=True)}
    for losses, _ in alone.values():
        assert len(losses) == 20
        assert losses[-1] < 0.9 * losses[0]
    for ranks, runs in TOGETHER.items():
        by_rank = pool.run(ranks, on_every_rank, runs)
        for i, words in enumerate(runs):
            losses, weights = alone[words[0].replace("_ddp", "")]
            for result in by_rank:
                agree(result[i][1], weights, (ranks, words))
            if "ddp" not in words[0]:  # each rank prints the loss of its own part there
                assert by_rank[0][i][0] == pytest.approx(losses, abs=1.1e-4)


def test_at_most_three_lines_make_the_plain_script_data_parallel() -> None:
    """Compares the output with the docstring's."""
    plain, parallel = (
        [line for line in (EXAMPLES / name).read_text("utf-8").split('"""')[2].splitlines() if line]
        for name in ("image_classifier.py", "image_classifier_ddp.py")
    )
    changed = [line for line in ndiff(plain, parallel) if line.startswith("+ ")]
    removed = [line for line in ndiff(plain, parallel) if line.startswith("- ")]
    assert len(removed) <= len(changed) <= 3, changed
