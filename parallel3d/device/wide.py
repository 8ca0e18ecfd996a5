"""Multiplies half-precision matrices into fp32 results.

The product of two half-precision numbers is exact in fp32, and a GPU's GEMMs also sum in fp32, so
that no result is rounded to half precision. On other devices the operands are first copied to fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel3d.device import accelerator
from parallel3d.device.matmul import linear

HALF = (torch.bfloat16, torch.float16)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Computes x·Wᵀ in fp32, or in fp64 for fp64 inputs: (…, in), (out, in) → (…, out)."""
    if x.dtype in HALF and has_wide_kernel(x.device):
        out = torch.ops.parallel3d.wide_linear(x.flatten(0, -2), weight)
        return out.unflatten(0, x.shape[:-1])
    return _widened(x, weight)


def has_wide_kernel(device: torch.device) -> bool:
    """Returns whether the product is one kernel, as on NVIDIA GPUs and the simulated device."""
    if not accelerator.is_accelerator(device):
        return False
    if device.type != "cuda" or torch.version.hip is not None:
        return hasattr(accelerator.module(device), "fused_kernel")
    return True


def _widened(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return linear(x.to(wide), weight.to(wide))


def _on_gpu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _without_values(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def _register() -> torch.library.Library:
    library = torch.library.Library("parallel3d", "FRAGMENT")
    library.define("wide_linear(Tensor x, Tensor weight) -> Tensor")
    forms: dict[str, Any] = {"CPU": _widened, "CUDA": _on_gpu, "Meta": _without_values}
    for key, form in forms.items():
        library.impl("wide_linear", form, key)
    return library


_library = _register()  # keeps the operator registered
