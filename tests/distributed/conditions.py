"""Sets conditions under which features for large models take effect in tiny ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from parallel3d.pipeline import offload
from parallel3d.pipeline.offload import HostSlabs
from tests.kernels import no_kernels


@contextmanager
def tiny_slabs() -> Iterator[None]:
    """Offloads tensors of tiny models, each into many slabs; on the CPU, freed slabs are poisoned.

    On the simulated device the host may not write memory that a queued copy reads.
    """
    give = HostSlabs.give

    def poisoned(self: HostSlabs, slabs: list[Tensor]) -> None:
        if not self.pinned:
            for slab in slabs:
                slab.fill_(0xFF)  # NaN in every floating-point type
        give(self, slabs)

    with (
        patch.object(offload, "OFFLOADED_BYTES", 100),
        patch.object(offload, "SLAB_BYTES", 4001),  # A slab ends inside a number of 2 bytes.
        patch.object(HostSlabs, "give", poisoned),
    ):
        yield


@contextmanager
def of_matrix() -> Iterator[None]:
    """Sets the conditions of every training of the matrix."""
    with tiny_slabs(), no_kernels():
        yield
