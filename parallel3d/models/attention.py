"""Causal self-attention, and the choice of its kernel (`attention_kernel`)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention as registry
import torch.nn.functional as F
from torch import Tensor

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.config.values import AUTO, FLASH, HALF_PRECISION, MATH, PACKAGES
from parallel3d.context_parallel.attention import (
    ONE_RANK,
    ContextParallel,
    attend_across,
    attend_within,
    gather_sequence,
    to_heads,
    to_tokens,
)
from parallel3d.context_parallel.document_attention import NOT_CUDNN, allowed, repeated
from parallel3d.context_parallel.window_attention import attend_in_window
from parallel3d.device import accelerator
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.device.datasheets import BLACKWELL
from parallel3d.device.matmul import is_widened
from parallel3d.device.precision import compute_dtype
from parallel3d.errors import UserError, first_line
from parallel3d.models.dropout import Dropout, attend_dropping
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.ops import Heads, split_heads
from parallel3d.models.rotary import Positions

# On a B200 (compute capability 10.0) cuDNN's kernel gives wrong results with fewer key-value heads
# than this (open issue: https://github.com/pytorch/pytorch/issues/193893).
LEAST_KV_HEADS = 8
TRIED_TOKENS = 128


@dataclass(frozen=True)
class AttentionOptions:
    """How a layer attends, the same for all micro-batches.

    Attributes:
        kernel: the result of `choose_kernel`.
        cp: the group and the style of context parallelism, used if the documents have a shard.
        scale: factor that multiplies the scores, or None for head_dim^-½.
        window: number of keys that a query sees, including its own, or None for all keys up to its
            own. With a window, the documents must have the window's tables.
        rope: index of the rotary table in `Positions.rotary`, or None for no rotation.
        dropout: dropout of attention probabilities, which is slower than PyTorch's kernels; used
            only if the samples' indices are given.
        cap: c of the scores c · tanh(score / c), or None for no cap. No kernel caps them, so they
            are computed as with kernel=math.
    """

    kernel: str = AUTO
    cp: ContextParallel = ONE_RANK
    scale: float | None = None
    window: int | None = None
    rope: int | None = None
    dropout: Dropout | None = None
    cap: float | None = None


def choose_kernel(blueprint: Blueprint, device: torch.device) -> str:
    """Returns the attention kernel for `device`; if the configuration names one, tries it first.

    Raises:
        UserError: the configured kernel fails on this device. Every rank raises it.
    """
    asked = blueprint.layer.attention_kernel
    if asked == AUTO:
        return NOT_CUDNN if avoids_cudnn(blueprint, device) else AUTO
    kernel = asked
    if asked in PACKAGES:
        kernel = FLASH
        if accelerator.has_values(device):  # a dry run does not need the package
            _activate(asked)
    if kernel != MATH:  # the math kernel accepts all shapes
        for heads in _local_heads(blueprint):
            _try(blueprint, device, kernel, heads)
    return kernel


def avoids_cudnn(blueprint: Blueprint, device: torch.device) -> bool:
    """Returns whether `attention_kernel=auto` excludes cuDNN, which PyTorch would prefer.

    Tensor parallelism divides the key-value heads among the ranks. If cuDNN were allowed, its wrong
    results with few heads would appear in some layouts of a model and not in others.
    """
    asked = blueprint.layer.attention_kernel
    if asked != AUTO or device.type != "cuda" or torch.version.hip is not None:
        return False
    half = blueprint.precision.name in HALF_PRECISION  # cuDNN has no attention for other dtypes
    fewest = min((kv for _, kv, _ in _local_heads(blueprint)), default=LEAST_KV_HEADS)
    if not half or fewest >= LEAST_KV_HEADS:
        return False
    return accelerator.module(device).get_device_capability(device)[0] == BLACKWELL


def _local_heads(blueprint: Blueprint) -> list[Heads]:
    """Returns the heads on a rank, for each kind of attention in the model."""
    tp, kinds = blueprint.layout.tp, blueprint.model.attention_kinds
    found = [(of.heads // tp, max(1, of.kv_heads // tp), of.head_size) for of in kinds]
    return list(dict.fromkeys(found))


def _activate(asked: str) -> None:
    """Replaces PyTorch's flash attention with that of the package `asked`, until the process ends.

    `asked` is one of `PACKAGES`, such as fa3.
    """
    name, module = PACKAGES[asked]
    try:
        if registry.current_flash_attention_impl() != name:
            registry.activate_flash_attention_impl(name)
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        raise UserError(
            f"attention_kernel={asked}: torch {torch.__version__} cannot use {module} here "
            f"({first_line(error).rstrip('.')}); the nearest is attention_kernel=flash, which "
            "torch includes."
        ) from error


def _try(blueprint: Blueprint, device: torch.device, kernel: str, shape: Heads) -> None:
    dtype, (heads, kv_heads, size) = compute_dtype(blueprint.precision), shape
    tokens, width = min(blueprint.model.seq_length, TRIED_TOKENS), (heads + 2 * kv_heads) * size
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # PyTorch warns about every kernel that it rejects
            qkv = torch.zeros(1, tokens, width, dtype=dtype, device=device, requires_grad=True)
            options = AttentionOptions(kernel)
            causal_attention(qkv, shape, LayerInputs(), options).sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        raise UserError(
            f"attention_kernel={blueprint.layer.attention_kernel} has no kernel for heads of "
            f"{size} in {str(dtype).removeprefix('torch.')} on this "
            f"{accelerator.name(device)} ({first_line(error).rstrip('.')}); the nearest is "
            "attention_kernel=auto, which takes the fastest available one."
        ) from error


def causal_attention(
    qkv: Tensor,
    heads: Heads,
    inputs: LayerInputs,
    options: AttentionOptions,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes softmax(scale · q·kᵀ + causal mask)·v per head (Vaswani et al. 2017 §3.2).

    Query head h reads key-value head h // (heads // kv_heads) (GQA, Ainslie et al. 2023).

    Args:
        qkv: (b, s, (heads + 2 · kv_heads) · head_dim): q, k and v concatenated.
        heads: the numbers of heads and of key-value heads, and head_dim.
        sinks: a number for each query head that joins the softmax as a score of value 0
            (`context_parallel/sinks.py`), or None for none.

    Returns: (b, s, heads · head_dim).
    """
    q, k, v = rotated_heads(qkv, heads, inputs.positions, options.rope)
    y = attend_split(q, k, v, inputs, options, sinks)
    return y.transpose(1, 2).flatten(2)


def rotated_heads(
    qkv: Tensor, heads: Heads, positions: Positions, rope: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v of `causal_attention` by heads, with the positions in q and k.

    `rope`: index of the rotary table, or None for no rotation.
    """
    rotary = None if rope is None else positions.rotary[rope]
    q, k, v = split_heads(qkv, heads, rotary)
    if positions.temperature is not None:
        q = q * positions.temperature.to(q.dtype)
    return q, k, v


def attend_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: LayerInputs,
    options: AttentionOptions,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of separate q, k and v, which are already rotated.

    q is (b, heads, s, head_dim), like the result; k and v may have fewer heads. With `sinks`, as
    with a window or a cap, the samples must have documents.
    """
    documents, cp = inputs.documents, options.cp
    scale, window, cap = options.scale, options.window, options.cap
    kernel = options.kernel if cap is None else MATH
    shard = None if documents is None else documents.shard
    needs_tables = any(x is not None for x in (window, sinks, cap, shard))
    if documents is not None and documents.are_samples and not needs_tables:
        documents = None
    exchanged = shard if cp.style == "heads" else None
    if exchanged is not None:  # each rank then has whole sequences for some of the heads
        first = cp.first_head(q.shape[1])
        q, k, v = to_heads(q, k, v, cp, exchanged)
        sinks = None if sinks is None else sinks[first : first + q.shape[1]]
        shard = None
    heads, dtype = q.shape[1], q.dtype
    samples, dropout = inputs.samples, options.dropout
    drops = dropout is not None and samples is not None
    if drops and shard is not None:
        k, v = (gather_sequence(x, cp, shard) for x in (k, v))
    if drops or (shard is None and window is None and not kernel_shares_heads(q)):
        k, v = repeated(k, heads), repeated(v, heads)
    if _is_slow_below_fp32(q):
        q = q.float()
        k = k.float()
        v = v.float()
    if dropout is not None and samples is not None:
        y = attend_dropping(q, k, v, dropout, samples, documents, scale, window, sinks, cap)
    elif window is not None:
        held = documents if shard is None else shard
        # The tables were made when the batch was read.
        assert held is not None and held.window is not None
        y = attend_in_window(q, k, v, held.window, cp, kernel, scale, sinks, cap)
    elif documents is None:
        assert sinks is cap is None
        y = attend(q, k, v, is_causal=True, kernel=kernel, scale=scale)
    elif shard is None:
        y = attend_within(q, k, v, documents, kernel, scale, sinks, cap)
    else:
        y = attend_across(q, k, v, cp, shard, kernel, scale, sinks, cap)
    y = y.to(dtype)
    return y if exchanged is None else to_tokens(y, cp, exchanged)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    kernel: str = AUTO,
    scale: float | None = None,
) -> Tensor:
    how: dict[str, Any] = {"enable_gqa": k.shape[1] != q.shape[1], "scale": scale}
    with allowed(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **how)


def kernel_shares_heads(q: Tensor) -> bool:
    """Returns whether the kernel for `q` reads one key-value head for several query heads.

    Flash attention and cuDNN do so, in half precision. In fp32 on a GPU, PyTorch would fall back to
    its math kernel, which materialises the s × s scores.
    """
    return is_on_accelerator(q) and q.dtype in (torch.bfloat16, torch.float16)


def _is_slow_below_fp32(q: Tensor) -> bool:
    """Returns whether PyTorch's CPU kernel is faster in fp32 than in the narrower dtype of q.

    For fp16 it always is (see `device.matmul`), and for bf16 only with short sequences of narrow
    heads. On one core with AMX, forward and backward of (2, 8, 256, 32) took 7.2 ms in bf16 and
    4.9 ms in fp32, including the casts; (1, 8, 1024, 64) took 24 ms in bf16 and 43 ms in fp32.
    """
    short = q.shape[-1] < 64 and q.shape[-2] < 1024
    narrow = q.dtype == torch.bfloat16 and q.device.type == "cpu"
    return is_widened(q) or (narrow and short)
