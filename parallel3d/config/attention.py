"""The values of `attention_kernel`, without torch."""

from __future__ import annotations

AUTO, FLASH, CUDNN, MATH = "auto", "flash", "cudnn", "math"
# Flash attention by another package than torch: its name in torch's registry, the module that
# torch imports for it.
PACKAGES = {"fa3": ("FA3", "flash_attn_interface"), "fa4": ("FA4", "flash_attn.cute")}
KERNELS = (AUTO, FLASH, CUDNN, MATH, *PACKAGES)
HALF_PRECISION = ("bf16", "fp16")
# Kernels that GPUs have for half precision alone. (Flash attention on a CPU takes all types.)
NARROW = (FLASH, CUDNN, *PACKAGES)


def in_other_precision(kernel: str) -> str:
    """What computes in fp32 or fp64 beside a run with this kernel: `verify` and `generate` do."""
    return AUTO if kernel in NARROW else kernel
