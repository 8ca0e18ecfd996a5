"""Quotes the words of a command line so that Hydra does not change them.

Hydra reads `run=5e10423` as the number inf, `1.10` as 1.1 and the name in `{007:1}` as 7, and it
refuses `~` and `ü` outside quotes. Here a word is parsed by Hydra's grammar, and the parts that
Hydra would change are put in quotes. The grammar does not allow quoted names in braces. If Hydra
would change such a name, the braces as a whole become text, which `braces` parses afterwards.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.overrides_visitor import HydraErrorListener
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import (  # type: ignore[attr-defined]
    CommonTokenStream,
    InputStream,
    OverrideLexer,
)
from hydra.grammar.gen.OverrideParser import OverrideParser

from parallel3d.config.fields import Key
from parallel3d.config.paths import at_home, check_path, with_texts_of_variables
from parallel3d.errors import UserError

# Matches most of the values that Hydra leaves unchanged. They need no parser.
_PLAIN = re.compile(r"(?!(?i:true|false|inf|nan)\Z)[A-Za-z_/][A-Za-z0-9_./-]*")
# Matches characters that Hydra's grammar refuses outside quotes, though they mean nothing in it.
_FOREIGN = re.compile(r"[^\w\s=,:()\[\]{}'\"\\/\-+.$%*@?|]|[^\x00-\x7f]|[\n\r\f\v]")
_NUMBERS = (OverrideLexer.INT, OverrideLexer.FLOAT)
RUN = "run"  # key of the run's name
_CASTS = ("int", "float", "bool")
_RANGES = ("range", "interval")


class Edit(NamedTuple):
    """Replacement of the characters from `start` to before `end` in a word."""

    start: int
    end: int
    text: str


def in_quotes(text: str) -> str:
    """Returns the text with quotes and escapes of Hydra's grammar."""
    return QuotedString(text, Quote.single).with_quotes()


def quoted_twice(name: str, text: str) -> str:
    """Returns an override with its text in Hydra's quotes, quoted once more for a shell."""
    return shlex.quote(f"{name}={QuotedString(text, Quote.double).with_quotes()}")


def as_typed(word: str, key: Key | None = None) -> str:
    """Returns an override with quotes around those parts of its value that Hydra would change.

    Args:
        word: KEY=VALUE, where the value is text, a list or in braces, or several of these for a
            sweep.
        key: the key; None for a group or a section.

    Raises UserError for a duplicate name in braces, a cast such as int(…) in place of text, and a
    path that `check_path` refuses. Raises HydraException for a word that Hydra cannot parse.
    """
    word, start = with_texts_of_variables(word), word.index("=") + 1
    typed = word[start:]
    if _PLAIN.fullmatch(typed):
        return word
    value = _parsed(word).value()
    is_text = key is not None and key.kind is str and not key.meta["choices"]
    edits = [] if value is None else [*_edits(value, word, key)]
    is_plain = value is None or _is_plain(value)
    if is_text and is_plain and typed != typed.strip(" \t"):  # Hydra would drop spaces around it
        inside = "" if value is None else _text(_primitive(value), word)
        before = typed[: len(typed) - len(typed.lstrip(" \t"))]
        after = typed[len(typed.rstrip(" \t")) :] if inside else ""
        edits = [Edit(start, len(word), in_quotes(f"{before}{inside}{after}"))]
    if is_text and key is not None and key.holds is Path:
        edits = [*_path_edits(word, key, value, start, edits)]
    for edit in sorted(edits, reverse=True):
        word = f"{word[: edit.start]}{edit.text}{word[edit.end :]}"
    return word


def in_one_line(word: str) -> str:
    """Returns an override with blanks for line breaks next to the separators of a list or braces.

    Breaks inside items stay, and so do those of a value with quotes.
    """
    if re.search(r"['\"]", word) or not re.search(r"=\s*[\[{]", word):
        return word
    return re.sub(r"(?<=[\[{,:])\s*[\r\n]\s*|\s*[\r\n]\s*(?=[\]},:])", " ", word)


def option(word: str) -> str:
    """Returns the value of a plain override, without the quotes of Hydra's grammar."""
    value = word.partition("=")[2]
    return (
        str(OverridesParser.create().parse_override(word).value()) if value[:1] in "'\"" else value
    )


def braces(text: str) -> Any:
    """Parses text in braces into a dict of text by text; returns other text unchanged."""
    if not text.startswith("{"):
        return text
    word = f"x={text}"
    try:
        value = _parsed(word).value()
    except HydraException:
        return text
    element = value.element()
    return text if element is None else _inside(element, word)


def last_of_each(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words in effect, and a sentence for each key or group with several values.

    The last value counts, as in Hydra: a script may put words of its own before those of its user.
    Raises UserError for two names of a run, as the other run would be trained or read.
    """
    kept: dict[int, str] = dict(enumerate(words))
    seen: dict[str, int] = {}
    set_by: dict[int, list[str]] = {}
    lines = []
    for place, word in enumerate(words):
        value = word.partition("=")[2]
        if not (names := keys_of(word)):
            continue
        set_by[place] = names
        for name in names:
            before = seen.get(name)
            seen[name] = place
            if before is None:
                continue
            there = words[before]
            if there.partition("=")[2] != value:
                if name == RUN:
                    raise UserError(
                        f"{there} and {word}: {name} is given twice, and only one run can be "
                        f"meant; leave {there} out, or {word}."
                    )
                lines.append(f"{there} and {word}: {name} is given twice, and {word} counts")
            # A word in braces may set other keys as well; Hydra applies words in their order.
            if names == set_by[before] == [name]:
                kept.pop(before, None)
    return list(kept.values()), lines


def keys_of(word: str) -> list[str]:
    """Returns the keys and groups that a word of the command line sets; [] for a flag."""
    typed, equals, _ = word.partition("=")
    if word.startswith("-") or not (equals or word.startswith("~")):
        return []
    return _names(typed.lstrip("+~"), word)


def _names(name: str, word: str) -> list[str]:
    """Returns the keys that a word sets; `train={steps:1,log_every:2}` sets two."""
    inside = braces(word.partition("=")[2]) if "." not in name else None
    return [f"{name}.{leaf}" for leaf in inside] if isinstance(inside, dict) else [name]


def _parsed(word: str) -> OverrideParser.OverrideContext:
    """Parses an override by Hydra's grammar; characters that it refuses count as letters.

    Positions in the parse tree are positions in `word`. Raises HydraException for a syntax error.
    """
    name, equals, value = word.partition("=")
    value = _FOREIGN.sub("x", value)
    try:
        return _parsed_as_is(name + equals + value)
    except HydraException:
        # Hydra allows `=` in a value only as a function's argument; in other text it is a letter.
        if "=" not in value:
            raise
        return _parsed_as_is(name + equals + value.replace("=", "x"))


def _parsed_as_is(word: str) -> OverrideParser.OverrideContext:
    listener, lexer = HydraErrorListener(), OverrideLexer(InputStream(word))
    parser = OverrideParser(CommonTokenStream(lexer))
    for part in (lexer, parser):
        part.removeErrorListeners()
        part.addErrorListener(listener)
    return parser.override()


def _edits(ctx: Any, word: str, key: Key | None) -> Iterator[Edit]:
    """Yields edits that quote everything below a node that Hydra would change."""
    if isinstance(ctx, OverrideParser.PrimitiveContext):
        if not _is_kept(ctx, word):
            start, end = _place(ctx)
            yield Edit(start, end, in_quotes(_text(ctx, word)))
    elif isinstance(ctx, OverrideParser.DictContainerContext):
        if _has_other_names(ctx, word):
            start, end = _place(ctx)
            yield Edit(start, end, in_quotes(word[start:end]))
        else:
            for pair in _pairs(ctx):
                yield from _edits(pair.element(), word, key)
    elif isinstance(ctx, OverrideParser.FunctionContext):
        name = ctx.ID().getText()
        if name in _CASTS and key is not None and key.kind in (str, list):
            raise UserError(
                f"{word}: {key.name} is text, and {name}() makes a number; give the text itself, "
                f"or {quoted_twice(key.name, word[slice(*_place(ctx))])} for the text with "
                f"{name}()."
            )
        if name not in (*_CASTS, *_RANGES):
            named = False
            for child in ctx.getChildren():
                if isinstance(child, OverrideParser.ElementContext) and not named:
                    yield from _edits(child, word, key)
                named = isinstance(child, OverrideParser.ArgNameContext)
    elif ctx.getChildCount():  # a token has no children
        for child in ctx.getChildren():
            yield from _edits(child, word, key)


def _path_edits(word: str, key: Key, value: Any, start: int, edits: list[Edit]) -> Iterator[Edit]:
    """Yields `edits`, or one edit that expands `~` in a path. Raises UserError for a bad path."""
    if value is None and not edits:
        check_path(key.name, "")
    if value is None or not _is_plain(value, quoted=True):
        yield from edits
        return
    ctx = _primitive(value)
    text = _text(ctx, word)
    if "${" not in text and not _is_null(ctx):
        check_path(key.name, at_home(text))
    if at_home(text) == text:
        yield from edits
    else:
        yield Edit(start, len(word), in_quotes(at_home(text)))


def _inside(ctx: Any, word: str) -> Any:
    """Returns the value of an element: text, None, a list or a dict."""
    if ctx.dictContainer():
        pairs = _pairs(ctx.dictContainer())
        return {_text(p.dictKey(), word): _inside(p.element(), word) for p in pairs}
    if ctx.listContainer():
        return [_inside(element, word) for element in ctx.listContainer().element()]
    if ctx.function():
        return word[slice(*_place(ctx))]
    return None if _is_null(ctx.primitive()) else _text(ctx.primitive(), word)


def _pairs(ctx: OverrideParser.DictContainerContext) -> list[Any]:
    return list(ctx.dictKeyValuePair())


def _has_other_names(ctx: OverrideParser.DictContainerContext, word: str) -> bool:
    """Returns whether Hydra would change a name in these braces or in braces inside them.

    Raises UserError for a duplicate name.
    """
    names = [_text(pair.dictKey(), word) for pair in _pairs(ctx)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{word}: {twice} occurs twice in the same braces; leave one of them out.")
    inside = [pair.element().dictContainer() for pair in _pairs(ctx)]
    deeper = [_has_other_names(container, word) for container in inside if container]
    return any(deeper) or not all(_is_kept(p.dictKey(), word, name=True) for p in _pairs(ctx))


def _tokens(ctx: Any) -> list[Any]:
    """Returns the tokens of a primitive, without whitespace around it."""
    symbols = [child.symbol for child in ctx.getChildren()]
    while symbols and symbols[0].type == OverrideLexer.WS:
        symbols.pop(0)
    while symbols and symbols[-1].type == OverrideLexer.WS:
        symbols.pop()
    return symbols


def _place(ctx: Any) -> tuple[int, int]:
    return ctx.start.start, ctx.stop.stop + 1


def _text(ctx: Any, word: str) -> str:
    """Returns the text of a primitive, without the grammar's quotes and backslashes."""
    symbols = _tokens(ctx)
    if [symbol.type for symbol in symbols] == [OverrideLexer.QUOTED_VALUE]:
        quoted = word[symbols[0].start : symbols[0].stop + 1]
        return str(OverridesParser.create().parse_override(f"x={quoted}").value())
    spelled = (word[symbol.start : symbol.stop + 1] for symbol in symbols)
    is_escape = (symbol.type == OverrideLexer.ESC for symbol in symbols)
    return "".join(t[1::2] if e else t for t, e in zip(spelled, is_escape, strict=True))


def _is_kept(ctx: Any, word: str, name: bool = False) -> bool:
    """Returns whether Hydra keeps the text of a primitive, so that it needs no quotes."""
    symbols = _tokens(ctx)
    spelled = [word[symbol.start : symbol.stop + 1] for symbol in symbols]
    if any("=" in text or _FOREIGN.search(text) for text in spelled):
        return [symbol.type for symbol in symbols] == [OverrideLexer.QUOTED_VALUE]
    if len(symbols) != 1:
        return True
    kind, text = symbols[0].type, symbols[0].text
    if kind in _NUMBERS:
        number = int if kind == OverrideLexer.INT else float
        # 1 and 1.0 are the same name in a dict, and Python reads at most 4300 digits by default.
        is_one = kind == OverrideLexer.INT or not name
        return is_one and len(text) < 4300 and str(number(text)) == text
    return kind != OverrideLexer.BOOL and not (name and kind == OverrideLexer.NULL)


def _is_null(ctx: Any) -> bool:
    return [symbol.type for symbol in _tokens(ctx)] == [OverrideLexer.NULL]


def _primitive(value: Any) -> Any:
    return value.element().primitive()


def _is_plain(value: Any, quoted: bool = False) -> bool:
    """Returns whether a value is a single word; `quoted` allows quotes around it."""
    ctx = value.element() and value.element().primitive()
    if not ctx:
        return False
    return quoted or OverrideLexer.QUOTED_VALUE not in [s.type for s in _tokens(ctx)]
