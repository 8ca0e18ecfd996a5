"""The pool of gloo workers, started at its first use and shared by the whole pytest session."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.distributed.simulated import SimulatedPool

SHARED = ("simulated", "references", "pool")  # of a file's fixtures, the first decides


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the files that share ranks to one of xdist's processes, which starts them once."""
    used: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        if item.path.parent == Path(__file__).parent:
            used[item.path] |= {*item.fixturenames} & {*SHARED}
    for item in items:
        if (found := used.get(item.path)) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(min(found, key=SHARED.index)))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Runs functions on real ranks: `pool.run(world_size, function, *args) -> results by rank`."""
    with Pool() as shared:
        yield shared


@pytest.fixture(scope="session")
def simulated() -> Iterator[SimulatedPool]:
    """As `pool`, on the simulated accelerator: these workers know no other device."""
    with Pool() as own:
        yield SimulatedPool(own)


@pytest.fixture(scope="session")
def references(pool: Pool) -> object:
    """What the independent reference makes of each problem, computed once a session."""
    # Imported here: tests of lower layers must run even while the trainer cannot be imported.
    from tests.distributed.harness import References

    return References(pool)
