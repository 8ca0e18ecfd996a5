"""Recognises the formats of files by a grammar of endings, and by their first bytes.

A file's ending states its content and compression, and its first bytes must agree. `KIND_OF` and
`PACKED` list all that is read; one sentence, `not_read`, answers every other file. All code that
opens a user's file checks the file here: `data tokenize` and `data train-tokenizer`, data=text,
data=chat, data.valid and `eval tasks=`.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from parallel3d.data.chat_rows import LISTS, PROMPT
from parallel3d.data.unpacking import first_unpacked
from parallel3d.files import plain
from parallel3d.text import count

LINES = "jsonl"
PARQUET = "parquet"
TEXT = "text"
KINDS = (LINES, PARQUET, TEXT)
HEAD = 4096  # number of bytes that are inspected


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The grammar: a name is NAME, NAME.KIND, NAME.PACKED or NAME.KIND.PACKED.

ROWS_ENDS: Final = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines", ".json"), LINES),
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
}
PROSE = (".txt", ".text")
# Endings of code and markup. Such files are text, but their names indicate no split, and next to
# files of rows they are regarded as descriptions of the rows.
CODE = _words(
    ".md .markdown .rst .tex .bib .org .adoc .html .htm .xhtml .xml .css .scss .less .js .mjs .cjs "
    ".ts .tsx .jsx .vue .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .hxx .cu .cuh .m .mm "
    ".java .kt .kts .scala .go .rs .swift .rb .php .pl .pm .lua .r .jl .hs .lhs .ml .mli .fs .cs "
    ".vb .dart .ex .exs .erl .hrl .clj .cljs .lisp .el .scm .rkt .asm .s .f .f90 .f95 .for .sql "
    ".sh .bash .zsh .fish .ps1 .bat .cmd .mk .cmake .gradle .toml .yaml .yml .ini .cfg .conf "
    ".properties .diff .patch .proto .thrift .graphql .tf .nix .v .sv .vhd .vhdl .sol .zig .nim "
    ".d .pas .lean .thy .agda .po .cff .in .am .ac .rules .service .dockerfile .svg"
)
OTHER_TEXT = (".log", ".tokens", ".raw", ".srt", ".vtt")
LANGUAGE: Final = re.compile(r"\.[a-z]{2}")  # as in train.de, one language of a translated text
KIND_OF: Final = {**ROWS_ENDS, **dict.fromkeys(("", *PROSE, *sorted(CODE), *OTHER_TEXT), TEXT)}
PACKED: Final = {
    **dict.fromkeys((".gz", ".gzip"), ".gz"),
    **dict.fromkeys((".zst", ".zstd"), ".zst"),
    **dict.fromkeys((".xz", ".lzma"), ".xz"),
    ".bz2": ".bz2",
}
UNPACK = "unpack it and give the files in it"
# First bytes of the compressions that are read and of parquet, by keys of NAMES.
_MAGIC: Final = (
    (b"\x1f\x8b", ".gz"),
    (b"\x28\xb5\x2f\xfd", ".zst"),
    *((bytes((0x50 + k,)) + b"\x2a\x4d\x18", ".zst") for k in range(16)),
    (b"\xfd7zXZ\x00", ".xz"),
    (b"\x5d\x00\x00", ".xz"),
    *((b"BZh%d1AY&SY" % k, ".bz2") for k in range(1, 10)),
    *((b"BZh%d\x17rE8P\x90" % k, ".bz2") for k in range(1, 10)),  # an empty file
    (b"PAR1", PARQUET),
)
NAMES: Final = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2", PARQUET: "parquet"}
NO_TEXT = "bytes that are not text"
# Texts that stand for a file which was not fetched.
_POINTERS: Final = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer", "git lfs pull"),
    (b"/annex/objects/", "a git-annex pointer", "git annex get"),
)
_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_PAGE = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html|head)\b",
    re.IGNORECASE | re.DOTALL,
)
CONTROLS = bytes({*range(32), 127} - {*b"\0\t\n\v\f\r\b\x1b\x1a"})
MOST_CONTROLS = 0.01  # largest number of control characters, as a fraction of a text's bytes
BROKEN = 1000  # at most one in this many characters of a text may be replaced


class UnsupportedFile(ValueError):
    """Raised for a file that is not read; the message follows the file's name."""


class Form(NamedTuple):
    """A file's format: one of KINDS, and a compression, which is a value of PACKED or ""."""

    kind: str
    packed: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{self.packed}"


class InputRules(NamedTuple):
    """The rules for files that users name in one place.

    Attributes:
        key: the configuration key, for errors.
        other: advice to give the kind explicitly; the kind follows these words.
        kinds: the kinds that are read from there.
        column: remedy for a text column that is not named "text"; "" for none.
        remedy: remedy for a file of another kind.
        keys: keys of a row, any of which shows that a JSON object is one.
    """

    key: str
    other: str
    kinds: tuple[str, ...] = KINDS
    column: str = ""
    remedy: str = "write one document per row"
    keys: tuple[str, ...] = ("text",)


INPUT = InputRules("input", "give format=")
_TOKENIZE = "make a corpus of it with `parallel3d data tokenize` "
PATH = InputRules("data.path", f"{_TOKENIZE}format=", KINDS, f"{_TOKENIZE}text_key=")
CHAT = PATH._replace(
    kinds=(LINES, PARQUET),
    remedy="write one conversation per row",
    keys=(*LISTS, PROMPT),
)
TASKS = InputRules(
    *("tasks", "write it as ", (LINES, PARQUET)),
    remedy="write one question per row",
    keys=("context",),
)


# Names


def file_name(address: str) -> str:
    """Returns the last part of a path, or of an address without its query."""
    scheme, there, rest = address.partition("://")
    if not there or scheme in ("file", "local"):
        return address.rstrip("/").rpartition("/")[2]
    if scheme in ("http", "https", "webdav", "ftp"):
        return unquote(urlsplit(address).path).rstrip("/").rpartition("/")[2]
    # Other stores allow any character in a name, but ?versionId= and ?download= are not part of it.
    return unquote(re.sub(r"\?[\w-]+=[^/]*$", "", rest)).rstrip("/").rpartition("/")[2]


def endings(name: str) -> tuple[str, str]:
    """Returns a name's endings for content and compression in lower case, each "" if missing."""
    bare, end = os.path.splitext(name.strip())
    packed = PACKED.get(end.lower(), "")
    if not packed:
        return end.lower(), ""
    return os.path.splitext(bare)[1].lower(), packed


def named(name: str, typed: str | None = None) -> Form | None:
    """Returns the format that a file's name indicates, or None if the grammar has no such name.

    `typed` is the kind that the user gave, or None.
    """
    end, packed = endings(name)
    kind = typed or KIND_OF.get(end) or (TEXT if LANGUAGE.fullmatch(end) else None)
    if kind is None or (kind == PARQUET and packed) or (packed and end in PACKED):
        return None
    return Form(kind, packed)


def read_by(rules: InputRules) -> str:
    """Returns the words for what is read from a place where users name files."""
    text = f", text from {' '.join(PROSE)}, code and names without an ending"
    datasets = ", and indexed datasets (.bin and .idx) with data=corpus"
    if TEXT not in rules.kinds:
        text = datasets = ""
    return (
        f"rows are read from {' '.join(ROWS_ENDS)}{text}, all but parquet also as "
        f"{' '.join(dict.fromkeys(PACKED.values()))}{datasets}"
    )


def not_read(name: str, rules: InputRules, what: str = "") -> UnsupportedFile:
    """Returns the error for a file whose ending is not read; `what` describes its content."""
    end, packed = endings(name)
    ends = f"{end}{os.path.splitext(name)[1] if packed else ''}"
    holds = f", and holds {what}" if what else ""
    may_be_text = TEXT in rules.kinds and what not in (NO_TEXT, *NAMES.values())
    bare, last = os.path.splitext(name) if packed else (name, "")
    text = f", or, if it is text, name it {plain(bare)}.txt{last}" if may_be_text else ""
    return UnsupportedFile(
        f"ends in {plain(ends)}, which is not read{holds}: {read_by(rules)}; unpack an archive, "
        f"and {rules.remedy} of a .jsonl{text}"
    )


def said_of(name: str, typed: str | None) -> list[str]:
    """Returns a sentence on a text whose ending the grammar lacks, or none for another file."""
    if named(name, typed) is not None:
        return []
    return [
        f"{plain(name)} has an ending of no known format, but its first bytes are text, so all of "
        "it is read as one document"
    ]


def said_of_returns(heads: Mapping[str, bytes | None], forms: Mapping[str, Form]) -> list[str]:
    """Returns a sentence on carriage returns in files of text, or none if the texts have none.

    `heads` and `forms` are the first bytes and the formats of the files, by their names.
    """
    found = [n for n, form in forms.items() if form == Form(TEXT) and b"\r\n" in (heads[n] or b"")]
    if not found:
        return []
    return [
        f"line ends of Windows (\\r\\n) are kept in {count(len(found), 'file')}, such as "
        f"{plain(found[0])}: `dos2unix` drops them"
    ]


# First bytes


def content_of(head: bytes) -> str | None:
    """Returns the format of a file's first bytes, a key of `NAMES`; None for all others."""
    for magic, what in _MAGIC:
        if head.startswith(magic) and (not _is_word(magic) or _is_binary(head)):
            return what
    return None


def _is_word(magic: bytes) -> bool:
    """Returns whether a text may begin with a format's first bytes, as with PAR1."""
    return len(magic) <= 6 and magic.isalnum()


def _is_binary(head: bytes) -> bool:
    if b"\x00" in head:
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return True
    return False


def encoding_of(head: bytes) -> str | None:
    """Returns the encoding given by a UTF-16 or UTF-32 byte order mark, or None without one."""
    return next((name for mark, name in _BOMS if head.startswith(mark)), None)


def check_packing(
    name: str, form: Form, head: bytes, rules: InputRules = INPUT, *, typed: bool = False
) -> None:
    """Checks that the first stored bytes of a file agree with its format.

    `typed` is true if the user gave the kind. Raises UnsupportedFile for bytes of another
    compression, and for bytes of a format that is not read.
    """
    found = content_of(head)
    if form.packed:
        if found != form.packed:
            raise UnsupportedFile(
                f"is {NAMES[form.packed]} by its name but {_what(found, head)} by its first bytes:"
                " fix its name, or fetch it again"
            )
        return
    for text, what, command in _POINTERS:
        if head.startswith(text):
            raise UnsupportedFile(f"is {what} by its first bytes: fetch the file with `{command}`")
    if found == PARQUET != form.kind:
        raise UnsupportedFile(
            f"is parquet by its first bytes but not by its name: name it "
            f"{_bare(name)}.parquet, or {rules.other}parquet"
        )
    if found is not None and found != form.kind:
        raise UnsupportedFile(
            f"is {NAMES[found]} by its first bytes but not by its name: name it {name}{found}, or "
            "unpack it"
        )
    if form.kind == PARQUET and found is None:
        by, remedy = ("format=", "leave format= out") if typed else ("its name", "fix the name")
        raise UnsupportedFile(
            f"is parquet by {by} but {_what(found, head)} by its first bytes: {remedy}, or fetch "
            "it again"
        )


def check_content(
    name: str,
    form: Form,
    head: bytes,
    rules: InputRules = INPUT,
    *,
    typed: bool = False,
    web: bool = False,
) -> None:
    """Checks that the first bytes of a file's unpacked content agree with its format.

    `typed` is true if the user gave the kind, and `web` if the file is from a web server. Raises
    UnsupportedFile for bytes of another kind.
    """
    if form.packed:
        found = content_of(head)
        if found is not None:
            raise UnsupportedFile(f"holds {NAMES[found]} inside its {NAMES[form.packed]}: {UNPACK}")
    if form.kind == PARQUET:
        return
    end = endings(name)[0]
    encoding = encoding_of(head)
    if encoding is not None:
        if form.kind == LINES:
            raise UnsupportedFile(
                f"is {encoding.upper()}, but jsonl must be UTF-8: {iconv(encoding.upper())}"
            )
        return
    at = head.find(b"\x00")
    if at >= 0:
        raise UnsupportedFile(_nul(at))
    if form.kind == LINES:
        if _PAGE.match(head):
            raise UnsupportedFile(
                "is a page of HTML, perhaps a server's answer: fetch the file again"
            )
        return
    if typed:
        return
    # No code begins with two JSON objects: a .jl file that does so holds JSON lines, not Julia.
    if are_rows(head) and (end not in CODE or b"\n{" in head):
        raise UnsupportedFile(
            f"holds JSON lines by its first bytes, but is text by its name: name it "
            f"{_bare(name)}.jsonl, or {rules.other}jsonl; to keep its raw lines, {rules.other}text"
        )
    if _PAGE.match(head) and (end not in CODE or web):
        raise UnsupportedFile(
            f"is a page of HTML, perhaps a server's answer instead of the file: fetch it again; "
            f"if it is meant to be HTML, {rules.other}text"
        )


def is_spread(head: bytes) -> bool:
    """Returns whether JSON is one list, or objects over several lines, not one object per line."""
    first, _, more = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if first.startswith(b"["):
        return not (more.strip() and _is_json(first))
    return first.strip() == b"{" and bool(more.strip())


_TOKEN = re.compile(rb'"(?:[^"\\\n\r]|\\.)*"|[\[\]{},"]')


def in_lines(content: bytes) -> bytes:
    """Returns the items of a JSON list, or JSON objects that follow each other, one per line.

    Raises UnsupportedFile for content that ends inside an item, or goes on after the list.
    """
    content = content.removeprefix(codecs.BOM_UTF8).strip()
    is_list = content.startswith(b"[")
    lines, depth, start = [], 0, int(is_list)

    def item(end: int) -> None:
        lines.append(content[start:end].strip())

    for found in _TOKEN.finditer(content):
        token, at = found[0], found.start()
        if token == b'"':
            raise UnsupportedFile(
                f"is not JSON: the text at byte {at:,} has no end in its line; fix it, or fetch "
                "the file again if it was cut short"
            )
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
            if is_list and not depth:
                item(at)
                start = found.end()
                break
            if not depth:
                item(found.end())
                start = found.end()
        elif token == b"," and is_list and depth == 1:
            item(at)
            start = found.end()
    rest = content[start:].strip()
    if depth:
        raise UnsupportedFile(
            "is not JSON: it ends inside an item, so it was cut short; fetch it again"
        )
    if rest:
        shown = plain(rest[:40].decode(errors="replace"))
        what = f"its list ends before {shown!r}" if is_list else f"it ends in {shown!r}"
        raise UnsupportedFile(
            f"is not JSON: {what}; name it .jsonl if each line is a row, or fix it"
        )
    if is_list and lines == [b""]:
        return b""
    if not all(lines):
        raise UnsupportedFile("is not JSON: its list has an empty item; fix it")
    # No item has a line break in a text, so that every break is a blank between two tokens.
    return b"".join(re.sub(rb"[\r\n]+", b" ", line) + b"\n" for line in lines)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def are_rows(head: bytes) -> bool:
    """Returns whether content begins with JSON objects, one per line."""
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text.startswith(b"{"):
        return False
    lines = [line for line in text.split(b"\n") if line.strip()]
    whole = lines if len(head) < HEAD else lines[:-1]
    if not whole:  # a row that is longer than the inspected bytes
        return re.match(rb'\{\s*"[^"\n]{1,64}"\s*:\s*["\[{\w-]', text) is not None
    return all(_is_object(line) for line in whole[:2])


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def keys_of(head: bytes) -> list[str]:
    """Returns the keys of the first JSON object, as far as they are followed by whole values."""
    text = head.decode("utf-8-sig", "ignore")
    decoder, found, at = json.JSONDecoder(), [], text.find("{") + 1
    try:
        while at:
            at = len(text) - len(text[at:].lstrip(" \t\r\n,"))
            key, at = decoder.raw_decode(text, at)
            at = text.index(":", at) + 1
            found.append(key)
            at = len(text) - len(text[at:].lstrip())
            _, at = decoder.raw_decode(text, at)
    except (ValueError, RecursionError):  # the end of the object, or of the inspected bytes
        pass
    return found


def _what(found: str | None, head: bytes) -> str:
    if found is not None:
        return NAMES[found]
    if _PAGE.match(head):
        return "a page of HTML"
    if are_rows(head):
        return "JSON lines"
    return "binary" if b"\x00" in head or head.decode("utf-8", "ignore") == "" else "something else"


def _bare(name: str) -> str:
    bare, end = os.path.splitext(name)
    return plain(bare if end.lower() in (*ROWS_ENDS, *PROSE) else name)


def iconv(encoding: str = "ITS_ENCODING") -> str:
    """Returns advice to convert a file from `encoding` to UTF-8."""
    return f"`iconv -f {encoding} -t UTF-8 FILE > NEW` converts it"


def _nul(at: int) -> str:
    return f"is not text: it has a NUL at byte {at:,}; {iconv('UTF-16')} if it is UTF-16 text"


def text_of(content: bytes) -> tuple[str, int]:
    """Returns the text of a whole file, and the number of replaced characters.

    The file must be UTF-8, with or without a byte order mark, or UTF-16 or UTF-32 with such a mark,
    which is dropped. Raises UnsupportedFile as `check_text` does.
    """
    broken = check_text([content])
    return content.decode(encoding_of(content) or "utf-8-sig", "replace"), broken


def check_text(blocks: Iterable[bytes]) -> int:
    """Checks the bytes of a text file; returns the number of replaced characters.

    Raises UnsupportedFile for NULs, for many control characters, and if more than one character in
    BROKEN is replaced.
    """
    decoder = None
    size = characters = broken = controls = 0
    first, encoding = -1, None
    for block in chain(blocks, (b"",)):
        if decoder is None:
            encoding = encoding_of(block)
            decoder = codecs.getincrementaldecoder(encoding or "utf-8-sig")("replace")
        if encoding is None and (at := block.find(b"\x00")) >= 0:
            raise UnsupportedFile(_nul(size + at))
        if encoding is None:
            controls += len(block) - len(block.translate(None, CONTROLS))
        text = decoder.decode(block, final=not block)
        if (at := text.find("\x00")) >= 0:
            raise UnsupportedFile(
                f"is not text: it has a NUL at character {characters + at:,}; fix it"
            )
        if shift := re.search("\x1b\\$[@B]", text):
            place = characters + shift.start()
            raise UnsupportedFile(f"is ISO-2022-JP at character {place:,}: {iconv('ISO-2022-JP')}")
        if first < 0 and (at := text.find("\ufffd")) >= 0:
            first = characters + at
        broken += text.count("\ufffd")
        size, characters = size + len(block), characters + len(text)
    if controls > MOST_CONTROLS * size:
        raise UnsupportedFile(
            f"is not text: {controls:,} of its {size:,} bytes are control characters"
        )
    if broken * BROKEN > characters:
        raise UnsupportedFile(
            f"is not {encoding or 'utf-8'}: {broken:,} of its {characters:,} characters are "
            f"invalid, the first at character {first:,}; {iconv()}"
        )
    return broken


def judged(
    name: str,
    head: bytes | None,
    rules: InputRules = INPUT,
    *,
    typed: str | None = None,
    web: bool = False,
) -> Form:
    """Returns the format of a file by its name and its first bytes `head`.

    If `head` is None, the name alone decides. If the user gave the kind `typed`, the first bytes
    determine the compression. A file whose ending the grammar lacks is text if its first bytes are
    text beyond doubt. Raises UnsupportedFile for a file that is not read.
    """
    form = named(name, typed)
    if form is None and (typed is not None or not head):
        raise not_read(name, rules)
    is_known, form = form is not None, form or Form(TEXT, endings(name)[1])
    if head:
        found = content_of(head)
        if not is_known and found not in (None, form.packed):
            raise not_read(name, rules, NAMES[found])
        if typed and not form.packed and found is not None and found in NAMES.keys() - {PARQUET}:
            form = form._replace(packed=found)
        check_packing(name, form, head, rules, typed=typed is not None)
        try:
            inner = first_unpacked(form.packed, head, HEAD)
        except Exception as error:  # each library raises its own errors
            what = f"cannot be unpacked as {NAMES[form.packed]}"
            raise UnsupportedFile(f"{what} ({plain(str(error))}): fetch it again") from None
        if not is_known and (what := _no_prose(inner)):
            raise not_read(name, rules, what)
        if inner:
            check_content(name, form, inner, rules, typed=typed is not None, web=web)
    return form


def _no_prose(head: bytes) -> str:
    """Returns what the first bytes are if they are not text beyond doubt, and "" if they are."""
    if encoding_of(head) is not None:
        return ""
    if _is_binary(head) or len(head) - len(head.translate(None, CONTROLS)) > 0:
        return NO_TEXT
    if are_rows(head):  # this has a sentence of its own
        return ""
    if head.lstrip()[:1] in (b"{", b"["):
        return "what may be JSON"
    lines = head.decode("utf-8", "ignore").splitlines()
    lines = [line for line in (lines if len(head) < HEAD else lines[:-1]) if line.strip()]
    for separator in "\t,;|":
        rows = [*csv.reader(lines, delimiter=separator)]
        names = rows[0] if len({len(row) for row in rows}) == 1 < len(rows) else []
        # After a comma, prose has a blank, and the names of columns have none.
        if len(names) > 1 and not any(name.startswith(" ") for name in names[1:]):
            return f"what may be a table, separated by {separator!r}"
    return ""


def check_kind(form: Form, rules: InputRules) -> None:
    """Raises UnsupportedFile for a kind that is not read where the user named the file."""
    if form.kind not in rules.kinds:
        kinds = " or ".join(rules.kinds)
        raise UnsupportedFile(f"is {form.kind}, but {rules.key} takes {kinds} here: {rules.remedy}")
