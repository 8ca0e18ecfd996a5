"""Reads chat conversations: Hugging Face templates, their tokens, and which of them to learn.

Templates run in jinja2's sandbox as in transformers, except that they see no clock: a template with
today's date would make other tokens tomorrow.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data import cache
from parallel3d.data.indexed import IndexedWriter
from parallel3d.data.inputs import LINES, PACKED
from parallel3d.data.sampler import DatasetOrder, Sample
from parallel3d.data.sources import (
    Document,
    cache_key,
    check_unchanged,
    find_documents,
)
from parallel3d.data.tokenizer import (
    CHAT_TEMPLATE,
    LARGEST_BESIDE,
    TOKENIZER_CONFIG,
    FileTokenizer,
    Placed,
    Unencodable,
    open_tokenizer,
)
from parallel3d.data.tokens import Tokens
from parallel3d.errors import UserError, nearest
from parallel3d.files import plain, read_bounded

if TYPE_CHECKING:
    from parallel3d.config.schema import DataConfig


_log = logging.getLogger(__name__)

ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
Message = Mapping[str, Any]


class Refused(ValueError):
    """Messages that a template does not accept, or a row that is not a conversation."""


class ChatTemplate:
    """The chat template of a tokenizer.

    Attributes:
        text: its source.
        has_tags: whether `{% generation %}` tags mark the assistant's words.
    """

    def __init__(self, tokenizer: FileTokenizer) -> None:
        """Raises UserError for a missing template, or one that does not parse."""
        self.named = f"the chat template of {tokenizer.name}"
        self.text = template_text(tokenizer)
        names = {name: tokenizer.role(name) for name in ROLES}
        self._names = {name: text for name, text in names.items() if text is not None}
        self._names.setdefault("eos_token", tokenizer.eot_text)
        self._names.setdefault("bos_token", "")
        self.has_tags = False
        self._around = ("", "")  # the text written for `{% generation %}` and its end
        self._template = self._parsed()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        prompt: bool = False,
        around: tuple[str, str] = ("", ""),
    ) -> str:
        """Returns the messages as text. Raises Refused.

        Args:
            prompt: ends the text with the opening of an assistant's message.
            around: markers for begin and end of the assistant's words, if `has_tags`.
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
        except Exception as error:  # expressions of a template raise anything
            if isinstance(error, MemoryError):
                raise
            raise Refused(plain(" ".join(str(error).split()) or type(error).__name__)) from None

    def _parsed(self) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self

        class Generation(Extension):
            """`{% generation %}`, with which some templates mark the assistant's words."""

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
        # As in transformers, without HTML escapes.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.text)
        except (TemplateError, RecursionError) as error:
            why = plain(" ".join(str(error).split()))
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise UserError(f"{self.named} cannot be read ({why}{where}): mend it") from None


def template_text(tokenizer: FileTokenizer) -> str:
    """Returns the chat template of a tokenizer. Raises UserError if there is none."""
    folder, key = tokenizer.folder, f"the chat template of {tokenizer.name}"
    if folder is not None:
        try:
            return read_bounded(folder / CHAT_TEMPLATE, LARGEST_BESIDE).decode()
        except FileNotFoundError:
            pass  # the tokenizer's own config may hold it
        except (OSError, ValueError) as error:
            raise UserError(f"{key} cannot be read ({plain(str(error))})") from None
        found = tokenizer.beside[TOKENIZER_CONFIG].get("chat_template")
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


# Conversations as tokens


ASSISTANT = "assistant"
MESSAGES = "messages"
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
PRIVATE = range(0xE000, 0xF900)  # characters without a meaning in Unicode
Turn = tuple[int, int]  # characters [begin, end) of the text that the assistant wrote
# Four characters: around a special token that a message spells out, and around the text inside
# `{% generation %}`.
Marks = tuple[str, ...]


class Conversation(NamedTuple):
    """tokens (n,) int64; spoken (n,) bool: the assistant's tokens with their end token."""

    tokens: npt.NDArray[np.int64]
    spoken: npt.NDArray[np.bool_]


class Reader:
    """Turns rows into conversations, by one tokenizer and its template.

    The whole conversation is rendered and encoded as one text, as in transformers, since tokens
    depend on the surrounding text. Private characters that do not occur in the row mark the special
    tokens that messages spell out, and the text inside the template's own tags.
    """

    def __init__(self, tokenizer: FileTokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        longest_first = sorted(tokenizer.special, key=len, reverse=True)
        self._special = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._stand_ins: dict[str, str] = {}  # special token → a private character

    def read(self, row: Any) -> Conversation:
        """Reads a row. Raises Refused with the reason."""
        messages, tools = _checked(row), row.get("tools")
        held = set(self._template.text + json.dumps([messages, tools], ensure_ascii=False))
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
        """Finds the turns inside the template's own tags."""
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
        """Finds the turns by rendering the messages before each of them.

        Some templates render a turn differently once it is not the last; such a turn ends with the
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
        """Drops what a template writes after the last special token of a turn, such as blanks."""
        special = np.isin(made.tokens, list(self._tokenizer.special.values()))
        ends = np.flatnonzero(within & special)
        return within & (np.arange(within.size) <= ends[-1]) if ends.size else within

    def _specials(self, whole: str, marks: Marks, at: int = 0) -> Iterator[re.Match[str]]:
        """Finds special tokens from `at` on, `meant` or `spelled`, and single marks."""
        begin, end, *_ = marks
        pattern = f"{begin}(?P<spelled>{self._special}){end}|(?P<meant>{self._special})"
        return re.compile(f"{pattern}|[{begin}{end}]").finditer(whole, at)

    def _encoded(self, whole: str, marks: Marks, held: set[str]) -> Placed:
        """Encodes a whole conversation; places of tokens refer to `whole`."""
        plain = re.sub(f"[{marks[0]}{marks[1]}]", "", whole)
        try:
            plain.encode()
            if plain == whole:
                return self._tokenizer.place(whole)
            # With all special tokens meant, encoding by stand-ins must give the usual tokens.
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
        """Encodes a conversation with a private character in place of each special token that is
        meant; spelled ones stay text unless `every`."""
        if held & set(self._stand_ins.values()):
            self._stand_ins = {}
        pieces: list[tuple[str, int]] = []  # texts to encode, and where they begin in `whole`
        at = 0
        for found in self._specials(whole, marks):
            pieces.append((whole[at : found.start()], at))
            token = found["meant"] or (found["spelled"] if every else None)
            if token is not None:
                if token not in self._stand_ins:
                    taken = held.union(marks, self._stand_ins.values())
                    self._stand_ins[token] = _unused(taken, 1)[0]
                pieces.append((self._stand_ins[token], found.start()))
            elif found["spelled"]:
                pieces.append((found["spelled"], found.start("spelled")))
            at = found.end()
        texts, sources = zip(*pieces, (whole[at:], at), strict=True)
        begins = np.cumsum([0, *map(len, texts[:-1])])
        shifts = np.array(sources) - begins
        made = self._tokenizer.place_spelled("".join(texts), self._stand_ins)

        def source(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return places + shifts[np.searchsorted(begins, places, "right") - 1]

        # By the last character, as the next character may belong to another part.
        last = np.maximum(made.ends - 1, made.begins)
        return Placed(made.tokens, source(made.begins), source(last) + 1)


def _unused(held: set[str], count: int) -> tuple[str, ...]:
    """Returns private characters not in `held`. Raises Refused."""
    found = tuple(islice((c for c in map(chr, PRIVATE) if c not in held), count))
    if len(found) < count:
        raise Refused("holds nearly all of Unicode's private characters")
    return found


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value with its strings changed, except keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(each, change) for each in value]
    if isinstance(value, dict):
        return {key: _changed(each, change) for key, each in value.items()}
    return value


def _checked(row: Any) -> list[Message]:
    """Returns the messages of a row. Raises Refused."""
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
    """Returns a message as transformers passes it to a template: without nulls, its reasoning under
    each name that templates use."""
    message = {key: value for key, value in message.items() if value is not None}
    thought = next((message[name] for name in THOUGHTS if name in message), None)
    if thought is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}


# Conversations of a run: a pair of marked tokens in the token cache. A marked token is the token,
# plus SPOKEN where the assistant wrote it, so windows, packs and shuffles work as for documents.


VERSION = 2
SPOKEN = 1 << 30
TOKEN = SPOKEN - 1
DTYPE = np.dtype("<i4")
LOOKED_AT = 1 << 22  # tokens at a time
LONGEST = 64 << 20  # bytes of a row


class Chat(NamedTuple):
    """The inputs of a run's conversations."""

    documents: list[Document]
    tokenizer: FileTokenizer
    template: ChatTemplate

    @property
    def key(self) -> str:
        """A digest of all inputs: the cache's name."""
        made_of = cache_key(self.documents, self.tokenizer)
        return cache.digest_of(["chat", VERSION, made_of, self.template.text])


def find_chat(data: DataConfig) -> Chat:
    """Finds the files, tokenizer and template of data=chat. Raises UserError."""
    tokenizer = open_tokenizer(data.tokenizer) if data.tokenizer is not None else None
    if not isinstance(tokenizer, FileTokenizer):
        raise UserError(
            f"data=chat needs data.tokenizer, which is {show(data.tokenizer)}: give a folder with "
            "a tokenizer.json and a chat template, or run= of an imported model"
        )
    return Chat(find_documents(data), tokenizer, ChatTemplate(tokenizer))


def learned(
    tokens: Tokens, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Returns which pieces of marked tokens have a learned token after their first one."""
    begins, ends = starts + 1, starts + lengths
    spoken = np.zeros(starts.size, np.int64)  # in each piece
    for first in range(0, len(tokens), LOOKED_AT):
        places = np.flatnonzero(tokens[first : first + LOOKED_AT] & SPOKEN) + first
        spoken += np.searchsorted(places, ends) - np.searchsorted(places, begins)
    return spoken > 0


def nothing_said(held_out: bool) -> UserError:
    """Returns the error for a part of a corpus without a learned token."""
    part, share = ("held out", "a larger") if held_out else ("trained on", "a smaller")
    return UserError(
        f"data.path: the assistant says nothing in the samples that are {part}: give {share} "
        "data.valid_fraction, or a longer model.seq_length"
    )


class ChatSamples:
    """Samples of marked tokens with the marks removed; learns the assistant's tokens."""

    masks = True

    def __init__(self, marked: DatasetOrder) -> None:
        self._marked = marked
        self.seq_length, self.windows = marked.seq_length, marked.windows

    def will_read(self, i: int) -> None:
        """Prefetches the tokens of sample `i`."""
        self._marked.will_read(i)

    def sample(self, i: int) -> Sample:
        """Returns sample `i` >= 0; its mask is set where the next token is the assistant's."""
        sample = self._marked.sample(i)
        spoken = (sample.tokens & SPOKEN) != 0
        tokens = sample.tokens & TOKEN
        return Sample(tokens, sample.loss_mask & spoken[1:], sample.starts)


def write_chat(chat: Chat, writer: IndexedWriter) -> None:
    _log.info(f"building the token cache: conversations of {len(chat.documents)} files")
    reader = Reader(chat.tokenizer, chat.template)
    for where, row in _rows(chat.documents):
        try:
            found = reader.read(row)
        except Refused as error:
            raise UserError(f"data.path: {where} {error}; mend or remove it") from None
        if not found.spoken[1:].any():
            raise UserError(
                f"data.path: {where} has nothing that the assistant says; mend or remove it"
            )
        writer.add(found.tokens | np.where(found.spoken, SPOKEN, 0))
    if not writer.documents:
        raise UserError("data.path holds no conversations: give jsonl, a row each")


def _rows(documents: list[Document]) -> Iterator[tuple[str, Any]]:
    """Yields each row with its location. Raises UserError."""
    # Imported here, as fsspec loads slowly.
    from parallel3d.data.inputs import Input, of_input, opened

    for document in documents:
        packed = next((end for end in PACKED if document.path.endswith(end)), "")
        source = Input(f"file://{Path(document.path).absolute()}", LINES, packed, document.size, "")
        with of_input(document.path, "data.path"), opened(source) as (content, _):
            lines = iter(lambda: content.readline(LONGEST + 1), b"")
            for number, line in enumerate(lines, 1):
                if len(line) > LONGEST:
                    raise UserError(
                        f"data.path: {document.name}:{number} has more than {LONGEST:,} bytes, "
                        "which is no conversation; mend or remove it"
                    )
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    raise UserError(
                        f"data.path: {document.name}:{number} is no JSON; mend or remove it"
                    ) from None
                yield f"{document.name}:{number}", row
        check_unchanged(document, os.stat(document.path))
