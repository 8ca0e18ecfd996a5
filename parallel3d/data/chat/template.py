"""Chat templates of Hugging Face, run in jinja2's sandbox as transformers runs them.

But for the clock: a template that asks for today's date would make other tokens tomorrow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from parallel3d.data.text.file_tokenizer import FileTokenizer
from parallel3d.data.text.special_tokens import (
    CHAT_TEMPLATE,
    LARGEST_BESIDE,
    TOKENIZER_CONFIG,
    read_json,
    role,
)
from parallel3d.errors import UserError
from parallel3d.files.reading import plain, read_bounded

ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
Message = Mapping[str, Any]


class Refused(ValueError):
    """A template does not take these messages."""


class ChatTemplate:
    """The template that lies beside a tokenizer.

    Attributes:
        text: as it is written. has_tags: `{% generation %}` says what the assistant speaks.
    """

    def __init__(self, tokenizer: FileTokenizer) -> None:
        """Raises UserError where there is none, or one that does not parse."""
        self.named = f"the chat template of {tokenizer.name}"
        self.text = template_text(tokenizer)
        folder, key = tokenizer.folder, self.named
        names = {name: role(name, folder, key) for name in ROLES} if folder is not None else {}
        self._names = {name: text for name, text in names.items() if text is not None}
        self._names.setdefault("eos_token", tokenizer.eot_text)
        self._names.setdefault("bos_token", "")
        self.has_tags = False
        self._around = ("", "")  # what `{% generation %}` is written as, and its end
        self._template = self._parsed()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        prompt: bool = False,
        around: tuple[str, str] = ("", ""),
    ) -> str:
        """The messages as text. Raises Refused.

        Args:
            prompt: up to where the assistant is to speak.
            around: what is written where the assistant's words begin and end, if `has_tags`.
        """
        self._around = around
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._names,
            )
        except Exception as error:  # whatever an expression of the template runs into
            if isinstance(error, MemoryError):
                raise
            raise Refused(plain(" ".join(str(error).split()) or type(error).__name__)) from None

    def _parsed(self) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self

        class Generation(Extension):
            """`{% generation %}`, by which some templates mark the assistant's words."""

            tags = frozenset(("generation",))

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
        try:
            return environment.from_string(self.text)
        except (TemplateError, RecursionError) as error:
            why = plain(" ".join(str(error).split()))
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise UserError(f"{self.named} cannot be read ({why}{where}): mend it") from None


def template_text(tokenizer: FileTokenizer) -> str:
    """The chat template beside a tokenizer, as text. Raises UserError if there is none."""
    folder, key = tokenizer.folder, f"the chat template of {tokenizer.name}"
    if folder is not None:
        try:
            return read_bounded(folder / CHAT_TEMPLATE, LARGEST_BESIDE).decode()
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise UserError(f"{key} cannot be read ({plain(str(error))})") from None
        found = read_json(folder, TOKENIZER_CONFIG, key).get("chat_template")
        if isinstance(found, list):  # several, by name
            named = [one for one in found if isinstance(one, dict)]
            found = next((one.get("template") for one in named if one.get("name") == "default"), "")
        if isinstance(found, str) and found:
            return found
    raise UserError(
        f"data=chat needs a chat template, and {tokenizer.name} has none: write one into "
        f"{CHAT_TEMPLATE}, or as chat_template into {TOKENIZER_CONFIG}, beside its tokenizer.json"
    )


def _refuse(message: str) -> NoReturn:
    raise Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON as transformers does: nothing is spelled for HTML."""
    how = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)
