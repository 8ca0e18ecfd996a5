"""Element-wise functions that run as one kernel where the device has a compiler for them.

What stands between the GEMMs is bound by memory: eight operations in a row read and write the
activations eight times, one kernel of the same arithmetic once. A function under `fused` is plain
PyTorch, from tensors to tensors. On a CPU it runs as it stands. On an accelerator with Triton it is
compiled once for each shape (seconds, then found in TorchInductor's cache). A device whose module
offers `fused_kernel`, as the pretended one does, says itself what one kernel is.

Values may differ from the plain run by rounding alone: intermediates stay in fp32 registers.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from parallel3d.device import accelerator

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# Elements of the largest argument below which a kernel of its own saves microseconds, and compiling
# it costs seconds: a token at a time in `generate`, say.
LEAST_ELEMENTS = 1 << 20


def fuses(device: torch.device) -> bool:
    """Whether large calls of `fused` functions on `device` are one kernel each."""
    if not accelerator.is_accelerator(device):
        return False
    return hasattr(accelerator.module(device), "fused_kernel") or has_kernel_compiler()


@functools.cache
def has_kernel_compiler() -> bool:
    """Whether TorchInductor can make an accelerator's kernels here.

    It needs Triton for them and, as Triton does, a C compiler for the code that launches them.
    """
    from torch.utils._triton import has_triton

    compilers = (os.environ.get("CC"), "gcc", "clang")
    return has_triton() and any(shutil.which(name) for name in compilers if name)


def equal_on_all_ranks() -> dict[str, bool]:
    """TorchInductor's settings with which ranks compile kernels of equal bits, each for itself.

    Otherwise each measures in how many parts it is fastest to add, and what several tensor ranks
    compute alike, the gradients of norms, would differ in its last bits. Without effect before
    PyTorch had the setting.
    """
    import torch._inductor.config as inductor  # a second of start-up, so not without need

    return {"deterministic": True} if hasattr(inductor, "deterministic") else {}


class _Fused(Generic[P, T]):
    def __init__(self, function: Callable[P, T], least: int | None) -> None:
        functools.update_wrapper(self, function)
        self.least = least
        self.function = function
        self.compiled: Callable[P, T] | None = None

    def __call__(self, *args: P.args) -> T:
        tensors = [a for a in args if isinstance(a, Tensor)]
        device = tensors[0].device
        if not fuses(device):
            return self.function(*args)
        kernel = getattr(accelerator.module(device), "fused_kernel", None)
        if kernel is not None:
            with kernel(self.function.__name__):
                return self.function(*args)
        least = LEAST_ELEMENTS if self.least is None else self.least
        if max(t.numel() for t in tensors) < least:
            return self.function(*args)
        return self._run_compiled(*args)

    def _run_compiled(self, *args: Any) -> T:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        if self.compiled is None:
            self.compiled = torch.compile(
                self.function, fullgraph=True, dynamic=False, options=equal_on_all_ranks()
            )
        # Without gradients of their own, or training and evaluation would be two kernels.
        plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
        try:
            with torch.no_grad():
                return self.compiled(*plain)
        except (FailOnRecompileLimitHit, TorchDynamoException) as error:
            # Raised before anything ran. The plain function is slower and as right.
            log.warning(
                "%s runs as separate operations: %s", self.function.__name__, _first_line(error)
            )
            self.compiled = self.function
            return self.function(*args)


def fused(function: Callable[P, T], *, least: int | None = None) -> Callable[P, T]:
    """Decorates a function of tensors and constants that may run as one kernel.

    It is called inside of autograd nodes, which have its gradient written out: what it returns has
    no graph where it was compiled. It may write into its arguments. Positional arguments only.

    Args:
        least: elements of its largest argument from which on it is compiled; None: LEAST_ELEMENTS.
    """
    return _Fused(function, least)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
