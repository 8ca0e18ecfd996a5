"""Tests which optimizers of a script's own are taken, and that they step as torch's classes do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.errors import UserError
from parallel3d.optim.keys import OptimConfig
from parallel3d.optim.own import OwnOptimizer, try_out
from parallel3d.parameters.segments import ParameterSpan, Segment
from parallel3d.parameters.spec import ParameterSpec, ShardSpec

pytestmark = pytest.mark.nightly  # torch.optim imports the compiler

CPU = torch.device("cpu")


class Lamb(torch.optim.Optimizer):
    """Scales the update of each parameter by the ratio of two norms."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.norm() / p.grad.norm() * p.grad


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a momentum, with its own counter as a number of Python."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"average": torch.zeros_like(p), "steps": 0}
                state["steps"] += 1
                p *= 1 - group["lr"] * group["weight_decay"]
                p -= group["lr"] * (0.9 * state["average"] + 0.1 * p.grad).sign()
                state["average"].lerp_(p.grad, 0.01)


class ByColumn(Lion):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["average"] = p.detach().sum(0)


class Adapts(Lion):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["d"] = self.param_groups[0].get("d", 1.0) * 2

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["d"] = 1.0


Momentum = functools.partial(torch.optim.SGD, momentum=0.9)
ELEMENTWISE = [
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD, Momentum, Lion),
    functools.partial(torch.optim.Adam, amsgrad=True),
]


def segment(values: Tensor) -> Segment:
    """Returns a segment of one flat parameter, whose master is `values`."""
    size = values.numel()
    shape = (size, 1)  # a matrix, which has a weight decay
    spec = ParameterSpec(shape, (ShardSpec("w", shape, (0, 0), shape),), replicated=False)
    return Segment(values, torch.zeros_like(values), values, [ParameterSpan("w", spec, 0, size)])


@pytest.mark.parametrize("make", ELEMENTWISE)
def test_segments_are_stepped_as_by_the_class_also_after_a_checkpoint(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    decay = 0.0 if make is torch.optim.Rprop else 0.1
    optim = OptimConfig(name="own", weight_decay=decay, clip_grad=0)
    random = torch.Generator().manual_seed(1)
    first, *grads = (torch.randn(40, generator=random) for _ in range(6))
    param = nn.Parameter(first.clone())
    theirs = make([param], lr=0.1)
    theirs.param_groups[0].update({"weight_decay": decay} if decay else {})
    parts = [segment(first[:13].clone()), segment(first[13:].clone())]
    ours = OwnOptimizer(make, optim, parts, 0, CPU)
    for number, grad in enumerate(grads):
        if number == 3:  # goes on in new objects, from what a checkpoint holds
            kept = [{n: [v.clone() for v in s] for n, s in g.state.items()} for g in ours.groups]
            progress = {"updates": number} | ours.progress()
            parts = [segment(part.master.clone()) for part in parts]
            ours = OwnOptimizer(make, optim, parts, 0, CPU)
            assert ours.refusal(progress, {}) is None
            for group, state in zip(ours.groups, kept, strict=True):
                for name, values in state.items():
                    for mine, value in zip(group.state[name], values, strict=True):
                        mine.copy_(value)
            ours.restore(number, (), progress)
        param.grad = grad.clone()
        theirs.step()
        for part, values in zip(parts, grad.split([13, 27]), strict=True):
            part.grad.copy_(values)
        ours.step(0.1, 1.0)
        assert torch.equal(torch.cat([part.master for part in parts]), param.detach())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Lamb, "Lamb is not element-wise, because its step reads "),
        (torch.optim.Adafactor, "its state row_var is (4, 1) for a parameter torch.Size([4, 6])"),
        (torch.optim.LBFGS, "LBFGS cannot step flat parameters in float64 (TypeError: "),
        (torch.optim.SparseAdam, "SparseAdam cannot step flat parameters in float64 ("),
        (ByColumn, "its state average is (6,) for a parameter torch.Size([4, 6])"),
        (Adapts, "Adapts changes d of its groups in its steps, which a checkpoint would lose"),
        (lambda groups: object(), "it makes a object, not a torch.optim.Optimizer"),
        (
            functools.partial(torch.optim.Adam, weight_decay=0.2),
            "leave it out and give optim.weight_decay=0.2",
        ),
    ],
)
def test_other_optimizers_are_refused_in_a_sentence(make: Any, said: str) -> None:
    if make is torch.optim.Adafactor and not hasattr(torch.optim, "Adafactor"):
        return
    with pytest.raises(UserError) as refused:
        try_out(make, CPU)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "make", "said"),
    [
        ({}, torch.optim.Rprop, "optim.weight_decay=0.1 must be 0 for Rprop, which has no weight"),
        ({"state": "bf16"}, torch.optim.NAdam, "optim.state=bf16 must be fp32"),
        (
            {"groups": {"w": {"lr_mult": 2}}},
            torch.optim.ASGD,
            "counters of ASGD depend on",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused_in_a_sentence(
    keys: dict[str, Any], make: Any, said: str
) -> None:
    with pytest.raises(UserError) as refused:
        OwnOptimizer(make, OptimConfig(name="own", **keys), [segment(torch.ones(3))], 0, CPU)
    assert said in str(refused.value)


def test_a_checkpoint_of_another_optimizer_or_freeze_is_refused() -> None:
    ours = OwnOptimizer(Lion, OptimConfig(name="own"), [segment(torch.ones(3))], 0, CPU)
    other = {"updates": 3, "optimizer": {"name": "NAdam", "scalars": {}}}
    assert "gives Lion, but the checkpoint has the state of NAdam" in str(ours.refusal(other, {}))
    froze = {"run": "r", "optim": {"freeze": ["embedding.*"]}}
    assert "must stay [embedding.*]" in str(ours.refusal(other, froze))


def test_the_trial_draws_nothing_from_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    try_out(torch.optim.NAdam, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
