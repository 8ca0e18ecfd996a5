"""Trains gated DeltaNet beside full attention under several layouts, as the reference does it token
by token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_cases
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

# With tp=4 two ranks share a key head.
MODEL = (
    ("num_query_groups", 4),
    ("layer_types", ("gated_deltanet", "gated_deltanet", "gated_deltanet", "full")),
    ("attention_gate", True),
    ("delta_key_heads", 2),
    ("delta_value_heads", 4),
    ("delta_key_size", 4),
    ("delta_value_size", 6),
    ("seq_length", 24),
)
ADAMW = Problem("llama_tiny", "adamw", tied=False, layers=4, model=MODEL, batch=8)
PACKS = replace(ADAMW, optimizer="sgd", tied=True, documents=True)
ONE = (*MODEL, ("delta_key_heads", 1), ("delta_negative", True), ("delta_convolution", 2))
ONE_KEY = replace(PACKS, model=ONE)
EXPERTS = replace(PACKS, model=(*MODEL, ("num_experts", 4), ("expert_ffn_size", 16)))
MUON = replace(ADAMW, optimizer="muon")
CASES: dict[Sizes, list[Case]] = {
    (1, 1, 1): [Case(PACKS), Case(MUON)],
    (2, 1, 1): [Case(ONE_KEY), Case(MUON, sp=True, keys=(("recompute", "[norm,attention,mlp]"),))],
    (4, 1, 1): [Case(PACKS), Case(ADAMW, sp=True)],
    (2, 1, 2): [
        Case(ADAMW, sp=True, keys=(("zero", 1), ("recompute", "selective"))),
        Case(PACKS, keys=(("zero", 3), ("recompute", "full"))),
        Case(PACKS, keys=(("zero", 2),)),
    ],
    (1, 2, 1): [
        Case(PACKS, schedule="zb_h1"),
        Case(ADAMW, keys=(("recompute", "[norm,mlp]"),)),
    ],
    (2, 1, 1, 1, 2): [Case(EXPERTS, sp=True)],
}


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_gated_deltanet_trains_like_the_reference(
    sizes: Sizes, pool: Pool, references: References
) -> None:
    check_cases(sizes, CASES[sizes], pool, references)
