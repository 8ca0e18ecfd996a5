"""Keys of data parallelism: ZeRO, gradient buckets and their reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parallel3d.config.conflicts import Conflict, NoneOf, OneOf
from parallel3d.config.values import (
    FREE,
    LAYOUT,
    REPORTED,
    key,
)


@dataclass
class ZeroKeys:
    """The sharding of states, gradients and parameters over dp."""

    zero: int = key(
        0,
        "ZeRO stage (Rajbhandari et al. 2020): 1 shards the optimizer's state over dp, 2 the "
        "gradients too, 3 the parameters too",
        minimum=0,
        maximum=3,
        resume=LAYOUT,
        tried=(1, 2, 3),
    )


@dataclass
class DataParallelConfig:
    """Gradient buckets and their reduction."""

    RESUME: ClassVar[str] = FREE
    bucket_cap_mb: float | None = key(
        None,
        "MiB at which a gradient bucket closes, as in PyTorch's DDP; null: first 1, then 25, or "
        "128 on a GPU",
        above=0,
    )
    overlap: bool = key(
        True,
        "reduce each bucket during the last backward",
    )
    hierarchical: bool = key(
        False,
        "where data-parallel groups straddle NVLink domains, reduce inside each domain first and "
        "then between domains; this changes the order of the sums, so the last bits differ",
    )
    comm_hook: str = key(
        "none",
        "how gradient buckets are sent: none (fp32 sums) or bf16 (half the bytes, rounded)",
        choices=("none", "bf16"),
        resume=REPORTED,
    )
    shard_size: int | None = key(
        None,
        "zero=2 and 3: number of dp ranks that share one copy of the model; further copies are "
        "replicas (HSDP); null: all of dp",
        minimum=1,
        tried=(2,),
    )
    reduce_every_microbatch: bool | None = key(
        None,
        "zero=2 and 3: reduce-scatter the gradients in every backward, so that none are held "
        "whole; false: accumulate them whole and reduce-scatter once a step; null: true under "
        "zero=3, false under zero=2",
    )

    def reduces_every_microbatch(self, zero: int) -> bool:
        """Returns `reduce_every_microbatch` or, if it is null, its default under ZeRO stage `zero`.

        Stage 3 is chosen to save memory, and whole gradients in fp32 would take twice the memory of
        the bf16 parameters that it frees. Stage 2 keeps the parameters whole, and one reduction a
        step sends less.
        """
        if self.reduce_every_microbatch is None:
            return zero == 3
        return self.reduce_every_microbatch


CONFLICTS = (
    *(
        Conflict(
            {key: NoneOf(off), "zero": NoneOf(0)},
            f"{{{key}}} applies to sums of whole gradients, and {{zero}} scatters them",
            (("zero", 0), (key, off)),
        )
        for key, off in (("ddp.hierarchical", False), ("ddp.comm_hook", "none"))
    ),
    Conflict(
        {"ddp.comm_hook": NoneOf("none"), "ddp.hierarchical": OneOf(True)},
        "{ddp.comm_hook} and {ddp.hierarchical} are two ways to sum a bucket",
        (("ddp.hierarchical", False), ("ddp.comm_hook", "none")),
    ),
    *(
        Conflict(
            {key: given, "zero": OneOf(0, 1)},
            f"{{{key}}} only has an effect with zero=2 and zero=3, not with {{zero}}",
            ((key, None),),
        )
        for key, given in (
            ("ddp.reduce_every_microbatch", OneOf(True)),
            ("ddp.shard_size", NoneOf(None)),
        )
    ),
)
