"""Runs tests of a module at the same time, because their commands mostly wait.

`pytestmark = pytest.mark.at_once(3)` runs up to three of a module's tests at a time, each in a
thread and with a shell of its own. They take a `shell` and their parameters, nothing else. Each is
still reported by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.e2e.command import Shell


@dataclass
class Beside:
    """The selected tests of one module, all of which run from the first call on."""

    pool: ThreadPoolExecutor
    shells: list[Shell] = field(default_factory=list)
    futures: dict[str, Future[None]] = field(default_factory=dict)

    def submit(self, item: pytest.Function, shell: Shell) -> None:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        self.shells.append(shell)
        self.futures[item.nodeid] = self.pool.submit(item.obj, shell=shell, **given)

    def end(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        for shell in self.shells:
            shell.end_all()
        self.pool.shutdown()


@pytest.fixture(scope="module")
def beside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beside]:
    """Starts the module's tests that this session has selected."""
    items = [i for i in request.session.items if i.module is request.module]
    together = Beside(ThreadPoolExecutor(items[0].get_closest_marker("at_once").args[0]))
    try:
        for item in items:
            cwd = tmp_path_factory.mktemp(item.originalname)
            together.submit(item, Shell(cwd, scratch=tmp_path_factory.mktemp("scratch")))
        yield together
    finally:
        together.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives a test of such a module the fixture that runs them, although it does not ask for it."""
    for item in items:
        if item.get_closest_marker("at_once"):
            item.fixturenames.append("beside")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Waits for the test instead of calling it."""
    if not pyfuncitem.get_closest_marker("at_once"):
        return None
    pyfuncitem.funcargs["beside"].futures[pyfuncitem.nodeid].result()
    return True


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "at_once(n): n of the module's tests at a time")
