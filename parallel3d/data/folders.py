"""Sorts the files of a folder by format, and leaves out files that are not training documents."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from parallel3d.data.formats import (
    CODE,
    HEAD,
    INPUT,
    LINES,
    PROSE,
    ROWS_ENDS,
    TEXT,
    Form,
    InputRules,
    UnsupportedFile,
    are_rows,
    check_kind,
    endings,
    file_name,
    judged,
    keys_of,
    named,
)
from parallel3d.files import plain
from parallel3d.text import count

# Documents by their endings, but about the other files by their names.
# Longer names, such as security_news.txt, are those of documents, but not LICENSE-MIT.
_ABOUT = re.compile(
    r"(read[-_]?me|licen[sc]e|copying)s?([-_. ][\w.-]*)?|"
    r"(notice|citation|authors|contributing|code_of_conduct|security|changelog|datasheet|"
    r"dataset_?card|terms_of_use|(md5|sha\d+|b2|check)sums?)(\.\w+)?",
    re.IGNORECASE,
)
# Files that Windows and macOS write into folders that somebody opened; hidden ones do not count.
_OF_SYSTEM = re.compile(r"desktop\.ini|(eh)?thumbs(_vista)?\.db|icon\r", re.IGNORECASE)
_ABOUT_ENDS = ("", *PROSE, ".md", ".markdown", ".rst", ".html", ".cff", ".bib")

TRAIN = "train"
_TRAINED = frozenset(("train", "training", "trainset", "trn"))
_HELD = frozenset(
    [
        *("test", "tests", "testing", "testset", "tst", "devtest", "newstest"),
        *("valid", "validation", "validate", "validset", "val", "valset", "dev", "devset"),
        *("eval", "evals", "evaluation", "evalset", "holdout", "heldout"),
    ]
)


def words_of(text: str) -> list[str]:
    """Splits a name at capitals and at characters that are not letters; returns lower-case words.

    The words "held" and "out", or "hold" and "out", also give the joined word, such as "heldout".
    """
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    words = [word.lower() for word in found]
    pairs = (a + b for a, b in pairwise(words) if a in ("held", "hold") and b == "out")
    return [*words, *pairs]


def split_of(below: str) -> str:
    """Returns the split in a relative path: "train", a held-out one such as "test", or "" for none.

    The last part of the path that names a split counts; if it names both kinds, the result is "".
    """
    for part in reversed(below.split("/")):
        words = words_of(part)
        held = next((word for word in words if word in _HELD), "")
        trained = any(word in _TRAINED for word in words)
        if held or trained:
            return "" if held and trained else held or TRAIN
    return ""


class SortedFiles(NamedTuple):
    """The files of a folder, sorted into those that are read and those that are left out.

    Attributes:
        taken: the format of each file that is read, by the file's name.
        splits: the split that each file's name indicates, by the file's name.
        left_out: the names of files that are left out, by the reason.
    """

    taken: dict[str, Form]
    splits: dict[str, str]
    left_out: dict[str, list[str]]


def sort_out(
    files: Mapping[str, bytes | None],
    rules: InputRules = INPUT,
    *,
    typed: str | None = None,
    pattern: str = "",
    web: bool = False,
    held_out: bool = False,
) -> SortedFiles:
    """Sorts the files of a folder or glob.

    Raises UnsupportedFile for a cache of the Hugging Face hub and, unless most files are code, for
    a file whose ending is read but whose bytes differ from it.

    Args:
        files: the first bytes of each file by its relative name; b"" if the file is empty, None if
            its bytes are unknown.
        typed: the kind that the user gave, or None if each file's kind is determined from the file.
        pattern: the glob below its fixed folders, or "" for a folder. Splits and endings that it
            spells out are read even next to others.
        web: whether the files come from a web server.
        held_out: whether the files are for evaluation, not for training.
    """
    _check_cache(files)
    left_out: dict[str, list[str]] = {}
    forms = _by_name(files, typed, pattern, left_out)
    if typed is None:
        _leave_out_info(forms, files, rules, left_out)
        _leave_out_text(forms, left_out)
    # In a folder of code, broken files are examples for tests, not data.
    is_code = sum(_end(below) in CODE for below in forms) * 2 > len(forms)
    taken: dict[str, Form] = {}
    for below, form in forms.items():
        head = files[below]
        try:
            taken[below] = judged(below.rpartition("/")[2], head, rules, typed=typed, web=web)
        except UnsupportedFile as error:
            is_data = form.kind != TEXT or _end(below) in ("", *PROSE)
            if head != b"" and is_data and not is_code:
                raise _in_folder(below, error) from None
            left_out.setdefault("not text" if head != b"" else "empty", []).append(below)
    splits = _leave_out_splits(taken, left_out, set(words_of(pattern)), held_out)
    for name, form in taken.items():
        try:
            check_kind(form, rules)
        except UnsupportedFile as error:
            raise _in_folder(name, error) from None
    return SortedFiles(taken, splits, left_out)


def _by_name(
    files: Iterable[str], typed: str | None, pattern: str, left_out: dict[str, list[str]]
) -> dict[str, Form]:
    """Returns the formats of files whose names are read; adds the others to `left_out`.

    An ending of no known format is read if the glob spells it out, or if the user gave the kind and
    no file has a known ending.
    """
    forms: dict[str, Form] = {}
    unknown: dict[str, Form] = {}
    for below in files:
        name = below.rpartition("/")[2]
        form = named(name)
        if (why := _no_document(below)) and (form is not None or _OF_SYSTEM.fullmatch(name)):
            left_out.setdefault(why, []).append(below)
        elif form is None:
            unknown[below] = Form(typed or TEXT, endings(name)[1])
        else:
            forms[below] = form if typed is None else form._replace(kind=typed)
    if typed is not None and not forms:
        return unknown
    asked = [below for below in unknown if _is_spelled(_written_end(below), pattern)]
    forms |= {below: unknown.pop(below) for below in asked}
    if unknown:
        ends = sorted(Counter(map(_written_end, unknown)).items(), key=lambda e: (-e[1], e[0]))
        why = f"endings that are not read ({_first(f'{end} {number:,}' for end, number in ends)})"
        left_out[why] = [*unknown]
    return forms


def _written_end(below: str) -> str:
    """Returns the ending of a name as it is written, with that of its compression."""
    bare, end = os.path.splitext(below)
    return f"{os.path.splitext(bare)[1]}{end}" if endings(below)[1] else end


def _is_spelled(end: str, pattern: str) -> bool:
    return bool(end) and pattern.lower().endswith(end.lower())


def _in_folder(below: str, error: UnsupportedFile) -> UnsupportedFile:
    return UnsupportedFile(
        f"holds {plain(below)}, which {error}; or name the files to take, or a glob"
    )


def _no_document(below: str) -> str | None:
    """Returns why a file of this name is not a training document, or None if it may be one."""
    *folders, name = below.split("/")
    end = endings(name)[0]
    if _OF_SYSTEM.fullmatch(name):
        return "files of the operating system"
    # Spark, Hive and pyarrow hide such names, as in _SUCCESS; in code they are usual.
    if end not in CODE and (
        any(p.startswith("_") for p in folders) or (name[0] == "_" and not end)
    ):
        return "names that begin with _"
    if _ABOUT.fullmatch(name) and end in _ABOUT_ENDS:
        return "README, LICENSE and the like"
    return None


def _leave_out_info(
    forms: dict[str, Form],
    files: Mapping[str, bytes | None],
    rules: InputRules,
    left_out: dict[str, list[str]],
) -> None:
    """Leaves out .json files that describe others; those that certainly hold rows remain.

    Next to other files of rows or prose, and next to a .json that certainly holds rows, a single
    object without a key of `rules` is a description, as dataset_infos.json is. A long one is a row
    if it begins with the key that rows of other files begin with.
    """
    found = ((below, files[below]) for below in forms if endings(below) == (".json", ""))
    heads = {below: head for below, head in found if head}
    certain = {below for below, head in heads.items() if _are_certain(head, rules)}
    rows = [
        files[below]
        for below, form in forms.items()
        if below in certain or (below not in heads and form == Form(LINES))
    ]
    firsts = {key for head in rows for key in keys_of(head or b"")[:1]}
    others = [b for b in forms if b not in heads and (forms[b].kind != TEXT or _end(b) in PROSE)]
    for below, head in heads.items():
        if below in certain:
            continue
        # The first object of a file is longer than the inspected bytes.
        is_like = len(head) >= HEAD and b"\n" not in head and {*keys_of(head)[:1]} & firsts
        if are_rows(head) and (is_like or not (certain or others)):
            continue
        del forms[below]
        left_out.setdefault("JSON that holds no rows", []).append(below)


def _are_certain(head: bytes, rules: InputRules) -> bool:
    """Returns whether JSON holds several objects, or one with a key of a row."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"[") and text[1:].lstrip().startswith(b"{"):
        return True
    return (are_rows(head) and b"\n{" in text) or not {*keys_of(head)}.isdisjoint(rules.keys)


def _leave_out_text(forms: dict[str, Form], left_out: dict[str, list[str]]) -> None:
    """Leaves out code and other text without an ending of prose if there are files of rows."""
    if all(form.kind == TEXT for form in forms.values()):
        return
    texts = [b for b, form in forms.items() if form.kind == TEXT and _end(b) not in PROSE]
    for below in texts:
        del forms[below]
        left_out.setdefault("text next to rows", []).append(below)


def _check_cache(files: Iterable[str]) -> None:
    """Raises UnsupportedFile for a cache folder of the Hugging Face hub, which has files twice."""
    found: dict[str, dict[str, str]] = {}
    for below in files:
        parts = below.split("/")
        for kind in ("blobs", "snapshots"):
            if kind in parts[:-1]:
                at = parts.index(kind)
                found.setdefault("/".join(parts[:at]), {})[kind] = "/".join(parts[: at + 2])
    for there in found.values():
        if len(there) == 2:
            raise UnsupportedFile(
                "is a cache of the Hugging Face hub and holds each file twice: give one of its "
                f"snapshots, such as {plain(there['snapshots'])}"
            )


def _leave_out_splits(
    taken: dict[str, Form], left_out: dict[str, list[str]], asked: set[str], held_out: bool
) -> dict[str, str]:
    """Leaves out files named test, valid and so on if there are other files; returns all splits.

    Raises UnsupportedFile if files for evaluation are wanted but the folder holds files to train
    on, too.
    """
    # An ending of two letters may be a language: dev.cs next to train.cs is Czech, not C#.
    languages = {_end(name) for name in taken if split_of(name) == TRAIN and len(_end(name)) == 3}
    judged = [name for name in taken if _end(name) not in CODE or _end(name) in languages]
    splits = {name: split_of(name) for name in judged}
    held = [name for name, split in splits.items() if split not in ("", TRAIN, *asked)]
    others = [name for name in judged if name not in held]
    if not held or not others:
        return splits
    if held_out:
        raise UnsupportedFile(
            f"holds files to train on ({_some(others)}) and held-out ones ({_some(held)}): name "
            "the files to evaluate, or a glob that matches only them"
        )
    for name in held:
        del taken[name]
        why = (
            f"named {splits[name]} (to train on such files, name them, or give a glob with that "
            "word)"
        )
        left_out.setdefault(why, []).append(name)
    return splits


def _end(below: str) -> str:
    return endings(below.rpartition("/")[2])[0]


def _some(names: Sequence[str]) -> str:
    return plain(names[0]) + (f" and {len(names) - 1:,} more" if names[1:] else "")


def check_twins(addresses: Iterable[str]) -> None:
    """Raises UnsupportedFile for two files with the same name and probably the same content.

    One of them is packed, as after `gzip -k`, or they have the same rows in two formats.
    """
    seen: dict[tuple[str, str], str] = {}
    for address in addresses:
        folder, name = address.rpartition("/")[0], file_name(address)
        end, packed = endings(name)
        stem = os.path.splitext(os.path.splitext(name)[0] if packed else name)[0]
        keys = {f"{stem}{end}"}
        if end in ROWS_ENDS:
            keys.add(f"{stem}/rows")
        for key in keys:
            other = seen.setdefault((folder, key), name)
            if other != name:
                raise UnsupportedFile(
                    f"holds both {plain(other)} and {plain(name)}, whose names suggest the same "
                    "content: name one of them, or a glob that matches only one"
                )


def label_of(form: Form, split: str) -> str:
    """Returns the label of files of one format and split, as in "jsonl.gz, train"."""
    return f"{form}, {split}" if split else str(form)


def listing(found: SortedFiles) -> list[str]:
    """Returns a phrase for each format and split of the files that are read.

    A phrase states the number of files, the endings of text files, and the folders if there are
    several.
    """
    groups: dict[str, list[str]] = {}
    for name, form in found.taken.items():
        label = label_of(form, found.splits.get(name, ""))
        groups.setdefault(label, []).append(name)
    phrases = []
    for label, names in groups.items():
        phrase = f"{label}: {count(len(names), 'file')}"
        ends = Counter(_end(name) or "no ending" for name in names)
        if label.startswith(TEXT):
            phrase += f" ({_first(f'{end} {number:,}' for end, number in ends.most_common())})"
        folders = sorted({name.rpartition("/")[0] or "." for name in names})
        if folders[1:]:
            phrase += f" in {len(folders):,} folders ({_first(folders)})"
        phrases.append(phrase)
    return phrases


def _first(words: Iterable[str], most: int = 4) -> str:
    words = list(words)
    return plain(", ".join(words[:most]) + (", …" if words[most:] else ""))


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a phrase for each reason to leave files out, with the number of files."""
    return [f"left out, {why}: {len(names):,} ({_some(names)})" for why, names in left_out.items()]
