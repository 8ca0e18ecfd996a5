"""Checks the settings of a mixture of experts and of expert parallelism."""

from __future__ import annotations

from parallel3d.config.fields import show
from parallel3d.errors import UserError, closest
from parallel3d.models.keys import ModelConfig


def check_experts(model: ModelConfig) -> None:
    """Raises UserError if settings of experts or routers fit no experts of the model."""
    count, chosen = model.num_experts, model.experts_per_token
    if count == 0:
        _check_no_experts(model)
        return
    groups, kept = model.router_groups, model.router_top_groups
    if count % groups:
        close = closest(groups, lambda n: count % n == 0, count) or 1
        raise UserError(
            f"model.router_groups={groups} must divide model.num_experts={count}; the nearest is "
            f"model.router_groups={close}."
        )
    if kept > groups:
        raise UserError(
            f"model.router_top_groups={kept} must be at most model.router_groups={groups}; the "
            f"nearest is model.router_top_groups={groups}."
        )
    if model.router_score == "sigmoid" and groups > 1 and count // groups < 2:
        raise UserError(
            f"model.router_groups={groups} leaves only 1 of the {count} experts in a group, but "
            "with model.router_score=sigmoid a group's score is the sum of its two best experts' "
            "scores; the nearest is "
            f"model.router_groups={max(n for n in range(1, count // 2 + 1) if count % n == 0)}."
        )
    most = count // groups * kept
    if chosen > most:
        where = "" if kept == groups else f" in the {kept} groups that a token may use"
        raise UserError(
            f"model.experts_per_token={chosen} must be at most the {most} experts{where}; the "
            f"nearest is model.experts_per_token={most}."
        )
    if chosen == 1 and model.router_normalize:
        raise UserError(
            "model.router_normalize=true with model.experts_per_token=1 makes every weight 1, so "
            "that the router has no gradient; the nearest is model.router_normalize=false."
        )
    if model.shared_expert_gate and not model.shared_expert_size:
        raise UserError(
            "model.shared_expert_gate=true needs a shared expert, but model.shared_expert_size=0; "
            "the nearest is model.shared_expert_gate=false."
        )
    _check_dense_layers(model)


# Keys that give a mixture of experts further parameters. Sizes and scores are free without one.
PARTS = ("expert_bias", "router_logit_bias", "router_bias", "shared_expert_gate")


def _check_no_experts(model: ModelConfig) -> None:
    for name in PARTS:
        if getattr(model, name):
            raise UserError(
                f"model.{name}=true is a part of a mixture of experts, but model.num_experts=0; "
                f"the nearest is model.{name}=false."
            )


def _check_dense_layers(model: ModelConfig) -> None:
    dense, layers = list(model.dense_layers), model.num_layers
    inside = sorted({layer for layer in dense if 0 <= layer < layers})
    if inside != sorted(dense):
        raise UserError(
            f"model.dense_layers={show(dense)} must name layers from 0 to {layers - 1}, each once; "
            f"the nearest is model.dense_layers={show(inside)}."
        )
    if len(dense) == layers:
        raise UserError(
            f"model.dense_layers={show(dense)} leaves no layer for model.num_experts="
            f"{model.num_experts}; the nearest is model.num_experts=0."
        )


def check_expert_parallel(num_experts: int, ep: int, ranks: int) -> None:
    """Raises UserError unless `ep` divides `num_experts` and the `ranks` of a pipeline stage."""
    if ep == 1:
        return
    for what, size in (("tp · cp · dp", ranks), ("model.num_experts", num_experts)):
        if size % ep:
            close = closest(ep, lambda n: ranks % n == 0 == num_experts % n, ep) or 1
            raise UserError(f"ep={ep} must divide {what}={size}; the nearest is ep={close}.")
