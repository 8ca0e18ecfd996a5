"""Compiled graphs without kernels of their own: for tests of who compiles what, and when."""

from __future__ import annotations

from contextlib import AbstractContextManager


def no_kernels() -> AbstractContextManager[None]:
    """Inside, graphs are traced, lowered and found again as ever, but call PyTorch's operations
    where TorchInductor would write C++, of which each piece takes a compiler a second."""
    import torch._inductor.config as inductor

    return inductor.patch(fallback_by_default=True)
