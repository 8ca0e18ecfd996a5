"""Matmuls by the fastest CPU backend.

PyTorch multiplies fp16 matrices on a CPU without half-precision units at 0.2 to 4 GFLOP/s per core,
fp32 ones at 80 (1024³, EPYC with AVX-512). So fp16 operands are converted to fp32, which is exact,
and the result is rounded once, like on tensor cores, which accumulate in fp32 too.

PyTorch gives fp32 matmuls to MKL, which has AVX-512 kernels for Intel's processors and AVX2 ones
for AMD's. oneDNN, which is part of PyTorch, has AVX-512 kernels for both.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN is faster from this number of multiply-adds on: a call costs some 15 µs more than MKL's,
# and a matmul of this size takes 350 µs.
ONEDNN_MIN_SIZE = 1 << 24


def is_widened(x: Tensor) -> bool:
    """Returns whether matmuls of `x` are computed in fp32 and rounded."""
    return x.dtype == torch.float16 and x.device.type == "cpu"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x·Wᵀ + b: (…, in), (out, in), (out,) → (…, out)."""
    if is_widened(x):
        bias = None if bias is None else bias.float()
        return linear(x.float(), weight.float(), bias).to(x.dtype)
    if _takes_onednn(x, weight, weight.shape[0]):
        return by_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Computes a·b: (…, m, k), (k, n) → (…, m, n)."""
    if is_widened(a):
        return matmul(a.float(), b.float()).to(a.dtype)
    return by_onednn(a, b.t(), None) if _takes_onednn(a, b, b.shape[1]) else a @ b


@functools.cache
def onednn_is_faster(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether oneDNN is faster in large fp32 matmuls: on AMD with AVX-512 (since Zen 4)."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not cpuinfo.is_file():
        return False
    return torch.backends.mkldnn.is_available() and "AuthenticAMD" in cpuinfo.read_text()


def _takes_onednn(x: Tensor, other: Tensor, outputs: int) -> bool:
    """Returns whether oneDNN is usable (no gradient, contiguous) and faster for `x` · `other`."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
        return False
    if torch.is_grad_enabled() and (x.requires_grad or other.requires_grad):
        return False
    return x.numel() * outputs >= ONEDNN_MIN_SIZE and onednn_is_faster()


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `linear` for fp32 CPU tensors without gradient; `weight` may be a transposed
    view."""
    # A build without oneDNN has no such operator.
    from parallel3d.private_names import linear_pointwise

    return linear_pointwise(x, weight, bias, "none", [], "")
