"""Cross-checks of the data of corpora, and the weights of a blend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from parallel3d.config.data import DataConfig
from parallel3d.config.fields import show
from parallel3d.errors import UserError, nearest

TOKENS = "tokens"  # as a weight: the data set's number of tokens
PACKED = ("corpus", "blend")
# The meaning of `data.path`, by the kind of source.
PATHS = {
    "text": "a file, a folder or a glob, as in data.path=book.txt, or leave data=stdlib",
    "corpus": "the prefix of a pair, its name without .bin and .idx, as in data.path=corpora/web",
    "chat": "jsonl, a conversation a row, as in data.path=sft.jsonl",
}


class Weights(NamedTuple):
    """Exact weights by prefix, from token `first` of the run on.

    None: the data set's number of tokens; the other weights are then numbers of tokens.
    """

    first: int
    by_prefix: Mapping[str, Fraction | None]


def check_corpora(data: DataConfig) -> None:
    """Checks `data.path`, blend and packing against each other; raises UserError."""
    if data.name in PATHS and not data.path:
        raise UserError(
            f"data={data.name} needs data.path, which is {show(data.path)}; give "
            f"{PATHS[data.name]}."
        )
    if data.name == "blend" and data.path is not None:
        raise UserError(
            f"data.path={show(data.path)} is not read by data=blend; the nearest is "
            f"'data.blend={{{data.path}:1}}'."
        )
    if data.name == "blend":
        blend_weights(data)
        return
    for name in ("blend", "blend_stages"):
        if (value := getattr(data, name)) is not None:
            raise UserError(
                f"data.{name}={show(value)} is not read by data={data.name}; the nearest is "
                "data=blend, which reads it."
            )


def blend_weights(data: DataConfig) -> list[Weights]:
    """Returns the weights of a blend and its later stages, in order; raises UserError."""
    if not data.blend:
        raise UserError(
            f"data=blend needs data.blend, which is {show(data.blend)}; give weights by prefix, as "
            "in 'data.blend={corpora/web:0.7,corpora/code:0.3}'."
        )
    stages = [Weights(0, _weights(data.blend, "data.blend"))]
    for typed, weights in (data.blend_stages or {}).items():
        name = f"data.blend_stages at {show(typed)}"
        first = _token(typed)
        if first <= stages[-1].first:
            near = stages[-1].first + 1
            raise UserError(
                f"{name} must be a number of tokens, above {stages[-1].first:,} of the stage "
                f"before it; the nearest is {near}."
            )
        if not isinstance(weights, dict) or not weights:
            raise UserError(
                f"{name} is {show(weights)}, and must be weights by prefix; as in "
                f"'data.blend_stages={{{first}:{{corpora/web:0.5,corpora/math:0.5}}}}'."
            )
        stages.append(Weights(first, _weights(weights, name)))
    return stages


def _token(typed: Any) -> int:
    """Returns a number of tokens, typed as 1000000000 or 1e9; -1 for other text."""
    try:
        number = Fraction(str(typed))
    except (ValueError, ZeroDivisionError):
        return -1
    return int(number) if number.denominator == 1 and number < 2**63 else -1


def _weights(given: Mapping[Any, Any], name: str) -> dict[str, Fraction | None]:
    weights: dict[str, Fraction | None] = {}
    for prefix, typed in given.items():
        what = f"{name} gives {show(str(prefix))} the weight {show(typed)}"
        if typed == TOKENS:
            weights[str(prefix)] = None
            continue
        if isinstance(typed, str):
            close = nearest(typed, [TOKENS]) or "1"
            raise UserError(
                f"{what}: it must be a number above 0 or {TOKENS}; the nearest is {close}."
            )
        is_number = isinstance(typed, (int, float)) and not isinstance(typed, bool)
        if not is_number or not math.isfinite(typed) or typed <= 0:
            raise UserError(
                f"{what}: it must be a number above 0 or {TOKENS}; the nearest is to leave "
                f"{show(str(prefix))} out."
            )
        weights[str(prefix)] = Fraction(repr(typed))
    small = next(((p, w) for p, w in weights.items() if w is not None and w < 1), None)
    if small is not None and None in weights.values():
        raise UserError(
            f"{name} gives {show(small[0])} the weight {float(small[1]):g}: beside {TOKENS} it "
            f"must be a number of tokens, at least 1; the nearest is {TOKENS}."
        )
    return weights
