"""The fused kernels on flat segments step as torch.optim's own optimizers do, bit for bit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from parallel3d.config import OptimConfig
from parallel3d.data_parallel.buckets import Segment
from parallel3d.optim.optimizer import Optimizer
from parallel3d.topology.process_groups import SINGLE


@pytest.mark.parametrize(("name", "momentum"), [("adamw", 0.0), ("sgd", 0.0), ("sgd", 0.9)])
def test_steps_are_those_of_torch_optim(name: str, momentum: float) -> None:
    torch.manual_seed(0)
    params, grads = [torch.randn(100), torch.randn(50)], [torch.zeros(100), torch.zeros(50)]
    segments = [
        Segment(param, grad, param, decays, replicated=True, tied_copy=False)
        for param, grad, decays in zip(params, grads, (True, False), strict=True)
    ]
    optim = OptimConfig(name=name, momentum=momentum, clip_grad=0.0, weight_decay=0.1)
    ours = Optimizer(optim, segments, SINGLE)
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


def test_an_eager_trainer_leaves_the_compiler_out() -> None:
    program = (
        "import sys, parallel3d.trainer; from parallel3d.optim.optimizer import Optimizer;"
        "from parallel3d.config import OptimConfig;"
        "from parallel3d.topology.process_groups import SINGLE;"
        "Optimizer(OptimConfig(), [], SINGLE);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
