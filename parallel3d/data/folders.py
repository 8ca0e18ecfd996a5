"""Sorts the files of a folder by format, and leaves out files that are not training documents."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from parallel3d.data.formats import (
    ASSETS,
    CHECKSUMS,
    CODE,
    INPUT,
    PROSE,
    REFUSED,
    ROWS_ENDS,
    TEXT,
    UNFINISHED,
    Door,
    Form,
    NotTaken,
    check_kind,
    endings,
    file_name,
    is_list_or_rows,
    judged,
)
from parallel3d.files import plain
from parallel3d.text import count

LEFT_OUT: Final = {
    "checksums": CHECKSUMS,
    "unfinished or old copies": UNFINISHED,
    "images, sound, fonts or compiled files": ASSETS,
}
_ABOUT = re.compile(
    r"(read[-_]?me|licen[sc]e|copying)s?([-_. ][\w.-]*)?|"
    r"(notice|citation|authors|contributing|code_of_conduct|security|changelog|datasheet|"
    r"dataset_?card|terms_of_use)(\.[\w]+)?",
    re.IGNORECASE,
)
_ABOUT_ENDS = ("", ".md", ".markdown", ".txt", ".text", ".rst", ".html", ".cff", ".bib", ".pdf")
_INFO = re.compile(
    r"(dataset_infos?|dataset_dict|state|metadata|manifest|index|stats|config|tokenizer|"
    r"tokenizer_config|special_tokens_map|generation_config|croissant|datapackage|vocab|"
    r"added_tokens|model_index|package|package-lock|tsconfig)\.json",
    re.IGNORECASE,
)
_MARKS = re.compile(
    r"_(success|metadata|common_metadata|delta_log|temporary|spark_metadata|manifest|"
    r"(started|committed)_.*)|__pycache__|__macosx|thumbs\.db|desktop\.ini|.*:zone\.identifier|"
    r"(md5|sha\d+)(sums?)?(\.txt)?|b2sums?(\.txt)?|checksums?(\.txt)?|.*~|#.*#",
    re.IGNORECASE,
)

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


class Sorted(NamedTuple):
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
    door: Door = INPUT,
    *,
    typed: str | None = None,
    asked: Iterable[str] = (),
    web: bool = False,
    held_out: bool = False,
) -> Sorted:
    """Sorts the files of a folder or glob.

    Raises NotTaken for a cache of the Hugging Face hub and, unless most files are code, for a file
    that may be data but cannot be read.

    Args:
        files: the first bytes of each file by its relative name; b"" if the file is empty, None if
            its bytes are unknown.
        typed: the kind that the user gave, or None if each file's kind is determined from the file.
        asked: words of the glob; splits that they name are read even next to training files.
        web: whether the files come from a web server.
        held_out: whether the files are for evaluation, not for training.
    """
    taken: dict[str, Form] = {}
    left_out: dict[str, list[str]] = {}
    _check_cache(files)
    candidates = {}
    for below, head in files.items():
        why = _no_document(below)
        if why is None and _is_info(below, head, typed):
            why = "JSON that holds no rows"
        if why is None:
            candidates[below] = head
        else:
            left_out.setdefault(why, []).append(below)
    # In a folder of code, tables and archives are examples for tests, not data.
    is_code = sum(_end(below) in CODE for below in candidates) * 2 > len(candidates)
    for below, head in candidates.items():
        name = below.rpartition("/")[2]
        try:
            taken[below] = judged(name, head, door, typed=typed, web=web)
        except NotTaken as error:
            if head != b"" and not is_code:
                raise _in_folder(below, error) from None
            left_out.setdefault("not read" if head != b"" else "empty", []).append(below)
    if typed is None and any(form.kind != TEXT for form in taken.values()):
        texts = [
            name for name, form in taken.items() if form.kind == TEXT and _end(name) not in PROSE
        ]
        for name in texts:
            del taken[name]
            left_out.setdefault("text next to rows", []).append(name)
    splits = _leave_out_splits(taken, left_out, set(asked), held_out)
    for name, form in taken.items():
        try:
            check_kind(form, door)
        except NotTaken as error:
            raise _in_folder(name, error) from None
    return Sorted(taken, splits, left_out)


def _in_folder(below: str, error: NotTaken) -> NotTaken:
    return NotTaken(f"holds {plain(below)}, which {error}; or name the files to take, or a glob")


def _no_document(below: str) -> str | None:
    """Returns why a file of this name is not a training document, or None if it may be one."""
    *folders, name = below.split("/")
    end = endings(name)[0]
    if any(_MARKS.fullmatch(part) for part in (*folders, name)):
        return "marker files and checksums"
    for why, table in LEFT_OUT.items():
        if os.path.splitext(name)[1].lower() in table or end in table:
            return why
    if _ABOUT.fullmatch(name) and (end in _ABOUT_ENDS or not _is_ending(end)):
        return "README, LICENSE and the like"
    return None


def _is_ending(end: str) -> bool:
    return end in ROWS_ENDS or end in REFUSED or end in CODE or end in PROSE


def _is_info(below: str, head: bytes | None, typed: str | None) -> bool:
    """Returns whether a .json file holds one object about other files instead of rows."""
    name = below.rpartition("/")[2]
    if typed is not None or endings(name)[0] != ".json":
        return False
    if _INFO.fullmatch(name):
        return True
    return bool(head) and not endings(name)[1] and not is_list_or_rows(head or b"")


def _check_cache(files: Iterable[str]) -> None:
    """Raises NotTaken for a cache folder of the Hugging Face hub, which holds each file twice."""
    found: dict[str, dict[str, str]] = {}
    for below in files:
        parts = below.split("/")
        for kind in ("blobs", "snapshots"):
            if kind in parts[:-1]:
                at = parts.index(kind)
                found.setdefault("/".join(parts[:at]), {})[kind] = "/".join(parts[: at + 2])
    for there in found.values():
        if len(there) == 2:
            raise NotTaken(
                "is a cache of the Hugging Face hub and holds each file twice: give one of its "
                f"snapshots, such as {plain(there['snapshots'])}"
            )


def _leave_out_splits(
    taken: dict[str, Form], left_out: dict[str, list[str]], asked: set[str], held_out: bool
) -> dict[str, str]:
    """Leaves out files named test, valid and so on if there are other files; returns all splits.

    Raises NotTaken if files for evaluation are wanted but the folder holds files to train on, too.
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
        raise NotTaken(
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
    """Raises NotTaken for two files with the same name and probably the same content.

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
                raise NotTaken(
                    f"holds both {plain(other)} and {plain(name)}, whose names suggest the same "
                    "content: name one of them, or a glob that matches only one"
                )


def label_of(form: Form, split: str) -> str:
    """Returns the label of files of one format and split, as in "jsonl.gz, train"."""
    return f"{form}, {split}" if split else str(form)


def listing(found: Sorted) -> list[str]:
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
