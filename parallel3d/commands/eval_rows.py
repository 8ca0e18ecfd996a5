"""Reads, tokenizes and sums up the rows of `parallel3d eval`. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.config.fields import show
from parallel3d.data.tokenizer import Tokenizer
from parallel3d.errors import UserError
from parallel3d.files import parse_json, plain

HOW = (
    'give rows such as {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0} or '
    '{"context": "to be or not to", "continuation": " be"}'
)


class TaskRow(NamedTuple):
    """A context and what may follow it; `answer`: the number of the right choice, None for a single
    continuation. `task`: of the row's entry `task`, or the file's name; `place`: for errors."""

    task: str
    context: str
    choices: tuple[str, ...]
    answer: int | None
    place: str


def read_rows(path: str) -> list[TaskRow]:
    """Reads a jsonl. Raises UserError with the first line that is no row."""
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"tasks={show(path)} cannot be read ({error.strerror}): {HOW}") from None
    task = Path(path).name.partition(".")[0]
    places = ((f"tasks={show(path)}, line {n}", line) for n, line in enumerate(lines, 1))
    rows = [_row(line, task, place) for place, line in places if line.strip()]
    if not rows:
        raise UserError(f"tasks={show(path)} has no rows: {HOW}")
    return rows


def _row(line: bytes, task: str, place: str) -> TaskRow:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{place} is no JSON ({plain(str(error))}): {HOW}") from None
    if not isinstance(row, dict) or not isinstance(row.get("context"), str):
        raise UserError(f"{place} has no text under context: {HOW}")
    task = row.get("task", task)
    if not (isinstance(task, str) and task.isprintable()):
        raise UserError(f"{place}: task={plain(show(task))} must be a name of one line; give one")
    if re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
        raise UserError(f"{place} has half of a pair of surrogates, which is no text: {HOW}")
    if "choices" not in row:
        if not (isinstance(row.get("continuation"), str) and row["continuation"]):
            raise UserError(f"{place} has neither choices nor a continuation: {HOW}")
        return TaskRow(task, row["context"], (row["continuation"],), None, place)
    choices, answer = row["choices"], row.get("answer")
    texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not texts or len(choices) < 2:
        raise UserError(f"{place}: choices must be a list of at least two texts: {HOW}")
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    if not (type(answer) is int and 0 <= answer < len(choices)):
        raise UserError(
            f"{place}: answer={show(answer)} must be the number of a choice, from 0 to "
            f"{len(choices) - 1}, or its text; give one of them"
        )
    return TaskRow(task, row["context"], tuple(choices), answer, place)


# Tokens


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """Returns the tokens of both texts, and how many of the first are the context's.

    As lm-evaluation-harness has it: blanks at the context's end belong to the continuation, both
    are tokenized together and split where the context's own tokens end. Tokens that the tokenizer
    puts before every text stand before the context; one without text is the token that begins a
    text.
    """
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if not bare:
        tokens = _encoded(tokenizer, continuation)
        begin = tokenizer.begin[:1]
        return (tokens if tokens[:1] == begin else begin + tokens), 1
    whole, first = (
        _with_prefix(tokenizer, _encoded(tokenizer, t)) for t in (bare + continuation, bare)
    )
    return whole, len(first)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_prompt(text.encode("utf-8", "replace"))


def _with_prefix(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    prefix = tokenizer.prefix
    return tokens if prefix and tokens[: len(prefix)] == prefix else prefix + tokens


# Scores


class Likelihood(NamedTuple):
    """Σ log-probabilities of a continuation's tokens, their number, and whether each of them is the
    likeliest."""

    total: float
    tokens: int
    greedy: bool

    def plus(self, other: Likelihood | None) -> Likelihood:
        """Adds those of other tokens of the continuation, which another rank has."""
        if other is None:
            return self
        greedy = self.greedy and other.greedy
        return Likelihood(self.total + other.total, self.tokens + other.tokens, greedy)


def chosen(row: TaskRow, found: Sequence[Likelihood]) -> tuple[int, int]:
    """Returns the likeliest choice, and the likeliest by the byte; of equal ones the first."""
    sizes = [len(choice.encode("utf-8", "replace")) for choice in row.choices]
    numbers = range(len(found))
    by_byte = max(numbers, key=lambda k: found[k].total / sizes[k])
    return max(numbers, key=lambda k: found[k].total), by_byte


def figures_of(pairs: Iterable[tuple[TaskRow, Sequence[Likelihood]]]) -> dict[str, Any]:
    """Returns accuracy, length-normalised accuracy, and the mean log-likelihood of a token of the
    right answers with its perplexity. Of a single continuation, right is one whose tokens are all
    the likeliest ones; without choices there is nothing to normalise."""
    rows, right, right_norm, with_choices, total, tokens = 0, 0, 0, 0, 0.0, 0
    for row, found in pairs:
        rows += 1
        if row.answer is None:
            right += found[0].greedy
        else:
            with_choices += 1
            best, best_norm = chosen(row, found)
            right, right_norm = right + (best == row.answer), right_norm + (best_norm == row.answer)
        answer = found[row.answer or 0]
        total, tokens = total + answer.total, tokens + answer.tokens
    return {
        "rows": rows,
        "acc": right / rows,
        "acc_norm": right_norm / with_choices if with_choices else None,
        "loglikelihood_per_token": total / tokens,
        "perplexity": math.exp(min(-total / tokens, 700.0)),
        "tokens": tokens,
    }
