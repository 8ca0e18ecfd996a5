"""Tests which optimizers of a script's own are taken, and that they step as torch's classes do."""

from __future__ import annotations

import functools
import json
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
from tests.e2e.ready import run_code

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


BOUNDS = """
import functools, json
from dataclasses import replace
import torch
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.commands.dry_ranks import find_memory
from parallel3d.device.keys import PrecisionConfig
from parallel3d.estimate.memory import peak_memory
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig
from parallel3d.optim.own import tried
from parallel3d.run_config import Config, check_config
from parallel3d.topology.assumptions import preset

model = ModelConfig(hidden_size=512, num_layers=2, num_attention_heads=8, seq_length=64)
config = Config(
    model=model, optim=OptimConfig(name="own"), precision=PrecisionConfig("bf16"), dp=2,
    micro_batch_size=1, global_batch_size=2, cluster=ClusterConfig(**preset("cluster", "dgx_h100")),
)
amsgrad = functools.partial(torch.optim.AdamW, amsgrad=True)
for make in (torch.optim.NAdam, amsgrad, functools.partial(torch.optim.AdamW, foreach=None)):
    for zero in (0, 1, 3):
        given = check_config(replace(config, zero=zero), own_samples=True)
        bound = peak_memory(replace(given, optim=tried(given.optim, make)), 0)
        there = find_memory(given, 0, make)
        states = bound.optimizer, there["optimizer_bytes"]
        print(json.dumps([bound.total, there["peak_bytes"], *states]))
"""


def test_a_plan_counts_the_states_and_the_temporary_tensors_of_an_own_optimizer() -> None:
    done = run_code(BOUNDS)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 9
    for bound, peak, states, dry_states in rows:
        assert peak <= bound <= 1.07 * peak
        assert dry_states == pytest.approx(states, rel=0.01)
