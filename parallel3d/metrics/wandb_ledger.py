"""Records which rows of a run W&B has: the run's id there, its sessions, and their last rows.

All starts of a run make one W&B run without repeated steps. A resumed start repeats the steps after
the checkpoint, which W&B may already have; and W&B may lack rows that were lost when the run was
killed. So every session writes lines into a file in the run's folder (LEDGER): before its first
row, at each checkpoint, and when W&B has confirmed the last row. If a session was killed, the
ledger does not show which rows reached W&B's file, and W&B's own tool is used to read that file.

W&B cannot delete rows. If its rows contradict the resumed run because keys changed, or if nobody
can tell which rows it has, the run continues in W&B under a new id.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from yaml import YAMLError

from parallel3d.checkpoint.identity import decisive
from parallel3d.config.fields import all_keys
from parallel3d.config.text import read_yaml
from parallel3d.files import replace_durably
from parallel3d.metrics.jsonl import append_line
from parallel3d.run_config import Config

ID_FILE = "wandb-id"
LEDGER = "wandb.jsonl"
# Matches the name of a session's folder; an id may contain dashes.
_FOLDER = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")
# Types of records that W&B's tool (version 0.31) shows. If it shows no row but a type that is not
# listed here, its output has a format that this reader does not know.
_TYPES = frozenset(
    (
        *("run", "history", "summary", "exit", "metric", "stats", "config", "files", "header"),
        *("final", "footer", "telemetry", "output", "output_raw", "request", "environment"),
        *("alert", "artifact", "use_artifact", "link_artifact", "preempting", "tbrecord"),
    )
)
HEADER_BYTES = 64  # bytes; a file without records is not longer


class UnknownRows(Exception):
    """Raised when it is unknown which rows W&B has; the message is a clause that says why."""


class RowPosition(NamedTuple):
    """Position of a logged row in the order of rows; the evaluation after a step follows it."""

    step: int
    evaluation: bool

    @property
    def number(self) -> int:
        """W&B's `_step` of the row offline: it grows with every row, in whatever session.

        It depends on the row alone, since nobody counts the rows that a killed session lost. It is
        never below the number of earlier rows, so it also follows rows that W&B itself numbered.
        """
        return 2 * self.step + self.evaluation


@dataclass
class Session:
    """One session of W&B, as the ledger describes it.

    Attributes:
        id: the run's id in W&B.
        home: absolute path of the run's folder when the session began.
        folder: name of the session's folder in `wandb/`.
        keys: the keys that determine the results of steps, with their values (`decisive`).
        last: the last row that was recorded as sent; None if none was.
        closed: whether W&B has confirmed all rows.
    """

    id: str
    home: str
    folder: str
    keys: Mapping[str, str]
    last: RowPosition | None = None
    closed: bool = False


def sessions_of(run_dir: Path) -> list[Session]:
    """Returns the sessions of the ledger, oldest first; damaged lines are left out."""
    try:
        lines = (run_dir / LEDGER).read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    found: dict[int, Session] = {}
    for line in lines:
        try:
            row = json.loads(line)
            number = row["session"]
            if "id" in row:
                home, folder = str(row["home"]), str(row["folder"])
                found[number] = Session(str(row["id"]), home, folder, dict(row["keys"]))
            else:
                found[number].last = RowPosition(int(row["last_step"]), bool(row["evaluation"]))
            found[number].closed |= bool(row.get("closed"))
        except (ValueError, KeyError, TypeError):
            continue
    return [found[number] for number in sorted(found)]


class Ledger:
    """Writes this session's lines into the ledger. Every method may raise OSError."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LEDGER
        self._home = str(run_dir.absolute())
        self._number = len(sessions_of(run_dir)) + 1

    def begin(self, id: str, folder: str, first_step: int, keys: Mapping[str, str]) -> None:
        """Records the session; call it before the first row.

        `folder` is the name of its folder in `wandb/`; `keys` are the keys that determine the
        results of steps (`identity.decisive`).
        """
        row = {"session": self._number, "id": id, "home": self._home, "folder": folder}
        row |= {"first_step": first_step, "checkpoint": first_step - 1}
        append_line(self._path, row | {"keys": keys})

    def sent(self, last: RowPosition | None, *, closed: bool = False) -> None:
        """Records the last row that was sent, and whether W&B has confirmed it."""
        row: dict[str, Any] = {"session": self._number}
        if last is not None:
            row |= {"last_step": last.step, "evaluation": last.evaluation}
        if last is not None or closed:
            append_line(self._path, row | {"closed": closed})


class Beginning(NamedTuple):
    """State of the run in W&B when a session begins.

    Attributes:
        id: the run's id in W&B.
        last: the last row that W&B has; None without one.
        changed: whether the rows that W&B may have from `first_step` on contradict this start.
        lines: sentences for the user.
    """

    id: str
    last: RowPosition | None
    changed: bool
    lines: tuple[str, ...] = ()


def begin(
    run_dir: Path,
    first_step: int,
    keys: Mapping[str, str],
    environ: Mapping[str, str],
    changed: bool = False,
) -> Beginning:
    """Chooses the id under which a start from `first_step` continues in W&B; saves it in ID_FILE.

    `keys` are described at `Ledger.begin`. `changed` is true if some of them differ from the
    checkpoint's; it is used only if the ledger has no session of this id.

    Raises OSError.
    """
    kept = kept_id(run_dir)
    if kept is None:
        made, lines = _first_id(run_dir, environ)
        return Beginning(_keep(run_dir, made), None, False, lines)
    if (source := _copied_from(run_dir, kept)) is not None:
        line = f"W&B: this run is a copy of {source}, to which W&B's run {kept} belongs"
        return _anew(run_dir, line)
    sessions = [session for session in sessions_of(run_dir) if session.id == kept]
    if sessions:
        # A key that the session's version lacked counts as having its default then.
        was = decisive(Config()) | dict(sessions[-1].keys)
        changed = any(was[key] != value for key, value in keys.items())
    try:
        last = last_row(run_dir, kept, sessions)
    except UnknownRows as error:
        return _anew(run_dir, f"W&B: it is unknown which rows the run {kept} has there ({error})")
    if changed and last is not None and last.step >= first_step:
        return replaced(run_dir, kept, first_step, last.step)
    return Beginning(kept, last, changed)


def replaced(run_dir: Path, kept: str, first_step: int, last_step: int) -> Beginning:
    """Begins under a new id, because W&B's rows from `first_step` on have other keys."""
    steps = f"steps {first_step:,} to {last_step:,}"
    if first_step == last_step:
        steps = f"step {first_step:,}"
    is_one = "is" if first_step == last_step else "are"
    line = f"W&B: {steps} of the run {kept} {is_one} from an earlier start with other keys"
    return _anew(run_dir, line)


def _anew(run_dir: Path, why: str) -> Beginning:
    made = _keep(run_dir, secrets.token_hex(8))
    return Beginning(made, None, False, (f"{why}: this start gets a new W&B run, {made}",))


def kept_id(run_dir: Path) -> str | None:
    """Returns the run's id in W&B, or None before its first session. May raise OSError."""
    try:
        return (run_dir / ID_FILE).read_text("utf-8", "replace").strip() or None
    except FileNotFoundError:
        return None


def _keep(run_dir: Path, made: str) -> str:
    replace_durably(run_dir / ID_FILE, f"{made}\n".encode())
    return made


def _first_id(run_dir: Path, environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Returns the id of a new run, and sentences for the user.

    WANDB_RUN_ID is used only if a sweep's agent has set it: a value from a shell would make all
    runs started there one run in W&B. The run's name is not used either, since it need not be
    unique in the W&B project.
    """
    given, made = environ.get("WANDB_RUN_ID"), secrets.token_hex(8)
    if not given:
        return made, ()
    kept = f"this run is {made} in W&B"
    if not environ.get("WANDB_SWEEP_ID"):
        why = "used only under a sweep's agent, because all runs of this shell would share it"
        return made, (f"WANDB_RUN_ID={given} is {why}: {kept}",)
    if (other := _beside(run_dir, given)) is not None:
        return made, (f"WANDB_RUN_ID={given} already belongs to run {other.name}: {kept}",)
    return given, ()


def _beside(run_dir: Path, id: str) -> Path | None:
    """Returns the folder of another run with this id in the same parent folder, or None."""
    for file in sorted(run_dir.absolute().parent.glob(f"*/{ID_FILE}")):
        if kept_id(file.parent) == id and not file.parent.samefile(run_dir):
            return file.parent
    return None


def _copied_from(run_dir: Path, kept: str) -> Path | None:
    """Returns the folder from which `run_dir` was copied; None if it is not a copy.

    The original is the folder that the ledger names (without a ledger, the folder with the run's
    name), if it has the same id. Otherwise, it is any other run in the parent folder that has this
    id.
    """
    sessions = sessions_of(run_dir)
    home = Path(sessions[-1].home) if sessions else _home_by_name(run_dir)
    if home is not None and home.is_dir():
        if home.samefile(run_dir):
            return None
        if kept_id(home) == kept:
            return home
    return _beside(run_dir, kept)


def _home_by_name(run_dir: Path) -> Path | None:
    try:
        tree: Any = read_yaml(run_dir / "config.yaml", all_keys(Config))
    except (OSError, UnicodeDecodeError, YAMLError):
        return None  # without its configuration, the run's name is unknown
    name = tree.get("run") if isinstance(tree, Mapping) else None
    return None if name is None else run_dir.absolute().parent / str(name)


def last_row(run_dir: Path, id: str, sessions: list[Session]) -> RowPosition | None:
    """Returns the last row that W&B has of its run `id`, or None if it has no row.

    Raises UnknownRows if nobody can tell, and OSError if W&B's tool cannot be started.
    """
    for session in reversed(sessions):
        if not session.closed:
            if (row := _row_in(run_dir / "wandb" / session.folder)) is not None:
                return row
        elif session.last is not None:
            return session.last
    known = {session.folder for session in sessions}
    found = [
        (match[1], folder)
        for folder in run_dir.glob("wandb/*run-*")
        if (match := _FOLDER.fullmatch(folder.name)) is not None and match[2] == id
    ]
    for _, folder in sorted(found, reverse=True):  # the newest first
        if folder.name not in known and (row := _row_in(folder)) is not None:
            return row
    return None


def _row_in(folder: Path) -> RowPosition | None:
    """Returns the last row in W&B's file of a session that may have been killed, or None."""
    files = [*folder.glob("run-*.wandb")]
    if len(files) != 1:
        raise UnknownRows(f"{folder} has {len(files)} W&B files instead of one")
    return read_rows(files[0], _tool)


def _tool(path: Path) -> Iterator[bytes]:
    """Yields the output of W&B's own reader of its files. Raises OSError or UnknownRows."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tool:
        assert tool.stdout is not None and tool.stderr is not None
        yield from tool.stdout
        problem = tool.stderr.read().decode(errors="replace").strip()
    if tool.returncode:
        first = problem.splitlines()[0] if problem else f"code {tool.returncode}"
        raise UnknownRows(f"{path} cannot be read: {first}")


def read_rows(path: Path, inspect: Callable[[Path], Iterator[bytes]]) -> RowPosition | None:
    """Returns the last row in a file of W&B, or None if no row was written to it.

    `inspect` yields the file's records as lines of JSON. Raises UnknownRows if they have an unknown
    format, since the file may still contain rows.
    """
    row, strange, records = None, "", 0
    for line in inspect(path):
        if not line.strip():
            continue
        records += 1
        try:
            record = json.loads(line)
            kind = record["type"]
            if kind == "history":
                item = record["history"]["item"]
                row = RowPosition(int(item["step"]), "train/lr" not in item)
            elif kind not in _TYPES:
                strange = f"a record of type {kind!r}"
        except (ValueError, KeyError, TypeError) as error:
            raise UnknownRows(f"W&B's tool shows {path} in an unknown format: {error!r}") from None
    if row is None and strange:
        raise UnknownRows(f"W&B's tool shows {strange} in {path}, but no rows")
    if not records and path.stat().st_size > HEADER_BYTES:
        raise UnknownRows(f"W&B's tool shows no records of {path}")
    return row


def own_ids(run_dir: Path) -> tuple[list[str], bool]:
    """Returns the ids that a run had in this folder, and whether the folder is a copy.

    A copy also has sessions of the original, with other ids.
    """
    home, sessions = run_dir.absolute(), sessions_of(run_dir)
    own = list(dict.fromkeys(session.id for session in sessions if Path(session.home) == home))
    return own, any(session.id not in own for session in sessions)


def name_of_id(run_dir: Path, id: str) -> str:
    """Returns the name of a run in W&B under `id`: `run`, or `run-2` under its second id."""
    number = len(dict.fromkeys([*own_ids(run_dir)[0], id]))
    return run_dir.name if number == 1 else f"{run_dir.name}-{number}"
