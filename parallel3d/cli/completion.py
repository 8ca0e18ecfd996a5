"""Tab completion: Hydra's own, which knows nothing of our first word, and that of verbs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from parallel3d.commands.verbs import Verb

Verbs = Mapping[str, Mapping[str, Verb]]


def complete(
    words: list[str],
    subcommands: Sequence[str],
    verbs: Verbs,
    run_hydra: Callable[[str, list[str]], None],
) -> None:
    """Print what may follow the line in COMP_LINE; `verbs`: subcommand → its verbs."""
    query = any(word.startswith("query=") for word in words)
    if not query:
        run_hydra("train", words)
        return
    line = os.environ.get("COMP_LINE", "")
    if os.environ.get("COMP_POINT", "").isdigit():
        line = line[: int(os.environ["COMP_POINT"])]
    typed = line.split()
    subcommand = typed[1] if len(typed) > 1 else ""
    if len(typed) < 2 or (len(typed) == 2 and not line.endswith(" ")):
        first = dict.fromkeys(app.split()[0] for app in subcommands)
        print(" ".join(word for word in first if word.startswith(subcommand)))
        return
    app = next((a for a in (" ".join(typed[1:3]), subcommand) if a in subcommands), None)
    if app is not None and subcommand in verbs:
        begun = "" if line.endswith(" ") else typed[-1]
        keys = [f"{key}=" for key in verbs[subcommand][app.split()[1]].keys]
        print(" ".join(key for key in keys if key.startswith(begun)))
    elif app is not None:
        os.environ["COMP_LINE"] = line.replace(f" {app}", "", 1)
        run_hydra(app, words)
    elif len(typed) == 2 or (len(typed) == 3 and not line.endswith(" ")):
        begun = " ".join(typed[1:]) + (" " if len(typed) == 2 else "")
        print(" ".join(app.split()[1] for app in subcommands if app.startswith(begun)))
