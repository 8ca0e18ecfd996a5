"""Options of model and loss that a layout could get wrong: every layout is the reference still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, differences, run_cases
from tests.distributed.pool import Pool

GPT = Problem("gpt_tiny", "sgd", tied=True)
LLAMA = Problem("llama_tiny", "adamw", tied=False)
SMOOTHED = (("label_smoothing", 0.1), ("z_loss", 0.01))
CHUNKS = (("loss.chunk_tokens", 7),)
# Key-value heads on two or all of the ranks.
PAIRS = replace(LLAMA, model=(("num_query_groups", 2),))
ONE_HEAD = replace(LLAMA, optimizer="sgd", tied=True, model=(("num_query_groups", 1),))
BIASED = replace(ONE_HEAD, model=(*ONE_HEAD.model, ("bias", True)))
ZERO1 = (("zero", 1),)
GATHER_QK = (("tensor_parallel.attention", "gather_qk"),)
# One probability for all sites: embedding, attention's probabilities, both residual branches.
GPT_DROPS = replace(GPT, model=(("dropout", 0.2),))
LLAMA_DROPS = replace(LLAMA, model=(("dropout", 0.1), ("num_query_groups", 2)))

CASES = [
    (
        (1, 1, 1),
        [
            Case(replace(GPT, loss=SMOOTHED), keys=CHUNKS),
            Case(GPT_DROPS),
            Case(LLAMA_DROPS, microbatches=2, keys=(("recompute", "full"),)),
        ],
    ),
    (
        (2, 1, 1),
        [
            Case(replace(GPT, loss=SMOOTHED), sp=True, embedding="replicated", keys=CHUNKS),
            Case(replace(LLAMA, loss=SMOOTHED), keys=CHUNKS),
            Case(GPT, parallel_output=False, embedding="replicated", keys=CHUNKS),
            Case(GPT_DROPS, sp=True),
            Case(LLAMA_DROPS, keys=(("recompute", "selective"),)),
            Case(GPT_DROPS, sp=True, keys=GATHER_QK),
        ],
    ),
    (
        (4, 1, 1),
        [
            Case(replace(GPT, loss=SMOOTHED), keys=CHUNKS),
            Case(PAIRS, sp=True),
            Case(replace(PAIRS, optimizer="sgd"), bucket_cap_mb=0.02),
            Case(BIASED, sp=True),
            Case(LLAMA_DROPS, sp=True),
            Case(LLAMA_DROPS, keys=(*GATHER_QK, ("recompute", "full"))),
        ],
    ),
    (
        (2, 2, 1),
        [
            Case(replace(GPT, loss=SMOOTHED), sp=True, keys=CHUNKS),
            Case(replace(LLAMA, loss=SMOOTHED[1:]), schedule="gpipe", parallel_output=False),
            Case(ONE_HEAD),
        ],
    ),
    (
        (2, 1, 2),
        [
            Case(BIASED, bucket_cap_mb=0.02, keys=ZERO1),
            Case(replace(PAIRS, model=ONE_HEAD.model), sp=True, keys=ZERO1),
        ],
    ),
    (
        (1, 2, 2),
        [Case(replace(LLAMA, loss=SMOOTHED[:1]), keys=(*CHUNKS, *ZERO1)), Case(GPT_DROPS)],
    ),
    ((1, 4, 1), [Case(replace(GPT_DROPS, layers=5), microbatches=4)]),
]


@pytest.mark.parametrize(
    ("sizes", "cases"), CASES, ids=["tp{}-pp{}-dp{}".format(*sizes) for sizes, _ in CASES]
)
def test_options_train_as_the_reference_does(
    sizes: tuple[int, int, int], cases: list[Case], pool: Pool, references: References
) -> None:
    by_rank = pool.run(sizes[0] * sizes[1] * sizes[2], run_cases, sizes, cases, timeout_s=600)
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        found = differences(outcomes, references.of(case.problem), case.problem)
        assert not found, f"{case}: {found}"
