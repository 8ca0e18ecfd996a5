"""Tests the gradient of an embedding that every tensor rank computes for itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel3d.comm.group import SINGLE, Group
from parallel3d.parameters.state import state_of
from parallel3d.tensor_parallel import embedding
from parallel3d.tensor_parallel.embedding import VocabParallelEmbedding
from tests.operators import Operators

PAIR = Group("tp", (0, 1), 0, None)
ADDS = ("index_add_", "index_put_", "_index_put_impl_")


def gradient(group: Group, sp: bool, bucket: bool) -> tuple[list[str], Tensor]:
    """Returns the function that added the rows, and the table's gradient."""
    generator = torch.Generator().manual_seed(1)
    layer = VocabParallelEmbedding(
        11, 4, group, replicated=True, sequence_parallel=sp, sum_partial_gradients=False
    )
    table = layer.weight
    table.data = torch.randn(11, 4, generator=generator)
    if bucket:
        state_of(table).main_grad = torch.zeros(11, 4)
    ids = torch.randint(0, 11, (2, 32), generator=generator)
    y = layer(ids)
    with Operators() as operators:
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    added = [name for name in operators.names if name in ADDS]
    return added, state_of(table).main_grad if bucket else table.grad


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [True, False])
@pytest.mark.parametrize(
    ("group", "sp", "alike"), [(PAIR, False, True), (PAIR, True, False), (SINGLE, False, False)]
)
def test_ranks_whose_gradients_are_not_synchronised_add_in_a_fixed_order(
    group: Group, sp: bool, alike: bool, bucket: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On accelerators `index_add_` adds by atomics and `index_put_` sorts."""
    how, plain = gradient(group, sp, bucket)
    assert how == ["index_add_"]
    monkeypatch.setattr(embedding, "is_on_accelerator", lambda tensor: True)
    how, own = gradient(group, sp, bucket)
    assert ("index_add_" in how) != alike and how[0].strip("_").startswith("index")
    torch.testing.assert_close(own, plain)


@pytest.mark.parametrize("bucket", [True, False])
def test_the_tokens_of_a_long_sequence_are_added_a_part_at_a_time(
    bucket: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = gradient(SINGLE, False, bucket)
    monkeypatch.setattr(embedding, "LOOKUP_TOKENS", 15)
    how, parts = gradient(SINGLE, False, bucket)
    assert how == ["index_add_"] * 5 and torch.equal(parts, whole)
