"""Tests reference collectives on the command line."""

from __future__ import annotations

import pytest

from tests.e2e.command import Shell
from tests.e2e.forked import run_forked
from tests.e2e.here import answer
from tests.e2e.ready import MODULE
from tests.reference import collectives as formulas

pytestmark = pytest.mark.more


@pytest.mark.parametrize("key", ["algorithms", "bench.algorithms"])
def test_the_key_of_earlier_versions_is_refused_with_the_examples_command(
    shell: Shell, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    ended = answer(shell, capfd, "bench", "comm", "device=cpu", "dp=2", f"{key}=true")
    assert ended.code == 2
    (line,) = ended.errors
    assert f"{key}=true: " in line
    assert "torchrun --nproc-per-node 4 -m examples.collectives.compare" in line


def test_the_example_prints_what_its_page_shows(shell: Shell) -> None:
    """Runs the example on four ranks under torchrun."""
    words = ("examples.collectives.compare", "--bytes", "4096", "--calls", "1")
    done = run_forked(shell, "-c", MODULE, *words, ranks=4)
    assert done.code == 0, done.err
    rows = {tuple(line.split()[:2]) for line in done.out.splitlines()[1:-1]}
    assert rows == {(name, form) for name, forms in formulas.FORMS.items() for form in forms}
