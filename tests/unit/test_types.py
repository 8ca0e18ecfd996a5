"""Runs mypy over the package and the benchmarks, with the settings of pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.more, pytest.mark.first]

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_package_and_benchmarks_have_no_type_errors() -> None:
    command = (sys.executable, "-m", "mypy", "--no-error-summary")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
