"""Slurm's short forms: node lists and tasks per node.

The grammar was tried on `scontrol show hostnames` of Slurm 22.05; what that refuses is refused.
"""

from __future__ import annotations

import itertools
import math
import re

from parallel3d.errors import UserError

MOST_NODES = 1_000_000  # a list that is longer is a slip, and would fill the memory
NAME = re.compile(r"[A-Za-z0-9_.-]+")
RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hostlist(text: str, what: str = "node list") -> list[str]:
    """The names of a node list, in its order: `n[01-03,7],rack[1-2]node[1-2]`.

    Leading zeros are part of a name, several brackets count through like an odometer, and a name
    may come twice. `what` names the list in messages.

    Raises:
        UserError: brackets that do not match, ranges that do not count up, no name at all.
    """
    names: list[str] = []
    for entry in _split_outside_brackets(text.strip(), what, text):
        pieces = re.split(r"\[([^\[\]]*)\]", entry)  # literal, ranges, literal, ranges, …
        choices = [
            _numbers(piece, what, text) if place % 2 else [piece]
            for place, piece in enumerate(pieces)
        ]
        if len(names) + math.prod(map(len, choices)) > MOST_NODES:
            raise _unreadable(what, text, f"it names more than {MOST_NODES:,} nodes")
        expanded = ["".join(parts) for parts in itertools.product(*choices)]
        if not NAME.fullmatch(expanded[0]):
            raise _unreadable(what, text, f"{entry!r} is no name of a node")
        names += expanded
    if not names:
        raise _unreadable(what, text, "it names no node")
    return names


def _split_outside_brackets(text: str, what: str, whole: str) -> list[str]:
    entries, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _unreadable(what, whole, "its brackets do not match")
        if character == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += character
    if depth:
        raise _unreadable(what, whole, "its brackets do not match")
    return [entry.strip() for entry in entries if entry.strip()]


def _numbers(ranges: str, what: str, whole: str) -> list[str]:
    """`01-03,7` as 01, 02, 03, 7."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = RANGE.fullmatch(part.strip())
        if match is None:
            raise _unreadable(what, whole, f"{part!r} is no range such as 01-03")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise _unreadable(what, whole, f"the range {part!r} counts down")
        if high - low >= MOST_NODES:
            raise _unreadable(what, whole, f"it names more than {MOST_NODES:,} nodes")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return numbers


def _unreadable(what: str, text: str, why: str) -> UserError:
    return UserError(
        f"the {what} {shortened(text)!r} cannot be read: {why}; it must look like n[01-03,7],m1."
    )


def shortened(text: str, most: int = 60) -> str:
    """The beginning of a text, on one line, for a message."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def expand_tasks_per_node(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Tasks of each node: `8(x3),4` is 8, 8, 8, 4. Raises UserError if it cannot be read."""
    tasks: list[int] = []
    for part in text.split(","):
        match = REPEATED.fullmatch(part.strip())
        repeats = int(match[2] or 1) if match else 0
        if match is None or int(match[1]) < 1 or repeats < 1:
            raise UserError(
                f"{name}={shortened(text)!r} cannot be read: it must look like 8(x3),4."
            )
        if len(tasks) + repeats > MOST_NODES:
            raise UserError(f"{name}={shortened(text)!r} is for more than {MOST_NODES:,} nodes.")
        tasks += [int(match[1])] * repeats
    return tasks
