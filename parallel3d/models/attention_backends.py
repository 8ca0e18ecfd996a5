"""Which backends PyTorch's attention may take inside of a block of code."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel3d.config.sections import CUDNN, FLASH, MATH

NOT_CUDNN = "not cudnn"  # what `attention_kernel=auto` becomes where cuDNN's results are wrong
BACKENDS = {
    FLASH: [SDPBackend.FLASH_ATTENTION],
    CUDNN: [SDPBackend.CUDNN_ATTENTION],
    MATH: [SDPBackend.MATH],
    NOT_CUDNN: [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


def allowed(kernel: str) -> AbstractContextManager[object]:
    """Inside, `scaled_dot_product_attention` takes this kernel, or raises RuntimeError.

    What is neither named above is PyTorch's own choice. The backward runs the kernel of its
    forward, wherever it is called from.
    """
    backends = BACKENDS.get(kernel)
    return nullcontext() if backends is None else sdpa_kernel(backends)
