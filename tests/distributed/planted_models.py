"""Small models of a user's own, each with one classic mistake, and one without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import parallel3d as p3d

WIDTH = 16  # of the split features


class Samples:
    """Regression on random vectors; `masked`: some of a sample's targets do not count."""

    windows = 64

    def __init__(self, masked: bool = False) -> None:
        self.masked = masked

    def sample(self, i: int) -> dict[str, Any]:
        random = np.random.default_rng(i)
        x = random.normal(size=(3, 4))
        counts = np.arange(3) <= (i % 3 if self.masked else 3)
        return {"x": x, "y": x.sum(-1), "counts": counts}


class Embedding(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(4, hidden)

    def forward(self, inputs: p3d.Inputs) -> Tensor:
        return self.project(inputs.batch["x"])


class Block(nn.Module):
    """A norm, and an MLP whose features are split; in between a layer of each head's own."""

    def __init__(self, hidden: int, parallel: p3d.Parallel, sums: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = p3d.ColumnParallelLinear(hidden, WIDTH, parallel.tp)
        self.of_heads = nn.Linear(4, 4)
        if sums:
            p3d.sum_gradients_over(self.of_heads, parallel.tp)
        self.down = p3d.RowParallelLinear(WIDTH, hidden, parallel.tp)
        self.tp = parallel.tp.index

    def split(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        return torch.tanh(self.of_heads(y.unflatten(-1, (-1, 4)))).flatten(-2)

    def forward(self, x: Tensor, inputs: p3d.Inputs) -> Any:
        return x + self.down(self.split(x))


class Head(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
        return self.out(x).squeeze(-1)


@dataclass
class Sound(p3d.Model):
    """The model without a mistake."""

    hidden: int = 8
    num_layers: int = 2

    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        return Embedding(self.hidden)

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Block(self.hidden, parallel)

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return Head(self.hidden)

    def errors(self, outputs: Tensor, inputs: p3d.Inputs) -> Tensor:
        return (outputs - inputs.batch["y"]).square() * inputs.batch["counts"]

    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        errors = self.errors(outputs, inputs)
        return p3d.Loss(errors.sum(), inputs.batch["counts"].sum())


# Gradients


class MissingSum(Sound):
    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Block(self.hidden, parallel, sums=False)


class Scaled(Block):
    def __init__(self, hidden: int, parallel: p3d.Parallel, sums: bool) -> None:
        super().__init__(hidden, parallel)
        self.factor = nn.Parameter(torch.ones(1))
        if sums:
            p3d.sum_gradients_over(self.factor, parallel.tp)

    def split(self, x: Tensor) -> Tensor:
        return super().split(x) * self.factor


class MissingSumOfAParameter(Sound):
    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Scaled(self.hidden, parallel, sums=False)


class SumOfAParameter(Sound):
    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Scaled(self.hidden, parallel, sums=True)


class SummedTwice(Sound):
    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        made = Block(self.hidden, parallel)
        p3d.sum_gradients_over(made.norm, parallel.tp)  # every rank has its whole gradient
        return made


class BackwardByRank(Sound):
    class Hooked(Block):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            x = super().forward(x, inputs)
            factor = 1 + dist.get_rank()
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * factor)
            return x

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Hooked(self.hidden, parallel) if number else Block(self.hidden, parallel)


class NothingToLearn(Sound):
    """A parameter before a norm that takes it away, so its gradient is zero but for rounding."""

    class Shifted(Block):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.shift = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            x = super().forward(x, inputs)
            return functional.layer_norm(x + self.shift, x.shape[-1:])

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Shifted(self.hidden, parallel)


# Random numbers


class ProcessDropout(Sound):
    class Dropping(Block):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return self.drop(super().forward(x, inputs))

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Dropping(self.hidden, parallel)


class FunctionalDropout(Sound):
    class Dropping(Block):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return functional.dropout(super().forward(x, inputs), 0.5, self.training)

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Dropping(self.hidden, parallel) if number else Block(self.hidden, parallel)


class DropoutByRank(Sound):
    class Dropping(Block):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            generator = torch.Generator().manual_seed(dist.get_rank())
            keeps = torch.rand(x.shape[-1], generator=generator) < 0.5
            return super().forward(x, inputs) * keeps

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Dropping(self.hidden, parallel) if number else Block(self.hidden, parallel)


class DropoutByRankBeforeANorm(Sound):
    class Dropping(Block):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            generator = torch.Generator().manual_seed(dist.get_rank())
            keeps = torch.rand(x.shape[-1], generator=generator) < 0.5
            return functional.layer_norm(super().forward(x, inputs) * keeps, x.shape[-1:])

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Dropping(self.hidden, parallel) if number else Block(self.hidden, parallel)


class InitialValuesByRank(Sound):
    def head(self, parallel: p3d.Parallel) -> nn.Module:
        made = Head(self.hidden)
        generator = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            made.out.weight.copy_(torch.randn(made.out.weight.shape, generator=generator))
        return made


# Statistics, and what the loss returns


class BatchStatistic(Sound):
    class Normed(Block):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.batch = nn.BatchNorm1d(3, track_running_stats=False)

        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return self.batch(super().forward(x, inputs))

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Normed(self.hidden, parallel) if number else Block(self.hidden, parallel)


class MovingBuffer(Sound):
    class Normed(Block):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.batch = nn.BatchNorm1d(3)

        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return self.batch(super().forward(x, inputs))

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Normed(self.hidden, parallel) if number else Block(self.hidden, parallel)


class MeanOverMicroBatch(Sound):
    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        counts = inputs.batch["counts"].sum()
        return p3d.Loss(self.errors(outputs, inputs).sum() / counts, counts)


class MeanOfOne(Sound):
    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        return p3d.Loss(self.errors(outputs, inputs).sum() / inputs.batch["counts"].sum(), 1)


class LossOverRanks(Sound):
    def head(self, parallel: p3d.Parallel) -> nn.Module:
        self.ranks = parallel.tp.size
        return super().head(parallel)

    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        loss = super().loss(outputs, inputs)
        return p3d.Loss(loss.sum * self.ranks, loss.count)


class CountOverRanks(LossOverRanks):
    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        loss = Sound.loss(self, outputs, inputs)
        return p3d.Loss(loss.sum, loss.count / self.ranks)


class RandomLoss(Sound):
    def errors(self, outputs: Tensor, inputs: p3d.Inputs) -> Tensor:
        return super().errors(outputs, inputs) * (torch.rand(outputs.shape) < 0.5)


class LossOfAnotherPart(Sound):
    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        self.first = Embedding(self.hidden)
        return self.first

    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        loss = super().loss(outputs, inputs)
        penalty = self.first.project.weight.square().sum()
        return p3d.Loss(loss.sum + penalty * loss.count, loss.count)


class LossOfNoPart(Sound):
    def head(self, parallel: p3d.Parallel) -> nn.Module:
        self.scale = torch.ones(3, requires_grad=True)
        return super().head(parallel)

    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        loss = super().loss(outputs, inputs)
        return p3d.Loss(loss.sum * self.scale.mean(), loss.count)


class LossOfASlice(Sound):
    """The head's outputs are split over tp, and the loss does not add them up."""

    class Split(nn.Module):
        def __init__(self, hidden: int, parallel: p3d.Parallel) -> None:
            super().__init__()
            self.out = p3d.ColumnParallelLinear(hidden, 2, parallel.tp)

        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return self.out(x)

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return self.Split(self.hidden, parallel)

    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        return super().loss(outputs.sum(-1), inputs)


class EnlargedRounding(Sound):
    class Waves(Head):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return torch.sin(30 * super().forward(x, inputs))

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return self.Waves(self.hidden)


class EnlargedRoundingOfOutputs(Sound):
    class Waves(Block):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            x = super().forward(x, inputs)
            return x + 0.1 * torch.sin(1e9 * x.detach())

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Waves(self.hidden, parallel)


# Forms of outputs


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class NamedOutputs(Sound):
    class Naming(Head):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Any:
            return {"pair": Pair(super().forward(x, inputs), x)}

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return self.Naming(self.hidden)

    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        return super().loss(outputs["pair"].first, inputs)


# Where the samples are in x


class SamplesSecond(Sound):
    """x is (s, b, h)."""

    class Inputs(Embedding):
        def forward(self, inputs: p3d.Inputs) -> Any:
            return super().forward(inputs).transpose(0, 1).contiguous()

    class Outputs(Head):
        def forward(self, x: Any, inputs: p3d.Inputs) -> Tensor:
            return super().forward(x.transpose(0, 1), inputs)

    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        return self.Inputs(self.hidden)

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return self.Outputs(self.hidden)


class SamplesTogether(SamplesSecond):
    """x is (s · b, h), and a penalty that is a sum over the samples."""

    class Inputs(Embedding):
        def forward(self, inputs: p3d.Inputs) -> Any:
            x = super().forward(inputs).transpose(0, 1).flatten(0, 1)
            return x, x.new_zeros(1)

    class Adding(Block):
        def forward(self, x: Any, inputs: p3d.Inputs) -> Any:
            x, penalty = x
            return super().forward(x, inputs), penalty + x.square().sum()

    class Outputs(Head):
        def forward(self, x: Any, inputs: p3d.Inputs) -> Any:
            x, penalty = x
            return super().forward(x.unflatten(0, (3, -1)).transpose(0, 1), inputs), penalty

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Adding(self.hidden, parallel)

    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        outputs, penalty = outputs
        loss = super().loss(outputs, inputs)
        return p3d.Loss(loss.sum + 0.1 * penalty.sum(), loss.count)


# Modules


class UnusedOnARank(Sound):
    class Unused(Block):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.extra = nn.Linear(8, 8)

        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            x = super().forward(x, inputs)
            return x + self.extra(x) if dist.get_rank() % 2 == 0 else x

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Unused(self.hidden, parallel)


class NormOfSplitFeatures(Sound):
    class Normed(Block):
        def split(self, x: Tensor) -> Tensor:
            y = super().split(x)
            return functional.layer_norm(y, y.shape[-1:])

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Normed(self.hidden, parallel)


class SharedWeight(Sound):
    def head(self, parallel: p3d.Parallel) -> nn.Module:
        made = Head(self.hidden)
        made.table = self.table = getattr(self, "table", nn.Linear(2, 2))
        return made

    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        made = Embedding(self.hidden)
        made.table = self.table = nn.Linear(2, 2)
        return made


class Closure(Sound):
    class Calling(Block):
        other: list[nn.Module]  # a list hides the module from PyTorch

        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return super().forward(self.other[0](x, inputs), inputs)

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        if not number:
            self.first = Block(self.hidden, parallel)
            return self.first
        made = self.Calling(self.hidden, parallel)
        made.other = [self.first]
        return made


class OfNoPart(Sound):
    class Calling(Block):
        other: list[nn.Module]

        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return super().forward(self.other[0](x), inputs)

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        made = self.Calling(self.hidden, parallel)
        if not number:
            self.other: list[nn.Module] = [nn.Linear(8, 8)]
        made.other = self.other
        return made


class InPlaceOfLabels(Sound):
    def loss(self, outputs: Any, inputs: p3d.Inputs) -> Any:
        inputs.batch["y"].sub_(1.0)
        return super().loss(outputs, inputs)


class InPlace(Sound):
    class Adding(Block):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return x.add_(self.down(self.split(x)))

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Adding(self.hidden, parallel) if number else Block(self.hidden, parallel)


class InPlaceOfSamples(Sound):
    class Scaling(Embedding):
        def forward(self, inputs: p3d.Inputs) -> Tensor:
            return self.project(inputs.batch["x"].mul_(2.0))

    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        return self.Scaling(self.hidden)


class WrongShape(Sound):
    class Narrow(Block):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return super().forward(x, inputs)[..., :5]

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Block(self.hidden, parallel) if number else self.Narrow(self.hidden, parallel)


class LostSamples(Sound):
    class Mean(Block):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return super().forward(x, inputs).mean(0, keepdim=True)

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Block(self.hidden, parallel) if number else self.Mean(self.hidden, parallel)


class OneTensorMore(Sound):
    class More(Embedding):
        def forward(self, inputs: p3d.Inputs) -> Any:
            x = super().forward(inputs)
            zero = x.new_zeros(1)
            return (x, zero, x[0] - x[1]) if len(x) > 1 else (x, zero)

    class First(Block):
        def forward(self, x: Any, inputs: p3d.Inputs) -> Tensor:
            return super().forward(x[0], inputs)

    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        return self.More(self.hidden)

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Block(self.hidden, parallel) if number else self.First(self.hidden, parallel)


class SamplesTwice(Sound):
    """x is (b, b, s, h)."""

    class Repeating(Embedding):
        def forward(self, inputs: p3d.Inputs) -> Tensor:
            x = super().forward(inputs)
            return x.expand(len(x), *x.shape)

    class Taking(Head):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            return super().forward(x[0], inputs)

    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        return self.Repeating(self.hidden)

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return self.Taking(self.hidden)


class NoTensor(Sound):
    class Dictionary(Block):
        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Any:
            return {"x": super().forward(x, inputs)}

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Block(self.hidden, parallel) if number else self.Dictionary(self.hidden, parallel)


class NoTensorAtTheEnd(NoTensor):
    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Dictionary(self.hidden, parallel) if number else Block(self.hidden, parallel)


class NamesTwice(Sound):
    class Dropping(Block):
        def __init__(self, hidden: int, parallel: p3d.Parallel) -> None:
            super().__init__(hidden, parallel)
            self.first, self.second = parallel.dropout("mlp", 0.1), parallel.dropout("mlp", 0.2)

        def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
            x = self.first(x, inputs)
            return self.second(super().forward(x, inputs), inputs)

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return self.Dropping(self.hidden, parallel)
