"""Checks the keys of the training and held-out text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from fractions import Fraction
from typing import Any, NamedTuple

from parallel3d.config.fields import (
    show,
    spell,
)
from parallel3d.config.values import number_of_tokens
from parallel3d.data.keys import OWN, DataConfig
from parallel3d.errors import UserError, nearest
from parallel3d.loop.keys import TrainConfig

BYTE_VOCABULARY = 257  # 256 values of a byte, and the end-of-text token


def check_samples(data: DataConfig, vocabulary: int) -> None:
    """Checks the `data` section against the vocabulary; raises UserError."""
    if data.name == OWN:
        raise UserError(
            f"data.name={OWN} is for a script that gives its samples to fit(train=…), so start the "
            "script in place of this command; the nearest is data.name=text with data.path."
        )
    if data.reads_bytes and vocabulary < BYTE_VOCABULARY:
        raise UserError(
            f"model.vocab_size={vocabulary} must be at least {BYTE_VOCABULARY} for "
            f"data.tokenizer=byte; the nearest is model.vocab_size={BYTE_VOCABULARY}."
        )
    check_corpora(data)


def check_validation(
    data: DataConfig, train: TrainConfig, ema_decay: float | None, run: str | None
) -> None:
    """Checks `data.valid`, and that `train.eval_only` has a run and batches to evaluate.

    Raises UserError.
    """
    sets = data.valid
    for name, path in (sets or {}).items():
        if not (isinstance(path, str) and path):
            raise UserError(
                f"data.valid gives {show(name)} the path {show(path)}, but must give the prefix "
                "of an indexed dataset or the path of a text, as in "
                f"'data.valid={{{name}:corpora/{name}}}'."
            )
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]*\w[\w.-]*", name)):
            close = re.sub(r"[^\w.-]+", "_", str(name)).strip("_.-") or "set"
            close = close if isinstance(name, str) else f"set_{close}"  # YAML reads 0 as a number
            raise UserError(
                f"data.valid: the name {show(name)} must consist of letters, digits, -, _ and "
                f"dots, with at least one letter, digit or _, because loggers show it; the nearest "
                f"is {close}."
            )
    if ema_decay is not None and "ema" in (data.blend or {}):
        raise UserError(
            "data.blend must have no part named ema if optim.ema_decay is set, because the "
            "held-out loss of the averaged weights has that name; the nearest is ./ema, the same "
            "path."
        )
    batches = train.eval_batches
    if train.eval_only and (run is None or batches == 0):
        raise UserError(
            "train.eval_only=true evaluates the checkpoint of a run, so it requires run= and "
            "train.eval_batches above 0 or null, but was given "
            f"{spell('run', run)} and {spell('train.eval_batches', batches)}; the nearest is "
            "run=NAME train.eval_batches=null."
        )


TOKENS = "tokens"  # as a weight, this word stands for the corpus's number of tokens


PACKED = ("corpus", "blend")


# The meaning of `data.path`, by the kind of source.
PATHS = {
    "text": "a file, a folder or a glob, as in data.path=book.txt, or choose data=stdlib",
    "corpus": "the prefix of an indexed dataset (without .bin, .idx), as in data.path=corpora/web",
    "chat": "jsonl with one conversation per row, as in data.path=sft.jsonl",
}


class Weights(NamedTuple):
    """The exact weights of corpora, by prefix, that apply from token `first` of the run on.

    A weight of None stands for the corpus's number of tokens; the other weights are then numbers of
    tokens, too.
    """

    first: int
    by_prefix: Mapping[str, Fraction | None]


def check_corpora(data: DataConfig) -> None:
    """Checks `data.path` and a blend against the kind of source; raises UserError."""
    if data.name in PATHS and not data.path:
        raise UserError(
            f"data={data.name} needs data.path, which is {show(data.path)}; give "
            f"{PATHS[data.name]}."
        )
    if data.chat_date is not None:
        try:
            datetime.fromisoformat(data.chat_date)
        except ValueError:
            raise UserError(
                f"data.chat_date={show(data.chat_date)} must be a date, as in "
                "data.chat_date=2026-11-29."
            ) from None
    if data.name == "blend":
        blend_weights(data)
    for name in ("path", "blend", "blend_stages"):
        readers = ("blend",) if name != "path" else tuple(PATHS)
        if (value := getattr(data, name)) is not None and data.name not in readers:
            near = f"data={readers[0]}, which reads it"
            if data.name == "blend":
                near = f"data.path=null, and 'data.blend={{{value}:1}}' to read it"
            raise UserError(
                f"data.{name}={show(value)} is not read by data={data.name}; give {near}."
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
        first = number_of_tokens(typed)
        if first <= stages[-1].first:
            near = stages[-1].first + 1
            raise UserError(
                f"{name} must be a number of tokens greater than that of the stage before it, "
                f"{stages[-1].first:,}; the nearest is {near}."
            )
        if not isinstance(weights, dict) or not weights:
            raise UserError(
                f"{name} is {show(weights)}, but must be weights by prefix, as in "
                f"'data.blend_stages={{{first}:{{corpora/web:0.5,corpora/math:0.5}}}}'."
            )
        stages.append(Weights(first, _weights(weights, name)))
    return stages


def _weights(given: Mapping[Any, Any], name: str) -> dict[str, Fraction | None]:
    weights: dict[str, Fraction | None] = {}
    for prefix, typed in given.items():
        if typed == TOKENS:
            weights[str(prefix)] = None
            continue
        is_number = isinstance(typed, (int, float)) and not isinstance(typed, bool)
        if not is_number or not math.isfinite(typed) or typed <= 0:
            # Without its only part, a blend would have nothing to read.
            remedy = f"leave {show(str(prefix))} out" if len(given) > 1 else "the nearest is 1"
            if isinstance(typed, str):
                remedy = f"the nearest is {nearest(typed, [TOKENS]) or '1'}"
            raise UserError(
                f"{name} gives {show(str(prefix))} the weight {show(typed)}: it must be a number "
                f"above 0 or {TOKENS}; {remedy}."
            )
        weights[str(prefix)] = Fraction(repr(typed))
    small = next(((p, w) for p, w in weights.items() if w is not None and w < 1), None)
    if small is not None and None in weights.values():
        raise UserError(
            f"{name} gives {show(small[0])} the weight {float(small[1]):g}: if another weight is "
            f"{TOKENS}, it must be a number of tokens and at least 1; the nearest is {TOKENS}."
        )
    return weights
