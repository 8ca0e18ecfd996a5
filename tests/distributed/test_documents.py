"""Documents that do not see each other: every layout trains as the reference does.

The reference writes each sample's mask out as a plain square and counts positions in a loop. A
small set of combinations, made by a greedy search, holds every pair of levels. The samples have
documents of one token, of odd lengths and as long as the sample, padding that nobody learns from,
and loss masks that differ much, so that the mean over the unmasked tokens of the global batch is
proved too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from parallel3d.data.corpus import Corpus
from parallel3d.topology.layout import Layout
from parallel3d.trainer import Trainer
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import (
    References,
    check_cases,
    cover,
    plain_groups,
)
from tests.distributed.pool import Pool

Sizes = tuple[int, int, int]
Pairs = frozenset[tuple[tuple[str, Any], tuple[str, Any]]]

LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2))
SCHEDULES = ("1f1b", "gpipe", "interleaved", "interleaved_zb", "zb_h1", "zbv", "v_half")
CHUNKS = {"interleaved": 2, "interleaved_zb": 2, "zbv": 2, "v_half": 2}
# What tensor parallelism may do beside splitting heads.
TENSOR: dict[str, tuple[bool, tuple[tuple[str, Any], ...]]] = {
    "plain": (False, ()),
    "sp": (True, ()),
    "sp in pieces": (True, (("tensor_parallel.chunks", 2),)),
    "gather_qk": (False, (("tensor_parallel.attention", "gather_qk"),)),
}
# Learned positions; RoPE on half of a head of shared key-value heads; norms of heads with scaled
# RoPE; a mixture.
MODELS: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "gpt": ("gpt_tiny", (("max_position_embeddings", 24),)),
    "llama": ("llama_tiny", (("rotary_percent", 0.5), ("num_query_groups", 2))),
    "qwen": (
        "llama_tiny",
        (
            *(("qk_norm", True), ("head_dim", 6), ("attention_bias", "qkv")),
            *(("rotary_base", 100.0), ("rope_scaling_factor", 4.0), ("rope_original_length", 8)),
        ),
    ),
    "mixed": ("llama_tiny", (("position_embedding", "learned"), ("embedding", "replicated"))),
}
RECOMPUTE = ("none", "[norm,activation,attention]", "full")


class Levels(NamedTuple):
    """One combination."""

    layout: Sizes
    schedule: str
    tensor: str
    zero: int
    recompute: str
    model: str
    optimizer: str
    drops: bool

    def works(self) -> bool:
        """Whether it says something: what a layout has not is left at its default."""
        tp, pp, dp = self.layout
        whole = self.schedule in ("1f1b", "gpipe")
        return (
            (tp > 1 or self.tensor == "plain")
            and (pp > 1 or self.schedule == "1f1b")
            and (dp > 1 or self.zero == 0)
            and (whole or self.zero < 2)
        )

    def pairs(self) -> Pairs:
        return frozenset(combinations(zip(self._fields, self, strict=True), 2))

    def case(self) -> Case:
        pp = self.layout[1]
        preset, model = MODELS[self.model]
        sp, keys = TENSOR[self.tensor]
        chunks = CHUNKS.get(self.schedule, 1)
        model += (("dropout", 0.2),) if self.drops else ()
        own = dict(model)
        keys += (("vpp", chunks), ("zero", self.zero), ("recompute", self.recompute))
        problem = Problem(
            *(preset, self.optimizer, self.optimizer == "sgd"),
            model=tuple((n, v) for n, v in model if n != "embedding"),
            layers=pp * chunks if pp > 1 else 2, steps=2, batch=12, documents=True,
        )  # fmt: skip
        return Case(
            problem, self.schedule, sp, microbatches=3 if pp > 1 else 2, bucket_cap_mb=0.02,
            embedding=own.get("embedding", "vocab_parallel"), keys=keys,
        )  # fmt: skip


def every_combination() -> Iterator[Levels]:
    rest = (TENSOR, range(4), RECOMPUTE, MODELS, ("sgd", "adamw"), (0, 1))
    for layout, schedule, *other, drops in product(LAYOUTS, SCHEDULES, *rest):
        levels = Levels(layout, schedule, *other, bool(drops))
        if levels.works():
            yield levels


@functools.cache
def chosen_levels() -> list[Levels]:
    """A small set of combinations that holds every pair of levels that can meet."""
    return cover({levels: levels.pairs() for levels in every_combination()})


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_layout_keeps_documents_apart_as_the_reference_does(
    sizes: Sizes, pool: Pool, references: References
) -> None:
    cases = [levels.case() for levels in chosen_levels() if levels.layout == sizes]
    check_cases(sizes, cases, pool, references)


def test_every_pair_that_can_meet_is_there() -> None:
    chosen = chosen_levels()
    assert {c.layout for c in chosen} == set(LAYOUTS)
    assert {c.schedule for c in chosen} == set(SCHEDULES)
    assert len(chosen) < 60
    assert len({replace(c.case().problem, batch=0) for c in chosen}) < 40


def test_documents_change_what_is_learned(references: References) -> None:
    """Else none of these cases would tell anything."""
    problem = chosen_levels()[0].case().problem
    losses = [
        references.of(replace(problem, documents=documents)).run.losses
        for documents in (False, True)
    ]
    assert all(abs(a - b) > 1e-3 for a, b in zip(*losses, strict=True))


def trained_on_packed_text(masks: bool) -> tuple[list[float], float, int]:
    """Losses of two steps, of the held-out split, and the documents of the first micro-batch."""
    groups = plain_groups(Layout(1, 1, 1))
    config = Case(Problem("gpt_tiny", "sgd", True, layers=1, batch=4)).config(groups.layout)
    config.data.document_mask = masks
    # Words of one to nine tokens, each with an end of text behind it.
    rng = np.random.default_rng(0)
    words = (rng.integers(1, 61, rng.integers(1, 10)) for _ in range(200))
    stream = np.concatenate([np.append(word, 0) for word in words]).astype("<u2")
    corpus = Corpus(stream[:-100], stream[-100:], "", config.model.vocab_size, eot=0)
    config.model.vocab_size = 257  # of bytes, which the corpus stands for
    trainer = Trainer(config, groups, torch.device("cpu"), corpus)
    steps = [trainer.train_step().loss for _ in range(2)]
    documents = trainer.train_batches.micro_batch(0, 0).documents
    held_out = trainer.evaluate()
    groups.close()
    return steps, held_out, 0 if documents is None else int(documents.blocks.table[0, 0, 0])


def test_a_run_reads_documents_at_the_ends_of_text_of_its_corpus(pool: Pool) -> None:
    plain, masked = (pool.run(1, trained_on_packed_text, masks)[0] for masks in (False, True))
    assert plain[2] == 0 and masked[2] > 4
    assert all(abs(a - b) > 1e-4 for a, b in zip(plain[0], masked[0], strict=True))
    assert abs(plain[1] - masked[1]) > 1e-4


@pytest.mark.parametrize(("precision", "sizes"), [("bf16", (2, 1, 1)), ("fp16", (1, 1, 2))])
def test_half_precision_keeps_documents_apart(
    precision: str, sizes: Sizes, pool: Pool, references: References
) -> None:
    problem = Problem(
        "llama_tiny", "sgd", True, precision, layers=2, steps=2, batch=12, documents=True
    )
    zero, sp = int(sizes[2] > 1), sizes[0] > 1
    cases = [Case(problem, sp=sp, keys=(("zero", zero), ("recompute", "full")))]
    check_cases(sizes, cases, pool, references)
