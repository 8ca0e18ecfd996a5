"""Matrix products in the type of their factors; a CPU makes those of fp16 by way of fp32.

PyTorch multiplies fp16 matrices on a CPU without half-precision units at 0.2 to 4 GFLOP/s a core,
and fp32 ones at 80 (1024³, EPYC with AVX-512). So the factors are widened, which loses nothing, and
the product is rounded once: what a GPU's matrix units do, which add in fp32 too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def is_widened(x: Tensor) -> bool:
    """Whether products of `x` are made in fp32 and rounded."""
    return x.dtype == torch.float16 and x.device.type == "cpu"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b: (…, in), (out, in), (out,) → (…, out)."""
    if not is_widened(x):
        return F.linear(x, weight, bias)
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide).to(x.dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a·b: (…, m, k), (k, n) → (…, m, n)."""
    return (a.float() @ b.float()).to(a.dtype) if is_widened(a) else a @ b
