"""Trains gated DeltaNet beside full attention under several layouts, as the reference does it token
by token, and tests that ranks agree on its kernel."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.values import AUTO, FLA, TORCH
from parallel3d.errors import UserError
from parallel3d.models import delta_kernel
from parallel3d.models.keys import ModelConfig
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


def chosen(asked: str, broken: tuple[int, ...]) -> tuple[str, str]:
    """Returns the kernel, or the error, and what is printed where fla fails on some ranks."""
    groups = ProcessGroups.create(Layout(1, 1, 2), "cpu", 300)
    why = "its kernel fails" if groups.rank in broken else None
    model, layer = ModelConfig(layer_types=["gated_deltanet"]), SimpleNamespace(state_kernel=asked)
    run, said = SimpleNamespace(model=model, layer=layer), io.StringIO()
    works = {"why_not": lambda *_: why, "_may_use_fla": lambda *_: True}
    with patch.multiple(delta_kernel, **works), redirect_stderr(said):
        try:
            found = delta_kernel.choose_delta_kernel(run, torch.device("cpu"), groups.world)
        except UserError as error:
            found = str(error)
    groups.close()
    return found, said.getvalue()


def test_all_ranks_take_the_same_kernel(pool: Pool) -> None:
    line = "parallel3d: delta_kernel=auto takes the torch form of gated DeltaNet: on rank 1 its"
    assert pool.run(2, chosen, AUTO, ()) == [(FLA, "")] * 2
    (kernel, said), other = pool.run(2, chosen, AUTO, (1,))
    assert kernel == TORCH and said.startswith(line) and said.count("\n") == 1
    assert other == (TORCH, "")
    # Rank 0's own reason is among the notices of the run.
    assert pool.run(2, chosen, AUTO, (0,)) == [(TORCH, "")] * 2
    (mine, _), (others, _) = pool.run(2, chosen, FLA, (1,))
    assert mine == others and mine.startswith("delta_kernel=fla: on rank 1 its kernel fails; the")
