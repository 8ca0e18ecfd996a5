"""Pools of workers, started at their first use and shared by all tests of a pytest process.

They end with the tests of this folder: the groups of idle workers wake hundreds of times a second,
which costs a fifth of a core in all.
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
    """Does the same as `pool` on the simulated accelerator: these workers have no other device."""
    with Pool() as own:
        yield SimulatedPool(own)


@pytest.fixture(scope="package")
def references(pool: Pool) -> object:
    """Returns the independent reference's results of each problem, computed once."""
    # Imported here: tests of lower layers must run even while the trainer cannot be imported.
    from tests.distributed.harness import References

    return References(pool)
