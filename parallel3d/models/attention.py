"""Causal self-attention from the fused projection: heads split, rotated, attended, joined."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.config.attention import AUTO
from parallel3d.data.documents import Documents
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.device.products import is_widened
from parallel3d.models.attention_backends import allowed
from parallel3d.models.document_attention import attend_within
from parallel3d.models.dropout import Dropout
from parallel3d.models.dropped_attention import attend_dropping
from parallel3d.models.ops import Rotary, split_heads_rotary


def causal_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: Rotary | None,
    dropout: Dropout | None = None,
    samples: Tensor | None = None,
    documents: Documents | None = None,
    kernel: str = AUTO,
) -> Tensor:
    """softmax(q·kᵀ / sqrt(head_dim) + causal mask)·v per head (Vaswani et al. 2017 §3.2).

    Query head h reads key-value head h // (heads // kv_heads) (GQA, Ainslie et al. 2023).

    Args:
        qkv: (b, s, (heads + 2 · kv_heads) · head_dim): q, k and v side by side.
        rotary: cos and sin to rotate q and k with; None: they stay as they are.
        dropout: of the probabilities, where there are `samples`: not by PyTorch's kernel, but
            slower, some rows of scores at a time.
        documents: a token reads its own alone; None: a sample is one.
        kernel: see `attention_backends`. What drops probabilities takes none.

    Returns: (b, s, heads · head_dim).
    """
    if rotary is not None:
        q, k, v = split_heads_rotary(qkv, heads, kv_heads, head_dim, rotary)
    else:
        parts = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
        q, k, v = (t.transpose(1, 2) for t in parts)
    plain = dropout is None or samples is None
    if not (plain and kernel_shares_heads(q)):
        k, v = repeated(k, heads), repeated(v, heads)
    if _is_slow_below_fp32(q):
        q, k, v = q.float(), k.float(), v.float()
    if not plain:
        y = attend_dropping(q, k, v, dropout, samples, documents)
    elif documents is None:
        y = attend(q, k, v, is_causal=True, kernel=kernel)
    else:
        y = attend_within(q, k, v, documents, kernel)
    return y.to(qkv.dtype).transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, kernel: str = AUTO) -> Tensor:
    """PyTorch's kernel; k and v may have fewer heads where `kernel_shares_heads`."""
    shared = k.shape[1] != q.shape[1]
    with allowed(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=shared)


def kernel_shares_heads(q: Tensor) -> bool:
    """Whether the kernel for `q` reads one key-value head for several query heads.

    Those of flash attention and cuDNN do. What takes fp32 on a GPU does not, and would be left for
    the path that writes the scores out, s × s.
    """
    return is_on_accelerator(q) and q.dtype in (torch.bfloat16, torch.float16)


def repeated(x: Tensor, heads: int) -> Tensor:
    """(b, kv_heads, s, head_dim) with a copy for each of the `heads` query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _is_slow_below_fp32(q: Tensor) -> bool:
    """Whether PyTorch's CPU kernel is faster in fp32 than in q's own, narrower type: in fp16, whose
    products it makes one element at a time, always (`device.products`).

    Forward and backward of (2, 8, 256, 32) took 7.2 ms in bf16 and 4.9 ms in fp32 with both casts,
    (1, 8, 1024, 64) 24 and 43 ms (one core with AMX): short sequences of narrow heads spend their
    time packing.
    """
    short = q.shape[-1] < 64 and q.shape[-2] < 1024
    narrow = q.dtype == torch.bfloat16 and q.device.type == "cpu"
    return is_widened(q) or (narrow and short)
