"""`parallel3d init slurm [FOLDER]`: copy the scripts for Slurm and torchrun out of the package."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import parallel3d
from parallel3d.commands.verbs import Verb, choose, parse, refusing
from parallel3d.config.fields import show
from parallel3d.errors import UserError

INIT = "init"
# launch/local.sh, setup.sh and test.sh install a checkout: an installed package needs none of them.
SCRIPTS = ("slurm/train.sbatch", "slurm/sweep.sbatch", "launch/torchrun.sh")
VERBS = {
    "slurm": Verb(
        f"write {', '.join(SCRIPTS)}, for a cluster with Slurm or hosts under torchrun; files that "
        "are there are never overwritten",
        {"folder": "folder to write them into, made if it is not there (the current one)"},
        (),
        "parallel3d init slurm\nparallel3d init slurm ~/training",
        names=("folder",),
    ),
}


def init(arguments: Sequence[str]) -> int:
    """Run one `parallel3d init …` line. Returns its exit code.

    Raises UserError for a line that makes no sense, for a script that is there already, and for
    what the system refuses.
    """
    name = choose(INIT, VERBS, arguments)
    if name is None:
        return 0
    command = f"{INIT} {name}"
    given, _ = parse(command, VERBS[name], arguments[1:])
    folder = Path(os.path.expanduser(given.get("folder", ".")))
    with refusing(command):
        write_scripts(folder)
    script = shlex.quote(str(folder / SCRIPTS[0]))
    print(f"wrote {', '.join(show(str(folder / name)) for name in SCRIPTS)}")
    print(f"next: sbatch --nodes=8 {script} experiment=llama3_1_8b data.path=… cluster=slurm")
    return 0


def write_scripts(folder: Path) -> None:
    """Write SCRIPTS into `folder`. Raises UserError, with nothing written, if one is there."""
    there = [name for name in SCRIPTS if os.path.lexists(folder / name)]
    if there:
        raise UserError(
            f"init slurm: {show(str(folder / there[0]))} is there already and is not overwritten: "
            "remove it, or give another folder"
        )
    source = scripts_dir()
    for name in SCRIPTS:
        text = (source / name).read_bytes()
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # Executable as in the checkout: sbatch reads its scripts, a shell runs torchrun.sh.
        mode = 0o777 if name.endswith(".sh") else 0o666
        # O_EXCL: a file or a link that somebody has made since is not written through.
        opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(opened, "wb") as file:
            file.write(text)


def scripts_dir() -> Path:
    """Return the folder that holds slurm/ and launch/: in the package, else beside it."""
    package = Path(parallel3d.__file__).resolve().parent
    inside = package / "scripts"
    return inside if inside.is_dir() else package.parent
