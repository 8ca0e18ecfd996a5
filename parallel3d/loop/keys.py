"""Keys of the training loop: batch sizes, length of the run, evaluation and profiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from parallel3d.config.conflicts import Conflict, NoneOf, OneOf, exclusive
from parallel3d.config.values import (
    FREE,
    LAYOUT,
    RANKS,
    REFUSED,
    key,
)


@dataclass
class StepKeys:
    """Sequences of a step, and the seed of their order."""

    micro_batch_size: int = key(4, "sequences per forward pass", minimum=1, resume=LAYOUT)
    global_batch_size: int = key(
        16,
        "sequences per optimizer step, over all ranks",
        minimum=1,
    )
    seed: int = key(
        1234,
        "initial weights and sample order are functions of this number",
        minimum=0,
        resume=REFUSED,
    )


DEFAULT_STEPS = 600


@dataclass
class TrainConfig:
    """Length of the run, evaluation and logging."""

    steps: int | None = key(
        None,
        f"number of optimizer steps; null: from tokens or epochs, otherwise {DEFAULT_STEPS}",
        minimum=1,
        tried=(4,),
    )
    tokens: float | None = key(
        None,
        "number of tokens to train on (masked ones included) instead of a number of steps, such as "
        "9.8e6 or 2e12; rounded up to whole steps",
        minimum=1,
        maximum=1e18,
        tried=(512,),
    )
    epochs: float | None = key(
        None,
        "passes over the training part of the corpus instead of a number of steps, rounded up to "
        "whole steps; not for a blend",
        above=0,
        tried=(1.0,),
    )
    batch_schedule: Any = key(
        None,
        "global batch by the samples read before a step, as in {0:16,1000:32}: 16, and 32 from "
        "1000 samples on; the last size must be global_batch_size; null: always global_batch_size",
        holds=dict[float, float],
        tried=({0: 4, 4: 8},),
    )
    eval_every: int = key(
        100,
        "steps between evaluations; 0: only at the end",
        minimum=0,
    )
    eval_batches: int | None = key(
        4,
        "global batches per evaluation of each validation set, fewer if the set is smaller; null: "
        "the whole set; 0: no evaluation",
        minimum=0,
    )
    eval_only: bool = key(
        False,
        "evaluate the newest checkpoint of run=, append the figures to its evaluations.jsonl, and "
        "train nothing",
        resume=FREE,
        once=True,
    )
    log_every: int = key(
        10,
        "without a terminal: steps between printed lines",
        minimum=1,
        resume=FREE,
    )
    progress: bool = key(True, "progress bar (on a terminal)", resume=FREE)
    save_weights: bool = key(
        False,
        "write the initial and the final weights, unsharded, as safetensors (small models)",
        resume=FREE,
    )


@dataclass
class ProfileConfig:
    """Steps under `torch.profiler`: `profile.steps=[10,12] profile.ranks=[0]`."""

    ONCE: ClassVar[bool] = True
    RESUME: ClassVar[str] = FREE
    steps: list[int] | None = key(
        None,
        "first and last step to profile, both included; each rank of profile.ranks writes a Chrome "
        "trace into profile/ of the run directory; null or []: none",
        tried=([1, 2],),
    )
    ranks: Any = key(
        [0],
        "ranks to profile: their numbers, or all",
        choices=("all",),
        list_of=RANKS,
    )
    memory: bool = key(
        False,
        "on GPUs, also write a snapshot of the allocator with its history of these steps, for "
        "pytorch.org/memory_viz",
    )


LENGTHS = ("train.steps", "train.tokens", "train.epochs")  # at most one is given
CONFLICTS = (
    *exclusive(*LENGTHS),
    Conflict(
        {"train.epochs": NoneOf(None), "data.name": OneOf("blend")},
        "{train.epochs} counts passes over one corpus, but {data.name} reads each part as often "
        "as its weight says: give train.tokens instead",
        (("train.epochs", None),),
    ),
)
