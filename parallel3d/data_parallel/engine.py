"""Which engine holds gradients and masters: flat buckets, or FSDP2; and how buckets are summed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import Config
from parallel3d.data_parallel.bucketed import BucketedDataParallel
from parallel3d.data_parallel.buckets import Bucket, current_values
from parallel3d.data_parallel.compressed import InBf16
from parallel3d.data_parallel.hierarchical import HierarchicalAllReduce
from parallel3d.data_parallel.powersgd import PowerSGD
from parallel3d.data_parallel.reducer import CommHook
from parallel3d.models.transformer import Stage
from parallel3d.parameters.pieces import Initializer
from parallel3d.parameters.segments import Segment


class DataParallel(Protocol):
    """What the trainer asks of an engine; see `BucketedDataParallel` for each."""

    parameters: dict[str, nn.Parameter]
    segments: list[Segment]
    replicas: tuple[int, int]

    def start_step(self, microbatches: int) -> None: ...
    def start_last_microbatch(self) -> None: ...
    def finish_step(self) -> list[str]: ...
    def tied_gradient(self, name: str) -> Tensor: ...
    def publish(self) -> None: ...
    def wait_for(self, part: str) -> None: ...
    def wait_for_all(self) -> None: ...


def data_parallel_engine(
    config: Config,
    stages: Sequence[Stage],
    initializer: Initializer,
    dtype: torch.dtype,
    groups: ProcessGroups,
    tied: Iterable[str] = (),
) -> DataParallel:
    """The engine of `config.zero` for a rank's stages, whose parameters are in fp32 or better.

    Args:
        stages: in the order of the model; under zero ≥ 2 one.
        initializer: what the stages were made with. With `deferred` the engine draws the values,
            each rank what it keeps: so a stage starts on a device that cannot hold it twice.
        dtype: the compute type.
        tied: names of tables that another rank holds too.

    Raises:
        ValueError: `ddp.shard_size` is not that of the groups (`ProcessGroups.of_run` makes them).
    """
    if config.zero > 1 and groups.dp.size > 1:
        shards = groups.dp.size if groups.dp_inner.size == 1 else groups.dp_inner.size
        if config.ddp.shard_size not in (None, shards):
            raise ValueError(f"ddp.shard_size={config.ddp.shard_size}, but groups of {shards}")
        # Imported here: FSDP2 and DTensor take a second that no other run needs.
        from parallel3d.data_parallel.fully_sharded import FullyShardedDataParallel

        every = config.ddp.reduces_every_microbatch(config.zero)
        (stage,) = stages
        return FullyShardedDataParallel(stage, initializer, dtype, groups, config.zero, every)
    return BucketedDataParallel(
        parameters_of_chunks(stages),
        config.ddp,
        dtype,
        groups.dp,
        config.zero,
        tied,
        lambda buckets: comm_hook(config, groups, buckets),
        (lambda p: initializer.values(p.spec)) if initializer.deferred else current_values,
    )


def parameters_of_chunks(stages: Sequence[Stage]) -> list[dict[str, nn.Parameter]]:
    """By stage, name → parameter; one that two stages share is the first one's."""
    seen: set[nn.Parameter] = set()
    chunks = []
    for stage in stages:
        chunks.append({name: p for name, p in stage.named_parameters() if p not in seen})
        seen.update(chunks[-1].values())
    return chunks


def comm_hook(config: Config, groups: ProcessGroups, buckets: list[Bucket]) -> CommHook:
    """How the configuration sums a bucket over dp."""
    ddp = config.ddp
    if config.zero and groups.dp.size > 1:
        return collectives.reduce_scatter_bucket
    if groups.dp_inner.size > 1:
        return HierarchicalAllReduce(groups.dp_inner, groups.dp_outer)
    if ddp.comm_hook == "bf16":
        return InBf16()
    if ddp.comm_hook == "powersgd":
        inside = [(b.grad, [p.spec.shape for s in b.segments for p in s.parts]) for b in buckets]
        return PowerSGD(inside, ddp.powersgd_rank, ddp.powersgd_start)
    return collectives.all_reduce_bucket
