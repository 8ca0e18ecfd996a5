"""Keys of context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parallel3d.config.conflicts import Conflict, NoneOf, OneOf
from parallel3d.config.values import (
    FREE,
    STATE_STYLES,
    key,
)


@dataclass
class ContextParallelConfig:
    """Splitting of sequences over cp ranks; does not change results."""

    RESUME: ClassVar[str] = FREE
    style: str = key(
        "gather",
        "how attention reads the other ranks' tokens: gather all-gathers keys and values (Llama 3 "
        "report, §3.3.2); heads gives each rank all tokens of a part of the heads by all-to-all "
        "(Ulysses, Jacobs et al. 2023); ring passes keys and values from rank to rank (Liu et al. "
        "2023); auto takes the one that the planner prices lowest on cluster=",
        choices=("gather", "heads", "ring", "auto"),
    )
    balance: bool = key(
        True,
        "with data.document_mask: where documents make the usual split of attention uneven, choose "
        "equally many blocks of a sequence for each rank by their work; style=heads is always even",
    )
    states: str = key(
        "auto",
        "how layers with a state (gated_deltanet) read the tokens before theirs: chain all-gathers "
        "how each piece of a sequence changes the state, in bytes that do not grow with the "
        "sequence; heads gives each rank all tokens of a part of the heads by all-to-all; auto "
        "takes the one that sends fewer bytes",
        choices=STATE_STYLES,
    )


CONFLICTS = (
    Conflict(
        {"tensor_parallel.attention": OneOf("gather_qk"), "cp": NoneOf(1)},
        "{tensor_parallel.attention} reads whole sequences, and {cp} splits them",
        (("tensor_parallel.attention", "heads"), ("cp", 1)),
    ),
    Conflict(
        {"context_parallel.style": OneOf("ring"), "model.dropout": NoneOf(0.0), "cp": NoneOf(1)},
        "{context_parallel.style} merges parts of the softmax, and {model.dropout} would drop "
        "probabilities of each part",
        (("context_parallel.style", "gather"), ("model.dropout", 0.0)),
    ),
)
