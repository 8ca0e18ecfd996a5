"""Tests that metrics.jsonl, TensorBoard and W&B have the experts' statistics of a step, by
layer."""

from __future__ import annotations

import torch

from parallel3d.experts.balance import BalanceOfRun, Tally
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.metrics.loggers import figures_of


class Routed:
    """Stands in for a router with four experts."""

    name = "layers.2.mlp.router"

    def __init__(self) -> None:
        self.bias: torch.Tensor | None = torch.tensor([0.5, 0.0, -0.25, 0.0], dtype=torch.float64)
        self.tally = Tally(4, torch.device("cpu"))


def balance(routers: dict[int, Routed]) -> BalanceOfRun:
    settings = ExpertsConfig(aux_loss=0.1, bias_update_rate=0.125)
    return BalanceOfRun(settings, routers, [2, 5], 4, 2, (), has_biases=True, is_first=True)


def test_shares_of_stages_add_up_to_the_figures_of_all_layers() -> None:
    """Layer 2 is on this rank, layer 5 on another one; a step has 2 sequences of 8 tokens."""
    here, there = Routed(), Routed()
    here.tally.values = torch.tensor([12.0, 8, 12, 0, 2.5, 32.0, 16.0], dtype=torch.float64)
    there.tally.values = torch.tensor([8.0, 8, 8, 8, 2.0, 16.0, 8.0], dtype=torch.float64)
    stages = [balance({2: here}), balance({5: there})]
    like = torch.zeros(1, dtype=torch.float64)
    totals = sum(stage.take(like) for stage in stages).tolist()
    figures = [stage.figures(totals, batch=2) for stage in stages]
    assert figures[0] == figures[1]
    assert figures[0].row() == {
        "load": {"2": 1.5, "5": 1.0},
        "unused": {"2": 1, "5": 0},
        "entropy": {"2": 1.0, "5": 0.5},
        "aux": {"2": 1.25, "5": 1.0},
        "z": {"2": 2.0, "5": 1.0},
        "bias": {"2": 0.75, "5": 0.75},
    }
    assert not here.tally.values.any()  # the next step starts at zero
    stages[0].update(figures[0])
    assert here.bias is not None
    # The mean is 8: an expert above it falls, one below rises, and one at the mean stays.
    assert here.bias.tolist() == [0.375, 0.0, -0.375, 0.125]


def test_loggers_name_each_figure_by_layer() -> None:
    line = {"step": 3, "loss": 2.0, "experts": {"load": {"0": 1.5, "1": 2.0}, "unused": {"0": 1}}}
    found = figures_of(line)
    assert found["experts/load/0"] == 1.5
    assert found["experts/load/1"] == 2.0
    assert found["experts/unused/0"] == 1
