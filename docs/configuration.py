"""Writes docs/configuration.md from the dataclasses: `python docs/configuration.py > FILE`.

A test compares the committed page with this text, so that the page cannot drift.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parallel3d.cli.overrides import groups, presets
from parallel3d.commands.options import CommandConfig
from parallel3d.config.fields import (
    Key,
    all_keys,
    other_names,
    sections_of,
    show,
)
from parallel3d.config.values import INTERVAL
from parallel3d.run_config import Config, conf_dir

INTRO = """\
# Configuration

This page is written by `python docs/configuration.py > docs/configuration.md`; edit the
dataclasses in each feature's `keys.py` instead.

Every key has a default, and whatever follows `parallel3d train` overrides some of them:

```
parallel3d train tp=2 pp=2                              # sizes of the dimensions
parallel3d train model=llama_tiny model.num_layers=8    # a preset, then a key of it
parallel3d train --multirun tp=1,2                      # a run for each value
parallel3d train --cfg job tp=2                         # print the configuration and stop
```

- `GROUP=PRESET` takes the file `conf/GROUP/PRESET.yaml`; `GROUP.KEY=VALUE` sets one key of it.
- `null` stands for "left out". A page says how [lists, text and
  paths](own_configuration.md#the-command-line) are written.
- A bad key or value ends in one sentence that names the nearest good one, with exit code 2.
- From Python: `parallel3d.compose("tp=2", world_size=4)` ([library.md](library.md)).

`world size = tp × pp × cp × dp`, and
`global_batch_size = micro_batch_size × micro-batches × dp`, in sequences.
"""

TYPES = {int: "int", float: "float", bool: "bool", str: "text", list: "list", dict: "{name:value}"}

MEGATRON_INTRO = """\
## From Megatron-LM's flags

The key that means the same as a flag of a Megatron-LM launch. Flags that are not in this list
have no counterpart.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _allowed(key: Key) -> str:
    """Returns the values that a key takes, as `int ≥ 1 or null` if it may be left out."""
    choices = key.meta["choices"]
    if not choices:
        noun = TYPES[key.kind] if key.item is None else f"list of {TYPES[key.item]}"
        signs = {"minimum": "≥", "above": ">", "maximum": "≤", "below": "<"}
        limits = [f"{sign} {key.meta[b]:g}" for b, sign in signs.items() if key.meta[b] is not None]
        text = f"{noun} {', '.join(limits)}".strip()
        if key.holds == INTERVAL:
            text += ", a time, or auto"
        return f"{text} or null" if key.optional else text
    text = ", ".join(f"`{choice}`" for choice in choices)
    if key.meta["list_of"]:
        text += f" or a list of {', '.join(f'`{word}`' for word in key.meta['list_of'])}"
    return text


def _keys_table(keys: list[Key]) -> str:
    rows = [
        (f"`{key.name}`", f"`{show(key.default)}`", _allowed(key), key.meta["help"]) for key in keys
    ]
    return _table(("key", "default", "allowed", "meaning"), rows)


def _comment(path: Path) -> str:
    """Returns a preset's description: the comment at its head up to the full stop, without Hydra's
    `# @…`."""
    text = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# @"):
            continue
        if not line.startswith("# "):
            break
        text = f"{text} {line[2:]}".strip()
        if text.endswith("."):
            return text
        if ". " in text:
            return text[: text.rindex(". ") + 1]
    raise ValueError(f"{path.name} does not begin with a sentence that describes it")


def _presets_table(group: str) -> str:
    rows = [
        (f"`{group}={name}`", _comment(conf_dir() / group / f"{name}.yaml"))
        for name in presets(group)
    ]
    return _table(("preset", "what it is"), rows)


def _sections() -> str:
    keys = list(all_keys(CommandConfig).values())
    own = [key for key in keys if "." not in key.name]
    parts = ["## Top level\n", f"{Config.__doc__}\n", _keys_table(own)]
    sections = sections_of(CommandConfig)
    for name, section in sections.items():
        inside = [key for key in keys if key.name.startswith(f"{name}.")]
        parts += [f"## {name}\n", f"{section.__doc__}\n", _keys_table(inside)]
        if name in groups():
            parts.append(_presets_table(name))
    for name in groups():
        if name not in sections:
            parts += [f"## {name}\n", f"`{name}=…` sets keys of any section.\n"]
            parts.append(_presets_table(name))
    return "\n".join(parts)


def _megatron_table() -> str:
    rows = [
        (
            ", ".join(f"`{flag}`" for flag in row.flags),
            f"`{all_keys(Config)[name].typed}`",
            row.differs or "",
        )
        for name, row in other_names().items()
        if row.flags
    ]
    return _table(("Megatron-LM flag", "parallel3d key", "note"), rows)


def configuration_page() -> str:
    """Returns the whole text of docs/configuration.md."""
    return "\n".join([INTRO, _sections(), MEGATRON_INTRO, _megatron_table()])


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
