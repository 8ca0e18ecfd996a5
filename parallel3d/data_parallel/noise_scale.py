"""Estimates the gradient noise scale, which indicates the largest useful batch.

McCandlish et al. 2018 ("An Empirical Model of Large-Batch Training", arXiv:1812.06162): the squared
norm of a gradient of B sequences is |G|² + tr(Σ)/B on average, so two batch sizes give both terms
(appendix A.1). tr(Σ)/|G|², in sequences, is the batch size at which noise and gradient are equal:
far below it, doubling the batch halves the number of steps; far above it, doubling saves hardly any
steps.

The two gradients are a replica's own gradient, before its bucket is reduced (with dp=1, the
gradient after the first micro-batch), and the reduced one. No further forward or backward is
needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.data_parallel.engine import Bucket
from parallel3d.optim.optimizer import sum_of_powers
from parallel3d.parameters.copies import CopyGroups
from parallel3d.parameters.segments import ParameterSpan, Segment
from parallel3d.parameters.spec import ShardSpec
from parallel3d.parameters.state import spec_of, state_of
from parallel3d.tensor_parallel.partial_gradients import is_partial

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups

HEAD_TABLE = "head.table"  # the table of an untied output head
KEEP = 0.98  # decay of the running means per step: they average over about 50 steps


class Noise(NamedTuple):
    """The estimates after a step.

    Attributes:
        scale: tr(Σ)/|G|² in sequences, from running means; None if either mean is not positive.
        trace, signal: this step's estimates of tr(Σ), for a batch of one sequence, and of |G|².
            Their errors are about as large as the estimates, so either can be negative.
    """

    scale: float | None
    trace: float
    signal: float


class PartialNorms:
    """Computes the squared gradient norms of a part of a step's batch and of the whole batch.

    Both cover the parameters whose gradient on one replica is complete before the reduction over
    dp. They leave out replicated parameters under sequence parallelism, shards with `tp_replicas` >
    1, a table tied over two stages and, with dp=1, the head's table, which gets gradients of
    several micro-batches before the other parameters.
    """

    def __init__(self, groups: ProcessGroups, device: torch.device, sp: bool) -> None:
        self.tp = groups.tp
        self.cp = groups.cp
        self.by_replicas = groups.dp.size > 1
        self.sp = sp and groups.tp.size > 1
        self.part = torch.zeros((), dtype=torch.float64, device=device)

    def start_step(self) -> None:
        self.part.zero_()

    def added(self, name: str, parameter: nn.Parameter, times: int) -> None:
        """Adds the squared norm of a parameter's first gradient in a step, if dp=1."""
        if not self.by_replicas and times == 1:
            self.part += self._squares_of(name, parameter)

    def full(self, bucket: Bucket) -> None:
        """Adds the squared norm of a full bucket's gradients before their reduction, if dp > 1."""
        if self.by_replicas:
            for name, parameter in bucket.params.items():
                self.part += self._squares_of(name, parameter)

    @torch.no_grad()
    def squares(self, segments: Iterable[Segment]) -> Tensor:
        """Returns this rank's shares of both squared norms, after the reduction: (2,), float64."""
        counted = []
        for segment in segments:
            grads = segment.grad.split([span.numel for span in segment.spans])
            for span, grad in zip(segment.spans, grads, strict=True):
                counted += self._counted(span, grad, segment.groups)
        return torch.stack((self.part, sum_of_powers(counted, self.part.device)))

    def _squares_of(self, name: str, parameter: nn.Parameter) -> Tensor:
        main_grad = state_of(parameter).main_grad
        assert main_grad is not None
        grad = main_grad.flatten()
        if self.cp.size > 1:  # each rank has the gradient of its own part of the sequences
            grad = collectives.all_reduce(grad.clone(), self.cp)
            if self.cp.index > 0:
                return self.part.new_zeros(())
        span = ParameterSpan(name, spec_of(parameter), 0, grad.numel())
        return sum_of_powers(self._counted(span, grad, CopyGroups(tp=self.tp)), self.part.device)

    def _counted(self, span: ParameterSpan, grad: Tensor, groups: CopyGroups) -> list[Tensor]:
        """Returns the runs of a span's flat gradient that this rank counts.

        If several ranks of `groups` hold copies of a run, only the first of them counts it.
        """
        spec = span.spec
        if not self.by_replicas and (spec.uses > 1 or span.name == HEAD_TABLE):
            return []

        def counts(shard: ShardSpec) -> bool:
            return groups.of(spec, shard).is_first and not is_partial(spec, shard, self.sp)

        runs = spec.by_kind(counts, span.start, span.numel)
        return [grad[first:end] for is_counted, first, end in runs if is_counted]


class NoiseScale:
    """Estimates the noise scale from a step's two squared norms, with equal results on all ranks.

    Args:
        batch: number of sequences in a step.
        parts: number of replicas, or of micro-batches with dp=1.
        norms: source of the squared norms, or None if nothing is measured.

    Attributes:
        last: estimates after the last step with finite gradients; None before such a step.
    """

    def __init__(self, batch: int, parts: int, norms: PartialNorms | None) -> None:
        self.batch = batch
        self.parts = parts
        self.norms = norms
        # Running means of both estimates, each divided by the squared norm of its step, because
        # otherwise the first steps, with ten times larger gradients, would outweigh the next
        # hundred. Both means start at zero, which does not change their quotient.
        self.trace = self.signal = 0.0
        self.last: Noise | None = None

    def squares(self, segments: Iterable[Segment], like: Tensor) -> Tensor:
        """Returns this rank's shares of both squared norms; without `norms`, an empty tensor."""
        return like.new_empty(0) if self.norms is None else self.norms.squares(segments)

    def update(self, squares: Sequence[float], loss_scale: float = 1.0) -> None:
        """Updates the estimates after a step.

        Args:
            squares: two sums over all ranks. The first is Σ over the replicas of the squared norms
                of their gradients or, with dp=1, the squared norm of the first micro-batch's
                gradient. The second is the squared norm of the whole batch's gradient. Each
                gradient is divided by the tokens of the global batch.
            loss_scale: factor by which the loss, and so every gradient, was multiplied.
        """
        if self.norms is None or not math.isfinite(sum(squares)) or squares[1] == 0:
            return
        part, whole = (square / loss_scale**2 for square in squares)
        n = self.parts
        # The gradient of a part's own mean loss is n times its contribution to the sum.
        small = n * part if self.norms.by_replicas else n * n * part
        trace = self.batch * (small - whole) / (n - 1)
        signal = (n * whole - small) / (n - 1)
        self.trace += (1 - KEEP) * (trace / whole - self.trace)
        self.signal += (1 - KEEP) * (signal / whole - self.signal)
        scale = self.trace / self.signal if min(self.trace, self.signal) > 0 else None
        self.last = Noise(scale, trace, signal)

    def progress(self) -> dict[str, float]:
        if self.norms is None:
            return {}
        return {"noise_trace": self.trace, "noise_signal": self.signal}

    def restore(self, progress: Mapping[str, Any]) -> None:
        self.trace = float(progress.get("noise_trace", 0.0))
        self.signal = float(progress.get("noise_signal", 0.0))
