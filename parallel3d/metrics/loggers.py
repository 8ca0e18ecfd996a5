"""Logs to TensorBoard and W&B in addition to metrics.jsonl; their errors never stop training."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from parallel3d.checkpoint.identity import decisive
from parallel3d.metrics.jsonl import HOOKS, value
from parallel3d.metrics.wandb_ledger import (
    HEADER_BYTES,
    Beginning,
    Ledger,
    RowPosition,
    begin,
    name_of_id,
    own_ids,
    replaced,
)
from parallel3d.run_config import Config, saved_tree

if TYPE_CHECKING:
    from wandb import Run


# Names of the figures in TensorBoard and W&B, which group them by the part before the slash.
# `step` and `tokens` keep their names: they are the x axes.
NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "skipped": "train/skipped",
    "loss_scale": "train/loss_scale",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "step_time_s": "speed/step_time_s",
    "goodput": "speed/goodput",
    "eval_loss": "eval/loss",
}
# Entries that hold several figures, with the prefix of the figures' names.
_PARTS = {"times": "time/", "memory": "memory/", "eval_losses": "eval/loss of ", HOOKS: ""}


def figures_of(line: Mapping[str, Any], names: Mapping[str, str] = NAMES) -> dict[str, float]:
    """Returns the figures of a line that are not null, by their names in a logger.

    NaN and infinities are restored. Figures that `names` lacks keep their own names.
    """
    found: dict[str, float] = {}
    for key, entry in line.items():
        if key == "nonfinite":
            continue
        if isinstance(entry, Mapping):
            begin = _PARTS.get(key, f"{key}/")
            found |= {begin + name: figure for name, figure in figures_of(entry, {}).items()}
        elif (figure := entry if isinstance(entry, int) else value(line, key)) is not None:
            found[names.get(key, key)] = figure
    return found


FOLDER = "tensorboard"
FLUSH_S = 30  # maximum seconds until TensorBoard can show a line


def show_command(folder: Path) -> str:
    return shlex.join(["tensorboard", "--logdir", str(folder)])


class TensorBoardLogger:
    """Writes the event files of one start; an OSError is passed to `say` and ends the logging.

    All starts of a run make one curve: a start marks its first step (`purge_step`), and TensorBoard
    drops the rows of earlier files from that step on. Rows are flushed before a checkpoint is
    written, so that a resumed run has the rows of all earlier steps. If the folder has no event
    file, a start first writes all earlier lines of metrics.jsonl.
    """

    label = "TensorBoard"

    def __init__(
        self,
        config: Mapping[str, Any],
        run_dir: Path,
        first_step: int,
        say: Callable[[str], None],
        earlier: Iterable[Mapping[str, Any]],
    ) -> None:
        """Opens the event file.

        Args:
            config: the configuration, which TensorBoard shows as text.
            run_dir: the run's folder.
            first_step: the first step of this start.
            say: logs a sentence.
            earlier: rows of metrics.jsonl from earlier sessions.
        """
        # imported here because tensorboard is optional
        from torch.utils.tensorboard import SummaryWriter

        self._say = say
        self._folder = run_dir / FOLDER
        self._writer: SummaryWriter | None = None
        is_new = not any(self._folder.glob("events.out.tfevents.*"))

        def begin() -> None:
            # The first start also repeats an evaluation at step 0.
            purge = first_step if first_step > 1 else 0
            writer = SummaryWriter(str(self._folder), purge_step=purge, flush_secs=FLUSH_S)
            text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
            writer.add_text("config", f"```\n{text}```", purge)
            self._writer = writer

        self._guard(begin)
        for line in earlier if is_new else ():
            self.log(line)

    def log(self, line: Mapping[str, Any]) -> None:
        if (writer := self._writer) is None:
            return
        figures = figures_of(line)
        step = int(figures.pop("step"))
        if "eval_loss" in line:
            del figures["tokens"]  # the step's own line has them

        def add() -> None:
            for name, figure in figures.items():
                writer.add_scalar(name, figure, step)

        self._guard(add)

    def flush(self) -> None:
        if self._writer is not None:
            self._guard(self._writer.flush)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._guard(writer.close)

    def shown(self) -> str:
        return show_command(self._folder)

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self._writer = None
            self._say(
                f"warning: TensorBoard's files in {self._folder} cannot be written "
                f"({error.strerror or error}); training continues, and metrics.jsonl has "
                "everything"
            )


# W&B: all sessions of a run make one W&B run without repeated steps (`wandb_ledger`). A session
# first adds the rows of metrics.jsonl that W&B lacks, and then logs new ones.
#
# W&B's own `resume` and explicit steps cannot replace this, since W&B ignores `resume` offline. The
# rows that a killed session lost would stay lost; and if all rows were logged again, those that
# were not lost would be in the files twice
# (`test_wandbs_own_resume_and_steps_do_not_keep_rows_whole`). W&B's `resume_from` and `fork_from`
# need a server that has all rows.


TRUE = ("true", "1", "yes", "on")
ONLINE_TIMEOUT_S = 30  # after this time W&B goes offline; its own default of 90 s is long


def has_credentials() -> bool:
    """Returns whether W&B finds an API key, in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb  # takes 0.5 s, so only logger=wandb imports it
    from requests.utils import get_netrc_auth  # W&B uses requests, which reads the netrc file

    urls = (os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url, "https://api.wandb.ai")
    return any(get_netrc_auth(url) for url in urls)


def resolve_mode(mode: str) -> str:
    """Returns the mode of W&B ("online", "offline" or "disabled") for a value of `logger.mode`.

    "auto" follows WANDB_MODE if it is "offline", "dryrun" or "disabled"; else it means "online" if
    there is an API key, and "offline" if there is none. WANDB_DISABLED also disables W&B: W&B
    itself no longer reads it, but other programs do.
    """
    if mode != "auto":
        return mode
    wanted = os.environ.get("WANDB_MODE")
    if wanted == "disabled" or os.environ.get("WANDB_DISABLED", "").lower() in TRUE:
        return "disabled"
    if wanted in ("offline", "dryrun"):
        return "offline"
    return "online" if has_credentials() else "offline"


def sync_command(folder: Path) -> str:
    """Returns the command that uploads a run's offline sessions; `folder` is the newest.

    If the run's folder is a copy of another run's, that run's sessions are left out. So are files
    without records, which a session leaves that was soon killed: one of them would make `wandb
    sync` send nothing.
    """
    if len(list(folder.parent.glob("offline-run-*"))) < 2:
        return f"wandb sync {shlex.quote(str(folder))}"
    begin = f"{shlex.quote(str(folder.parent))}/offline-run-*"
    own, is_copy = own_ids(folder.parents[1])
    places = " ".join(f"{begin}-{id}" for id in own) if is_copy else begin
    return f"find {places} -name '*.wandb' -size +{HEADER_BYTES}c -exec wandb sync {{}} +"


class WandbLogger:
    """Logs to one W&B run; an error of W&B is passed to `say` and ends the logging."""

    label = "W&B"

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        first_step: int,
        code: Mapping[str, Any],
        say: Callable[[str], None],
        earlier: Iterable[Mapping[str, Any]],
        changed: bool = False,
    ) -> None:
        """Opens a session of W&B.

        Args:
            config: the run's configuration.
            run_dir: the run's folder.
            first_step: the first step of this start.
            code: versions of the code (`provenance`).
            say: logs a sentence.
            earlier: rows of metrics.jsonl from earlier sessions.
            changed: whether keys that affect steps differ from the checkpoint's.
        """
        self._config = config
        self._run_dir = run_dir
        self._code = code
        self._first_step = first_step
        self._say = say
        self._last: RowPosition | None = None  # the last row that was sent to W&B
        self._ledger: Ledger | None = None  # None without an open session
        self.mode = resolve_mode(config.logger.mode)
        why = ""
        if self.mode == "offline" and config.logger.mode == "auto" and not has_credentials():
            why = ", because there is no API key (`wandb login` stores one)"
        self._run: Run | None = None
        self.folder: Path | None = None
        self.url: str | None = None
        if self.mode == "online":  # this may take a while
            self._say(f"connecting to W&B, for at most {ONLINE_TIMEOUT_S} s")
        if self.mode == "disabled":
            return
        beginning: Beginning | None = None

        def look() -> None:
            nonlocal beginning
            beginning = begin(run_dir, first_step, decisive(config), os.environ, changed)

        self._guard(look)
        if (found := beginning) is None:
            return
        for line in found.lines:
            self._say(line)
        self._guard(lambda: self._open(found))
        if self._run is None and self.mode == "online":
            self.mode = "offline"
            why = ", because it could not be reached"
            self._guard(_forget)  # W&B would otherwise keep the id that it could not open
            self._guard(lambda: self._open(found))
        self._guard(lambda: self._catch_up(earlier))
        if self._run is not None:
            self.folder = Path(self._run.dir).parent
            self.url = None if self.mode == "offline" else self._run.url
        if self.folder is not None and self.mode == "offline":
            self._say(f"W&B is offline{why}; to upload the run later: {sync_command(self.folder)}")

    def log(self, line: Mapping[str, Any]) -> None:
        place, row = RowPosition(line["step"], "eval_loss" in line), figures_of(line)
        run = self._run
        if run is not None and (self._last is None or place > self._last):
            self._last = place
            # Offline, W&B would number the rows of each session from 0, and `wandb sync` sends
            # these numbers; online, the server gives the first. With a step given, W&B would hold
            # the row back until the next one: hence `commit`.
            number = place.number if self.mode == "offline" else None
            self._guard(lambda: run.log(row, step=number, commit=True))

    def flush(self) -> None:
        """Records the last sent row, so that a resumed run knows which rows W&B lacks."""
        if (ledger := self._ledger) is not None and self._run is not None:
            self._guard(lambda: ledger.sent(self._last))

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Sends the summary without local parts, and closes the run; online, it waits for W&B."""
        run, self._run = self._run, None
        if run is None:
            return

        def close() -> None:
            local = ("paths", "wandb", "breakdown", "memory")  # paths, and tables of ranks
            run.summary.update({k: v for k, v in summary.items() if k not in local})
            run.finish(exit_code=exit_code)
            if self._ledger is not None:
                self._ledger.sent(self._last, closed=True)

        self._guard(close)

    def shown(self) -> str:
        """Returns the text for the header: the run's address, or the reason why it has none."""
        if self.mode == "disabled":
            by_mode = os.environ.get("WANDB_MODE") == "disabled"
            return f"disabled by {'WANDB_MODE' if by_mode else 'WANDB_DISABLED'}"
        if self._run is None:
            return f"{self.mode}, failed"
        return self.url or f"{self.mode}, project {self._run.project}"

    def place(self) -> dict[str, str | None]:
        folder = str(self.folder) if self.folder else None
        return {"mode": self.mode, "url": self.url, "folder": folder}

    def _open(self, beginning: Beginning) -> None:
        """Opens a session; uses a new id if the server has rows that contradict this start.

        The server reports its last row only after a session was opened.
        """
        run = self._init(beginning.id)
        self._last = beginning.last
        if run.resumed and (step := run.summary.get("step")) is not None:
            # The server reports its last step, but not whether that step's evaluation arrived.
            there = RowPosition(int(step), evaluation=True)
            if beginning.changed and there.step >= self._first_step:
                run.finish()
                again = replaced(self._run_dir, beginning.id, self._first_step, there.step)
                for line in again.lines:
                    self._say(line)
                self._open(again)
                return
            self._last = max(there, self._last or there)
        self._ledger = Ledger(self._run_dir)
        folder = Path(run.dir).parent.name
        self._ledger.begin(beginning.id, folder, self._first_step, decisive(self._config))
        self._run = run

    def _init(self, id: str) -> Run:
        import wandb

        config, run_dir = self._config, self._run_dir
        content = saved_tree(config) | {"code": self._code}
        name = name_of_id(run_dir, id)
        run = wandb.init(
            # None lets W&B's own variables decide.
            project=config.logger.project or os.environ.get("WANDB_PROJECT") or "parallel3d",
            id=id,
            name=os.environ.get("WANDB_NAME") or name,
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
                disable_git=True,  # the config has the commit; W&B would add the remote
                init_timeout=ONLINE_TIMEOUT_S,
                # True would also disable the next two
                x_disable_machine_info=not config.logger.system_metrics,
                x_disable_meta=True,
                x_disable_stats=not config.logger.system_metrics,
            ),
        )
        for axis in ("step", "tokens"):
            run.define_metric(axis, hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def _catch_up(self, earlier: Iterable[Mapping[str, Any]]) -> None:
        """Logs the rows of earlier sessions that W&B lacks."""
        for line in earlier if self._run is not None else ():
            self.log(line)

    def _guard(self, action: Callable[[], None]) -> None:
        """Runs `action`; on an error of W&B, logs it and disables all further calls."""
        try:
            action()
        except Exception as error:
            # Three kinds of errors are caught: those of W&B's modules, those of its background
            # process, which may die or fail to start, and pydantic's about WANDB_… variables. Any
            # other error is a bug.
            package = type(error).__module__.partition(".")[0]
            if not isinstance(error, OSError) and package not in ("wandb", "pydantic_core"):
                raise
            self._run = None
            # pydantic names the variable in the second line, and the allowed values in the third.
            lines = str(error).splitlines()[: 3 if package == "pydantic_core" else 1]
            said = " ".join(map(str.strip, lines))
            self._say(
                f"warning: W&B {self.mode} failed ({type(error).__name__}: {said}); "
                "training continues, and metrics.jsonl has everything"
            )


def _forget() -> None:
    """Stops W&B's background process, which still holds a run that could not be opened."""
    import wandb

    wandb.teardown()
