"""Trains a model whose kinds of layers differ in the number and the width of their heads.

Full layers have 8 query heads and 4 key-value heads, sliding layers 4 and 2, which are wider. So
with tp=4 only the sliding layers have key-value heads that two ranks share.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_cases
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

MODEL = (
    ("num_query_groups", 4),
    ("head_dim", 4),
    ("layer_types", ("full", "sliding")),
    ("sliding_window", 5),
)
NORMED = (*MODEL, ("qk_norm", True), ("sliding_rotary_base", 50.0))
PLAIN = Problem("llama_tiny", "sgd", tied=True, model=MODEL, two_kinds=True)
HEADS = replace(PLAIN, model=NORMED, optimizer="adamw", tied=False)
WHOLE = replace(PLAIN, model=(*NORMED, ("qk_norm_width", "full")), optimizer="muon", documents=True)
CASES: dict[Sizes, list[Case]] = {
    (4, 1, 1): [
        Case(PLAIN, sp=True, keys=(("zero", 1), ("recompute", "selective"))),
        Case(HEADS, keys=(("zero", 3),)),
        Case(WHOLE, sp=True),
    ],
    (1, 2, 2): [Case(WHOLE, keys=(("zero", 1),)), Case(HEADS, keys=(("recompute", "full"),))],
    (2, 1, 1, 2): [
        Case(replace(HEADS, ranks=2), keys=(("context_parallel.style", style),))
        for style in ("gather", "ring")
    ],
}


@pytest.mark.parametrize("sizes", CASES, ids=["tp", "pp", "cp"])
def test_kinds_with_other_heads_train_like_the_reference(
    sizes: Sizes, pool: Pool, references: References
) -> None:
    check_cases(sizes, CASES[sizes], pool, references)
