"""Reads and writes the files of the GPU benchmarks; rows are added and never lost.

A file has a section for each machine, torch and size, so that a command of a few minutes can be
repeated with other rows, on another day or another card. Other files are not overwritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Section = dict[str, Any]  # {"machine": {…}, "size": …, "rows": {name: row}}
MARK = "<!-- Written by benchmarks/gpu, which writes over what is changed here. -->"


class NotOurs(Exception):
    """Raised if a result's path holds a file that was not written here."""


@dataclass(frozen=True)
class ResultFiles:
    """A JSON file and, with `render`, the Markdown made from it.

    Args:
        render: sections → text, written under `MARK`.

    Raises:
        NotOurs: when made, if either file exists and holds something else.
    """

    path: Path
    markdown: Path | None = None
    render: Callable[[list[Section]], str] | None = None

    def __post_init__(self) -> None:
        self.sections()
        if self.markdown is not None and self.markdown.exists():
            text = self.markdown.read_text(encoding="utf-8", errors="replace")
            if text.strip() and not text.startswith(MARK):
                raise NotOurs(
                    f"{self.markdown} was not written by this command: move it, or name another"
                )

    def sections(self) -> list[Section]:
        """Returns the present content of the file; an empty dict if there is none."""
        if not self.path.exists() or not self.path.read_text(encoding="utf-8").strip():
            return []
        try:
            sections = json.loads(self.path.read_text(encoding="utf-8"))["sections"]
            for section in sections:
                section["machine"], section["size"], section["rows"].items()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise NotOurs(
                f"{self.path} was not written by this command: move it, or name another"
            ) from None
        return sections

    def rows(self, machine: dict[str, Any], size: str) -> dict[str, Any]:
        """Returns the rows of this machine and size so far."""
        return _section(self.sections(), machine, size)["rows"]

    def add(self, machine: dict[str, Any], size: str, name: str, row: dict[str, Any]) -> None:
        """Writes both files with the row in its section, in place of an older row of the same name.

        A failed row does not replace a measured one: it is added as `again`. The files are read
        again each time, so that two commands may take turns.
        """
        sections = self.sections()
        section = _section(sections, machine, size)
        if section not in sections:
            sections.append(section)
        before = section["rows"].get(name, {})
        if why_not(row) and before and not why_not(before):
            row = before | {"again": why_not(row)}
        section["rows"][name] = row
        _replace(self.path, json.dumps({"sections": sections}, indent=2) + "\n")
        if self.markdown is not None and self.render is not None:
            _replace(self.markdown, f"{MARK}\n\n{self.render(sections)}")


def why_not(row: dict[str, Any]) -> str | None:
    """Returns the reason why a row has no figures; None if it has some."""
    return row.get("skipped") or row.get("failed")


def _section(sections: list[Section], machine: dict[str, Any], size: str) -> Section:
    for section in sections:
        if section["machine"] == machine and section["size"] == size:
            return section
    return {"machine": machine, "size": size, "rows": {}}


def _replace(path: Path, text: str) -> None:
    """Writes all of the new file or keeps all of the old one, whenever this process is ended."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
