"""Watches the files that a run reads for changes since it opened them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from io import IOBase
from typing import NamedTuple

from parallel3d.data.tokens import File, is_unlinked, mark_of, size_of, whole_digest
from parallel3d.errors import UserError

MAKE_ANEW = "remove it and start again, it is made anew"
PROVED = 256 << 20  # bytes of a file up to which all of it is read, as each rank pays for that


class Proof(Enum):
    """The result of reading a file again: all of it is the same, the sampled places are, or not."""

    SAME = 1
    SAMPLED = 2
    CHANGED = 3


class WatchedFile:
    """An open file and its mark at the last look."""

    def __init__(self, file: File, prove: Callable[[], Proof], remedy: str) -> None:
        """`prove` reads the file again; `remedy` tells the user what to do after a change."""
        self.file, self.prove, self._remedy = file, prove, remedy
        self.mark = mark_of(file)

    def look(self) -> str | None:
        """Compares the file with the last look. Returns a sentence if it may have changed; raises
        UserError if it has."""
        before, now = self.mark, mark_of(self.file)
        if now == before:
            return None
        sizes = [int(mark.partition(":")[0]) for mark in (before, now)]
        if sizes[0] != sizes[1]:
            raise self.changed(f"under the run, from {sizes[0]:,} bytes to {sizes[1]:,}")
        proof = self.prove()
        if proof is Proof.CHANGED:
            raise self.changed("under the run, at the same size")
        self.mark = now
        if is_unlinked(self.file):
            return (
                f"{self.file.name} was replaced or removed: this run goes on with the file that it "
                "opened, a later start would read another"
            )
        if proof is Proof.SAME:
            return None
        return (
            f"{self.file.name} was written to or touched under the run: its size and the sampled "
            "places are as they were, the rest is not known"
        )

    def changed(self, how: str) -> UserError:
        return UserError(f"{self.file.name} was changed {how}: {self._remedy}")


def prove(file: File, digest: str | None) -> Proof:
    """Compares a file with its digest, if that is known and the file not too large."""
    if digest is None or size_of(file) > PROVED:
        return Proof.SAMPLED
    return Proof.SAME if whole_digest(file) == digest else Proof.CHANGED


class Compared(NamedTuple):
    """The result of a comparison with an earlier start: at most one of the two."""

    refusal: str | None = None
    note: str | None = None


def look_at(files: Iterable[WatchedFile]) -> list[str]:
    """Compares all files with the last look. Returns sentences; raises UserError."""
    return [sentence for file in files if (sentence := file.look()) is not None]


def unmarked(files: Iterable[WatchedFile]) -> list[str]:
    """Returns a sentence if servers of remote files give no version."""
    names = [f.file.name for f in files if not isinstance(f.file, IOBase) and not f.file.is_marked]
    more = f" and {len(names) - 1:,} more" if names[1:] else ""
    return [
        f"the server of {name}{more} tells neither an ETag nor a time of change: every process "
        "fetches it for itself, and a change is noticed by its size and some sampled places alone"
        for name in names[:1]
    ]


def marks_of(watched: Mapping[str, WatchedFile]) -> str:
    """Returns the marks of files by their keys, `key=mark …`, for `compare` at a later start."""
    return " ".join(f"{key}={file.mark}" for key, file in watched.items())


def compare(watched: Mapping[str, WatchedFile], marks: str) -> Compared:
    """Compares files with equal fingerprints with their `marks` of an earlier start."""
    there = dict(mark.partition("=")[::2] for mark in marks.split())
    odd = [file for key, file in watched.items() if there.get(key, file.mark) != file.mark]
    unknown = []
    for file in odd:
        try:
            proof = file.prove()
        except UserError as error:
            return Compared(refusal=str(error))
        if proof is Proof.CHANGED:
            return Compared(refusal=str(file.changed("since the last checkpoint")))
        if proof is Proof.SAMPLED:
            unknown.append(file.file.name)
    if not unknown:
        return Compared()
    more = f" and {len(unknown) - 1:,} more" if unknown[1:] else ""
    return Compared(
        note=f"{unknown[0]}{more} may have changed since the last checkpoint, by time of change, "
        "inode or version: sizes and the sampled places are as they were, the rest is not known"
    )
