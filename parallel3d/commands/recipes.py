"""`parallel3d recipes`: list the experiments that are starting points, show one, copy one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from parallel3d.commands.verbs import Verb, choose, parse, refusing
from parallel3d.config.checks.whole import check_config
from parallel3d.config.fields import show
from parallel3d.config.overrides import composed, left_open, presets
from parallel3d.config.schema import Config, conf_dir
from parallel3d.errors import UserError, nearest_hint
from parallel3d.metrics.text import si

RECIPES = "recipes"
GROUP = "experiment"
HEAD = ("recipe", "model", "GPUs", "layout", "tokens/step", "precision")
VERBS = {
    "list": Verb(
        "list them, a line each; what parallel3d recipes alone does", {}, (), "parallel3d recipes"
    ),
    "show": Verb(
        "print one, with the sources of its values",
        {"name": "recipe, as parallel3d recipes lists it"},
        ("name",),
        "parallel3d recipes show llama3_1_8b",
        names=("name",),
    ),
    "copy": Verb(
        "write one into a folder of yours, as experiment/NAME.yaml, to be edited there; a file "
        "that is there is never overwritten",
        {
            "name": "recipe, as parallel3d recipes lists it",
            "to": "folder to write it into, made if it is not there (the current one)",
        },
        ("name",),
        "parallel3d recipes copy llama3_1_8b\nparallel3d recipes copy llama3_1_8b to=mine",
        names=("name", "to"),
    ),
}


def recipes(arguments: Sequence[str]) -> int:
    """Runs one `parallel3d recipes …` line. Returns its exit code.

    Raises UserError for a line that makes no sense, for a file that is there already, and for what
    the system refuses.
    """
    verb = choose(RECIPES, VERBS, arguments or ["list"])
    if verb is None:
        return 0
    command = f"{RECIPES} {verb}"
    given, _ = parse(command, VERBS[verb], arguments[1:])
    if verb == "list":
        print("\n".join(table()))
        return 0
    name = given["name"]
    if name not in presets(GROUP):
        hint = nearest_hint(name, presets(GROUP))
        raise UserError(f"{command} {name}: must be one of {', '.join(presets(GROUP))}{hint}")
    with refusing(command):
        text = (conf_dir() / GROUP / f"{name}.yaml").read_bytes()
        if verb == "show":
            print(text.decode().rstrip())
            return 0
        folder = Path(os.path.expanduser(given.get("to", ".")))
        written = copy(text, folder / GROUP / f"{name}.yaml")
    keys = "".join(f" {key}=…" for key in left_open(name))
    print(f"wrote {show(str(written))}")
    print(f"next: parallel3d train --config-dir={shlex.quote(str(folder))} {GROUP}={name}{keys}")
    return 0


def copy(text: bytes, target: Path) -> Path:
    """Writes `text` to `target` and returns it. Raises UserError if anything is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("xb") as file:  # not through a link, not over a file
            file.write(text)
    except FileExistsError:
        raise UserError(
            f"recipes copy: {show(str(target))} is there already and is not overwritten: remove "
            "it, or give another folder, as in to=mine"
        ) from None
    return target


def recipe(name: str) -> Config:
    """Returns the checked configuration of a recipe, without its data."""
    return check_config(composed([f"{GROUP}={name}"]), own_samples=True)


def row(name: str) -> tuple[str, ...]:
    """Returns the cells of a recipe under HEAD."""
    config = recipe(name)
    sizes = {key: getattr(config, key) for key in ("tp", "cp", "pp", "vpp", "dp")}
    layout = [f"{key}={size}" for key, size in sizes.items() if size > 1]
    layout += [f"zero={config.zero}"] if config.zero else []
    tokens = config.global_batch_size * config.model.seq_length
    return (
        *(name, config.model.name, f"{config.world_size} ({config.cluster.name})"),
        *(" ".join(layout), si(tokens).strip(), config.precision.name),
    )


def table() -> Iterator[str]:
    """Yields the lines of the list."""
    rows = [HEAD, *map(row, presets(GROUP))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        yield "  ".join(
            cell.rjust(width) if head == "tokens/step" else cell.ljust(width)
            for head, cell, width in zip(HEAD, cells, widths, strict=True)
        ).rstrip()
    yield ""
    yield f"parallel3d train {GROUP}=NAME starts one, parallel3d {RECIPES} copy NAME copies one."
