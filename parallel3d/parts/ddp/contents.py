"""Whether a module still has the parameters and submodules with which it was wrapped."""

from __future__ import annotations

import operator
from itertools import chain

from torch import nn


class Contents:
    """What stands in each submodule of `module` when this is made."""

    def __init__(self, module: nn.Module) -> None:
        # The dicts themselves: to walk the tree in each forward takes six times as long.
        self._places = [d for m in module.modules() for d in (m._parameters, m._modules)]
        self._there = self._now()

    def changed(self) -> bool:
        """Whether a parameter or submodule was added, replaced or removed."""
        now = self._now()
        return len(now) != len(self._there) or not all(map(operator.is_, self._there, now))

    def _now(self) -> list[nn.Parameter | nn.Module | None]:
        return list(chain.from_iterable(d.values() for d in self._places))
