"""Compares Muon's arithmetic with a dense reference by singular values, and tests the balance of
its homes."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.planner.plan_dryrun import configured
from parallel3d.blueprint.buckets import homes
from parallel3d.blueprint.collectives import wire_bytes
from parallel3d.blueprint.parameters import parameter_count
from parallel3d.build import Trainer
from parallel3d.comm.group import SINGLE
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.plan import plan
from parallel3d.errors import UserError
from parallel3d.estimate.traffic import group_size, transfers
from parallel3d.models.declared import full_shapes_of
from parallel3d.optim.keys import OptimConfig
from parallel3d.optim.muon import Muon, newton_schulz
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.segments import ParameterSpan, Segment
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from parallel3d.resolve import layout_of
from parallel3d.run_config import check_config
from parallel3d.trace.world import Zeros
from tests.unit.dry_runs import dry_runs

BAND = (0.68, 1.14)  # this holds for singular values above 1 % of the norm


def by_singular_values(update: torch.Tensor) -> torch.Tensor:
    """Returns the same singular vectors, with singular values after five rounds of the scalar
    quintic."""
    u, s, v = torch.linalg.svd(update, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ v


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40), (1, 8), (8, 1)])
def test_newton_schulz_moves_singular_values_to_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    update = torch.randn(shape, dtype=torch.float64)
    found = newton_schulz(update)
    torch.testing.assert_close(found, by_singular_values(update), rtol=1e-9, atol=1e-11)
    u, values, v = torch.linalg.svd(update, full_matrices=False)
    inside = (u.T @ found @ v.T).diagonal()[values / values.norm() > 0.01]
    assert len(inside) and BAND[0] < inside.min() and inside.max() < BAND[1], inside
    torch.testing.assert_close(newton_schulz(1e-3 * update), found, rtol=1e-9, atol=1e-11)


def test_a_gradient_of_zeros_moves_nothing() -> None:
    assert newton_schulz(torch.zeros(3, 5)).abs().max() == 0


def test_in_bf16_the_matrix_is_orthogonal_too() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(32, 64).bfloat16()).float())
    assert values.min() > 0.6 and values.max() < 1.25


def test_a_step_equals_the_dense_oracle() -> None:
    """Tests two matrices in one parameter, with a table and a bias that AdamW steps."""
    torch.manual_seed(0)
    first = ShardSpec("layers.0.q.weight", (6, 4), (0, 0), (6, 4), muon=True)
    second = ShardSpec("layers.0.k.weight", (3, 4), (0, 0), (3, 4), row=6, muon=True)
    table = ShardSpec("head.weight", (5, 4), (0, 0), (5, 4))
    spans = [
        ParameterSpan("head", ParameterSpec((5, 4), (table,), True), 0, 20),
        ParameterSpan("qk", ParameterSpec((9, 4), (first, second), True), 0, 36),
    ]
    param, grad = torch.randn(56, dtype=torch.float64), torch.randn(56, dtype=torch.float64)
    segment = Segment(param, grad, param, spans)
    optim = OptimConfig(name="muon", momentum=0.9, weight_decay=0.1, clip_grad=0.0)
    muon = Muon([spans], optim.muon_scale, torch.float64, SINGLE, SINGLE, grad.device)
    before, given = param.clone(), grad.clone()
    optimizer = Optimizer(optim, [segment], muon=muon)
    optimizer.step(0.01, grad_norm=1.0)
    # The first step's update is a multiple of the gradient.
    q, k = given[20:44].view(6, 4), given[44:].view(3, 4)
    steps = [0.2 * 6**0.5 * by_singular_values(q), 0.2 * 2.0 * by_singular_values(k)]
    expected = (1 - 0.01 * 0.1) * before[20:] - 0.01 * torch.cat([s.flatten() for s in steps])
    torch.testing.assert_close(param[20:], expected, rtol=1e-9, atol=1e-11)
    adam = (1 - 0.01 * 0.1) * before[:20] - 0.01 * given[:20].sign()
    torch.testing.assert_close(param[:20], adam, rtol=1e-6, atol=1e-6)
    assert [sorted(group.state) for group in optimizer.groups] == [
        ["exp_avg", "exp_avg_sq"],
        ["momentum"],
    ]


def test_homes_are_balanced_by_work_and_independent_of_the_order() -> None:
    shapes = {f"layers.{i}.{n}": s for i in range(6) for n, s in
              {"q": (64, 64), "k": (16, 64), "v": (16, 64), "out": (64, 64), "gate": (172, 64),
               "up": (172, 64), "down": (64, 172)}.items()}  # fmt: skip
    found = homes(shapes, tp=2, dp=3)
    assert found == homes(dict(reversed(shapes.items())), tp=2, dp=3)
    work = dict.fromkeys(found.values(), 0)
    for name, home in found.items():
        work[home] += max(shapes[name]) * min(shapes[name]) ** 2
    assert len(work) == 6 and max(work.values()) < 1.1 * sum(work.values()) / 6


@pytest.mark.slow
def test_a_dry_run_counts_muons_messages_and_its_momentum() -> None:
    keys = {"model": "llama_1b", "layers": 2, "tp": 2, "dp": 2}
    configs = [
        configured(keys | {"zero": zero, "global_batch_size": 4, "micro_batch_size": 1})
        for zero in (0, 1)
    ]
    for config in configs:
        config.optim.name, config.optim.momentum = "muon", 0.95
    for config, facts in zip(configs, dry_runs(configs), strict=True):
        layout = layout_of(config)
        sent = dict.fromkeys(facts["groups"], 0.0)
        for t in transfers(config, layout, 0, 0):
            sent[t.dim] += wire_bytes(t, group_size(t.dim, layout))
        found = {name: group["bytes_sent"] for name, group in facts["groups"].items()}
        assert found == pytest.approx(sent)
        shapes = full_shapes_of(config.model).items()
        of_layers = (shape for name, shape in shapes if name.startswith("layers."))
        hidden = sum(math.prod(shape) for shape in of_layers if len(shape) == 2)
        rest = parameter_count(config.model) - hidden
        expected = (4 * hidden + 8 * rest) / config.tp / (1 + config.zero)
        assert facts["live_bytes"]["optimizer"] == pytest.approx(expected, rel=0.03)
        assert facts["parts"]["optimizer"]["flops"] > 0


def test_plan_refuses_muon() -> None:
    config = configured({"model": "llama_1b"})
    config.optim.name, config.optim.momentum = "muon", 0.95
    with pytest.raises(UserError, match=r"optim\.name=muon must be .*the nearest is"):
        plan(config, [])


def test_muon_without_momentum_is_refused() -> None:
    """The preset `optim=muon` sets it, but `optim.name=muon` alone does not."""
    config = configured({"model": "llama_1b"})
    config.optim.name = "muon"
    with pytest.raises(
        UserError, match=r"optim=muon needs .*momentum=0\.0; the nearest is optim\.momentum=0\.95"
    ):
        check_config(config, own_samples=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "asked", "wanted"),
    [
        ("fp32", "auto", torch.float32),
        ("fp64", "auto", torch.float64),
        ("bf16", "auto", torch.bfloat16),
        ("bf16", "fp32", torch.float32),
        ("fp32", "bf16", torch.bfloat16),
    ],
)
def test_newton_schulz_computes_in_the_given_type(
    precision: str, asked: str, wanted: torch.dtype
) -> None:
    small = {"model": "llama_tiny", "layers": 1, "seq_length": 32}
    config = configured(small | {"micro_batch_size": 1, "global_batch_size": 1})
    config.precision.name, config.optim.muon_dtype = precision, asked
    config.optim.name, config.optim.momentum = "muon", 0.95
    trainer = Trainer(
        config,
        ProcessGroups.single(),
        torch.device("cpu"),
        train_source=Zeros(config.model.seq_length),
    )
    assert trainer.optimizer.muon is not None
    assert trainer.optimizer.muon.empty.dtype == wanted
    trainer.train_step()
