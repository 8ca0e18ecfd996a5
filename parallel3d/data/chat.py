"""Tokenizes chat conversations with a Hugging Face template, and marks the tokens to learn."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data import cache
from parallel3d.data.chat_rows import (
    ASSISTANT,
    CALLS,
    TOOL,
    USER,
    Message,
    RefusedRow,
    RowReport,
    UnfitTemplate,
    parse,
    read_row,
    unread_of,
)
from parallel3d.data.chat_shown import MessageFinder, Rendering
from parallel3d.data.chat_template import NO_DATE, ChatTemplate
from parallel3d.data.formats import CHAT
from parallel3d.data.indexed import IndexedWriter
from parallel3d.data.inputs import JUDGED, rows
from parallel3d.data.sampler import DatasetOrder, Sample
from parallel3d.data.sources import (
    Document,
    cache_key,
    check_unchanged,
    input_of,
    take_documents,
)
from parallel3d.data.tokenizer import (
    BYTE,
    EOS,
    GENERATION,
    FileTokenizer,
    PlacedTokens,
    UnencodableText,
    open_tokenizer,
)
from parallel3d.data.tokens import Tokens
from parallel3d.errors import UserError
from parallel3d.files import plain
from parallel3d.text import count

if TYPE_CHECKING:
    from parallel3d.data.keys import DataConfig


_log = logging.getLogger(__name__)

# Conversations as tokens


PRIVATE = range(0xE000, 0xF900)  # Unicode's private characters, which have no meaning
# Characters [begin, end) of the text that the assistant wrote, and the number of its (last)
# message, or None if that is unknown.
Turn = tuple[int, int, int | None]
# Three pairs of characters, which enclose the special tokens that messages spell out, the text in
# `{% generation %}`, and the numbers of anchors.
Marks = tuple[str, ...]
TAG_EACH = "give a template that puts these tags around each message of the assistant"
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")


class Conversation(NamedTuple):
    """A tokenized conversation.

    Attributes:
        tokens: (n,) int64.
        spoken: (n,) bool, true for the learned tokens: the assistant's words and ends of turns.
        unread: keys of the row that nothing reads.
        drops_thoughts: whether the template leaves some thoughts out.
    """

    tokens: npt.NDArray[np.int64]
    spoken: npt.NDArray[np.bool_]
    unread: frozenset[str] = frozenset()
    drops_thoughts: bool = False


class Reader:
    """Turns rows into conversations, with one tokenizer and its template.

    The whole conversation is rendered and encoded as one text, as in transformers, since tokens
    depend on the surrounding text. Private characters that do not occur in the row mark special
    tokens spelled out in messages, text inside the template's `{% generation %}` tags, and ends of
    messages.
    """

    def __init__(self, tokenizer: FileTokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        longest_first = sorted(tokenizer.special, key=len, reverse=True)
        self._special = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._added = sorted(tokenizer.added, key=len, reverse=True)
        self._ends = {text for text, n in tokenizer.special.items() if n in tokenizer.ends}
        self._stand_ins: dict[str, str] = {}  # special token → a private character

    def read(self, row: Any) -> Conversation:
        """Returns the conversation in a row. Raises RefusedRow with the reason."""
        asked = read_row(row)
        template = self._template.of(asked.tools)
        unread = unread_of(asked, template.reads, template.takes)
        more = (asked.tools, asked.documents, asked.more)
        messages = template.fitted(asked.messages)
        if any("content" not in message for message in messages):
            messages = _with_contents(Rendering(template, messages, *more))
        given: list[Any] = [messages, *more]
        held = set(template.text + json.dumps(given, ensure_ascii=False))
        marks = _unused(held, 6)
        around = rf"{marks[0]}\g<0>{marks[1]}"
        marked = _changed(given, lambda text: re.sub(self._special, around, text))
        rendering = Rendering(template, *marked)
        whole = rendering.text()
        if marked != given and _without(whole, marks[:2]) != Rendering(template, *given).text():
            raise RefusedRow(
                "spells out special tokens that its chat template looks for: write thoughts "
                "under the key reasoning_content, and calls under tool_calls"
            )
        shown = MessageFinder(rendering, whole, marks, asked)
        shown.check()
        turns = self._tagged(shown) if template.has_tags else self._untagged(shown)
        whole, turns = self._ended(shown, turns)
        made = self._encoded(whole, marks, held)
        spoken = np.zeros(made.tokens.size, np.bool_)
        for begin, end, _ in turns:
            within = (made.begins < end) & (np.maximum(made.ends, made.begins + 1) > begin)
            if not template.has_tags:
                within = self._until_its_end(made, within, whole[:end])
            spoken |= within
        return Conversation(made.tokens, spoken, unread, shown.drops_thoughts())

    def _tagged(self, shown: MessageFinder) -> list[Turn]:
        """Finds the learned turns by the template's `{% generation %}` tags."""
        _, _, opening, closing, *_ = shown.marks
        marked = shown.rendering.text(around=(opening, closing))
        pieces = re.split(f"([{opening}{closing}])", marked)
        at = 0
        begins = []
        turns: list[tuple[int, int]] = []
        for piece in pieces:
            if piece == opening:
                begins.append(at)
            elif piece == closing and begins:
                turns.append((begins.pop(), at))
            else:
                at += len(piece)
        if begins or shown.whole != "".join(pieces[::2]):
            raise RefusedRow(
                "cannot be read, because the chat template changes the text inside its "
                "{% generation %} tags; give a template that leaves it unchanged"
            )
        left: list[Turn] = []
        own = [n for n, message in enumerate(shown.row.messages) if message["role"] == ASSISTANT]
        for at, turn in enumerate(turns):
            speakers = {own[at]} if len(own) == len(turns) else shown.speakers(turn)
            for number in speakers:
                if shown.row.learned[number]:
                    self._check_speaks(shown, number, *turn)
            last = max(speakers, default=None)
            if shown.all_learned:
                left.append((*turn, last))
                continue
            if not speakers:
                raise RefusedRow(
                    "selects messages to learn, but it is unclear which of them the "
                    f"{{% generation %}} tags of its template enclose; {TAG_EACH}"
                )
            if all(shown.row.learned[number] for number in speakers):
                left.append((*turn, last))
            elif any(shown.row.learned[number] for number in speakers):
                raise RefusedRow(
                    "has a message to learn and one not to learn between the same {% generation %} "
                    f"tags of its template; {TAG_EACH}"
                )
        return left

    def _untagged(self, shown: MessageFinder) -> list[Turn]:
        """Finds the learned turns by rendering the messages before each of them.

        Some templates render a turn differently, or drop its thoughts, once it is no longer the
        last one. The place of such a turn is found from the end of the previous message and the end
        of the turn's words.
        """
        turns: list[Turn] = []
        for number, message in enumerate(shown.row.messages):
            if message["role"] != ASSISTANT or not shown.row.learned[number]:
                continue
            begin = shown.begin(number)
            end = shown.end(number, begin) or self._special_end(shown, number, begin)
            if turns and begin < turns[-1][1]:
                raise shown.unknown(number)
            self._check_speaks(shown, number, begin, end)
            turns.append((begin, end, number))
        return turns

    def _ended(self, shown: MessageFinder, turns: Sequence[Turn]) -> tuple[str, list[Turn]]:
        """Extends turns to the tokens that end them, and adds an end that is not printed.

        With some templates, such as GLM-4's, the marker of the next role ends a turn; others print
        the end of a turn only before another message. Such a token counts if it is among the
        tokenizer's `ends`. Returns the text, to which the end of the last turn is added if the
        template prints it only before another message. Raises RefusedRow for turns without an end,
        unless `{% generation %}` tags mark them.
        """
        whole, found = shown.whole, []
        special = re.compile(rf"\s*({self._special})")
        for begin, end, number in turns:
            own = self._end_within(shown, begin, end)
            behind = special.match(whole, end)
            is_last = not whole[end:].strip()
            if own in self._ends:
                pass
            elif behind is not None and behind[1] in self._ends:
                end = behind.end()
            elif is_last and (more := self._end_behind(shown, number)) is not None:
                if more.strip() in self._ends:
                    whole += more
                    end = len(whole)
                elif own is None and not shown.rendering.template.has_tags:
                    raise self._endless(shown, number, more.strip())
            elif own is None and not shown.rendering.template.has_tags:
                raise self._endless(shown, number, behind and behind[1])
            found.append((begin, end, number))
        return whole, found

    def _end_within(self, shown: MessageFinder, begin: int, end: int) -> str | None:
        """Returns the added token in which a turn ends, or None if it ends in plain text."""
        text = shown.whole[begin:end].rstrip()
        return next((token for token in self._added if text.endswith(token)), None)

    def _end_behind(self, shown: MessageFinder, number: int | None) -> str | None:
        """Returns the blanks and the special token that would follow the text before a message.

        The message is a tool's after a call in message `number`, and otherwise the user's.
        """
        message = shown.rendering.messages[-1 if number is None else number]
        roles = (TOOL, USER) if message.get(CALLS) else (USER,)
        for role in roles:
            tail, gap = shown.rendering.template.after_turn(role)
            marker = re.match(rf"(\s*)({self._special})", gap)
            if marker is not None:
                before = marker[1].removeprefix(tail) if gap.startswith(tail) else ""
                return before + marker[2]
        return None

    def _endless(self, shown: MessageFinder, number: int | None, follows: str | None) -> RefusedRow:
        """Returns the error for a turn without an end; `follows` is the special token behind it."""
        messages = shown.rendering.messages
        named = "a turn" if number is None else shown.row.names[number]
        said = number is not None and [m["role"] for m in messages[number : number + 2]]
        if said == [ASSISTANT] * 2:
            return RefusedRow(
                f"has {named} and another of role {ASSISTANT} behind it, but no token of its chat "
                "template ends the first: join them"
            )
        if follows is None:
            return UnfitTemplate(
                f"has {named}, which ends in no special token, so the model would not learn to end "
                "a turn: write {{ eos_token }} behind the assistant's words in the chat template, "
                "or put {% generation %} tags around all that is to be learned"
            )
        ends = sorted({*self._tokenizer.ends, self._tokenizer.special[follows]})
        return UnfitTemplate(
            f"has {named}, which only {plain(follows)} ends, the token that begins the next turn, "
            "but it is not among the tokens that end a generation: if the model is to stop there, "
            f'write "{EOS}": {ends} into the {GENERATION} next to the tokenizer.json'
        )

    def _special_end(self, shown: MessageFinder, number: int, begin: int) -> int:
        """Returns the end of the first special token after a turn's words. Raises RefusedRow."""
        behind = self._specials(shown.whole, shown.marks, shown.words_end(number, begin))
        end = next((found.end() for found in behind if found["meant"]), None)
        if end is None:
            raise shown.unknown(number)
        return end

    def _check_speaks(self, shown: MessageFinder, number: int, begin: int, end: int) -> None:
        """Raises RefusedRow for a turn without words, because only its end would be learned."""
        text, at = "", begin
        for found in self._specials(shown.whole, shown.marks, begin):
            if found.start() >= end:
                break
            text += shown.whole[at : found.start()] + (found["spelled"] or "")
            at = found.end()
        text += shown.whole[at:end]
        if not EMPTY_THOUGHT.sub("", text).strip():
            raise shown.silent(number)

    def _until_its_end(
        self, made: PlacedTokens, within: npt.NDArray[np.bool_], until: str
    ) -> npt.NDArray[np.bool_]:
        """Removes the blanks after the last special token of a turn from the mask `within`.

        `until` is the text up to the end of the turn.
        """
        special = np.isin(made.tokens, list(self._tokenizer.special.values()))
        ends = np.flatnonzero(within & special)
        if not ends.size:
            return within
        last = re.compile(self._special).search(until, made.begins[ends[-1]])
        if last is None or until[last.end() :].strip():
            return within
        return within & (np.arange(within.size) <= ends[-1])

    def _specials(self, whole: str, marks: Marks, at: int = 0) -> Iterator[re.Match[str]]:
        """Finds special tokens and unpaired marks from position `at` on.

        A special token is in the group `spelled` if a message spells it out, and otherwise in
        `meant`.
        """
        begin, end, *_ = marks
        pattern = f"{begin}(?P<spelled>{self._special}){end}|(?P<meant>{self._special})"
        return re.compile(f"{pattern}|[{begin}{end}]").finditer(whole, at)

    def _encoded(self, whole: str, marks: Marks, held: set[str]) -> PlacedTokens:
        """Returns the tokens of a conversation, with their places in `whole`. Raises RefusedRow."""
        plain = _without(whole, marks[:2])
        try:
            plain.encode()
            if plain == whole:
                return self._tokenizer.place(whole)
            # With a stand-in for every special token, encoding must give the usual tokens.
            every = self._stood_in(whole, marks, held, every=True)
            if not np.array_equal(every.tokens, self._tokenizer.place(plain).tokens):
                raise RefusedRow(
                    "spells out special tokens, which cannot be encoded as plain text with its "
                    "tokenizer"
                )
            made = self._stood_in(whole, marks, held, every=False)
        except UnicodeEncodeError:
            raise RefusedRow("has half of a surrogate pair, which is not a character") from None
        except UnencodableText as error:
            raise RefusedRow(f"cannot be encoded by its tokenizer ({error.why})") from None
        for begin, end in zip(made.begins.tolist(), made.ends.tolist(), strict=True):
            if whole[begin - 1 : begin] == marks[0] and whole[end : end + 1] == marks[1]:
                raise RefusedRow(
                    f"spells out {whole[begin:end]}, which its tokenizer turns into that token "
                    "even when it is plain text"
                )
        return made

    def _stood_in(self, whole: str, marks: Marks, held: set[str], every: bool) -> PlacedTokens:
        """Encodes a conversation with a private character in place of each special token.

        Special tokens that a message spells out stay text, unless `every` is set.
        """
        if held & set(self._stand_ins.values()):
            self._stand_ins = {}
        pieces: list[tuple[str, int]] = []  # texts to encode, and their positions in `whole`
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

        # The end is computed from the last character, because the next one may belong to another
        # piece.
        last = np.maximum(made.ends - 1, made.begins)
        return PlacedTokens(made.tokens, source(made.begins), source(last) + 1)


def _with_contents(rendering: Rendering) -> list[Message]:
    """Returns a rendering's messages; adds empty contents if the template fails without them."""
    try:
        rendering.text()
        return list(rendering.messages)
    except RefusedRow:
        return [{"content": "", **message} for message in rendering.messages]


def _without(text: str, marks: Marks) -> str:
    return re.sub(f"[{''.join(marks)}]", "", text)


def _unused(held: set[str], count: int) -> tuple[str, ...]:
    """Returns `count` private characters that are not in `held`. Raises RefusedRow."""
    found = tuple(islice((c for c in map(chr, PRIVATE) if c not in held), count))
    if len(found) < count:
        raise RefusedRow("holds nearly all of Unicode's private characters")
    return found


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value with `change` applied to all its strings except keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(each, change) for each in value]
    if isinstance(value, dict):
        return {key: _changed(each, change) for key, each in value.items()}
    return value


# The token cache keeps a run's conversations as an indexed dataset of marked tokens. A marked token
# is a token, plus SPOKEN if it is learned, so windows, packs and shuffles work as for documents.


VERSION = 4
SPOKEN = 1 << 30
TOKEN = SPOKEN - 1
DTYPE = np.dtype("<i4")
LOOKED_AT = 1 << 22  # number of tokens read at a time
LONGEST = 64 << 20  # maximum number of bytes of a row


class Chat(NamedTuple):
    """The inputs of a run's conversations. `lines` describe how the files of folders were read."""

    documents: list[Document]
    tokenizer: FileTokenizer
    template: ChatTemplate
    most_bad: float  # largest share of rows that may be left out
    lines: list[str]

    @property
    def key(self) -> str:
        """A digest of all inputs, which names the entry in the token cache."""
        made_of = cache_key(self.documents, self.tokenizer)
        dated = [] if self.template.date is None else [self.template.date]
        facts = ["chat", VERSION, made_of, self.template.texts, self.most_bad, *dated]
        return cache.digest_of(facts)


def find_chat(data: DataConfig) -> Chat:
    """Finds the files, tokenizer and template of data=chat. Raises UserError."""
    tokenizer = open_tokenizer(data.tokenizer) if data.tokenizer is not None else None
    if not isinstance(tokenizer, FileTokenizer):
        raise UserError(
            "data=chat needs a tokenizer with a chat template, but data.tokenizer is "
            f"{show(data.tokenizer)}; give a folder with a tokenizer.json and a chat template, or "
            "run= of an imported model"
        )
    documents, lines = take_documents(data)
    template = ChatTemplate(tokenizer, data.chat_date)
    if template.is_dated and data.chat_date is None:
        raise UserError(f"{template.named} cannot be used as it is, because {NO_DATE}")
    return Chat(documents, tokenizer, template, data.skip_bad_rows, lines)


def with_date(data: DataConfig) -> tuple[DataConfig, list[str]]:
    """Returns `data` with the date of today if its chat template shows a date, and a line on it.

    A date that is given stays. Raises UserError for an invalid tokenizer or template.
    """
    if data.name != "chat" or data.chat_date is not None or data.tokenizer in (None, BYTE):
        return data, []
    tokenizer = open_tokenizer(data.tokenizer)
    if not isinstance(tokenizer, FileTokenizer) or not ChatTemplate(tokenizer).is_dated:
        return data, []
    today = date.today().isoformat()
    line = (
        f"data.chat_date={today}: the chat template shows today's date, and this run keeps the day "
        "of its first start"
    )
    return replace(data, chat_date=today), [line]


def learned(
    tokens: Tokens, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Returns, for each piece of marked tokens, whether any token after its first is learned."""
    begins, ends = starts + 1, starts + lengths
    spoken = np.zeros(starts.size, np.int64)  # number of learned tokens in each piece
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
    """Removes the marks from samples of marked tokens, and masks labels that are not marked."""

    masks = True

    def __init__(self, marked: DatasetOrder) -> None:
        self._marked = marked
        self.seq_length = marked.seq_length
        self.windows = marked.windows

    def will_read(self, i: int) -> None:
        """Prefetches the tokens of sample `i`."""
        self._marked.will_read(i)

    def sample(self, i: int) -> Sample:
        """Returns sample `i` >= 0, in which only the learned labels count."""
        sample = self._marked.sample(i)
        spoken = (sample.tokens & SPOKEN) != 0
        tokens = sample.tokens & TOKEN
        return sample._replace(tokens=tokens, loss_mask=sample.loss_mask & spoken[1:])


def write_chat(chat: Chat, writer: IndexedWriter) -> dict[str, Any]:
    """Writes all conversations; returns facts to cache, with notes for the user about the rows.

    Raises UserError if more rows than allowed are not conversations, or if no row is one.
    """
    _log.info(f"building the token cache: conversations in {count(len(chat.documents), 'file')}")
    reader, told = Reader(chat.tokenizer, chat.template), RowReport()
    for where, line in _rows(chat.documents):
        told.rows += 1
        try:
            found = reader.read(_row_of(line))
            if not found.spoken[1:].any():
                raise RefusedRow("has no words from the assistant to learn")
        except UnfitTemplate as error:
            raise UserError(f"data.path: {where} {error}") from None
        except RefusedRow as error:
            told.bad += 1
            told.first = told.first or f"{where} {error}"
            _judge(chat, told, least=JUDGED)
            continue
        told.count(found.unread, found.drops_thoughts)
        writer.add(found.tokens | np.where(found.spoken, SPOKEN, 0))
    _judge(chat, told, least=1)
    if not writer.documents:
        raise UserError(
            "data.path holds no conversations; give jsonl with one conversation per row"
        )
    return {"told": told.lines()}


def _judge(chat: Chat, told: RowReport, least: int) -> None:
    """Raises UserError if too many rows are bad.

    The share of bad rows is checked from `least` rows on. If none is allowed, the first one raises.
    """
    if not chat.most_bad and told.bad:
        raise UserError(
            f"data.path: {told.first}; fix or remove this row, or give data.skip_bad_rows=0.01 "
            "to leave out such rows, up to 1 % of all"
        )
    if told.rows >= least and told.bad > chat.most_bad * told.rows:
        raise UserError(
            f"data.path: {told.bad:,} of the first {told.rows:,} rows are not conversations, more "
            f"than data.skip_bad_rows={chat.most_bad:g} of them, beginning with this one: "
            f"{told.first}; fix these rows, or give a larger data.skip_bad_rows"
        )


def _row_of(row: Any) -> Any:
    """Parses a line of jsonl; returns a row of parquet unchanged. Raises RefusedRow."""
    if not isinstance(row, bytes):
        return row
    if len(row) > LONGEST:
        raise RefusedRow(f"has more than {LONGEST:,} bytes, which is too long for a conversation")
    return parse(row)


def _rows(documents: list[Document]) -> Iterator[tuple[str, Any]]:
    """Yields the location of each row, and the row as `inputs.rows` reads it. Raises UserError."""
    for document in documents:
        for number, row in rows(input_of(document, CHAT), LONGEST):
            yield f"{document.name}:{number}", row
        check_unchanged(document, os.stat(document.path))
