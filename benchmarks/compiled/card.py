"""Lets TorchInductor write Triton code for a missing GPU, on a CPU build of PyTorch.

Tensors are fake ones on `cuda`: they have shapes and a device but no values. The rest of the GPU is
replaced, too: the device guard that in-place operations and autograd ask for (by one in C++ without
effect), the properties of the card, Triton's target, and the few functions that generated code
calls around its kernels. The compiler itself is PyTorch's and Triton's own: kernels, candidate
configurations and compiler options are those of a run on that card.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

# Autograd would take CUDA for PyTorch's accelerator, which a CPU build cannot have, and ask it for
# streams and events. `isAccelerator` is answered here instead: libraries that are loaded later find
# the first definition among the global ones.
GUARD = """
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace at::accelerator {
bool isAccelerator(c10::DeviceType) { return false; }
}
"""


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that the compiler reads."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def number(self) -> int:
        """Returns the number in the name of the architecture: 90 for sm_90."""
        return 10 * self.capability[0] + self.capability[1]

    def properties(self) -> SimpleNamespace:
        """Returns the entries of `torch.cuda.get_device_properties` that the compiler reads."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name,
            major=major,
            minor=minor,
            multi_processor_count=self.multiprocessors,
            regs_per_multiprocessor=1 << 16,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            warp_size=32,
            shared_memory_per_block_optin=227 << 10,
            shared_memory_per_multiprocessor=228 << 10,
            total_memory=80 << 30,
            L2_cache_size=50 << 20,
        )


CARDS = {card.name: card for card in (Card("H100", (9, 0), 132), Card("B200", (10, 0), 148))}


def load_guard() -> None:
    """Compiles and loads the device guard, before torch is imported.

    Raises RuntimeError if there is no C++ compiler, or it refuses.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    torch = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD)
        command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC"]
        command += [f"-I{torch / 'include'}", str(source), "-o", str(library)]
        command += [f"-L{torch / 'lib'}", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
        try:
            found = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(f"{command[0]} cannot be run: {error.strerror}") from None
        if found.returncode:
            raise RuntimeError(
                f"{command[0]} could not compile the device guard: {found.stderr[-2000:]}"
            )
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@contextmanager
def playing(card: Card, run: Callable[..., Any]) -> Iterator[None]:
    """Compiles code inside the block for `card`; tensors of `cuda` must be fake ones.

    Args:
        run: called in place of every kernel, with the kernel and its launch arguments; nothing has
            been compiled to machine code by then.
    """
    import torch
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    properties, target = card.properties(), GPUTarget("cuda", card.number, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
        )
    )
    interface: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_properties": lambda device=None: properties,
        "get_compute_capability": lambda device=None: card.number,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "synchronize": lambda device=None: None,
    }
    worker = {k: interface[k] for k in ("get_device_properties", "current_device")}
    module = {
        "get_device_properties": interface["get_device_properties"],
        "get_device_capability": lambda device=None: card.capability,
        "get_device_name": lambda device=None: card.name,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "_DeviceGuard": lambda index: ExitStack(),
    }
    guards = torch._C._dynamo.guards

    def empty_strided(size: tuple, stride: tuple, kind: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=kind, device="cuda")

    def reinterpreted(x: torch.Tensor, size: tuple, stride: tuple, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(x, size, stride, x.storage_offset() + offset)

    deduced = UniformValueConstantFolder._deduce_value

    def deduced_on_cpu(self: Any, node: Any) -> Any:
        """Folds constants by creating them, with one element each."""
        kwargs = node.kwargs
        if "device" in kwargs:
            node.kwargs = kwargs | {"device": torch.device("cpu")}
        try:
            return deduced(self, node)
        finally:
            node.kwargs = kwargs

    def flash_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """Returns the kernel that a GPU would choose, which a CPU build cannot tell."""
        if mask is not None:
            raise NotImplementedError("flash attention takes no mask")
        aten = torch.ops.aten
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout, is_causal)[0]

    library = torch.library.Library("aten", "IMPL")
    for key in ("CUDA", "AutogradCUDA"):
        library.impl("scaled_dot_product_attention", flash_attention, key)

    with ExitStack() as stack:
        stack.callback(library._destroy)
        for name, function in interface.items():
            stack.enter_context(patch.object(CudaInterface, name, staticmethod(function)))
        for name, function in worker.items():
            stack.enter_context(patch.object(CudaInterface.Worker, name, staticmethod(function)))
        for name, value in module.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(
            patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True)
        )
        stack.enter_context(patch.object(guards, "_empty_strided_cuda", empty_strided, create=True))
        stack.enter_context(patch.object(guards, "_reinterpret_tensor", reinterpreted))
        stack.enter_context(patch.object(CachingAutotuner, "precompile", lambda self, **_: None))
        stack.enter_context(patch.object(CachingAutotuner, "run", run))
        stack.enter_context(
            patch.object(UniformValueConstantFolder, "_deduce_value", deduced_on_cpu)
        )
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(
            torch._inductor.config.patch(
                compile_threads=1,
                fx_graph_cache=False,
                use_static_triton_launcher=False,
                # the code then states the number of bytes that a kernel moves
                benchmark_combo_kernel=True,
            )
        )
        yield


@contextmanager
def interpreting() -> Iterator[None]:
    """Repairs Triton's interpreter for the kernels that TorchInductor writes.

    The interpreter truncates fp32 where a GPU rounds it to bf16, and multiplies the bits of bf16
    matrices. It lacks libdevice's functions, which are replaced by Triton's own. It cannot loop up
    to an argument under NumPy 2.4. And it calls TorchInductor's maximum once for each element, 10
    ms each, although NumPy's gives the same result.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from torch._inductor.runtime import triton_helpers
    from triton.runtime import interpreter

    plain_cast = interpreter.InterpreterBuilder.cast_impl
    plain_patch = interpreter._patch_lang_tensor

    def cast(self: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return plain_cast(self, source, kind)
        wide = torch.from_numpy(np.ascontiguousarray(source.data))
        bits = wide.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits.reshape(source.data.shape), kind.scalar)

    plain_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        factors = [plain_cast(self, x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b)]
        return plain_dot(self, *factors, *more)

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        plain_patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    plain_reduce = interpreter.ReduceOps.apply_impl

    def reduce(self: Any, values: Any) -> Any:
        if self.combine_fn is triton_helpers.maximum:
            return self.min_max(values[0], val_reduce_op=np.max)
        return plain_reduce(self, values)

    class Libdevice:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return getattr(tl, name)

    with (
        patch.object(interpreter.InterpreterBuilder, "cast_impl", cast),
        patch.object(interpreter.InterpreterBuilder, "create_dot", dot),
        patch.object(interpreter, "_patch_lang_tensor", patch_tensor),
        patch.object(interpreter.ReduceOps, "apply_impl", reduce),
        patch.object(triton_helpers, "libdevice", Libdevice()),
    ):
        yield
