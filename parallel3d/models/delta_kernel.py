"""Chooses the kernel of gated DeltaNet (`delta_kernel`).

The kernels of flash-linear-attention are in Triton, take 16 bits only, and have been wrong on some
GPUs with some versions of Triton. So one small forward and backward is compared with the torch form
before a run uses them.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import SINGLE, Group
from parallel3d.config.values import AUTO, FLA, HALF_PRECISION, TORCH
from parallel3d.device import accelerator
from parallel3d.errors import UserError, first_line, print_line
from parallel3d.models.declared import layer_kinds
from parallel3d.models.delta_rule import delta_rule
from parallel3d.models.dialect import GATED_DELTANET
from parallel3d.models.fla_kernel import MODULE, rule_by_fla

AUTO_TAKES_TORCH = "delta_kernel=auto takes the torch form of gated DeltaNet"
TOLERANCE = 2e-2  # relative error of the output and of each gradient in bf16
TRIED_TOKENS, TRIED_HEADS = 130, 2  # three chunks, of which the last is not full


def choose_delta_kernel(blueprint: Blueprint, device: torch.device, world: Group = SINGLE) -> str:
    """Returns TORCH or FLA, the same on all ranks of `world`; collective.

    If the configuration names fla, it must work on each rank's device. If it is auto, and fla works
    on rank 0 but not on another rank, rank 0 logs why.

    Raises:
        UserError: the configured kernel fails on a device. Every rank raises it.
    """
    asked = blueprint.layer.state_kernel
    if asked == TORCH or not accelerator.has_values(device) or not _has_deltanet(blueprint):
        return TORCH  # a dry run counts the torch form
    if asked == AUTO and not _may_use_fla(blueprint, device):
        return TORCH
    own = why_not(device, blueprint.model.delta_sizes)
    reasons = all_gather_json(own, world.handle, device)
    failed = [i for i, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return FLA
    rank = failed[0]
    why = f"on rank {rank} {reasons[rank]}" if rank else reasons[rank]
    if asked == AUTO:
        if rank and world.index == 0:
            print_line(f"{AUTO_TAKES_TORCH}: {why}")
        return TORCH
    raise UserError(
        f"delta_kernel=fla: {why}; the nearest is delta_kernel=torch, which needs no package."
    )


def torch_form_instead(blueprint: Blueprint, device: torch.device) -> str | None:
    """Returns why `delta_kernel=auto` takes the torch form on this GPU, or None if it does not."""
    asked = blueprint.layer.state_kernel
    if asked != AUTO or not _has_deltanet(blueprint) or not _may_use_fla(blueprint, device):
        return None
    return why_not(device, blueprint.model.delta_sizes)


def _has_deltanet(blueprint: Blueprint) -> bool:
    return any(kind.mixer == GATED_DELTANET for kind in layer_kinds(blueprint.model))


def _may_use_fla(blueprint: Blueprint, device: torch.device) -> bool:
    if blueprint.compiles or torch.are_deterministic_algorithms_enabled():
        return False  # the package's gradients depend on the order of threads
    on_card = accelerator.is_accelerator(device) and accelerator.has_values(device)
    return on_card and blueprint.precision.name in HALF_PRECISION


@functools.cache
def why_not(device: torch.device, sizes: tuple[int, int]) -> str | None:
    """Returns why the kernel of the package cannot be used on a device, or None if it can.

    `sizes`: the widths of a key head and of a value head.
    """
    try:
        import_module(MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        found = first_line(error).rstrip(".")
        return f"the package flash-linear-attention cannot be imported ({found})"
    try:
        worst = error_of_kernel(device, sizes)
    except Exception as error:  # Triton raises errors of many kinds
        return f"its kernel fails on this {accelerator.name(device)} ({first_line(error)[:200]})"
    if worst < TOLERANCE:
        return None
    return (
        f"its kernel differs from the torch form by {worst:.1%} on this "
        f"{accelerator.name(device)}, where {TOLERANCE:.0%} is rounding"
    )


def error_of_kernel(device: torch.device, sizes: tuple[int, int]) -> float:
    """Returns the largest relative error of the kernel's output and gradients in bf16."""
    dk, dv = sizes
    rng = torch.Generator().manual_seed(0)

    def drawn(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(1, TRIED_TOKENS, TRIED_HEADS, width, generator=rng).to(device, dtype)

    q, k = (torch.nn.functional.normalize(drawn(dk).float(), dim=-1).bfloat16() for _ in range(2))
    g, beta = (drawn(1, torch.float32).squeeze(-1) for _ in range(2))
    inputs = [q, k, drawn(dv), -0.1 * g.exp(), beta.sigmoid()]
    grad = drawn(dv)

    def results(rule: Any) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            out = rule(*leaves)[0]
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    errors = [
        (ours.float() - theirs.float()).norm() / theirs.float().norm()
        for ours, theirs in zip(results(rule_by_fla), results(delta_rule), strict=True)
    ]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).max())
