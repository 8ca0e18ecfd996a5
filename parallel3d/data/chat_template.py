"""Finds and renders the chat templates of a tokenizer, as transformers does.

Templates run in jinja2's sandbox as in transformers, except that they cannot read the clock: the
date of today is `data.chat_date`, because the same rows would have other tokens tomorrow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from parallel3d.data.chat_rows import (
    ASSISTANT,
    CALL_OF_2023,
    CALLS,
    FUNCTION,
    THOUGHTS,
    USER,
    Message,
    RefusedRow,
    as_of_today,
)
from parallel3d.data.tokenizer import (
    CHAT_TEMPLATE,
    LARGEST_BESIDE,
    PROCESSORS_TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FileTokenizer,
    read_json,
    template_files,
)
from parallel3d.errors import UserError
from parallel3d.files import plain, read_bounded

ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
DEFAULT, WITH_TOOLS = "default", "tool_use"
CLOCK = "strftime_now"  # a function that transformers offers to templates
NO_DATE = "it shows today's date: give one that does not change, as in data.chat_date=2026-11-29"


class ChatTemplate:
    """The chat template of a tokenizer, or several templates by name.

    Attributes:
        texts: the source of each template by its name.
        date: the date that the templates show, or None if they show none.
    """

    def __init__(self, tokenizer: FileTokenizer, date: str | None = None) -> None:
        """Finds and parses the templates; `date` is `data.chat_date`.

        Raises UserError if there is no template, or an invalid one.
        """
        self.named = f"the chat template of {tokenizer.name}"
        self.texts = templates_of(tokenizer)
        names = {name: tokenizer.role(name) for name in ROLES}
        tokens = {name: text for name, text in names.items() if text is not None}
        spelled = next(
            (t for t in tokenizer.missing if any(t in s for s in self.texts.values())), None
        )
        if spelled is not None:
            raise UserError(
                f"{self.named} writes {plain(spelled)}, but this token, which another file of the "
                f"tokenizer names, is missing from {TOKENIZER}; save the tokenizer again with "
                "save_pretrained of transformers"
            )
        tokens.setdefault("eos_token", tokenizer.eot_text)
        tokens.setdefault("bos_token", "")
        used = {name: self.texts[name] for name in (DEFAULT, WITH_TOOLS) if name in self.texts}
        if not used:
            raise UserError(
                f"the tokenizer {tokenizer.name} has chat templates named "
                f"{plain(', '.join(self.texts))}, but none named {DEFAULT}; give one of them this "
                "name"
            )
        self._by_name = {
            name: Template(text, self.named, tokens, date) for name, text in used.items()
        }
        self.date = date if self.is_dated else None

    @property
    def is_dated(self) -> bool:
        """Whether a template shows today's date, which is `data.chat_date`."""
        return any(template.takes(CLOCK) for template in self._by_name.values())

    @property
    def text(self) -> str:
        """The source of the default template, or else of the template for tools."""
        return self.texts.get(DEFAULT, self.texts.get(WITH_TOOLS, ""))

    def of(self, tools: Any) -> Template:
        """Returns the template for rows with `tools`; None: no tools. Raises RefusedRow."""
        name = WITH_TOOLS if tools is not None and WITH_TOOLS in self._by_name else DEFAULT
        if name not in self._by_name:
            raise RefusedRow(f"has no tools, but {self.named} is only for rows with tools")
        return self._by_name[name]


class Template:
    """A chat template.

    Attributes:
        text: the template's source.
        has_tags: whether `{% generation %}` tags mark the assistant's words.
    """

    def __init__(
        self, text: str, named: str, tokens: Mapping[str, str], date: str | None = None
    ) -> None:
        """Parses the source `text`. Raises UserError.

        Args:
            named: the template's name in errors.
            tokens: the special tokens by role.
            date: the date that the template shows as today's; it fails if it needs one and has
                none.
        """
        self.text = text
        self._tokens = dict(tokens)
        self._date = date
        self.has_tags = False
        self._around = ("", "")  # the texts written in place of the opening and closing tags
        self._names: set[str] = set()  # the variables in the code
        self._after: dict[str, tuple[str, str]] = {}  # the results of `after_turn`
        self._keys: set[str] = set()  # the attributes and the strings in the code
        self._template = self._parsed(named)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        documents: Any = None,
        more: Mapping[str, Any] | None = None,
        prompt: bool = False,
        around: tuple[str, str] = ("", ""),
    ) -> str:
        """Returns the messages as text. Raises RefusedRow if the template fails.

        Args:
            more: further variables for the template, which override those of special tokens.
            prompt: whether the text ends with the opening of an assistant's message.
            around: markers to write before and after the assistant's words, if `has_tags`.
        """
        self._around = around
        names = {
            **self._tokens,
            **(more or {}),
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": prompt,
        }
        try:
            return self._template.render(names)
        except Exception as error:  # a template's expressions may raise any error
            if isinstance(error, MemoryError):
                raise
            why = plain(" ".join(str(error).split()) or type(error).__name__)
            raise RefusedRow(f"is refused by its chat template ({why})") from None

    def reads(self, key: str) -> bool:
        """Returns whether the template's code mentions a key of messages or other objects."""
        return key in self._keys

    def takes(self, name: str) -> bool:
        """Returns whether the template's code reads the variable `name`."""
        return name in self._names

    @property
    def shows_thoughts(self) -> bool:
        """Whether the template reads thoughts under a key of their own."""
        return any(map(self.reads, THOUGHTS))

    # Some templates want text, others want parts or objects. Small test rows show which.

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template shows the texts of a content that is a list of parts."""
        words = ("onlyasked", "onlytold")
        roles = zip((USER, ASSISTANT), words, strict=True)
        rows = [{"role": role, "content": [{"type": "text", "text": word}]} for role, word in roles]
        found = self._tried(rows, None)
        return found is not None and all(
            found.count(word) == 1 and not re.search(rf"text['\"]: ['\"]{word}", found)
            for word in words
        )

    @cached_property
    def takes_objects(self) -> bool:
        """Whether the template shows a call's arguments as JSON or XML if they are an object."""
        found = self._called({"onlykey": "only value"})
        return found is not None and "only value" in found and "'onlykey'" not in found

    @cached_property
    def takes_text(self) -> bool:
        """Whether the template shows a call's arguments unchanged if they are JSON text."""
        text = '{"onlykey": "only value"}'
        found = self._called(text)
        return found is not None and text in found

    def after_turn(self, role: str) -> tuple[str, str]:
        """Returns the texts after a turn of the assistant: at the end, and before a message.

        The message has the role `role`. The texts are empty if the template does not show such
        messages.
        """
        if role not in self._after:
            asked = {"role": USER, "content": "onlyasked"}
            said = {"role": ASSISTANT, "content": "onlytold"}
            alone = self._tried([asked, said], None)
            more = self._tried([asked, said, {"role": role, "content": "onlynext"}], None)
            found = alone and more and re.search(r"onlytold(.*?)onlynext", more, re.DOTALL)
            tail = (alone or "").rpartition("onlytold")[2]
            self._after[role] = (tail, found[1]) if found else ("", "")
        return self._after[role]

    def _called(self, arguments: Any) -> str | None:
        """Returns the text of a call with `arguments`, or None if the template hides them."""
        function = {"name": "onlycalled", "arguments": arguments}
        call = {"id": "onlycalls", "type": FUNCTION, FUNCTION: function}
        schema = {"type": "object", "properties": {}}
        tool = {"name": "onlycalled", "description": "", "parameters": schema}
        for tools in ([{"type": FUNCTION, FUNCTION: tool}], None):
            for content in ({"content": ""}, {}, {"content": "a"}):
                asked = {"role": USER, "content": "a"}
                said = {"role": ASSISTANT, **content, CALLS: [call]}
                found = self._tried([asked, said], tools)
                if found is not None and "onlyvalue" in found.replace(" ", ""):
                    return found
        return None

    def _tried(self, messages: Sequence[Message], tools: Any) -> str | None:
        try:
            return self.render(messages, tools=tools)
        except RefusedRow:
            return None

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages in the form that the template can read."""
        if not self.reads(CALL_OF_2023):
            messages = as_of_today(messages)
        return [self._fitted(message) for message in messages]

    def _fitted(self, message: Message) -> Message:
        given = dict(message)
        content = given.get("content")
        if isinstance(content, list) and not self.takes_parts:
            given["content"] = "".join(part["text"] for part in content)
        if CALLS in given:
            given[CALLS] = [self._spelled(call) for call in given[CALLS]]
        return given

    def _spelled(self, call: Mapping[str, Any]) -> dict[str, Any]:
        if FUNCTION in call:
            return {**call, FUNCTION: self._arguments(call[FUNCTION])}
        bare = self._arguments(call)
        return {"type": FUNCTION, FUNCTION: bare} if self.reads(FUNCTION) else bare

    def _arguments(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["arguments"]
        is_text = isinstance(arguments, str)
        if is_text and not self.takes_text:
            arguments = json.loads(arguments)
        elif not is_text and self.takes_text and not self.takes_objects:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "arguments": arguments}

    def _parsed(self, named: str) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self

        class Generation(Extension):
            """`{% generation %}`, the tag with which some templates mark the assistant's words."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> nodes.Node:
                template.has_tags = True
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_within"), [], [], body).set_lineno(line)

            def _within(self, caller: Any) -> str:
                begin, end = template._around
                return f"{begin}{caller()}{end}"

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals[CLOCK] = self._today
        try:
            tree = environment.parse(self.text)
            self._names = {node.name for node in tree.find_all(nodes.Name)}
            self._keys = {
                *(node.attr for node in tree.find_all(nodes.Getattr)),
                *(node.value for node in tree.find_all(nodes.Const) if type(node.value) is str),
            }
            return environment.from_string(self.text)
        except (TemplateError, RecursionError) as error:
            why = plain(" ".join(str(error).split()))
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise UserError(f"{named} cannot be parsed ({why}{where}): fix the template") from None

    def _today(self, format: str) -> str:
        """Spells the date, as transformers' function of the name CLOCK does with today's."""
        if self._date is None:
            _refuse(NO_DATE)
        return datetime.fromisoformat(self._date).strftime(format)


def _refuse(message: str) -> NoReturn:
    raise RefusedRow(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without jinja2's HTML escapes, with the arguments of transformers' filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def templates_of(tokenizer: FileTokenizer) -> dict[str, str]:
    """Returns the chat templates of a tokenizer by name. Raises UserError if there is none.

    Template files replace the templates in tokenizer_config.json, as in transformers. The template
    of a processor is used if there is no other.
    """
    folder, key = tokenizer.folder, f"the chat template of {tokenizer.name}"
    if folder is not None:
        try:
            found = {
                name: read_bounded(folder / file, LARGEST_BESIDE).decode()
                for name, file in template_files(folder).items()
            }
        except (OSError, ValueError) as error:
            raise UserError(f"{key} cannot be read ({plain(str(error))})") from None
        for file in (TOKENIZER_CONFIG, PROCESSORS_TEMPLATE):
            found = found or _listed(read_json(folder, file, key), file, key)
        if found:
            return found
    raise UserError(
        f"data=chat needs a chat template, but {tokenizer.name} has none: write one into "
        f"{CHAT_TEMPLATE}, or as chat_template into {TOKENIZER_CONFIG}, next to its tokenizer.json"
    )


def _listed(config: Mapping[str, Any], file: str, key: str) -> dict[str, str]:
    """Returns the templates in chat_template of a configuration file, by name.

    The key holds one text, a list of objects with name and template, or an object that maps
    names to texts. Raises UserError for anything else.
    """
    given = config.get("chat_template")
    if not given:
        return {}
    if isinstance(given, str):
        return {DEFAULT: given}
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(given, dict):
        pairs = given.items()
    elif isinstance(given, list) and all(isinstance(one, dict) for one in given):
        pairs = [(one.get("name"), one.get("template")) for one in given]
    found = dict(pairs)
    if not found or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise UserError(
            f"{key} cannot be read: chat_template in {file} must be text, a list of objects with "
            "name and template, or an object that maps names to texts"
        )
    return found
