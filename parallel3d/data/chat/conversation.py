"""A conversation as tokens, and which of them the assistant spoke: its words and their end.

The template writes the whole conversation, which is encoded as one text, as transformers does it:
what a tokenizer makes of a piece depends on what is around it. On the way private characters that
the row does not hold mark the special tokens that messages spell out, and what the template's own
tags enclose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data.chat.template import ChatTemplate, Message, Refused
from parallel3d.data.text.file_tokenizer import FileTokenizer, Placed, Unencodable
from parallel3d.errors import nearest

ASSISTANT = "assistant"
MESSAGES = "messages"
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
PRIVATE = range(0xE000, 0xF900)  # characters to which Unicode gives no meaning
Turn = tuple[int, int]  # characters [begin, end) of the conversation that the assistant says
# Around a special token that a message spells out, and around what `{% generation %}` encloses.
Marks = tuple[str, str, str, str]


class Conversation(NamedTuple):
    """tokens (n,) int64; spoken (n,) bool: which of them the assistant says, its end included."""

    tokens: npt.NDArray[np.int64]
    spoken: npt.NDArray[np.bool_]


class Reader:
    """Makes tokens of rows, by one tokenizer and its template."""

    def __init__(self, tokenizer: FileTokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        longest_first = sorted(tokenizer.special, key=len, reverse=True)
        self._special = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._stand_ins: dict[str, str] = {}  # special token → a private character

    def read(self, row: Any) -> Conversation:
        """Reads a row. Raises Refused, with what is wrong with it."""
        messages, tools = _checked(row), row.get("tools")
        held = set(self._template.text).union(*_strings([messages, tools]))
        marks = _unused(held, 4)
        around = rf"{marks[0]}\g<0>{marks[1]}"
        messages, tools = _changed(
            [messages, tools], lambda text: re.sub(self._special, around, text)
        )
        whole = self._template.render(messages, tools=tools)
        tagged = self._template.has_tags
        turns = (self._tagged if tagged else self._untagged)(messages, tools, whole, marks)
        made = self._encoded(whole, marks, held)
        spoken = np.zeros(made.tokens.size, np.bool_)
        for begin, end in turns:
            within = (made.begins < end) & (np.maximum(made.ends, made.begins + 1) > begin)
            spoken |= within if tagged else self._until_its_end(made, within)
        return Conversation(made.tokens, spoken)

    def _tagged(
        self, messages: Sequence[Message], tools: Any, whole: str, marks: Marks
    ) -> list[Turn]:
        """Finds the turns that a template's own tags enclose."""
        _, _, opening, closing = marks
        marked = self._template.render(messages, tools=tools, around=(opening, closing))
        pieces = re.split(f"([{opening}{closing}])", marked)
        at, begins, turns = 0, [], []
        for piece in pieces:
            if piece == opening:
                begins.append(at)
            elif piece == closing and begins:
                turns.append((begins.pop(), at))
            else:
                at += len(piece)
        if begins or whole != "".join(pieces[::2]):
            raise Refused("has a template that changes what its {% generation %} tags enclose")
        return turns

    def _untagged(
        self, messages: Sequence[Message], tools: Any, whole: str, marks: Marks
    ) -> list[Turn]:
        """Finds the turns by what the template writes of the messages before them.

        Some templates spell a turn otherwise once it is not the last; then it ends behind the
        first special token after its words.
        """
        turns: list[Turn] = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompted = self._template.render(messages[:number], tools=tools, prompt=True)
            answered = self._template.render(messages[: number + 1], tools=tools)
            begin = len(prompted)
            if not whole.startswith(prompted) or (turns and begin < turns[-1][1]):
                raise Refused(
                    f"the template spells what is before message {number + 1} otherwise when more "
                    "follows: the assistant's words cannot be told from it"
                )
            if whole.startswith(answered) and len(answered) >= begin:
                turns.append((begin, len(answered)))
                continue
            words = message["content"].strip()
            at = whole.find(words, begin)
            behind = self._specials(whole, marks, at + len(words)) if at >= 0 else iter(())
            end = next((found.end() for found in behind if found["meant"]), None)
            if end is None:
                raise Refused(f"the template does not show the words of message {number + 1}")
            turns.append((begin, end))
        return turns

    def _until_its_end(self, made: Placed, within: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Leaves out the blanks that a template puts behind the last special token of a turn."""
        special = np.isin(made.tokens, list(self._tokenizer.special.values()))
        ends = np.flatnonzero(within & special)
        return within & (np.arange(within.size) <= ends[-1]) if ends.size else within

    def _specials(self, whole: str, marks: Marks, at: int = 0) -> Iterator[re.Match[str]]:
        """Finds special tokens from a character on, `meant` or `spelled`, and marks left alone."""
        begin, end, *_ = marks
        pattern = f"{begin}(?P<spelled>{self._special}){end}|(?P<meant>{self._special})"
        return re.compile(f"{pattern}|[{begin}{end}]").finditer(whole, at)

    def _encoded(self, whole: str, marks: Marks, held: set[str]) -> Placed:
        """Encodes a conversation at once; what the tokens stand for is told in `whole`."""
        plain = re.sub(f"[{marks[0]}{marks[1]}]", "", whole)
        try:
            plain.encode()
            if plain == whole:
                return self._tokenizer.place(whole)
            # Where every special token is meant, the stand-ins must make no difference.
            every = self._stood_in(whole, marks, held, every=True)
            if not np.array_equal(every.tokens, self._tokenizer.place(plain).tokens):
                raise Refused("spells out special tokens, which its tokenizer does not keep apart")
            made = self._stood_in(whole, marks, held, every=False)
        except UnicodeEncodeError:
            raise Refused("has half of a surrogate pair, which is no character") from None
        except Unencodable as error:
            raise Refused(f"cannot be encoded by its tokenizer ({error.why})") from None
        for begin, end in zip(made.begins.tolist(), made.ends.tolist(), strict=True):
            if whole[begin - 1 : begin] == marks[0] and whole[end : end + 1] == marks[1]:
                raise Refused(f"spells out {whole[begin:end]}, which is one token even as text")
        return made

    def _stood_in(self, whole: str, marks: Marks, held: set[str], every: bool) -> Placed:
        """Encodes a conversation with a private character for each special token that is meant;
        those that are spelled out are text, but for `every`."""
        if held & set(self._stand_ins.values()):
            self._stand_ins = {}
        parts: list[str] = []
        begins, sources = [0], [0]  # of each part: where it begins in what is encoded, in `whole`
        at = size = 0

        def put(text: str, source: int) -> None:
            nonlocal size
            parts.append(text)
            begins.append(size)
            sources.append(source)
            size += len(text)

        for found in self._specials(whole, marks):
            put(whole[at : found.start()], at)
            token = found["meant"] or (found["spelled"] if every else None)
            if token is not None:
                if token not in self._stand_ins:
                    taken = held.union(marks, self._stand_ins.values())
                    self._stand_ins[token] = _unused(taken, 1)[0]
                put(self._stand_ins[token], found.start())
            elif found["spelled"]:
                put(found["spelled"], found.start("spelled"))
            at = found.end()
        put(whole[at:], at)
        made = self._tokenizer.place_spelled("".join(parts), self._stand_ins)
        points, shifts = np.array(begins), np.array(sources) - np.array(begins)

        def source(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return places + shifts[np.searchsorted(points, places, "right") - 1]

        # The last character of a token, as behind it another part may begin.
        last = np.maximum(made.ends - 1, made.begins)
        return Placed(made.tokens, source(made.begins), source(last) + 1)


def _unused(held: set[str], count: int) -> tuple[str, ...]:
    """Returns private characters that are not `held`. Raises Refused."""
    found = tuple(islice((c for c in map(chr, PRIVATE) if c not in held), count))
    if len(found) < count:
        raise Refused("holds nearly all of Unicode's private characters")
    return found


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else ((each,) for each in value)
        for pair in pairs:
            for part in pair:
                yield from _strings(part)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a value of JSON with its strings changed, but for the keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(each, change) for each in value]
    if isinstance(value, dict):
        return {key: _changed(each, change) for key, each in value.items()}
    return value


def _checked(row: Any) -> list[Message]:
    """The messages of a row. Raises Refused."""
    if not isinstance(row, dict):
        raise Refused("is no object")
    if MESSAGES not in row:
        close = nearest(MESSAGES, row)
        hint = f", the nearest is {show(close)}" if close else ""
        raise Refused(f"has no {MESSAGES}{hint}")
    messages = row[MESSAGES]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise Refused(f"has {MESSAGES} that are no list of objects")
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise Refused(f"has no text as {key} of message {number}")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise Refused(f"has no message of role {ASSISTANT}, of which to learn")
    return [_as_written(message) for message in messages]


def _as_written(message: Message) -> Message:
    """Returns a message as transformers gives it to a template: without what is null, and with
    what was thought under each of the names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    thought = next((message[name] for name in THOUGHTS if name in message), None)
    if thought is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}
