"""`recompute`: the parts of a layer that are made again in the backward, by name.

What each of them keeps and makes again is said in `models/recompute.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from parallel3d.errors import nearest

PARTS = ("norm", "activation", "attention", "mlp", "layer")
WORDS: dict[str, tuple[str, ...]] = {"none": (), "selective": ("attention",), "full": ("layer",)}
_IMPLIED = {"mlp": ("activation",), "layer": PARTS[:-1]}


def listed(recompute: str | Sequence[str]) -> tuple[str, ...]:
    """The parts that a word, a part, a list of parts or one that is spelled `[norm,mlp]` names."""
    if not isinstance(recompute, str):
        return tuple(recompute)
    if recompute in WORDS:
        return WORDS[recompute]
    return tuple(part.strip() for part in recompute.strip("[]").split(",") if part.strip())


def parts_of(recompute: str | Sequence[str]) -> frozenset[str]:
    """Those that are named, without what others of them imply."""
    return _least(listed(recompute))


@functools.lru_cache(maxsize=256)
def _least(parts: tuple[str, ...]) -> frozenset[str]:
    return frozenset(parts).difference(*(_IMPLIED.get(part, ()) for part in parts))


def spelled(recompute: str | Sequence[str]) -> str:
    """As it is typed: the word for it where there is one, else `parts_of` in the order of PARTS."""
    least = tuple(sorted(parts_of(recompute), key=PARTS.index))
    return next((word for word, means in WORDS.items() if means == least), f"[{','.join(least)}]")


def wrong_parts(recompute: object) -> str | None:
    """None for what `recompute` may be, else the nearest, as it is typed."""
    if isinstance(recompute, str):
        if recompute in WORDS or (recompute and set(listed(recompute)) <= {*PARTS}):
            return None
        return nearest(recompute, (*WORDS, *PARTS)) or "none"
    if not isinstance(recompute, (list, tuple)):
        return "none"
    if all(part in PARTS for part in recompute):
        return None
    near: list[str] = []
    for part in map(str, recompute):
        close = nearest(part, (*PARTS, *WORDS))
        near += WORDS.get(close or "", [close] if close else [])
    return spelled(near)
