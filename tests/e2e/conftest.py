"""Gives each test a shell in an empty directory; runs tests at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.at_once import (  # noqa: F401
    beside,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_pyfunc_call,
)
from tests.e2e.command import Shell


@pytest.fixture
def shell(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path, scratch=tmp_path_factory.mktemp("scratch"))
    yield shell
    shell.end_all()
