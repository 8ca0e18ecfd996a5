"""Runs cases on real ranks and compares them with the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups, shards_and_replicas
from parallel3d.estimate.search import with_style
from parallel3d.parameters.gather import gather_shards
from parallel3d.parameters.spec import ShardSpec
from parallel3d.run_config import Config
from parallel3d.trainer import StepResult
from tests.distributed.cases import (
    DTYPES,
    Case,
    Problem,
    UnequalMasks,
    dead_weights,
)
from tests.distributed.pool import Pool
from tests.distributed.simulated import here
from tests.reference.train import ReferenceRun, batch_loss, build, is_frozen, train_reference

T = TypeVar("T")
Sizes = tuple[int, ...]  # sizes tp, pp and dp; also cp if it is not 1, and ep with experts


class Step(NamedTuple):
    """A StepResult as plain numbers."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    # With experts: tokens of each expert by layer, and the sums over layers of both losses and of
    # the entropy of the scores.
    counts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    aux: float = 0.0
    z: float = 0.0
    entropy: float = 0.0

    @classmethod
    def of(cls, result: StepResult) -> Step:
        """Returns the numbers of a step."""
        plain = (result.step, result.loss, result.grad_norm, result.lr, result.tokens)
        figures = result.experts
        if figures is None:
            return cls(*plain)
        counts = tuple((layer, tuple(each)) for layer, each in figures.counts.items())
        sums = (sum(each.values()) for each in (figures.aux, figures.z, figures.entropy))
        return cls(*plain, counts, *sums)


@dataclass
class Outcome:
    """The results of one case on one rank; weights are world rank 0's, by full name."""

    steps: list[Step]
    evaluation: float | None = 0.0  # losses of the validation set after the last step
    initial: dict[str, str] = field(default_factory=dict)  # digests
    final: dict[str, np.ndarray] = field(default_factory=dict)
    # the average of the weights, with ema_decay
    average: dict[str, np.ndarray] = field(default_factory=dict)
    # The largest distance of a shard on any rank from `final`, and the name of its parameter.
    replicas: tuple[float, str] = (0.0, "")
    biases: dict[str, np.ndarray] = field(default_factory=dict)  # biases of this rank's routers


def digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns a hash of each tensor's shape, dtype and bits; dtypes below fp32 are converted."""
    return {
        name: hashlib.sha256(f"{w.shape} {w.dtype}".encode() + w.tobytes()).hexdigest()
        for name, w in ((name, array(weight)) for name, weight in weights.items())
    }


def array(weight: Tensor) -> np.ndarray:
    """Returns a copy in a dtype that numpy has."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide, copy=True).numpy()


def source_of(problem: Problem, config: Config) -> UnequalMasks:
    """Returns the samples of a problem."""
    model = config.model
    given = (problem.documents, problem.ranks, problem.padding)
    return UnequalMasks(model.vocab_size, model.seq_length, *given)


def make_trainer(case: Case, groups: ProcessGroups) -> Trainer:
    """Returns a trainer of `case` on this rank, whose samples have unequal masks."""
    config = with_style(case.config(groups.layout))
    source = source_of(case.problem, config)
    held_out = source_of(case.problem, config)
    held_out.windows = evaluated(case.problem)
    trainer = Trainer(config, groups, here(), train_source=source, valid_source=held_out)
    if case.problem.biases and trainer.balance is not None:
        for bias in trainer.balance.states.values():
            bias.copy_(torch.tensor(case.problem.biases, dtype=bias.dtype))
    return trainer


def evaluated(problem: Problem) -> int:
    """Returns the samples of the validation set: two fewer than a global batch, so the last batch
    is incomplete."""
    return max(1, problem.batch - 2)


def initial_weights_and_rates(problem: Problem) -> tuple[dict[str, np.ndarray], list[float]]:
    """Returns, on one rank, the full initial weights of a problem and the learning rate of each
    step.

    A constant rate needs no training.
    """
    experts = dict(problem.model).get("num_experts", 0) > 0
    groups = ProcessGroups.create(Layout(ep=int(experts)), "cpu", timeout_s=300)
    # Micro-batches of one sample fit any schedule of the batch.
    single = problem.batches or problem.batch % 2
    case = Case(problem, microbatches=problem.batch if single else None)
    trainer = make_trainer(case, groups)
    # These are copies: the trainer may return views of parameters that it is about to train.
    weights = {name: array(w) for name, w in trainer.full_parameters().items()}
    optim = trainer.config.optim
    if optim.lr_decay_style == "constant":
        lrs = [optim.lr] * problem.steps
    else:
        lrs = [trainer.train_step().lr for _ in range(problem.steps)]
    groups.close()
    return weights, lrs


def plain_groups(layout: Layout) -> ProcessGroups:
    """Creates the groups of `layout` as a run without a cluster does."""
    return ProcessGroups.create(layout, here().type, timeout_s=300)


def with_copies_of_two(layout: Layout) -> ProcessGroups:
    """Creates the groups of `layout` for HSDP: each copy of the model is sharded over two
    neighbours."""
    levels = shards_and_replicas(layout, 2)
    return ProcessGroups.create(layout, here().type, timeout_s=300, levels=levels)


def run_cases(
    sizes: Sizes,
    cases: Sequence[Case],
    mutation: Callable[[], AbstractContextManager[None]] = nullcontext,
    make_groups: Callable[[Layout], ProcessGroups] = plain_groups,
) -> list[Outcome]:
    """Trains each case under Layout(*sizes), inside `mutation`; runs on every rank."""
    layout = Layout(*sizes)
    groups = make_groups(layout)
    outcomes = []
    for case in cases:
        try:
            with mutation():
                trainer = make_trainer(case, groups)
                initial = digests(trainer.full_parameters())
                results = [trainer.train_step() for _ in range(case.problem.steps)]
                evaluation = trainer.evaluate() if case.is_evaluated else None
                average = averaged(trainer)
                final = trainer.full_parameters()
                boxes = gather_shards(trainer.parameters.values(), groups)
        except Exception as error:
            error.add_note(f"in case: {case} on rank {dist.get_rank()} of {layout}")
            raise
        steps = [Step.of(result) for result in results]
        arrays = {name: array(weight) for name, weight in final.items()}
        replicas = worst_replica(final, boxes)
        states = {} if trainer.balance is None else trainer.balance.states
        biases = {name: array(bias.cpu()) for name, bias in states.items()}
        outcomes.append(Outcome(steps, evaluation, initial, arrays, average, replicas, biases))
    groups.close()
    return outcomes


def averaged(trainer: Trainer) -> dict[str, np.ndarray]:
    """Returns the full average of the weights, or nothing without one; checks that the weights keep
    their bits."""
    if trainer.config.optim.ema_decay is None:
        return {}
    before = digests(trainer.full_parameters())
    with trainer.ema_weights():
        found = {name: array(weight) for name, weight in trainer.full_parameters().items()}
    assert digests(trainer.full_parameters()) == before
    return found


def worst_replica(
    full: Mapping[str, Tensor], boxes: Sequence[tuple[int, ShardSpec, Tensor]]
) -> tuple[float, str]:
    """Returns the largest max|shard - full| / max|full| over all shards of all ranks, and its
    place."""
    worst = (0.0, "")
    for rank, piece, box in boxes:
        whole = full[piece.name]
        off = (box - piece.of_full(whole)).abs().max().item()
        scale = whole.abs().max().item()
        worst = max(worst, (off / scale if off else 0.0, f"{piece.name} on rank {rank}"))
    return worst


@dataclass
class Expected:
    """Returns the reference's run of a problem, from the initial weights of one process."""

    initial: dict[str, str]  # digests
    lrs: list[float]
    run: ReferenceRun
    evaluation: float
    dead: frozenset[str]


class References:
    """Returns the expected run of each problem, computed once, because it depends on no layout."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[Problem, Expected] = {}
        self.sound: set[tuple[Pool, Sizes, Case]] = set()  # cases found to agree

    def of(self, problem: Problem) -> Expected:
        """Returns the reference's run, and asserts that all weights change."""
        if problem not in self._known:
            self._known[problem] = self._make(problem)
        return self._known[problem]

    def well_conditioned(self, problem: Problem) -> Problem:
        """Returns the problem with the first seed from which rounding changes the reference little,
        and from which all its weights move.

        Some initial weights have a nearly empty query or a rising loss, and rounding errors of a
        single process grow until no comparison below fp32 says anything. With other weights a norm
        of queries, whose rate is low for the same reason, hardly moves.
        """
        if problem.precision not in ROUNDING:
            return problem
        for seed in range(problem.seed, problem.seed + 20):
            seeded = replace(problem, seed=seed)
            if self._shaken(seeded) < STEADY and not self._barely_moved(seeded):
                return seeded
        raise AssertionError(f"rounding changes {problem} too much with 20 seeds")

    def _shaken(self, problem: Problem) -> float:
        """Returns the change of the reference for a rounding error in its initial weights, in units
        of the tolerance."""
        weights, lrs = self._pool.run(1, initial_weights_and_rates, problem)[0]
        plain, tolerance = expected_of(problem, weights, lrs), TOLERANCES[problem.precision]
        draws, most = np.random.default_rng(0), 0.0
        for _ in range(2):
            errors = {
                name: 1 + ROUNDING[problem.precision] * draws.standard_normal(weight.shape)
                for name, weight in weights.items()
            }
            moved = {name: (w * errors[name]).astype(w.dtype) for name, w in weights.items()}
            shaken = expected_of(problem, moved, lrs)
            losses = map(relative, shaken.run.losses, plain.run.losses)
            norms = map(relative, shaken.run.grad_norms, plain.run.grad_norms)
            most = max(
                most,
                max(losses) / tolerance.loss,
                max(norms) / tolerance.grad_norm,
                relative(shaken.evaluation, plain.evaluation) / tolerance.loss,
            )
        return most

    def _barely_moved(self, problem: Problem) -> dict[str, float]:
        """Returns the weights that move too little to be compared, and by how much they move."""
        weights, lrs = self._pool.run(1, initial_weights_and_rates, problem)[0]
        optim = Case(problem).config(Layout(1, 1, 1)).optim
        initial = {name: torch.from_numpy(w) for name, w in weights.items()}
        frozen = {name for name in initial if is_frozen(optim, name)}
        return barely_moved(expected_of(problem, weights, lrs), initial, frozen)

    def _make(self, problem: Problem) -> Expected:
        weights, lrs = self._pool.run(1, initial_weights_and_rates, problem)[0]
        expected = expected_of(problem, weights, lrs)
        run, config = expected.run, Case(problem).config(Layout(1, 1, 1))
        initial = {name: torch.from_numpy(w) for name, w in weights.items()}
        dtype = DTYPES[problem.precision]
        frozen = {name for name in initial if is_frozen(config.optim, name)}
        assert all(torch.equal(run.weights[name], initial[name].to(dtype)) for name in frozen)
        still = barely_moved(expected, initial, frozen)
        assert not still, f"{problem}: moved by these only: {still}"
        clip = config.optim.clip_grad
        assert min(run.grad_norms) > clip, (
            f"{problem}: clipping at {clip} is idle: {run.grad_norms}"
        )
        assert run.margin > MARGIN, f"{problem}: choices are undecided, {run.margin} apart"
        return expected


def barely_moved(
    expected: Expected, initial: Mapping[str, torch.Tensor], frozen: Collection[str]
) -> dict[str, float]:
    """Returns the trained weights that move too little to be compared, and by how much."""
    weights = expected.run.weights
    moved = {
        name: (weights[name] - initial[name]).abs().max().item()
        for name in weights.keys() - expected.dead - {*frozen}
    }
    # A bias of attention moves little, and the bias of keys only if positions distinguish keys. The
    # rates of a recurrence over few tokens do so too, and a bias of an expert of few tokens less.
    little = (".bias", ".A_log", ".dt_bias")
    least = {name: 1e-5 if name.endswith(little) else 1e-4 for name in moved}
    least |= {name: 1e-6 for name in moved if ".experts." in name and name.endswith(".bias")}
    # Those of experts that no token chose stay, as weight decay does not move them either.
    idle = {n for n, most in moved.items() if most == 0 and ".experts." in n and ".bias" in n}
    return {n: most for n, most in moved.items() if most <= least[n] and n not in idle}


def expected_of(
    problem: Problem, weights: Mapping[str, np.ndarray], lrs: Sequence[float]
) -> Expected:
    """Returns the reference's run of a problem from these weights, with these learning rates."""
    initial = {name: torch.from_numpy(w) for name, w in weights.items()}
    config = Case(problem).config(Layout(1, 1, 1))
    source, dtype = source_of(problem, config), DTYPES[problem.precision]
    biases = {}
    if problem.biases:
        first = torch.tensor(problem.biases, dtype=dtype)
        layers = config.model.expert_layers
        biases = {f"layers.{layer}.mlp.router.bias": first for layer in layers}
    run = train_reference(config, initial | biases, source, problem.steps, dtype, list(lrs))
    with torch.no_grad():
        trained = build(config.model, run.weights | run.biases, dtype)
        evaluation = batch_loss(trained, source, 0, evaluated(problem)).item()
    dead = dead_weights(initial, config.model)
    return Expected(digests(initial), list(lrs), run, evaluation, dead)


# A layout changes a score by about 1e-13, so scores this far apart have the same order in all
# layouts.
MARGIN = 1e-8


class Tolerance(NamedTuple):
    """Tolerances: relative differences that are allowed; for weights, max|a - b| / max|b| by tensor
    (None: any)."""

    loss: float
    grad_norm: float
    weights: float | None


# Below fp32 the comparison is with the same training in fp32. On these models bf16 differed by up
# to 2.5e-3 in the loss and 2.8e-2 in the norm, and fp16 by 1.2e-3 and 1.5e-2 (AdamW; a tenth of
# that with SGD).
TOLERANCES = {
    "fp64": Tolerance(1e-9, 1e-9, 1e-9),
    "fp32": Tolerance(1e-5, 1e-4, None),
    "bf16": Tolerance(1e-2, 1e-1, None),
    "fp16": Tolerance(5e-3, 5e-2, None),
}
# Relative errors of a rounded number, and the share of a tolerance that such errors of the initial
# weights may use up in a problem that is compared.
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}
STEADY = 0.7


def relative(ours: float, theirs: float) -> float:
    """Returns |ours - theirs| / |theirs|; infinity if there is a NaN."""
    difference = abs(ours - theirs) / abs(theirs)
    return difference if np.isfinite(difference) else float("inf")


def differences(
    outcomes: Sequence[Outcome], expected: Expected, problem: Problem
) -> dict[str, str]:
    """Returns quantity → the first place at which a run and the reference differ; empty if they
    agree.

    `outcomes` are those of all ranks. Quantities: "ranks" (they report different steps), "counters"
    (step, lr, tokens), "initial weights" (bits), "loss", "grad norm", "evaluation" (after the last
    step), "weights", "average" (of the weights), "replicas" (a rank's copy is not the weight that
    was gathered); with experts "counts", "aux", "z" and "biases".
    """
    found: dict[str, str] = {}
    tolerance = TOLERANCES[problem.precision]
    first = outcomes[0]
    for rank, outcome in enumerate(outcomes):
        reports = [(o.steps, o.evaluation) for o in (outcome, first)]
        if reports[0] != reports[1]:
            found.setdefault("ranks", f"rank {rank} reports {reports[0]}, rank 0 {reports[1]}")
    if first.initial != expected.initial:
        names = sorted(expected.initial.keys() | first.initial.keys())
        bad = [n for n in names if first.initial.get(n) != expected.initial.get(n)]
        found["initial weights"] = f"bits differ from (1,1,1)'s in {bad}"
    for s, step in enumerate(first.steps):
        counted = (s + 1, expected.lrs[s], problem.tokens_of(s))
        if (step.step, step.lr, step.tokens) != counted:
            found.setdefault("counters", f"{step}, expected (step, lr, tokens) = {counted}")
        for name, ours, theirs, limit in (
            ("loss", step.loss, expected.run.losses[s], tolerance.loss),
            ("grad norm", step.grad_norm, expected.run.grad_norms[s], tolerance.grad_norm),
        ):
            if relative(ours, theirs) > limit:
                found.setdefault(name, f"step {s + 1}: {ours!r}, reference {theirs!r}")
    evaluation = first.evaluation
    if evaluation is not None and relative(evaluation, expected.evaluation) > tolerance.loss:
        found["evaluation"] = f"{first.evaluation!r}, reference {expected.evaluation!r}"
    found |= _routing_differences(outcomes, expected, tolerance, problem)
    if tolerance.weights is not None:
        worst = worst_weight(first.final, expected.run.weights, expected.dead)
        if first.replicas[0] > tolerance.weights:
            found["replicas"] = f"{first.replicas[1]} is {first.replicas[0]:.2e} off rank 0's"
        if worst[0] > tolerance.weights:
            found["weights"] = f"{worst[1]} is {worst[0]:.2e} off"
        worst = worst_weight(first.average, expected.run.average, expected.dead)
        if worst[0] > tolerance.weights:
            found["average"] = f"{worst[1]} is {worst[0]:.2e} off"
    return found


def _routing_differences(
    outcomes: Sequence[Outcome], expected: Expected, tolerance: Tolerance, problem: Problem
) -> dict[str, str]:
    """Returns the experts' quantities that differ: "counts" and "biases" exactly, "aux" and "z"
    beyond the tolerance."""
    found: dict[str, str] = {}
    for s, step in enumerate(outcomes[0].steps):
        theirs = expected.run.counts[s] if expected.run.counts else {}
        counts = {layer: tuple(each.tolist()) for layer, each in theirs.items()}
        if dict(step.counts) != counts:
            found.setdefault("counts", f"step {s + 1}: {step.counts}, reference {counts}")
        for name, ours, reference in (
            ("aux", step.aux, expected.run.aux),
            ("z", step.z, expected.run.z),
        ):
            used = counts and dict(problem.moe).get(f"{name}_loss")
            if used and relative(ours, reference[s]) > tolerance.loss:
                found.setdefault(name, f"step {s + 1}: {ours!r}, reference {reference[s]!r}")
    held: set[str] = set()
    for rank, outcome in enumerate(outcomes):
        held |= outcome.biases.keys()
        for name, bias in outcome.biases.items():
            if not np.array_equal(bias, expected.run.biases[name].numpy()):
                found.setdefault("biases", f"{name} on rank {rank}: {bias}")
    if held != expected.run.biases.keys():
        found["biases"] = f"they are those of {sorted(held)}"
    return found


def check_cases(
    sizes: Sizes,
    cases: Sequence[Case],
    pool: Pool,
    references: References,
    *options: Any,
    run: Callable = run_cases,
) -> list[list[Outcome]]:
    """Trains the cases and compares each with its reference; returns their outcomes by rank."""
    by_rank = pool.run(Layout(*sizes).world_size, run, sizes, cases, *options, timeout_s=900)
    outcomes = [list(found) for found in zip(*by_rank, strict=True)]
    failures = []
    for case, found in zip(cases, outcomes, strict=True):
        off = differences(found, references.of(case.problem), case.problem)
        failures += [f"{case}: {off}"] if off else []
    assert not failures, "\n".join(failures)
    return outcomes


def cover(pairs: Mapping[T, frozenset]) -> list[T]:
    """Returns a small set of candidates, found greedily, that together have all of `pairs`."""
    found, left = [], dict(pairs)
    while left:
        best = max(left, key=lambda each: len(left[each]))
        found.append(best)
        held = left[best]
        left = {each: of - held for each, of in left.items() if of - held}
    return found


def worst_weight(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, Tensor], dead: frozenset[str]
) -> tuple[float, str]:
    """Returns the largest max|a - b| / max|b| over the tensors, and its tensor's name.

    Dead weights are compared with their exact value, 0, by max|a|.
    """
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    worst = (0.0, "")
    for name, reference in theirs.items():
        b = reference.double().numpy()
        a = ours[name].astype(np.float64)
        assert a.shape == b.shape, f"{name}: {a.shape}, reference {b.shape}"
        if name in dead:
            off = float(np.abs(a).max())
        else:
            off = float(np.abs(a - b).max())
            off = off / float(np.abs(b).max()) if off else 0.0  # zeros that are frozen
        if not np.isfinite(off):
            off = float("inf")
        worst = max(worst, (off, name))
    return worst


def check_caught(
    mutation: Callable[[], AbstractContextManager[None]],
    sizes: Sizes,
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    """Asserts that the sound run agrees with the reference, and that a planted bug shows in exactly
    the quantities `told_by`."""
    world = Layout(*sizes).world_size
    expected = references.of(case.problem)
    if (pool, sizes, case) not in references.sound:
        sound = [outcomes[0] for outcomes in pool.run(world, run_cases, sizes, [case])]
        assert differences(sound, expected, case.problem) == {}
        references.sound.add((pool, sizes, case))
    mutated = [outcomes[0] for outcomes in pool.run(world, run_cases, sizes, [case], mutation)]
    found = differences(mutated, expected, case.problem)
    assert found.keys() == told_by, found
