"""Records a run in metrics.jsonl, on the screen, in the loggers and in summary.json."""

from __future__ import annotations

import datetime
import math
import statistics
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.parameters import parameter_count
from parallel3d.config.length import Length
from parallel3d.errors import UserError, first_line
from parallel3d.metrics import recovery_log, screen
from parallel3d.metrics.jsonl import (
    COUNTS,
    EVAL_TERMS,
    HOOKS,
    LOST_TO,
    METRICS,
    STEP,
    TERMS,
    MetricsFile,
    append_line,
    finite,
    is_whole,
    rows_of,
    throughput,
    value,
    write_json,
)
from parallel3d.metrics.loggers import FOLDER as TENSORBOARD
from parallel3d.metrics.loggers import TensorBoardLogger, WandbLogger
from parallel3d.metrics.peak import Peak
from parallel3d.metrics.provenance import provenance
from parallel3d.metrics.starts import STARTS, Account, starts_of
from parallel3d.metrics.units import Units, units_of
from parallel3d.models.flops import FLOPS_FORMULA, LESS_FROZEN, MFU_FORMULA
from parallel3d.resolve import layout_of
from parallel3d.run_config import Config, saved_tree

if TYPE_CHECKING:
    from parallel3d.trainer import Score
from parallel3d.text import count


def evaluation_row(
    step: int,
    eval_loss: float | None,
    of_parts: Mapping[str, float | None],
    of_sets: Mapping[str, Score],
    terms: Mapping[str, float] = {},
) -> dict[str, Any]:
    """Returns an evaluation's line of metrics.jsonl, without the entry `tokens`."""
    row: dict[str, Any] = {"step": step, "eval_loss": eval_loss}
    if of_parts:
        row["eval_losses"] = finite(of_parts)
    if terms:
        row[EVAL_TERMS] = finite(terms)
    if of_sets:
        row["valid"] = {name: finite(_score_row(score)) for name, score in of_sets.items()}
    return row


def _score_row(score: Score) -> dict[str, Any]:
    row = score.row()
    return row | ({TERMS: finite(row[TERMS])} if TERMS in row else {})


def layout_row(layout: Layout) -> dict[str, int]:
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp}
    sizes |= {"ep": layout.ep} if layout.ep else {}
    return sizes | {"world_size": layout.world_size}


@dataclass
class Recorder:
    """Records one run. Only rank 0 creates a recorder, which does not communicate with others.

        with Recorder(config, run_dir, flops_per_token, peak) as recorder:
            recorder.start({"data": "…", "device": "…"})
            recorder.step(...)            # every optimizer step
            recorder.evaluation(...)      # after some of them
            recorder.finish()             # if omitted, the end of the block calls it

    An exception closes every file and logger with the status "failed" ("interrupted" for Ctrl-C),
    and propagates.

    Attributes:
        run_dir: the run's folder, which must exist.
        flops_per_token: FLOPs of the model per trained token.
        flops_formula: the formula that gives them.
        peak: peak FLOP/s of one device (`peak.device_peak_flops`).
        first_step: first step of this start; the lines of earlier steps in metrics.jsonl stay and
            count in the summary.
        length: length of a resumed run; None stands for the configuration's.
        changed: whether keys that affect steps differ from the checkpoint's.
        config_file: name of this start's configuration in `run_dir`; None without one.
        begun: Unix time at which this process began; None stands for the time of `start`.
        loaded: Unix time at which the checkpoint was loaded; None if that is unknown.
        clock: function that returns the current Unix time.
    """

    config: Config
    run_dir: Path
    flops_per_token: float
    peak: Peak
    first_step: int = 1
    length: Length | None = None
    changed: bool = False
    config_file: str | None = None
    begun: float | None = None
    loaded: float | None = None
    clock: Callable[[], float] = time.time
    flops_formula: str = FLOPS_FORMULA
    console: Console = field(default_factory=screen.make_console)
    _resources: ExitStack = field(default_factory=ExitStack)
    _loggers: list[TensorBoardLogger | WandbLogger] = field(default_factory=list)
    _last: Mapping[str, Any] = field(default_factory=dict)  # the last step's line
    _evaluations: list[tuple[int, float | None]] = field(default_factory=list)  # (step, loss)
    _valid: dict[str, dict[str, Any]] = field(default_factory=dict)  # last scores by set
    _hooks: dict[str, float | None] = field(default_factory=dict)  # the last figures by name
    _terms: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # `TERMS`, `EVAL_TERMS`
    _skipped: int = 0
    _unlearned: int = 0
    _said_unlearned: bool = False
    # The tokens and seconds of this start's steps that were not profiled.
    _step_tokens: array[float] = field(default_factory=lambda: array("d"))
    _step_seconds: array[float] = field(default_factory=lambda: array("d"))
    _imbalances: array[float] = field(default_factory=lambda: array("d"))
    _ranks: Sequence[dict[str, Any]] = ()
    _memory: Sequence[dict[str, int]] = ()
    _started_at: str | None = None
    _error: str | None = None
    _summary: dict[str, Any] | None = None

    def start(self, facts: Mapping[str, str], waited: Sequence[str] = ()) -> None:
        """Opens the files and loggers, and prints the header.

        Args:
            facts: lines of the header, text by label. They replace the configuration's lines with
                the same label (`screen.header_facts`), or follow them.
            waited: lines that still waited to be written at the checkpoint (`waiting`).
        """
        config, run_dir = self.config, self.run_dir
        self._code = provenance()
        self._length = self.length or config.planned_length.after()
        begun = self.clock() if self.begun is None else self.begun
        decisions = recovery_log.read(run_dir)
        self._account = Account(starts_of(run_dir / STARTS), begun, self.loaded, decisions)
        path = run_dir / METRICS
        samples = self._length.sizes.samples(self.first_step - 1)
        self._tokens = samples * config.model.seq_length
        try:
            file = MetricsFile(
                path,
                self.first_step,
                seen=self._recall,
                say=self._say,
                waited=waited,
                dropped=self._account.dropped,
            )
        except OSError as error:
            raise UserError(
                f"run={config.run}: {path} cannot be written ({error.strerror}): free "
                "space there, or give another runs_dir="
            ) from None
        self._metrics = self._resources.enter_context(file)
        first = self.first_step
        for name in config.logger.names:
            earlier = filter(is_whole, rows_of(path))
            if name == "wandb":
                self._loggers.append(
                    WandbLogger(
                        config,
                        run_dir,
                        first,
                        code=self._code,
                        say=self._say,
                        earlier=earlier,
                        changed=self.changed,
                    )
                )
            if name == "tensorboard":
                values = saved_tree(config)
                self._loggers.append(TensorBoardLogger(values, run_dir, first, self._say, earlier))
        rows = screen.header_facts(config, self._length, self.peak) | dict(facts)
        rows |= {logger.label: logger.shown() for logger in self._loggers}
        rows["run directory"] = f"{run_dir}/"
        title = f"parallel3d {self._code['parallel3d'] or ''}".strip()
        screen.print_header(self.console, title, rows)
        self._progress = screen.Progress(
            self.console, config.train, self.first_step, self._length.last_step, self.units
        )
        self._resources.enter_context(self._progress)
        # This comes last: after a failure above there is nothing to summarize, and connecting to
        # W&B does not count as training.
        self._started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._start_time = time.perf_counter()
        self._write(STARTS, self._add_start)

    def step(
        self,
        step: int,
        loss: float | None,
        grad_norm: float,
        lr: float,
        tokens: int,
        step_time_s: float,
        *,
        times: Mapping[str, float] | None = None,
        imbalance: float | None = None,
        terms: Mapping[str, float] = {},
        **more: object,
    ) -> None:
        """Records optimizer step `step`, counted from 1.

        Args:
            step: number of the step.
            loss: loss in nats per token, or that of a user's own loss; None if there was nothing
                to learn.
            grad_norm: norm of the gradients before clipping.
            lr: learning rate of the step.
            tokens: number of tokens that the step computed (global batch × sequence length). It
                includes masked ones, as throughput and MFU measure work. metrics.jsonl has the
                sum over all steps so far.
            step_time_s: seconds that the step took.
            times: seconds by kind (`comm.step_timer`); None if they were not measured.
            imbalance: imbalance of attention over the context-parallel ranks; None without cp.
            terms: the means of an own loss's terms, by name.
            more: other entries of the line; those that are None or False are left out.
        """
        self._tokens += tokens
        rate = tokens / step_time_s
        figures = (step, loss, grad_norm, lr, self._tokens, rate, self._mfu(rate), step_time_s)
        row: dict[str, Any] = dict(zip(STEP, figures, strict=True))
        row |= {
            key: entry for key, entry in more.items() if entry is not None and entry is not False
        }
        if terms:
            row[TERMS] = finite(terms)
        if times is not None:
            row["times"] = {kind: round(seconds, 6) for kind, seconds in times.items()}
        if imbalance is not None:
            row["imbalance"] = round(imbalance, 4)
            self._imbalances.append(imbalance)
        if "profiled" not in row:  # a profiled step is slower
            self._step_tokens.append(tokens)
            self._step_seconds.append(step_time_s)
        self._count(row)
        self._account.step(row)
        if (found := self._account.goodput(self.clock())) is not None and found.value is not None:
            row["goodput"] = round(found.value, 4)
            if shares := found.shares:
                row[LOST_TO] = {cause: round(share, 4) for cause, share in shares.items()}
        self._log(row)
        self._progress.update(row)
        if loss is None and not self._said_unlearned:
            self._said_unlearned = True
            self._say(
                f"step {step} changes nothing, because its samples have {self._nothing} to learn "
                f"({count(self._unlearned, 'such step')} so far; later ones will be counted but "
                "not reported)"
            )

    def evaluation(
        self,
        step: int,
        eval_loss: float | None,
        of_parts: Mapping[str, float | None] = {},
        of_sets: Mapping[str, Score] = {},
        terms: Mapping[str, float] = {},
        hooks: Mapping[str, Any] = {},
    ) -> None:
        """Records an evaluation after `step` steps.

        Args:
            step: number of steps done.
            eval_loss: held-out loss in nats per token; None without a token to predict.
            of_parts: held-out losses by part of a blend.
            of_sets: scores by validation set.
            terms: the means of an own loss's terms on the held-out samples, by name.
            hooks: figures of a user's hooks, by name.
        """
        row = evaluation_row(step, eval_loss, of_parts, of_sets, terms) | {"tokens": self._tokens}
        row |= {HOOKS: hooks} if hooks else {}
        self._count(row)
        self._log(row)
        for line in screen.evaluation_lines(self._in_bytes, self._length.last_step, row):
            screen.print_styled(self.console, line, style="bold cyan")

    def blend(self, step: int, parts: Mapping[str, Mapping[str, float]]) -> None:
        self._metrics.write({"step": step, "tokens": self._tokens, "parts": parts})

    def expert_counts(self, step: int, counts: Mapping[int, Sequence[int]]) -> None:
        """Records how many tokens each expert got in a step, by layer."""
        by_layer = {str(layer): list(each) for layer, each in counts.items()}
        self._metrics.write({"step": step, "tokens": self._tokens, COUNTS: by_layer})

    def spent(self, part: str, seconds: float) -> None:
        """Records seconds that were spent between steps on "evaluation" or "checkpoint"."""
        self._account.spent(part, seconds)

    def rolled_back(self, step: int) -> None:
        """Records that the parameters were restored to their state after `step`."""
        self._account.rolled_back(step)

    def waiting(self) -> tuple[str, ...]:
        """Forces metrics.jsonl to disk, and returns the lines that a checkpoint must contain."""
        self._metrics.flush()
        self._account.saves()
        self._write(STARTS, self._add_account)
        for logger in self._loggers:
            logger.flush()
        return tuple(self._metrics.waiting)

    def breakdown(
        self, ranks: Sequence[dict[str, Any]], memory: Sequence[dict[str, int]] = ()
    ) -> None:
        """Keeps all ranks' `Trainer.step_times` and peak memory for the summary and the panel."""
        self._ranks = ranks
        self._memory = memory

    def finish(self, status: str = "finished") -> dict[str, Any]:
        """Closes everything, writes summary.json, prints the closing panel; returns the summary.

        `status` is "finished", or the reason for an early end: "failed", "interrupted" or
        "stopped". A second call returns the same summary. Raises RuntimeError before `start`.
        """
        if self._started_at is None:
            raise RuntimeError("finish() before start()")
        if self._summary is not None:
            return self._summary
        self._summary = summary = self._summarise(status)
        self._write(STARTS, lambda path: self._add_account(path, status))
        with ExitStack() as closing:  # runs in reverse order; an error does not stop the rest
            exit_code = 0 if status in ("finished", "stopped") else 1
            for logger in reversed(self._loggers):
                closing.callback(logger.finish, summary, exit_code)
            closing.callback(self._write, "summary.json", lambda path: write_json(path, summary))
            closing.push(self._resources.pop_all())
        screen.print_summary(self.console, summary)
        return summary

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._started_at is None:
            self._resources.close()
        elif error is None:
            self.finish()
        elif self._summary is None:
            name = type(error).__name__
            self._error = f"{name}: {first_line(error)}" if str(error).strip() else name
            self.finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    @property
    def units(self) -> Units:
        """Returns the words for what the run counts."""
        return units_of(self.config.model)

    @property
    def _nothing(self) -> str:
        return "no token" if self.units.in_nats else "nothing"

    @property
    def _in_bytes(self) -> bool:
        """Whether the loss is that of a text whose tokens are bytes."""
        return self.config.data.reads_bytes and self.units.in_nats

    def _mfu(self, tokens_per_s: float) -> float:
        return tokens_per_s * self.flops_per_token / (self.config.world_size * self.peak.flops)

    def _log(self, line: Mapping[str, Any]) -> None:
        self._metrics.write(line)
        for logger in self._loggers:
            logger.log(line)

    def _recall(self, row: dict[str, Any]) -> None:
        """Counts a line of an earlier start, so that the summary covers the whole run."""
        if is_whole(row):
            self._count(row)
            self._account.kept(row)

    def _count(self, row: Mapping[str, Any]) -> None:
        """Adds the line of a step or an evaluation to the summary."""
        figures = row.get(HOOKS, {})
        self._hooks |= {name: value(figures, name) for name in figures if name != "nonfinite"}
        self._terms |= {key: row[key] for key in (TERMS, EVAL_TERMS) if key in row}
        if "eval_loss" in row:
            self._evaluations.append((row["step"], value(row, "eval_loss")))
            self._valid = row.get("valid", {})
        else:
            if row.get("skipped"):
                self._skipped += 1
            if value(row, "loss") is None:
                self._unlearned += 1
            self._last = row

    def _add_start(self, path: Path) -> None:
        start = {
            "first_step": self.first_step,
            "last_step": self._length.last_step,
            "started": self._started_at,
            "host": self._code["hostname"],
            "layout": layout_row(layout_of(self.config)),
            "config": self.config_file,
        }
        append_line(path, self._account.begin(self.clock(), start))

    def _add_account(self, path: Path, status: str | None = None) -> None:
        append_line(path, self._account.line(self.clock(), status))

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        try:
            write(self.run_dir / name)
        except OSError as error:
            self._say(f"{self.run_dir / name} cannot be written ({error.strerror})")

    def _say(self, text: str) -> None:
        screen.print_styled(self.console, text, style="yellow")

    def _summarise(self, status: str) -> dict[str, Any]:
        """Returns the content of summary.json: losses in nats per token, times in seconds.

        A number that is not finite is null and listed under `nonfinite`, as in metrics.jsonl.
        """
        config, last = self.config, self._last
        goodput = self._account.goodput(self.clock())
        rates = throughput(self._step_tokens, self._step_seconds)
        wandb = next((one for one in self._loggers if isinstance(one, WandbLogger)), None)
        content: dict[str, Any] = {
            "run": self.run_dir.name,
            "status": status,
            "steps": last.get("step", self.first_step - 1),
            "first_step": self.first_step,
            "tokens": self._tokens,
            "loss": value(last, "loss") if last else None,
            "grad_norm": value(last, "grad_norm") if last else None,
            "skipped_steps": self._skipped,
            "unlearned_steps": self._unlearned,
            **self._held_out(),
            "valid": self._valid or None,
            **self._terms,
            **({} if self.units.in_nats else {"units": self.units._asdict()}),
            **({HOOKS: finite(self._hooks)} if self._hooks else {}),
            "tokens_per_s": rates,
            "mfu": {
                "value": None if rates["mean"] is None else self._mfu(rates["mean"]),
                "formula": MFU_FORMULA,
                "flops_per_token": self.flops_per_token,
                "flops_per_token_formula": self.flops_formula
                + LESS_FROZEN * bool(config.optim.freeze),
                "peak_flops_per_device": self.peak.flops,
                "peak_source": self.peak.source,
                "world_size": config.world_size,
            },
            "breakdown": self._by_rank("seconds a step, mean", list(self._ranks)),
            "memory": self._by_rank(
                "bytes, the most at one time",
                [{"rank": rank} | memory for rank, memory in enumerate(self._memory)],
            ),
            "wall_time_s": time.perf_counter() - self._start_time,
            "goodput": goodput.row() if goodput else None,
            "started": self._started_at,
            "layout": layout_row(layout_of(config)),
            "model": config.model.name,
            "parameters": parameter_count(config.model),
            "precision": config.precision.name,
            "seed": config.seed,
            "paths": self._paths(),
            "code": self._code,
            "wandb": wandb.place() if wandb else None,
        }
        if content["breakdown"] and self._imbalances:
            content["breakdown"]["imbalance"] = statistics.fmean(self._imbalances)
        if self._error is not None:
            content["error"] = self._error
        return finite(content)

    @staticmethod
    def _by_rank(unit: str, ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"unit": unit, "ranks": ranks} if ranks else None

    def _held_out(self) -> dict[str, float | None]:
        """Returns the last and the best held-out loss in nats per token, with their steps."""
        step, loss = self._evaluations[-1] if self._evaluations else (None, None)
        usable = [(n, at) for at, n in self._evaluations if n is not None and math.isfinite(n)]
        best, best_step = min(usable, default=(None, None))
        return {
            "eval_loss": loss,
            "eval_step": step,
            "best_eval_loss": best,
            "best_eval_step": best_step,
            "bits_per_byte": screen.bits_per_byte(loss, self._in_bytes),
        }

    def _paths(self) -> dict[str, str]:
        files = [METRICS, "config.yaml", "summary.json"]
        # schedule.timeline, profile.steps and logger=tensorboard create these.
        others = ("timeline.svg", "profile", TENSORBOARD)
        files += [name for name in others if (self.run_dir / name).exists()]
        paths = {name.split(".")[0]: str(self.run_dir / name) for name in files}
        return {"run_dir": str(self.run_dir)} | paths
