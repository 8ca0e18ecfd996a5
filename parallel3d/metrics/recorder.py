"""Recorder: the trainer's only output, to metrics.jsonl, the screen, loggers and summary.json."""

from __future__ import annotations

import datetime
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from parallel3d.config.schema import Config
from parallel3d.errors import UserError, print_line
from parallel3d.estimate.ops import FLOPS_FORMULA, MFU_FORMULA, parameter_count
from parallel3d.files import no_link, replace_durably
from parallel3d.host.processes import lost_output
from parallel3d.metrics import report
from parallel3d.metrics.breakdown import RankTimes, breakdown_svg, summary_of
from parallel3d.metrics.jsonl import (
    Evaluation,
    MetricsFile,
    Score,
    StepRecord,
    Throughput,
    best_evaluation,
    finite,
    is_whole,
    rows_of,
    value,
    write_json,
)
from parallel3d.metrics.loggers import FOLDER as TENSORBOARD
from parallel3d.metrics.loggers import Logger, TensorBoardLogger
from parallel3d.metrics.peak import Peak, PeakMemory
from parallel3d.metrics.peak import summary_of as memory_summary_of
from parallel3d.metrics.progress import make_console, make_progress, print_styled
from parallel3d.metrics.provenance import Provenance
from parallel3d.metrics.report import bits_per_byte
from parallel3d.metrics.text import Curve
from parallel3d.metrics.wandb_logger import WandbLogger

STARTS = "starts.jsonl"  # a line for each start of the run that came to its first step


def mfu(tokens_per_s: float, flops_per_token: float, peak: Peak, world_size: int) -> float:
    return tokens_per_s * flops_per_token / (world_size * peak.flops)


def mfu_with_terms(
    tokens_per_s: float, flops_per_token: float, peak: Peak, world_size: int
) -> dict[str, Any]:
    """Returns the MFU and all its terms, for summary.json."""
    share = mfu(tokens_per_s, flops_per_token, peak, world_size)
    return {
        "value": share if math.isfinite(share) else None,
        "formula": MFU_FORMULA,
        "flops_per_token": flops_per_token,
        "flops_per_token_formula": FLOPS_FORMULA,
        "peak_flops_per_device": peak.flops,
        "peak_source": peak.source,
        "world_size": world_size,
    }


def evaluation_row(
    step: int,
    eval_loss: float | None,
    of_parts: Mapping[str, float | None],
    of_sets: Mapping[str, Score],
) -> dict[str, Any]:
    """Returns an evaluation's line but for `tokens`."""
    row: dict[str, Any] = {"step": step, "eval_loss": eval_loss}
    if of_parts:
        row["eval_losses"] = finite(of_parts)
    if of_sets:
        row["valid"] = {name: finite(score.row()) for name, score in of_sets.items()}
    return row


def held_out(evaluations: Sequence[Evaluation], reads_bytes: bool) -> dict[str, float | None]:
    """Returns the last held-out loss and the best one, in nats per token, and their steps."""
    last = evaluations[-1] if evaluations else None
    best, loss = best_evaluation(evaluations), last.loss if last else None
    return {
        "eval_loss": loss,
        "eval_step": last.step if last else None,
        "best_eval_loss": best.loss if best else None,
        "best_eval_step": best.step if best else None,
        "bits_per_byte": bits_per_byte(loss, reads_bytes),
    }


def layout_of(config: Config, world_size: int) -> dict[str, int]:
    dp = world_size // config.replica_size
    sizes = {"tp": config.tp, "pp": config.pp, "dp": dp, "cp": config.cp}
    return sizes | {"world_size": world_size}


def paths_of(run_dir: Path, is_drawn: bool) -> dict[str, str]:
    files = ["metrics.jsonl", "config.yaml", "summary.json"]
    if is_drawn:
        files.append("breakdown.svg")
    if (run_dir / "timeline.svg").exists():  # schedule.timeline=true
        files.append("timeline.svg")
    for folder in ("profile", TENSORBOARD):  # profile.steps, logger=tensorboard
        if (run_dir / folder).exists():
            files.append(folder)
    paths = {name.split(".")[0]: str(run_dir / name) for name in files}
    return {"run_dir": str(run_dir)} | paths


class Recorder:
    """Records one run. Only world rank 0 creates one; nothing in it communicates.

        with Recorder(config, run_dir, world_size, flops_per_token, peak) as recorder:
            recorder.start({"data": "…", "device": "…"})
            recorder.step(...)            # every optimizer step
            recorder.evaluation(...)      # now and then
            recorder.finish()             # or at the end of the block

    An exception closes every file and logger, with status "failed" ("interrupted" for
    Ctrl-C), and propagates.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        world_size: int,
        flops_per_token: float,
        peak: Peak,
        first_step: int = 1,
        console: Console | None = None,
    ) -> None:
        """Keeps the arguments; `start` opens everything.

        `peak` is one device's (`peak.device_peak_flops`). `first_step` > 1 resumes: earlier lines
        of `run_dir`/metrics.jsonl stay and count in the summary. `run_dir` must exist.
        """
        self._config = config
        self._run_dir = run_dir
        self._world_size = world_size
        self._flops_per_token = flops_per_token
        self._peak = peak
        self._first_step = first_step
        self._console = console or make_console()
        self._resources = ExitStack()
        self._wandb: WandbLogger | None = None
        self._loggers: list[Logger] = []
        self._curve = Curve()
        self._throughput = Throughput()
        self._evaluations: list[Evaluation] = []
        self._valid: dict[str, dict[str, Any]] = {}  # the last figures of each validation set
        self._last: StepRecord | None = None
        self._skipped = self._unlearned = 0
        self._said_unlearned = False
        self._ranks: Sequence[RankTimes] = ()
        self._imbalances = [0.0, 0.0]  # sum and number
        self._memory: Sequence[PeakMemory] = ()
        self._started_at: str | None = None
        self._error: str | None = None
        self._summary: dict[str, Any] | None = None

    def start(self, facts: Mapping[str, str], waited: Sequence[str] = ()) -> None:
        """Opens everything and prints the header.

        `facts` are lines of the header, label to text, which replace or follow those of the
        configuration ("model", "layout", "batch", "data", "precision", "device", "peak per rank").
        `waited`: the `waiting` lines of the start before, from its checkpoint.
        """
        self._provenance = Provenance.collect()
        path = self._run_dir / "metrics.jsonl"
        self._tokens = self._tokens_of(self._first_step - 1)
        try:
            file = MetricsFile(path, self._first_step, self._recall, self._say, waited)
        except OSError as error:
            raise UserError(
                f"run={self._config.run}: {path} cannot be written ({error.strerror}): free "
                "space there, or give another runs_dir="
            ) from None
        self._metrics = self._resources.enter_context(file)
        config, run_dir, asked = self._config, self._run_dir, self._config.logger.names
        if "wandb" in asked:
            earlier = filter(is_whole, rows_of(path))
            self._wandb = WandbLogger(config, run_dir, self._provenance, self._say, earlier)
            self._loggers.append(self._wandb)
        if "tensorboard" in asked:
            earlier = filter(is_whole, rows_of(path))
            board = TensorBoardLogger(config, run_dir, self._first_step, self._say, earlier)
            self._loggers.append(board)
        rows = report.header_facts(self._config, self._world_size, self._peak) | dict(facts)
        rows |= {logger.label: logger.shown() for logger in self._loggers}
        rows["run directory"] = f"{self._run_dir}/"
        version = self._provenance.parallel3d
        title = f"parallel3d {version}" if version else "parallel3d"
        report.print_header(self._console, title, rows)
        self._progress = make_progress(
            self._console,
            bar=self._config.train.progress,
            first_step=self._first_step,
            last_step=self._config.train_steps,
            log_every=self._config.train.log_every,
            curve=self._curve,
        )
        self._resources.enter_context(self._progress)
        # Last: a failure above leaves nothing to summarise, and connecting to W&B is no training.
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
        skipped: bool = False,
        loss_scale: float | None = None,
        times: Mapping[str, float] | None = None,
        memory: PeakMemory | None = None,
        noise: Mapping[str, float | None] | None = None,
        imbalance: float | None = None,
        profiled: bool = False,
    ) -> None:
        """Records optimizer step `step` (counts from 1).

        `loss` is in nats per token, None where none was to be learned; `grad_norm` is that before
        clipping. `tokens` are all tokens that the step computed (global batch × sequence length),
        masked ones too: throughput and MFU measure work. metrics.jsonl's `tokens` is their sum
        over the run. Others: see `StepRecord`.
        """
        self._tokens += tokens
        rate = tokens / step_time_s
        share = mfu(rate, self._flops_per_token, self._peak, self._world_size)
        record = StepRecord(step, loss, grad_norm, lr, self._tokens, rate, share, step_time_s)
        record = record._replace(skipped=skipped, loss_scale=loss_scale, profiled=profiled)
        record = record._replace(times=times, memory=memory, noise=noise, imbalance=imbalance)
        self._count(record)
        if imbalance is not None:
            self._imbalances = [self._imbalances[0] + imbalance, self._imbalances[1] + 1]
        if not profiled:
            self._throughput.add(tokens, step_time_s)
        self._curve.add(loss)
        self._log(record.row())
        self._progress.update(record)
        if loss is None and not self._said_unlearned:
            self._said_unlearned = True
            self._say(
                f"step {step}: no token of its samples is to be learned, so it changes nothing: "
                f"{self._unlearned:,} such step{'s' * (self._unlearned > 1)} so far, further ones "
                "are only counted"
            )

    def _log(self, line: Mapping[str, Any]) -> None:
        self._metrics.write(line)
        for logger in self._loggers:
            logger.log(line)

    def _count(self, record: StepRecord) -> None:
        self._skipped += record.skipped
        self._unlearned += record.loss is None
        self._last = record

    def evaluation(
        self,
        step: int,
        eval_loss: float | None,
        of_parts: Mapping[str, float | None] = {},
        of_sets: Mapping[str, Score] = {},
    ) -> None:
        """Records held-out losses (nats per token, None without tokens) after `step` steps, and the
        validation sets'."""
        self._evaluations.append(Evaluation(step, eval_loss))
        row = evaluation_row(step, eval_loss, of_parts, of_sets) | {"tokens": self._tokens}
        self._valid = row.get("valid", {})
        self._log(row)
        for line in report.evaluation_lines(self._config, step, eval_loss, of_parts, of_sets):
            self._progress.note(line, style="bold cyan")

    def blend(self, step: int, parts: Mapping[str, Mapping[str, float]]) -> None:
        self._metrics.write({"step": step, "tokens": self._tokens, "parts": parts})

    def waiting(self) -> tuple[str, ...]:
        """Flushes metrics.jsonl to the disk; returns the lines that a checkpoint must carry."""
        self._metrics.flush()
        for logger in self._loggers:
            logger.flush()
        return self._metrics.waiting()

    def breakdown(self, ranks: Sequence[RankTimes], memory: Sequence[PeakMemory] = ()) -> None:
        """Sets times and peak memory of all ranks, for summary, panel and breakdown.svg."""
        self._ranks, self._memory = ranks, memory

    def finish(self, status: str = "finished") -> dict[str, Any]:
        """Closes everything, writes summary.json, prints the closing panel; returns the summary.

        `status` is "finished", or why the run ended: "failed", "interrupted", "stopped". A second
        call returns the first one's summary. Raises RuntimeError before `start`.
        """
        if self._started_at is None:
            raise RuntimeError("finish() before start()")
        if self._summary is not None:
            return self._summary
        self._summary = summary = self._summarise(status)
        with ExitStack() as closing:  # in reverse order; a failure does not stop the rest
            exit_code = 0 if status in ("finished", "stopped") else 1
            for logger in reversed(self._loggers):
                closing.callback(logger.finish, summary, exit_code)
            closing.callback(self._write, "summary.json", lambda path: write_json(path, summary))
            if self._ranks:
                closing.callback(self._write, "breakdown.svg", self._draw)
            closing.push(self._resources.pop_all())
        report.print_summary(self._console, summary, self._curve.values())
        if (lost := lost_output()) is not None:
            what = f"{lost['bytes']:,} bytes of output were lost ({lost['reason']})"
            print_line(f"{what}; the run's figures are in {self._run_dir}/")
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
            return
        if error is None:
            self.finish()
            return
        if self._summary is None:
            lines = str(error).splitlines()
            self._error = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
            self.finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    def _tokens_of(self, steps: int) -> int:
        return self._config.batch_sizes.samples(steps) * self._config.model.seq_length

    def _recall(self, row: dict[str, Any]) -> None:
        """Restores the curve, evaluations and token count of earlier sessions."""
        if not is_whole(row):
            return
        behind = self._tokens_of(self._first_step - 1) - self._tokens_of(row["step"])
        self._tokens = row["tokens"] + behind
        if "eval_loss" in row:
            self._evaluations.append(Evaluation(row["step"], value(row, "eval_loss")))
            self._valid = row.get("valid", {})
            return
        self._curve.add(value(row, "loss"))
        loss, *others = (value(row, key) for key in StepRecord._fields[1:8])
        # All but the loss are there, says `is_whole`; the summary needs no other entry.
        grad_norm, lr, _, rate, share, seconds = (n for n in others if n is not None)
        skipped = row.get("skipped", False)
        self._count(
            StepRecord(
                row["step"], loss, grad_norm, lr, row["tokens"], rate, share, seconds, skipped
            )
        )

    def _add_start(self, path: Path) -> None:
        start = {
            "first_step": self._first_step,
            "last_step": self._config.train_steps,
            "started": self._started_at,
            "host": self._provenance.hostname,
            "layout": layout_of(self._config, self._world_size),
        }
        with os.fdopen(no_link(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write(f"{json.dumps(start)}\n".encode())

    def _draw(self, path: Path) -> None:
        picture = breakdown_svg(self._ranks, f"{self._run_dir.name}: where a step's time goes")
        replace_durably(path, picture.encode())

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        try:
            write(self._run_dir / name)
        except OSError as error:
            self._say(f"{self._run_dir / name} cannot be written ({error.strerror})")

    def _say(self, text: str) -> None:
        print_styled(self._console, text, style="yellow")

    def _summarise(self, status: str) -> dict[str, Any]:
        """Returns the content of summary.json: losses in nats per token, seconds, fractions.

        A number that is not finite is null, and named under `nonfinite` as in metrics.jsonl.
        """
        config, last = self._config, self._last
        content: dict[str, Any] = {
            "run": self._run_dir.name,
            "status": status,
            "steps": last.step if last else self._first_step - 1,
            "first_step": self._first_step,
            "tokens": self._tokens,
            "loss": last.loss if last else None,
            "grad_norm": last.grad_norm if last else None,
            "skipped_steps": self._skipped,
            "unlearned_steps": self._unlearned,
            **held_out(self._evaluations, config.data.reads_bytes),
            "valid": self._valid or None,
            "tokens_per_s": self._throughput.summary(),
            "mfu": mfu_with_terms(
                self._throughput.mean, self._flops_per_token, self._peak, self._world_size
            ),
            "breakdown": summary_of(self._ranks, *self._imbalances) if self._ranks else None,
            "memory": memory_summary_of(self._memory) if self._memory else None,
            "wall_time_s": time.perf_counter() - self._start_time,
            "started": self._started_at,
            "layout": layout_of(config, self._world_size),
            "model": config.model.name,
            "parameters": parameter_count(config.model),
            "precision": config.precision.name,
            "seed": config.seed,
            "paths": paths_of(self._run_dir, bool(self._ranks)),
            "code": self._provenance._asdict(),
            "wandb": self._wandb.place() if self._wandb else None,
        }
        if last is not None and last.noise is not None:
            content["noise_scale"] = last.noise_scale
        if self._error is not None:
            content["error"] = self._error
        if (lost := lost_output()) is not None:
            content["lost_output"] = lost
        return finite(content)
