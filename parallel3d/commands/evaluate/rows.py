"""Reads and tokenizes the rows of `parallel3d eval` and summarizes their scores, without torch."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.config.fields import show
from parallel3d.data.chat_rows import RefusedRow, keys_not_read, parse
from parallel3d.data.formats import HEAD, LINES, PARQUET, TASKS, UnsupportedFile, check_kind, judged
from parallel3d.data.inputs import LOCAL, Input, rows
from parallel3d.data.tokenizer import Tokenizer, begun
from parallel3d.errors import UserError
from parallel3d.files import plain

LONGEST = 64 << 20  # maximum size of a row in bytes
# If a task has at least this many answers and none of them is 0, they seem to count from 1.
ENOUGH = 4
KEYS = frozenset(("task", "context", "choices", "answer", "continuation"))
HOW = (
    'give rows such as {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0} or '
    '{"context": "to be or not to", "continuation": " be"}'
)


class TaskRow(NamedTuple):
    """A context with its possible continuations.

    Attributes:
        task: the row's `task`, or the file's name if the row has none.
        context: the text that precedes each continuation.
        choices: the possible continuations, or the only one.
        answer: index of the right choice, from 0, or None for a single continuation.
        place: the row's file and line, for error messages.
    """

    task: str
    context: str
    choices: tuple[str, ...]
    answer: int | None
    place: str


class TakenRows(NamedTuple):
    """The rows of a file, and notices about them to show to the user."""

    rows: list[TaskRow]
    lines: list[str]


def read_rows(path: str) -> list[TaskRow]:
    """Returns the rows of a file. Raises UserError if the file or a row is invalid."""
    return take_rows(path).rows


def take_rows(path: str) -> TakenRows:
    """Returns the rows of a parquet file, or of a jsonl file, which may be compressed.

    Raises UserError for the first invalid row, and for answers that seem to count from 1.
    """
    file = Path(path)
    named = f"tasks={show(path)}"
    try:
        if file.is_dir():
            raise UserError(f"{named} is a folder: give a file in it; {HOW}")
        with open(file, "rb") as opened:
            form = judged(file.name, opened.read(HEAD), TASKS)
        check_kind(form, TASKS)
    except OSError as error:
        raise UserError(f"{named} cannot be read ({error.strerror}): {HOW}") from None
    except UnsupportedFile as error:
        raise UserError(f"{named} {error}; {HOW}") from None
    source = Input(f"{LOCAL}{file.absolute()}", *form, file.stat().st_size, "", rules=TASKS)
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
    """Raises UserError if a task has ENOUGH answers given as numbers and none of them is 0.

    Such answers seem to count from 1, so that each would select the choice after the right one.
    """
    numbers: dict[str, list[int]] = {}
    for row, by_number in found:
        if by_number and row.answer is not None:
            numbers.setdefault(row.task, []).append(row.answer)
    for task, answers in numbers.items():
        if len(answers) >= ENOUGH and min(answers) > 0:
            raise UserError(
                f"{named}: none of the {len(answers):,} numeric answers of task {show(task)} is 0, "
                "but choices are numbered from 0: give numbers from 0 on, or the text of the right "
                "choice"
            )


def _row(row: Any, task: str, place: str, unread: Counter[str]) -> tuple[TaskRow, bool]:
    """Returns a row, and whether its answer was a number.

    Adds the keys that are not read to `unread`. Raises UserError for an invalid row.
    """
    try:
        row = parse(row) if isinstance(row, bytes) else row
    except RefusedRow as error:
        raise UserError(f"{place} {error}: {HOW}") from None
    if not isinstance(row, dict) or not isinstance(row.get("context"), str):
        raise UserError(f"{place} has no text under context: {HOW}")
    unread.update(plain(key) for key in row.keys() - KEYS)
    task = row.get("task", task)
    if not (isinstance(task, str) and task.isprintable()):
        raise UserError(f"{place}: task={plain(show(task))} must be a name on one line; give one")
    if re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
        raise UserError(f"{place} has a lone surrogate, which is not text: {HOW}")
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
            f"{place}: answer={answer} is read as the number of a choice, but is the text of "
            f"another one: give the text, {json.dumps(choices[spelled[0]])}, or change the choices"
        )
    if not (type(answer) is int and 0 <= answer < len(choices)):
        raise UserError(
            f"{place}: answer={show(answer)} must be the number of a choice, from 0 to "
            f"{len(choices) - 1}, or its text; give one of them"
        )
    return TaskRow(task, row["context"], tuple(choices), answer, place), by_number


# Tokens


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """Returns the tokens of both texts together, and how many of them belong to the context.

    The split follows lm-evaluation-harness: whitespace at the end of the context is moved to the
    continuation, both texts are tokenized together, and the context has as many tokens as when it
    is tokenized alone. The tokenizer's prefix precedes the context. An empty context is replaced by
    the tokens that begin a text.
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
    """The likelihood of a continuation.

    Attributes:
        total: the sum of the log-probabilities of its tokens.
        tokens: the number of its tokens.
        greedy: whether each of its tokens is the likeliest one at its position.
    """

    total: float
    tokens: int
    greedy: bool

    def plus(self, other: Likelihood | None) -> Likelihood:
        """Returns the likelihood of both token sequences together; None adds no tokens."""
        if other is None:
            return self
        greedy = self.greedy and other.greedy
        return Likelihood(self.total + other.total, self.tokens + other.tokens, greedy)


def chosen(row: TaskRow, found: Sequence[Likelihood]) -> tuple[int, int]:
    """Returns the indices of two choices: the likeliest one, and the likeliest one per byte.

    If several choices are equally likely, the first of them is taken.
    """
    sizes = [len(choice.encode("utf-8", "replace")) for choice in row.choices]
    numbers = range(len(found))
    by_byte = max(numbers, key=lambda k: found[k].total / sizes[k])
    return max(numbers, key=lambda k: found[k].total), by_byte


def figures_of(pairs: Iterable[tuple[TaskRow, Sequence[Likelihood]]]) -> dict[str, Any]:
    """Returns the metrics of some rows: accuracies, and the likelihood and perplexity of answers.

    `acc` counts a single continuation as right if each of its tokens is the likeliest one.
    `acc_norm` compares likelihoods per byte, over the rows with choices, and is None without
    such rows. The mean log-likelihood per token and the perplexity are those of the right answers.
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
