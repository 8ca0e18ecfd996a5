"""What ranks say of a save: how their part of it went, and how it ended."""

from __future__ import annotations

import dataclasses
import traceback
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from parallel3d.checkpoint.boxes import LogicalTensor
from parallel3d.checkpoint.manifest import FileDigest


@dataclass(frozen=True)
class Outcome:
    """How a save ended: `problem` is None, or says why there is no new checkpoint.

    `is_bug`: not the disk's fault, but ours. `is_overtaken`: another start has the run now.
    `notes`: sentences on what went wrong beside it and changes nothing.
    """

    step: int
    problem: str | None = None
    is_bug: bool = False
    is_overtaken: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenFile:
    """What a rank wrote: its file (None if it had nothing to write) and the elements in it."""

    file: FileDigest | None
    elements: dict[str, int]
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """What JSON has of it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, word: dict[str, Any]) -> WrittenFile:
        file = FileDigest(**word["file"]) if word["file"] else None
        outcome = Outcome(**word["outcome"] | {"notes": tuple(word["outcome"]["notes"])})
        return cls(file, word["elements"], outcome)


def elements_by_kind(state: dict[str, LogicalTensor]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name, tensor in state.items():
        counts[name.partition("/")[0]] += sum(box.elements for box, _ in tensor.boxes)
    return dict(counts)


def summed(counts: list[dict[str, int]]) -> dict[str, int]:
    kinds = sorted({kind for count in counts for kind in count})
    return {kind: sum(count.get(kind, 0) for count in counts) for kind in kinds}


def failed(step: int, rank: int, error: Exception) -> Outcome:
    """A full or broken disk is said in words, a mistake of ours with its trace."""
    if isinstance(error, OSError):
        return Outcome(step, f"{error.strerror or error} (rank {rank})")
    trace = "".join(traceback.format_exception(error))
    return Outcome(step, f"rank {rank}: {trace}", is_bug=True)
