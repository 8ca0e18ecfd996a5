"""Verifies that a layout trains the same model as one process (`parallel3d verify`).

The layout and a single process start from the same weights and read the same samples. After every
step their losses, their gradient norms and every shard of every rank are compared, replicas and
tied copies included. Both run in fp64, where only a mistake causes a difference beyond rounding,
and in the run's own precision. Both SGD and AdamW are used, because Adam hides a wrong gradient
scale.

If the model has experts, the routers' choices are compared as well. In precisions below fp64,
rounding decides between close scores, so the layout runs twice. In the first run it chooses
freely, differing choices are counted, and the loss is checked only coarsely. In the second run it
uses the choices of the single process, and the usual tolerances apply.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer, groups_of_run
from parallel3d.comm import collectives
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.options import CommandConfig, VerifyConfig
from parallel3d.commands.verify_causes import (
    MakeTrainer,
    ModelFinding,
    causes,
    findings_of_one_process,
)
from parallel3d.config.fields import spell, with_values
from parallel3d.config.values import HALF_PRECISION, in_other_precision
from parallel3d.data.corpus import open_corpus
from parallel3d.data.loader import with_length
from parallel3d.data.sampler import SampleSource
from parallel3d.device.accelerator import accelerator_of_world, current
from parallel3d.errors import UserError
from parallel3d.estimate.search import with_style
from parallel3d.experts.watch import CLOSE, Choices, Flips, flips
from parallel3d.loop.own_parts import OwnParts, opened
from parallel3d.metrics.jsonl import write_json
from parallel3d.models.survey import OwnModelConfig
from parallel3d.optim.keys import OWN, OptimConfig
from parallel3d.parameters.gather import gather_shards
from parallel3d.parameters.spec import ShardSpec
from parallel3d.run.failure import full_stop
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config, single_process
from parallel3d.trainer import StepResult


class Tolerance(NamedTuple):
    """The largest allowed relative differences of losses, gradient norms and parameters.

    Differences of parameters are relative to their scale (see `differences`). If `weights` is None,
    they are reported but not checked.
    """

    loss: float
    grad_norm: float
    weights: float | None


EXACT = Tolerance(1e-9, 1e-9, 1e-9)
ROUNDED = Tolerance(1e-5, 1e-4, 1e-4)
# AdamW divides a gradient by its own magnitude. If a gradient is only rounding noise, it therefore
# moves its weight by a whole learning rate, in a random direction. In precisions below fp64 such
# differences in weights do not indicate a mistake.
ROUNDED_ADAM = Tolerance(1e-5, 1e-4, None)
# Partial sums are rounded to 8 bits (bf16) or 11 bits (fp16), and the layout determines which
# partial sums exist.
COARSE = Tolerance(1e-2, 1e-1, None)

# A flipped choice sends a token through another expert, which changes the token's loss and the
# gradients of both experts.
FLIPPED = Tolerance(1e-2, math.inf, None)
# Even in fp64, layouts may order two scores differently if they are closer than this.
UNDECIDED = 1e-9

SGD = OptimConfig(name="sgd", lr=0.05, weight_decay=0.0, clip_grad=0.0, lr_decay_style="constant")


class ShardDifference(NamedTuple):
    """The largest absolute difference in a shard, divided by the parameter's scale.

    `differences` defines this scale.
    """

    difference: float
    name: str
    rank: int


class Comparison(NamedTuple):
    """The results of one step under the layout and in the single process.

    Attributes:
        precision: the compute precision of both.
        optimizer: the optimizer of both.
        step: the number of the step, from 1, or 0 for the comparison before the first step.
        layout: the losses and norms under the layout.
        single: the losses and norms of the single process.
        worst: the shard that differs most.
        failure: a sentence on the differences beyond the tolerance, or None if there are none.
        flips: the differences between the choices of experts, or None without experts.
        replays: whether the layout used the choices of the single process.
        is_undecided: whether `failure` reports only a choice of experts that rounding decides.
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
    """A configuration in which the layout and the single process are compared.

    If `replays` is true, the layout uses the choices of experts of the single process.
    """

    config: Config
    tolerance: Tolerance
    replays: bool = False


def verify_command(config: CommandConfig, worker: Worker, own: OwnParts | None = None) -> int:
    """Runs `parallel3d verify` on every rank. Returns the exit code. The call is collective.

    `own`: the parts of a script (`cli.fit.fit`), whose hooks are not called; None without a script.
    """
    groups = groups_of_run(config, worker.device, worker.placement)

    def begin(what: str) -> None:
        worker.phase = what

    own = own or OwnParts()
    return compared(config, groups, config.verify.steps, worker.run_dir, begin, own)


def verify(
    config: Config, *, steps: int = VerifyConfig().steps, folder: str | os.PathLike[str] = "."
) -> int:
    """Compares the layout of `config` with one process, step by step, as `parallel3d verify` does.

    Prints the tables on rank 0, and writes `verify.json` into `folder`. The call is collective over
    the world of `init`, each of whose ranks computes on its current device.

    Returns 1 on rank 0 if the layout changes the model or a comparison is undecided, else 0.

    Raises UserError if there is no world.
    """
    if not dist.is_initialized():
        raise UserError("verify needs a world of torch.distributed; call parallel3d.init() first")
    kind = accelerator_of_world()
    device = torch.device("cpu") if kind is None else current(kind)
    groups = groups_of_run(config, str(device), None)
    return compared(config, groups, steps, Path(folder), lambda _: None, OwnParts())


def compared(
    config: Config,
    groups: ProcessGroups,
    steps: int,
    folder: Path,
    begin: Callable[[str], None],
    own: OwnParts,
) -> int:
    """Compares the variants, each for `steps` steps, until one fails; closes the groups.

    `begin` is told what the rank does next. Returns the exit code. The call is collective.
    """
    console = Console(stderr=False) if groups.rank == 0 else None
    make, source = maker_of_trainers(config, own, groups.device)
    train = with_length(config.train, source, config.model.seq_length)
    config = with_style(dataclasses.replace(config, train=train))
    layout = groups.layout
    failure: str | None = None
    found, likely = list[ModelFinding](), list[str]()
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
    compares = True
    if isinstance(config.model, OwnModelConfig):
        begin("calling the parts of the model")
        if console:
            found = findings_of_one_process(make, next(variants(config, steps)).config)
        compares = not broadcast_number(any(each.stops for each in found), groups)
    for variant in variants(config, steps) if compares else ():
        of = variant.config
        begin(f"verifying {of.precision.name} {of.optim.name}")
        rows = list(compare(variant, groups, make))
        failure = next((row.failure for row in rows if row.failure), None)
        everything += rows
        if console:
            console.print(table(rows, layout))
        if broadcast_number(failure is not None, groups):
            step = broadcast_number(rows[-1].step if rows else 0, groups)
            if isinstance(config.model, OwnModelConfig):
                begin("looking for the cause")
                likely = causes(make, of, groups, step)
            break
    groups.close()
    if not console:
        return 0
    sentences = [each.sentence for each in found] + likely
    write_json(folder / "verify.json", report(layout, config.sp, everything, failure, sentences))
    verdict = "[bold green]The layout does not change the model.[/]"
    if any(row.is_undecided for row in everything):
        verdict = f"[bold yellow]Undecided[/]: {failure}."
    elif failure:
        verdict = f"[bold red]The layout changes the model[/]: {failure}."
    elif not compares:
        verdict = "[bold red]The layout was not compared[/]:"
    elif any(each.fails for each in found):
        verdict = "[bold red]The model is not the same in every layout[/]:"
    lines = [
        ("" if each.fails else "[bold yellow]Note[/]: ") + escape(full_stop(each.sentence))
        for each in found
    ]
    lines += [f"[bold]Likely cause[/]: {escape(full_stop(each))}" for each in likely]
    console.print(verdict, *lines, str(folder / "verify.json"), sep="\n", soft_wrap=True)
    return 1 if failure or any(each.fails for each in found) else 0


def maker_of_trainers(
    config: Config, own: OwnParts, device: torch.device
) -> tuple[MakeTrainer, SampleSource]:
    """Returns a function that makes trainers of the layout and of one process, and their samples.

    They read the text of `config` or the samples of a script. A script's optimizer steps those
    whose configuration names it.
    """
    source, corpus = opened(own.train, "train", config), None
    given = source
    if source is None:
        model = config.model
        corpus = open_corpus(config.data, model.seq_length, vocab_size=model.vocab_size)
        source = corpus.sources(model, config.data, config.seed).train

    def make(config: Config, groups: ProcessGroups) -> Trainer:
        if isinstance(config.model, OwnModelConfig):  # what a model keeps is that of one trainer
            instance = copy.copy(config.model.instance)
            config = dataclasses.replace(
                config, model=dataclasses.replace(config.model, instance=instance)
            )
        optimizer = own.optimizer if config.optim.name == OWN else None
        return Trainer(config, groups, device, corpus, given, optimizer=optimizer)

    return make, source


def broadcast_number(number: int, groups: ProcessGroups) -> int:
    """Returns rank 0's number on every rank."""
    there = torch.tensor(int(number), device=groups.device)
    return int(collectives.broadcast(there, 0, groups.world))


def report(
    layout: Layout,
    sp: bool,
    rows: list[Comparison],
    failure: str | None,
    sentences: Sequence[str] = (),
) -> dict:
    """Returns the content of `verify.json`; `sentences` are about a user's own model."""
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
    about = {"own_model": list(sentences)} if sentences else {}
    found = {"layout": keys, "exact": failure is None, "failure": failure}
    return found | about | {"steps": steps}


def variants(config: Config, steps: int) -> Iterator[Variant]:
    """Yields the variants to compare: in fp64 and in the run's own precision, with each optimizer.

    The optimizers are SGD, AdamW and the run's own. If the model has experts, each variant below
    fp64 comes twice, with free and with replayed choices.
    """
    own = dataclasses.replace(  # so that learning rates equal those of the real run's first steps
        config.optim, lr_decay_steps=config.optim.lr_decay_steps or config.train_steps
    )
    optimizers = {"sgd": SGD, "adamw": OptimConfig(lr_decay_style="constant"), own.name: own}
    config = with_values(config, {"train.steps": steps, "train.tokens": None})
    in_fp64 = {
        "precision.name": "fp64",
        "precision.lm_cross_entropy": "fp32",
        "attention_kernel": in_other_precision(config.attention_kernel),
        "delta_kernel": in_other_precision(config.delta_kernel),
    }
    for optim in optimizers.values():
        yield Variant(with_values(config, in_fp64 | {"optim": optim}), EXACT)
    if config.precision.name == "fp64":
        return
    for name, optim in optimizers.items():
        # Muon has the tolerance of AdamW, because it updates some parameters with AdamW.
        tolerance = ROUNDED if name == "sgd" else ROUNDED_ADAM
        tolerance = COARSE if config.precision.name in HALF_PRECISION else tolerance
        own_precision = dataclasses.replace(config, optim=optim)
        if config.model.num_experts:
            yield Variant(own_precision, FLIPPED)
        yield Variant(own_precision, tolerance, replays=config.model.num_experts > 0)


def compare(
    variant: Variant,
    groups: ProcessGroups,
    make: MakeTrainer,
) -> Iterator[Comparison]:
    """Trains under the layout and, on rank 0, in a single process, until the first failure.

    Yields a comparison after each step, on rank 0 only. The generator is collective.
    """
    config, tolerance, replays = variant
    trainer = make(config, groups)
    single = None
    if groups.rank == 0:
        single = make(single_process(config), ProcessGroups.single())
    for step in range(config.train_steps + 1):
        expected = result = StepResult(0, 0.0, 0.0, 0.0, 0)
        found_flips = None
        if step:
            theirs = _watched(trainer)  # on other ranks, this record receives the choices of rank 0
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
        # With zero=1 the all-gather of the parameters overlaps with the next forward pass.
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
        if broadcast_number(differs, groups):
            return


def _watched(trainer: Trainer) -> Choices | None:
    """Returns an empty record that the trainer's next step fills with the choices of experts.

    Returns None if the model has no experts.
    """
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
    """Returns a sentence if choices differ in fp64, but only between nearly equal scores.

    Returns None if no choice differs, or if the scores of a differing choice are UNDECIDED or more
    apart.
    """
    if found.first is None or found.first[3] >= UNDECIDED:
        return None
    layer, sample, position, margin = found.first
    return (
        f"after step {step}, layer {layer} chooses other experts for token {position} of sample "
        f"{sample}, as two scores are only {margin:.1e} apart; verify with another seed="
    )


def _judged_choices(step: int, found: Flips, failure: str | None) -> str | None:
    """Returns a sentence about differing choices in fp64, which ends with `failure`.

    `failure` describes other differences, or is None. If no choice differs, it is returned alone.
    """
    if found.first is None:
        return failure
    layer, sample, position, margin = found.first
    where = f"layer {layer}, sample {sample}, token {position}"
    chosen = f"choices of experts differ ({found.count} in all), even in {where}, where two scores"
    return f"after step {step}, {chosen} are {margin:.1e} apart{'; ' + failure if failure else ''}"


def differences(
    shards: list[tuple[int, ShardSpec, Tensor]], expected: dict[str, Tensor], init_std: float
) -> list[ShardDifference]:
    """Compares every shard of every rank with the tensor of the single process.

    A difference is divided by the parameter's scale, and NaN counts as infinite. The scale is the
    parameter's largest magnitude, but at least the standard deviation of initial weights, because
    the bias of the keys has no gradient (softmax cancels it) and holds only rounding noise. The
    result is sorted by the order of the model's parameters, then by rank.
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
    """Returns a sentence on the differences beyond the tolerance, or None if there are none.

    `found` contains the differences of all shards, and `grid` is the layout that names ranks.
    """
    moment = f"after step {step}" if step else "before the first step"
    parts = []
    for name, limit in (("loss", tolerance.loss), ("grad_norm", tolerance.grad_norm)):
        a, b = getattr(layout, name), getattr(single, name)
        if a is None and b is None:  # neither has a loss, because all tokens were masked
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
    """Returns lines on the differing choices of experts, or [] without experts."""
    found = [row.flips for row in rows if row.flips is not None]
    if not found:
        return []
    total = sum(each.tokens * len(each.by_layer) for each in found)
    count, close = sum(each.count for each in found), sum(each.close for each in found)
    margin = min(each.margin for each in found)
    lines = [
        f"choices of experts: {count:,} of {total:,} differ ({100 * count / total:.2g} %); "
        f"smallest margin {margin:.1e}, {close:,} below {CLOSE:g}"
    ]
    if count:
        layers = {layer: sum(each.by_layer[layer] for each in found) for layer in found[0].by_layer}
        tokens = sum(each.tokens for each in found)
        shares = ", ".join(f"{n}: {100 * of / tokens:.2g} %" for n, of in layers.items())
        lines.append(f"by layer: {shares}")
    return lines
