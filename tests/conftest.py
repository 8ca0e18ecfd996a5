"""What every test process needs before torch is imported: one thread, and gloo on the loopback."""

from __future__ import annotations

import os

import pytest

# Ranks share two cores: more threads a rank only fight. Workers inherit both settings.
os.environ["OMP_NUM_THREADS"] = "1"
# Without an interface gloo resolves this machine's host name: seconds where DNS is out of reach.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="exactness tests: every combination in every layout (minutes), not a covering set",
    )
