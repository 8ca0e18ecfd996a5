"""Recognises file formats by endings and first bytes, and refuses formats that are not read.

A file's ending states its content and compression, and its first bytes must agree. All code that
opens a user's file checks the file here: `data tokenize` and `data train-tokenizer`, data=text,
data=chat, data.valid and `eval tasks=`.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable
from itertools import chain
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from parallel3d.data.unpacking import first_unpacked
from parallel3d.files import plain

LINES = "jsonl"
PARQUET = "parquet"
TEXT = "text"
KINDS = (LINES, PARQUET, TEXT)
HEAD = 4096  # number of bytes that are inspected


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


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
PACKED: Final = {
    **dict.fromkeys((".gz", ".gzip"), ".gz"),
    **dict.fromkeys((".zst", ".zstd"), ".zst"),
    **dict.fromkeys((".xz", ".lzma"), ".xz"),
    ".bz2": ".bz2",
}

# Refused formats, each with a remedy.
UNPACK = "unpack it and give the files in it"
REPACK = f"pack it as {', '.join(dict.fromkeys(PACKED.values()))}, or unpack it"
ROWS = "write it as jsonl or parquet, one document per row"
TOKENS = "a corpus of tokens is read with data=corpus and the prefix of its .bin and .idx"
EXTRACT = "write its text as .txt or jsonl"
MEDIA = "give text"


def _named(*groups: tuple[str, str, str]) -> dict[str, tuple[str, str]]:
    return {end: (what, remedy) for ends, what, remedy in groups for end in ends.split()}


REFUSED: Final = _named(
    (".tar .tgz .tbz .tbz2 .txz .tzst .taz", "a tar archive", UNPACK),
    (".zip .zipx .jar .whl .7z .rar .cab .deb .rpm .iso .dmg .egg", "an archive", UNPACK),
    (
        ".lz4 .sz .snappy .br .lzo .z .lz .zz .bz .rz .zlib",
        "packed in a way that is not read",
        REPACK,
    ),
    (".arrow .feather .ipc .arrows .orc .avro .lance", "a table of columns", ROWS),
    (".csv .tsv .psv .xls .xlsx .xlsm .ods .sas7bdat .sav .dta .rdata .rds", "a table", ROWS),
    (".sqlite .sqlite3 .db .db3 .duckdb .mdb .lmdb", "a database", ROWS),
    (".tfrecord .tfrecords .tfrec .recordio .mds .wds .riegeli", "a file of records", ROWS),
    (".bin .idx .npy .npz .memmap .mmap", "a file of tokens or tensors, not text", TOKENS),
    (
        ".pt .pth .ckpt .safetensors .pkl .pickle .joblib .h5 .hdf5 .hdf .gguf .ggml .onnx .pb "
        ".msgpack .mat .model .distcp",
        "a file of tensors or objects, not text",
        EXTRACT,
    ),
    (
        ".pdf .eps .djvu .doc .docx .odt .rtf .ppt .pptx .odp .epub .mobi",
        "a formatted document",
        EXTRACT,
    ),
    (
        ".warc .wat .wet .arc .wacz .zim .mht .mhtml .eml .mbox .pst .msg",
        "a file of web or mail records",
        EXTRACT,
    ),
    (".ipynb", "a notebook", "write its cells as .md or .py"),
    (".gpg .age .enc .pgp", "encrypted", "decrypt it"),
    (".torrent .url .webloc .lnk", "a pointer to a file", "give the file itself"),
)
# Endings of files that are left out of a folder of text, and refused if they are given by name.
ASSETS: Final = _named(
    (
        ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .ico .heic .psd .wav .mp3 .flac .ogg .opus "
        ".m4a .aac .mp4 .mkv .mov .avi .webm .ttf .otf .woff .woff2 .eot",
        "an image, sound or font",
        MEDIA,
    ),
    (".pyc .pyo .so .o .a .dll .dylib .exe .class .wasm .lib .obj .pdb .elf", "compiled", MEDIA),
)
CHECKSUMS: Final = _named(
    (
        ".md5 .sha1 .sha224 .sha256 .sha384 .sha512 .crc .crc32 .sfv .b2 .blake2b .blake3 .sha "
        ".sig .asc .sum .md5sum .sha1sum .sha256sum .sha512sum",
        "a checksum",
        "give the file itself",
    ),
)
UNFINISHED: Final = _named(
    (
        ".tmp .temp .part .partial .incomplete .crdownload .download .aria2 .swp .filepart .!ut "
        ".unconfirmed",
        "unfinished",
        "wait until it is complete",
    ),
    (".bak .old .orig .backup .save", "an old copy", "give the file itself"),
)
_LFS = b"version https://git-lfs.github.com/spec/"
# Each row has an offset, the bytes there, their meaning and a remedy. For readable compressions and
# parquet, the meaning is a key of NAMES.
_MAGIC: Final = (
    (0, b"\x1f\x8b", ".gz", ""),
    (0, b"\x28\xb5\x2f\xfd", ".zst", ""),
    *((0, bytes((0x50 + k,)) + b"\x2a\x4d\x18", ".zst", "") for k in range(16)),
    (0, b"\xfd7zXZ\x00", ".xz", ""),
    (0, b"\x5d\x00\x00", ".xz", ""),
    *((0, b"BZh%d1AY&SY" % k, ".bz2", "") for k in range(1, 10)),
    *((0, b"BZh%d\x17rE8P\x90" % k, ".bz2", "") for k in range(1, 10)),  # an empty file
    (0, b"PAR1", PARQUET, ""),
    (0, b"\x04\x22\x4d\x18", "lz4", REPACK),
    (0, b"\x02\x21\x4c\x18", "lz4", REPACK),
    (0, b"\xff\x06\x00\x00sNaPpY", "snappy", REPACK),
    (0, b"\x89LZO\x00", "lzo", REPACK),
    (0, b"\x1f\x9d", "compress (.Z)", REPACK),
    (0, b"LZIP\x01", "lzip", REPACK),
    (257, b"ustar", "a tar archive", UNPACK),
    (0, b"!<arch>\n", "an archive (ar)", UNPACK),
    (0, b"PK\x03\x04", "a zip archive", UNPACK),
    (0, b"PK\x05\x06", "an empty zip archive", UNPACK),
    (0, b"PK\x07\x08", "a zip archive", UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (0, b"Rar!\x1a\x07", "a rar archive", UNPACK),
    (0, b"PARE", "encrypted parquet", "decrypt it"),
    (0, b"ARROW1", "arrow", ROWS),
    (0, b"FEA1", "feather", ROWS),
    (0, b"\xff\xff\xff\xff", "an arrow stream or other binary data", ROWS),
    (0, b"ORC", "orc", ROWS),
    (0, b"Obj\x01", "avro", ROWS),
    (0, b"SQLite format 3\x00", "an SQLite database", ROWS),
    (8, b"DUCK", "a DuckDB database", ROWS),
    (0, b"\x93NUMPY", "a NumPy array", TOKENS),
    (0, b"MMIDIDX\x00", "the index of a corpus", TOKENS),
    (0, b"\x89HDF\r\n\x1a\n", "hdf5", EXTRACT),
    (0, b"GGUF", "a model (gguf)", EXTRACT),
    *((0, bytes((0x80, protocol)), "a pickle", EXTRACT) for protocol in range(2, 6)),
    (0, b"%PDF-", "pdf", EXTRACT),
    (0, b"%!PS", "PostScript", EXTRACT),
    (0, b"{\\rtf", "rtf", EXTRACT),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document", EXTRACT),
    (0, b"WARC/", "warc", EXTRACT),
    (0, b"\x89PNG", "an image", MEDIA),
    (0, b"\xff\xd8\xff", "an image", MEDIA),
    (0, b"GIF8", "an image", MEDIA),
    (0, b"RIFF", "an image, sound or video", MEDIA),
    (0, b"OggS", "sound", MEDIA),
    (0, b"fLaC", "sound", MEDIA),
    (0, b"ID3", "sound", MEDIA),
    (4, b"ftyp", "a video", MEDIA),
    (0, b"\x7fELF", "compiled", MEDIA),
    (0, b"-----BEGIN PGP", "encrypted or signed", "decrypt it"),
    (0, _LFS, "a Git LFS pointer", "fetch the file with `git lfs pull`"),
    (
        0,
        b"/annex/objects/",
        "a git-annex pointer",
        "fetch it with `git annex get`",
    ),
)
NAMES: Final = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2", PARQUET: "parquet"}
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


class NotTaken(ValueError):
    """Raised for a file that is not read; the message follows the file's name."""


class Form(NamedTuple):
    """A file's format: one of KINDS, and a compression, which is a value of PACKED or ""."""

    kind: str
    packed: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{self.packed}"


class Door(NamedTuple):
    """A place where users name files, and the rules for files named there.

    Attributes:
        key: the configuration key, for errors.
        other: advice to give the kind explicitly; the kind follows these words.
        kinds: the kinds that are read from there.
        column: remedy for a text column that is not named "text"; "" for none.
        remedy: remedy for a file of another kind.
    """

    key: str
    other: str
    kinds: tuple[str, ...] = KINDS
    column: str = ""
    remedy: str = "convert it"


INPUT = Door("input", "give format=")
_TOKENIZE = "make a corpus of it with `parallel3d data tokenize` "
PATH = Door("data.path", f"{_TOKENIZE}format=", KINDS, f"{_TOKENIZE}text_key=")
CHAT = PATH._replace(kinds=(LINES, PARQUET), remedy="write one conversation per row")
TASKS = Door("tasks", "write it as ", (LINES, PARQUET), remedy="write one question per row")


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
    """Returns the format that a file's name indicates, or None if its ending is not known.

    `typed` is the kind that the user gave, or None. Raises NotTaken for a format that is not read.
    """
    end, packed = endings(name)
    if typed is not None:
        kind: str | None = typed
    elif packed and end in PACKED:
        raise NotTaken(f"is packed twice, by its name: {UNPACK}")
    else:
        kind = ROWS_ENDS.get(end)
        if end in PROSE or end in CODE or _is_language(name, end):
            kind = TEXT
        for table in (REFUSED, CHECKSUMS, UNFINISHED, ASSETS):
            if kind is None and end in table:
                what, remedy = table[end]
                raise NotTaken(f"is {what}, by its ending {end}{packed}: {remedy}")
        if kind is None and name.endswith("~"):
            raise NotTaken("is an old copy, by its name: give the file itself")
    if kind == PARQUET and packed:
        raise NotTaken(
            f"is parquet, which has its own compression, packed again as {packed}: unpack it"
        )
    return Form(kind, packed) if kind is not None else None


def _is_language(name: str, end: str) -> bool:
    """Returns whether .br means Breton, as in train.br, and not brotli, as in rows.jsonl.br."""
    return end == ".br" and "." not in os.path.splitext(name)[0]


# First bytes


def content_of(head: bytes) -> tuple[str, str] | None:
    """Returns the meaning of a file's first bytes, and a remedy; None if they may begin a text.

    For readable compressions and parquet, the meaning is a key of `NAMES` and the remedy is "".
    """
    for at, magic, what, remedy in _MAGIC:
        if head.startswith(magic, at) and (not _is_word(magic) or _is_binary(head)):
            return what, remedy
    if re.match(rb"[^\x00]{0,7}\x00[\x00-\xff]{0,7}\{\"", head[:16]):
        return "tensors (safetensors)", EXTRACT
    return None


def _is_word(magic: bytes) -> bool:
    """Returns whether a text may begin with a format's first bytes, such as ORC or GIF8."""
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
    name: str, form: Form, head: bytes, door: Door = INPUT, *, typed: bool = False
) -> None:
    """Checks that the first stored bytes of a file agree with its format.

    `typed` is true if the user gave the kind. Raises NotTaken for bytes of another compression, and
    for bytes of a format that is not read.
    """
    found = content_of(head)
    if form.packed:
        if found != (form.packed, ""):
            raise NotTaken(
                f"is {NAMES[form.packed]} by its name but {_what(found, head)} by its first bytes:"
                " fix its name, or fetch it again"
            )
        return
    if found is not None and found[0] in NAMES and found[0] != form.kind:
        what = NAMES[found[0]]
        if found[0] == PARQUET:
            raise NotTaken(
                f"is parquet by its first bytes but not by its name: name it "
                f"{_bare(name)}.parquet, or {door.other}parquet"
            )
        raise NotTaken(
            f"is {what} by its first bytes but not by its name: name it {name}{found[0]}, or "
            "unpack it"
        )
    if found is not None and found[0] not in NAMES:
        raise NotTaken(f"is {found[0]} by its first bytes: {found[1]}")
    if form.kind == PARQUET and found is None:
        by, remedy = ("format=", "leave format= out") if typed else ("its name", "fix the name")
        raise NotTaken(
            f"is parquet by {by} but {_what(found, head)} by its first bytes: {remedy}, or fetch "
            "it again"
        )


def check_content(
    name: str,
    form: Form,
    head: bytes,
    door: Door = INPUT,
    *,
    typed: bool = False,
    web: bool = False,
) -> None:
    """Checks that the first bytes of a file's unpacked content agree with its format.

    `typed` is true if the user gave the kind, and `web` if the file is from a web server. Raises
    NotTaken for bytes of another kind.
    """
    if form.packed:
        found = content_of(head)
        if found is not None:
            what, remedy = NAMES.get(found[0], found[0]), found[1] or UNPACK
            raise NotTaken(f"holds {what} inside its {NAMES[form.packed]}: {remedy}")
    if form.kind == PARQUET:
        return
    end = endings(name)[0]
    encoding = encoding_of(head)
    if encoding is not None:
        if form.kind == LINES:
            raise NotTaken(
                f"is {encoding.upper()}, but jsonl must be UTF-8: {iconv(encoding.upper())}"
            )
        return
    at = head.find(b"\x00")
    if at >= 0:
        raise NotTaken(_nul(at))
    if form.kind == LINES:
        _check_lines(head, door)
        return
    if typed:
        return
    if b"<mediawiki" in head[:1000]:
        raise NotTaken(
            "is a dump of a wiki with all its markup: write the text of its pages as jsonl, one "
            f"page per row; to keep the markup, {door.other}text"
        )
    # No code begins with two JSON objects: a .jl file that does so holds JSON lines, not Julia.
    if are_rows(head) and (end not in CODE or b"\n{" in head):
        raise NotTaken(
            f"holds JSON lines by its first bytes, but is text by its name: name it "
            f"{_bare(name)}.jsonl, or {door.other}jsonl; to keep its raw lines, {door.other}text"
        )
    if _PAGE.match(head) and (end not in CODE or web):
        raise NotTaken(
            f"is a page of HTML, perhaps a server's answer instead of the file: fetch it again; "
            f"if it is meant to be HTML, {door.other}text"
        )


def _check_lines(head: bytes, door: Door) -> None:
    """Raises NotTaken for a page of HTML, a JSON list, and a JSON object over several lines."""
    if _PAGE.match(head):
        raise NotTaken("is a page of HTML, perhaps a server's answer: fetch the file again")
    first, _, more = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if first.startswith(b"[") and not (more.strip() and _is_json(first)):
        raise NotTaken(
            "is one JSON list, not one object per line: `jq -c '.[]' FILE > FILE.jsonl` converts it"
        )
    if first.strip() == b"{" and more.strip():
        raise NotTaken(
            "is one JSON object over several lines, not one object per line: "
            "`jq -c . FILE > FILE.jsonl` converts it"
        )


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


def is_list_or_rows(head: bytes) -> bool:
    """Returns whether JSON holds rows, as a list or as one object per line."""
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    return text.startswith(b"[") or are_rows(head)


def _what(found: tuple[str, str] | None, head: bytes) -> str:
    if found is not None:
        return NAMES.get(found[0], found[0])
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
    which is dropped. Raises NotTaken as `check_text` does.
    """
    broken = check_text([content])
    return content.decode(encoding_of(content) or "utf-8-sig", "replace"), broken


def check_text(blocks: Iterable[bytes]) -> int:
    """Checks the bytes of a text file; returns the number of replaced characters.

    Raises NotTaken for NULs, for many control characters, and if more than one character in BROKEN
    is replaced.
    """
    decoder = None
    size = characters = broken = controls = 0
    first, encoding = -1, None
    for block in chain(blocks, (b"",)):
        if decoder is None:
            encoding = encoding_of(block)
            decoder = codecs.getincrementaldecoder(encoding or "utf-8-sig")("replace")
        if encoding is None and (at := block.find(b"\x00")) >= 0:
            raise NotTaken(_nul(size + at))
        if encoding is None:
            controls += len(block) - len(block.translate(None, CONTROLS))
        text = decoder.decode(block, final=not block)
        if (at := text.find("\x00")) >= 0:
            raise NotTaken(f"is not text: it has a NUL at character {characters + at:,}; fix it")
        if shift := re.search("\x1b\\$[@B]", text):
            place = characters + shift.start()
            raise NotTaken(f"is ISO-2022-JP at character {place:,}: {iconv('ISO-2022-JP')}")
        if first < 0 and (at := text.find("\ufffd")) >= 0:
            first = characters + at
        broken += text.count("\ufffd")
        size, characters = size + len(block), characters + len(text)
    if controls > MOST_CONTROLS * size:
        raise NotTaken(f"is not text: {controls:,} of its {size:,} bytes are control characters")
    if broken * BROKEN > characters:
        raise NotTaken(
            f"is not {encoding or 'utf-8'}: {broken:,} of its {characters:,} characters are "
            f"invalid, the first at character {first:,}; {iconv()}"
        )
    return broken


def judged(
    name: str,
    head: bytes | None,
    door: Door = INPUT,
    *,
    typed: str | None = None,
    web: bool = False,
) -> Form:
    """Returns the format of a file by its name and its first bytes `head`.

    If `head` is None, the name alone decides. A file without a known ending is text. If the user
    gave the kind `typed`, the first bytes determine the compression. Raises NotTaken for a file
    that is not read.
    """
    form = named(name, typed) or Form(TEXT, endings(name)[1])
    if head:
        found = content_of(head)
        if typed and not form.packed and found and found[0] in PACKED.values():
            form = form._replace(packed=found[0])
        check_packing(name, form, head, door, typed=typed is not None)
        try:
            inner = first_unpacked(form.packed, head, HEAD)
        except Exception as error:  # each library raises its own errors
            what = f"cannot be unpacked as {NAMES[form.packed]}"
            raise NotTaken(f"{what} ({plain(str(error))}): fetch it again") from None
        if inner:
            check_content(name, form, inner, door, typed=typed is not None, web=web)
    return form


def check_kind(form: Form, door: Door) -> None:
    """Raises NotTaken for a kind that is not read from the place where the user named the file."""
    if form.kind not in door.kinds:
        kinds = " or ".join(door.kinds)
        raise NotTaken(f"is {form.kind}, but {door.key} takes {kinds} here: {door.remedy}")
