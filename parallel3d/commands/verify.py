"""Verifies that a layout trains the same model as one process (`parallel3d verify`).

The layout and a single process start from the same weights, read the same samples and are compared
after every step: loss, gradient norm, and every shard of every rank (replicas and tied copies too).
They run in fp64, where only a mistake makes a difference, and in the run's own precision; with SGD,
because Adam hides a wrong gradient scale, and with AdamW.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.comm import collectives
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.options import CommandConfig, VerifyConfig
from parallel3d.config.checks import single_process
from parallel3d.config.fields import spell, with_values
from parallel3d.config.schema import Config, OptimConfig
from parallel3d.config.values import HALF_PRECISION, in_other_precision
from parallel3d.data.corpus import Blend, Corpus, open_corpus
from parallel3d.data.loader import with_length
from parallel3d.estimate.search import with_style
from parallel3d.metrics.jsonl import write_json
from parallel3d.parameters.gather import gather_shards
from parallel3d.parameters.spec import ShardSpec
from parallel3d.run.launch import Worker
from parallel3d.trainer import StepResult, Trainer


class Tolerance(NamedTuple):
    """Largest relative differences of losses, gradient norms, and parameters (to their scale).

    With None for `weights`, differences of parameters are reported but not checked.
    """

    loss: float
    grad_norm: float
    weights: float | None


EXACT = Tolerance(1e-9, 1e-9, 1e-9)
ROUNDED = Tolerance(1e-5, 1e-4, 1e-4)
# AdamW divides by the gradient's size. Where a gradient is rounding noise, its sign changes the
# weight by a whole learning rate, so in precisions below fp64 such differences do not show a
# mistake.
ROUNDED_ADAM = Tolerance(1e-5, 1e-4, None)
# The layout decides which partial sums are rounded to 8 (bf16) or 11 (fp16) bits.
COARSE = Tolerance(1e-2, 1e-1, None)

SGD = OptimConfig(name="sgd", lr=0.05, weight_decay=0.0, clip_grad=0.0, lr_decay_style="constant")


class ShardDifference(NamedTuple):
    """A shard's largest |difference|, divided by the parameter's scale (see `differences`)."""

    difference: float
    name: str
    rank: int


class Comparison(NamedTuple):
    precision: str
    optimizer: str
    step: int
    layout: StepResult
    single: StepResult
    worst: ShardDifference
    failure: str | None


def verify_command(config: CommandConfig, worker: Worker) -> int:
    """Runs `parallel3d verify` on every rank; returns its exit code. Collective."""
    return verify(config, worker, config.verify.steps)


def verify(config: Config, worker: Worker, steps: int = VerifyConfig().steps) -> int:
    """Runs all comparisons, `steps` steps each; returns 0 if the layout is exact, else 1.
    Collective.
    """
    console = Console(stderr=False) if worker.rank == 0 else None
    corpus = open_corpus(config.data, config.model.seq_length, vocab_size=config.model.vocab_size)
    sources = corpus.sources(config.model, config.data, config.seed)
    train = with_length(config.train, sources.train)
    config = with_style(dataclasses.replace(config, train=train))
    device = torch.device(worker.device)
    groups = ProcessGroups.of_run(config, worker.device, worker.placement)
    layout = groups.layout
    failure: str | None = None
    everything: list[Comparison] = []
    if console:
        sizes = ("tp", "pp", *(("cp",) if config.cp > 1 else ()), "dp", "sp", "schedule.name")
        layout_keys = " ".join(spell(name, attrgetter(name)(config)) for name in sizes)
        console.print(
            f"Verifying {config.model.name} under {layout_keys} against one process, "
            f"{steps} steps each"
        )
    for variant, tolerance in variants(config, steps):
        worker.phase = f"verifying {variant.precision.name} {variant.optim.name}"
        rows = list(compare(variant, tolerance, groups, device, corpus))
        failure = next((row.failure for row in rows if row.failure), None)
        everything += rows
        if console:
            console.print(table(rows, layout))
        if broadcast_flag(failure is not None, groups, device):
            break
    groups.close()
    if not console:
        return 0
    write_json(worker.run_dir / "verify.json", report(layout, config.sp, everything, failure))
    verdict = "[bold green]The layout does not change the model.[/]"
    if failure:
        verdict = f"[bold red]The layout changes the model[/]: {failure}."
    console.print(verdict, f"{worker.run_dir}/verify.json", sep="\n", soft_wrap=True)
    return 1 if failure else 0


def broadcast_flag(flag: bool, groups: ProcessGroups, device: torch.device) -> bool:
    """Returns rank 0's flag on every rank."""
    return bool(collectives.broadcast(torch.tensor(int(flag), device=device), 0, groups.world))


def report(layout: Layout, sp: bool, rows: list[Comparison], failure: str | None) -> dict:
    steps = [
        row._asdict() | {k: getattr(row, k)._asdict() for k in ("layout", "single", "worst")}
        for row in rows
    ]
    keys = {name: layout.size(name) for name in ("tp", "pp", "dp", "cp")} | {"sp": sp}
    return {"layout": keys, "exact": failure is None, "failure": failure, "steps": steps}


def variants(config: Config, steps: int) -> Iterator[tuple[Config, Tolerance]]:
    """Yields the config in fp64 and in its own precision, with SGD and with AdamW."""
    own = dataclasses.replace(  # keeps the learning rates of the real run's first steps
        config.optim, lr_decay_steps=config.optim.lr_decay_steps or config.train_steps
    )
    optimizers = {"sgd": SGD, "adamw": OptimConfig(lr_decay_style="constant"), own.name: own}
    config = with_values(config, {"train.steps": steps, "train.tokens": None})
    in_fp64 = {
        "precision.name": "fp64",
        "precision.lm_cross_entropy": "fp32",
        "attention_kernel": in_other_precision(config.attention_kernel),
    }
    for optim in optimizers.values():
        yield with_values(config, in_fp64 | {"optim": optim}), EXACT
    if config.precision.name == "fp64":
        return
    for name, optim in optimizers.items():
        # Muon uses AdamW for other parameters.
        tolerance = ROUNDED if name == "sgd" else ROUNDED_ADAM
        tolerance = COARSE if config.precision.name in HALF_PRECISION else tolerance
        yield dataclasses.replace(config, optim=optim), tolerance


def compare(
    config: Config,
    tolerance: Tolerance,
    groups: ProcessGroups,
    device: torch.device,
    corpus: Corpus | Blend,
) -> Iterator[Comparison]:
    """Steps the layout and, on rank 0, one process, until the first difference.

    Yields the comparisons on rank 0; collective.
    """
    trainer = Trainer(config, groups, device, corpus)
    single = None
    if groups.rank == 0:
        single = Trainer(single_process(config), ProcessGroups.single(), device, corpus)
    for step in range(config.train_steps + 1):
        result = trainer.train_step() if step else StepResult(0, 0.0, 0.0, 0.0, 0)
        trainer.data_parallel.wait_for_all_gathers()  # zero=1 overlaps these with the next forward
        shards = gather_shards(trainer.parameters.values(), groups)
        differs = False
        if single is not None:
            expected = single.train_step() if step else result
            found = differences(shards, single.full_parameters(), config.model.init_std)
            worst = max(found)
            limits = tolerance if step else EXACT
            failure = judge(step, result, expected, found, limits, groups.layout)
            differs = failure is not None
            name = (config.precision.name, config.optim.name)
            if step or failure:
                yield Comparison(*name, step, result, expected, worst, failure)
        if broadcast_flag(differs, groups, device):
            return


def differences(
    shards: list[tuple[int, ShardSpec, Tensor]], expected: dict[str, Tensor], init_std: float
) -> list[ShardDifference]:
    """Compares every shard of every rank with the single process's tensor; NaN counts as inf.

    A parameter's scale is its largest value, but at least the std of initial weights, as the bias
    of the keys has no gradient (softmax cancels it) and holds rounding noise. The result is in the
    order of the model's parameters, then of the ranks.
    """
    found = []
    for rank, spec, values in shards:
        full = expected[spec.name]
        off = (values - spec.of_full(full)).abs().max() / full.abs().max().clamp(min=init_std)
        ratio = float(off.nan_to_num(torch.inf, torch.inf))
        found.append(ShardDifference(ratio, spec.name, rank))
    order = {name: i for i, name in enumerate(expected)}
    return sorted(found, key=lambda off: (order[off.name], off.rank))


def relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-30)


def judge(
    step: int,
    layout: StepResult,
    single: StepResult,
    found: list[ShardDifference],
    tolerance: Tolerance,
    grid: Layout,
) -> str | None:
    """Returns the differences beyond the tolerance as a sentence, or None."""
    moment = f"after step {step}" if step else "before the first step"
    parts = []
    for name, limit in (("loss", tolerance.loss), ("grad_norm", tolerance.grad_norm)):
        a, b = getattr(layout, name), getattr(single, name)
        if a is None and b is None:  # neither found a token to learn from
            continue
        if a is None or b is None:
            parts.append(f"{name} is {a} under the layout and {b} in one process")
        elif not relative(a, b) <= limit:
            parts.append(f"{name} is {a:.12g} under the layout and {b:.12g} in one process")
    limit = math.inf if tolerance.weights is None else tolerance.weights
    off = [each for each in found if each.difference > limit]
    for adjective, chosen in (("first", off[:1]), ("worst", sorted(off, reverse=True)[:1])):
        for difference, name, rank in chosen:
            where = f"rank {rank} ({grid.named(rank)})"
            parts.append(f"the {adjective} parameter is {name} on {where}, off by {difference:.1e}")
    return f"{moment}, {'; '.join(parts)}" if parts else None


def table(rows: list[Comparison], layout: Layout) -> Table:
    first = rows[0]
    result = Table(title=f"{first.precision} · {first.optimizer}", title_justify="left", box=SIMPLE)
    one = "one\nprocess"
    for column in ("step", "loss", one, "Δ", "grad\nnorm", one, "Δ", "weights\nΔ"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        a, b = row.layout, row.single
        cells = [str(row.step), "none", "none", ""]
        if a.loss is not None and b.loss is not None:
            cells[1:] = [f"{a.loss:.6f}", f"{b.loss:.6f}", f"{relative(a.loss, b.loss):.0e}"]
        cells += [f"{a.grad_norm:.5f}", f"{b.grad_norm:.5f}"]
        cells += [f"{relative(a.grad_norm, b.grad_norm):.0e}", f"{row.worst.difference:.0e}"]
        result.add_row(*cells, style="bold red" if row.failure else None)
    worst = max((row.worst for row in rows), key=lambda w: w.difference)
    where = layout.named(worst.rank)
    result.caption = f"worst: {worst.name} on rank {worst.rank} ({where})" if worst.name else None
    result.caption_justify = "left"
    return result
