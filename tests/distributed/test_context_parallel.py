"""Context parallelism trains the same model: losses, norms and weights are the reference's.

The reference knows of no ranks. A small set of combinations, made by a greedy search, holds every
pair of levels that can meet. The samples' documents and masks meet the cuts of the split: documents
of one token, of odd lengths, as long as the sample, that end on a cut or one token beside it, and
samples in which one rank learns nothing, or the others nothing; most lengths are such that 2 · cp
does not divide them.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Mapping
from itertools import combinations, islice, product
from operator import itemgetter
from typing import Any

import pytest

from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_cases
from tests.distributed.pool import Pool

Levels = Mapping[str, Any]
Group = frozenset[tuple[str, Any]]

SAMPLES = 4
GROWN = ((0, SAMPLES), (1, 2 * SAMPLES))
FROZEN = ("layers.0.attention.k.weight", "layers.0.mlp.up.weight")
BY_NAME = (
    ("*.attention.v.*", (("lr_mult", 0.3),)),
    ("layers.*", (("lr_mult", 1.2), ("wd_mult", 4.0))),
)
CHUNKS = {"interleaved": 2, "interleaved_zb": 2, "zbv": 2}
# Query heads, key-value heads, and the rest of a model.
MODELS: Mapping[str, tuple[str, int, int, tuple[tuple[str, Any], ...]]] = {
    "gpt": ("gpt_tiny", 12, 12, (("head_dim", 4), ("max_position_embeddings", 24))),
    "llama": ("llama_tiny", 8, 2, (("rotary_percent", 0.5),)),
    "qwen": (
        "llama_tiny", 12, 1,
        (("head_dim", 6), ("qk_norm", True), ("attention_bias", "qkv"), ("rotary_base", 100.0)),
    ),
    "one head": ("llama_tiny", 1, 1, (("head_dim", 16),)),
}  # fmt: skip
FACTORS: Levels = {
    "cp": (2, 3, 4),
    "tp": (1, 2),
    "pp": (1, 2),
    "dp": (1, 2),
    "style": ("gather", "heads", "ring"),
    "zero": (0, 1, 2, 3),
    "sp": ("no", "whole", "in pieces"),
    "recompute": ("none", "[norm,activation,attention]", "full"),
    "schedule": ("1f1b", "interleaved", "zbv"),
    "model": tuple(MODELS),
    "optimizer": ("sgd", "adamw", "muon"),
    "tied": (True, False),
    "documents": (True, False),
    "balance": (False, True),
    "length": (24, 13, 15),
    "dropout": (0.0, 0.2),
    "microbatch": (1, 2),
    "buckets": ("overlap", "alone", "measured"),
    "treatment": ("plain", "averaged", "by name", "grown"),
}

LEVELS = [(name, value) for name, values in FACTORS.items() for value in values]


def works(of: Levels) -> bool:
    """Whether a combination says something and is allowed: what a layout has not, is left at its
    default."""
    tp, cp, zero = of["tp"], of["cp"], of["zero"]
    _, heads, kv_heads, _ = MODELS[of["model"]]
    here, kv_here = heads // tp, max(1, kv_heads // tp)
    return (
        ranks_of(of) <= 8
        and heads % tp == 0
        and (tp > 1 or of["sp"] == "no")
        and (of["pp"] > 1 or of["schedule"] == "1f1b")
        and of["pp"] * of["dp"] * of["microbatch"] <= SAMPLES
        and (zero < 2 or (of["schedule"] == "1f1b" and of["buckets"] != "measured"))
        and (of["style"] != "ring" or not of["dropout"])
        and (of["documents"] or not of["balance"])
        and (
            of["style"] != "heads" or (here % cp == 0 and (kv_here % cp == 0 or cp % kv_here == 0))
        )
    )


def layout_of(of: Levels) -> Sizes:
    return tuple(of[name] for name in ("tp", "pp", "dp", "cp"))


def ranks_of(of: Levels) -> int:
    return math.prod(layout_of(of))


def groups_of(of: Levels, size: int) -> set[Group]:
    """All groups of so many levels of one combination."""
    return set(map(frozenset, combinations(of.items(), size)))


def drawn() -> Iterator[dict[str, Any]]:
    """Yields combinations that work, at random."""
    rng = random.Random(0)
    while True:
        levels = {name: rng.choice(values) for name, values in FACTORS.items()}
        if works(levels):
            yield levels


@functools.cache
def chosen_levels(size: int = 2, tries: int = 300) -> list[Levels]:
    """Combinations that hold every group of `size` levels that `tries` random ones have.

    One after the other: of those drawn the one with the most that is new, for its ranks, changed
    level by level while that makes it better.
    """
    left = [(levels, groups_of(levels, size)) for levels in islice(drawn(), tries)]
    missing = set().union(*(groups for _, groups in left))
    found: list[Levels] = []

    def gain(levels: Levels, groups: set[Group]) -> float:
        return len(groups & missing) / (4 + ranks_of(levels))

    while missing:
        best, most = max(
            ((levels, gain(levels, groups)) for levels, groups in left), key=itemgetter(1)
        )
        for name, value in LEVELS:
            other = best | {name: value}
            if works(other) and (found_here := gain(other, groups_of(other, size))) > most:
                best, most = other, found_here
        found.append(best)
        missing -= groups_of(best, size)
        left = [(levels, rest) for levels, groups in left if (rest := groups & missing)]
    return found


def case_of(of: Levels) -> Case:
    preset, heads, kv_heads, rest = MODELS[of["model"]]
    of_heads = {"num_attention_heads": heads, "num_query_groups": kv_heads}
    model = {**of_heads, "seq_length": of["length"], **dict(rest)}
    if of["dropout"]:
        model["dropout"] = of["dropout"]
    optim: dict[str, Any] = {}
    if of["treatment"] == "averaged":
        optim = {"ema_decay": 0.6, "state": "bf16"}
    elif of["treatment"] == "by name":
        optim = {"freeze": FROZEN, "groups": BY_NAME}
    batch = SAMPLES * (2 if of["treatment"] == "grown" else 1)
    problem = Problem(
        *(preset, of["optimizer"], of["tied"]),
        model=tuple(model.items()),
        optim=tuple(optim.items()),
        layers=of["pp"] * CHUNKS.get(of["schedule"], 1) if of["pp"] > 1 else 2,
        steps=2,
        batch=batch,
        batches=GROWN if of["treatment"] == "grown" else (),
        documents=of["documents"],
        ranks=of["cp"],
    )
    keys = (
        ("vpp", CHUNKS.get(of["schedule"], 1)),
        ("zero", of["zero"]),
        ("recompute", of["recompute"]),
        ("tensor_parallel.chunks", 2 if of["sp"] == "in pieces" else 1),
        ("ddp.bucket_order", "measured" if of["buckets"] == "measured" else "model"),
        ("context_parallel.style", of["style"]),
        ("context_parallel.balance", of["balance"]),
    )
    return Case(
        problem,
        of["schedule"],
        of["sp"] != "no",
        microbatches=batch // of["dp"] // of["microbatch"],
        bucket_cap_mb=0.02,
        overlap=of["buckets"] != "alone",
        keys=keys,
    )


def sizes_and_case(of: Levels) -> tuple[Sizes, Case]:
    return layout_of(of), case_of(of)


# Written out, so that only who runs them chooses: (tp, pp, dp, cp).
LAYOUTS = sorted(
    sizes for sizes in product((1, 2), (1, 2), (1, 2), (2, 3, 4)) if math.prod(sizes) <= 8
)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_layout_trains_as_the_reference_does(
    sizes: Sizes, pool: Pool, references: References
) -> None:
    cases = [case_of(levels) for levels in chosen_levels() if layout_of(levels) == sizes]
    check_cases(sizes, cases, pool, references)
