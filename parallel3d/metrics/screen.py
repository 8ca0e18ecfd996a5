"""Shows a run on the screen: the header, a live bar or plain lines, and the closing panel."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rich import progress
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from parallel3d.blueprint.parameters import active_parameter_count, parameter_count
from parallel3d.comm.step_timer import KINDS
from parallel3d.config.length import Length
from parallel3d.loop.keys import TrainConfig
from parallel3d.metrics.jsonl import EVAL_TERMS, HOOKS, TERMS, value
from parallel3d.metrics.loggers import FOLDER as TENSORBOARD
from parallel3d.metrics.loggers import show_command, sync_command
from parallel3d.metrics.lost_time import NAMES_OF_CAUSES, costs_of
from parallel3d.metrics.peak import Peak
from parallel3d.metrics.starts import PARTS
from parallel3d.metrics.units import Units, units_of
from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import OwnModelConfig
from parallel3d.run_config import Config
from parallel3d.text import aligned, count, duration, loss_words, percent, si, three_digits

UNITS = Units()  # those of a text
REFRESH_PER_SECOND = 4  # redraws per second; low, as they take time from the training process
RATE_PERIOD_S = 600.0  # seconds of steps from which the remaining time is estimated
MAX_WIDTH = 100  # wider lines and panels are hard to read
MOST_TERMS = 3  # maximum number of an own loss's terms on a step's line; metrics.jsonl has all
MOST_PARTS = 4  # maximum number of a blend's parts on an evaluation's line; metrics.jsonl has all
LABEL_WIDTH = 14
MAX_TABLE_RANKS = 8
NAMES_OF_PARTS = {part: part.replace("_", "-") for part in PARTS} | {"between": "between starts"}
SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "optim"}


def make_console() -> Console:
    """Returns a console on stdout; only a terminal gets styles, even if FORCE_COLOR is set."""
    return Console(force_terminal=sys.stdout.isatty(), highlight=False)


def print_styled(console: Console, text: str, style: str = "") -> None:
    """Prints `text` without wrapping its lines."""
    console.print(Text(text, style=style), soft_wrap=True)


class Progress:
    """Shows the progress: two live lines on a terminal (`train.progress`), else plain lines.

    A plain line is printed for the first and the last step, for every `train.log_every`-th step and
    for every step that is skipped because its gradients are not finite.
    """

    def __init__(
        self,
        console: Console,
        settings: TrainConfig,
        first_step: int,
        last_step: int,
        units: Units = UNITS,
    ) -> None:
        self._console = console
        self._units = units
        self._first_step = first_step
        self._last_step = last_step
        self._every = settings.log_every
        self._row: Mapping[str, Any] | None = None  # the last step's line
        self._skipped = 0
        self._bar = progress.Progress(
            "[bold]{task.description}",
            progress.BarColumn(bar_width=None, complete_style="cyan"),
            "{task.fields[share]:3d} %",
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            "[cyan]left",
            speed_estimate_period=RATE_PERIOD_S,
        )
        self._task = self._bar.add_task("", total=self._last_step)
        self._advance(first_step - 1)
        self._live: Live | None = None
        if settings.progress and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console,
                get_renderable=self.render,
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows a step; `row` is its line of metrics.jsonl."""
        self._row, step, skipped = row, row["step"], row.get("skipped", False)
        self._skipped += skipped
        self._advance(step)
        due = step % self._every == 0 or step in (self._first_step, self._last_step)
        why = _nothing(self._units) if row["loss"] is None else "gradients not finite"
        bad = skipped and row["loss"] is not None
        if self._live is None and (due or bad):
            left = self._bar.tasks[0].time_remaining
            left_words = f"left {duration(math.nan if left is None else left):>7}"
            words = [self._step(step), *_step_figures(row, self._units), left_words]
            words += [f"SKIPPED: {why}"] if skipped else []
            print_styled(self._console, "  ".join(words))

    def _advance(self, step: int) -> None:
        share = math.floor(100 * step / self._last_step)  # rounded down: 299 of 300 is 99 %
        self._bar.update(self._task, completed=step, description=self._step(step), share=share)

    def _step(self, step: int) -> str:
        return f"step {step:{len(str(self._last_step))}d}/{self._last_step}"

    def render(self) -> RenderableType:
        """Returns the two live lines: step, bar and time, above the figures of the last step."""
        row, words = self._row, ["first step …"]
        if row is not None:
            words = [" ".join(word.split()) for word in _step_figures(row, self._units)]
            words[1:1] = [f"skipped {self._skipped:,}"] if self._skipped else []
        bad = row is not None and not math.isfinite(row["loss"] or 0.0)
        style = "bold red" if bad else ""
        line = Text(" · ".join(words), style=style, no_wrap=True, overflow="ellipsis")
        return Group(Constrain(self._bar.get_renderable(), MAX_WIDTH), line)


def _nothing(units: Units) -> str:
    return "no token to learn" if units.in_nats else "nothing to learn"


def _step_figures(row: Mapping[str, Any], units: Units) -> list[str]:
    """Returns the figures of a step's line, each padded to its usual width."""
    found = [
        f"loss {loss_words(row['loss']):>8}",
        *(f"{name} {loss_words(each):>8}" for name, each in _terms(row, TERMS, MOST_TERMS)),
        f"grad {row['grad_norm']:#8.3g}",
        f"lr {row['lr']:.2e}",
        f"{si(row['tokens_per_s']):>6} {units.short}/s",
        f"MFU {percent(row['mfu']):>6}",
    ]
    found += [f"scale {row['loss_scale']:g}"] if "loss_scale" in row else []
    if "experts" in row:  # the layer with the highest load
        found.append(f"load {max(row['experts']['load'].values()):.2f}")
    return found


def _terms(
    row: Mapping[str, Any], key: str, most: int | None = None
) -> list[tuple[str, float | None]]:
    """Returns the terms of an own loss in `row[key]`, at most so many, with NaN restored."""
    figures = row.get(key, {})
    names = [name for name in figures if name != "nonfinite"][:most]
    return [(name, value(figures, name)) for name in names]


def header_facts(config: Config, length: Length, peak: Peak) -> dict[str, str]:
    """Returns the header's lines about the configuration, text by label."""
    model, optim, units = config.model, config.optim, units_of(config.model)
    dp, world_size = config.dp or 1, config.world_size
    microbatches = config.global_batch_size // (config.micro_batch_size * dp)
    tokens = config.global_batch_size * model.seq_length
    context = f"cp {config.cp} ({config.context_parallel.style}) × " if config.cp > 1 else ""
    padding = config.padded_seq_length - model.seq_length
    shape = f"{model.num_layers} layers × {model.hidden_size} · sequence {model.seq_length}"
    if isinstance(model, OwnModelConfig):
        shape = count(model.num_layers, "block")
        shape += f" · sequence {model.seq_length}" if units.work == "tokens" else ""
    amount = f" · {tokens:,} tokens" if units.work == "tokens" else ""
    decay = optim.lr_decay_style
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    smaller = config.batch_sizes.entries[:-1]
    before = "".join(f" · {size} from {first:,} {units.samples} on" for first, size in smaller)
    batch = f"{config.micro_batch_size} × {microbatches} micro-batches × dp {dp}"
    return {
        "model": f"{model._target_ or model.name} · {_parameters(model)} · {shape}",
        "layout": f"tp {config.tp} × pp {config.pp} × {context}dp {dp} = {ranks}"
        + (f" · {config.schedule.name}" if config.pp > 1 else "")
        + (f" · ep {config.ep}" if config.ep > 1 else "")
        + (" · sequence parallel" if config.sp else "")
        + (f" · sequences end with {count(padding, 'padding token')}" if padding else ""),
        "batch": f"{config.global_batch_size} {units.samples} = {batch}{amount}{before}",
        "length": length_words(model.seq_length, length, units=units),
        "data": config.data.path or config.data.name,
        "precision": f"{config.precision.name} · {optim.name}, lr {optim.lr:g} {decay}",
        "device": config.device,
        "peak per rank": f"{si(peak.flops)}FLOP/s · {peak.source}",
    }


def _parameters(model: ModelConfig) -> str:
    """Returns the number of parameters in words, and the number of active ones if it is smaller."""
    total, active = parameter_count(model), active_parameter_count(model)
    used = f" ({si(active).strip()} active)" if active < total else ""
    return f"{si(total)} parameters{used}"


def length_words(
    seq_length: int, length: Length, windows: int | None = None, units: Units = UNITS
) -> str:
    """Returns the length of a run in steps, tokens and, unless `windows` is None, epochs.

    An epoch has `windows` samples.
    """
    samples = length.samples
    tokens = si(samples * seq_length).rstrip()  # without an SI prefix, the text ends with a space
    text = f"{length.last_step:,} steps · {tokens} {units.work}"
    return text if windows is None else f"{text} · {samples / windows:.3g} epochs"


def print_header(console: Console, title: str, facts: Mapping[str, str]) -> None:
    _panel(console, title, _table(facts), "cyan")


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Prints the closing panel with the figures of `summary`, and below it the paths."""
    outer = Table.grid(expand=True)
    width = min(MAX_WIDTH, console.width) - 4
    outer.add_row(_table(_figures(summary)))
    steps = f"{summary['steps']:,} step{'' if summary['steps'] == 1 else 's'}"
    for line in _breakdown(summary, width):
        outer.add_row(Text(line, no_wrap=True))
    title = f"{summary['run']} · {summary['status']} after {steps}"
    _panel(console, title, outer, "green" if summary["status"] == "finished" else "yellow")
    for label, text in _places(summary).items():  # outside the frame, so that it is easy to copy
        print_styled(console, f"  {label:{LABEL_WIDTH}} {text}")


def _figures(summary: Mapping[str, Any]) -> dict[str, str]:
    rates, mfu = summary["tokens_per_s"], summary["mfu"]
    units = Units(**summary["units"]) if "units" in summary else UNITS
    rows = {"train loss": _number(summary["loss"], ".4f") + f" {units.loss}, last step"}
    if summary["loss"] is None and "loss" not in summary.get("nonfinite", {}):
        rows["train loss"] = f"none, because the last step had {_nothing(units)}"
    if summary["eval_loss"] is not None:
        parts = [f"{summary['eval_loss']:.4f} {units.loss}"]
        if summary["bits_per_byte"] is not None:
            parts.append(f"{summary['bits_per_byte']:.3f} bits per byte")
        best = summary["best_eval_loss"]
        if best is not None and summary["best_eval_step"] != summary["eval_step"]:
            parts.append(f"best {best:.4f} at step {summary['best_eval_step']:,}")
        rows["held-out loss"] = " · ".join(parts)
    for label, key in (("train terms", TERMS), ("held-out terms", EVAL_TERMS)):
        if terms := _terms(summary, key):
            rows[label] = " · ".join(f"{name} {loss_words(each)}" for name, each in terms)
    rows["grad norm"] = _number(summary["grad_norm"], "#.3g")
    rows |= {name: _number(figure, ".4g") for name, figure in _restored(summary).items()}
    if not summary["steps"]:  # the run took no step
        del rows["train loss"], rows["grad norm"]
    unlearned = summary["unlearned_steps"]
    if bad := summary["skipped_steps"] - unlearned:
        rows["skipped"] = f"{count(bad, 'step')}, because gradients were not finite"
    if unlearned:
        rows["not learned"] = f"{count(unlearned, 'step')}, because samples had {_nothing(units)}"
    if rates["mean"] is not None:
        excluded = rates["warmup_steps_excluded"]
        without = f" (first {excluded} steps left out)" if excluded else ""
        mean, median = (si(rates[name]).rstrip() for name in ("mean", "median"))
        rows["speed"] = f"{mean} {units.work}/s · median {median}{without}"
        peak = f"{si(mfu['peak_flops_per_device'])}FLOP/s"
        rows["MFU"] = f"{percent(mfu['value'])} of {mfu['world_size']} × {peak}"
        rows["peak per rank"] = mfu["peak_source"]
    if summary["memory"] is not None:
        most = max(summary["memory"]["ranks"], key=lambda rank: rank["allocated"])
        rows["memory"] = (
            f"{si(most['allocated'])}B at most, on rank {most['rank']} · "
            f"{si(most['reserved'])}B reserved"
        )
    if (spent := summary["goodput"]) is not None and spent["value"] is not None:
        rows["goodput"] = goodput_words(spent)
        if failures := failures_words(spent):
            rows["failures"] = failures
    rows["time"] = (
        f"{duration(summary['wall_time_s'])} · {si(summary['tokens']).rstrip()} {units.work}"
    )
    if "error" in summary:
        rows["error"] = summary["error"]
    return rows


def _restored(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns the last figures of a script's hooks, with NaN and infinities restored."""
    figures = summary.get(HOOKS, {})
    return {name: value(figures, name) for name in figures if name != "nonfinite"}


def goodput_words(spent: Mapping[str, Any]) -> str:
    """Returns the goodput in words, and the times of the activities that made no progress."""
    starts = spent["starts"]
    text = f"{percent(spent['value'])} of {duration(spent['wall_s'])}"
    text += f" in {starts:,} starts" if starts > 1 else ""
    others = {part: spent[f"{part}_s"] for part in PARTS[1:] if spent[f"{part}_s"] >= 1.0}
    return " · ".join([text, *(f"{NAMES_OF_PARTS[p]} {duration(s)}" for p, s in others.items())])


def failures_words(spent: Mapping[str, Any]) -> str:
    """Returns what failures and the queue have cost in words, or "" if the run had no failure."""
    costs = costs_of(spent.get("causes", {}))
    if not any(cost.is_failure(cause) for cause, cost in costs.items()):
        return ""
    words = []
    for cause, cost in costs.items():
        if cause == "user":
            continue
        queue = cost.sum(["queue"])
        text = f"{cost.times} × {NAMES_OF_CAUSES[cause]} {duration(cost.sum())}"
        words.append(text + (f", {duration(queue)} of it in the queue" if queue >= 1.0 else ""))
    return " · ".join(words)


def _places(summary: Mapping[str, Any]) -> dict[str, str]:
    run_dir = Path(summary["paths"]["run_dir"])
    names = [Path(p).name for k, p in summary["paths"].items() if k != "run_dir"]
    rows = {"run directory": f"{run_dir}/", "": "  ".join(names)}
    wandb = summary["wandb"]
    if wandb is not None and wandb["url"]:
        rows["W&B"] = wandb["url"]
    elif wandb is not None and wandb["folder"]:
        rows["W&B offline"] = sync_command(Path(wandb["folder"]))
    if board := summary["paths"].get(TENSORBOARD):
        rows["TensorBoard"] = show_command(Path(board))
    return rows


def _breakdown(summary: Mapping[str, Any], width: int) -> list[str]:
    """Returns a table of a step's time by kind in ms: one row per rank, or minimum, mean, maximum.

    It is empty if the times were not measured.
    """
    if summary["breakdown"] is None:
        return []
    ranks = summary["breakdown"]["ranks"]
    used = [kind for kind in KINDS if any(rank[kind] for rank in ranks)] + ["step"]
    if len(ranks) > MAX_TABLE_RANKS:
        least, most = ({k: pick(r[k] for r in ranks) for k in used} for pick in (min, max))
        mean = {k: sum(r[k] for r in ranks) / len(ranks) for k in used}
        lines = [("least", least), ("mean", mean), ("most", most)]
    else:
        lines = [(f"rank {rank['rank']}", rank) for rank in ranks]
    table = [["ms a step", *(SHORT.get(kind, kind) for kind in used)]]
    table += [[name, *(three_digits(1e3 * times[k]) for k in used)] for name, times in lines]
    rows = aligned(table, "<" + ">" * len(used))
    if len(rows[0]) > width:
        return [
            "this screen is too narrow for times by rank: see summary.json or parallel3d report"
        ]
    if (imbalance := summary["breakdown"].get("imbalance")) is not None:
        words = f"{imbalance:.1%} more work than the mean"
        rows.append(f"attention over cp: the slowest rank has {words}")
    return ["", *rows]


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _table(facts: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True, width=LABEL_WIDTH)
    table.add_column(overflow="fold")
    for label, text in facts.items():
        table.add_row(label, Text(text))
    return table


def _panel(console: Console, title: str, content: Table, style: str) -> None:
    panel = Panel(
        content,
        title=Text(title, style="bold"),
        title_align="left",
        border_style=style,
        width=min(MAX_WIDTH, console.width),
        padding=(0, 1),
    )
    console.print(panel)


def evaluation_lines(reads_bytes: bool, steps: int, row: Mapping[str, Any]) -> list[str]:
    """Returns the lines of an evaluation in a run of `steps` steps.

    An evaluation of a finished run may be given fewer steps than the run has done; then the lines
    have the step alone.

    There is one line for the held-out loss, with the losses of some parts of a blend, and one for
    each validation set. `reads_bytes` is true if each token is a byte.
    """
    loss = value(row, "eval_loss")
    step = int(row["step"])
    begin = f"eval {step:{len(str(steps))}d}/{steps}  " if step <= steps else f"eval {step}  "
    lines = [f"{begin}{name}: {_score_words(one)}" for name, one in row.get("valid", {}).items()]
    if lines and loss is None:
        return lines
    bits, losses = bits_per_byte(loss, reads_bytes), row.get("eval_losses", {})
    parts = [f"{n} {loss_words(value(losses, n))}" for n in losses if n != "nonfinite"]
    more = [f"{len(parts) - MOST_PARTS} more"] if len(parts) > MOST_PARTS else []
    text = f"{begin}held-out loss {loss_words(loss)}"
    text += f" · {bits:.3f} bits per byte" if bits is not None else ""
    parts = [f"{name} {loss_words(each)}" for name, each in _terms(row, EVAL_TERMS)] + parts
    return [" · ".join([text, *parts[:MOST_PARTS], *more]), *lines]


def _score_words(row: Mapping[str, Any]) -> str:
    """Returns the figures of a validation set in words."""
    text = f"loss {loss_words(value(row, 'loss'))}"
    if "count" in row:  # an own loss
        terms = (f" · {name} {loss_words(each)}" for name, each in _terms(row, TERMS))
        return f"{text}{''.join(terms)} · {row['count']:,} items"
    if (perplexity := value(row, "perplexity")) is not None:
        text += f" · perplexity {perplexity:.5g}"
    if (bits := value(row, "bits_per_byte")) is not None:
        text += f" · {bits:.4f} bits per byte"
    return f"{text} · {row['tokens']:,} tokens"


def bits_per_byte(eval_loss: float | None, reads_bytes: bool) -> float | None:
    """Converts nats per token to bits per byte; returns None unless each token is a byte."""
    return eval_loss / math.log(2) if reads_bytes and eval_loss is not None else None
