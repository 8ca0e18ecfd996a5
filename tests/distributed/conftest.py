"""Pools of workers, started at their first use and shared by all tests of a process of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool
from tests.distributed.simulated import SimulatedPool


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
