"""Mixtures of experts that one card trains, for `benchmarks.gpu.experts` and `gpu_first`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from benchmarks.gpu.commands import (
    UNSAVED,
    command_line_missing,
    compared,
    dry_run,
    learns,
    model_words,
    new_run,
    run_words,
    speed_sentence,
    trained,
)
from benchmarks.gpu.first_values import ROUNDED, SUMMED, WIDE, relative_error
from benchmarks.gpu.rows import MAX_GRAD_NORM, RandomTokens, model_of, seconds_of
from benchmarks.gpu.tasks import NOTED, Given, Row, judged
from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.device.grouped import Groups
from parallel3d.device.wide import wide_linear
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config

PEAK_OFF = 0.03  # tolerance of a peak, as a share of the dry run's
TINY = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 32}
RATE = 1e-4


@dataclass(frozen=True)
class Mixture:
    """A model of a preset's widths that fits one card, and its step.

    Attributes:
        changes: keys of the model that differ from the preset's.
        micro_batch, sequences: numbers of sequences in a micro-batch and in a step, of 4,096 tokens
            each.
        mfu: share of the datasheet's peak that the active FLOPs should reach.
    """

    preset: str
    micro_batch: int
    sequences: int
    mfu: float
    changes: dict[str, Any] = field(default_factory=dict)

    def model(self, given: Given) -> ModelConfig:
        """Returns the model, or at the tiny size one of its kind."""
        size = given.steps()
        changes = self.changes | (TINY | size.changes if given.is_tiny else {})
        return dataclasses.replace(model_of(self.preset, size), **changes)

    def batch(self, given: Given) -> tuple[int, int]:
        """Returns the micro-batch and the sequences of a step."""
        return (1, 2) if given.is_tiny else (self.micro_batch, self.sequences)

    def words(self, given: Given) -> list[str]:
        """Returns the keys of a run, and of its dry run."""
        micro_batch, sequences = self.batch(given)
        model = self.changes | {"seq_length": 4096}
        full = [f"model={self.preset}", *(f"model.{key}={value}" for key, value in model.items())]
        experts = [f"model.{key}={value}" for key, value in TINY.items()]
        return [
            *model_words(given, *full),
            *(experts if given.is_tiny else ()),
            *("precision=bf16", f"micro_batch_size={micro_batch}"),
            *(f"global_batch_size={sequences}", f"train.steps={5 if given.is_tiny else 20}"),
            *UNSAVED,
        ]


# 2.7 B parameters of OLMoE; as many experts as a rank of Qwen3-30B at ep=8 has, and as many rows of
# each, but no communication: 1.8 B parameters.
MIXTURES = {
    "olmoe": Mixture("olmoe_1b_7b", 4, 16, 0.40, {"num_layers": 6}),
    "qwen3 shard": Mixture("qwen3_30b_a3b", 1, 8, 0.38, {"num_layers": 12, "num_experts": 16}),
}


class Repeated:
    """Returns the same random sequences in each step."""

    masks = False

    def __init__(self, model: ModelConfig, sequences: int) -> None:
        self.tokens, self.sequences = RandomTokens(model), sequences
        self.seq_length = model.seq_length

    def sample(self, i: int) -> Sample:
        return self.tokens.sample(i % self.sequences)


def trainer_of(mixture: Mixture, given: Given, micro_batch: int, routing: str = "model") -> Trainer:
    """Makes our trainer on this device, in bf16. `routing`: `moe.routing`."""
    _, sequences = mixture.batch(given)
    config = Config(micro_batch_size=micro_batch, global_batch_size=sequences)
    config.model, config.precision.name, config.moe.routing = mixture.model(given), "bf16", routing
    config.device = given.device.type
    optim = config.optim
    optim.lr, optim.lr_decay_style, optim.weight_decay = RATE, "constant", 0.0
    optim.clip_grad = MAX_GRAD_NORM
    source = Repeated(config.model, sequences)
    return Trainer(config, ProcessGroups.single(), given.device, train_source=source)


def train(given: Given, name: str) -> Row:
    """Runs `parallel3d train` for a mixture, with its router's own choices."""
    if (missing := command_line_missing()) is not None:
        return missing
    mixture, run_dir = MIXTURES[name], new_run(given, "mixture")
    figures = trained([*mixture.words(given), *run_words(given, run_dir)], run_dir)
    figures["load"] = _loads(run_dir)[-1]
    is_right = learns(figures["losses"])
    if given.is_timed:
        is_right = is_right and figures["mfu"] >= mixture.mfu
    found = f"{speed_sentence(figures)}, load {figures['load']:.2f}"
    return judged(is_right, found, figures)


def _loads(run_dir: Path) -> list[float]:
    """Returns the tokens of the fullest expert over the mean, in the worst layer of each step."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row["experts"]["load"] for row in map(json.loads, lines) if "experts" in row]
    return [max(row.values()) for row in rows]


def dryrun(given: Given, name: str, of: str) -> Row:
    """Runs `parallel3d dryrun` for it, and compares it with the run of the line `of`."""
    if (missing := command_line_missing()) is not None:
        return missing
    foretold = dry_run(given, *MIXTURES[name].words(given), f"device={given.device.type}")
    found = compared(foretold, given.earlier.get(of, {}), PEAK_OFF)
    return found if given.is_timed else found | {"verdict": NOTED}


@dataclass(frozen=True)
class Sizes:
    """Rows of OLMoE's experts: as an even choice has, or all of one expert."""

    rows: int
    hidden: int
    inner: int
    experts: int


FULL, SMALL = Sizes(32768, 2048, 2048, 64), Sizes(96, 32, 48, 8)
BEHIND = 5  # rows after the last group, which are NaN


def counts_of(kind: str, sizes: Sizes) -> list[int]:
    """Returns the rows of each expert, of which several have none."""
    counts = [0] * sizes.experts
    if kind == "all of one expert":
        counts[sizes.experts // 2] = sizes.rows
        return counts
    chosen = range(0, sizes.experts, 1 if kind == "all alike" else 2)
    for place, expert in enumerate(chosen):
        extra = sizes.rows * place // len(chosen)
        counts[expert] = sizes.rows * (place + 1) // len(chosen) - extra
    return counts


def products(given: Given) -> Row:
    """Compares the products of experts' rows with float64: both GEMMs, and the weight gradient,
    which must be added in fp32, change nothing of an expert without rows, and read no row behind
    the last one."""
    sizes = SMALL if given.is_tiny else FULL
    cases = {}
    for kind in ("all alike", "half without rows", "all of one expert"):
        cases[kind] = _products(given, sizes, counts_of(kind, sizes))
    cases["router"] = _router(given, sizes)
    off = [f"{case}: {name}" for case, row in cases.items()
           for name, (error, limit) in row["errors"].items() if not error <= limit]  # fmt: skip
    said = [f"{case}: " + ", ".join(f"{n} {e:.1e}" for n, (e, _) in row["errors"].items())
            for case, row in cases.items()]  # fmt: skip
    found = "too far off: " + "; ".join(off) if off else "; ".join(said)
    if given.is_timed:
        ms = cases["all alike"]["ms"]
        found += "; ms, all alike: " + ", ".join(f"{name} {t:.3f}" for name, t in ms.items())
    return judged(not off, found, {"cases": cases})


def _products(given: Given, sizes: Sizes, counts: list[int]) -> Row:
    draws = torch.Generator(given.device.type if given.device.type == "cuda" else "cpu")
    draws.manual_seed(1)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        made = torch.randn(shape, generator=draws, device=draws.device)
        return made.to(given.device, dtype)

    groups = Groups.of(torch.tensor(counts, device=given.device), None)
    x, grad = random(sizes.rows + BEHIND, sizes.hidden), random(sizes.rows + BEHIND, sizes.inner)
    x[sizes.rows :], grad[sizes.rows :] = torch.nan, torch.nan
    up = random(sizes.experts, sizes.inner, sizes.hidden)
    start = random(sizes.experts, sizes.inner, sizes.hidden, dtype=torch.float32)
    added = start.clone()
    operators = torch.ops.parallel3d
    forward = operators.grouped_matmul(groups.ends, x, up.transpose(1, 2))
    backward = operators.grouped_matmul(groups.ends, grad, up)
    operators.add_products(added, groups.ends, grad, x)
    exact_forward, exact_backward = torch.zeros_like(forward), torch.zeros_like(backward)
    wanted, first, changed = start.double(), 0, 0.0
    exact_forward, exact_backward = exact_forward.double(), exact_backward.double()
    for expert, count in enumerate(counts):
        rows = slice(first, first + count)
        exact_forward[rows] = x[rows].double() @ up[expert].double().t()
        exact_backward[rows] = grad[rows].double() @ up[expert].double()
        wanted[expert] += grad[rows].double().t() @ x[rows].double()
        if not count:
            changed += float((added[expert] - start[expert]).abs().sum())
        first += count
    here = slice(0, sizes.rows)
    errors = {
        "rows": (relative_error([forward[here]], [exact_forward[here]]), ROUNDED),
        "rows' gradients": (relative_error([backward[here]], [exact_backward[here]]), ROUNDED),
        "weight gradient": (relative_error([added], [wanted]), SUMMED),
        "of experts without rows": (changed, 0.0),
    }
    row: Row = {"errors": errors}
    if given.is_timed:
        calls = {
            "rows": lambda: operators.grouped_matmul(groups.ends, x, up.transpose(1, 2)),
            "weight gradient": lambda: operators.add_products(added, groups.ends, grad, x),
            "PyTorch's, and a sum": lambda: added.add_(grouped_mm(grad.t(), x, offs=groups.ends)),
        }
        row["ms"] = {
            name: 1e3 * seconds_of(call, given.device, given.steps())
            for name, call in calls.items()
        }
    return row


def _router(given: Given, sizes: Sizes) -> Row:
    """Compares the router's GEMM, whose result must be fp32, with float64."""
    torch.manual_seed(1)
    x = torch.randn(sizes.rows, sizes.hidden).bfloat16().to(given.device)
    weight = torch.randn(sizes.experts, sizes.hidden).bfloat16().to(given.device)
    found = wide_linear(x, weight)
    exact = x.double() @ weight.double().t()
    error = relative_error([found], [exact]) if found.dtype == torch.float32 else float("inf")
    return {"errors": {"logits": (error, WIDE)}}
