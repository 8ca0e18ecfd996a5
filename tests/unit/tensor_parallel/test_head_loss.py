"""Tests head and loss in one step: values, gradients, GEMMs and memory, on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from parallel3d.blueprint.sizes import loss_chunks
from parallel3d.parameters.state import state_of
from parallel3d.tensor_parallel import loss as cross_entropy
from parallel3d.tensor_parallel.loss import HeadLoss, Objective
from tests.operators import Operators

ONE = torch.ones((), dtype=torch.float64)


def peak_bytes(work: Callable[[], object]) -> int:
    """Returns the most that PyTorch's CPU allocator had handed out during `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    alive = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


OBJECTIVES = (
    *(Objective(11), Objective(11, 0.2), Objective(11, 0.1, 0.05)),
    *(Objective(11, 0.1, 0.05, scale=0.3), Objective(11, 0.1, 0.05, scale=2.0, cap=1.5)),
)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_functions_that_an_accelerator_fuses_compute_the_same(objective: Objective) -> None:
    labels, mask = torch.tensor([[0, 4, 10], [3, 1, 4]]), torch.ones(2, 3, dtype=torch.bool)
    found = []
    for fuses in (True, False):
        x, table = leaf(2, 3, 5), leaf(16, 5)
        with patch.object(cross_entropy, "fuses", lambda device, fuses=fuses: fuses):
            loss = HeadLoss(objective).train(x, table, labels, mask, ONE)
        found.append((loss.detach(), *torch.autograd.grad(loss, (x, table))))
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_are_finite_differences(objective: Objective, chunk: int | None) -> None:
    head = HeadLoss(objective, chunk_tokens=chunk)
    labels = torch.tensor([[0, 4, 10], [3, 1, 4]])
    mask = torch.tensor([[True, False, True], [True, True, True]])
    x, table = leaf(2, 3, 5), leaf(16, 5)
    gradients = torch.autograd.grad(head.train(x, table, labels, mask, ONE), (x, table))
    for tensor, gradient in zip((x, table), gradients, strict=True):
        direction, around = leaf(*tensor.shape, 7)[..., 0].detach(), []
        with torch.no_grad():
            for step in (1e-5, -1e-5):
                tensor.add_(direction, alpha=step)
                around.append(head.train(x, table, labels, mask, ONE).item())
                tensor.sub_(direction, alpha=step)
        numeric = (around[0] - around[1]) / 2e-5
        assert (gradient * direction).sum().item() == pytest.approx(numeric, rel=1e-8)


def test_padded_rows_get_no_gradient_and_masked_tokens_none() -> None:
    x, table, labels = leaf(1, 3, 5), leaf(8, 5), torch.tensor([[0, 4, 2]])
    mask = torch.tensor([[True, False, True]])
    loss = HeadLoss(Objective(5, 0.1, 0.1)).train(x, table, labels, mask, ONE)
    by_x, by_table = torch.autograd.grad(loss, (x, table))
    assert not by_table[5:].any() and by_table[:5].all()
    assert not by_x[0, 1].any() and by_x[0, [0, 2]].all()


def test_huge_logits_give_finite_losses() -> None:
    x = torch.tensor([[[1e4, -1e4, 0.0]]])
    head = HeadLoss(Objective(3))
    assert head.evaluate(x, torch.eye(3), torch.tensor([[0]]), torch.ones(1, 1)) == 0.0
    assert head.evaluate(x, torch.eye(3), torch.tensor([[1]]), torch.ones(1, 1)) == 2e4


def test_held_out_losses_are_plain_cross_entropies() -> None:
    x, table, labels = leaf(2, 3, 5), leaf(16, 5), torch.tensor([[0, 4, 10], [3, 1, 4]])
    mask = torch.tensor([[True, False, True], [True, True, True]])
    head = HeadLoss(Objective(11, 0.3, 0.2, scale=2.0, cap=1.5), chunk_tokens=4)
    found = head.evaluate(x, table, labels, mask)
    logits = 1.5 * torch.tanh((x @ table[:11].t()).flatten(0, 1) * 2 / 1.5)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="none")[mask.flatten()].sum()
    torch.testing.assert_close(found, expected.detach())
    assert not found.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 7])
def test_statistics_are_fp32_whatever_the_compute_type(
    dtype: torch.dtype, chunk: int | None
) -> None:
    """Compares with fp64 from the same rounded logits: only the gradients' own rounding is left.

    The sum of 5000 exponentials near 1 is beyond the precision of either dtype.
    """
    vocab = 5000
    x, table = leaf(2, 16, 8).detach().to(dtype) * 0.1, leaf(vocab, 8).detach().to(dtype) * 0.1
    labels, mask = torch.arange(32).view(2, 16), torch.ones(2, 16, dtype=torch.bool)
    x, table = x.requires_grad_(), table.requires_grad_()
    scale = torch.tensor(1024.0 / 32)  # a loss scale keeps fp16's small gradients
    loss = HeadLoss(Objective(vocab, 0.1, 0.01), chunk_tokens=chunk).train(
        x, table, labels, mask, scale
    )
    assert loss.dtype == torch.float32
    logits = (x @ table.t()).detach().double().flatten(0, 1).requires_grad_()
    losses = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=0.1)
    expected = losses + 0.01 * logits.logsumexp(1).square().sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    by_x, by_table = torch.autograd.grad(loss, (x, table), scale)
    (by_logits,) = torch.autograd.grad(expected, logits, scale.double())
    for ours, theirs in (
        (by_x.flatten(0, 1), by_logits @ table.double()),
        (by_table, by_logits.t() @ x.double().flatten(0, 1)),
    ):
        assert ours.dtype == dtype
        assert (ours - theirs).norm() < 2 * torch.finfo(dtype).eps * theirs.norm()


def test_a_backward_with_another_scale_is_refused() -> None:
    x, table, labels = leaf(1, 3, 5), leaf(8, 5), torch.tensor([[0, 4, 2]])
    loss = HeadLoss(Objective(8)).train(x, table, labels, torch.ones(1, 3), 2 * ONE)
    with pytest.raises(
        RuntimeError, match=r"with 3\.0, but its gradients were made for loss_scale=2\.0"
    ):
        loss.backward(3 * ONE)


def test_the_bucket_is_reported_once_and_in_the_backward() -> None:
    x, labels, told = leaf(1, 6, 5), torch.tensor([[0, 4, 2, 3, 1, 1]]), []
    table = nn.Parameter(leaf(8, 5).detach())
    state = state_of(table)
    state.main_grad, state.register_grad_ready = torch.ones(8, 5).double(), lambda: told.append(1)
    loss = HeadLoss(Objective(8), chunk_tokens=2).train(x, table, labels, torch.ones(1, 6), ONE)
    assert not told
    loss.backward()
    assert told == [1] and table.grad is None
    plain = table.detach().clone().requires_grad_()
    expected = F.cross_entropy((x @ plain.t()).flatten(0, 1), labels[0], reduction="sum")
    (gradient,) = torch.autograd.grad(expected, plain)
    torch.testing.assert_close(state.main_grad - 1, gradient)


def bucketed(rows: int, hidden: int, dtype: torch.dtype) -> nn.Parameter:
    """Returns a table with a gradient bucket in fp32, like the trainer's."""
    table = nn.Parameter(torch.randn(rows, hidden).to(dtype))
    state_of(table).main_grad = torch.zeros(rows, hidden)
    return table


def train(head: HeadLoss, x: Tensor, table: Tensor, labels: Tensor, mask: Tensor) -> None:
    head.train(x, table, labels, mask, torch.ones(())).backward(torch.ones(()))


@pytest.mark.parametrize(("chunk", "chunks"), [(None, 1), (64, 2)])
def test_a_chunk_runs_three_gemms(chunk: int | None, chunks: int) -> None:
    """There are as many GEMMs as in a separate head and loss: logits, their gradient times the
    table, and the table's own."""
    head = HeadLoss(Objective(257), chunk_tokens=chunk)
    labels, mask = torch.arange(128).view(2, 64), torch.ones(2, 64, dtype=torch.bool)
    x = torch.randn(2, 64, 16).requires_grad_()
    with Operators() as operators:
        train(head, x, bucketed(264, 16, torch.float32), labels, mask)
    counted = Counter(name for name in operators.names if "mm" in name)
    assert counted == {"mm": 2 * chunks, "addmm_": chunks}


VOCAB = 8192


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "chunk", "most"),
    [
        (torch.float32, 512, 1.3),  # one chunk: all logits at once, and no other large tensor
        (torch.bfloat16, 512, 1.3),
        (torch.float32, 64, 0.2),
        (torch.bfloat16, 64, 0.2),
    ],
    ids=str,
)
def test_no_second_copy_of_the_logits_exists(dtype: torch.dtype, chunk: int, most: float) -> None:
    """Bounds the peak of forward and backward, relative to the fp32 logits of the micro-batch."""
    tokens = 512
    head = HeadLoss(Objective(VOCAB, 0.1, 0.01), chunk_tokens=chunk)
    labels, mask = torch.arange(tokens).view(1, -1), torch.ones(1, tokens, dtype=torch.bool)
    x = torch.randn(1, tokens, 16).to(dtype).requires_grad_()
    table = bucketed(VOCAB, 16, dtype)
    peak = peak_bytes(lambda: train(head, x, table, labels, mask))
    assert peak / (4 * tokens * VOCAB) < most


def chunks(tokens: int, columns: int, most: int | None) -> list[int]:
    return [*loss_chunks(tokens, columns, most, item=2, on_accelerator=False).elements()]


def test_chunks_are_even_and_cover_the_tokens() -> None:
    assert chunks(512, 264, None) == [512]
    assert chunks(2048, 131072, None) == [1024, 1024]
    assert chunks(4096, 131072 // 8, None) == [1024] * 4
    assert chunks(1100, 131072, None) == [550, 550]
    assert chunks(16, 8, 7) == [6, 5, 5]
    assert chunks(3, 8, 1) == [1, 1, 1]


def test_chunks_are_counted_without_making_a_list_of_them() -> None:
    counts = loss_chunks(10**12 + 1, 8, 1000, item=2, on_accelerator=True)
    assert sum(size * count for size, count in counts.items()) == 10**12 + 1
    assert sum(counts.values()) == 10**9 + 1 and list(counts) == [1000, 999]


@pytest.mark.parametrize("item", [2, 4, 8])
def test_an_accelerators_chunks_are_two_gib_of_logits(item: int) -> None:
    tokens, columns = 65536, 128256
    sizes = [*loss_chunks(tokens, columns, None, item=item, on_accelerator=True).elements()]
    assert sum(sizes) == tokens and max(sizes) - min(sizes) <= 1
    assert max(sizes) * columns * item <= 2**31 < (tokens // (len(sizes) - 1)) * columns * item
    assert max(sizes) * columns < 2**31  # 32-bit indices
    assert item > 2 or min(sizes) >= 8192
    assert loss_chunks(10, 8, 4, item=item, on_accelerator=True) == {4: 1, 3: 2}
