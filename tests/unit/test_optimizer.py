"""Tests that the fused kernels on flat segments equal torch.optim's own optimizers, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.comm.group import SINGLE
from parallel3d.data_parallel import engine
from parallel3d.data_parallel.engine import build_buckets
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layers import BuildContext
from parallel3d.models.transformer import Stage
from parallel3d.optim import optimizer as optimizer_module
from parallel3d.optim.keys import OptimConfig
from parallel3d.optim.optimizer import Optimizer, norm_share, sum_of_powers
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.segments import ParameterSpan, Segment
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from tests.distributed.cases import preset


@pytest.mark.parametrize(("name", "momentum"), [("adamw", 0.0), ("sgd", 0.0), ("sgd", 0.9)])
def test_steps_equal_those_of_torch_optim(name: str, momentum: float) -> None:
    torch.manual_seed(0)
    params, grads = [torch.randn(100), torch.randn(50)], [torch.zeros(100), torch.zeros(50)]
    segments = [
        Segment(
            param,
            grad,
            param,
            [ParameterSpan("p", ParameterSpec(shape, (), True, decays=decays), 0, shape[0])],
        )
        for param, grad, (shape, decays) in zip(
            params, grads, (((100, 1), True), ((50,), False)), strict=True
        )
    ]
    optim = OptimConfig(name=name, momentum=momentum, clip_grad=0.0, weight_decay=0.1)
    ours = Optimizer(optim, segments)
    copies = [torch.nn.Parameter(p.clone()) for p in params]
    groups = [{"params": [c], "weight_decay": w} for c, w in zip(copies, (0.1, 0.0), strict=True)]
    if name == "sgd":
        theirs = torch.optim.SGD(groups, lr=1.0, momentum=momentum, fused=True)
    else:
        betas = (optim.beta1, optim.beta2)
        theirs = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=optim.eps, fused=True)
    for step in range(1, 6):
        for grad, copy in zip(grads, copies, strict=True):
            grad.copy_(torch.randn_like(grad))
            copy.grad = grad.clone()
        for group in theirs.param_groups:
            group["lr"] = 0.01 * step
        theirs.step()
        ours.step(0.01 * step, grad_norm=1.0)
    for param, copy in zip(params, copies, strict=True):
        torch.testing.assert_close(param, copy, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_fully_frozen_stage_keeps_its_bits_and_has_no_norm(name: str) -> None:
    shard = ShardSpec("layers.0.mlp.up.weight", (4, 5), (0, 0), (4, 5))
    spec = ParameterSpec((4, 5), (shard,), replicated=False)
    param, grad = torch.randn(20), torch.randn(20)
    before, spans = param.clone(), [ParameterSpan("up", spec, 0, 20)]
    segment = Segment(param, grad, param, spans)
    optim = OptimConfig(name=name, weight_decay=0.5, clip_grad=0.1, freeze=["layers.0.*"])
    optimizer = Optimizer(optim, [segment])
    assert optimizer.squared_norm() == 0
    optimizer.step(0.1, grad_norm=7.0)
    torch.testing.assert_close(param, before, rtol=0, atol=0)
    assert optimizer.updates == 1


@pytest.mark.slow
def test_an_eager_trainer_does_not_import_the_compiler() -> None:
    program = (
        "import sys, parallel3d.build, parallel3d.models.transformer_architecture;"
        "from parallel3d.optim.optimizer import Optimizer;"
        "from parallel3d.optim.keys import OptimConfig;"
        "from parallel3d.comm.group import SINGLE;"
        "Optimizer(OptimConfig(), []);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def one_segment(grad: torch.Tensor, **changes: object) -> tuple[torch.Tensor, Optimizer]:
    param, spec = torch.ones_like(grad), ParameterSpec((grad.numel(), 1), (), replicated=True)
    spans = [ParameterSpan("p", spec, 0, grad.numel())]
    segment = Segment(param, grad, param, spans)
    return param, Optimizer(OptimConfig(**changes), [segment])


def on_an_accelerator() -> object:
    return patch.object(optimizer_module, "is_accelerator", lambda device: True)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize(("norm", "scale"), [(1.0, 1024.0), (7.0, 1.0), (7.0, 1024.0)])
def test_an_accelerators_kernels_unscale_and_clip(name: str, norm: float, scale: float) -> None:
    gradient = scale * torch.randn(1000)
    updated = {}
    for divides in (False, True):
        param, optimizer = one_segment(gradient.clone(), name=name, clip_grad=1.0, lr=0.1)
        with patch.object(optimizer_module, "foreach_mul_", wraps=torch._foreach_mul_) as multiply:
            if divides:
                with on_an_accelerator():
                    optimizer.step(0.1, norm, scale)
            else:
                optimizer.step(0.1, norm, scale)
        assert multiply.call_count == (0 if divides else 1), "no pass over the gradients of its own"
        updated[divides] = (param, optimizer.segments[0].grad)
    for ours, theirs in zip(updated[True], updated[False], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=1e-7)


def test_gradients_in_fp64_are_not_divided_by_an_fp32_number() -> None:
    gradient = torch.randn(100, dtype=torch.float64)
    param, optimizer = one_segment(gradient.clone(), name="sgd", weight_decay=0.0, clip_grad=1.0)
    with on_an_accelerator():
        optimizer.step(0.1, 7.0)
    expected = 1.0 - 0.1 * gradient / (7.0 + 1e-6)
    torch.testing.assert_close(param, expected, rtol=1e-14, atol=0)


def test_an_accelerators_norm_is_not_cut_into_pieces() -> None:
    grad = torch.randn(5 * optimizer_module.NORM_PIECE, dtype=torch.float64)
    _, optimizer = one_segment(grad)
    with patch.object(optimizer_module, "foreach_norm", wraps=torch._foreach_norm) as norms:
        in_pieces = optimizer.squared_norm()
        with on_an_accelerator():
            whole = optimizer.squared_norm()
    assert [len(call.args[0]) for call in norms.call_args_list] == [5, 1]
    torch.testing.assert_close(whole, in_pieces, rtol=1e-13, atol=0)


def test_the_norm_of_a_billion_parameters_is_a_few_calls() -> None:
    model = ModelConfig(**preset("llama_1b"))
    context = BuildContext(Initializer(0, torch.float32, torch.device("meta")), SINGLE, sp=False)
    held = StageBlueprint.plain(range(model.num_layers), first=True, last=True)
    stage = Stage(model, held, context)
    assert sum(p.numel() for p in stage.parameters()) > 1.1e9
    with (
        on_an_accelerator(),
        patch.object(engine, "is_accelerator", lambda device: True),
        patch.object(optimizer_module, "foreach_norm", wraps=torch._foreach_norm) as norms,
    ):
        made = build_buckets(list(stage.named_parameters()), None, torch.bfloat16)
        optimizer = Optimizer(OptimConfig(), [s for b in made for s in b.segments])
        assert optimizer.squared_norm().device.type == "meta"
    # A multi-tensor kernel takes 110 tensors; in pieces there were 37,000.
    assert sum(len(call.args[0]) for call in norms.call_args_list) < 110


def test_norm_of_gradients_whose_squares_overflow_fp32_is_finite() -> None:
    grads = [torch.full((8,), 1e25), torch.full((8,), 2e25)]
    device = torch.device("cpu")
    assert sum_of_powers(grads, device).isinf()
    wide = sum_of_powers(grads, device, summed_in=torch.float64)
    assert wide.sqrt().item() == pytest.approx(40**0.5 * 1e25, rel=1e-6)
    assert not norm_share([*grads, torch.tensor([torch.inf])], [], device).isfinite()
