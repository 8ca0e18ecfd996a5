"""Multiplies matrices in fp32 where a CPU has no units for fp16.

On such a CPU, PyTorch multiplies fp16 matrices at 0.2 to 4 GFLOP/s per core and fp32 matrices at 80
GFLOP/s (1024³, EPYC with AVX-512). So fp16 operands are converted to fp32, which is exact, and the
result is rounded once. Tensor cores also accumulate in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def is_widened(x: Tensor) -> bool:
    """Returns whether matmuls of `x` are computed in fp32 and rounded to fp16."""
    return x.dtype == torch.float16 and x.device.type == "cpu"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x·Wᵀ + b: (…, in), (out, in), (out,) → (…, out)."""
    if is_widened(x):
        bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), bias).to(x.dtype)
    return F.linear(x, weight, bias)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Computes a·b: (…, m, k), (k, n) → (…, m, n)."""
    return (a.float() @ b.float()).to(a.dtype) if is_widened(a) else a @ b
