"""Finds the messages of a conversation in the text that a chat template makes from them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from parallel3d.data.chat_rows import (
    ASSISTANT,
    CALL_OF_2023,
    CALLS,
    DEVELOPER,
    FUNCTION,
    THOUGHTS,
    ChatRow,
    Message,
    RefusedRow,
    name_of,
)
from parallel3d.data.chat_template import Template
from parallel3d.files import plain

NO_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?$")  # some templates end a prompt with this tag
THOUGHT = re.compile(r"^(?:\s*<think>)?(.*?)</think>", re.DOTALL)
REMEDY = (
    "add {% generation %} tags to the template, write thoughts as reasoning_content, or make one "
    "row per answer"
)
OTHER_ROLES = {DEVELOPER: "system", FUNCTION: "tool", "ipython": "tool"}


class Rendering(NamedTuple):
    """A chat template with all the inputs that it renders."""

    template: Template
    messages: Sequence[Message]
    tools: Any
    documents: Any
    more: Mapping[str, Any]

    def text(self, **options: Any) -> str:
        """Renders the text; `options` are those of `Template.render`. Raises RefusedRow."""
        others = {"tools": self.tools, "documents": self.documents, "more": self.more}
        return self.template.render(self.messages, **others, **options)

    def before(self, count: int) -> Rendering:
        """Returns a rendering of only the first `count` messages."""
        return self._replace(messages=self.messages[:count])


class Anchors:
    """Puts anchors into messages and names, and finds them in the rendered text.

    An anchor is a number between two private characters. A template that shows a text also shows
    the text's anchor, wherever it puts the text. A template that inspects the text may react to the
    anchor, but then the rest of its output changes, too.
    """

    def __init__(self, begin: str, end: str, inside: bool, names: bool) -> None:
        """Chooses the form and places of anchors.

        Args:
            begin, end: the characters before and after an anchor's number.
            inside: whether anchors go inside messages of roles other than assistant, not at their
                ends.
            names: whether anchors are put into the names of tools and calls, too.
        """
        self._begin = begin
        self._end = end
        self._inside = inside
        self._names = names
        escaped = [f"\\\\u{ord(mark):04x}" for mark in (begin, end)]
        self._pattern = re.compile(f"{begin}(\\d+){end}|{escaped[0]}(\\d+){escaped[1]}")
        # The owner of each anchor: its kind ("message", "call" or "tool"), the number of the
        # message or tool, and the number of the call in its message (0 for other kinds).
        self.owners: list[tuple[str, int, int]] = []

    def put(self, rendering: Rendering) -> Rendering:
        """Returns the same rendering, but with an anchor in each text."""
        self.owners = []
        messages = [self._message(m, n) for n, m in enumerate(rendering.messages)]
        tools = rendering.tools
        if tools and self._names:
            tools = [self._named(tool, ("tool", n, 0)) for n, tool in enumerate(tools)]
        return rendering._replace(messages=messages, tools=tools)

    def split(self, text: str) -> tuple[str, dict[tuple[str, int, int], list[int]]]:
        """Returns a text without its anchors, and the places of each owner's anchors in it."""
        pieces: list[str] = []
        places: dict[tuple[str, int, int], list[int]] = {}
        at = last = 0
        for found in self._pattern.finditer(text):
            pieces.append(text[last : found.start()])
            at += found.start() - last
            last = found.end()
            places.setdefault(self.owners[int(found[1] or found[2])], []).append(at)
        return "".join((*pieces, text[last:])), places

    def _new(self, owner: tuple[str, int, int]) -> str:
        self.owners.append(owner)
        return f"{self._begin}{len(self.owners) - 1}{self._end}"

    def _message(self, message: Message, number: int) -> Message:
        given, owner = dict(message), ("message", number, 0)
        content = given.get("content")
        inside = self._inside and given["role"] != ASSISTANT
        if isinstance(content, str) and content.strip():
            given["content"] = _with(content, self._new(owner), inside)
        elif isinstance(content, list):
            for at in reversed(range(len(content))):
                if content[at]["text"].strip():
                    text = _with(content[at]["text"], self._new(owner), inside)
                    changed = {**content[at], "text": text}
                    given["content"] = [*content[:at], changed, *content[at + 1 :]]
                    break
        if self._names:
            for at, call in enumerate(given.get(CALLS, ())):
                called = self._named(call, ("call", number, at))
                given[CALLS] = [*given[CALLS][:at], called, *given[CALLS][at + 1 :]]
            if CALL_OF_2023 in given:
                given[CALL_OF_2023] = self._named(given[CALL_OF_2023], ("call", number, 0))
        return given

    def _named(self, called: Mapping[str, Any], owner: tuple[str, int, int]) -> dict[str, Any]:
        if FUNCTION in called:
            return {**called, FUNCTION: self._named(called[FUNCTION], owner)}
        return {**called, "name": f"{called['name']}{self._new(owner)}"}


def _with(text: str, anchor: str, inside: bool) -> str:
    """Puts an anchor after the last visible character of a text, or in its middle if `inside`."""
    at = len(text.rstrip())
    if inside:
        middle = at // 2
        blank = text.find(" ", middle, at)
        at = middle if blank < 0 else blank
    return f"{text[:at]}{anchor}{text[at:]}"


class MessageFinder:
    """Finds a row's messages in the text that its chat template makes."""

    def __init__(
        self, rendering: Rendering, whole: str, marks: tuple[str, ...], row: ChatRow
    ) -> None:
        self.rendering = rendering
        self.whole = whole
        self.marks = marks
        self.row = row
        self._anchors: Anchors | None = None
        self._places: dict[tuple[str, int, int], list[int]] = {}
        for names in (True, False):
            for inside in (False, True):
                anchors = Anchors(marks[4], marks[5], inside, names)
                try:
                    text, places = anchors.split(anchors.put(rendering).text())
                except RefusedRow:
                    continue
                if text == whole:
                    self._anchors = anchors
                    self._places = places
                    self._names = names
                    return
        self._names = False

    @property
    def all_learned(self) -> bool:
        """Whether all messages of the assistant are learned."""
        pairs = zip(self.row.messages, self.row.learned, strict=True)
        return all(learned for message, learned in pairs if message["role"] == ASSISTANT)

    def check(self) -> None:
        """Raises RefusedRow for a message, a call or a tool that the template does not show."""
        for number, message in enumerate(self.rendering.messages):
            if _words(message) and not self._is_there(("message", number, 0), _words(message)):
                role = message["role"]
                other = OTHER_ROLES.get(role)
                advice = f": call its role {other}" if other else ""
                raise RefusedRow(
                    f"has {self.row.names[number]}, which its chat template does not show{advice}"
                )
            for at, call in enumerate(_calls(message)):
                if not self._is_there(("call", number, at), name_of(call)):
                    raise RefusedRow(
                        f"has a call of {plain(name_of(call))} in {self.row.names[number]}, which "
                        "its chat template does not show"
                    )
            thoughts = any(str(message.get(name, "")).strip() for name in THOUGHTS)
            says = _words(message) or _calls(message) or thoughts
            if message["role"] == ASSISTANT and self.row.learned[number] and not says:
                raise self.silent(number)
            if thoughts and not self.rendering.template.shows_thoughts:
                raise RefusedRow(
                    f"has thoughts in {self.row.names[number]}, but its chat template shows no "
                    "reasoning_content: write them into content, or remove them"
                )
        for number, tool in enumerate(self.rendering.tools or ()):
            if not self._is_there(("tool", number, 0), name_of(tool)):
                raise RefusedRow(
                    f"has the tool {plain(name_of(tool))}, which its chat template does not show"
                )

    def _is_there(self, owner: tuple[str, int, int], words: str) -> bool:
        if self._anchors is not None and (owner[0] == "message" or self._names):
            return owner in self._places
        spelled = json.dumps(words, ensure_ascii=False)[1:-1]
        return words in self.whole or spelled in self.whole

    def drops_thoughts(self) -> bool:
        """Returns whether the template leaves out the thoughts of any message."""
        for message in self.rendering.messages:
            content = message.get("content")
            within = THOUGHT.match(content) if isinstance(content, str) else None
            thoughts = [message.get(THOUGHTS[0]), within and within[1]]
            if any(text and text.strip() not in self.whole for text in thoughts):
                return True
        return False

    def speakers(self, turn: tuple[int, int]) -> set[int]:
        """Returns the numbers of the assistant's messages that have an anchor within `turn`."""
        return {
            owner[1]
            for owner, places in self._places.items()
            if owner[0] != "tool"
            and self.rendering.messages[owner[1]]["role"] == ASSISTANT
            and any(turn[0] <= place <= turn[1] for place in places)
        }

    # Places of one turn. The anchor of a message follows its words, or the name of its last call if
    # it has no words.

    def _anchor(self, number: int) -> tuple[str, int, int] | None:
        message = self.rendering.messages[number]
        if _words(message):
            return ("message", number, 0)
        calls = _calls(message)
        return ("call", number, len(calls) - 1) if calls else None

    def _place(self, number: int, places: Mapping[tuple[str, int, int], list[int]]) -> int | None:
        owner = self._anchor(number)
        found = places.get(owner, []) if owner is not None else []
        return found[0] if len(found) == 1 else None

    def begin(self, number: int) -> int:
        """Returns where message `number` of the assistant begins, after the generation prompt.

        Raises RefusedRow if the place cannot be found.
        """
        before = self.rendering.before(number)
        prompted = before.text(prompt=True)
        place = self._place(number, self._places)
        if self.whole.startswith(prompted):
            if place is not None and place < len(prompted):
                raise self.unknown(number)
            return len(prompted)
        if self._anchors is None or place is None:
            raise self.unknown(number)
        text, places = self._anchors.split(self._anchors.put(before).text(prompt=True))
        at, tail = 0, text
        for earlier in reversed(range(number)):
            here, there = self._place(earlier, self._places), self._place(earlier, places)
            if here is not None and there is not None and here <= place:
                at, tail = here, text[there:]
                break
        for opening in (tail, NO_THOUGHT.sub("", tail)):
            if text == prompted and self.whole.startswith(opening, at):
                begin = at + len(opening)
                if begin <= place:
                    return begin
        raise self.unknown(number)

    def end(self, number: int, begin: int) -> int | None:
        """Returns where the assistant's turn of message `number` ends.

        Returns None if the end is unknown, because the template ends a turn differently once more
        messages follow.
        """
        until = self.rendering.before(number + 1)
        answered = until.text()
        if self.whole.startswith(answered) and len(answered) >= begin:
            return len(answered)
        place = self._place(number, self._places)
        if self._anchors is None or place is None:
            return None
        text, places = self._anchors.split(self._anchors.put(until).text())
        there = self._place(number, places)
        if there is None or text != answered:
            return None
        tail = text[there:]
        if not tail.strip():  # the template writes nothing after a turn
            return place
        for ending in (tail, tail.rstrip()):
            if self.whole.startswith(ending, place):
                return place + len(ending)
        return None

    def words_end(self, number: int, begin: int) -> int:
        """Returns where the words of message `number` end. Raises RefusedRow if that is unknown."""
        words, place = _words(self.rendering.messages[number]), self._place(number, self._places)
        if _calls(self.rendering.messages[number]):
            raise self.unknown(number)
        if place is not None:
            return place
        at = self.whole.find(words, begin) if words else -1
        if at < 0:
            raise RefusedRow(
                f"has {self.row.names[number]}, whose end cannot be found in the "
                f"output of its chat template: {REMEDY}"
            )
        return at + len(words)

    def silent(self, number: int) -> RefusedRow:
        """Returns the error for a turn without words, because only its end would be learned."""
        return RefusedRow(f"has nothing to learn in {self.row.names[number]} except its end")

    def unknown(self, number: int) -> RefusedRow:
        """Returns the error for a turn that cannot be found in the text."""
        return RefusedRow(
            f"has a template that changes the text before {self.row.names[number]} when more "
            f"messages follow, so the assistant's words cannot be found: {REMEDY}"
        )


def _words(message: Message) -> str:
    """Returns the last text in a message's content that is not blank; "" if there is none."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [p["text"] for p in content or ()]
    return next((text.strip() for text in reversed(texts) if text.strip()), "")


def _calls(message: Message) -> list[Mapping[str, Any]]:
    if CALL_OF_2023 in message:
        return [message[CALL_OF_2023]]
    return list(message.get(CALLS, ()))
