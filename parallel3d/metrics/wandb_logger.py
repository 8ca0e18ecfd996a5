"""Weights & Biases in addition to metrics.jsonl (`logger=wandb`); its errors never stop training.

All sessions of a run are one W&B run without repeated steps. A resumed run repeats steps after the
checkpoint that W&B may have, and lacks rows that were lost when the run was killed. So a session
first adds the rows of metrics.jsonl that W&B lacks, then logs new ones.

This module only tests whether a key exists: no secret is read.
"""

from __future__ import annotations

import dataclasses
import json
import netrc
import os
import re
import secrets
import shlex
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from parallel3d.config.schema import Config
from parallel3d.files import replace_durably
from parallel3d.metrics.loggers import figures_of
from parallel3d.metrics.provenance import Provenance

if TYPE_CHECKING:
    from wandb import Run


# The id of a run's W&B run, and the last row that its earlier sessions wrote.
#
# A resumed run logs after that row. W&B's own `resume` and explicit steps cannot replace this: W&B
# ignores `resume` offline, so the rows that a killed session lost stay lost or, if all are logged
# again, others are in the files twice (`test_wandbs_own_resume_and_steps_do_not_keep_rows_whole`).
#
# A `run-<id>.wandb` file is a log of protobuf records in LevelDB's framing: a header of 7 bytes,
# then blocks of 32 KiB. A record is in one block, or in parts in consecutive blocks; every part has
# its own header (CRC-32, length, kind). A killed session's file may end within a record.

MAX_ID_LENGTH = 64
ID_FILE = "wandb-id"
_ID = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_ID_LENGTH}}}")

SESSIONS = "wandb/*run-*-*/run-*.wandb"
FILE_HEADER = struct.Struct("<4sHB")
MAGIC = (b":W&B", 0xBEE1, 0)
PART_HEADER = struct.Struct("<IHB")
BLOCK = 1 << 15
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class Row(NamedTuple):
    """Place of a logged row in the order of rows: a step's evaluation comes after the step."""

    step: int
    evaluation: bool


class UnreadableFile(OSError):
    """A .wandb file of an unknown format."""


def run_id(run_dir: Path) -> str:
    """Returns W&B's id of a run: created once, kept in the run's folder.

    The first start takes WANDB_RUN_ID, which a sweep's agent sets, if valid. The run's name would
    not be unique among folders and users of the project. Raises OSError.
    """
    file = run_dir / ID_FILE
    if file.is_file() and _ID.fullmatch(found := file.read_text("utf-8", "replace").strip()):
        return found
    # Sessions older than this file have logged under another id: keep it.
    earlier = [path.stem.removeprefix("run-") for path in run_dir.glob(SESSIONS)]
    allowed = re.sub(r"[^A-Za-z0-9_.-]", "-", run_dir.name)
    given = os.environ.get("WANDB_RUN_ID", "")
    own = (
        given if _ID.fullmatch(given) else f"{allowed[: MAX_ID_LENGTH - 17]}-{secrets.token_hex(8)}"
    )
    made = earlier[-1] if earlier else own
    replace_durably(file, f"{made}\n".encode())
    return made


def last_row(run_dir: Path) -> Row | None:
    """Returns the last row of earlier sessions in `run_dir`/wandb, or None. Raises OSError."""
    rows = [_last_row_of(path) for path in run_dir.glob(SESSIONS)]
    return max((row for row in rows if row is not None), default=None)


def _last_row_of(path: Path) -> Row | None:
    """Returns the last whole history record, searched from the end: files may be large."""
    with path.open("rb") as file:
        header = file.read(FILE_HEADER.size)
        if not header:
            return None  # killed before the first block was written
        if len(header) < FILE_HEADER.size or FILE_HEADER.unpack(header) != MAGIC:
            raise UnreadableFile(f"{path} is no W&B file of a known version")
        blocks = -(-os.fstat(file.fileno()).st_size // BLOCK)
        taken = 1
        while True:
            start = max(0, blocks - taken) * BLOCK
            file.seek(start)
            row = None
            for record in _records(file.read(), FILE_HEADER.size if start == 0 else 0):
                row = _row(record) or row
            if row is not None or taken >= blocks:
                return row
            taken *= 4


def _records(content: bytes, at: int) -> Iterator[bytes]:
    """Yields whole records from `at` to the first damage; `content` begins at a block's border."""
    parts: list[bytes] | None = None  # None: within a record that began before `content`
    while at + PART_HEADER.size <= len(content):
        if BLOCK - at % BLOCK < PART_HEADER.size:
            at += BLOCK - at % BLOCK  # too small for a header: padding
            continue
        checksum, length, kind = PART_HEADER.unpack_from(content, at)
        body = content[at + PART_HEADER.size : at + PART_HEADER.size + length]
        if len(body) < length or zlib.crc32(bytes([kind]) + body) != checksum:
            return
        at += PART_HEADER.size + length
        if kind in (WHOLE, FIRST):
            parts = [body]
        elif parts is not None:
            parts.append(body)
        if kind in (WHOLE, LAST) and parts is not None:
            yield b"".join(parts)
            parts = None


def _row(record: bytes) -> Row | None:
    """Returns the place of a history record of `WandbLogger`; None for any other record."""
    # wandb's stub of this generated module is empty.
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    parsed = Record.FromString(record)
    if parsed.WhichOneof("record_type") != "history":
        return None
    items = {item.key or ".".join(item.nested_key): item for item in parsed.history.item}
    if "step" not in items:
        return None
    return Row(int(json.loads(items["step"].value_json)), "eval/loss" in items)


# The logger


ONLINE_TIMEOUT_S = 30  # then the run continues offline; W&B's default blocks a job for 90 s


def has_credentials() -> bool:
    """Returns whether W&B has a key: in the environment or, for its host, in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb  # 0.5 s, only with logger=wandb

    url = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
    home = Path.home()
    named = os.environ.get("NETRC")
    files = [Path(named)] if named else [home / ".netrc", home / "_netrc"]
    for file in (f for f in files if f.is_file()):
        try:
            entries = netrc.netrc(file)
        except (netrc.NetrcParseError, OSError):
            return False  # W&B cannot read it either
        hosts = [urlsplit(url).netloc, "api.wandb.ai"]
        return any(entries.authenticators(host) for host in hosts)
    return False


def resolve_mode(mode: str) -> str:
    """Resolves `auto`: WANDB_MODE (also "disabled"), else online with a key, else offline."""
    if mode != "auto":
        return mode
    wanted = os.environ.get("WANDB_MODE")
    if wanted == "disabled":
        return wanted
    if wanted in ("offline", "dryrun"):
        return "offline"
    return "online" if has_credentials() else "offline"


def sync_command(folder: Path) -> str:
    """Returns the command that uploads a run, given its newest offline folder."""
    if len(list(folder.parent.glob("offline-run-*"))) < 2:
        return f"wandb sync {shlex.quote(str(folder))}"
    return f"wandb sync {shlex.quote(str(folder.parent))}/offline-run-*"


class WandbLogger:
    """One W&B run; its first error is logged by `say` and disables all further calls."""

    label = "W&B"

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        provenance: Provenance,
        say: Callable[[str], None],
        earlier: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """`earlier`: rows of metrics.jsonl from earlier sessions."""
        self._say = say
        self._last: Row | None = None  # the last row that W&B has
        self.mode, why = resolve_mode(config.logger.mode), ""
        if self.mode == "offline" and config.logger.mode == "auto" and not has_credentials():
            why = ", as no key is at hand (`wandb login` takes one)"
        self._run: Run | None = None
        self.folder: Path | None = None
        self.url: str | None = None
        if self.mode == "online":  # may take a while, and the screen is still empty
            self._say(f"connecting to W&B, for at most {ONLINE_TIMEOUT_S} s")
        if self.mode == "disabled":
            return
        self._guard(lambda: self._open(config, run_dir, provenance))
        if self._run is None and self.mode == "online":
            self.mode, why = "offline", ", as it could not be reached"
            self._guard(_forget)  # W&B still holds the id that it could not open
            self._guard(lambda: self._open(config, run_dir, provenance))
        self._guard(lambda: self._catch_up(earlier))
        if self._run is not None:
            self.folder = Path(self._run.dir).parent
            self.url = None if self.mode == "offline" else self._run.url
        if self.folder is not None and self.mode == "offline":
            self._say(f"W&B is offline{why}; to upload the run later: {sync_command(self.folder)}")

    def log(self, line: Mapping[str, Any]) -> None:
        place, row = Row(line["step"], "eval_loss" in line), figures_of(line)
        run = self._run
        if run is not None and (self._last is None or place > self._last):
            self._last = place
            self._guard(lambda: run.log(row))

    def flush(self) -> None:
        """Does nothing: a resumed run adds the rows that W&B lacks."""

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Attaches the summary, without paths, and closes the run; online, waits for W&B."""
        run, self._run = self._run, None
        if run is None:
            return

        def close() -> None:
            local = ("paths", "wandb", "breakdown", "memory")  # paths, and tables by rank
            run.summary.update({k: v for k, v in summary.items() if k not in local})
            run.finish(exit_code=exit_code)

        self._guard(close)

    def shown(self) -> str:
        """Returns the run's address, or why it has none, for the header."""
        if self.mode == "disabled":
            return "disabled by WANDB_MODE"
        if self._run is None:
            return f"{self.mode}, failed"
        return self.url or f"{self.mode}, project {self._run.project}"

    def place(self) -> dict[str, str | None]:
        folder = str(self.folder) if self.folder else None
        return {"mode": self.mode, "url": self.url, "folder": folder}

    def _open(self, config: Config, run_dir: Path, provenance: Provenance) -> None:
        import wandb

        # Read before this session's own file exists.
        self._last = last_row(run_dir)
        content = dataclasses.asdict(config) | {"code": provenance._asdict()}
        run = wandb.init(
            # None lets W&B's own variables decide.
            project=config.logger.project or os.environ.get("WANDB_PROJECT") or "parallel3d",
            id=run_id(run_dir),
            name=os.environ.get("WANDB_NAME") or run_dir.name,
            entity=config.logger.entity,
            group=config.logger.group,
            job_type=config.logger.job_type,
            notes=config.logger.notes,
            tags=list(config.logger.tags) or None,
            config=content,
            dir=str(run_dir),
            mode="online" if self.mode == "online" else "offline",
            # Offline, each session has its own folder; `wandb sync` joins them by their id.
            resume="allow" if self.mode == "online" else None,
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,  # the config has the commit, without the remote's address
                init_timeout=ONLINE_TIMEOUT_S,
                x_disable_machine_info=not config.logger.system_metrics,  # true disables both
                x_disable_meta=True,
                x_disable_stats=not config.logger.system_metrics,
            ),
        )
        for axis in ("step", "tokens"):
            run.define_metric(axis, hidden=True)
        run.define_metric("*", step_metric="step")
        self._run = run

    def _catch_up(self, earlier: Iterable[Mapping[str, Any]]) -> None:
        """Adds rows of earlier sessions that were logged and lost."""
        run, rows = self._run, iter(earlier)
        if run is None or (first := next(rows, None)) is None:
            return
        if run.resumed and (step := run.summary.get("step")) is not None:
            # Online the server has its last step, not whether the evaluation after it arrived.
            there = Row(int(step), evaluation=True)
            self._last = max(there, self._last or there)
        for line in chain((first,), rows):
            self.log(line)

    def _guard(self, action: Callable[[], None]) -> None:
        """Runs `action`; on an error of W&B, logs it and disables all further calls."""
        try:
            action()
        except Exception as error:
            # Only W&B's own errors, from several of its modules, and those of its background
            # process, which may fail to start or die. Any other is a bug.
            if not isinstance(error, OSError) and not type(error).__module__.startswith("wandb"):
                raise
            self._run = None
            first_line = str(error).splitlines()[0] if str(error) else ""
            self._say(
                f"warning: W&B {self.mode} failed ({type(error).__name__}: {first_line}); "
                "the training goes on and metrics.jsonl has everything"
            )


def _forget() -> None:
    """Stops W&B's background process, which still holds a half-opened run."""
    import wandb

    wandb.teardown()
