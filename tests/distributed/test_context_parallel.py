"""Context parallelism trains the same model: losses, norms and weights are the reference's."""

from __future__ import annotations

import pytest

from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_cases
from tests.distributed.pool import Pool

GPT = Problem("gpt_tiny", "sgd", True, documents=True)
LLAMA = Problem("llama_tiny", "sgd", False)
GATHER, RING, HEADS = (
    (("context_parallel.style", style),) for style in ("gather", "ring", "heads")
)
CASES = {
    (1, 1, 1, 2): [Case(GPT), Case(LLAMA), Case(GPT, keys=RING), Case(LLAMA, keys=HEADS)],
    (1, 1, 1, 3): [Case(GPT), Case(LLAMA, keys=RING)],
    (1, 1, 1, 4): [Case(GPT, keys=HEADS), Case(LLAMA), Case(LLAMA, keys=HEADS)],
    (2, 1, 1, 2): [Case(GPT, sp=True), Case(LLAMA)],
    (1, 2, 1, 2): [Case(GPT, keys=(("zero", 1),)), Case(LLAMA)],
    (1, 1, 2, 2): [Case(GPT, keys=(("zero", 3),)), Case(LLAMA)],
}


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_layouts_train_the_model_of_the_reference(
    pool: Pool, references: References, sizes: tuple[int, ...]
) -> None:
    check_cases(sizes, CASES[sizes], pool, references)
