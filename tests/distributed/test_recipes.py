"""Tests that a small form of every recipe trains like the reference, in its layout on four
ranks."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.cli.overrides import presets
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.recipes import recipe
from parallel3d.run_config import Config, check_config
from tests.distributed.cases import TINY_SIZES, UnequalMasks
from tests.distributed.harness import TOLERANCES, array, relative
from tests.distributed.pool import Pool
from tests.reference.train import train_reference

pytestmark = pytest.mark.more

RANKS = 4
STEPS = 2
NAMES = presets("experiment")
STATES = ("delta_key_heads", "delta_value_heads", "delta_key_size", "delta_value_size")


class Trained(NamedTuple):
    """The results of a rank: the full first weights, and each step's loss, gradient norm and
    rate."""

    initial: dict[str, np.ndarray]
    steps: list[tuple[float, float, float]]


def small(name: str) -> Config:
    """Returns a recipe with a narrow, short model and at most two ranks per dimension.

    dp takes the rest of four ranks; precision, schedule, ZeRO and recomputation stay.
    """
    config = recipe(name)
    tp, cp, pp, vpp = (min(2, size) for size in (config.tp, config.cp, config.pp, config.vpp))
    dp = RANKS // (tp * cp * pp)
    rotates_few = config.model.rotary_percent < 0.5  # at least a pair of a head's dimensions
    has_states = config.model.delta_key_heads is not None
    states = dict(zip(STATES, (2, 4, 4, 6), strict=True)) if has_states else {}
    model = dataclasses.replace(
        config.model,
        **TINY_SIZES,
        **states,
        num_layers=max(2 * pp * vpp, len(config.model.layer_types)),
        num_query_groups=4 if config.model.kv_heads < config.model.num_attention_heads else None,
        head_dim=8 if rotates_few else None,
        max_position_embeddings=None,
        dropout=0.0,
        # The samples are short, so there must be few experts.
        num_experts=min(8, config.model.num_experts),
        experts_per_token=2,
        expert_ffn_size=24 if config.model.num_experts else None,
    )
    optim = dataclasses.replace(config.optim, lr_warmup_steps=1, lr_warmup_fraction=0.0)
    train = dataclasses.replace(config.train, steps=STEPS, epochs=None, tokens=None)
    changed = dict(
        tp=tp, cp=cp, pp=pp, vpp=vpp, dp=dp, micro_batch_size=1, global_batch_size=4 * dp
    )
    changed["ep"] = min(2, config.ep)
    config = dataclasses.replace(config, **changed, model=model, optim=optim, train=train)
    return check_config(config, RANKS, own_samples=True)


def source_of(config: Config) -> UnequalMasks:
    model = config.model
    return UnequalMasks(model.vocab_size, model.seq_length, config.data.document_mask)


def train_all(configs: list[Config]) -> list[Trained]:
    """Runs three steps of each configuration, on each rank."""
    found = []
    for config in configs:
        ep = config.ep if config.model.num_experts else 0
        layout = Layout(config.tp, config.pp, config.dp or 1, config.cp, ep)
        groups = ProcessGroups.create(layout, "cpu", timeout_s=300)
        source = source_of(config)
        device = torch.device("cpu")
        trainer = Trainer(config, groups, device, train_source=source, valid_source=source)
        initial = {name: array(weight) for name, weight in trainer.full_parameters().items()}
        steps = [trainer.train_step() for _ in range(STEPS)]
        found.append(Trained(initial, [(s.loss, s.grad_norm, s.lr) for s in steps]))
        groups.close()
    return found


@pytest.fixture(scope="module")
def trained(pool: Pool) -> dict[str, list[Trained]]:
    """Returns, by recipe, the results of each rank."""
    of_ranks = pool.run(RANKS, train_all, [small(name) for name in NAMES])
    return {name: [found[i] for found in of_ranks] for i, name in enumerate(NAMES)}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_small_form_trains_like_the_reference(
    name: str, trained: dict[str, list[Trained]]
) -> None:
    first, *others = trained[name]
    assert all(other.steps == first.steps for other in others)
    config = small(name)
    weights = {name: torch.from_numpy(weight) for name, weight in first.initial.items()}
    rates = [lr for _, _, lr in first.steps]
    assert max(rates) == config.optim.lr
    run = train_reference(config, weights, source_of(config), STEPS, torch.float32, rates)
    limit = TOLERANCES[config.precision.name]
    for i, (loss, norm, _) in enumerate(first.steps):
        assert relative(loss, run.losses[i]) < limit.loss, i
        assert relative(norm, run.grad_norms[i]) < limit.grad_norm, i
