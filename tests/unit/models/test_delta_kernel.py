"""Tests the choice of `delta_kernel`, its probe, and the calls of a stand-in for the package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.commands.verify import variants
from parallel3d.config.fields import with_values
from parallel3d.config.values import DELTA_KERNELS
from parallel3d.context_parallel.attention import ONE_RANK
from parallel3d.context_parallel.documents import Pieces
from parallel3d.errors import UserError
from parallel3d.models import delta_kernel
from parallel3d.models.delta_kernel import (
    TOLERANCE,
    choose_delta_kernel,
    error_of_kernel,
    torch_form_instead,
    why_not,
)
from parallel3d.models.delta_rule import delta_output, delta_rule
from parallel3d.models.fla_kernel import MODULE
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.unit.models.test_delta_rule import bounds, differ, drawn

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Has the signature of the package's function."""
    assert scale == 1.0 and q.shape[2] == v.shape[2]
    if cu_seqlens is None:
        out, after = delta_rule(q, k, v, g, beta, initial_state)
        return out, after if output_final_state else None
    edges, found = cu_seqlens.tolist(), []
    for i, (start, end) in enumerate(pairwise(edges)):
        state = None if initial_state is None else initial_state[i : i + 1]
        found.append(delta_rule(*(x[:, start:end] for x in (q, k, v, g, beta)), state))
    outs, states = zip(*found, strict=True)
    return torch.cat(outs, dim=1), torch.cat(states) if output_final_state else None


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.05 * grad


def wrong_output(*given: Any, **how: Any) -> tuple[Tensor, Tensor | None]:
    out, after = stand_in(*given, **how)
    return out + 0.05 * out.detach(), after


def wrong_gradient(q: Tensor, k: Tensor, *given: Any, **how: Any) -> tuple[Tensor, Tensor | None]:
    return stand_in(q, _Wrong.apply(k), *given, **how)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Kernel], None]]:
    """Returns a function that installs a kernel as the package's."""

    def installed(kernel: Kernel) -> None:
        module = ModuleType(MODULE)
        vars(module)["chunk_gated_delta_rule"] = kernel
        monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
        monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
        monkeypatch.setitem(sys.modules, MODULE, module)
        why_not.cache_clear()

    yield installed
    why_not.cache_clear()


def of(kernel: str, precision: str = "bf16", compiles: bool = False) -> Any:
    model = ModelConfig(layer_types=["gated_deltanet"])
    layer, named = SimpleNamespace(state_kernel=kernel), SimpleNamespace(name=precision)
    return SimpleNamespace(model=model, layer=layer, precision=named, compiles=compiles)


def test_the_probe_takes_a_sound_kernel_and_refuses_a_factor(
    install: Callable[[Kernel], None],
) -> None:
    install(stand_in)
    assert error_of_kernel(CPU, (8, 12)) < TOLERANCE / 10
    assert why_not(CPU, (8, 12)) is None
    assert choose_delta_kernel(of("fla"), CPU) == "fla"
    for wrong in (wrong_output, wrong_gradient):
        install(wrong)
        said = why_not(CPU, (8, 12))
        assert said is not None and "differs from the torch form by 5.0%" in said
        with pytest.raises(UserError, match=r"5\.0%.*nearest is delta_kernel=torch"):
            choose_delta_kernel(of("fla"), CPU)


def test_without_the_package_auto_takes_torch_with_a_line_and_a_name_is_refused() -> None:
    why_not.cache_clear()
    said = torch_form_instead(of("auto"), GPU)
    assert said is not None and said.startswith("the package flash-linear-attention cannot be")
    with pytest.raises(UserError) as refused:
        choose_delta_kernel(of("fla"), CPU)
    assert str(refused.value).count(". ") == 0
    assert str(refused.value).endswith("delta_kernel=torch, which needs no package.")


def test_auto_only_tries_the_package_where_it_may_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_kernel, "why_not", lambda *_: None)
    assert choose_delta_kernel(of("auto"), GPU) == "fla"
    assert torch_form_instead(of("auto"), GPU) is None
    for run, device in (
        (of("auto"), CPU),
        (of("auto", "fp32"), GPU),
        (of("auto", compiles=True), GPU),
        (of("torch"), GPU),
        (of("fla"), torch.device("meta")),  # a dry run
    ):
        assert choose_delta_kernel(run, device) == "torch"


@pytest.mark.parametrize("kernel", DELTA_KERNELS)
def test_verify_uses_the_package_only_in_the_runs_precision(kernel: str) -> None:
    config = with_values(Config(), {"precision.name": "bf16", "delta_kernel": kernel})
    kernels = {each.config.precision.name: each.config.delta_kernel for each in variants(config, 2)}
    assert kernels == {"fp64": "torch" if kernel == "torch" else "auto", "bf16": kernel}


@pytest.mark.parametrize("pieces", [1, 2])
def test_calls_of_the_package_cut_documents_and_hand_states_on(
    pieces: int, install: Callable[[Kernel], None]
) -> None:
    """One rank with two pieces of each sequence hands a state from the first to the second."""
    install(stand_in)
    *inputs, _ = (x.detach().requires_grad_() for x in drawn(40))
    length, begins = 40 // pieces, bounds(40)
    starts = begins.clone()
    starts[:, ::length] = True
    cuts = torch.cat((starts.flatten().nonzero().flatten(), torch.tensor([starts.numel()])))
    of_pieces = None
    if pieces > 1:
        places = torch.arange(pieces).expand(len(begins), -1)
        of_pieces = Pieces(places, places)
    rows = [x.reshape(-1, length, *x.shape[2:]) for x in (*inputs, begins)]
    found = delta_output(*rows, ONE_RANK, of_pieces, cuts).reshape(inputs[2].shape)
    expected = delta_output(*inputs, begins)
    assert differ(found, expected) < 1e-12
    grad = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    ours, theirs = (torch.autograd.grad(y, inputs, grad) for y in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert differ(one, other) < 1e-12
