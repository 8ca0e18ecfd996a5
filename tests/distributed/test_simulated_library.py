"""Tests the library's examples and its page on the simulated accelerator: they follow
`groups.device`."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

from tests.distributed.simulated import SimulatedPool, here
from tests.distributed.test_examples import agree, on_every_rank
from tests.e2e.test_library_page import PAGE, with_all, with_three_steps

pytestmark = pytest.mark.more

RUNS = [("cnn_pipeline.py", "zb_h1"), ("all_three.py", "2", "1")]  # layouts that use all parts


def test_examples_train_equally_on_one_device_and_on_two(simulated: SimulatedPool) -> None:
    (alone,) = simulated.run(1, on_every_rank, [(name,) for name, *_ in RUNS])
    for found in simulated.run(2, on_every_rank, RUNS):
        for words, (_, ours), (losses, theirs) in zip(RUNS, found, alone, strict=True):
            assert losses[-1] < 0.9 * losses[0], words
            agree(ours, theirs, words)


def page(folder: Path) -> tuple[str, str]:
    """Returns the output of the page's script, and the device that it used."""
    os.chdir(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    taken = str(here())
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(with_three_steps(with_all()), names)
    assert str(names["groups"].device) == taken
    return said.getvalue(), taken


def test_the_library_pages_script_trains_and_verifies(
    simulated: SimulatedPool, tmp_path: Path
) -> None:
    (tmp_path / "book.txt").write_text(PAGE * 4, encoding="utf-8")
    (said, first), (_, second) = simulated.run(2, page, tmp_path)
    assert (first, second) == ("simulated:0", "simulated:1")
    assert len(re.findall(r"^step \d: loss", said, re.MULTILINE)) == 3
    assert "The layout does not change the model." in said
