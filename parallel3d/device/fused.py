"""Custom operators for the compiler, and element-wise functions fused into one kernel."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Generic, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from parallel3d.device import accelerator
from parallel3d.errors import first_line

_library = torch.library.Library("parallel3d", "FRAGMENT")


def define(name: str, signature: str, run: Callable, shape: Callable) -> None:
    """Defines `torch.ops.parallel3d.NAME` by its schema, implementation and fake implementation."""
    _library.define(f"{name}{signature}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"parallel3d::{name}", shape, lib=_library)


def differentiate(name: str, backward: Callable, remember: Callable) -> None:
    """Gives a defined operator its gradient, as `torch.library.register_autograd` does."""
    torch.library.register_autograd(
        f"parallel3d::{name}", backward, setup_context=remember, lib=_library
    )


# Fused element-wise functions

log = logging.getLogger(__name__)
Ts = TypeVarTuple("Ts")
T = TypeVar("T")

# Largest argument below which a kernel of its own saves microseconds but costs seconds to compile:
# one token at a time in `generate`, say.
LEAST_ELEMENTS = 1 << 20
# Kinds of arguments that a function is compiled for, seconds each; further ones (`generate` with
# prompts of all lengths) run as separate operations.
MOST_KERNELS = 64


def fuses(device: torch.device) -> bool:
    """Returns whether large calls of `fused` functions on `device` are one kernel each."""
    if not accelerator.is_accelerator(device):
        return False
    return hasattr(accelerator.module(device), "fused_kernel") or has_kernel_compiler()


@functools.cache
def has_kernel_compiler() -> bool:
    """Returns whether TorchInductor can compile kernels here: with Triton and a C compiler."""
    from torch.utils._triton import has_triton

    compilers = (os.environ.get("CC"), "gcc", "clang")
    return has_triton() and any(shutil.which(name) for name in compilers if name)


def deterministic_inductor() -> dict[str, str | int | bool | Callable[..., Any]]:
    """Returns TorchInductor's options with which all ranks compile kernels of equal bits.

    Otherwise each rank autotunes the split of its reductions, and replicated results of tensor
    ranks, such as gradients of norms, would differ in their last bits. Empty before PyTorch had
    the option.
    """
    import torch._inductor.config as inductor  # a second of start-up, so not without need

    return {"deterministic": True} if hasattr(inductor, "deterministic") else {}


class _Fused(Generic[*Ts, T]):
    def __init__(self, function: Callable[[*Ts], T], least: int | None) -> None:
        functools.update_wrapper(self, function)
        self.least = least
        self.function = function
        self.kernels: dict[Hashable, Callable[..., T]] = {}
        self.compiles = True

    def __call__(self, *args: *Ts) -> T:
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

    def _run_compiled(self, *args: *Ts) -> T:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        # Detached, or training and evaluation would be two kernels.
        plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
        kernel = self._kernel(tuple(map(_kind, plain)))
        try:
            with torch.no_grad():
                return kernel(*plain)
        except (FailOnRecompileLimitHit, TorchDynamoException) as error:
            # Raised before anything ran. The plain function is slower and gives the same.
            self._warn(first_line(error))
            self.compiles = False
            return self.function(*args)

    def _kernel(self, kind: Hashable) -> Callable[..., T]:
        """Returns the kernel for arguments of this kind; beyond the limit the plain function.

        Dynamo finds compiled code through a function's code object and refuses a ninth shape of
        one (`recompile_limit`), so each kind gets a code object of its own.
        """
        kernel = self.kernels.get(kind)
        if kernel is None and len(self.kernels) < MOST_KERNELS:
            kernel = self.kernels[kind] = torch.compile(
                _with_own_code(self.function),
                fullgraph=True,
                dynamic=False,
                options=deterministic_inductor(),
            )
            if len(self.kernels) == MOST_KERNELS:
                self._warn(f"for all but the {MOST_KERNELS} shapes that are compiled")
        return kernel or self.function

    def _warn(self, why: str) -> None:
        log.warning("%s runs as separate operations: %s", self.function.__name__, why)


def _kind(argument: Any) -> Hashable:
    """Returns the properties of an argument for which a kernel is specialised."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    return argument


def _with_own_code(function: Callable[[*Ts], T]) -> Callable[..., T]:
    code, more = function.__code__.replace(), (function.__defaults__, function.__closure__)
    return FunctionType(code, function.__globals__, function.__name__, *more)


def fused(function: Callable[[*Ts], T], *, least: int | None = None) -> Callable[[*Ts], T]:
    """Decorates an element-wise function of tensors and constants that may run as one kernel.

    Operations between GEMMs are bound by memory: eight in a row read and write the activations
    eight times, one kernel once. On a CPU the function runs as it is; on an accelerator with Triton
    it is compiled once for each kind of arguments (seconds, cached by TorchInductor). The simulated
    device's `fused_kernel` counts it as one kernel. Values may differ from the plain run by
    rounding: intermediates stay in fp32 registers.

    For use inside autograd nodes with written-out gradients: compiled results have no graph. It may
    write into its arguments. Positional arguments only.

    Args:
        least: elements of its largest argument from which it is compiled; None: LEAST_ELEMENTS.
    """
    return _Fused(function, least)
