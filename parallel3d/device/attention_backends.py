"""Restricts the backends of PyTorch's attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel3d.config.values import CUDNN, FLASH, MATH

NOT_CUDNN = "not cudnn"  # replaces `attention_kernel=auto` where cuDNN's results are wrong
BACKENDS = {
    FLASH: [SDPBackend.FLASH_ATTENTION],
    CUDNN: [SDPBackend.CUDNN_ATTENTION],
    MATH: [SDPBackend.MATH],
    NOT_CUDNN: [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


def allowed(kernel: str) -> AbstractContextManager[object]:
    """Lets `scaled_dot_product_attention` use this kernel alone, or raise RuntimeError."""
    backends = BACKENDS.get(kernel)
    return nullcontext() if backends is None else sdpa_kernel(backends)
