"""Finds the ten best layouts of a model on a cluster, as a table and a page (`parallel3d plan`).

Keys of a layout (LAYOUT) that are given on the command line are fixed, and all others are searched.
The memory of a layout is an upper bound. In the best `plan.confirm` rows it is replaced by the peak
of a dry run. Only dry runs need torch.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from parallel3d.blueprint.parameters import (
    active_parameter_count,
    parameter_count,
    trained_shares,
)
from parallel3d.calibrate.record import check_nodes, check_type, read
from parallel3d.commands.options import CommandConfig
from parallel3d.commands.topology.report import make_report, picture_of
from parallel3d.config.fields import check_fields, show
from parallel3d.config.user_files import check_free, write
from parallel3d.context_parallel.checks import check_context_parallel
from parallel3d.dryrun.keys import DryrunConfig
from parallel3d.errors import UserError
from parallel3d.estimate.fitted_cost import (
    OWN_RATES,
    StepTime,
    breakdown,
    range_of_a_new_place,
)
from parallel3d.estimate.memory import (
    bounded,
    host_memory,
    least_memory,
    load_that_fits,
    memory_of,
    nearly_fullest,
    peak_memory,
)
from parallel3d.estimate.own_cost import flops_of
from parallel3d.estimate.search import (
    FULL,
    GIB,
    MOST_STAGES,
    MOST_V_HALF,
    Fixed,
    LayoutChoice,
    PricedLayouts,
    best,
    can_overlap,
    card_of,
    configure,
    constants_of,
    divisors,
    layouts,
    priced,
    ranked,
    reason,
    sizes_of,
    trace_of,
    works,
)
from parallel3d.experts.checks import check_expert_parallel, check_experts
from parallel3d.html import bar_key, html_table, section, stacked_bar, whole_page
from parallel3d.models.checks import check_kernels, check_layer_types, check_model
from parallel3d.models.flops import flops_per_token
from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import OwnModelConfig
from parallel3d.optim.checks import check_own
from parallel3d.resolve import stage_weights
from parallel3d.run_config import AnyConfig, Config
from parallel3d.schedules.draw import render_svg
from parallel3d.schedules.schedule import NAMED_SCHEDULES, check_vpp, make
from parallel3d.schedules.walk import RankWork, time_orders
from parallel3d.tensor_parallel.checks import check_tensor_parallel
from parallel3d.text import aligned, si
from parallel3d.topology.assumptions import MICROBATCHES_PER_STAGE, assume_model, chosen_keys
from parallel3d.topology.cluster.discover import run_command, with_own_gpus
from parallel3d.topology.keys import TopologyConfig

if TYPE_CHECKING:
    from parallel3d.loop.own_parts import OwnParts
    from parallel3d.optim.own import OptimizerFactory

IN_LOG_S = 10.0  # seconds between progress messages; most searches end before the first


def progress(
    stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Callable[[str], None]:
    """Returns a function that reports the progress of a long search.

    Every IN_LOG_S seconds it prints a line to `stream`, by default stderr.
    """
    stream = sys.stderr if stream is None else stream  # sys.stderr is None if it is closed
    last = clock()

    def tell(where: str) -> None:
        nonlocal last
        if stream is not None and clock() - last >= IN_LOG_S:
            last = clock()
            print(f"plan: {where} …", file=stream, flush=True)

    return tell


ROWS = 10
TIMED = (
    "Kernels have the rates of parallel3d's kernels on one H100, and the network has the rates of "
    "other systems' published runs (docs/planner.md)."
)
UNTIMED = (
    "Prices come from datasheets and other systems' published runs; parallel3d itself was timed "
    "only on an H100, where it was 24 % faster than such a price (docs/planner.md)."
)

MEASURED = (
    "Products, attention, memory, launches and collectives have the rates of the cluster file."
)
GUESSED = "Times are a guess, because ranks share the cores of this machine."

# names of the table's columns for a layout, which are also the keys that the user may fix
LAYOUT = [f.name for f in fields(LayoutChoice)]
FIGURES = ("step s", "range", "MFU %", "GiB", "by", "why")


DRY_RUN, BOUND = "dry run", "bound"  # the two sources of the memory in a row


@dataclass(frozen=True)
class Plan:
    """The priced layouts of `gpus` GPUs or ranks.

    Attributes:
        config: the configuration.
        priced: the layouts with their prices.
        sizes: fields of `StepWork` that all layouts share.
        gpus: number of GPUs, or of ranks on a measured machine.
        reserve_gb: memory of a GPU that must stay free, in 1e9 bytes.
        dry_runs: facts about memory from dry runs (`find_memory`), by layout and index along pp.
        dry_run_note: a sentence on why fewer dry runs than requested were made, or "" if all were.
        load: tokens of the experts on the fullest rank, divided by the mean over ranks.
        in_script: whether a script brings the model.
    """

    config: Config
    priced: PricedLayouts
    sizes: Mapping[str, float]
    gpus: int
    reserve_gb: float
    dry_runs: Mapping[int, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    dry_run_note: str = ""
    load: float = 1.0
    in_script: bool = False

    @cached_property
    def rows(self) -> list[int]:
        """The indices of the layouts in the table, the best first."""
        return best(self.priced, ROWS)

    @property
    def is_own(self) -> bool:
        """Whether the model is a user's own."""
        return isinstance(self.config.model, OwnModelConfig)

    @property
    def samples(self) -> str:
        """The samples of a step in words."""
        model, count = self.config.model, f"{self.config.global_batch_size:,}"
        if isinstance(model, OwnModelConfig) and not model.is_of_text:
            return f"{count} samples a step"
        return f"{count} sequences of {model.seq_length:,} tokens a step"

    @property
    def command(self) -> str:
        """The command line of the best layout."""
        choice = self.priced.choices[self.rows[0]]
        sp = choice.tp > 1 and configure(self.config, choice).sp
        start = "python my_train.py" if self.is_own and self.in_script else "parallel3d train …"
        return f"{start} {typed_keys(choice, sp)}{without_overlap(self.config, choice)}"

    @property
    def title(self) -> str:
        file = self.config.cluster.file
        where = f"{self.gpus:,} GPUs of {self.config.cluster.name}"
        where = f"{self.gpus} ranks of the machine in {file}" if file else where
        return f"{self.config.model.name}{_parameters(self.config.model)} on {where}"

    @property
    def columns(self) -> list[str]:
        """The fields of `LayoutChoice` that the table shows, without ep if there are no experts."""
        return [name for name in LAYOUT if name != "ep" or self.config.model.num_experts]

    @property
    def head(self) -> list[str]:
        """The headings of the table."""
        short = {"micro_batch_size": "mb"}
        return ["#", *(short.get(name, name) for name in self.columns), *FIGURES]

    @property
    def bounded(self) -> int:
        """The number of layouts whose memory was calculated."""
        return len(self.priced.choices) - int(np.isnan(self.priced.memory).sum())

    def mfu(self, index: int) -> float:
        """Returns the model FLOPs utilization of a layout in per cent."""
        model = self.config.model
        if self.is_own:  # the products that its parts run for a sample
            useful = self.config.global_batch_size * flops_of(trace_of(self.config, 1, 1))
        else:
            tokens = self.config.global_batch_size * model.seq_length
            shares = trained_shares(model, self.config.optim)
            useful = tokens * flops_per_token(model, model.seq_length, shares)
        seconds = float(self.priced.seconds[index])
        return 100 * useful / (seconds * self.gpus * self.sizes["peak"])

    def cells(self) -> list[list[str]]:
        """Returns the rows of the table under `head`.

        A time is followed by its range for GPUs, networks and engines to which prices were not
        fitted, because no published run used parallel3d. Times of a measured machine have no range.
        """
        spread = None if self.config.cluster.file else range_of_a_new_place()
        found = []
        for place, i in enumerate(self.rows, 1):
            choice, seconds = self.priced.choices[i], float(self.priced.seconds[i])
            layout = [getattr(choice, name) for name in self.columns]
            gib = float(self.priced.memory[i]) / GIB
            likely = "–".join(f"{seconds * factor:.3g}" for factor in spread or ())
            why = reason(self.priced, i, self.rows[0], int(self.sizes["gpus_per_node"]))
            memory = f"{gib:.2f}" if gib < 1 else f"{gib:.0f}"
            figures = f"{seconds:.3g}", likely, f"{self.mfu(i):.1f}", memory
            found.append([*map(str, (place, *layout)), *figures, self.by(i), why])
        return found

    def by(self, index: int) -> str:
        """Returns the source of a layout's memory: DRY_RUN or BOUND."""
        return DRY_RUN if index in self.dry_runs else BOUND

    def caution(self) -> str:
        """Returns caveats about the memory and the times, or "" if there are none."""
        file = self.config.cluster.file
        if file:
            said = GUESSED if read(file).shares_cores else MEASURED
        else:
            said = TIMED if card_of(self.config)[0] in OWN_RATES else UNTIMED
        return " ".join(filter(None, (self.dry_run_note, said)))

    def of_load(self, index: int) -> float:
        """Returns the bytes that a load above 1 adds to the memory of a layout's fullest GPU."""
        choice, even = self.priced.choices[index], self.load == 1
        if even:
            return 0.0
        return memory_of(self.config, choice, self.load) - memory_of(self.config, choice)

    def loads(self) -> str:
        """Returns a sentence on the largest load with which the first row fits, or "" with ep=1."""
        first = self.rows[0]
        choice, config = self.priced.choices[first], self.config
        if choice.ep == 1:
            return ""
        room = float(self.sizes["memory_bytes"] - self.priced.memory[first]) + self.of_load(first)
        most = load_that_fits(config, choice, room)
        fits = f"up to a load of {most:.1f}" if math.isfinite(most) else "with any load"
        priced = "" if self.load == 1 else f", and all rows are priced with a load of {self.load:g}"
        return (
            f"The first fits {fits} (tokens of the fullest rank's experts over the mean; "
            f"plan.load){priced}."
        )

    def table(self) -> str:
        """Returns the text for the terminal: a title, the table, notes and the best command."""
        config, priced = self.config, self.priced
        fit = f"{len(priced.order)} fit"
        if self.bounded < len(priced.choices):
            fit = f"{len(priced.order)} of the fastest {self.bounded} fit"
        samples = f"{config.global_batch_size} sequences of {config.model.seq_length} a step"
        samples = self.samples if self.is_own else samples
        title = (
            f"{self.title}, {config.precision.name}, {samples}: {len(priced.choices)} layouts, "
            f"{fit}"
        )
        words = ("schedule", "recompute", "by", "why")
        sides = "".join("<" if name in words else ">" for name in self.head)
        shown = [f" {line}" for line in aligned([self.head, *self.cells()], sides)]
        said = " ".join(filter(None, (self.loads(), self.caution())))
        if config.offload_layers:
            made = configure(config, self.priced.choices[self.rows[0]])
            host = max(host_memory(made, index) for index in range(made.pp)) / GIB
            said = (
                f"The first keeps up to {host:.1f} GiB a rank in pinned host memory; the time of "
                f"its copies is not in these figures. {said}"
            )
        notes = [said] if said else []
        return "\n".join([title, "", *shown, *notes, "", self.command])


def typed_keys(choice: LayoutChoice, sp: bool = False) -> str:
    """Formats a layout as overrides, without most keys at their defaults; `sp` adds sp=true."""
    keys = ["tp", "pp", "dp", "micro_batch_size"]
    if choice.pp > 1:
        keys.append("schedule")
    usual = Config()
    more = [key for key in LAYOUT if key not in keys and key != "schedule"]
    keys += [key for key in more if getattr(choice, key) != getattr(usual, key)]
    words = [f"{key}={getattr(choice, key)}" for key in keys]
    if sp:
        words.append("sp=true")
    return " ".join(words)


def without_overlap(config: Config, choice: LayoutChoice) -> str:
    """Returns the override that switches `moe.overlap` off, or "" if the layout does not need it.

    A layout needs it if moe.overlap=true was given but cannot be used in the layout.
    """
    return " moe.overlap=false" if config.moe.overlap and not can_overlap(choice) else ""


def _parameters(model: ModelConfig) -> str:
    """Returns the numbers of all and active parameters in brackets, or "" without experts."""
    if not model.num_experts:
        return ""
    counts = parameter_count(model), active_parameter_count(model)
    total, active = (si(count).replace("G", "B") for count in counts)
    return f" ({total} parameters, {active} active)"


MADE_BY = "parallel3d plan"
MARK = f"data-by='{MADE_BY}'"
# Shares of compute in the forward pass, input gradients and weight gradients (schedule.costs).
SHARES = (1 / 3, 0.4, 0.8 / 3)
BOXES = 7900  # maximum number of boxes in the drawing of a pipeline
MOST_RANKS = 16  # maximum number of ranks in the memory chart of a pipeline
# Kinds of memory in bounds and dry runs; `reserve` is left to the driver, NCCL and fragmentation.
HELD = (
    *("parameters", "gradients", "masters", "optimizer", "activations", "logits", "buffers"),
    *("temporary", "margin", "reserve"),
)

# Descriptions of the parts of the busiest GPU's compute (keys of `breakdown`) and of a step (fields
# of `StepTime`).
TIMES = {
    "matmuls": "GEMMs of the layers, one in the forward pass and two in the backward pass",
    "attention": "scores, softmax and values, in the forward and backward passes",
    "element-wise": "norms, activations and residuals, which memory bandwidth bounds",
    "recomputed": "forward passes that are repeated because their results were not kept",
    "exchange of tokens": "sending tokens to the experts of other ranks and back",
    "tp collectives": "waits for the other GPUs of a layer, if no GEMM hides them",
    "head and embedding": "logits, loss and embedding table, if the busiest stage has them",
    "launches": "waits for the host, if it is slower than the GPU, and all-gathers of zero=3",
    "compute": "computation of the busiest GPU, with the waits inside its layers",
    "bubble": "waits while the pipeline fills and drains",
    "messages": "sending hidden states to other stages, without the hidden part",
    "gradients": "summing gradients over replicas, without the part that backward passes hide",
    "optimizer": "the optimizer's pass over its state",
    "fixed": "a constant cost per step",
}


def write_page(plan: Plan, file: str, assumed: Sequence[str], said: str = "") -> None:
    """Writes the plan as one HTML page.

    `assumed` lists the assumed overrides, and `said` is a notice for the top of the page or "".
    Raises UserError if the page cannot be written.
    """
    title = escape(plan.title)
    priced = (
        "Times come from a model with constants fitted to published runs, memory from "
        "parallel3d's own code; docs/planner.md says how accurate both are. "
    )
    assumptions = escape(f"Assumed: {', '.join(assumed)}." if assumed else "")
    first = f"<p>{escape(said)}</p>" if said else ""
    body = f"<h1>{title}</h1>\n{first}{''.join(_sections(plan))}\n"
    body += f"<footer>{priced}{assumptions}</footer>"
    write("plan.html", file, whole_page(MARK, f"Plan: {title}", body))


def _sections(plan: Plan) -> Iterable[str]:
    """Yields the sections: the best layout, the table, and the best layout's pictures."""
    config, priced, first = plan.config, plan.priced, plan.rows[0]
    made = configure(config, priced.choices[first])
    tokens, seconds = (
        config.global_batch_size * config.model.seq_length,
        float(priced.seconds[first]),
    )
    model = config.model
    units = "samples" if isinstance(model, OwnModelConfig) and not model.is_of_text else "tokens"
    used, memory = float(priced.memory[first]) / 1e9, float(plan.sizes["memory_bytes"]) / 1e9
    of_all = f"{len(priced.choices):,}"
    if plan.bounded < len(priced.choices):
        of_all = f"the fastest {plan.bounded:,} of {of_all}"
    words = (
        f"{config.precision.name}, {plan.samples}: {seconds:.3g} s, "
        f"{tokens / seconds:,.0f} {units} a second, MFU "
        f"{plan.mfu(first):.1f} %, {used:.1f} of {memory:.1f} GB on the fullest GPU according to "
        f"a {plan.by(first)}. "
    )
    words += " ".join(
        filter(None, (plan.loads(), f"{len(priced.order):,} of {of_all} layouts fit."))
    )
    yield section("The best layout", words, f"<pre>{escape(plan.command)}</pre>")
    slowest = max(float(priced.seconds[i]) for i in plan.rows)
    rows = [
        [*map(escape, row), stacked_bar(_parts(priced, i), slowest, "s")]
        for row, i in zip(plan.cells(), plan.rows, strict=True)
    ]
    sizes = "tp, cp, pp and ep" if config.model.num_experts else "tp, cp and pp"
    words = (
        f"One row for each combination of {sizes}; if two differ by less than 0.5 %, the simpler "
        "layout comes first. "
    )
    shown = bar_key(StepTime.__dataclass_fields__) + html_table((*plan.head, "time"), rows)
    yield section(f"The {len(rows)} best layouts", words + plan.caution(), shown)
    parts = _parts(priced, first)
    if not plan.is_own:  # the time of a user's own parts is not told apart
        work = works([priced.choices[first]], plan.sizes, config.global_batch_size)
        parts = breakdown(work, constants_of(config), parts.pop("compute")) | parts
    rows = [
        [escape(kind), f"{part:.3g} s", f"{part / seconds:.1%}", TIMES[kind]]
        for kind, part in parts.items()
    ]
    shown = f"<div class='big'>{stacked_bar(parts, sum(parts.values()), 's')}</div>"
    shown += bar_key(parts) + html_table(("part", "time", "share", "what it is"), rows)
    yield section("Where the step's time goes", "", shown)
    if made.pp > 1:
        yield _pipeline(made, _parts(priced, first))
    yield _memory(plan, made, used, memory)
    if plan.is_own:
        return
    try:
        report = make_report(made, None, {}, TopologyConfig(search=0))
        yield section("Where the ranks sit", "", f"<div class='paper'>{picture_of(report)}</div>")
    except UserError as error:
        yield section("Where the ranks sit", f"No picture: {error}")


def _pipeline(made: Config, parts: Mapping[str, float]) -> str:
    """Draws the pipeline with enough micro-batches to show it filling, running and draining."""
    count, name = made.num_microbatches, made.schedule.name
    most = max(BOXES // (3 * made.pp * made.vpp), made.pp)
    shown = min(count, max(3 * made.pp, 8), most)
    schedule = make(name, made.pp, shown, made.vpp)
    forward, input, weight = (share * parts["compute"] / count for share in SHARES)
    work = RankWork(forward, input, weight, weights=stage_weights(made))
    drawn = time_orders(schedule.orders, schedule.assignment, work.costs(schedule.assignment))
    title = f"{name}, {made.pp} ranks, {shown} micro-batches"
    idle = parts["bubble"] / (parts["bubble"] + parts["compute"])
    return section(
        "The pipeline in time",
        f"The drawing shows {shown} of the {count} micro-batches, without messages. In the whole "
        f"step, {idle:.1%} of the time is idle.",
        f"<div class='paper'>{render_svg(drawn, title, 1080, unit=' s')}</div>",
    )


def _memory(plan: Plan, made: Config, used: float, memory: float) -> str:
    """Returns the section on the peak memory of the ranks along the pipeline.

    `used` is the memory of the fullest GPU and `memory` is that of a GPU, both in GB.
    """
    dry_runs = plan.dry_runs.get(plan.rows[0], {})
    stages: dict[int, tuple[dict[str, float], str, str]] = {}
    for index in range(made.pp):
        if MOST_RANKS // 2 <= index < made.pp - MOST_RANKS // 2:
            continue
        if index in dry_runs:
            facts = dry_runs[index]
            held = {kind: facts.get(f"{kind}_bytes", 0.0) for kind in HELD}
            stages[index] = held, DRY_RUN, str(facts["peak_in"])
        else:
            peak = peak_memory(made, index, plan.load)
            stages[index] = {k: getattr(peak, k, 0.0) for k in HELD}, BOUND, peak.phase
        stages[index][0]["reserve"] = 1e9 * plan.reserve_gb
    shown = [kind for kind in HELD if any(held[kind] for held, _, _ in stages.values())]
    rows = []
    for index, (held, by, phase) in stages.items():
        parts = {kind: held[kind] / 1e9 for kind in shown}
        bar = stacked_bar(parts, 1.02 * max(memory, used), "GB", memory)
        rows.append([f"rank {index}", bar, f"{sum(parts.values()):.1f} GB", by, phase])
    words = "Each bar shows a rank at its peak in a step. The red line is the memory of a GPU, "
    table = html_table(("along pp", "memory", "in all", "by", "peaks in"), rows)
    words = f"{words}{memory:.1f} GB."
    return section("Memory along the pipeline", words, bar_key(shown), table)


def _parts(priced: PricedLayouts, index: int) -> dict[str, float]:
    """Returns the seconds of a layout's step by part."""
    parts = StepTime.__dataclass_fields__
    return {part: max(float(getattr(priced.time, part)[index]), 0.0) for part in parts}


_MOST_NODES = 1 << 16  # largest number of nodes that is tried for a model that does not fit
# The search for nodes ends if doubling them leaves more than this share of the memory of a rank.
_STILL = 0.98


def plan(config: CommandConfig, typed: Sequence[str], own: OwnParts | None = None) -> int:
    """Prints the plan and, if requested, writes its page. Returns the exit code, 0.

    `typed` lists the command-line overrides. `own`: the parts of a script, or None without a
    script. Raises UserError for an impossible request.
    """
    keys, here = chosen_keys(typed), with_own_gpus(config.cluster, os.environ, run_command)
    config = replace(config, cluster=here)
    check_free("plan.html", config.plan.html, MARK, MADE_BY)
    config, assumed = assume_model(config, typed)
    if not {"precision", "precision.name"} & keys and config.cluster.file is None:
        config = replace(config, precision=replace(config.precision, name="bf16"))
    check_fields(config)
    config = with_own_parts(config, own)
    if config.optim.name == "muon":
        raise UserError(
            "optim.name=muon must be another optimizer for plan, which cannot price "
            "Newton-Schulz; the nearest is optim.name=adamw, and parallel3d dryrun supports muon"
        )
    gpus = (config.cluster.nodes or 1) * (config.cluster.gpus_per_node or 8)
    if config.cluster.file is not None:
        each = config.cluster.gpus_per_node or read(config.cluster.file).made.count
        gpus = (config.cluster.nodes or 1) * each
    fixed = held(config, keys)
    found = searched(config, fixed, gpus, config.dryrun.reserve_gb, config.plan.load)
    found = replace(found, in_script=own is not None)
    said = untyped_batch(config, keys, gpus)
    if config.plan.confirm and config.cluster.file is None:
        optimizer = None if own is None else own.optimizer
        seconds = math.inf if "plan.confirm" in keys else BEGIN_S
        found = confirmed(found, config.plan.confirm, fixed, seconds, optimizer)
    print("\n\n".join(filter(None, (said, found.table()))))
    if config.plan.html:
        write_page(found, config.plan.html, assumed, said)
    if config.model.num_layers > MOST_STAGES and "pp" not in keys:
        print(f"Not searched: pp above {MOST_STAGES}, and above {MOST_V_HALF} with v_half")
    if assumed:
        print(f"Assumed: {', '.join(assumed)}")
    return 0


def with_own_parts(config: AnyConfig, own: OwnParts | None) -> AnyConfig:
    """Returns the configuration with what the planner must know of a script's parts.

    These are the states of its optimizer, which a trial finds, and a sample for its own model.
    Raises UserError if a key names an optimizer of a script, and there is none.
    """
    check_own(config.optim, own is not None and own.optimizer is not None)
    if own is None:
        return config
    from parallel3d.loop.own_parts import with_example  # these import torch
    from parallel3d.optim.own import tried

    config = with_example(config, own)
    if own.optimizer is None:
        return config
    return replace(config, optim=tried(config.optim, own.optimizer))


def untyped_batch(config: Config, keys: set[str], gpus: int) -> str:
    """Returns a sentence if the batch size was not given and is small for the GPUs, or else "".

    The proposed batch size fills pipelines of any number of stages on these GPUs.
    """
    batch, enough = config.global_batch_size, MICROBATCHES_PER_STAGE * gpus
    chosen = {"global_batch_size", "experiment"} & keys or batch != Config().global_batch_size
    of_file = config.cluster.file is not None
    if chosen or of_file or batch >= enough or isinstance(config.model, OwnModelConfig):
        return ""
    tokens = si(enough * config.model.seq_length)
    return (
        f"global_batch_size={batch} was not given, but runs on {gpus:,} GPUs usually have a "
        f"larger one, and the plan depends on it: give yours, such as "
        f"global_batch_size={enough} ({tokens}tokens a step)."
    )


def held(config: Config, keys: set[str]) -> dict[str, Any]:
    """Returns the values of a layout that the user fixed, by their names in `LayoutChoice`.

    `keys` are the keys that the command line gives.
    """
    typed = keys | ({"schedule"} if "schedule.name" in keys else set())
    found = {name: getattr(config, name) for name in LAYOUT if name in typed}
    if "schedule" in found:
        found["schedule"] = config.schedule.name
    return {name: value for name, value in found.items() if value is not None}


def searched(
    config: Config,
    fixed: Fixed,
    ranks: int,
    reserve_gb: float = DryrunConfig().reserve_gb,
    load: float = 1.0,
) -> Plan:
    """Returns all layouts of `ranks` ranks, priced by datasheets or by the cluster's measured file.

    Memory is calculated only for the fastest layouts.

    Args:
        config: the configuration.
        fixed: the values that the user fixed.
        ranks: number of GPUs or ranks.
        reserve_gb: memory of a GPU that a layout must leave free, in 1e9 bytes.
        load: tokens of the experts on the fullest rank, divided by the mean over ranks.

    Raises:
        UserError: if the cluster cannot be priced, or if no layout is possible or fits.
    """
    file, batch = config.cluster.file, config.global_batch_size
    if isinstance(config.model, OwnModelConfig):
        fixed = {"cp": 1, **fixed}
    else:
        check_model(config.model)
        check_experts(config.model)
        check_layer_types(config.model)
        check_kernels(config.model, config.attention_kernel, config.delta_kernel)
    check_held(config, fixed, ranks)
    if file is not None:
        machine = read(file)
        check_type(machine, file, config.precision.name)
        check_nodes(machine, file, config.cluster.nodes or 1)
        reserve_gb = machine.rates["rank_gb"]
    sizes = sizes_of(config, ranks)
    sizes["load"] = load
    choices = list(layouts(sizes, ranks, int(sizes["gpus_per_node"]), batch, fixed))
    if not choices:
        raise UserError(no_layout(config, ranks, fixed))
    choices = of_the_style(config, choices)
    reserve, most = 1e9 * reserve_gb, sizes["memory_bytes"]
    times = priced(config, choices, sizes)
    unknown = PricedLayouts(choices, times, np.full(len(choices), np.nan), np.array(False), [])
    known = bounded(config, unknown, ROWS, most, reserve, load, progress())
    found = Plan(config, known, sizes, ranks, reserve_gb, load=load)
    if not known.order:
        raise UserError(fits_nowhere(found, fixed))
    return found


def of_the_style(config: Config, choices: Sequence[LayoutChoice]) -> list[LayoutChoice]:
    """Returns the layouts whose cp suits the style of context parallelism and the model.

    Raises UserError if no layout has such a cp.
    """
    refused: dict[tuple[int, int], UserError] = {}
    for tp, cp in dict.fromkeys((c.tp, c.cp) for c in choices):
        try:
            attention, how = config.tensor_parallel.attention, config.context_parallel
            ways = how.style, attention
            check_context_parallel(config.model, *ways, tp=tp, cp=cp, states=how.states)
        except UserError as error:
            refused[tp, cp] = error
    found = [c for c in choices if (c.tp, c.cp) not in refused]
    if not found:
        raise next(iter(refused.values()))
    return found


BEGIN_S = 60.0  # seconds after which no further dry run begins, unless plan.confirm is given
NO_TORCH = "No dry run confirmed a row, because torch is missing; plan.confirm=0 requests none."


def confirmed(
    found: Plan,
    rows: int,
    fixed: Fixed,
    seconds: float,
    optimizer: OptimizerFactory | None = None,
) -> Plan:
    """Returns the plan with the memory of its best `rows` rows replaced by that of dry runs.

    If a row does not fit after all, or if a run would refuse it, the next row takes its place. No
    dry run begins after `seconds` seconds. `optimizer` makes the optimizer of a script. Raises
    UserError if no row is left.
    """
    if importlib.util.find_spec("torch") is None:
        return replace(found, dry_run_note=NO_TORCH)
    priced, most = found.priced, float(found.sizes["memory_bytes"])
    dry_runs: dict[int, dict[int, Mapping[str, Any]]] = {}
    refused: UserError | None = None
    tell, began = progress(), time.monotonic()
    while waiting := [i for i in best(priced, rows) if i not in dry_runs]:
        first = waiting[0]
        if time.monotonic() - began > seconds:
            said = (
                f"Dry runs confirmed {rows - len(waiting)} of the first {rows} rows within a "
                f"minute; plan.confirm={rows} on the command line sets no time limit."
            )
            return replace(found, priced=priced, dry_runs=dry_runs, dry_run_note=said)
        tell(f"a dry run of {typed_keys(priced.choices[first])}")
        memory = np.array(priced.memory)
        try:
            dry_runs[first] = dry_run(found, priced.choices[first], optimizer)
            peak = max(rank["peak_bytes"] for rank in dry_runs[first].values())
            memory[first] = peak + 1e9 * found.reserve_gb + found.of_load(first)
        except UserError as error:
            refused = refused or error
            memory[first] = math.inf
        priced = ranked(priced.choices, priced.time, memory, most)
        if np.isnan(memory).any():
            reserve = 1e9 * found.reserve_gb
            priced = bounded(found.config, priced, ROWS, most, reserve, found.load, tell)
    found = replace(found, priced=priced, dry_runs=dry_runs)
    if not priced.order:
        raise refused or UserError(fits_nowhere(found, fixed))
    return found


def dry_run(
    found: Plan, choice: LayoutChoice, optimizer: OptimizerFactory | None = None
) -> dict[int, Mapping[str, Any]]:
    """Returns facts about the memory of a layout's fullest ranks from dry runs, by index along pp.

    The call enables the simulated device in this process. Raises UserError for a layout that a run
    would refuse.
    """
    from parallel3d.commands.dry_ranks import find_memory  # imports torch

    config, sizes = configure(found.config, choice), found.sizes
    cluster = replace(
        config.cluster,
        gpu_memory_gb=sizes["memory_bytes"] / 1e9,
        gpu_memory_gb_per_s=sizes["memory_rate"] / 1e9,
    )
    config = replace(config, cluster=cluster)
    return {stage: find_memory(config, stage, optimizer) for stage in nearly_fullest(config)}


def check_held(config: Config, fixed: Fixed, ranks: int) -> None:
    """Raises UserError if no layout of `ranks` ranks can have the fixed values."""
    name, layers = fixed.get("schedule", "1f1b"), config.model.num_layers
    pp = int(fixed.get("pp", 1))
    if name not in NAMED_SCHEDULES:
        raise UserError(
            f"schedule={name} must be one of {', '.join(NAMED_SCHEDULES)} in a plan, which chooses "
            "among them unless one is given; the nearest is schedule=1f1b"
        )
    if {"schedule", "vpp"} <= {*fixed}:
        check_vpp(str(name), int(fixed["vpp"]))
    for key in ("recompute_layers", "offload_layers"):
        given, stages = getattr(config, key) or [], pp * int(fixed.get("vpp", 0))
        if len(given) > 1 and len(given) != stages:
            raise UserError(
                f"{key}={show(given)} must have 1 entry in a plan, which chooses the stages unless "
                f"pp and vpp are given; the nearest is {key}={show(given[:1])}"
            )
    product, of = 1, "GPUs" if config.cluster.file is None else "ranks"
    for key in ("tp", "cp", "pp", "dp"):
        value, others = int(fixed.get(key, 1)), product
        product *= value
        if ranks % product:
            near = min((abs(d - value), d) for d in divisors(ranks // others))[1]
            raise UserError(
                f"{key}={value} must divide the {ranks} {of} with the other keys given; the "
                f"nearest is {near}"
            )
    if config.model.num_experts == 0 and int(fixed.get("ep", 1)) > 1:
        raise UserError(
            f"ep={fixed['ep']} must be 1 for model={config.model.name}, which has no experts; the "
            "nearest is ep=1"
        )
    check_expert_parallel(config.model.num_experts, int(fixed.get("ep", 1)), ranks // pp)
    if "tp" in fixed and not isinstance(config.model, OwnModelConfig):
        chunks = config.tensor_parallel.chunks
        check_tensor_parallel(config.model, chunks, tp=config.tp, cp=config.cp, sp=config.sp)
    most, why = layers, ", as no stage may be empty"
    if name == "v_half" and layers > MOST_V_HALF:
        most, why = MOST_V_HALF, " with schedule=v_half, which is not priced for more ranks"
    if pp > most:
        raise UserError(f"pp={pp} must be at most {most}{why}; the nearest is {most}")


def no_layout(config: Config, gpus: int, fixed: Fixed) -> str:
    """Returns the error message for a batch size that no layout of these GPUs can divide."""
    batch = config.global_batch_size
    model = math.prod(int(fixed.get(key, 1)) for key in ("tp", "cp", "pp"))
    most = gpus // model
    ways = [d for d in divisors(most) if not fixed.get("dp") or d == fixed["dp"]]
    step = int(fixed.get("micro_batch_size", 1)) * min(ways or [1], key=lambda d: abs(d - most))
    near = max(round(batch / step), 1) * step
    return (
        f"global_batch_size={batch} must be a multiple of dp times the micro-batch in a layout of "
        f"{gpus} GPUs with the other keys given; the nearest is {near}"
    )


def fits_nowhere(found: Plan, fixed: Fixed) -> str:
    """Returns the error message for a model that fits no layout.

    The message names the missing memory and the nearest remedy.
    """
    config, memory = found.config, float(found.sizes["memory_bytes"])
    least = int(np.nanargmin(found.priced.memory))
    choice, needed = found.priced.choices[least], float(found.priced.memory[least])
    if file := config.cluster.file:
        where, available = f"of the ranks of cluster={file}", f"{memory / GIB:.1f} GiB of a rank"
        words = "the model must be smaller"
        if not found.is_own:
            words = _fewer_layers(found, choice)
    else:
        nodes = config.cluster.nodes or 1
        where, available = f"on cluster.nodes={nodes}", f"{memory / GIB:.0f} GiB of a GPU"
        words = "cluster.nodes must be larger, "
        words += _nodes_that_fit(found, fixed, nodes, needed)
    return (
        f"model={config.model.name} fits no layout {where}: the smallest ({typed_keys(choice)}) "
        f"needs {(needed - memory) / GIB:.1f} GiB more than the {available}; "
        f"{words}"
    )


def _nodes_that_fit(found: Plan, fixed: Fixed, nodes: int, needed: float) -> str:
    """Returns the end of the message of `fits_nowhere`: a number of nodes that suffices.

    The nodes are doubled until a layout that saves memory fits. `needed` is the number of bytes per
    GPU that the smallest layout on `nodes` nodes needs.
    """
    config, sizes = found.config, found.sizes
    node, memory = config.cluster.gpus_per_node or 8, float(sizes["memory_bytes"])
    domain, reserve, tell = int(sizes["gpus_per_node"]), 1e9 * found.reserve_gb, progress()
    spared: dict[str, Any] = {"recompute": FULL, "micro_batch_size": 1}
    if not {"schedule", "vpp"} & {*fixed}:
        spared |= {"schedule": "1f1b", "vpp": 1}
    while 2 * nodes <= _MOST_NODES:
        nodes, before = 2 * nodes, needed
        batch = max(config.global_batch_size, nodes * node)
        tried = list(layouts(sizes, nodes * node, domain, batch, {**spared, **fixed}, (1, 3)))
        if not tried:
            continue
        tell(f"does it fit cluster.nodes={nodes}")
        grown = replace(config, global_batch_size=batch)
        least = least_memory(grown, tried, tell, found.load)[1] + reserve
        if least <= memory:
            words = f"and the nearest that suffices is cluster.nodes={nodes}"
            more = batch != config.global_batch_size
            return words + (f" global_batch_size={batch}" if more else "")
        needed = min(needed, least)
        if needed > _STILL * before:  # more ranks cannot shard the memory much further
            break
    return f"but no number that was tried, up to {nodes}, suffices"


def _fewer_layers(found: Plan, choice: LayoutChoice) -> str:
    """Returns the end of the message of `fits_nowhere` for a measured machine.

    The text names the largest number of layers that fits.
    """
    config, step = found.config, choice.pp * choice.vpp
    for layers in range((config.model.num_layers - 1) // step * step, 0, -step):
        smaller = replace(config, model=replace(config.model, num_layers=layers))
        needed = memory_of(smaller, choice, found.load) + 1e9 * found.reserve_gb
        if needed <= found.sizes["memory_bytes"]:
            return f"model.num_layers must be smaller, and the nearest that fits is {layers}"
    return "model.hidden_size must be smaller, because no number of layers fits"
