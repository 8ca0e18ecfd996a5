"""Tests that a loss that counts its items trains as plain PyTorch does, under every layout.

The reference is written from the promise alone: the gradients are those of Σ sum / Σ count over the
global batch. Items have weights, so the counts of micro-batches and replicas are unequal, and one
step has no items at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.errors import UserError
from parallel3d.models.cross_entropy import vocab_parallel_cross_entropy
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.own_loss import Loss
from parallel3d.models.own_model import Model, Parallel, own_config
from parallel3d.run_config import Config
from parallel3d.tensor_parallel.embedding import VocabParallelEmbedding
from parallel3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.distributed.pool import Pool

BATCH, STEPS, RATE = 8, 6, 0.05
EMPTY = 3  # the step, counted from 0, whose samples have no weight
CLIP = 0.3  # below most norms of these steps
VALID = 11  # held-out samples: a batch and a part of one


class Points:
    """Noisy points of a curve; their weights differ, and those of some samples are zero."""

    windows = VALID

    def __init__(self, empty: bool = True) -> None:
        self.empty = empty

    def sample(self, i: int) -> dict[str, Any]:
        random = np.random.default_rng(i)
        x = random.normal(size=3)
        mask = random.integers(0, 4, 2) * 0.75 + (i == 0)
        if self.empty and i // BATCH == EMPTY:
            mask = np.zeros(2)
        return {"x": x, "y": np.stack([np.sin(x.sum()), x[0]]), "loss_mask": mask}


class Endless:
    """`Points` without an end, for training."""

    def sample(self, i: int) -> dict[str, Any]:
        return Points().sample(i)


class Into(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(3, width)

    def forward(self, inputs: LayerInputs) -> Tensor:
        return self.into(inputs.batch["x"])


class Block(nn.Module):
    def __init__(self, width: int, parallel: Parallel) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(width, 2 * width, group=parallel.tp)
        self.down = RowParallelLinear(2 * width, width, group=parallel.tp)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Out(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        return self.out(x)


@dataclass
class Curve(Model):
    """Fits a curve by weighted squares."""

    num_layers: int = 4
    width: int = 8
    size: float = 1.0

    def embedding(self, parallel: Parallel) -> nn.Module:
        return Into(self.width)

    def block(self, number: int, parallel: Parallel) -> nn.Module:
        return Block(self.width, parallel)

    def head(self, parallel: Parallel) -> nn.Module:
        return Out(self.width)

    def loss(self, outputs: Tensor, inputs: LayerInputs) -> Loss:
        wide = outputs.double()
        error = wide - inputs.batch["y"].double()
        weights = inputs.batch["loss_mask"].double()
        terms = {"absolute": (error.abs() * weights).sum()}
        if inputs.samples is None:
            terms["first"] = (error[:, 0].abs() * weights[:, 0]).sum()
        return Loss(self.size * (error.square() * weights).sum(), weights.sum(), terms)


class OneRankOnly(Curve):
    """Returns another term on one replica."""

    def loss(self, outputs: Tensor, inputs: LayerInputs) -> Loss:
        loss = super().loss(outputs, inputs)
        assert inputs.samples is None or len(inputs.samples)
        is_second = inputs.samples is not None and int(inputs.samples[0]) % BATCH >= BATCH // 2
        return replace(loss, terms={"other": 1.0}) if is_second else loss


class Run(NamedTuple):
    """What a rank has seen: a row a step, the scores after them, and full weights on rank 0."""

    steps: list[tuple[float | None, float, bool, dict[str, float]]]
    score: tuple[float | None, float, dict[str, float]]
    initial: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    average: dict[str, np.ndarray]


Keys = Mapping[str, Any]
PLAIN: Keys = {}


def config_of(sizes: Sequence[int], model: Model, keys: Keys, micro: int) -> Config:
    tp, pp, dp = sizes
    config = Config(tp=tp, pp=pp, dp=dp, device="cpu", global_batch_size=BATCH)
    config = replace(config, micro_batch_size=micro, model=own_config(ModelConfig(), model))
    config.precision.name = "fp64"
    config.train.steps = STEPS
    config.train.eval_batches = None
    config.optim.name = "sgd"
    config.optim.momentum = config.optim.weight_decay = 0.0
    config.optim.lr, config.optim.lr_decay_style = RATE, "constant"
    config.optim.clip_grad = CLIP
    config.data.name = "own"
    for name, value in keys.items():
        section, _, leaf = name.rpartition(".")
        setattr(getattr(config, section) if section else config, leaf, value)
    return config


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy().copy() for name, tensor in tensors.items()}


def trained(
    sizes: Sequence[int], model: Model, keys: Keys = PLAIN, micro: int = 1, eval_every: int = 0
) -> Run:
    """Trains on the ranks of a layout; runs on every rank."""
    groups = ProcessGroups.create(Layout(*sizes), "cpu", timeout_s=300)
    config = config_of(sizes, model, keys, micro)
    own = torch.optim.NAdam if config.optim.name == "own" else None
    trainer = Trainer(
        config,
        groups,
        torch.device("cpu"),
        train_source=Endless(),
        valid_source=Points(False),
        optimizer=own,
    )
    initial, steps = arrays(trainer.full_parameters()), []
    for step in range(STEPS):
        result = trainer.train_step()
        steps.append((result.loss, result.grad_norm, result.skipped, dict(result.terms)))
        if eval_every and step % eval_every == 0:
            trainer.evaluate()
    score = trainer.score(trainer.held_out)
    average = {}
    if config.optim.ema_decay is not None:
        with trainer.ema_weights():
            average = arrays(trainer.full_parameters())
    weights = arrays(trainer.full_parameters())
    groups.close()
    scored = score.loss, float(score.tokens), dict(score.terms or {})
    return Run(steps, scored, initial, weights, average)


# The reference: one process, plain PyTorch, the whole batch at once


def linear(weights: Mapping[str, Tensor], x: Tensor, name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def blocks(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    for number in range(Curve.num_layers):
        wide = torch.tanh(linear(weights, x, f"layers.{number}.up"))
        x = x + linear(weights, wide, f"layers.{number}.down")
    return x


def outputs_of(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return linear(weights, blocks(weights, linear(weights, x, "embedding.into")), "head.out")


def sums(
    weights: Mapping[str, Tensor], source: Any, numbers: Sequence[int]
) -> tuple[Tensor, float, Tensor]:
    """Returns the sum of the squares, of the weights and of the absolute errors."""
    samples = [source.sample(i) for i in numbers]
    x, y, mask = (
        torch.tensor(np.stack([sample[name] for sample in samples]))
        for name in ("x", "y", "loss_mask")
    )
    error = outputs_of(weights, x) - y
    absolute = error.abs() * mask
    return (error.square() * mask).sum(), float(mask.sum()), absolute.sum()


def reference(initial: Mapping[str, np.ndarray], sizes: Sequence[int] = (BATCH,) * STEPS) -> Run:
    """Trains by SGD with clipping."""
    weights = {name: torch.tensor(w).requires_grad_() for name, w in initial.items()}
    steps: list[Any] = []
    first = 0
    for size in sizes:
        total, count, absolute = sums(weights, Endless(), range(first, first + size))
        first += size
        if not count:
            steps.append((None, 0.0, True, {}))
            continue
        loss = total / count
        grads = torch.autograd.grad(loss, list(weights.values()))
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        with torch.no_grad():
            for weight, grad in zip(weights.values(), grads, strict=True):
                weight -= RATE * min(1.0, CLIP / (norm + 1e-6)) * grad
        steps.append((loss.item(), norm, False, {"absolute": absolute.item() / count}))
    with torch.no_grad():
        total, count, absolute = sums(weights, Points(False), range(VALID))
    score = (total / count).item(), count, {"absolute": absolute.item() / count}
    after = {name: weight.detach().numpy() for name, weight in weights.items()}
    return Run(steps, score, dict(initial), after, {})


def assert_equal(found: Run, expected: Run, rel: float = 1e-12) -> None:
    for step, (mine, theirs) in enumerate(zip(found.steps, expected.steps, strict=True)):
        assert mine[2] == theirs[2], f"step {step}"
        if theirs[0] is None:
            assert mine[:2] == (None, 0.0), f"step {step}"
            continue
        assert mine[:2] == pytest.approx(theirs[:2], rel=rel), f"step {step}"
        assert mine[3] == pytest.approx(theirs[3], rel=rel), f"step {step}"
    assert found.score[:2] == pytest.approx(expected.score[:2], rel=rel)
    assert found.score[2]["absolute"] == pytest.approx(expected.score[2]["absolute"], rel=rel)
    assert set(found.score[2]) == {"absolute", "first"}
    for name, weight in expected.weights.items() if found.weights else ():
        np.testing.assert_allclose(found.weights[name], weight, rtol=rel, atol=rel, err_msg=name)


LAYOUTS = {
    "one process": ((1, 1, 1), {}, 2),
    "micro-batches": ((1, 2, 1), {}, 1),
    "interleaved": ((1, 2, 1), {"schedule.name": "interleaved", "vpp": 2}, 1),
    "zero-bubble": ((1, 2, 1), {"schedule.name": "zb_h1"}, 1),
    "replicas": ((1, 1, 4), {"zero": 1}, 1),
    "tp": ((2, 1, 2), {"zero": 2}, 2),
    "all": ((2, 2, 1), {}, 2),
    "sharded": ((1, 2, 2), {"zero": 3}, 1),
}


@pytest.mark.nightly  # test_own_model.py has a layout of each kind in the default set
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_plain_pytorch_does(pool: Pool, name: str) -> None:
    sizes, keys, micro = LAYOUTS[name]
    ranks = pool.run(math.prod(sizes), trained, sizes, Curve(), keys, micro, 2)
    expected = reference(ranks[0].initial)
    assert expected.steps[EMPTY][2] and min(step[1] for step in expected.steps[:2]) > CLIP
    for found in ranks:
        assert_equal(found, expected)


SAME = {
    "adamw": {"optim.name": "adamw", "optim.weight_decay": 0.1, "optim.ema_decay": 0.5},
    "muon": {"optim.name": "muon", "optim.momentum": 0.9},
    "momentum": {"optim.momentum": 0.9, "optim.ema_decay": 0.75},
    "own": {"optim.name": "own", "optim.weight_decay": 0.1},  # torch.optim.NAdam
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAME)
def test_other_optimizers_step_the_same_however_the_batch_is_split(pool: Pool, name: str) -> None:
    (expected,) = pool.run(1, trained, (1, 1, 1), Curve(), SAME[name], BATCH)
    (larger,) = pool.run(1, trained, (1, 1, 1), Curve(size=1.0), SAME[name], 1)
    found = pool.run(2, trained, (1, 1, 2), Curve(), SAME[name] | {"zero": 1}, 2)
    for run in (larger, found[0]):
        assert_equal(run, expected, 1e-9)
        for which in ("weights", "average"):
            for at, weight in getattr(expected, which).items():
                np.testing.assert_allclose(getattr(run, which)[at], weight, rtol=1e-9, atol=1e-12)
    assert (expected.average != {}) == ("optim.ema_decay" in SAME[name])


@pytest.mark.nightly
def test_a_batch_schedule_changes_the_count_but_not_the_mean(pool: Pool) -> None:
    keys = {"train.batch_schedule": {0: 4, 8: BATCH}}
    ranks = pool.run(2, trained, (1, 1, 2), Curve(), keys, 1)
    expected = reference(ranks[0].initial, [4, 4, *[BATCH] * (STEPS - 2)])
    for found in ranks:
        assert_equal(found, expected)


def scaled(model: Model, keys: Keys) -> list[tuple[bool, float, float, bool]]:
    """Returns whether each step was skipped, its norm, its loss scale, and whether the weights
    stayed; runs on every rank."""
    groups = ProcessGroups.create(Layout(1, 1, 2), "cpu", timeout_s=300)
    config = config_of((1, 1, 2), model, {"precision.name": "fp16"} | keys, 2)
    trainer = Trainer(config, groups, torch.device("cpu"), train_source=Endless())
    seen = []
    for _ in range(STEPS):
        scale = trainer.loss_scale.scale
        before = [s.values[name].clone() for s in trainer.parameter_slices() for name in s.values]
        result = trainer.train_step()
        after = [s.values[name] for s in trainer.parameter_slices() for name in s.values]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        seen.append((result.skipped, result.grad_norm, scale, same))
    groups.close()
    return seen


@pytest.mark.nightly
def test_the_loss_scale_of_fp16_does_not_change_the_step_and_finds_overflows(pool: Pool) -> None:
    small, large = (
        pool.run(2, scaled, Curve(), {"precision.loss_scale": scale})[0] for scale in (64.0, 4096.0)
    )
    assert [row[0] for row in small] == [row[0] for row in large] == [n == EMPTY for n in range(6)]
    for mine, theirs in zip(small, large, strict=True):
        assert mine[1] == pytest.approx(theirs[1], rel=0.02)  # half precision
    dynamic = {"precision.initial_loss_scale": 2.0**24, "precision.loss_scale_hysteresis": 1}
    for seen in pool.run(2, scaled, Curve(), dynamic):
        skipped = [row[0] for row in seen]
        scales = [row[2] for row in seen]
        assert skipped[0] and [row[3] for row in seen] == skipped
        for step in range(STEPS - 1):  # only an overflow halves the scale
            falls = skipped[step] and step != EMPTY
            assert scales[step + 1] == scales[step] / (2 if falls else 1)


def refused() -> str:
    groups = ProcessGroups.create(Layout(1, 1, 2), "cpu", timeout_s=300)
    config = config_of((1, 1, 2), OneRankOnly(), {}, 2)
    trainer = Trainer(config, groups, torch.device("cpu"), train_source=Endless())
    try:
        trainer.train_step()
    except UserError as error:
        return str(error)
    finally:
        groups.close()
    return ""


@pytest.mark.nightly
def test_ranks_with_other_terms_are_refused_on_every_rank(pool: Pool) -> None:
    for said in pool.run(2, refused):
        assert said.startswith("the loss returned the terms (other) on rank 1 and (absolute) on ra")


def evaluated(size: int) -> str:
    class Unmasked:
        windows = size

        def sample(self, i: int) -> dict[str, Any]:
            sample = Points(False).sample(i)
            return {"x": sample["x"], "y": sample["y"]}

    class Plain(Curve):
        def loss(self, outputs: Tensor, inputs: LayerInputs) -> Loss:
            return Loss((outputs - inputs.batch["y"]).square().sum(), len(outputs))

    config = config_of((1, 1, 1), Plain(), {}, 1)
    try:
        trainer = Trainer(
            config,
            ProcessGroups.single(),
            torch.device("cpu"),
            train_source=Endless(),
            valid_source=Unmasked(),
        )
    except UserError as error:
        return str(error)
    return str(trainer.score(trainer.held_out).tokens)


def test_samples_that_cannot_be_masked_are_evaluated_in_whole_batches() -> None:
    assert evaluated(BATCH + 3) == str(BATCH)
    assert evaluated(BATCH - 1).startswith(f"fit(valid=…) has {BATCH - 1} samples without a field")


# A text, whose vocabulary is split over tp

VOCABULARY, LENGTH, SMOOTHING, Z = 12, 5, 0.1, 1e-2


class Text:
    seq_length = LENGTH

    def sample(self, i: int) -> Sample:
        random = np.random.default_rng(i)
        mask = random.random(LENGTH) < (0.2, 0.9)[i % 2]
        return Sample(random.integers(0, VOCABULARY, LENGTH + 1), mask)


class Words(nn.Module):
    def __init__(self, width: int, tp: Group) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(VOCABULARY, width, group=tp)

    def forward(self, inputs: LayerInputs) -> Tensor:
        return self.table(inputs.batch["tokens"])


class Logits(nn.Module):
    def __init__(self, width: int, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.project = ColumnParallelLinear(width, VOCABULARY, group=tp)

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Group]:
        return self.project(x), self.tp


@dataclass
class Language(Curve):
    """Predicts the next token, with label smoothing and a z-loss."""

    vocab_size: int = VOCABULARY
    seq_length: int = LENGTH

    def embedding(self, parallel: Parallel) -> nn.Module:
        return Words(self.width, parallel.tp)

    def head(self, parallel: Parallel) -> nn.Module:
        return Logits(self.width, parallel.tp)

    def loss(self, outputs: tuple[Tensor, Group], inputs: LayerInputs) -> Loss:
        logits, tp = outputs
        labels, mask = inputs.batch["labels"], inputs.batch["loss_mask"]
        return vocab_parallel_cross_entropy(
            logits, labels, mask, tp, label_smoothing=SMOOTHING, z_loss=Z
        )


def read(sizes: Sequence[int], micro: int) -> tuple[list[Any], dict[str, np.ndarray], list[Any]]:
    """Returns the initial weights, and for each step its loss, norm, terms and tokens; runs on
    every rank."""
    groups = ProcessGroups.create(Layout(*sizes), "cpu", timeout_s=300)
    config = config_of(sizes, Language(), {"train.eval_batches": 1}, micro)
    trainer = Trainer(config, groups, torch.device("cpu"), train_source=Text(), valid_source=Text())
    initial = arrays(trainer.full_parameters())
    scores = [trainer.evaluate()]
    steps = []
    for _ in range(2):
        result = trainer.train_step()
        steps.append((result.loss, result.grad_norm, dict(result.terms), result.tokens))
    scores.append(trainer.evaluate())
    groups.close()
    return steps, initial, scores


def text_losses(weights: Mapping[str, Tensor], first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean loss, cross-entropy and z-loss of a batch, by their formulas."""
    samples = [Text().sample(i) for i in range(first, first + BATCH)]
    tokens = torch.tensor(np.stack([sample.tokens for sample in samples]))
    mask = torch.tensor(np.stack([sample.loss_mask for sample in samples]))
    x = weights["embedding.table.weight"][tokens[:, :-1]]
    logits = linear(weights, blocks(weights, x), "head.project")
    log = torch.log_softmax(logits, -1)
    of_label = -log.gather(-1, tokens[:, 1:, None])[..., 0]
    z = Z * torch.logsumexp(logits, -1).square()
    smooth = (1 - SMOOTHING) * of_label - SMOOTHING * log.mean(-1)
    whole, plain, of_z = (((each * mask).sum() / mask.sum()) for each in (smooth + z, of_label, z))
    return whole, plain, of_z


@pytest.mark.nightly
@pytest.mark.parametrize(("sizes", "micro"), [((2, 1, 2), 2), ((2, 2, 1), 1)])
def test_a_text_whose_vocabulary_is_split_has_the_loss_of_the_formula(
    pool: Pool, sizes: tuple[int, ...], micro: int
) -> None:
    ranks = pool.run(math.prod(sizes), read, sizes, micro)
    weights = {name: torch.tensor(w).requires_grad_() for name, w in ranks[0][1].items()}
    scores = [text_losses(weights, 0)[1].item()]
    expected = []
    for step in range(2):
        loss, plain, z = text_losses(weights, step * BATCH)
        grads = torch.autograd.grad(loss, list(weights.values()))
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        expected.append((loss.item(), norm, {"cross_entropy": plain.item(), "z_loss": z.item()}))
        with torch.no_grad():
            for weight, grad in zip(weights.values(), grads, strict=True):
                weight -= RATE * min(1.0, CLIP / (norm + 1e-6)) * grad
    scores.append(text_losses(weights, 0)[1].item())
    for steps, _, found in ranks:
        assert found == pytest.approx(scores, rel=1e-12)
        for mine, theirs in zip(steps, expected, strict=True):
            assert mine[:2] == pytest.approx(theirs[:2], rel=1e-12)
            assert mine[2] == pytest.approx(theirs[2], rel=1e-12)
            assert mine[3] == BATCH * LENGTH
