"""How large a batch still pays: the gradient noise scale, from norms that a step makes anyway.

McCandlish et al. 2018 ("An Empirical Model of Large-Batch Training", arXiv:1812.06162): the
gradient of B sequences is that of all of them, G, plus noise of variance Σ/B, so the squared norm
of a gradient is |G|² + tr(Σ)/B on average. Two batch sizes give both terms (appendix A.1), and
tr(Σ)/|G|², in sequences, is the batch at which noise and gradient are equal: far below it twice the
batch saves half the steps, far above it hardly any.

The two sizes are in every step. A replica's own gradient, before its bucket is reduced, is that of
global_batch_size / dp sequences, and the sum is that of all. With dp=1 the gradient after the first
micro-batch takes the replica's place. So there is no pass forward or backward more, and two numbers
travel with the loss; what it costs is to read the gradients twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import Config
from parallel3d.data_parallel.engine import BucketedDataParallel, DataParallel
from parallel3d.data_parallel.reducer import Bucket
from parallel3d.optim.optimizer import sum_of_squares
from parallel3d.parameters.sharding import ParameterSpec, Segment

HEAD_TABLE = "head.table"  # of an output head that is not tied
KEEP = 0.98  # of the running means, a step: they reach back over about 50


class Noise(NamedTuple):
    """What a step tells. scale: tr(Σ)/|G|² in sequences, of the running means of both; None where
    either is not positive, which happens in the first steps and while noise rules. trace, signal:
    this step's estimates of tr(Σ), for a batch of one sequence, and of |G|²; a single one errs by
    its own size and more, also below zero."""

    scale: float | None
    trace: float
    signal: float


class PartialNorms:
    """Squared norms of the gradients of a part of the batch and of all of it; watches a `Reducer`.

    Both are over the same parameters: those whose gradient on one replica is whole before the
    reduction over dp. Left out are what is added later: under sequence parallelism the parameters
    that every tp rank holds, boxes that several tp ranks share, and a table tied over two stages.
    With dp=1 the table of the head too, which gets the gradients of several micro-batches ahead of
    the other parameters.
    """

    def __init__(
        self, engine: BucketedDataParallel, groups: ProcessGroups, sp: bool, tied: str | None
    ) -> None:
        self.engine, self.tp, self.tied = engine, groups.tp, tied
        self.by_replicas = groups.dp.size > 1
        self.sp = sp and groups.tp.size > 1
        grad = engine.buckets[0].grad
        self.part = torch.zeros((), dtype=torch.float64, device=grad.device)

    def start_step(self) -> None:
        self.part.zero_()

    def added(self, name: str, times: int) -> None:
        """A parameter has its gradients of so many micro-batches."""
        if not self.by_replicas and times == 1:
            self.part += self._squares_of(name)

    def full(self, bucket: Bucket) -> None:
        """A bucket has all gradients of this replica, and is about to be reduced."""
        if self.by_replicas:
            for name in bucket.params:
                self.part += self._squares_of(name)

    @torch.no_grad()
    def squares(self) -> Tensor:
        """(2,), float64: this rank's shares of both squared norms, after the reduction. Of one
        replica, summed over its ranks; of all parts, over the world."""
        whole = torch.zeros_like(self.part)
        if self.engine.replicas[0] == 0:  # the first of equal replicas speaks
            views = [grad for s in self.engine.segments for grad in self._counted_of(s)]
            whole = sum_of_squares(views, whole.device)
        return torch.stack((self.part, whole))

    def _squares_of(self, name: str) -> Tensor:
        parameter = self.engine.parameters[name]
        grad, spec = parameter.main_grad.flatten(), parameter.spec
        views = [grad[run] for run in self._runs(name, spec, 0, grad.numel())]
        return sum_of_squares(views, self.part.device)

    def _counted_of(self, segment: Segment) -> Iterator[Tensor]:
        offset = 0
        for name, spec, start, numel in segment.parts:
            for run in self._runs(name, spec, start, numel):
                yield segment.grad[offset + run.start : offset + run.stop]
            offset += numel

    def _runs(self, name: str, spec: ParameterSpec, start: int, numel: int) -> Iterator[slice]:
        """What counts of a parameter's elements from `start` on, counted from there."""
        if spec.tied_lm_head or name == self.tied:
            return
        if spec.replicated and (self.sp or self.tp.index > 0):
            return
        if not self.by_replicas and (spec.uses > 1 or name == HEAD_TABLE):
            return
        for first, end, copies in spec.runs(start, numel):
            if copies == 1:
                yield slice(first, end)


class NoiseScale:
    """Makes the estimate of a step from its two squared norms; the same on every rank.

    Args:
        batch: sequences of a step.
        parts: in how many the gradients of one of them are compared with those of all: replicas,
            or micro-batches.
        norms: where the squared norms come from; None: nothing is measured.

    Attributes:
        last: of the last step whose gradients were finite.
    """

    def __init__(self, batch: int, parts: int, norms: PartialNorms | None) -> None:
        self.batch, self.parts, self.norms = batch, parts, norms
        # Running means of both estimates over the squared norm of their step, or the first steps,
        # whose gradients are ten times as long, would outvote the next hundred. Both begin at zero,
        # which leaves their quotient alone.
        self.trace = self.signal = 0.0
        self.last: Noise | None = None

    @classmethod
    def of_run(
        cls, config: Config, engine: DataParallel, groups: ProcessGroups, tied: str | None
    ) -> NoiseScale:
        """What `config.train.noise_scale` says.

        Args:
            tied: name of the table that another stage holds too.
        Raises:
            ValueError: an engine that adds gradients up where nobody sees those of one replica.
        """
        parts = groups.dp.size if groups.dp.size > 1 else config.num_microbatches
        if not config.train.noise_scale:
            return cls(config.global_batch_size, parts, None)
        if not isinstance(engine, BucketedDataParallel):
            raise ValueError("the noise scale needs gradients in buckets: zero=0 or zero=1")
        norms = PartialNorms(engine, groups, config.sp, tied)
        engine.reducer.watcher = norms
        return cls(config.global_batch_size, parts, norms)

    def squares(self) -> list[Tensor]:
        """What this rank adds to the two numbers of `update`; nothing where not measured."""
        return [] if self.norms is None else [self.norms.squares()]

    def update(self, squares: Sequence[float], loss_scale: float = 1.0) -> None:
        """After a step.

        Args:
            squares: sums over all ranks. First, Σ over the replicas of the squared norms of their
                gradients, or the squared norm of the first micro-batch's; second, that of the whole
                batch's gradient. Each gradient is a sum over its own tokens, divided by the tokens
                of all.
            loss_scale: in the gradients.
        """
        if self.norms is None or not math.isfinite(sum(squares)) or squares[1] == 0:
            return
        part, whole = (square / loss_scale**2 for square in squares)
        n = self.parts
        # The gradient of a part's own mean loss is n times as long as what it adds.
        small = n * part if self.norms.by_replicas else n * n * part
        trace = self.batch * (small - whole) / (n - 1)
        signal = (n * whole - small) / (n - 1)
        self.trace += (1 - KEEP) * (trace / whole - self.trace)
        self.signal += (1 - KEEP) * (signal / whole - self.signal)
        scale = self.trace / self.signal if min(self.trace, self.signal) > 0 else None
        self.last = Noise(scale, trace, signal)

    def progress(self) -> dict[str, float]:
        """What `restore` needs."""
        if self.norms is None:
            return {}
        return {"noise_trace": self.trace, "noise_signal": self.signal}

    def restore(self, progress: dict[str, int | float]) -> None:
        """Goes on from `progress`, where a run that measured left it."""
        self.trace = float(progress.get("noise_trace", 0.0))
        self.signal = float(progress.get("noise_signal", 0.0))
