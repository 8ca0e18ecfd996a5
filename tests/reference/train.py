"""The reference training loop: one process, the whole global batch in one forward."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tests.reference.mlp import Routing, balance
from tests.reference.model import (
    NO_DROPOUT,
    Dropping,
    ModelShape,
    Packing,
    ReferenceModel,
    objective_losses,
    token_losses,
)
from tests.reference.rounding import chances, rounded


class SampleLike(Protocol):
    """A sample: `tokens` int64 (seq + 1,); `loss_mask` bool (seq,), true where the next token is
    learned.

    It may also have `starts`, int (seq,): the position at which the document of each token begins;
    and `used`, int or None: tokens from that position on are padding, which routers do not count.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray


class Source(Protocol):
    """Anything that gives sample i of the run."""

    def sample(self, i: int) -> SampleLike: ...


class OptimSettings(Protocol):
    """The optimizer's keys."""

    name: str
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    momentum: float
    muon_scale: str
    clip_grad: float
    state: str
    ema_decay: float | None


class RunSettings(Protocol):
    """The keys of a whole configuration that the reference reads."""

    model: Any
    optim: Any
    loss: Any
    moe: Any  # these are only read with experts
    train: Any
    seed: int
    global_batch_size: int


class ReferenceRun(NamedTuple):
    """The results of `train_reference`; tensors by full name, with full shapes."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    first_gradients: dict[str, Tensor]
    average: dict[str, Tensor]  # averages of the weights, with ema_decay
    # for each step, by layer: tokens of each expert, int64 (experts,)
    counts: list[dict[int, Tensor]]
    # for each step, the auxiliary loss without its coefficient, summed over layers
    aux: list[float]
    z: list[float]  # the routers' z-loss, like `aux`
    biases: dict[str, Tensor]  # biases of the routers' choices after the last step
    margin: float  # the smallest margin of any choice; inf without experts


def build(shape: ModelShape, weights: Mapping[str, Tensor], dtype: torch.dtype) -> ReferenceModel:
    """Returns a model with exactly these weights; a missing or unknown name raises RuntimeError.

    The weights may include the biases of routers, which are 0 otherwise.
    """
    model = ReferenceModel(shape).to(dtype)
    given = {**dict(model.named_buffers()), **weights}
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in given.items()}, strict=True)
    return model


def batch_loss(
    model: ReferenceModel,
    source: Source,
    first: int,
    count: int,
    objective: Any = None,
    drop: Dropping = NO_DROPOUT,
    routed: dict[int, Routing] | None = None,
) -> Tensor:
    """Returns the loss of samples from `first` on, in one forward: sum of unmasked losses /
    unmasked tokens.

    `objective` has `label_smoothing` and `z_loss`; None: plain cross-entropy, as for held-out data.
    The losses of routers are not included; `routed` gets their routings by layer, for `balance`.
    """
    samples = [source.sample(i) for i in range(first, first + count)]
    tokens = torch.stack([torch.as_tensor(s.tokens) for s in samples])
    mask = torch.stack([torch.as_tensor(s.loss_mask) for s in samples])
    starts = [getattr(s, "starts", None) for s in samples]
    packing = Packing.of(starts, tokens.shape[1] - 1)
    logits, labels = model(tokens[:, :-1], drop, packing, routed), tokens[:, 1:]
    if objective is None:
        losses = token_losses(logits, labels)
    else:
        losses = objective_losses(logits, labels, objective.label_smoothing, objective.z_loss)
    return losses[mask].sum() / mask.sum()


def used_tokens(source: Source, samples: Sequence[int]) -> list[int | None]:
    """Returns the number of tokens of each sample before its padding; None: all."""
    return [getattr(source.sample(i), "used", None) for i in samples]


class Stored:
    """Keeps optimizer states between steps: unchanged, or in bf16."""

    def __init__(self, settings: OptimSettings, seed: int) -> None:
        self.rounds, self.seed, self.update = settings.state == "bf16", seed, 0

    def __call__(self, states: dict[str, Tensor], which: int) -> None:
        """Rounds the state `which` (0 or 1) of all parameters after a step."""
        for name, values in states.items() if self.rounds else ():
            chance = chances(tuple(values.shape), self.seed, self.update, name, which)
            states[name] = rounded(values, chance)


def is_frozen(optim: OptimSettings, name: str) -> bool:
    return any(matches(pattern, name) for pattern in optim.freeze or ())


def multiplier(optim: OptimSettings, name: str, what: str) -> float:
    """Returns the factor of the learning rate (`lr_mult`) or decay (`wd_mult`), from the first
    group that matches."""
    for pattern, factors in (optim.groups or {}).items():
        if matches(pattern, name):
            return factors.get(what, 1.0)
    return 1.0


def matches(pattern: str, name: str) -> bool:
    """Returns whether a name matches a pattern in which * stands for any text."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Returns whether a parameter multiplies vectors; the taps of a convolution do not."""
    return parameter.dim() >= 2 and not name.endswith("_conv.weight")


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with bias correction; decay on matrices
    only."""

    def __init__(
        self, parameters: Mapping[str, Tensor], settings: OptimSettings, seed: int = 0
    ) -> None:
        self.settings, self.stored = settings, Stored(settings, seed)
        self.step_count = 0
        self.mean = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.square = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
    ) -> None:
        s = self.settings
        self.step_count += 1
        for name, parameter in parameters.items():
            gradient, rate = gradients[name], lr * multiplier(s, name, "lr_mult")
            decay = s.weight_decay if is_matrix(name, parameter) else 0.0
            decay *= multiplier(s, name, "wd_mult")
            self.mean[name] = s.beta1 * self.mean[name] + (1 - s.beta1) * gradient
            self.square[name] = s.beta2 * self.square[name] + (1 - s.beta2) * gradient**2
            mean = self.mean[name] / (1 - s.beta1**self.step_count)
            square = self.square[name] / (1 - s.beta2**self.step_count)
            new = parameter - rate * decay * parameter - rate * mean / (square.sqrt() + s.eps)
            parameter.copy_(new)
        self.stored(self.mean, 0)
        self.stored(self.square, 1)
        self.stored.update += 1


class SGD:
    """SGD with the momentum of torch.optim.SGD, and L2 decay on matrices.

    velocity = momentum · velocity + gradient + decay · weight; weight -= lr · velocity.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], settings: OptimSettings, seed: int = 0
    ) -> None:
        self.settings, self.stored = settings, Stored(settings, seed)
        self.velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
    ) -> None:
        for name, parameter in parameters.items():
            decay = self.settings.weight_decay if is_matrix(name, parameter) else 0.0
            decay *= multiplier(self.settings, name, "wd_mult")
            rate = lr * multiplier(self.settings, name, "lr_mult")
            change = gradients[name] + decay * parameter
            self.velocity[name] = self.settings.momentum * self.velocity[name] + change
            parameter.copy_(parameter - rate * self.velocity[name])
        self.stored(self.velocity, 0)
        self.stored.update += 1


class Muon:
    """Muon (Jordan et al. 2024) on each whole matrix of the layers, by its name; AdamW on the rest.

    Routers are among the rest: their rows are the experts' embeddings.

    mean = momentum · mean + (1 - momentum) · gradient, with Nesterov's look-ahead; its singular
    vectors are kept, and five rounds of the quintic move its singular values.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], settings: OptimSettings, seed: int = 0
    ) -> None:
        self.settings, self.stored = settings, Stored(settings, seed)
        self.mean = {
            name: torch.zeros_like(p)
            for name, p in parameters.items()
            if is_matrix(name, p)
            and name.startswith("layers.")
            and not name.endswith("router.weight")
        }
        self.rest = AdamW(
            {n: p for n, p in parameters.items() if n not in self.mean}, settings, seed
        )

    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
    ) -> None:
        s, beta = self.settings, self.settings.momentum
        self.rest.step({n: p for n, p in parameters.items() if n not in self.mean}, gradients, lr)
        for name, mean in self.mean.items():
            parameter, gradient = parameters[name], gradients[name]
            self.mean[name] = mean = beta * mean + (1 - beta) * gradient
            update = beta * mean + (1 - beta) * gradient
            length = update.square().sum().sqrt()
            # torch.optim.Muon divides by no less; few tokens, or none, chose such an expert.
            x = update / length.clamp(min=1e-7)
            for _ in range(5):
                square = x @ x.T @ x
                x = 3.4445 * x - 4.7750 * square + 2.0315 * (x @ x.T @ square)
            rows, columns = parameter.shape
            size = 0.2 * max(rows, columns) ** 0.5
            if s.muon_scale == "original":
                size = max(1.0, rows / columns) ** 0.5
            rate = lr * multiplier(s, name, "lr_mult")
            decay = s.weight_decay * multiplier(s, name, "wd_mult")
            parameter.copy_((1 - rate * decay) * parameter - rate * size * x)
        self.stored(self.mean, 0)
        self.stored.update += 1


OPTIMIZERS = {"adamw": AdamW, "sgd": SGD, "muon": Muon}


def batch_after(samples: int, config: RunSettings) -> int:
    """Returns the global batch of the step before which that many samples were read."""
    begun = [first for first in config.train.batch_schedule or {} if first <= samples]
    return config.train.batch_schedule[max(begun)] if begun else config.global_batch_size


def train_reference(
    config: RunSettings,
    weights: Mapping[str, Tensor],
    source: Source,
    steps: int,
    dtype: torch.dtype,
    learning_rates: Sequence[float] | None = None,
) -> ReferenceRun:
    """Trains `steps` steps from `weights`, everything in `dtype`.

    Step s (from 0) takes samples from s · global_batch_size on, or as many as `batch_after` says
    after those of step s - 1. `learning_rates` has one rate per step; None keeps `config.optim.lr`.
    Gradient norms are those before clipping, over each trained parameter once.

    With experts the gradients are those of loss + config.moe.aux_loss · aux + config.moe.z_loss · z
    (`Balance` defines both), but only the loss is reported. After each step whose gradients are
    finite the routers' biases that are not frozen move by config.moe.bias_update_rate towards equal
    counts.
    """
    rates = [config.optim.lr] * steps if learning_rates is None else list(learning_rates)
    assert len(rates) == steps, f"{len(rates)} learning rates for {steps} steps"
    model = build(config.model, weights, dtype)
    parameters, biases = dict(model.named_parameters()), dict(model.named_buffers())
    trained = {n: p for n, p in parameters.items() if not is_frozen(config.optim, n)}
    optimizer = OPTIMIZERS[config.optim.name](trained, config.optim, config.seed)
    decay, average = config.optim.ema_decay, {}
    if decay is not None:
        average = {name: p.detach().clone() for name, p in parameters.items()}
    losses, grad_norms, first_gradients = [], [], {}
    counts, aux, z, margin = [], [], [], math.inf
    end = 0
    for step, lr in enumerate(rates):
        samples = range(end, end + batch_after(end, config))
        first, end = samples.start, samples.stop
        drop = Dropping(config.model.dropout, config.seed, samples)
        routed: dict[int, Routing] = {}
        loss = batch_loss(model, source, first, len(samples), config.loss, drop, routed)
        found, total = balance(routed, used_tokens(source, samples)), loss
        if routed:
            total = loss + config.moe.aux_loss * found.aux + config.moe.z_loss * found.z
        gradients = dict(
            zip(trained, torch.autograd.grad(total, list(trained.values())), strict=True)
        )
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
        if step == 0:
            first_gradients = {name: g.clone() for name, g in gradients.items()}
        if config.optim.clip_grad > 0:
            factor = min(1.0, config.optim.clip_grad / (norm + 1e-6))
            gradients = {name: g * factor for name, g in gradients.items()}
        with torch.no_grad():
            optimizer.step(trained, gradients, lr)
            for name, old in average.items():
                average[name] = decay * old + (1 - decay) * parameters[name]
        for layer, chose in found.counts.items() if math.isfinite(norm) else ():
            name = f"layers.{layer}.mlp.router.bias"
            if name in biases and not is_frozen(config.optim, name):
                towards = torch.sign(chose.double().mean() - chose)
                biases[name] += config.moe.bias_update_rate * towards
        losses.append(loss.item())
        grad_norms.append(norm)
        counts.append(found.counts)
        aux.append(found.aux.item())
        z.append(found.z.item())
        margin = min([margin, *(routing.margin for routing in routed.values())])
    final = {name: p.detach().clone() for name, p in parameters.items()}
    last = {name: bias.clone() for name, bias in biases.items()}
    return ReferenceRun(
        losses, grad_norms, final, first_gradients, average, counts, aux, z, last, margin
    )
