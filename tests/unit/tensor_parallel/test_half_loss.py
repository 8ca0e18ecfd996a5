"""Tests the loss in half precision: the dtype of every step, and a bound of its error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel3d.device.matmul import linear, matmul
from parallel3d.parameters.gradients import add_matmul
from parallel3d.tensor_parallel.loss import ChunkLoss, HeadLoss, Objective

VOCAB, TOKENS = 3001, 64


def logits_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(TOKENS, VOCAB, generator=generator)
    return logits.half(), torch.randint(VOCAB, (TOKENS,), generator=generator)


def in_steps_of_half(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Computes losses and softmax like a program in which every tensor is fp16; sums of a row are
    exact and rounded once."""
    shifted = (logits.double() - logits.amax(1, keepdim=True).double()).half()
    powers = shifted.double().exp().half()
    total = powers.double().sum(1).half()
    log_sum = (logits.amax(1).double() + total.double().log().half().double()).half()
    at_label = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    return (log_sum.double() - at_label.double()).half(), powers / total.unsqueeze(1)


def test_each_step_of_the_loss_is_rounded_to_half() -> None:
    logits, labels = logits_and_labels()
    chunk = ChunkLoss(logits.clone(), labels, 0, Objective(VOCAB, half=True))
    statistics = chunk.statistics()
    losses = chunk.losses(statistics.unsqueeze(0))
    assert statistics.dtype == losses.dtype == torch.float16
    expected, softmax = in_steps_of_half(logits, labels)
    # Two roundings of log Σ may differ, each by one step of half precision at 8 to 16.
    assert (losses.double() - expected.double()).abs().max() <= 2 * 2**-7
    gradient = chunk.gradient(torch.full((TOKENS,), 8.0))
    assert gradient.dtype == torch.float16
    away = torch.ones(TOKENS, VOCAB).scatter_(1, labels.unsqueeze(1), 0.0).bool()
    off = (gradient.double() - 8 * softmax.double())[away].norm()
    assert off < 3e-3 * (8 * softmax.double())[away].norm()


def test_the_error_is_that_of_half_and_a_thousand_times_that_of_fp32() -> None:
    logits, labels = logits_and_labels()
    exact = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    worst = {}
    for half in (True, False):
        chunk = ChunkLoss(logits.clone(), labels, 0, Objective(VOCAB, half=half))
        losses = chunk.losses(chunk.statistics().unsqueeze(0))
        worst[half] = (losses.double() - exact).abs().max().item()
    assert 1e-3 < worst[True] < 2**-6, "a few steps of half between 8 and 16"
    assert worst[False] < 1e-3 * worst[True]


def test_held_out_losses_stay_in_fp32() -> None:
    x, table = torch.randn(1, TOKENS, 8).half(), torch.randn(VOCAB, 8).half()
    labels, mask = torch.arange(TOKENS).unsqueeze(0), torch.ones(1, TOKENS)
    found = [
        HeadLoss(Objective(VOCAB, half=half)).evaluate(x, table, labels, mask)
        for half in (True, False)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_products_are_rounded_once(dtype: torch.dtype) -> None:
    """Computes fp16 via fp32 on a CPU, and other dtypes like PyTorch."""
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((2, 5, 300), (7, 300), (7,)))
    exact = x.double() @ weight.double().t()
    half_step = torch.finfo(dtype).eps / 2
    for found, wanted in ((linear(x, weight, bias), exact + bias.double()),
                          (matmul(x, weight.t()), exact)):  # fmt: skip
        assert found.dtype == dtype
        off = (found.double() - wanted).abs()
        bound = (1.001 * half_step * wanted.abs()).maximum(torch.tensor(2e-5))
        assert dtype == torch.bfloat16 or (off <= bound).all()


def test_weight_gradients_of_fp16_do_not_overflow_on_their_way_into_the_bucket() -> None:
    grad, x = torch.full((4, 3), 300.0).half(), torch.full((4, 5), 200.0).half()
    out = torch.ones(3, 5)
    add_matmul(out, grad, x)
    assert torch.equal(out, torch.full((3, 5), 1 + 4 * 300.0 * 200.0))
