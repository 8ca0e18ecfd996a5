"""Matrix products in the type of their factors, by whoever makes them fastest on a CPU.

PyTorch multiplies fp16 matrices on a CPU without half-precision units at 0.2 to 4 GFLOP/s a core,
and fp32 ones at 80 (1024³, EPYC with AVX-512). So the factors are widened, which loses nothing, and
the product is rounded once: what a GPU's matrix units do, which add in fp32 too.

PyTorch gives fp32 products to MKL, which has AVX-512 kernels for Intel's processors and AVX2 ones
for AMD's. oneDNN, which PyTorch brings along as well, has AVX-512 kernels for both.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# Multiply-adds from which on oneDNN is faster: its calls cost some 15 µs more than MKL's, and a
# product of this size takes 350.
ENOUGH = 1 << 24


def is_widened(x: Tensor) -> bool:
    """Whether products of `x` are made in fp32 and rounded."""
    return x.dtype == torch.float16 and x.device.type == "cpu"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b: (…, in), (out, in), (out,) → (…, out)."""
    if is_widened(x):
        wide = None if bias is None else bias.float()
        return linear(x.float(), weight.float(), wide).to(x.dtype)
    if _takes_onednn(x, weight, weight.shape[0]):
        return by_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a·b: (…, m, k), (k, n) → (…, m, n)."""
    if is_widened(a):
        return matmul(a.float(), b.float()).to(a.dtype)
    return by_onednn(a, b.t(), None) if _takes_onednn(a, b, b.shape[1]) else a @ b


@functools.cache
def onednn_is_faster(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether large fp32 products of this processor are oneDNN's: AMD's with AVX-512 (Zen 4 on)."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not cpuinfo.is_file():
        return False
    return torch.backends.mkldnn.is_available() and "AuthenticAMD" in cpuinfo.read_text()


def _takes_onednn(x: Tensor, other: Tensor, outputs: int) -> bool:
    """Whether oneDNN makes the product of `x` (…, in) and `other`, with so many columns: its
    operator has no gradient, and would copy an `x` with gaps."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
        return False
    if torch.is_grad_enabled() and (x.requires_grad or other.requires_grad):
        return False
    return x.numel() * outputs >= ENOUGH and onednn_is_faster()


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` of fp32 tensors on a CPU, without a gradient; `weight` may be a transposed view."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
