"""Holds the parts of a run that a script brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.loop.hooks import Hook


@dataclass(frozen=True)
class OwnParts:
    """The parts of a run that a script gives `fit`; what it leaves out is the configuration's.

    Attributes:
        hooks: hooks around the steps, in the order in which they are called.
    """

    hooks: Sequence[Hook] = ()
