"""Grouped GEMMs, which multiply each group of rows by its own matrix, for the experts of a layer.

A GPU runs all groups in one kernel, which reads the ends of the groups from device memory, so that
the host need not know their sizes. On other devices, each group is a GEMM of its own.

Weight gradients are accumulated in fp32. As PyTorch's grouped GEMM can neither return fp32 nor add
to its result (PyTorch issue 166651), `grouped_kernels` has a kernel for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.device import accelerator
from parallel3d.device.fused import has_kernel_compiler
from parallel3d.device.matmul import matmul

HOPPER = 9  # first major compute capability for which PyTorch's grouped GEMM is one kernel


class Groups(NamedTuple):
    """Groups of consecutive rows.

    Attributes:
        ends: (groups,) int32 on the device, the end (exclusive) of each group.
        counts: the number of rows in each group; None: the host does not know them.
    """

    ends: Tensor
    counts: tuple[int, ...] | None

    @classmethod
    def of(cls, numbers: Tensor, counts: tuple[int, ...] | None) -> Groups:
        """Returns groups of the sizes `numbers`, (groups,) on the device.

        `counts`: the same sizes on the host; None: the host does not know them.
        """
        return cls(numbers.cumsum(0).int(), counts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows in each group. Raises ValueError if the host does not know them."""
        if self.counts is None:
            raise ValueError("the sizes of the groups are only known on the device")
        return self.counts

    @property
    def total(self) -> int:
        """The number of rows in all groups. Raises ValueError if the host does not know it."""
        return sum(self.sizes)

    def spans(self) -> Iterator[slice]:
        """Yields each group's slice of rows. Raises ValueError if the host has no counts."""
        first = 0
        for size in self.sizes:
            yield slice(first, first + size)
            first += size


def has_grouped_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a grouped GEMM in `dtype` is one kernel on `device`.

    It is one kernel in bf16 on NVIDIA GPUs since Hopper, if Triton is available. On the simulated
    device it is one in bf16, and in fp64 for exact comparisons.
    """
    if not accelerator.is_accelerator(device):
        return False
    if hasattr(accelerator.module(device), "fused_kernel"):
        return dtype in (torch.bfloat16, torch.float64)
    return dtype == torch.bfloat16 and _is_since_hopper(device) and has_kernel_compiler()


@functools.cache
def _is_since_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return accelerator.module(device).get_device_capability(device)[0] >= HOPPER


def grouped_matmul(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Multiplies the rows of each group by its matrix: (rows, in), (groups, in, out) → (rows, out).

    Rows of the result after the last group are undefined.
    """
    if has_grouped_kernels(rows.device, rows.dtype):
        return torch.ops.parallel3d.grouped_matmul(groups.ends, rows, matrices)
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for span, matrix in zip(groups.spans(), matrices, strict=True):
        if span.start < span.stop:
            out[span] = matmul(rows[span], matrix)
    return out


def add_products(out: Tensor, a: Tensor, b: Tensor, groups: Groups) -> None:
    """Adds aᵀ·b of each group's rows to the group's matrix in `out`, in one kernel.

    The products are not rounded to the dtype of `a` and `b` before they are added. This requires
    `has_grouped_kernels`.

    Args:
        out: (groups, n, m), in fp32 or fp64.
        a: (rows, n).
        b: (rows, m).
        groups: the rows of each group.
    """
    torch.ops.parallel3d.add_products(out, groups.ends, a, b)


# The functions below implement operators that are one kernel each. The simulated device runs the
# implementations for the CPU.


def _spans(ends: Tensor) -> Iterator[slice]:
    first = 0
    for end in ends.tolist():
        yield slice(first, end)
        first = end


def _matmul_on_cpu(ends: Tensor, rows: Tensor, matrices: Tensor) -> Tensor:
    out = rows.new_full((rows.shape[0], matrices.shape[2]), torch.nan)  # reveals reads past the end
    for span, matrix in zip(_spans(ends), matrices, strict=True):
        out[span] = rows[span] @ matrix
    return out


def _matmul_on_gpu(ends: Tensor, rows: Tensor, matrices: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices, offs=ends)


def _matmul_without_values(ends: Tensor, rows: Tensor, matrices: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


def _add_on_cpu(out: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> None:
    for matrix, span in zip(out, _spans(ends), strict=True):
        matrix.addmm_(a[span].to(out.dtype).t(), b[span].to(out.dtype))


def _add_on_gpu(out: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> None:
    from parallel3d.device import grouped_kernels  # the import needs Triton

    grouped_kernels.add_products(out, a.contiguous(), b.contiguous(), ends)


def _add_without_values(out: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> None:
    pass


def _register() -> torch.library.Library:
    library = torch.library.Library("parallel3d", "FRAGMENT")
    library.define("grouped_matmul(Tensor ends, Tensor rows, Tensor matrices) -> Tensor")
    library.define("add_products(Tensor(a!) out, Tensor ends, Tensor a, Tensor b) -> ()")
    forms: dict[str, tuple[Any, Any]] = {
        "CPU": (_matmul_on_cpu, _add_on_cpu),
        "CUDA": (_matmul_on_gpu, _add_on_gpu),
        "Meta": (_matmul_without_values, _add_without_values),
    }
    for key, (product, addition) in forms.items():
        library.impl("grouped_matmul", product, key)
        library.impl("add_products", addition, key)
    return library


_library = _register()  # keeps the operators registered
