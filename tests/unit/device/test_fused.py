"""Tests functions that run as one kernel on an accelerator: the same values, and one kernel each.

Their graphs call PyTorch's operations: the package's own part is that graphs can be made, and their
results. In addition, TorchInductor writes C++ kernels of a norm and of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.comm.group import SINGLE
from parallel3d.context_parallel.documents import AttentionBlocks, Documents
from parallel3d.device import accelerator, fused
from parallel3d.models import declared, ops
from parallel3d.models.checkpointing import recomputed
from parallel3d.models.declared import LayerKind
from parallel3d.models.dropout import Dropout, attend_dropping
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext, QKNorm
from parallel3d.parameters.initializer import Initializer
from parallel3d.tensor_parallel import loss as cross_entropy
from parallel3d.tensor_parallel.loss import ChunkLoss, Objective
from tests.kernels import no_kernels

pytestmark = pytest.mark.nightly

HEADS, KV_HEADS, HEAD_DIM, SEQUENCE = 4, 2, 8, 6
Kernels = Callable[[], AbstractContextManager[None]]
OWN = pytest.mark.more  # TorchInductor's own kernels each take seconds


def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this CPU an accelerator with a kernel compiler: TorchInductor's own."""
    for module in (fused, cross_entropy):
        monkeypatch.setattr(module, "fuses", lambda device: True)
    monkeypatch.setattr(ops, "is_on_accelerator", lambda tensor: True)
    monkeypatch.setattr(fused, "LEAST_ELEMENTS", 0)
    torch._dynamo.reset()


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes this CPU an accelerator that records the names of functions that are one kernel."""
    names: list[str] = []

    @contextmanager
    def fused_kernel(name: str) -> Iterator[None]:
        names.append(name)
        yield

    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    module = SimpleNamespace(fused_kernel=fused_kernel, run_again=lambda call, given: call(*given))
    monkeypatch.setattr(accelerator, "module", lambda device: module)
    return names


def rotary(kind: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.linspace(0, 9, SEQUENCE * HEAD_DIM // 2, dtype=kind).view(SEQUENCE, 1, -1)
    return angle.cos(), angle.sin()


def rms_norm(x: Tensor) -> Tensor:
    return ops.rms_norm(x, torch.linspace(0.5, 2, x.shape[-1]).to(x.dtype), 1e-5)


def add_rms_norm(x: Tensor) -> Tensor:
    """Computes with the residual stream x and a branch that depends on it; both results are
    read."""
    weight = torch.linspace(0.5, 2, x.shape[-1]).to(x.dtype)
    total, normed = ops.add_rms_norm(x, x.flip(1) / 2, weight, 1e-5)
    return torch.cat((total * 2, normed), 1)


def split_heads(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    q, k, v = ops.split_heads(x, (HEADS, KV_HEADS, HEAD_DIM), rotary(wide))
    return torch.cat((q * 2, k * 3, v * 5), 1)


def norm_heads(x: Tensor) -> Tensor:
    init = Initializer(0, x.dtype, torch.device("cpu"))
    model = ModelConfig(head_dim=HEAD_DIM)
    held = declared.head_norm(model, LayerKind.of(model, 0))
    norm = QKNorm(held, model, (HEADS, KV_HEADS, HEAD_DIM), BuildContext(init, SINGLE, sp=False))
    with torch.no_grad():
        norm.q.copy_(torch.linspace(0.5, 2, HEAD_DIM))
        norm.k.copy_(torch.linspace(3, 1, HEAD_DIM))
    return norm(x)


OPERATIONS = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "swiglu": ops.swiglu,
    "geglu": ops.geglu,
    "split_heads": split_heads,
    "norm_heads": norm_heads,
}


def value_and_gradient(operation: Callable[[Tensor], Tensor], kind: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    x = torch.randn(2, SEQUENCE, width, generator=generator).to(kind).requires_grad_()
    y = operation(x)
    (grad,) = torch.autograd.grad(y, x, torch.randn(y.shape, generator=generator).to(kind))
    return [y.detach(), grad]


@pytest.mark.parametrize(
    ("name", "kind"),
    [  # add_rms_norm is tested below, with the norm in fp64
        ("rms_norm", torch.float32),
        ("swiglu", torch.bfloat16),
        ("geglu", torch.bfloat16),
        ("split_heads", torch.bfloat16),
        ("norm_heads", torch.float32),
    ],
    ids=str,
)
def test_compiled_nodes_equal_plain_ones(
    name: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = value_and_gradient(OPERATIONS[name], kind)
    compiled(monkeypatch)
    with no_kernels():
        own = value_and_gradient(OPERATIONS[name], kind)
        again = value_and_gradient(lambda x: recomputed(OPERATIONS[name], x), kind)
    for mine, recomputed_one, theirs in zip(own, again, plain, strict=True):
        assert mine.dtype == kind
        assert torch.equal(mine, recomputed_one)
        few = 8 * torch.finfo(kind).eps  # the plain functions round between their operations
        torch.testing.assert_close(mine, theirs, rtol=few, atol=few)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_node_is_one_kernel_forward_and_one_backward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = value_and_gradient(OPERATIONS[name], torch.float64)
    names = counting(monkeypatch)
    own = value_and_gradient(OPERATIONS[name], torch.float64)
    assert names == [f"{name}_forward", f"{name}_backward"]
    torch.testing.assert_close(own, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "kernels", [no_kernels, pytest.param(nullcontext, marks=OWN, id="own kernels")]
)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_compiled_residual_norm_equals_fp64(
    offset: float, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares with the plain form by autograd, which takes the sum as the dtype rounds it."""
    compiled(monkeypatch)
    kind = torch.bfloat16
    generator = torch.Generator().manual_seed(5)
    shape = (2, 48, 96)
    x, y, grad_total, grad = (torch.randn(shape, generator=generator).to(kind) for _ in range(4))
    weight = torch.linspace(0.5, 2, shape[-1]).to(kind)

    def both(x: Tensor, y: Tensor, weight: Tensor, add: Callable) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (x, y, weight)]
        results = add(*leaves)
        grads = (grad_total.to(x.dtype), grad.to(x.dtype))
        return *results, *torch.autograd.grad(results, leaves, grads)

    def plain(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        gain = weight + offset
        return x + y, torch.nn.functional.rms_norm(x + y, shape[-1:], gain, 1e-5)

    with kernels():
        own = both(x, y, weight, lambda *t: ops.add_rms_norm(*t, 1e-5, offset))
    wide = both(*(t.double() for t in (x, y, weight)), plain)
    few = 4 * torch.finfo(kind).eps
    for name, mine, true in zip(("sum", "norm", "x", "y", "weight"), own, wide, strict=True):
        assert mine.dtype == kind
        error = (mine.double() - true).abs().max() / true.abs().max()
        assert error < few, f"{name}: {error}"


def test_the_norms_kernel_adds_the_residual_streams_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apart(x: Tensor) -> Tensor:
        return torch.cat((x * 2, rms_norm(x)), 1)

    def joined(x: Tensor) -> Tensor:
        weight = torch.linspace(0.5, 2, x.shape[-1]).to(x.dtype)
        stream, normed = ops.add_rms_norm(x, None, weight, 1e-5)
        return torch.cat((stream * 2, normed), 1)

    plain = value_and_gradient(apart, torch.float64)
    names = counting(monkeypatch)
    own = value_and_gradient(joined, torch.float64)
    assert names == ["rms_norm_forward", "add_rms_norm_backward"]
    torch.testing.assert_close(own, plain, rtol=1e-13, atol=1e-13)


def dropped(x: Tensor) -> Tensor:
    return Dropout(7, "layers.1.mlp", 0.3)(x, LayerInputs(torch.tensor((5, 2**33))))


def dropped_attention(x: Tensor) -> Tensor:
    """Returns documents: the second sample has two."""
    q, k, v = x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)[:, :6].chunk(3, 1)
    starts = torch.tensor([[0] * SEQUENCE, [0, 0, *[2] * (SEQUENCE - 2)]], dtype=torch.int32)
    # The operation does not read these entries.
    documents = Documents(starts, AttentionBlocks(starts, starts, starts))
    numbers = torch.tensor((5, 2**33))
    return attend_dropping(q, k, v, Dropout(7, "a", 0.3), numbers, documents)


DROPPING = {
    dropped: ["row_keys", "drop"] * 2,
    dropped_attention: ["row_keys", "dropped_softmax", "row_keys", "dropped_softmax_backward"],
}


@pytest.mark.parametrize("operation", DROPPING)
def test_dropout_takes_two_kernels_and_compiled_drops_the_same_elements(
    operation: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = value_and_gradient(operation, torch.float32)
    with monkeypatch.context() as patch:
        names = counting(patch)
        assert all(map(torch.equal, value_and_gradient(operation, torch.float32), plain))
        assert names == DROPPING[operation]
    compiled(monkeypatch)
    with no_kernels():
        own = value_and_gradient(operation, torch.float32)
    assert all(torch.equal(a == 0, b == 0) for a, b in zip(own, plain, strict=True))
    torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-6)


def test_heads_are_split_into_the_layout_that_joins_for_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting(monkeypatch)
    qkv = torch.randn(2, SEQUENCE, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    for part in ops.split_heads(qkv, (HEADS, KV_HEADS, HEAD_DIM), rotary(torch.float32)):
        assert part.transpose(1, 2).is_contiguous()


def loss_of(
    logits: Tensor, objective: Objective, first: int, ranks: list[Tensor]
) -> tuple[Tensor, ...]:
    """Returns statistics, losses with the statistics of `ranks` in addition, and gradients of a
    chunk."""
    labels = torch.tensor([0, 3, 9, 12, 18, 4, 7])
    loss = ChunkLoss(logits.clone(), labels, first, objective)
    statistics = loss.statistics()
    losses = loss.losses(torch.stack([*ranks, statistics]))
    return statistics.clone(), losses, loss.gradient(torch.linspace(-1, 2, 7).to(losses.dtype))


def losses_agree(kind: torch.dtype, objective: Objective, first: int, go: Callable) -> None:
    """Compares the losses of ten columns of a vocabulary of 19 before and after `go`, with another
    rank's statistics."""
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(7, 10, generator=generator)).to(kind)
    wide = torch.promote_types(kind, torch.float32)
    other = (
        torch.randn(4 if objective.label_smoothing else 3, 7, generator=generator).abs().to(wide)
    )
    plain = loss_of(logits, objective, first, [other])
    go()
    own = loss_of(logits, objective, first, [other])
    few = 32 * torch.finfo(wide).eps
    torch.testing.assert_close(own[:2], plain[:2], rtol=few, atol=few)
    rounding = max(few, 2 * torch.finfo(kind).eps)
    assert own[2].dtype == kind
    torch.testing.assert_close(own[2], plain[2], rtol=rounding, atol=rounding)


OBJECTIVES = [Objective(19), Objective(19, 0.1, 0.05), Objective(19, 0.1, 0.05, False, 2.0, 1.5)]
PARTS = {"whole": 0, "padded": 10, "padding alone": 20}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=["plain", "smoothed", "capped"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_loss_in_whole_rows_equals_that_in_pieces(
    kind: torch.dtype, objective: Objective, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses_agree(kind, objective, PARTS[part], lambda: counting(monkeypatch))


@pytest.mark.parametrize(
    ("kind", "objective", "kernels"),
    [
        pytest.param(torch.bfloat16, OBJECTIVES[0], no_kernels, id="bf16-plain"),
        pytest.param(torch.float32, OBJECTIVES[1], no_kernels, id="fp32-smoothed"),
        pytest.param(torch.bfloat16, OBJECTIVES[2], no_kernels, id="bf16-capped"),
        pytest.param(torch.float32, OBJECTIVES[1], nullcontext, marks=OWN, id="own kernels"),
    ],
)
def test_a_compiled_loss_equals_the_plain_one(
    kind: torch.dtype, objective: Objective, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kernels():
        losses_agree(kind, objective, PARTS["padded"], lambda: compiled(monkeypatch))


def test_a_chunks_loss_is_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    names = counting(monkeypatch)
    loss_of(torch.randn(7, 10), Objective(10), 0, [])
    assert names == ["vocabulary_statistics", "logits_to_gradient"]


def test_small_calls_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    ran: list[int] = []

    def compile_(function: Callable[[Tensor], Tensor], **how: Any) -> Callable[[Tensor], Tensor]:
        made.append(how)
        return lambda x: ran.append(x.numel()) or function(x)

    doubled = fused.fused(lambda x: x * 2)
    compiled(monkeypatch)
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(fused, "LEAST_ELEMENTS", 8)
    for size in (4, 8, 4, 9):
        assert torch.equal(doubled(torch.ones(size)), torch.full((size,), 2.0))
    how = {"fullgraph": True, "dynamic": False, "options": {"deterministic": True}}
    assert ran == [8, 9] and made == [how, how]


class Compiled:
    """Tests Dynamo's own limits, without TorchInductor's seconds: which sizes were compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.said: list[str] = []
        compile_ = torch.compile
        compiled(monkeypatch)
        monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, **HOW, backend=self.take))
        monkeypatch.setattr(fused.log, "warning", lambda text, *a: self.said.append(text % a))

    def take(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        self.sizes.append(inputs[0].numel())
        return graph.forward


HOW = {"fullgraph": True, "dynamic": False}


def test_more_shapes_than_dynamos_limit_get_one_kernel_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trebled = fused.fused(lambda x, by: x * by)
    compiler = Compiled(monkeypatch)
    sizes = list(range(1, torch._dynamo.config.recompile_limit + 5))
    for size in sizes * 2:
        assert torch.equal(trebled(torch.ones(size), 3), torch.full((size,), 3.0))
    assert compiler.sizes == sizes and not compiler.said
    for x, by in ((torch.ones(2, 2)[:, 0], 3), (torch.ones(2).int(), 3), (torch.ones(2), 4)):
        assert torch.equal(trebled(x, by), x * by)
    assert compiler.sizes == [*sizes, 2, 2, 2]  # strides, types and constants as well


def test_shapes_beyond_our_limit_of_kernels_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    trebled = fused.fused(lambda x: x * 3)
    compiler = Compiled(monkeypatch)
    monkeypatch.setattr(fused, "MOST_KERNELS", 2)
    for size in (1, 2, 3, 4, 1, 2):
        assert torch.equal(trebled(torch.ones(size)), torch.full((size,), 3.0))
    assert compiler.sizes == [1, 2]
    assert [said.partition(": ")[2] for said in compiler.said] == [
        "for all but the 2 shapes that are compiled"
    ]


def test_uncompilable_parts_run_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    @fused.fused
    def total(x: Tensor) -> Tensor:
        return x * 3 if x.sum() > 2 else x  # a compiler cannot continue after such a check

    compiled(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(fused.log, "warning", lambda text, *args: said.append(text % args))
        for _ in range(2):
            assert torch.equal(total(torch.ones(3)), torch.full((3,), 3.0))
    assert len(said) == 1 and "total runs as separate operations" in said[0]


def test_a_cpu_runs_the_plain_function() -> None:
    assert not fused.fuses(torch.device("cpu")) and not fused.fuses(torch.device("meta"))
