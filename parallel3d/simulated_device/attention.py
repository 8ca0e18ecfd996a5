"""Runs attention on the simulated device: one kernel forward, one backward, as flash attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from parallel3d.simulated_device.device import TYPE
from parallel3d.simulated_device.machine import Call
from parallel3d.simulated_device.tensor import SimulatedTensor, launch, simulated

FLASH, FLASH_BACKWARD = "flash attention", "flash attention backward"


def register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return library


def packed() -> dict[Any, Callable[..., Any]]:
    """Returns the implementations of flash attention over packed sequences, by operator."""
    aten = torch.ops.aten
    return {
        aten._flash_attention_forward.default: _packed_forward,
        aten._flash_attention_backward.default: _packed_backward,
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
    """(b, heads, s, d), (b, kv heads, s, d) twice → (b, heads, s, d), stored (b, s, heads, d)."""
    if attn_mask is not None or dropout_p:
        raise NotImplementedError(f"attention with a mask or dropout on the {TYPE} device")
    if is_causal and query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"causal attention that is not square on the {TYPE} device")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise RuntimeError("fewer key-value heads than query heads need enable_gqa=True")
    if not _is_supported(query):
        if not torch.backends.cuda.math_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")  # as torch
        how = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, **how)[0]
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _Attention.apply(query, key, value, is_causal, scale)


def _is_supported(query: Tensor) -> bool:
    """Returns whether an enabled kernel takes the type: flash and cuDNN only half precision."""
    allowed = torch.backends.cuda
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return allowed.mem_efficient_sdp_enabled() or (
        narrow and (allowed.flash_sdp_enabled() or allowed.cudnn_sdp_enabled())
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: SimulatedTensor,
        k: SimulatedTensor,
        v: SimulatedTensor,
        causal: bool,
        scale: float,
    ) -> SimulatedTensor:
        b, heads, s, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        by_token = torch.empty(b, s, heads, v.shape[-1], dtype=q.dtype, device=q.device)
        out = simulated(by_token.transpose(1, 2))
        sums = simulated(torch.empty(b, heads, s, dtype=wide, device=q.device))
        if not q.data_.is_meta:
            scores, _, values = _scores(q.data_, k.data_, v.data_, causal, scale)
            out.data_.copy_(scores.softmax(-1) @ values)
            sums.data_.copy_(scores.logsumexp(-1))
        call = (FLASH, [q.data_, k.data_], {"causal": causal}, None)
        launch(FLASH, [q, k, v], [out, sums], call)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.how = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: SimulatedTensor) -> tuple:
        q, k, v, out, sums = ctx.saved_tensors
        causal, scale = ctx.how
        grads = [simulated(torch.empty_like(t)) for t in (q, k, v)]
        if not q.data_.is_meta:
            found = _gradients(
                grad.data_, q.data_, k.data_, v.data_, sums.data_, causal, scale, out.data_
            )
            for to, value in zip(grads, found, strict=True):
                to.data_.copy_(value)
        call = (FLASH_BACKWARD, [q.data_, k.data_], {"causal": causal}, None)
        launch(FLASH_BACKWARD, [grad, q, k, v, out, sums], grads, call)
        return *grads, None, None


def _scores(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scores (b, heads, s, t), keys and values of every query head, in fp32 or better."""
    wide, times = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    keys, values = (t.to(wide).repeat_interleave(times, 1) for t in (k, v))
    scores = q.to(wide) @ keys.transpose(-2, -1) * scale
    if causal:
        queries, keys_of_all = scores.shape[-2:]
        future = torch.ones(queries, keys_of_all, dtype=torch.bool).triu(1 + keys_of_all - queries)
        scores = scores.masked_fill(future, -torch.inf)
    return scores, keys, values


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, causal: bool, scale: float,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v (Dao et al. 2022, algorithm 4, in one block)."""
    scores, keys, values = _scores(q, k, v, causal, scale)
    chances = torch.exp(scores - sums.unsqueeze(-1))
    grad = grad.to(chances.dtype)
    of_chances = grad @ values.transpose(-2, -1)
    along = (grad * out.to(chances.dtype)).sum(-1, keepdim=True)
    of_scores = chances * (of_chances - along) * scale
    of_keys = of_scores.transpose(-2, -1) @ q.to(chances.dtype)
    of_values = chances.transpose(-2, -1) @ grad
    shared = (k.shape[1], -1)
    return (
        of_scores @ keys,
        of_keys.unflatten(1, shared).sum(2),
        of_values.unflatten(1, shared).sum(2),
    )


def _packed_forward(
    _: Any, q: SimulatedTensor, k: SimulatedTensor, v: SimulatedTensor, edges: SimulatedTensor,
    key_edges: SimulatedTensor, longest: int, longest_keys: int, *how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(tokens, heads, d) → the same, and the logarithms of the sums (heads, tokens).

    A causal sequence's last query reads its last key.
    """
    _check_packed(q, edges, longest)
    _check_packed(k, key_edges, longest_keys)
    out = simulated(torch.empty_like(q))
    sums = simulated(torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device))
    for part, keys in _sequences(edges, key_edges):
        whole = _as_one(q.data_[part]), _as_one(k.data_[keys]), _as_one(v.data_[keys])
        scale = 1.0 / math.sqrt(q.shape[-1])
        scores, _, values = _scores(*whole, how[-2], scale)
        out.data_[part] = _from_one(scores.softmax(-1) @ values).to(q.dtype)
        sums.data_[:, part] = scores.logsumexp(-1)[0]
    call = _packed_call(FLASH, q, k, edges, how[-2])
    launch(FLASH, [q, k, v, edges, key_edges], [out, sums], call)
    unused = torch.empty(0, device=q.device)
    return out, sums, unused, unused, unused


def _packed_backward(
    _: Any, grad: SimulatedTensor, q: SimulatedTensor, k: SimulatedTensor, v: SimulatedTensor,
    out: SimulatedTensor, sums: SimulatedTensor, edges: SimulatedTensor,
    key_edges: SimulatedTensor, longest: int, longest_keys: int, dropout: float, causal: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The result may be of more keys: `out` and `sums` are of all of them."""
    _check_packed(q, edges, longest)
    _check_packed(k, key_edges, longest_keys)
    grads = [simulated(torch.empty_like(t)) for t in (q, k, v)]
    for to in grads:
        to.data_.zero_()  # as the kernel does where keys have no queries
    for part, keys in _sequences(edges, key_edges):
        of_q, of_out, attended = (_as_one(t.data_[part]) for t in (q, grad, out))
        whole = of_q, _as_one(k.data_[keys]), _as_one(v.data_[keys])
        scale, logs = 1.0 / math.sqrt(q.shape[-1]), sums.data_[None, :, part]
        found = _gradients(of_out, *whole, logs, causal, scale, attended)
        for to, place, value in zip(grads, (part, keys, keys), found, strict=True):
            to.data_[place] = _from_one(value).to(to.dtype)
    call = _packed_call(FLASH_BACKWARD, q, k, edges, causal)
    launch(FLASH_BACKWARD, [grad, q, k, v, out, sums, edges, key_edges], grads, call)
    return tuple(grads)


def _check_packed(x: Tensor, edges: SimulatedTensor, longest: int) -> None:
    """Raises the errors of the CUDA kernels."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if x.shape[-1] % 8:
        raise RuntimeError("head_size should be a multiple of 8")
    if edges.dtype != torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype int32")
    known = edges.data_
    if not known.is_meta and (int(known[-1]) != len(x) or int(known.diff().max()) != longest):
        raise RuntimeError("the edges are not those of the tokens")


def _sequences(edges: SimulatedTensor, key_edges: SimulatedTensor) -> Iterator[tuple[slice, slice]]:
    if edges.data_.is_meta:
        return
    ends = (pairwise(e.data_.tolist()) for e in (edges, key_edges))
    for of_queries, of_keys in zip(*ends, strict=True):
        yield slice(*of_queries), slice(*of_keys)


def _packed_call(name: str, q: Tensor, k: Tensor, edges: Tensor, causal: bool) -> Call:
    """Describes the call for observers: queries and keys as sequences of equal length."""
    count = len(edges) - 1
    shapes = ((count, t.shape[1], len(t) // count, t.shape[2]) for t in (q, k))
    alike = [torch.empty(shape, dtype=q.dtype, device="meta") for shape in shapes]
    return name, alike, {"causal": causal}, None


def _as_one(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _from_one(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)
