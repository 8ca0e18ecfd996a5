"""Tests reference collectives on the command line, and on a network with a set latency."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.command import Shell
from tests.e2e.forked import run_forked
from tests.e2e.here import answer
from tests.e2e.rails import why_not
from tests.e2e.ready import MODULE, run_module
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


TUN = "/dev/net/tun"


def why_no_latency() -> str | None:
    """Returns why no latency can be set here. CI has a network of rails, and must not pass by
    skipping; but a kernel may lack the module that adds a wire's latency, which no setup
    installs."""
    reason = None if os.environ.get("CI") else why_not()
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        reason = reason or f"a latency needs {TUN} for its NICs: {error.strerror}"
    return reason


REASON = why_no_latency()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_on_rails_with_a_latency_no_form_is_faster_than_its_price(tmp_path: Path) -> None:
    # The additional time depends on this machine: docs/collectives.md gives it for a hundred cases.
    rows = tmp_path / "rows.json"
    words = ("--cases", "8", "--repeats", "1", "--latency-us", "2000", "--rail-mbit", "400")
    done = run_module("benchmarks.network.textbook", *words, "--json", str(rows))
    assert done.returncode == 0, done.stderr
    ratios = {(*case, form): seconds / priced
              for case, form, seconds, priced in json.loads(rows.read_text())}  # fmt: skip
    assert len(ratios) == sum(map(len, formulas.FORMS.values()))
    assert {key: ratio for key, ratio in ratios.items() if ratio < 0.99} == {}
