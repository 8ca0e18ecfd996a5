"""Lists, shows and copies recipes, and copies scripts (`parallel3d recipes`, `init slurm`)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel3d.cli.overrides import composed, left_open, presets
from parallel3d.cli.verbs import Verb, run_verb
from parallel3d.config.fields import show
from parallel3d.errors import UserError, nearest_hint
from parallel3d.run_config import Config, check_config, conf_dir
from parallel3d.text import aligned, si

RECIPES, INIT = "recipes", "init"
GROUP = "experiment"
HEAD = ("recipe", "model", "GPUs", "layout", "tok/step", "precision")
VERBS = {
    "list": Verb(
        "list the recipes, one per line, like parallel3d recipes without a verb",
        {},
        (),
        "parallel3d recipes",
    ),
    "show": Verb(
        "print a recipe, with the sources of its values",
        {"name": "recipe, as parallel3d recipes lists it"},
        ("name",),
        "parallel3d recipes show llama3_1_8b",
        names=("name",),
    ),
    "copy": Verb(
        "write a recipe into your folder, as experiment/NAME.yaml, to be edited there; an existing "
        "file is never overwritten",
        {
            "name": "recipe, as parallel3d recipes lists it",
            "to": "folder to write it into, created if it is missing (the current one)",
        },
        ("name",),
        "parallel3d recipes copy llama3_1_8b\nparallel3d recipes copy llama3_1_8b to=mine",
        names=("name", "to"),
        paths=("to",),
    ),
}
# launch/local.sh, setup.sh and test.sh are not copied, because only a checkout needs them.
SCRIPTS = ("slurm/train.sbatch", "slurm/sweep.sbatch", "launch/torchrun.sh")
INIT_VERBS = {
    "slurm": Verb(
        f"write {', '.join(SCRIPTS)}, for a cluster with Slurm or hosts under torchrun; existing "
        "files are never overwritten",
        {"folder": "folder to write them into, created if it is missing (the current one)"},
        (),
        "parallel3d init slurm\nparallel3d init slurm ~/training",
        names=("folder",),
        paths=("folder",),
    ),
}


def recipes(arguments: Sequence[str]) -> int:
    """Runs a `parallel3d recipes …` command line. Returns its exit code.

    Raises UserError for invalid arguments, and for a file that exists.
    """
    return run_verb(RECIPES, VERBS, arguments or ["list"], _recipes)


def _recipes(verb: str, given: Mapping[str, str], _: list[str]) -> int:
    if verb == "list":
        print("\n".join(table()))
        return 0
    name, command = given["name"], f"{RECIPES} {verb}"
    if name not in presets(GROUP):
        hint = nearest_hint(name, presets(GROUP))
        raise UserError(
            f"{command} {name}: the recipe must be one of {', '.join(presets(GROUP))}{hint}"
        )
    text = (conf_dir() / GROUP / f"{name}.yaml").read_bytes()
    if verb == "show":
        print(text.decode().rstrip())
        return 0
    folder = Path(given.get("to", "."))
    written = folder / GROUP / f"{name}.yaml"
    write_new(command, {written: text})
    keys = "".join(f" {key}=…" for key in left_open(name))
    print(f"wrote {show(str(written))}")
    print(f"next: parallel3d train --config-dir={shlex.quote(str(folder))} {GROUP}={name}{keys}")
    return 0


def recipe(name: str) -> Config:
    """Returns the configuration of a recipe, checked without its data."""
    return check_config(composed([f"{GROUP}={name}"]), own_samples=True)


def row(name: str) -> tuple[str, ...]:
    """Returns the cells of a recipe in the table, in the order of HEAD."""
    config = recipe(name)
    sizes = {key: getattr(config, key) for key in ("tp", "cp", "pp", "vpp", "dp")}
    layout = [f"{key}={size}" for key, size in sizes.items() if size > 1]
    layout += [f"zero={config.zero}"] if config.zero else []
    tokens = config.global_batch_size * config.model.seq_length
    return (
        *(name, config.model.name, f"{config.world_size} ({config.cluster.name})"),
        *(" ".join(layout), si(tokens).strip(), config.precision.name),
    )


def table() -> list[str]:
    """Returns the lines that `parallel3d recipes` prints."""
    last = f"parallel3d train {GROUP}=NAME runs one; parallel3d {RECIPES} copy NAME copies one."
    return [*aligned([HEAD, *map(row, presets(GROUP))], "<<<<><"), "", last]


def init(arguments: Sequence[str]) -> int:
    """Runs a `parallel3d init …` command line. Returns its exit code.

    Raises UserError for invalid arguments, and for a file that exists.
    """
    return run_verb(INIT, INIT_VERBS, arguments, _init)


def _init(verb: str, given: Mapping[str, str], _: list[str]) -> int:
    folder, package = Path(given.get("folder", ".")), conf_dir().parent
    source = package / "scripts" if (package / "scripts").is_dir() else package
    scripts = {folder / name: (source / name).read_bytes() for name in SCRIPTS}
    write_new(f"{INIT} {verb}", scripts)
    print(f"wrote {', '.join(show(str(folder / name)) for name in SCRIPTS)}")
    script = shlex.quote(str(folder / SCRIPTS[0]))
    print(f"next: sbatch --nodes=8 {script} experiment=llama3_1_8b data.path=… cluster=slurm")
    return 0


def write_new(command: str, files: Mapping[Path, bytes]) -> None:
    """Writes new files. Raises UserError, with nothing written, if one of the paths exists."""
    there = next((path for path in files if os.path.lexists(path)), None)
    if there is not None:
        raise UserError(
            f"{command}: {show(str(there))} already exists and is not overwritten: remove it, or "
            "give another folder"
        )
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        # torchrun.sh is executable, as in the checkout; sbatch only reads its scripts.
        # O_EXCL refuses a file or link that somebody has created since the check.
        mode = 0o777 if path.suffix == ".sh" else 0o666
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
