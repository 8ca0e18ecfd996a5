"""Writes docs/what_goes_with_what.md: which settings are refused together, and why.

python docs/compatibility.py > docs/what_goes_with_what.md

The rows are `CONFLICTS` of each feature's `keys.py`, by which every start is checked. A test
compares the committed page with this text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from parallel3d.config.conflicts import Condition, Conflict
from parallel3d.config.fields import all_keys, spell
from parallel3d.run_config import CONFLICTS, Config

INTRO = """\
# Compatibility of features

Features of a run work together, but for the settings below. A run that has all settings of a row
ends before any process is started, with exit code 2 and a sentence that says why and what to set
instead. `python docs/compatibility.py > docs/what_goes_with_what.md` writes this page from the rows
of `CONFLICTS` next to the keys, and every start is checked by the same rows.

All other pairs of settings of a step are tested: any two meet in a run whose losses, gradient norms
and weights are compared with a reference (`python -m tests.distributed.matrix` lists the settings;
the list leaves out what needs a GPU). Ranges of a single key are in
[Configuration keys](configuration.md). Sizes that must divide each other, files that are absent and
kernels that a GPU does not have are refused in a sentence, too.

"""

COULD = """\

## What could be built

Most rows contradict each other, or need something that a kernel or a device lacks. These could
be lifted:

"""

# The keys of a row → the work that would lift it.
NOT_BUILT = {
    ("schedule.name", "zero"): "FSDP2 reduces the gradients that exist during the backward, so "
    "backwards must be whole. `schedule=auto` would have to search among whole ones. All named "
    "schedules run, with B for I and W.",
    ("ddp.comm_hook", "zero"): "A reduce-scatter of rounded buckets that adds in fp32.",
    ("ddp.hierarchical", "zero"): "A reduce-scatter in two levels, whose shards lie in the order "
    "of the domains. `zero=2` and `zero=3` have `ddp.shard_size`.",
}


def example(conflict: Conflict) -> dict[str, Any]:
    """Returns a value of each key with which the conflict holds."""
    keys = all_keys(Config)
    return {
        name: condition.example(keys[name].default, keys[name].tried)
        for name, condition in conflict.settings.items()
    }


def settings(conflict: Conflict) -> Iterator[str]:
    """Yields each setting, with the other values of its key that are also refused."""
    for name, value in example(conflict).items():
        others = values(name, conflict.settings[name])
        yield ", ".join([f"`{spell(name, value)}`", *(f"`{v}`" for v in others if v != value)])


def values(name: str, condition: Condition) -> list[Any]:
    """Returns the values of a key with a few of them for which a condition holds."""
    key = all_keys(Config)[name]
    few: tuple[Any, ...] = key.meta["choices"] or (key.tried if name == "zero" else ())
    return [value for value in few if condition(value)]


def rows() -> Mapping[tuple[str, str], list[str]]:
    """Returns the settings of the conflicts with each reason and nearest settings."""
    found: dict[tuple[str, str], list[str]] = {}
    for conflict in CONFLICTS:
        sentence = conflict.sentence(example(conflict).__getitem__, spell)
        why, nearest = sentence.removesuffix(".").split("; the nearest is ")
        instead = " or ".join(f"`{word}`" for word in nearest.split(", or "))
        first, *others = settings(conflict)
        found.setdefault((why, instead), []).append(f"{first} with {' and '.join(others)}")
    return found


def page() -> str:
    """Returns the whole text of docs/what_goes_with_what.md."""
    lines = ["| settings | why they are refused together | instead |", "| --- | --- | --- |"]
    for (why, instead), refused in rows().items():
        lines.append(f"| {'; '.join(refused)} | {why} | {instead} |")
    could = [
        f"- `{'` with `'.join(key.removesuffix('.name') for key in keys)}`: {what}"
        for keys, what in NOT_BUILT.items()
    ]
    return INTRO + "\n".join(lines) + "\n" + COULD + "\n".join(could) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
