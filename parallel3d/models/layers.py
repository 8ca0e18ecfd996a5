"""Norms, and the options with which all layers are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.comm.batch_overlap import BatchOverlap
from parallel3d.comm.group import SINGLE, Group
from parallel3d.config.values import AUTO, TORCH
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.device.fused import fused
from parallel3d.models.attention import choose_kernel
from parallel3d.models.declared import offset_of
from parallel3d.models.delta_kernel import choose_delta_kernel
from parallel3d.models.dropout import Dropout
from parallel3d.models.keys import ModelConfig
from parallel3d.models.ops import Heads, add_rms_norm, gain_of, heads_of, rms_norm
from parallel3d.models.repeats import NOTHING, Repeats
from parallel3d.parameters.declaration import FullTensor, Held
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ParameterSpec
from parallel3d.pipeline.offload import ActivationOffload
from parallel3d.tensor_parallel.keys import LossConfig


@dataclass(frozen=True)
class BuildContext:
    """Options common to all layers of a model."""

    init: Initializer
    tp: Group
    sp: bool
    repeats: Repeats = NOTHING  # parts that the backward computes again (`checkpointing.py`)
    loss: LossConfig = field(default_factory=LossConfig)
    half_loss: bool = False  # whether the cross entropy is in half precision
    chunks: int = 1  # number of pieces in which sequence parallelism communicates
    mlp_chunks: int = 1  # number of pieces in which a recomputed MLP runs
    gather_qk: bool = False  # whether q and k are all-gathered over tp (`Attention.project`)
    attention_kernel: str = AUTO  # the result of `choose_kernel`
    delta_kernel: str = TORCH  # the result of `choose_delta_kernel`
    cp: Group = SINGLE
    cp_style: str = "gather"
    cp_states: str = AUTO
    ep: Group = SINGLE
    dispatch: str = AUTO  # how tokens reach the experts of other ranks (`experts.route`)
    load: float = 1.0  # rows of a rank's experts in runs without values, relative to the mean
    routing: str = "model"  # who chooses the experts of a token (`ExpertsConfig.routing`)
    overlap: BatchOverlap | None = None  # overlaps a forward with a backward, unless it is None
    # Stages wait here before they read parameters, and move saved tensors to the host with this.
    gathers: PendingGathers = field(default_factory=PendingGathers)
    offload: ActivationOffload | None = None

    @classmethod
    def of_run(
        cls,
        blueprint: Blueprint,
        init: Initializer,
        tp: Group,
        cp: Group = SINGLE,
        ep: Group = SINGLE,
        overlap: BatchOverlap | None = None,
        gathers: PendingGathers | None = None,
        offload: ActivationOffload | None = None,
        world: Group = SINGLE,
    ) -> BuildContext:
        layer = blueprint.layer
        return cls(
            init,
            tp,
            layer.sp,
            layer.repeats,
            blueprint.loss,
            blueprint.half_loss,
            layer.chunks,
            layer.mlp_chunks,
            gather_qk=layer.gather_qk,
            attention_kernel=choose_kernel(blueprint, init.device),
            delta_kernel=choose_delta_kernel(blueprint, init.device, world),
            cp=cp,
            cp_style=layer.cp_style,
            cp_states=layer.cp_states,
            ep=ep,
            dispatch=layer.dispatch,
            load=blueprint.load,
            routing=blueprint.balance.routing,
            overlap=overlap,
            gathers=PendingGathers() if gathers is None else gathers,
            offload=offload,
        )

    @property
    def sequence_parallel(self) -> bool:
        return self.sp and self.tp.size > 1

    @property
    def linear_arguments(self) -> dict[str, Any]:
        """Arguments of all linear layers, whose partial gradients the trainer sums."""
        return {
            "group": self.tp,
            "init": self.init,
            "sequence_parallel": self.sp,
            "chunks": self.chunks,
            "recomputed": bool(self.repeats),
            "sum_partial_gradients": False,
        }

    def parameter(self, tensors: Sequence[FullTensor]) -> nn.Parameter:
        """Returns the parameter that holds this rank's part of declared tensors."""
        here = tensors[0].experts // self.ep.size
        experts = range(here * self.ep.index, here * (self.ep.index + 1))
        return self.init.parameter(ParameterSpec.of(tensors, self.tp.size, self.tp.index, experts))

    def dropout(self, site: str, model: ModelConfig) -> Dropout:
        """Creates the dropout of a site whose tensors have the shape of the residual stream.

        Under sequence parallelism such a tensor is this rank's part of the sequence.
        """
        part = self.tp.index if self.sequence_parallel else 0
        return Dropout(self.init.seed, site, model.dropout, part=part)


class Norm(nn.Module):
    """Applies LayerNorm or RMSNorm over the hidden dimension.

    Every tp rank holds all weights of the norm.
    """

    def __init__(self, held: Held, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.kind = model.norm
        self.eps = model.norm_eps
        self.offset = offset_of(model)
        self.weight = ctx.parameter(held["weight"])
        self.bias = ctx.parameter(held["bias"]) if "bias" in held else None
        self.size = tuple(self.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rmsnorm":
            return rms_norm(x, self.weight, self.eps, self.offset)
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)

    def is_fused_with_sum(self, x: Tensor) -> bool:
        """Returns whether `add` runs as one kernel in the forward and one in the backward.

        In a compiled block the answer is False, because the compiler does the fusion.
        """
        fuses = self.kind == "rmsnorm" and is_on_accelerator(x)
        return fuses and not torch.compiler.is_compiling()

    def add(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, y, self.weight, self.eps, self.offset)


class QKNorm(nn.Module):
    """Applies RMSNorm to every head of q and k before RoPE (Henry et al. 2020; Qwen3 report, §2).

    Every tp rank holds both weights. A rank's gradients cover only its own heads, so they are
    summed over tp with or without sequence parallelism (`FullTensor.of_heads`).

    Shapes: (b, s, (heads + 2 · kv_heads) · head_dim) → the same.
    """

    def __init__(self, held: Held, model: ModelConfig, shape: Heads, ctx: BuildContext) -> None:
        super().__init__()
        self.shape = shape
        self.eps = model.norm_eps
        self.offset = offset_of(model)
        self.q, self.k = ctx.parameter(held["q"]), ctx.parameter(held["k"])

    def forward(self, qkv: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return _NormHeads.apply(qkv, self.q, self.k, self.shape, self.eps, self.offset)
        (q, k, v), how = heads_of(qkv, self.shape), (self.eps, self.offset)
        q, k = rms_norm(q, self.q, *how), rms_norm(k, self.k, *how)
        return torch.cat((q, k, v), 2).flatten(2)


class _NormHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        shape: Heads,
        eps: float,
        offset: float,
    ) -> Tensor:
        ctx.shape, ctx.offset = shape, offset
        out, *scales = norm_heads_forward(qkv, q_weight, k_weight, shape, eps, offset)
        ctx.save_for_backward(qkv, q_weight, k_weight, *scales)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        saved = *ctx.saved_tensors, ctx.shape, ctx.offset
        return *norm_heads_backward(grad, *saved), None, None, None


@fused
def norm_heads_forward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, shape: Heads, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns qkv with q and k normalised, and the scales (b, s, heads, 1) of q and of k.

    The scales, 1 / sqrt(mean square), are in fp32 or better.
    """
    q, k, v = heads_of(qkv, shape)
    q, q_scale = _normed(q, gain_of(q_weight, offset), eps)
    k, k_scale = _normed(k, gain_of(k_weight, offset), eps)
    return torch.cat((q, k, v), 2).flatten(2), q_scale, k_scale


@fused
def norm_heads_backward(
    grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    shape: Heads,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, _ = heads_of(qkv, shape)
    grad_q, grad_k, grad_v = heads_of(grad, shape)
    grad_q, grad_q_weight = _gradients(grad_q, q, q_weight, q_scale, offset)
    grad_k, grad_k_weight = _gradients(grad_k, k, k_weight, k_scale, offset)
    return torch.cat((grad_q, grad_k, grad_v), 2).flatten(2), grad_q_weight, grad_k_weight


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype), scale


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight.

    With n = x · scale, the first is dx = scale · (g·w − n·mean(g·w·n)).
    """
    normed = x * scale
    grad_weight = (grad * normed).flatten(0, -2).sum(0)
    weighed = grad * gain_of(weight, offset)
    along = (weighed * normed).mean(-1, keepdim=True)
    return ((weighed - normed * along) * scale).to(x.dtype), grad_weight.to(weight.dtype)
