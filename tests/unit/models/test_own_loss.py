"""Tests that a user's own loss is summed as it says, and that other returns are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.comm.group import SINGLE
from parallel3d.errors import UserError
from parallel3d.models.cross_entropy import vocab_parallel_cross_entropy
from parallel3d.models.own_loss import Loss, SumsOfLosses

X = torch.tensor([1.0, 2.0], requires_grad=True)


def test_counts_and_terms_add_up_over_micro_batches_and_are_cleared() -> None:
    sums = SumsOfLosses()
    first = sums.add(Loss(X.sum(), 2, {"aux": X.sum()}))
    sums.add(Loss(X.sum(), torch.tensor(0.5), {"aux": 1}))
    assert first.item() == 3.0 and first.requires_grad
    taken = sums.take()
    assert taken.count.item() == 2.5 and taken.count.dtype == torch.float64
    assert {name: term.item() for name, term in taken.terms.items()} == {"aux": 4.0}
    assert not taken.terms["aux"].requires_grad
    sums.add(Loss(X.sum(), 0, {"aux": 0.0}))
    assert sums.take().count.item() == 0.0


def test_the_sum_is_wide_so_that_half_precision_rounds_no_scale() -> None:
    half = X.to(torch.bfloat16).sum()
    assert SumsOfLosses().add(Loss(half, 1)).dtype == torch.float32
    assert SumsOfLosses().add(Loss(X.double().sum(), 1)).dtype == torch.float64


def test_an_evaluation_may_have_terms_of_its_own_and_needs_no_gradient() -> None:
    sums = SumsOfLosses()
    sums.add(Loss(X.sum(), 1))
    sums.take()
    with torch.no_grad():
        sums.add(Loss(X.sum(), 1, {"accuracy": 1}))
    assert list(sums.take().terms) == ["accuracy"]


BAD: dict[str, tuple[Any, str]] = {
    "a mean": (X.mean(), r"returned a tensor of type float32, but must return p3d.Loss\(sum, co"),
    "none": (None, r"returned None, but must return p3d.Loss\(sum, count\)"),
    "a tuple": ((X.sum(), 2), r"returned a tuple of 2, but must return p3d.Loss"),
    "a number": (Loss(3.0, 1), r"sum=…\) with the number 3.0, but sum must be a tensor"),
    "rows": (Loss(X, 2), r"a tensor of shape \(2,\) of type float32, but .* with \.sum\(\)"),
    "integers": (Loss(torch.tensor(3), 2), "of type int64, but sum must be a floating-point"),
    "detached": (Loss(X.sum().detach(), 2), r"a sum without a gradient; .* without detach\(\)"),
    "no count": (Loss(X.sum(), None), r"count=…\) with None, but count must be the number of it"),
    "counts": (Loss(X.sum(), torch.ones(2)), r"with a tensor of shape \(2,\) of type float32, bu"),
    "negative": (Loss(X.sum(), -3), r"p3d.Loss\(count=-3\), but .* 0 or more, and finite"),
    "nan": (Loss(X.sum(), torch.tensor(torch.nan)), r"count=nan\), but count must be a number"),
    "no names": (Loss(X.sum(), 1, [X.sum()]), "type list, but terms must map names to sums"),
    "a bad name": (Loss(X.sum(), 1, {"a b/c": 1}), "the term 'a b/c', but .*such as a_b_c"),
    "a bad term": (Loss(X.sum(), 1, {"aux": X}), r"the term aux with a tensor of shape \(2,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_another_return_is_refused_with_what_to_return(name: str) -> None:
    returned, said = BAD[name]
    with pytest.raises(UserError, match=said):
        SumsOfLosses().add(returned)


def test_other_terms_than_before_are_refused() -> None:
    sums = SumsOfLosses()
    sums.add(Loss(X.sum(), 1, {"aux": 1, "main": 2}))
    with pytest.raises(UserError, match=r"terms \(main\) for one .* and \(aux, main\) for another"):
        sums.add(Loss(X.sum(), 1, {"main": 2}))


def naive(logits: Tensor, labels: Tensor, mask: Tensor, smoothing: float, z: float) -> Tensor:
    """Returns the sum of the unmasked losses, by the formula."""
    log = torch.log_softmax(logits, -1)
    of_label = -log.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    loss = (1 - smoothing) * of_label - smoothing * log.mean(-1)
    return ((loss + z * torch.logsumexp(logits, -1).square()) * mask).sum()


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2)])
def test_the_cross_entropy_and_its_gradient_are_those_of_the_formula(
    smoothing: float, z: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    given = 3 * torch.randn(2, 5, 7, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 7, (2, 5), generator=generator)
    mask = torch.rand(2, 5, generator=generator) < 0.6
    ours, theirs = (given.clone().requires_grad_() for _ in range(2))
    loss = vocab_parallel_cross_entropy(
        ours.tanh(), labels, mask, SINGLE, label_smoothing=smoothing, z_loss=z
    )
    (loss.sum / 3).backward()
    expected = naive(theirs.tanh(), labels, mask, smoothing, z)
    (expected / 3).backward()
    torch.testing.assert_close(loss.sum, expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
    assert int(loss.count) == int(mask.sum())
    plain = naive(theirs.tanh(), labels, mask, 0.0, 0.0)
    if smoothing or z:
        torch.testing.assert_close(loss.terms["cross_entropy"], plain.detach(), rtol=1e-12, atol=0)
    assert list(loss.terms) == ["cross_entropy"] * bool(smoothing or z) + ["z_loss"] * bool(z)
    with torch.no_grad():
        evaluated = vocab_parallel_cross_entropy(
            theirs.tanh(), labels, mask, SINGLE, label_smoothing=smoothing, z_loss=z
        )
    torch.testing.assert_close(evaluated.sum, plain.detach(), rtol=1e-12, atol=0.0)


def test_the_cross_entropy_refuses_labels_of_another_shape() -> None:
    with pytest.raises(UserError, match=r"logits \(2, 3, 5\), labels \(2, 4\); labels and mask mu"):
        vocab_parallel_cross_entropy(
            torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64), None, SINGLE
        )


def test_the_cross_entropy_refuses_a_label_outside_of_the_vocabulary_unless_it_is_masked() -> None:
    logits, labels = torch.zeros(1, 2, 5), torch.tensor([[3, -100]])
    assert vocab_parallel_cross_entropy(logits, labels, labels >= 0, SINGLE).count.item() == 1
    with pytest.raises(UserError, match="got the label -100, but labels must be from 0 to 4; to"):
        vocab_parallel_cross_entropy(logits, labels, None, SINGLE)
