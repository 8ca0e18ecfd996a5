"""Multiplies matrices with the fastest backend of the CPU.

On a CPU without half-precision units, PyTorch multiplies fp16 matrices at 0.2 to 4 GFLOP/s per core
and fp32 matrices at 80 GFLOP/s (1024³, EPYC with AVX-512). So fp16 operands are converted to fp32,
which is exact, and the result is rounded once. Tensor cores also accumulate in fp32.

PyTorch uses MKL for fp32 matmuls, which has AVX-512 kernels for Intel's processors but only AVX2
kernels for AMD's. oneDNN, which is part of PyTorch, has AVX-512 kernels for both.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN is faster for at least this many multiply-adds. Its calls have about 15 µs more overhead
# than MKL's, which is little in a matmul of this size (350 µs).
ONEDNN_MIN_SIZE = 1 << 24


def is_widened(x: Tensor) -> bool:
    """Returns whether matmuls of `x` are computed in fp32 and rounded to fp16."""
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
    """Returns whether oneDNN is faster for large fp32 matmuls, as on AMD CPUs with AVX-512."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not cpuinfo.is_file():
        return False
    return torch.backends.mkldnn.is_available() and "AuthenticAMD" in cpuinfo.read_text()


def _takes_onednn(x: Tensor, other: Tensor, outputs: int) -> bool:
    """Returns whether `by_onednn` can compute a product with `outputs` columns, and is faster."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
        return False
    if torch.is_grad_enabled() and (x.requires_grad or other.requires_grad):
        return False
    return x.numel() * outputs >= ONEDNN_MIN_SIZE and onednn_is_faster()


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `linear` for fp32 CPU tensors without gradients; `weight` may be a view."""
    # The import is here because a build of PyTorch without oneDNN has no such operator.
    from parallel3d.private_names import linear_pointwise

    return linear_pointwise(x, weight, bias, "none", [], "")
