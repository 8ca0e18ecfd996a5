"""Pools of workers, started at their first use and shared by all tests of a process of pytest.

They end with the tests of this folder: the groups that idle workers keep wake hundreds of times a
second, a fifth of a core in all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool
from tests.distributed.simulated import SimulatedPool


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    """Runs functions on real ranks: `pool.run(world_size, function, *args) -> results by rank`."""
    with Pool() as shared:
        yield shared


@pytest.fixture(scope="package")
def simulated() -> Iterator[SimulatedPool]:
    """As `pool`, on the simulated accelerator: these workers know no other device."""
    with Pool() as own:
        yield SimulatedPool(own)


@pytest.fixture(scope="package")
def references(pool: Pool) -> object:
    """What the independent reference makes of each problem, computed once."""
    # Imported here: tests of lower layers must run even while the trainer cannot be imported.
    from tests.distributed.harness import References

    return References(pool)
