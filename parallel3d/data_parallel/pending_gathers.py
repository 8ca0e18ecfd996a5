"""The all-gathers of stepped parameters (ZeRO 1) that are in flight while a forward begins."""

from __future__ import annotations

from collections.abc import Collection

from parallel3d.comm.collectives import Work
from parallel3d.comm.step_timer import StepTimer


class PendingGathers:
    """Joins the engine, which starts the all-gathers of buckets, and the layers that need them.

    It is made before both.

    Attributes:
        works: number of a bucket → the names of its parameters, and their all-gather.
    """

    def __init__(self, timer: StepTimer | None = None) -> None:
        self._timer = timer or StepTimer()
        self.works: dict[int, tuple[Collection[str], Work]] = {}

    def add(self, bucket: int, names: Collection[str], work: Work) -> None:
        """Adds the all-gather of a bucket, which holds the parameters with these names."""
        self.works[bucket] = names, work

    def wait_for(self, part: str) -> None:
        """Waits for the parameters of a part: "embedding", "layers.3" or "head".

        It also waits for all later buckets, which hold earlier parts. All ranks must ask for the
        parts in the same order.
        """
        if not self.works:
            return
        prefix = f"{part}."
        held = (
            bucket
            for bucket, (names, _) in self.works.items()
            if any(name.startswith(prefix) for name in names)
        )
        last = min(held, default=None)
        if last is None:
            return
        with self._timer.range("wait parameter all-gather"):
            for bucket in [bucket for bucket in self.works if bucket >= last]:
                self.works.pop(bucket)[1].wait()

    def wait_for_all(self) -> None:
        for bucket in list(self.works):
            self.works.pop(bucket)[1].wait()
