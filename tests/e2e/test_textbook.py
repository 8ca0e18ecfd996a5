"""Textbook collectives as typed, and on a network with a set latency."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import ROOT, Shell
from tests.e2e.here import answer
from tests.e2e.rails import why_not
from tests.reference import textbook


def test_a_word_that_is_no_answer_is_refused_in_one_line(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = answer(shell, capfd, "bench", "comm", "device=cpu", "dp=2", "algorithms=ring")
    assert ended.code == 2
    (line,) = ended.errors
    assert "algorithms=ring" in line and "true" in line


TUN = "/dev/net/tun"


def why_no_latency() -> str | None:
    """CI has a network of rails, and must not pass by skipping; a kernel may lack what stands in
    for a wire's latency, which no setup brings."""
    reason = None if os.environ.get("CI") else why_not()
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        reason = reason or f"a latency needs {TUN} for its NICs: {error.strerror}"
    return reason


REASON = why_no_latency()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_on_rails_with_a_latency_no_form_is_right_sooner_than_its_price(tmp_path: Path) -> None:
    # How much later is this machine's business: docs/collectives.md says it for a hundred cases.
    rows = tmp_path / "rows.json"
    words = ("--cases", "8", "--repeats", "1", "--latency-us", "2000", "--rail-mbit", "400")
    command = (sys.executable, "-m", "benchmarks.textbook", *words, "--json", str(rows))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ratios = {(*case, form): seconds / priced
              for case, form, seconds, priced in json.loads(rows.read_text())}  # fmt: skip
    assert len(ratios) == sum(map(len, textbook.FORMS.values()))
    assert {key: ratio for key, ratio in ratios.items() if ratio < 0.99} == {}
