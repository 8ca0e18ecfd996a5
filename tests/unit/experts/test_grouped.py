"""Tests one rank's experts in memory that is never zero by chance, and the order of their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from parallel3d.device.grouped import Groups
from parallel3d.experts import grouped
from parallel3d.experts.grouped import Activation, add_biases, run_experts
from parallel3d.experts.rows import RowCounts, Rows, sum_of_slots
from parallel3d.models.mlp import activate
from parallel3d.models.ops import weighed_backward, weighed_forward
from parallel3d.parameters.state import state_of
from tests.distributed.seams import EXPERT_GRADIENT, SUMMED_SLOTS, Mutation, planted

HIDDEN, WIDTH, EXPERTS = 6, 5, 4
# Experts of tokens by slot; EXPERTS stands for an expert of another rank.
CHOICES = {
    "all-chosen": [[0, 1], [3, 2], [1, 0], [2, 3]],
    "some-without-tokens": [[1, 3], [3, 1], [1, 3]],
    "all-to-one": [[2, EXPERTS], [2, EXPERTS], [EXPERTS, 2]],
    "none-here": [[EXPERTS, EXPERTS]] * 3,
    "no-tokens": [],
}


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Fills with NaN what PyTorch leaves uninitialised."""
    with (
        patch("torch.Tensor.new_empty", lambda x, *size, **how: x.new_full(_size(size), torch.nan)),
        patch("torch.empty", lambda *size, **how: torch.full(_size(size), torch.nan, **how)),
        patch("torch.empty_like", lambda x, **how: torch.full_like(x, torch.nan, **how)),
    ):
        yield


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if size and not isinstance(size[0], int) else size


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(chosen: Tensor) -> Rows:
    return RowCounts(chosen, EXPERTS, chosen.numel()).rows()


def expected_of(
    x: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor,
    down_bias: Tensor,
    experts: Tensor,
) -> Tensor:
    """Returns the weighted sums, one token and one slot at a time."""
    ups, downs = up.view(EXPERTS, 2 * WIDTH, HIDDEN), down.view(EXPERTS, HIDDEN, WIDTH)
    biases = up_bias.view(EXPERTS, -1), down_bias.view(EXPERTS, -1)
    out = []
    for token, chosen, weight in zip(x, experts.tolist(), weights, strict=True):
        total = token * 0.0
        for slot, expert in enumerate(chosen):
            if expert < EXPERTS:
                gate, inner = (ups[expert] @ token + biases[0][expert]).chunk(2)
                found = downs[expert] @ (gate * gate.sigmoid() * inner) + biases[1][expert]
                total = total + weight[slot] * found
        out.append(total)
    return torch.stack(out) if out else x * 0.0


PLAIN = Activation(partial(activate, "swiglu"))


def check(
    experts: list[list[int]],
    main_grads: bool,
    activation: Activation = PLAIN,
    biased: bool = False,
) -> None:
    """Compares results and gradients with a loop, in memory that is NaN before it is written."""
    chosen = torch.tensor(experts, dtype=torch.int64).view(-1, 2)
    values = (
        *(drawn(len(chosen), HIDDEN, seed=1), drawn(len(chosen), 2, seed=2)),
        *(drawn(EXPERTS * 2 * WIDTH, HIDDEN, seed=3), drawn(EXPERTS * HIDDEN, WIDTH, seed=4)),
        *(drawn(EXPERTS * 2 * WIDTH, seed=6) * biased, drawn(EXPERTS * HIDDEN, seed=7) * biased),
    )
    leaves = [value.clone().requires_grad_() for value in values]
    theirs = expected_of(*leaves, chosen)
    grad = drawn(len(chosen), HIDDEN, seed=5)
    wanted = torch.autograd.grad(theirs, leaves, grad, allow_unused=True)
    given = [value.clone().requires_grad_() for value in values]
    if main_grads:
        for weight in given[2:4]:
            state_of(weight).main_grad = torch.zeros_like(weight)
    with uninitialised_is_nan():
        rows = rows_of(chosen)
        ours = run_experts(*given[:4], rows, activation, given[4] if biased else None)
        if biased:
            ours = add_biases(ours, given[1], given[5], rows)
        ours.backward(grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    for leaf, gradient in zip(given[: None if biased else 4], wanted, strict=biased):
        found = state_of(leaf).main_grad if state_of(leaf).main_grad is not None else leaf.grad
        expected = torch.zeros_like(leaf) if gradient is None else gradient
        assert found is not None  # zero and not missing: AdamW decays unused experts too
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("experts", CHOICES.values(), ids=CHOICES.keys())
def test_grouped_experts_equal_a_loop_over_tokens(
    experts: list[list[int]], main_grads: bool
) -> None:
    check(experts, main_grads)


@pytest.mark.parametrize("experts", CHOICES.values(), ids=CHOICES.keys())
def test_biases_of_experts_equal_a_loop_over_tokens(experts: list[list[int]]) -> None:
    """The biases of the second matrices are weighed as their results are; an expert without rows
    has a gradient of zeros."""
    check(experts, main_grads=False, biased=True)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_an_accelerator_uses_the_kernels_of_an_activation_that_has_some(has_kernels: bool) -> None:
    """Both kernels run, and without them the plain activation does in both directions."""
    ran: list[str] = []

    def weighed(*given: Any) -> Tensor:
        ran.append("forward")
        return weighed_forward(*given, "swiglu")

    def backward(*given: Any) -> tuple[Tensor, ...]:
        ran.append("backward")
        return weighed_backward(*given, "swiglu")

    kernels = (weighed, backward) if has_kernels else ()
    with patch.object(grouped, "is_on_accelerator", lambda tensor: True):
        check(CHOICES["all-chosen"], False, Activation(PLAIN.plain, *kernels))
    assert ran == ["forward", "backward"] * has_kernels


@planted(SUMMED_SLOTS)
def nothing_behind_the_last_row(sound: Any, rows: Tensor, places: Tensor) -> Tensor:
    """The row after the last one, which stands for none, is not zeroed."""
    padded = torch.cat((rows, rows.new_empty(1, rows.shape[1])))
    return sum(padded.index_select(0, places[:, slot]) for slot in range(places.shape[1]))


@planted(EXPERT_GRADIENT)
def gradients_of_used_experts_alone(
    sound: Any, weight: Tensor, grad: Callable[[], Tensor], x: Callable[[], Tensor], groups: Groups
) -> Tensor:
    """A grouped GEMM writes no gradient for an expert without rows."""
    out = torch.empty_like(weight)
    for matrix, rows in zip(out.unflatten(0, (len(groups.ends), -1)), groups.spans(), strict=True):
        if rows.start < rows.stop:
            matrix.copy_(grad()[rows].t() @ x()[rows])
    return out


@pytest.mark.parametrize("bug", [nothing_behind_the_last_row, gradients_of_used_experts_alone])
def test_unwritten_memory_is_detected(bug: Mutation) -> None:
    with bug(), pytest.raises(AssertionError):
        check(CHOICES["all-to-one"], main_grads=False)


def test_rows_are_in_the_order_of_experts_and_tokens() -> None:
    rows = rows_of(torch.tensor([[1, 3], [3, 1], [EXPERTS, 0]]))
    assert rows.groups.counts == (1, 2, 0, 2)
    assert rows.groups.ends.tolist() == [1, 3, 3, 5]
    assert rows.tokens.tolist() == [2, 0, 1, 0, 1]
    assert rows.slots.tolist() == [5, 0, 3, 1, 2]
    assert rows.places.tolist() == [[1, 3], [4, 2], [5, 0]]


def test_a_token_sums_its_rows_in_the_order_of_its_slots() -> None:
    """1e8 + 1 is 1e8 in fp32, so that another order has another result."""
    rows = torch.tensor([[1.0], [1e8], [-1e8]])
    places = torch.tensor([[1, 2, 0], [0, 1, 2], [3, 0, 3]])
    assert sum_of_slots(rows, places).tolist() == [[1.0], [0.0], [1.0]]


def test_an_activation_in_bf16_is_rounded_once_with_its_weight() -> None:
    """Experts that pass their activation on show its rounding."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 5, generator=generator).bfloat16()
    weights = torch.rand(64, 1, generator=generator)
    up, down = torch.eye(5).bfloat16(), torch.eye(5).bfloat16()
    rows = RowCounts(torch.zeros(64, 1, dtype=torch.int64), 1, 64).rows()
    found = run_experts(x, weights, up, down, rows, Activation(lambda inner: inner))
    assert torch.equal(found, (x.float() * weights).bfloat16())
    assert not torch.equal(found, x * weights.bfloat16())


@pytest.mark.parametrize(("name", "limit"), [("swiglu", None), ("geglu", None), ("swiglu", 0.2)])
def test_the_kernels_of_a_weighed_activation_equal_its_plain_form(
    name: str, limit: float | None
) -> None:
    rows, grad = drawn(9, 2 * WIDTH, seed=1), drawn(9, WIDTH, seed=2)
    leaves = rows.requires_grad_(), drawn(9, seed=3).requires_grad_()
    plain = activate(name, leaves[0], limit) * leaves[1].unsqueeze(-1)
    wanted = (*torch.autograd.grad(plain, leaves, grad), plain)
    detached = [leaf.detach() for leaf in leaves]
    torch.testing.assert_close(weighed_forward(*detached, name, limit), plain.detach())
    found = weighed_backward(grad, *detached, name, limit)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-13)
