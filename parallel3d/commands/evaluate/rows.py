"""Reads, tokenizes and sums up the rows of `parallel3d eval`. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.config.fields import show
from parallel3d.data.chat_rows import Refused, keys_not_read, parse
from parallel3d.data.formats import HEAD, LINES, PARQUET, TASKS, NotTaken, check_kind, judged
from parallel3d.data.inputs import LOCAL, Input, rows
from parallel3d.data.tokenizer import Tokenizer, begun
from parallel3d.errors import UserError
from parallel3d.files import plain

LONGEST = 64 << 20  # largest number of bytes in a row
ENOUGH = 4  # so many rows without a 0 among their answers suggest that answers count from 1
KEYS = frozenset(("task", "context", "choices", "answer", "continuation"))
HOW = (
    'give rows such as {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0} or '
    '{"context": "to be or not to", "continuation": " be"}'
)


class TaskRow(NamedTuple):
    """A context with its possible continuations.

    Attributes:
        task: the row's `task`, or the file's name.
        context: the text before.
        choices: the continuations.
        answer: number of the right choice; None for a single continuation.
        place: file and line, for errors.
    """

    task: str
    context: str
    choices: tuple[str, ...]
    answer: int | None
    place: str


class TakenRows(NamedTuple):
    """Rows of a file, and sentences for the user about them."""

    rows: list[TaskRow]
    lines: list[str]


def read_rows(path: str) -> list[TaskRow]:
    """Returns the rows of a file. Raises UserError."""
    return take_rows(path).rows


def take_rows(path: str) -> TakenRows:
    """Reads a jsonl file, packed or not, or a parquet file.

    Raises UserError with the first invalid row, and for answers that seem to count from 1.
    """
    file = Path(path)
    named = f"tasks={show(path)}"
    try:
        if file.is_dir():
            raise UserError(f"{named} is a folder: give a file of it; {HOW}")
        with open(file, "rb") as opened:
            form = judged(file.name, opened.read(HEAD), TASKS)
        check_kind(form, TASKS)
    except OSError as error:
        raise UserError(f"{named} cannot be read ({error.strerror}): {HOW}") from None
    except NotTaken as error:
        raise UserError(f"{named} {error}; {HOW}") from None
    source = Input(f"{LOCAL}{file.absolute()}", *form, file.stat().st_size, "", door=TASKS)
    task = file.name.partition(".")[0]
    places = {LINES: "line", PARQUET: "row"}[form.kind]
    found, unread = [], Counter[str]()
    for number, value in rows(source, LONGEST):
        found.append(_row(value, task, f"{named}, {places} {number}", unread))
    if not found:
        raise UserError(f"{named} has no rows: {HOW}")
    _check_labels(found, named)
    return TakenRows(
        [each for each, _ in found], [f"{named}: {line}" for line in keys_not_read(unread)]
    )


def _check_labels(found: Sequence[tuple[TaskRow, bool]], named: str) -> None:
    """Raises UserError for a task whose answers are never number 0.

    They seem to count from 1, and each would name the choice after the right one.
    """
    numbers: dict[str, list[int]] = {}
    for row, by_number in found:
        if by_number and row.answer is not None:
            numbers.setdefault(row.task, []).append(row.answer)
    for task, answers in numbers.items():
        if len(answers) >= ENOUGH and min(answers) > 0:
            raise UserError(
                f"{named}: no answer of the {len(answers):,} rows of task {show(task)} is 0, and "
                "numbers of choices count from 0: give numbers from 0 on, or the text of the right "
                "choice"
            )


def _row(row: Any, task: str, place: str, unread: Counter[str]) -> tuple[TaskRow, bool]:
    """Returns a row, and whether its answer was a number; counts keys that are not read.

    Raises UserError for an invalid row.
    """
    try:
        row = parse(row) if isinstance(row, bytes) else row
    except Refused as error:
        raise UserError(f"{place} {error}: {HOW}") from None
    if not isinstance(row, dict) or not isinstance(row.get("context"), str):
        raise UserError(f"{place} has no text under context: {HOW}")
    unread.update(plain(key) for key in row.keys() - KEYS)
    task = row.get("task", task)
    if not (isinstance(task, str) and task.isprintable()):
        raise UserError(f"{place}: task={plain(show(task))} must be a name on one line; give one")
    if re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
        raise UserError(f"{place} has half of a pair of surrogates, which is not text: {HOW}")
    if row.get("choices") is None:
        if row.get("answer") is not None:
            raise UserError(f"{place} has an answer but no choices: {HOW}")
        if not (isinstance(row.get("continuation"), str) and row["continuation"]):
            raise UserError(f"{place} has neither choices nor a continuation: {HOW}")
        return TaskRow(task, row["context"], (row["continuation"],), None, place), False
    if row.get("continuation") is not None:
        raise UserError(f"{place} has choices and a continuation, but may have one only: {HOW}")
    choices, answer = row["choices"], row.get("answer")
    texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not texts or len(choices) < 2:
        raise UserError(f"{place}: choices must be a list of at least two texts: {HOW}")
    by_number = type(answer) is int
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    spelled = [k for k, choice in enumerate(choices) if choice.strip() == str(answer)]
    if by_number and spelled and spelled != [answer]:
        raise UserError(
            f"{place}: answer={answer} is the number of a choice and the text of another one: give "
            f"the text, {json.dumps(choices[spelled[0]])}, or give the choices other names"
        )
    if not (type(answer) is int and 0 <= answer < len(choices)):
        raise UserError(
            f"{place}: answer={show(answer)} must be the number of a choice, from 0 to "
            f"{len(choices) - 1}, or its text; give one of them"
        )
    return TaskRow(task, row["context"], tuple(choices), answer, place), by_number


# Tokens


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """Returns the tokens of both texts, and the number of tokens of the context.

    It follows lm-evaluation-harness: blanks at the context's end belong to the continuation, both
    are tokenized together and split where the context's own tokens end. The tokenizer's prefix
    precedes the context; an empty context is replaced by the tokens that begin a text.
    """
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if not bare:
        tokens = begun(_encoded(tokenizer, continuation), tokenizer.begin)
        return tokens, len(tokenizer.begin)
    whole, first = (
        begun(_encoded(tokenizer, t), tokenizer.prefix) for t in (bare + continuation, bare)
    )
    return whole, len(first)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_prompt(text.encode("utf-8", "replace"))


# Scores


class Likelihood(NamedTuple):
    """The sum of the log-probabilities of a continuation's tokens, the number of tokens, and
    whether each is the likeliest one."""

    total: float
    tokens: int
    greedy: bool

    def plus(self, other: Likelihood | None) -> Likelihood:
        """Adds the likelihood of other tokens of the continuation, from another rank."""
        if other is None:
            return self
        greedy = self.greedy and other.greedy
        return Likelihood(self.total + other.total, self.tokens + other.tokens, greedy)


def chosen(row: TaskRow, found: Sequence[Likelihood]) -> tuple[int, int]:
    """Returns the likeliest choice, and the likeliest per byte; the first of equal ones."""
    sizes = [len(choice.encode("utf-8", "replace")) for choice in row.choices]
    numbers = range(len(found))
    by_byte = max(numbers, key=lambda k: found[k].total / sizes[k])
    return max(numbers, key=lambda k: found[k].total), by_byte


def figures_of(pairs: Iterable[tuple[TaskRow, Sequence[Likelihood]]]) -> dict[str, Any]:
    """Returns accuracy, length-normalised accuracy, and for right answers the mean log-likelihood
    of a token with its perplexity.

    A single continuation is right if all of its tokens are the likeliest ones. Accuracy is
    normalised only for rows with choices.
    """
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
