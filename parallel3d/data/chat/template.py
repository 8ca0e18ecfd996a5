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

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
Message = Mapping[str, Any]


class Refused(ValueError):
    """A template does not take these messages."""


class ChatTemplate:
    """The template that lies beside a tokenizer. `text`: as it is written."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        """Raises UserError where there is none, or one that does not parse."""
        self.named = f"the chat template of {tokenizer.name}"
        self.text = template_text(tokenizer)
        folder, key = tokenizer.folder, self.named
        names = {name: role(name, folder, key) for name in ROLES} if folder is not None else {}
        self._names = {name: text for name, text in names.items() if text is not None}
        self._names.setdefault("eos_token", tokenizer.eot_text)
        self._names.setdefault("bos_token", "")
        self._template = self._parsed()

    def render(
        self, messages: Sequence[Message], *, tools: Any = None, prompt: bool = False
    ) -> str:
        """The messages as text; with `prompt` as far as the assistant is to speak. Refused."""
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=prompt, **self._names
            )
        except Exception as error:  # whatever an expression of the template runs into
            if isinstance(error, MemoryError):
                raise
            raise Refused(plain(" ".join(str(error).split()) or type(error).__name__)) from None

    def _parsed(self) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}`, by which some templates mark the assistant's words, is passed."""

            tags = frozenset(("generation",))

            def parse(self, parser: Any) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

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


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """As transformers has it: nothing is spelled for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
