"""Runs attention on the simulated device as one kernel per pass, like flash attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from parallel3d.private_names import flash_backward, flash_forward, math_attention
from parallel3d.simulated_device.device import TYPE
from parallel3d.simulated_device.tensor import SimulatedTensor, launch, simulated

aten = torch.ops.aten
FLASH = "flash attention"
FLASH_BACKWARD = "flash attention backward"


def register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return library


def flash() -> dict[Any, Callable[..., Any]]:
    """Returns the implementations of flash attention by operator."""
    return {
        flash_forward.default: _forward,
        flash_backward.default: _backward,
    }


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes attention like `torch.nn.functional.scaled_dot_product_attention`.

    Queries are (b, heads, s, d), keys and values (b, kv heads, s, d). The result is (b, heads, s,
    d); if a flash kernel computes it, it is stored in memory as (b, s, heads, d).
    """
    if attn_mask is not None or dropout_p:
        raise NotImplementedError(f"the {TYPE} device has no attention with a mask or dropout")
    if is_causal and query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"the {TYPE} device has causal attention only for equal lengths")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise RuntimeError("fewer key-value heads than query heads need enable_gqa=True")
    if not _is_supported(query):
        if not torch.backends.cuda.math_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")  # torch's message
        found = math_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return found[0]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    sizes = q.shape[1], k.shape[1]
    found = flash_forward(q, k, v, None, None, *sizes, 0.0, is_causal, False, scale=scale)
    return found[0].transpose(1, 2)


def _is_supported(query: Tensor) -> bool:
    """Returns whether an enabled kernel supports the query's dtype.

    The kernels of flash attention and cuDNN support only half precision.
    """
    allowed = torch.backends.cuda
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return allowed.mem_efficient_sdp_enabled() or (
        narrow and (allowed.flash_sdp_enabled() or allowed.cudnn_sdp_enabled())
    )


def _forward(
    _: Any,
    q: SimulatedTensor,
    k: SimulatedTensor,
    v: SimulatedTensor,
    edges: SimulatedTensor | None,
    key_edges: SimulatedTensor | None,
    longest: int,
    longest_keys: int,
    dropout: float,
    causal: bool,
    *rest: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Computes attention of queries (…, tokens, heads, d).

    Returns the outputs (…, tokens, heads, d), the log-sum-exp of the scores (…, heads, tokens), and
    three empty tensors. With `edges`, sequences are packed and there is no batch dimension. The
    last query of a causal sequence reads up to its last key. With a window, a query reads at most
    `window_size_left` keys before its own.
    """
    window = _window(causal, window_size_left, window_size_right)
    _check_packed(q, edges, longest)
    _check_packed(k, key_edges, longest_keys)
    out = simulated(torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device))
    of_sums = *q.shape[:-3], q.shape[-2], q.shape[-3]
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    sums = simulated(torch.empty(of_sums, dtype=accum_dtype, device=q.device))
    for part, keys in _sequences(q, edges, key_edges):
        whole = _swapped(q.data_[part]), _swapped(k.data_[keys]), _swapped(v.data_[keys])
        scores, _, values = _scores(*whole, causal, scale, window)
        out.data_[part] = _swapped(scores.softmax(-1) @ values).to(q.dtype)
        sums.data_[..., part] = scores.logsumexp(-1)
    _launch(FLASH, [q, k, v], [out, sums], edges, key_edges, causal, window)
    unused = torch.empty(0, device=q.device)
    return out, sums, unused, unused, unused


def _backward(
    _: Any,
    grad: SimulatedTensor,
    q: SimulatedTensor,
    k: SimulatedTensor,
    v: SimulatedTensor,
    out: SimulatedTensor,
    sums: SimulatedTensor,
    edges: SimulatedTensor | None,
    key_edges: SimulatedTensor | None,
    longest: int,
    longest_keys: int,
    dropout: float,
    causal: bool,
    *rest: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Computes the gradients of attention to the given keys.

    `out` and `sums` may be results of attention to more keys than these.
    """
    window = _window(causal, window_size_left, window_size_right)
    _check_packed(q, edges, longest)
    _check_packed(k, key_edges, longest_keys)
    grads = [simulated(torch.empty_like(t)) for t in (q, k, v)]
    for to in grads:
        to.data_.zero_()  # the kernel writes zeros for keys that no query reads
    for part, keys in _sequences(q, edges, key_edges):
        of_q, of_out, attended = (_swapped(t.data_[part]) for t in (q, grad, out))
        whole = of_q, _swapped(k.data_[keys]), _swapped(v.data_[keys])
        seen = causal, scale, window
        found = _gradients(of_out, *whole, sums.data_[..., part], *seen, attended)
        for to, place, value in zip(grads, (part, keys, keys), found, strict=True):
            to.data_[place] = _swapped(value).to(to.dtype)
    _launch(FLASH_BACKWARD, [q, k, v, grad, out, sums], grads, edges, key_edges, causal, window)
    return tuple(grads)


def _scores(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the scores (…, heads, s, t), and keys and values repeated for each query head.

    All three are in fp32, or in fp64 if the queries are.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    accum_dtype, times = torch.promote_types(q.dtype, torch.float32), q.shape[-3] // k.shape[-3]
    keys, values = (t.to(accum_dtype).repeat_interleave(times, -3) for t in (k, v))
    scores = q.to(accum_dtype) @ keys.transpose(-2, -1) * scale
    if causal:
        queries, keys_of_all = scores.shape[-2:]
        before = keys_of_all - queries
        every = torch.ones(queries, keys_of_all, dtype=torch.bool)
        scores = scores.masked_fill(every.triu(1 + before), -torch.inf)
        if window is not None:
            scores = scores.masked_fill(every.tril(before - window), -torch.inf)
    return scores, keys, values


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v (Dao et al. 2022, algorithm 4 with one block)."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores, keys, values = _scores(q, k, v, causal, scale, window)
    chances = torch.exp(scores - sums.unsqueeze(-1))
    grad = grad.to(chances.dtype)
    of_chances = grad @ values.transpose(-2, -1)
    along = (grad * out.to(chances.dtype)).sum(-1, keepdim=True)
    of_scores = chances * (of_chances - along) * scale
    of_keys = of_scores.transpose(-2, -1) @ q.to(chances.dtype)
    of_values = chances.transpose(-2, -1) @ grad
    shared = (k.shape[-3], -1)
    return (
        of_scores @ keys,
        of_keys.unflatten(-3, shared).sum(-3),
        of_values.unflatten(-3, shared).sum(-3),
    )


def _check_packed(x: Tensor, edges: SimulatedTensor | None, longest: int) -> None:
    """Raises the errors that the CUDA kernels raise for packed sequences."""
    if edges is None:
        return
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if x.shape[-1] % 8:
        raise RuntimeError("head_size should be a multiple of 8")
    if edges.dtype != torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype int32")
    known = edges.data_
    if not known.is_meta and (int(known[-1]) != len(x) or int(known.diff().max()) != longest):
        raise RuntimeError("the edges do not match the number of tokens or the longest sequence")


def _sequences(
    q: SimulatedTensor, edges: SimulatedTensor | None, key_edges: SimulatedTensor | None
) -> Iterator[tuple[slice, slice]]:
    """Yields each packed sequence's slices of queries and keys, or full slices without packing.

    It yields nothing if the tensors have no values.
    """
    if q.data_.is_meta:
        return
    if edges is None or key_edges is None:
        yield slice(None), slice(None)
        return
    ends = (pairwise(e.data_.tolist()) for e in (edges, key_edges))
    for of_queries, of_keys in zip(*ends, strict=True):
        yield slice(*of_queries), slice(*of_keys)


def _launch(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    edges: Tensor | None,
    key_edges: Tensor | None,
    causal: bool,
    window: int | None,
) -> None:
    """Reports the kernel; to observers, all packed sequences look equally long."""
    q = inputs[0]
    count = len(q) if edges is None else len(edges) - 1
    shapes = (
        (count, t.shape[-2], math.prod(t.shape[:-2]) // count, t.shape[-1]) for t in inputs[:3]
    )
    alike = [torch.empty(shape, dtype=q.dtype, device="meta") for shape in shapes]
    given = [*inputs, *(e for e in (edges, key_edges) if e is not None)]
    launch(name, given, outputs, (name, alike, {"causal": causal, "window": window}, None))


def _window(causal: bool, left: int | None, right: int | None) -> int | None:
    """Returns the number of keys that the window lets a query see, or None without a window."""
    if left is None:
        return None
    if not causal or right != 0:
        raise NotImplementedError(f"the {TYPE} device supports only causal windows to the left")
    return left + 1


def _swapped(x: Tensor) -> Tensor:
    """Returns a view in which the dimensions of tokens and heads are exchanged."""
    return x.transpose(-3, -2)
