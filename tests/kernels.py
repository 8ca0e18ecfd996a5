"""Compiles graphs without generating kernels, for tests of the ranks and the times of
compilations."""

from __future__ import annotations

from contextlib import AbstractContextManager


def no_kernels() -> AbstractContextManager[None]:
    """Traces, lowers and caches graphs as usual, but makes them call PyTorch's operations where
    TorchInductor would write C++, which takes a compiler a second per piece."""
    import torch._inductor.config as inductor

    return inductor.patch(fallback_by_default=True)
