"""Small models of a user's own, and their trainings in one process without this package.

A model's modules are made of the layers that it is given: `Split` gives those of parallel3d,
`Plain` those of PyTorch. The reference trains the plain ones on the whole global batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d as p3d
from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.fields import with_values
from parallel3d.models.own_model import Model, own_config
from parallel3d.models.survey import unbound
from parallel3d.run_config import Config
from tests.distributed.simulated import here
from tests.reference.dropout import dropped
from tests.reference.train import OPTIMIZERS, is_frozen

BATCH, STEPS, SEED = 12, 3, Config.seed
DROPPED = 0.2


class Split:
    """Makes layers of parallel3d, split over tp."""

    def __init__(self, parallel: Any) -> None:
        self.parallel, self.tp, self.sp = parallel, parallel.tp, parallel.sequence_parallel

    def column(self, inputs: int, outputs: int, sp: bool = True) -> nn.Module:
        how = {"sequence_parallel": self.sp and sp}
        return p3d.ColumnParallelLinear(inputs, outputs, self.tp, **how)

    def row(self, inputs: int, outputs: int) -> nn.Module:
        how = {"sequence_parallel": self.sp}
        return p3d.RowParallelLinear(inputs, outputs, self.tp, **how)

    def table(self, rows: int, columns: int) -> nn.Module:
        how = {"sequence_parallel": self.sp}
        return p3d.VocabParallelEmbedding(rows, columns, self.tp, **how)

    def between(self, module: nn.Module) -> nn.Module:
        p3d.sum_gradients_over(module, self.tp)
        return module

    def norm(self, size: int) -> nn.Module:
        return self.between(nn.LayerNorm(size)) if self.sp else nn.LayerNorm(size)

    def dropout(self, name: str) -> nn.Module:
        return self.parallel.dropout(name, DROPPED)

    def share(self, number: int) -> int:
        return number // self.tp.size


class Plain:
    """Makes layers of PyTorch, for the part `part` of a model on one process."""

    tp = None

    def __init__(self, part: str = "") -> None:
        self.part = part

    def column(self, inputs: int, outputs: int, sp: bool = True) -> nn.Module:
        return nn.Linear(inputs, outputs)

    row, table, norm = nn.Linear, nn.Embedding, nn.LayerNorm

    def between(self, module: nn.Module) -> nn.Module:
        return module

    def dropout(self, name: str) -> nn.Module:
        return PlainDropout(f"{self.part}.{name}")

    def share(self, number: int) -> int:
        return number


class PlainDropout(nn.Module):
    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site

    def forward(self, x: Tensor, inputs: Any) -> Tensor:
        if inputs.samples is None:
            return x
        return dropped(x, inputs.samples.tolist(), DROPPED, SEED, self.site)


# Pictures with classes, by layers of parallel3d. Weights of samples make unequal counts.


class Patches(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(2, hidden, 2, stride=2)  # a parameter with four dimensions
        self.place = nn.Parameter(torch.randn(1, 4, hidden))  # and one with three

    def forward(self, inputs: Any) -> Tensor:
        return self.cut(inputs.batch["picture"]).flatten(2).transpose(1, 2) + self.place


class PictureBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, make: Any) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.ModuleList(make.column(hidden, hidden) for _ in range(3))
        self.q_norm = make.between(nn.LayerNorm(hidden // heads))
        self.out, self.up = make.row(hidden, hidden), make.column(hidden, 3 * hidden)
        self.down, self.drop = make.row(3 * hidden, hidden), make.dropout("mlp")
        self.scale = nn.Parameter(torch.rand(hidden))
        self.heads = make.share(heads)

    def forward(self, x: Tensor, inputs: Any) -> Tensor:
        y = self.before(x)
        q, k, v = (each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv)
        q = self.q_norm(q)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.scale * self.drop(self.down(F.gelu(self.up(self.between(x)))), inputs)


class Mirror(nn.Module):
    """A block without parameters."""

    def forward(self, x: Tensor, inputs: Any) -> Tensor:
        return x + 0.5 * x.flip(1)


class Kinds(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor, inputs: Any) -> Tensor:
        return self.out(self.norm(x.mean(1)))


@dataclass
class Pictures(p3d.Model):
    hidden: int = 16
    heads: int = 4
    num_layers: int = 4

    def embedding(self, parallel: Any) -> nn.Module:
        return Patches(self.hidden)

    def block(self, number: int, parallel: Any) -> nn.Module:
        make = parallel if isinstance(parallel, Plain) else Split(parallel)
        return Mirror() if number == 1 else PictureBlock(self.hidden, self.heads, make)

    def head(self, parallel: Any) -> nn.Module:
        return Kinds(self.hidden)

    def loss(self, outputs: Tensor, inputs: Any) -> p3d.Loss:
        kind, weight = inputs.batch["kind"], inputs.batch["weight"]
        losses = F.cross_entropy(outputs, kind, reduction="none")
        right = (outputs.argmax(-1) == kind) * weight
        return p3d.Loss((losses * weight).sum(), weight.sum(), {"right": right.sum()})

    @staticmethod
    def sample(i: int) -> dict[str, Any]:
        rng = np.random.default_rng(i)
        picture = rng.normal(size=(2, 4, 4)).astype("float32")
        return {"picture": picture, "kind": i * 7 % 3, "weight": [1.0, 0.0, 0.5, 2.0][i % 4]}


# Signals, by plain modules: a tuple between blocks, a recurrence, a layer that is used twice.


class Waves(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.look = nn.Conv1d(3, hidden, 3, padding=1)

    def forward(self, inputs: Any) -> tuple[Tensor, Tensor]:
        x = self.look(inputs.batch["signal"].transpose(1, 2)).transpose(1, 2)
        return x, x.mean(1)


class Recurrence(nn.Module):
    def __init__(self, hidden: int, make: Any) -> None:
        super().__init__()
        self.cell, self.mix = nn.GRUCell(hidden, hidden), nn.Linear(hidden, hidden)
        self.norm, self.drop = nn.RMSNorm(hidden, eps=1e-6), make.dropout("state")
        self.decay = nn.Parameter(torch.rand(2, 1, hidden))

    def forward(self, x: tuple[Tensor, Tensor], inputs: Any) -> tuple[Tensor, Tensor]:
        steps, state = x
        found = []
        for step in self.mix(self.norm(steps)).unbind(1):
            state = self.cell(torch.tanh(self.mix(step)), state * self.decay[0].sigmoid())
            found.append(state)
        return steps + self.drop(torch.stack(found, 1), inputs), state + self.decay[1]


class Next(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.out, self.last = nn.Linear(hidden, 3), nn.Linear(hidden, 3)

    def forward(self, x: tuple[Tensor, Tensor], inputs: Any) -> tuple[Tensor, Tensor]:
        return self.out(x[0]), self.last(x[1])


@dataclass
class Signals(p3d.Model):
    hidden: int = 10
    num_layers: int = 4

    def embedding(self, parallel: Any) -> nn.Module:
        return Waves(self.hidden)

    def block(self, number: int, parallel: Any) -> nn.Module:
        make = parallel if isinstance(parallel, Plain) else Split(parallel)
        return Recurrence(self.hidden, make)

    def head(self, parallel: Any) -> nn.Module:
        return Next(self.hidden)

    def loss(self, outputs: tuple[Tensor, Tensor], inputs: Any) -> p3d.Loss:
        wanted, mask = inputs.batch["signal"].roll(-1, 1), inputs.batch["loss_mask"]
        square = ((outputs[0] - wanted).square().mean(-1) * mask).sum()
        last = ((outputs[1] - wanted[:, -1]).abs().mean(-1) * mask[:, 0]).sum()
        return p3d.Loss(square + 0.3 * last, mask.sum(), {"square": square, "last": last})

    @staticmethod
    def sample(i: int) -> dict[str, Any]:
        rng = np.random.default_rng(i)
        signal = np.sin(np.arange(6)[:, None] * rng.uniform(0.1, 2, 3) + i)
        return {"signal": signal, "loss_mask": (np.arange(6) <= i % 6).astype("float32")}


# Modules whose parameters PyTorch keeps in ways of its own, or that share them.


class Gru(nn.Module):
    def __init__(self, hidden: int, make: Any) -> None:
        super().__init__()
        self.gru = nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, x: Tensor, inputs: Any) -> Tensor:
        return x + self.gru(x)[0]


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self, hidden: int, make: Any) -> None:
        super().__init__(hidden, 2, 2 * hidden, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, inputs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Normed(nn.Module):
    def __init__(self, hidden: int, make: Any) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(hidden, hidden))

    def forward(self, x: Tensor, inputs: Any) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Shared(nn.Module):
    """Two split layers that share a weight, and one that runs twice."""

    def __init__(self, hidden: int, make: Any) -> None:
        super().__init__()
        self.up, self.gate = make.column(hidden, hidden), make.column(hidden, hidden)
        self.gate.weight, self.down = self.up.weight, make.row(hidden, hidden)

    def forward(self, x: Tensor, inputs: Any) -> Tensor:
        for _ in range(2):
            x = x + self.down(torch.tanh(self.up(x)) * torch.sigmoid(self.gate(x)))
        return x


class Points(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, hidden)

    def forward(self, inputs: Any) -> Tensor:
        return self.linear(inputs.batch["signal"])


class Ends(Next):
    def forward(self, x: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward((x, x[:, -1]), inputs)


@dataclass
class Modules(Signals):
    KINDS: ClassVar = (Gru, Encoder, Normed, Shared)

    def embedding(self, parallel: Any) -> nn.Module:
        return Points(self.hidden)

    def block(self, number: int, parallel: Any) -> nn.Module:
        make = parallel if isinstance(parallel, Plain) else Split(parallel)
        return self.KINDS[number](self.hidden, make)

    def head(self, parallel: Any) -> nn.Module:
        return Ends(self.hidden)


# Text, by layers of parallel3d, with sequence parallelism.


class Words(nn.Module):
    def __init__(self, vocab: int, hidden: int, make: Any) -> None:
        super().__init__()
        self.table = make.table(vocab, hidden)

    def forward(self, inputs: Any) -> Tensor:
        return self.table(inputs.batch["tokens"])


class TextBlock(nn.Module):
    def __init__(self, hidden: int, make: Any) -> None:
        super().__init__()
        self.norm, self.up, self.gate = (
            make.norm(hidden),
            make.column(hidden, hidden),
            make.column(hidden, hidden),
        )
        self.speed = make.between(nn.Linear(4, 4, bias=False))
        self.down, self.drop = make.row(hidden, hidden), make.dropout("out")

    def forward(self, x: Tensor, inputs: Any) -> Tensor:
        y = self.norm(x)
        values = self.speed(self.up(y).unflatten(-1, (-1, 4))).flatten(-2)
        sums = values.cumsum(1) * torch.sigmoid(self.gate(y))
        return x + self.drop(self.down(sums), inputs)


class Ids(nn.Module):
    def __init__(self, vocab: int, hidden: int, make: Any) -> None:
        super().__init__()
        self.norm, self.out = make.norm(hidden), make.column(hidden, vocab)
        self.tp = make.tp

    def forward(self, x: Tensor, inputs: Any) -> tuple[Tensor, Any]:
        return self.out(self.norm(x)), self.tp


@dataclass
class Text(p3d.Model):
    hidden: int = 16
    num_layers: int = 4
    seq_length: int = 8
    vocab_size: int = 32

    def embedding(self, parallel: Any) -> nn.Module:
        return Words(self.vocab_size, self.hidden, self._make(parallel))

    def block(self, number: int, parallel: Any) -> nn.Module:
        return TextBlock(self.hidden, self._make(parallel))

    def head(self, parallel: Any) -> nn.Module:
        return Ids(self.vocab_size, self.hidden, self._make(parallel))

    def _make(self, parallel: Any) -> Any:
        return parallel if isinstance(parallel, Plain) else Split(parallel)

    def loss(self, outputs: tuple[Tensor, Any], inputs: Any) -> p3d.Loss:
        labels, mask = inputs.batch["labels"], inputs.batch["loss_mask"]
        logits, tp = outputs
        if tp is None:
            losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            return p3d.Loss((losses * mask).sum(), mask.sum())
        return p3d.vocab_parallel_cross_entropy(logits, labels, mask, tp)

    @staticmethod
    def sample(i: int) -> p3d.Sample:
        rng = np.random.default_rng(i)
        return p3d.Sample(rng.integers(0, 32, 9), rng.random(8) < (i % 5) / 4)


MODELS: Mapping[str, type[Model]] = {
    **{"pictures": Pictures, "signals": Signals, "text": Text},
    "modules": Modules,
}


# A training: what determines its numbers, and how it is computed.

NAdam = functools.partial(torch.optim.NAdam, betas=(0.8, 0.9), decoupled_weight_decay=True)
OPTIM: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.3, "weight_decay": 0.01, "clip_grad": 0.2},
    "momentum": {"name": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "clip_grad": 0.0},
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0},
    "muon": {"name": "muon", "lr": 0.01, "momentum": 0.95, "clip_grad": 0.2},
    "nadam": {"name": "own", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0},
}
TREATMENTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "first frozen": {"freeze": ["embedding.*", "layers.0.*"]},
    "norms frozen": {"freeze": ["*norm*"]},
    "by name": {"groups": {"head.*": {"lr_mult": 0.5}, "layers.2.*": {"wd_mult": 3.0}}},
    "averaged": {"ema_decay": 0.6},
    "bf16 states": {"state": "bf16"},
}


class Problem(NamedTuple):
    """What determines the numbers of a training."""

    model: str
    optimizer: str = "sgd"
    treatment: str = "plain"
    precision: str = "fp64"
    steps: int = STEPS
    fields: tuple[tuple[str, Any], ...] = ()  # of the model, that are not its defaults

    @property
    def evaluated(self) -> int:
        """Returns the samples of an evaluation: a batch that is not whole needs a mask."""
        return BATCH if self.model == "pictures" else BATCH - 2

    @property
    def optim(self) -> dict[str, Any]:
        given = {**OPTIM[self.optimizer], **TREATMENTS[self.treatment]}
        return {"lr_decay_style": "constant", **given}


class Source:
    """Samples of a model."""

    seq_length = 8  # of the text

    def __init__(self, model: str, windows: int | None = None) -> None:
        self.sample = MODELS[model].sample  # type: ignore[attr-defined]
        if windows is not None:
            self.windows = windows


@dataclass
class Result:
    """What a training has computed; weights are on rank 0."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    terms: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    average: dict[str, np.ndarray] = field(default_factory=dict)
    evaluation: float = 0.0


def make_trainer(
    problem: Problem, groups: ProcessGroups, keys: Mapping[str, Any], loss: Any = None
) -> Trainer:
    """Makes a trainer of the layout of `groups`; `keys` say how it computes.

    `loss` takes the place of the model's own.
    """
    layout = groups.layout
    plain = with_values(
        Config(),
        {
            **{"tp": layout.tp, "pp": layout.pp, "global_batch_size": BATCH},
            **{"micro_batch_size": 1, "precision.name": problem.precision},
            **{"train.steps": problem.steps, "train.eval_batches": None},
            **{f"optim.{name}": value for name, value in problem.optim.items()},
            **keys,
        },
    )
    model = MODELS[problem.model](**dict(problem.fields))
    base = unbound(f"{__name__}.{type(model).__name__}", dataclasses.asdict(model))
    config = dataclasses.replace(plain, model=own_config(base, model, loss))
    sources = Source(problem.model), Source(problem.model, problem.evaluated)
    return Trainer(
        *(config, groups, here()),
        train_source=sources[0],
        valid_source=sources[1],
        optimizer=NAdam if problem.optimizer == "nadam" else None,
    )


def arrays(weights: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: weight.double().numpy().copy() for name, weight in weights.items()}


def train(trainer: Trainer, steps: int) -> Result:
    """Trains `steps` steps; collective."""
    found = Result()
    for _ in range(steps):
        step = trainer.train_step()
        found.losses.append(step.loss)
        found.grad_norms.append(step.grad_norm)
        found.terms.append(dict(step.terms))
    found.evaluation = trainer.evaluate()
    found.weights = arrays(trainer.full_parameters())
    if trainer.config.optim.ema_decay is not None:
        with trainer.ema_weights():
            found.average = arrays(trainer.full_parameters())
    return found


# The reference.


class PlainModel(nn.Module):
    """The modules of a model on one process, without this package."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        numbers = range(model.num_layers)
        self.embedding = model.embedding(Plain("embedding"))
        self.layers = nn.ModuleList(model.block(n, Plain(f"layers.{n}")) for n in numbers)
        self.head = model.head(Plain("head"))

    def forward(self, inputs: Any) -> Any:
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x, inputs)
        return self.head(x, inputs)


def inputs_of(problem: Problem, numbers: Sequence[int], dtype: torch.dtype, trains: bool) -> Any:
    """Returns what the parts of a model get: the samples, stacked."""
    samples = [MODELS[problem.model].sample(i) for i in numbers]  # type: ignore[attr-defined]
    if problem.model == "text":
        samples = [
            {"tokens": s.tokens[:-1], "labels": s.tokens[1:], "loss_mask": s.loss_mask}
            for s in samples
        ]
    stacked = {n: torch.as_tensor(np.stack([s[n] for s in samples])) for n in samples[0]}
    batch = {n: v.to(dtype) if v.is_floating_point() else v for n, v in stacked.items()}
    return SimpleNamespace(batch=batch, samples=torch.tensor(numbers) if trains else None)


def reference(problem: Problem, weights: Mapping[str, np.ndarray]) -> Result:
    """Trains a problem on one process from these weights, one global batch at a time."""
    dtype = torch.float64 if problem.precision == "fp64" else torch.float32
    model = MODELS[problem.model](**dict(problem.fields))
    net = PlainModel(model).to(dtype)
    given = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    assert not net.load_state_dict(given, strict=False).unexpected_keys
    assert given.keys() == dict(net.named_parameters()).keys()  # shared ones by their first names
    optim = dataclasses.replace(Config().optim, **problem.optim)
    named = dict(net.named_parameters())
    trained = {n: p for n, p in named.items() if not is_frozen(optim, n)}
    step = nadam(trained, optim) if problem.optimizer == "nadam" else by_hand(trained, optim)
    average = {name: p.detach().clone() for name, p in named.items()}
    found = Result()
    for number in range(problem.steps):
        numbers = range(number * BATCH, (number + 1) * BATCH)
        inputs = inputs_of(problem, numbers, dtype, trains=True)
        loss = model.loss(net(inputs), inputs)
        mean = loss.sum / loss.count
        wanted = [*trained.values()]
        gradients = dict(zip(trained, torch.autograd.grad(mean, wanted), strict=True))
        norm = sum(g.double().square().sum() for g in gradients.values()) ** 0.5
        if optim.clip_grad:
            factor = min(1.0, optim.clip_grad / (float(norm) + 1e-6))
            gradients = {name: g * factor for name, g in gradients.items()}
        with torch.no_grad():
            step(gradients)
            for name, p in named.items():
                average[name].lerp_(p, 1 - (optim.ema_decay or 0.0))
        found.losses.append(mean.item())
        found.grad_norms.append(float(norm))
        found.terms.append({n: float(v.detach() / loss.count) for n, v in loss.terms.items()})
    with torch.no_grad():
        inputs = inputs_of(problem, range(problem.evaluated), dtype, trains=False)
        loss = model.loss(net(inputs), inputs)
        found.evaluation = float(loss.sum / loss.count)
    found.weights = arrays({name: p.detach() for name, p in named.items()})
    found.average = arrays(average) if optim.ema_decay is not None else {}
    return found


Step = Callable[[Mapping[str, Tensor]], None]


def by_hand(trained: Mapping[str, nn.Parameter], optim: Any) -> Step:
    optimizer = OPTIMIZERS[optim.name](trained, optim, SEED)
    return lambda gradients: optimizer.step(trained, gradients, optim.lr)


def nadam(trained: Mapping[str, nn.Parameter], optim: Any) -> Step:
    """Steps by PyTorch's class over whole parameters, with a group for each."""

    def factor(name: str, what: str) -> float:
        for pattern, factors in (optim.groups or {}).items():
            if name.startswith(pattern.rstrip("*")):
                return factors.get(what, 1.0)
        return 1.0

    groups = [
        {
            "params": [p],
            "lr": optim.lr * factor(name, "lr_mult"),
            "weight_decay": optim.weight_decay * factor(name, "wd_mult") * (p.dim() > 1),
        }
        for name, p in trained.items()
    ]
    optimizer = NAdam(groups)

    def step(gradients: Mapping[str, Tensor]) -> None:
        for name, p in trained.items():
            p.grad = gradients[name]
        optimizer.step()

    return step


def worst(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """Returns the largest max|a - b| / max|b| over the tensors, and its tensor's name."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    found = (0.0, "")
    for name, wanted in theirs.items():
        assert ours[name].shape == wanted.shape, name
        off = np.abs(ours[name] - wanted).max() / (np.abs(wanted).max() or 1.0)
        found = max(found, (float(off) if np.isfinite(off) else np.inf, name))
    return found


def differences(ours: Result, theirs: Result, limit: float, weights: bool = True) -> list[str]:
    """Returns where a training differs from another one by more than `limit`."""
    found = []

    def compare(what: str, a: float, b: float) -> None:
        if not abs(a - b) <= limit * max(abs(b), 1e-3):
            found.append(f"{what} {a!r}, reference {b!r}")

    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True), 1):
        compare(f"loss of step {step}", a, b)
    for step, (a, b) in enumerate(zip(ours.grad_norms, theirs.grad_norms, strict=True), 1):
        compare(f"grad norm of step {step}", a, b)
    for step, (one, other) in enumerate(zip(ours.terms, theirs.terms, strict=True), 1):
        assert one.keys() == other.keys()
        for name in other:
            compare(f"{name} of step {step}", one[name], other[name])
    compare("evaluation", ours.evaluation, theirs.evaluation)
    for what in ("weights", "average") if weights else ():
        off, name = worst(getattr(ours, what), getattr(theirs, what))
        if off > limit:
            found.append(f"{what}: {name} is {off:.2e} off")
    return found
