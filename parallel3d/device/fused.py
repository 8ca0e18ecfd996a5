"""Defines custom operators for the compiler, and fuses element-wise functions into one kernel."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Generic, TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from parallel3d.device import accelerator
from parallel3d.errors import first_line

_library = torch.library.Library("parallel3d", "DEF")


_registered: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()


def register(thing: Any) -> Tensor:
    """Returns a handle, an int64 scalar on the CPU, by which an operator finds `thing`.

    The handle is valid while `thing` exists. It is a tensor because a plain number would become a
    constant of the compiled code, which would then be compiled again for every layer.
    """
    number = next(_numbers)
    _registered[number] = thing
    return torch.tensor(number)


def registered(handle: Tensor) -> Any:
    return _registered[int(handle)]


def _as_tuple(found: Any) -> tuple:
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _repeatable(function: Callable) -> Callable:
    """Returns a pure function whose equal calls the simulated device may run only once."""

    @functools.wraps(function)
    def call(first: Tensor, *others: Any) -> Any:
        device = first.device
        if accelerator.is_accelerator(device):
            again = getattr(accelerator.module(device), "run_again", None)
            if again is not None:
                return again(function, (first, *others))
        return function(first, *others)

    return call


def operator(
    name: str,
    inputs: str,
    where: str,
    run: Callable,
    shape: Callable,
    gradient: Callable,
    gradient_shape: Callable,
    kept: str | None = None,
    is_pure: bool = False,
) -> Callable[..., Tensor]:
    """Returns a function that has an explicit gradient and is opaque to the compiler.

    In eager mode the function is an autograd node; in compiled code it is the operator
    `torch.ops.parallel3d.NAME`, whose gradient is the operator `NAME_backward`.

    Args:
        inputs: the schema of the arguments that get a gradient.
        where: the schema of the arguments without a gradient, with tensors before all others.
        run: returns the result for all arguments, or a tuple of the result and other tensors that
            the gradient needs.
        gradient: returns the gradients of the inputs, given the gradient of the result, the saved
            tensors, and the other arguments.
        shape, gradient_shape: do what `run` and `gradient` do, for tensors without values.
        kept: None: no tensor is saved for the gradient; "": the inputs are saved; otherwise the
            schema of the results of `run`, which are saved with the inputs.
        is_pure: whether `run` and `gradient`, unless they send something, change nothing but memory
            of their own, and decide by the shapes of their arguments what they launch. The
            simulated device without values then runs equal calls only once.
    """
    count, tensors = inputs.count("Tensor"), where.count("Tensor")
    parts = ["Tensor grad"] if kept is None else ["Tensor grad", inputs, *([kept] if kept else [])]
    results = ", ".join(["Tensor"] * (kept or "Tensor").count("Tensor"))
    gradients = ", ".join(["Tensor"] * count)
    of_forward = name, f"({inputs}, {where}) -> ({results})", run, shape
    saved_schema = ", ".join([*parts, where])
    of_gradient = f"{name}_backward", f"({saved_schema}) -> ({gradients})", gradient, gradient_shape
    for operator_name, schema, implementation, fake in (of_forward, of_gradient):
        _library.define(f"{operator_name}{schema}")
        _library.impl(operator_name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"parallel3d::{operator_name}", fake, lib=_library)
    if is_pure:
        run, gradient = _repeatable(run), _repeatable(gradient)
    compiled = getattr(torch.ops.parallel3d, name)
    compiled_gradient = getattr(torch.ops.parallel3d, f"{name}_backward")

    def saved(given: tuple, outputs: tuple) -> tuple:
        if kept is None:
            return ()
        return (*given[:count], *outputs) if kept else given[:count]

    def remember(ctx: Any, inputs: tuple, output: Any) -> None:
        where = inputs[count:]
        ctx.save_for_backward(*saved(inputs, _as_tuple(output)), *where[:tensors])
        ctx.constants = where[tensors:]
        ctx.others = len(where)

    def differentiate(ctx: Any, grad: Tensor, *_: Tensor) -> tuple:
        found = compiled_gradient(grad, *ctx.saved_tensors, *ctx.constants)
        return *_as_tuple(found), *(None,) * ctx.others

    torch.library.register_autograd(
        f"parallel3d::{name}", differentiate, setup_context=remember, lib=_library
    )

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Tensor:
            outputs = _as_tuple(run(*given))
            # If these were saved tensors, a recomputed forward would have to run up to this node.
            ctx.where = given[count:]
            ctx.save_for_backward(*saved(given, outputs))
            return outputs[0]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple:
            found = _as_tuple(gradient(grad, *ctx.saved_tensors, *ctx.where))
            return *found, *(None,) * len(ctx.where)

    def call(*given: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            return Eager.apply(*given)
        found = compiled(*given)
        return found[0] if kept else found

    return call


# Fused element-wise functions

log = logging.getLogger(__name__)
Ts = TypeVarTuple("Ts")
T = TypeVar("T")

# With these options, TorchInductor's kernels give equal bits on all ranks. Otherwise each rank
# would autotune how it splits reductions, and results that should be equal on tensor-parallel
# ranks, such as gradients of norms, would differ in their last bits.
EQUAL_BITS: dict[str, str | int | bool | Callable[..., Any]] = {"deterministic": True}
# If the largest argument is smaller than this, a kernel would save microseconds but take seconds to
# compile, as for the single tokens of `generate`.
LEAST_ELEMENTS = 1 << 20
# A function is compiled for at most this many kinds of arguments, because each compilation takes
# seconds. Other kinds, such as further prompt lengths in `generate`, run as separate operations.
MOST_KERNELS = 64


def fuses(device: torch.device) -> bool:
    """Returns whether a `fused` function runs as one kernel on large tensors on `device`."""
    if not accelerator.is_accelerator(device):
        return False
    return hasattr(accelerator.module(device), "fused_kernel") or has_kernel_compiler()


@functools.cache
def has_kernel_compiler() -> bool:
    """Returns whether TorchInductor finds Triton and a C compiler, which it needs for kernels."""
    from parallel3d.private_names import has_triton

    compilers = (os.environ.get("CC"), "gcc", "clang")
    return has_triton() and any(shutil.which(name) for name in compilers if name)


class _Fused(Generic[*Ts, T]):
    def __init__(self, function: Callable[[*Ts], T], least: int | None, rows: bool) -> None:
        functools.update_wrapper(self, function)
        self.least = least
        self.rows = rows
        self.function = function
        self.kernels: dict[Hashable, Callable[..., T]] = {}
        self.compiles = True

    def __call__(self, *args: *Ts) -> T:
        tensors = [a for a in args if isinstance(a, Tensor)]
        device = tensors[0].device
        if not fuses(device):
            return self.function(*args)
        if hasattr(accelerator.module(device), "fused_kernel"):
            return accelerator.module(device).run_again(self._as_one_kernel, args)
        least = LEAST_ELEMENTS if self.least is None else self.least
        if not self.compiles or max(t.numel() for t in tensors) < least:
            return self.function(*args)
        return self._run_compiled(*args)

    def _as_one_kernel(self, *args: *Ts) -> T:
        """Runs the function on the simulated device."""
        device = next(a.device for a in args if isinstance(a, Tensor))
        with accelerator.module(device).fused_kernel(self.function.__name__):
            return self.function(*args)

    def _run_compiled(self, *args: *Ts) -> T:
        from parallel3d.private_names import DynamoError, RecompileLimit

        # Tensors are detached, because training and evaluation would otherwise need two kernels.
        plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
        kernel = self._kernel(tuple(_kind(a, self.rows) for a in plain))
        try:
            with torch.no_grad():
                return kernel(*plain)
        except (RecompileLimit, DynamoError) as error:
            # The error is raised before anything runs, and the plain function is only slower.
            self._warn(first_line(error))
            self.compiles = False
            return self.function(*args)

    def _kernel(self, kind: Hashable) -> Callable[..., T]:
        """Returns the kernel for arguments of this kind, or the plain function beyond MOST_KERNELS.

        Dynamo stores compiled code by a function's code object, and refuses a ninth version of the
        same one (`recompile_limit`), so each kind of arguments gets a code object of its own.
        """
        kernel = self.kernels.get(kind)
        if kernel is None and len(self.kernels) < MOST_KERNELS:
            kernel = self.kernels[kind] = torch.compile(
                _with_own_code(self.function),
                fullgraph=True,
                # With None, a second number of rows makes Dynamo compile for any number of rows.
                dynamic=None if self.rows else False,
                options=EQUAL_BITS,
            )
            if len(self.kernels) == MOST_KERNELS:
                self._warn(f"for all but the {MOST_KERNELS} shapes that are compiled")
        return kernel or self.function

    def _warn(self, why: str) -> None:
        log.warning("%s runs as separate operations: %s", self.function.__name__, why)


def _kind(argument: Any, rows: bool) -> Hashable:
    """Returns the properties of an argument that select a kernel; `rows`: as in `fused`."""
    if isinstance(argument, Tensor):
        shape = argument.shape[1:] if rows else argument.shape
        return shape, argument.stride(), argument.dtype, argument.device
    return argument


def _with_own_code(function: Callable[[*Ts], T]) -> Callable[..., T]:
    code, more = function.__code__.replace(), (function.__defaults__, function.__closure__)
    return FunctionType(code, function.__globals__, function.__name__, *more)


def fused(
    function: Callable[[*Ts], T], *, least: int | None = None, rows: bool = False
) -> Callable[[*Ts], T]:
    """Decorates an element-wise function of tensors and constants that may run as one kernel.

    Element-wise operations are bound by memory: eight in sequence read and write the activations
    eight times, one kernel once. On a CPU the function runs unchanged. On an accelerator with
    Triton, it is compiled once for each kind of arguments, which takes seconds unless the code is
    in TorchInductor's cache. The simulated device counts it as one kernel. A kernel's results may
    differ by rounding, as intermediate values stay in fp32 registers.

    Only autograd nodes with explicit gradients may call it, as a kernel's results have no graph.
    The function may write into its arguments, which must be positional.

    Args:
        least: the function is compiled if its largest argument has at least this many elements;
            None: LEAST_ELEMENTS.
        rows: whether the first dimension varies from call to call, like the number of an expert's
            rows; code for all sizes is then compiled.
    """
    return _Fused(function, least, rows)
