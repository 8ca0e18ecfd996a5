"""Data parallelism on flat buckets: whole optimizers (zero=0) or one shard each (zero=1).

Under ZeRO stage 1 (Rajbhandari et al. 2020 §5.1) a bucket's gradients are reduce-scattered, each
rank steps its shard, and the parameters are gathered while the next forward begins: a layer waits
for its own bucket alone. The bytes are those of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.config.schema import DataParallelConfig
from parallel3d.data_parallel.buckets import (
    WHOLE,
    Bucket,
    InitFn,
    Sharding,
    build_buckets,
    current_values,
)
from parallel3d.data_parallel.reducer import CommHook, Reducer
from parallel3d.parameters.segments import Segment


class BucketedDataParallel:
    """Owns the gradients, their reduction and the return of the stepped parameters.

    Args:
        chunks: of each of this rank's stages the parameters by name, in forward order, fp32 or
            better. No bucket holds parameters of two stages, which are ready at other times.
        dtype: the compute type that the model reads them in.
        zero: 0 or 1.
        tied: names of tables that another rank holds too: cut alike on both, in own buckets.
        make_hook: how these buckets are summed (`reducer.CommHook`); None: in the plain way.
        values: the initial ones of a parameter (see `build_buckets`).

    Attributes:
        parameters: all of them by name.
        segments: what this rank steps.
        replicas: (this rank's number, how many) among the dp ranks that step the same elements.
    """

    def __init__(
        self,
        chunks: Sequence[dict[str, nn.Parameter]],
        config: DataParallelConfig,
        dtype: torch.dtype,
        dp: Group,
        zero: int,
        tied: Iterable[str] = (),
        make_hook: Callable[[list[Bucket]], CommHook] | None = None,
        values: InitFn = current_values,
    ) -> None:
        self.dp, self.sharded = dp, zero > 0 and dp.size > 1
        self.sharding = Sharding(dp.size, dp.index) if self.sharded else WHOLE
        self.replicas = (0, 1) if self.sharded else (dp.index, dp.size)
        self.parameters = {name: p for chunk in chunks for name, p in chunk.items()}
        self.cap, self.dtype = config.bucket_cap_mb, dtype
        self.tied, self.make_hook = list(tied), make_hook or self._plain_hook
        self.gathering: dict[int, Work] = {}
        self._fill_buckets([list(chunk) for chunk in chunks], values)
        hook = self.make_hook(self.buckets)
        self.reducer = Reducer(self.buckets, dp, config.overlap, hook)

    def _plain_hook(self, _: list[Bucket]) -> CommHook:
        if self.sharded:
            return collectives.reduce_scatter_bucket
        return collectives.all_reduce_bucket

    def _fill_buckets(self, chunks: list[list[str]], values: InitFn = current_values) -> None:
        """Moves the parameters, whose values become the masters, into buckets."""
        self.buckets: list[Bucket] = []
        for names in reversed(chunks):  # as their gradients become ready
            named = [(name, self.parameters[name]) for name in names]
            self.buckets += build_buckets(
                named, self.cap, self.dtype, self.sharding, self.tied, values, len(self.buckets)
            )
        self.segments: list[Segment] = [s for bucket in self.buckets for s in bucket.segments]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.params}

    def reorder(self, ready: list[str], masters: dict[str, Tensor]) -> None:
        """Fills new buckets, in the order in which gradients are `ready` (Li et al. 2020 §3.2.3).

        Between steps; `segments` are new ones, and whoever steps them must be made anew.

        Args:
            ready: names of all parameters, the same on all ranks of dp and tp.
            masters: name → all of the local parameter, in fp32 or better, any shape.
        """
        for name, parameter in self.parameters.items():
            parameter.data = masters[name].view(parameter.shape)
        self._fill_buckets([ready[::-1]])
        self.reducer.use(self.buckets, self.make_hook(self.buckets))

    def start_step(self, microbatches: int) -> None:
        """Clears the gradients of the step before; `microbatches` are to come."""
        self.reducer.start_step(microbatches)

    def start_last_microbatch(self) -> None:
        """The reducer counts by itself."""

    def finish_step(self) -> list[str]:
        """Waits for the sums; returns the names of parameters without a gradient."""
        return self.reducer.finish_step()

    def tied_gradient(self, name: str) -> Tensor:
        """The part of a tied table's gradient that this rank steps, flat."""
        bucket = self.bucket_of[name]
        return bucket.grad[bucket.own]

    def publish(self) -> None:
        """Makes the stepped masters the model's parameters; starts gathering what others step.

        The buckets of the first layers, which are last in the backward, are gathered first.
        """
        for segment in self.segments:
            if segment.master is not segment.param:
                segment.param.copy_(segment.master)
        if self.sharded:
            with self.reducer.clock.range("parameter all-gather"):
                for bucket in reversed(self.buckets):
                    work = collectives.all_gather_bucket(bucket.param, self.dp)
                    self.gathering[bucket.index] = work

    def wait_for(self, part: str) -> None:
        """Returns when the parameters of a part of the stage, given by the prefix of their names,
        are complete. Every rank of dp asks in the same order."""
        if not self.gathering:
            return
        last = min(
            (b.index for name, b in self.bucket_of.items() if name.startswith(f"{part}.")),
            default=len(self.buckets),
        )
        with self.reducer.clock.range("wait parameter all-gather"):
            for index in [i for i in self.gathering if i >= last]:
                self.gathering.pop(index).wait()

    def wait_for_all(self) -> None:
        """Returns when all parameters are complete (before a checkpoint or an evaluation)."""
        for index in list(self.gathering):
            self.gathering.pop(index).wait()
