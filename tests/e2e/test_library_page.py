"""Runs docs/library.md as it stands: on one process, and with all of its examples on two."""

from __future__ import annotations

import re

import pytest

from tests.e2e.command import ROOT, Shell
from tests.e2e.forked import run_forked

pytestmark = pytest.mark.more

PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
TRAINS, OWN_SAMPLES, PROOF = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def with_three_steps(script: str) -> str:
    shorter = script.replace('"train.steps=100"', '"train.steps=3"')
    assert shorter != script
    return shorter


def with_all() -> str:
    """Returns the script with the page's other examples, before the groups are closed."""
    training, closing = TRAINS.split("groups.close()")
    return "\n".join((training, OWN_SAMPLES, PROOF, "groups.close()" + closing))


def run(shell: Shell, script: str, ranks: int) -> str:
    """Returns the script's output on rank 0, in a folder with a book, with three steps instead of a
    hundred; on two ranks like under torchrun."""
    (shell.cwd / "book.txt").write_text(PAGE * 4, encoding="utf-8")
    shell.environ |= {"XDG_CACHE_HOME": str(shell.cwd)}
    ended = run_forked(shell, "-c", with_three_steps(script), ranks=ranks)
    assert ended.code == 0, ended.err
    return ended.out


def test_the_page_trains_the_same_model_on_one_process_and_on_two(shell: Shell) -> None:
    """Runs the page's other examples, too, on two ranks."""
    assert len(TRAINS.splitlines()) <= 30
    alone = run(shell, TRAINS, 1)
    assert (shell.cwd / "weights.pt").stat().st_size > 1_000_000
    both = run(shell, with_all(), 2)
    losses = [
        [float(loss) for loss in re.findall(r"^step \d: loss (.*)$", out, re.MULTILINE)]
        for out in (alone, both)
    ]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    assert "The layout does not change the model." in both
    assert (shell.cwd / "verify.json").exists()
