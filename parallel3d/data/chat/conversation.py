"""A conversation as tokens, and which of them the assistant spoke: its words and their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data.chat.template import ChatTemplate, Message, Refused
from parallel3d.data.text.file_tokenizer import FileTokenizer
from parallel3d.errors import nearest

ASSISTANT = "assistant"
MESSAGES = "messages"
# Two of Unicode's private characters stand for a special token that a message spells out.
OPEN, CLOSE = "\ue0f0", "\ue0f1"


class Conversation(NamedTuple):
    """tokens (n,) int64; spoken (n,) bool: which of them the assistant says, its end included."""

    tokens: npt.NDArray[np.int64]
    spoken: npt.NDArray[np.bool_]


class Reader:
    """Makes tokens of rows, by one tokenizer and its template."""

    def __init__(self, tokenizer: FileTokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._special = tokenizer.special

    def read(self, row: Any) -> Conversation:
        """The conversation of a row. Raises Refused, with what is wrong with it."""
        messages, tools = _checked(row), row.get("tools")
        spelled: list[str] = []
        safe = [{**m, "content": self._set_aside(m["content"], spelled)} for m in messages]
        whole = self._template.render(safe, tools=tools)
        tokens: list[int] = []
        spoken: list[bool] = []
        at = 0
        for number, message in enumerate(safe):
            if message["role"] != ASSISTANT:
                continue
            first, last = self._span(safe, number, whole, at, tools)
            tokens += (glue := self._encode(whole[at:first], spelled))
            spoken += [False] * len(glue)
            tokens += (said := self._encode(whole[first:last], spelled))
            spoken += self._until_its_end(said)
            at = last
        tokens += (glue := self._encode(whole[at:], spelled))
        spoken += [False] * len(glue)
        return Conversation(np.array(tokens, np.int64), np.array(spoken, np.bool_))

    def _span(
        self, messages: Sequence[Message], number: int, whole: str, at: int, tools: Any
    ) -> tuple[int, int]:
        """Where in `whole` the assistant's turn begins, which is after what prompts it, and ends.

        Some templates spell a turn otherwise once it is not the last; then it ends behind the
        first special token after its words.
        """
        prompted = self._template.render(messages[:number], tools=tools, prompt=True)
        answered = self._template.render(messages[: number + 1], tools=tools)
        first = len(prompted)
        if not whole.startswith(prompted) or first < at:
            raise Refused(
                f"the template spells what is before message {number + 1} otherwise when more "
                "follows: the assistant's words cannot be told from it"
            )
        if whole.startswith(answered) and len(answered) >= first:
            return first, len(answered)
        words = messages[number]["content"].strip()
        begin = whole.find(words, first)
        ends = [whole.find(token, begin + len(words)) for token in self._special]
        ends = [end + len(t) for end, t in zip(ends, self._special, strict=True) if end >= 0]
        if begin < 0 or not ends:
            raise Refused(f"the template does not show the words of message {number + 1}")
        return first, min(ends)

    def _until_its_end(self, said: Sequence[int]) -> list[bool]:
        """All of a turn, but for blanks that the template puts behind its last special token."""
        numbers = self._special.values()
        places = [place for place, token in enumerate(said) if token in numbers]
        kept = places[-1] + 1 if places else len(said)
        return [place < kept for place in range(len(said))]

    def _set_aside(self, content: str, spelled: list[str]) -> str:
        """The content, with special tokens that it spells out set aside: they are text here."""
        for token in self._special:
            while token in content:
                content = content.replace(token, f"{OPEN}{len(spelled)}{CLOSE}", 1)
                spelled.append(token)
        return content

    def _encode(self, text: str, spelled: Sequence[str]) -> list[int]:
        if not spelled or OPEN not in text:
            return self._tokenizer.encode_marked(text)
        tokens: list[int] = []
        for piece in text.split(OPEN):
            number, close, rest = piece.partition(CLOSE)
            if close and number.isdigit() and int(number) < len(spelled):
                tokens += self._tokenizer.encode(spelled[int(number)].encode()).tolist()
                piece = rest
            tokens += self._tokenizer.encode_marked(piece)
        return tokens


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
    return messages
