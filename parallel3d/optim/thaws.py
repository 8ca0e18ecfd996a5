"""Records until when parameters of a run were frozen, because their moments began at zero then.

AdamW corrects its moments by the number of updates that they have had. For a parameter that was
frozen until update t of the run, this number is that of the run minus t. A checkpoint records one
`Thaw` for each list of patterns that sessions of the run have frozen, so that the record is small
and the same in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from parallel3d.optim.keys import OptimConfig

THAWS = "thaws"  # name of the record in a checkpoint's progress


class Thaw(NamedTuple):
    """The number of the run's updates until which the full tensors of `patterns` were frozen."""

    updates: int
    patterns: tuple[str, ...]


def thawed_at(name: str, thaws: Sequence[Thaw]) -> int:
    """Returns the number of the run's updates at which a full tensor's moments began."""
    frozen = (t.updates for t in thaws if any(fnmatchcase(name, p) for p in t.patterns))
    return max(frozen, default=0)


def thaws_of(
    progress: Mapping[str, Any], config: Mapping[str, Any], here: OptimConfig
) -> tuple[Thaw, ...]:
    """Returns the thaws of a run that continues from a checkpoint.

    Args:
        progress, config: those of the checkpoint.
        here: the optimizer that continues.
    """
    found = {thaw.patterns: thaw for thaw in read_thaws(progress)}
    patterns = frozen_in(config)
    if patterns and patterns != tuple(here.freeze or ()):
        found[patterns] = Thaw(int(progress["updates"]), patterns)
    return tuple(found.values())


def frozen_in(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the patterns of `optim.freeze` in the configuration of a checkpoint."""
    patterns = config.get("optim", {}).get("freeze")
    return tuple(map(str, patterns)) if isinstance(patterns, (list, tuple)) else ()


def read_thaws(progress: Mapping[str, Any]) -> list[Thaw]:
    """Returns the thaws that a checkpoint records; raises ValueError if they are malformed."""
    found = []
    for entry in progress.get(THAWS, []):
        updates, patterns = entry
        texts = isinstance(patterns, list) and all(isinstance(p, str) for p in patterns)
        if type(updates) is not int or not 0 <= updates <= progress["updates"] or not texts:
            raise ValueError(f"{THAWS} has {entry!r}")
        found.append(Thaw(updates, tuple(patterns)))
    return found
