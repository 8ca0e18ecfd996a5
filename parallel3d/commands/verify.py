"""Verifies that a layout trains the same model as one process (`parallel3d verify`).

The layout and a single process start from the same weights, read the same samples and are compared
after every step: loss, gradient norm, and every shard of every rank (replicas and tied copies too).
They run in fp64, where only a mistake makes a difference, and in the run's own precision; with SGD,
because Adam hides a wrong gradient scale, and with AdamW.

With experts, the choices of both are compared as well. Below fp64, rounding decides between close
scores, so the layout runs twice: once freely, where flips are counted and only the loss is checked,
coarsely; and once with the choices of the single process, where the usual bounds hold.
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
from parallel3d.experts.watch import CLOSE, Choices, Flips, flips
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
# Partial sums are rounded to 8 (bf16) or 11 (fp16) bits, and which sums these are depends on the
# layout.
COARSE = Tolerance(1e-2, 1e-1, None)

# A flipped choice sends a token through another expert, which changes its loss, and the gradients
# of both experts.
FLIPPED = Tolerance(1e-2, math.inf, None)
# layouts may disagree, even in fp64, about the order of scores that are closer than this
UNDECIDED = 1e-9

SGD = OptimConfig(name="sgd", lr=0.05, weight_decay=0.0, clip_grad=0.0, lr_decay_style="constant")


class ShardDifference(NamedTuple):
    """A shard's largest |difference|, divided by the parameter's scale (see `differences`)."""

    difference: float
    name: str
    rank: int


class Comparison(NamedTuple):
    """One step of the layout and of the single process.

    Attributes:
        worst: the shard that differs most.
        failure: a sentence on differences beyond the tolerance; None: there are none.
        flips: differences in the choices of experts; None without experts.
        replays: the layout used the choices of the single process.
        is_undecided: `failure` is a choice of experts that is up to rounding.
    """

    precision: str
    optimizer: str
    step: int
    layout: StepResult
    single: StepResult
    worst: ShardDifference
    failure: str | None
    flips: Flips | None = None
    replays: bool = False
    is_undecided: bool = False


class Variant(NamedTuple):
    """A training run to compare; `replays`: the layout uses the single process's choices of
    experts."""

    config: Config
    tolerance: Tolerance
    replays: bool = False


def verify_command(config: CommandConfig, worker: Worker) -> int:
    """Runs `parallel3d verify` on every rank; returns its exit code. Collective."""
    return verify(config, worker, config.verify.steps)


def verify(config: Config, worker: Worker, steps: int = VerifyConfig().steps) -> int:
    """Runs all comparisons, `steps` steps each; returns 0 if the layout is exact, else 1.
    Collective."""
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
        experts = ("ep",) if config.model.num_experts else ()
        more = (*(("cp",) if config.cp > 1 else ()), "dp", *experts)
        sizes = ("tp", "pp", *more, "sp", "schedule.name")
        layout_keys = " ".join(spell(name, attrgetter(name)(config)) for name in sizes)
        console.print(
            f"Verifying {config.model.name} under {layout_keys} against one process, "
            f"{steps} steps each"
        )
    for variant in variants(config, steps):
        of = variant.config
        worker.phase = f"verifying {of.precision.name} {of.optim.name}"
        rows = list(compare(variant, groups, device, corpus))
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
    if any(row.is_undecided for row in everything):
        verdict = f"[bold yellow]Undecided[/]: {failure}."
    elif failure:
        verdict = f"[bold red]The layout changes the model[/]: {failure}."
    console.print(verdict, f"{worker.run_dir}/verify.json", sep="\n", soft_wrap=True)
    return 1 if failure else 0


def broadcast_flag(flag: bool, groups: ProcessGroups, device: torch.device) -> bool:
    """Returns rank 0's flag on every rank."""
    return bool(collectives.broadcast(torch.tensor(int(flag), device=device), 0, groups.world))


def report(layout: Layout, sp: bool, rows: list[Comparison], failure: str | None) -> dict:
    steps = []
    for row in rows:
        step = row._asdict() | {k: getattr(row, k)._asdict() for k in ("layout", "single", "worst")}
        for name in ("layout", "single"):
            figures = step[name].pop("experts")
            if figures is not None:
                step[name]["experts"] = figures._asdict()
        if row.flips is None:
            del step["flips"], step["replays"]
        else:
            step["flips"] = dataclasses.asdict(row.flips)
            if math.isinf(row.flips.margin):  # every token uses every expert
                step["flips"]["margin"] = None
        steps.append(step)
    dims = ("tp", "pp", "dp", "cp", *(("ep",) if layout.ep else ()))
    keys = {name: layout.size(name) for name in dims} | {"sp": sp}
    return {"layout": keys, "exact": failure is None, "failure": failure, "steps": steps}


def variants(config: Config, steps: int) -> Iterator[Variant]:
    """Yields the config in fp64 and in its own precision, with SGD and with AdamW; with experts
    below fp64 twice, with free and with replayed choices."""
    own = dataclasses.replace(  # so that learning rates equal the real run's in its first steps
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
        yield Variant(with_values(config, in_fp64 | {"optim": optim}), EXACT)
    if config.precision.name == "fp64":
        return
    for name, optim in optimizers.items():
        # Muon uses AdamW for other parameters.
        tolerance = ROUNDED if name == "sgd" else ROUNDED_ADAM
        tolerance = COARSE if config.precision.name in HALF_PRECISION else tolerance
        own_precision = dataclasses.replace(config, optim=optim)
        if config.model.num_experts:
            yield Variant(own_precision, FLIPPED)
        yield Variant(own_precision, tolerance, replays=config.model.num_experts > 0)


def compare(
    variant: Variant,
    groups: ProcessGroups,
    device: torch.device,
    corpus: Corpus | Blend,
) -> Iterator[Comparison]:
    """Steps the layout and, on rank 0, one process, until the first difference.

    Yields the comparisons on rank 0; collective.
    """
    config, tolerance, replays = variant
    trainer = Trainer(config, groups, device, corpus)
    single = None
    if groups.rank == 0:
        single = Trainer(single_process(config), ProcessGroups.single(), device, corpus)
    for step in range(config.train_steps + 1):
        expected = result = StepResult(0, 0.0, 0.0, 0.0, 0)
        found_flips = None
        if step:
            theirs = _watched(trainer)  # ranks without the single process receive its choices
            if single is not None:
                theirs = _watched(single)
                expected = single.train_step()
            ours = _watched(trainer)
            if ours is not None and theirs is not None and replays:
                ours.given = collectives.broadcast(theirs.experts, 0, groups.world)
            result = trainer.train_step()
            if ours is not None and theirs is not None:
                of_all_ranks = ours.gathered(groups.world)
                found_flips = None if single is None else flips(of_all_ranks, theirs)
        # with zero=1 the parameters' all-gather overlaps with the next forward
        trainer.data_parallel.wait_for_all_gathers()
        shards = gather_shards(trainer.parameters.values(), groups)
        differs = False
        if single is not None:
            found = differences(shards, single.full_parameters(), config.model.init_std)
            worst = max(found)
            limits = tolerance if step else EXACT
            failure = judge(step, result, expected, found, limits, groups.layout)
            undecided = None
            if found_flips is not None and tolerance == EXACT:
                undecided = _undecided(step, found_flips)
                failure = undecided or _judged_choices(step, found_flips, failure)
            differs = failure is not None
            name = (config.precision.name, config.optim.name)
            if step or failure:
                row = Comparison(*name, step, result, expected, worst, failure)
                is_undecided = undecided is not None
                yield row._replace(flips=found_flips, replays=replays, is_undecided=is_undecided)
        if broadcast_flag(differs, groups, device):
            return


def _watched(trainer: Trainer) -> Choices | None:
    """Returns a record for the choices of the trainer's next step; None without experts."""
    balance, config = trainer.balance, trainer.config
    if balance is None:
        return None
    shape = (
        config.batch_sizes.at(trainer.consumed_samples),
        config.model.seq_length,
        config.model.experts_per_token,
    )
    watch = Choices.empty(balance.layers, trainer.consumed_samples, shape, trainer.device)
    balance.watch = watch
    return watch


def _undecided(step: int, found: Flips) -> str | None:
    """Returns a sentence if choices differ in fp64, but only where scores are equal up to rounding;
    else None."""
    if found.first is None or found.first[3] >= UNDECIDED:
        return None
    layer, sample, position, margin = found.first
    return (
        f"after step {step}, layer {layer} chooses other experts for token {position} of sample "
        f"{sample}, as two scores are only {margin:.1e} apart; another seed= decides"
    )


def _judged_choices(step: int, found: Flips, failure: str | None) -> str | None:
    """Returns a sentence on the differences in fp64, given those in choices and those in everything
    else."""
    if found.first is None:
        return failure
    layer, sample, position, margin = found.first
    where = f"layer {layer}, sample {sample}, token {position}"
    chosen = f"{found.count} tokens choose other experts, as in {where}, where scores are"
    return f"after step {step}, {chosen} {margin:.1e} apart{'; ' + failure if failure else ''}"


def differences(
    shards: list[tuple[int, ShardSpec, Tensor]], expected: dict[str, Tensor], init_std: float
) -> list[ShardDifference]:
    """Compares every shard of every rank with the single process's tensor; NaN counts as inf.

    A parameter's scale is its largest value, but at least the std of initial weights: the bias of
    the keys has no gradient (softmax cancels it) and only holds rounding noise. The result is in
    the order of the model's parameters, then of the ranks.
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
        if a is None and b is None:  # both are NaN: neither found a token to learn from
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
    title = f"{first.precision} · {first.optimizer}"
    if first.replays:
        title += " · choices of the single process"
    result = Table(title=title, title_justify="left", box=SIMPLE)
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
    lines = [f"worst: {worst.name} on rank {worst.rank} ({where})"] if worst.name else []
    result.caption = "\n".join([*lines, *_captions(rows)]) or None
    result.caption_justify = "left"
    return result


def _captions(rows: list[Comparison]) -> list[str]:
    """Returns lines on the choices of experts in these steps."""
    found = [row.flips for row in rows if row.flips is not None]
    if not found:
        return []
    total = sum(each.tokens * len(each.by_layer) for each in found)
    count, close = sum(each.count for each in found), sum(each.close for each in found)
    margin = min(each.margin for each in found)
    lines = [
        f"choices: {count:,} of {total:,} tokens in layers differ ({100 * count / total:.2g} %); "
        f"smallest margin {margin:.1e}, {close:,} below {CLOSE:g}"
    ]
    if count:
        layers = {layer: sum(each.by_layer[layer] for each in found) for layer in found[0].by_layer}
        tokens = sum(each.tokens for each in found)
        shares = ", ".join(f"{n}: {100 * of / tokens:.2g} %" for n, of in layers.items())
        lines.append(f"by layer: {shares}")
    return lines
