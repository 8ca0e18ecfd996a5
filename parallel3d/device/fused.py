"""Operators that a compiler takes as they are, without looking into them."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from parallel3d.device import accelerator

_library = torch.library.Library("parallel3d", "FRAGMENT")


def define(name: str, signature: str, run: Callable, shape: Callable) -> None:
    """`torch.ops.parallel3d.NAME`.

    Args:
        signature: of arguments and results, as torch's schemas are written.
        run: computes it, on any device.
        shape: results like those of `run` in shape and type, from arguments without values.
    """
    _library.define(f"{name}{signature}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"parallel3d::{name}", shape, lib=_library)


def differentiate(name: str, backward: Callable, remember: Callable) -> None:
    """Gives a defined operator its gradient, as `torch.library.register_autograd` does."""
    torch.library.register_autograd(
        f"parallel3d::{name}", backward, setup_context=remember, lib=_library
    )


# Element-wise functions that run as one kernel where the device has a compiler for them.
#
# What stands between the GEMMs is bound by memory: eight operations in a row read and write the
# activations eight times, one kernel of the same arithmetic once. A function under `fused` is
# plain PyTorch, from tensors to tensors. On a CPU it runs as it stands. On an accelerator with
# Triton it is compiled once for each shape (seconds, then found in TorchInductor's cache). A
# device whose module offers `fused_kernel`, as the pretended one does, says itself what one kernel
# is.
#
# Values may differ from the plain run by rounding alone: intermediates stay in fp32 registers.


log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# Elements of the largest argument below which a kernel of its own saves microseconds, and compiling
# it costs seconds: a token at a time in `generate`, say.
LEAST_ELEMENTS = 1 << 20
# Kinds of arguments that a function is compiled for, seconds each. More come of `generate`, with
# prompts of all lengths: what comes later runs as separate operations.
MOST_KERNELS = 64


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
        self.kernels: dict[Hashable, Callable[P, T]] = {}
        self.compiles = True

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
        if not self.compiles or max(t.numel() for t in tensors) < least:
            return self.function(*args)
        return self._run_compiled(*args)

    def _run_compiled(self, *args: Any) -> T:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        # Without gradients of their own, or training and evaluation would be two kernels.
        plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
        kernel = self._kernel(tuple(map(_kind, plain)))
        try:
            with torch.no_grad():
                return kernel(*plain)
        except (FailOnRecompileLimitHit, TorchDynamoException) as error:
            # Raised before anything ran. The plain function is slower and as right.
            self._warn(_first_line(error))
            self.compiles = False
            return self.function(*args)

    def _kernel(self, kind: Hashable) -> Callable[P, T]:
        """Returns what is compiled for arguments of this kind, beyond the limit the plain function.

        Dynamo finds compiled code through a function's code object and refuses a ninth shape of
        one (`recompile_limit`), so each kind gets a code object of its own.
        """
        kernel = self.kernels.get(kind)
        if kernel is None and len(self.kernels) < MOST_KERNELS:
            kernel = self.kernels[kind] = torch.compile(
                _with_own_code(self.function),
                fullgraph=True,
                dynamic=False,
                options=equal_on_all_ranks(),
            )
            if len(self.kernels) == MOST_KERNELS:
                self._warn(f"for all but the {MOST_KERNELS} shapes that are compiled")
        return kernel or self.function

    def _warn(self, why: str) -> None:
        log.warning("%s runs as separate operations: %s", self.function.__name__, why)


def _kind(argument: Any) -> Hashable:
    """Returns what of an argument a kernel is compiled for."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    return argument


def _with_own_code(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the same function with a copy of its code."""
    code, more = function.__code__.replace(), (function.__defaults__, function.__closure__)
    return FunctionType(code, function.__globals__, function.__name__, *more)


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
