"""Tests documents on the simulated accelerator.

There is one kernel for all documents in half precision, one call for each in other dtypes, and the
host never waits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch

from parallel3d.config.values import AUTO
from parallel3d.context_parallel.attention import attend_within
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.data.loader import Documents, documents_of
from parallel3d.data.sampler import Sample, document_starts
from parallel3d.simulated_device.attention import FLASH, FLASH_BACKWARD
from parallel3d.simulated_device.device import this_machine
from parallel3d.simulated_device.machine import Kernel, Observer
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_cases
from tests.distributed.simulated import SimulatedPool, here
from tests.distributed.simulated_runs import run_on_own_device, waits
from tests.unit.context_parallel import test_attention as test_context_attention
from tests.unit.context_parallel.test_attention import by_ranks, random_inputs

pytestmark = pytest.mark.nightly

LENGTH = 24
BEGINS = ((), (1, 2, 3, 23), (11,), (5, 8))
LENGTHS = [np.diff((0, *begins, LENGTH)).tolist() for begins in BEGINS]


class Attention(Observer):
    """Collects the kernels of attention that were launched."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def kernel(self, kernel: Kernel) -> None:
        if kernel.name in (FLASH, FLASH_BACKWARD):
            self.found.append(kernel.name)


def documents(device: torch.device) -> Documents:
    samples = [
        Sample(
            np.zeros(LENGTH + 1, dtype=np.int64),
            np.ones(LENGTH, dtype=bool),
            document_starts(np.array(begins, dtype=int), LENGTH),
        )
        for begins in BEGINS
    ]
    return documents_of(samples, range(len(samples)), device)


def sinks_of(dtype: torch.dtype, has_sinks: bool) -> list[torch.Tensor]:
    """Returns the sinks of four heads in `dtype`, or nothing."""
    return [torch.linspace(-1, 2, 4, dtype=dtype)] if has_sinks else []


def attended(
    device: torch.device,
    dtype: torch.dtype,
    kv_heads: int,
    head_dim: int,
    has_sinks: bool = False,
) -> tuple[list[torch.Tensor], list[str], list[str]]:
    """Returns the result and the gradients, the kernels of attention, and the waits of the host."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(len(BEGINS), n, LENGTH, head_dim) for n in (4, kv_heads, kv_heads, 4)]
    *inputs, grad = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    inputs += sinks_of(torch.float32, has_sinks)
    leaves = [t.to(device).requires_grad_() for t in inputs]
    of_device, grad, kernels = documents(device), grad.to(device), Attention()
    this_machine().observers.append(kernels)
    try:
        with waits() as waited:
            sinks = leaves[3] if has_sinks else None
            out = attend_within(*leaves[:3], of_device, sinks=sinks)
            found = [out, *torch.autograd.grad(out, leaves, grad)]
    finally:
        this_machine().observers.remove(kernels)
    return [t.detach().cpu() for t in found], kernels.found, waited


def half_precision_is_one_kernel(dtype: torch.dtype, kv_heads: int, has_sinks: bool) -> None:
    """The first call with a head size also tries the kernel, so the second call is counted."""
    attended(here(), dtype, kv_heads, 8, has_sinks)
    ours, kernels, waited = attended(here(), dtype, kv_heads, 8, has_sinks)
    theirs = explicit(dtype, kv_heads, 8, has_sinks)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == (dtype if i < 4 else torch.float32)
        torch.testing.assert_close(a.double(), b, rtol=0.02, atol=0.02)
    assert kernels == [FLASH, FLASH_BACKWARD] and not waited


def other_types_are_a_call_for_each_document(
    dtype: torch.dtype, kv_heads: int, head_dim: int
) -> None:
    """Other dtypes, and heads of a size that the kernel does not take, need a call for each
    document."""
    attended(here(), dtype, kv_heads, head_dim)
    ours, kernels, waited = attended(here(), dtype, kv_heads, head_dim)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for a, b in zip(ours, explicit(dtype, kv_heads, head_dim), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=close, atol=close)
    # Neighbours of equal length share one call; their backward has no kernel of its own.
    calls = sum(len(list(groupby(lengths))) for lengths in LENGTHS)
    assert kernels == [FLASH] * calls and not waited


def explicit(
    dtype: torch.dtype, kv_heads: int, head_dim: int, has_sinks: bool = False
) -> list[torch.Tensor]:
    """Computes the expected result with a mask of the whole square, in fp64 on the host."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(len(BEGINS), n, LENGTH, head_dim) for n in (4, kv_heads, kv_heads, 4)]
    *inputs, grad = (torch.randn(s, generator=generator).to(dtype).double() for s in shapes)
    leaves = [t.requires_grad_() for t in (*inputs, *sinks_of(torch.float64, has_sinks))]
    q, k, v, *sinks = leaves
    k, v = (t.repeat_interleave(4 // kv_heads, 1) for t in (k, v))
    seen = torch.zeros(len(BEGINS), 1, LENGTH, LENGTH, dtype=torch.bool)
    for i, lengths in enumerate(LENGTHS):
        squares = [torch.ones(n, n, dtype=torch.bool).tril() for n in lengths]
        seen[i, 0] = torch.block_diag(*squares)
    scores = (q @ k.mT / head_dim**0.5).masked_fill(~seen, -torch.inf)
    further = [x.view(-1, 1, 1).expand(*scores.shape[:-1], 1) for x in sinks]
    out = torch.cat((scores, *further), -1).softmax(-1)[..., :LENGTH] @ v
    return [t.detach() for t in (out, *torch.autograd.grad(out, leaves, grad))]


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.bfloat16, 4), (torch.float16, 2)], ids=str)
def test_half_precision_is_one_kernel(
    dtype: torch.dtype, kv_heads: int, has_sinks: bool, simulated: SimulatedPool
) -> None:
    simulated.run(1, half_precision_is_one_kernel, dtype, kv_heads, has_sinks)


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "head_dim"),
    [(torch.float64, 4, 8), (torch.float32, 4, 4), (torch.bfloat16, 2, 4)],
    ids=str,
)
def test_other_types_need_a_call_for_each_document(
    dtype: torch.dtype, kv_heads: int, head_dim: int, simulated: SimulatedPool
) -> None:
    simulated.run(1, other_types_are_a_call_for_each_document, dtype, kv_heads, head_dim)


# With heads of 8, half precision takes the kernel for all documents.
LLAMA = Problem(
    "llama_tiny", "adamw", True, "bf16",
    model=(("num_attention_heads", 4), ("num_query_groups", 2)),
    layers=2, steps=2, batch=12, documents=True,
)  # fmt: skip
FULL = ("recompute", "full")
# test_simulated_exactness has stages and replicas.
RUNS = {
    (2, 1, 1): [Case(LLAMA, sp=True, keys=(FULL,)), Case(replace(LLAMA, precision="fp64"))],
    (1, 1, 1, 2): [
        Case(LLAMA, keys=(("context_parallel.style", "gather"), FULL)),
        Case(LLAMA, keys=(("context_parallel.style", "ring"),)),
    ],
}


@pytest.mark.parametrize("sizes", RUNS, ids=["tp", "cp"])
def test_training_equals_the_reference_without_a_wait(
    sizes: Sizes, simulated: SimulatedPool, references: References
) -> None:
    check_cases(sizes, RUNS[sizes], simulated, references, run=run_on_own_device)


def split_queries_take_few_kernels(ring: bool) -> None:
    """Queries and keys of any lengths need as few calls as the keys of a rank allow."""
    split, packs = SequenceSplit(61, 2, ring=ring), test_context_attention.PACKS
    inputs = random_inputs(split.padded, len(packs), torch.bfloat16)
    kernels = Attention()
    this_machine().observers.append(kernels)
    try:
        ours = by_ranks([x.to(here()) for x in inputs], split, packs, AUTO)
    finally:
        this_machine().observers.remove(kernels)
    theirs = test_context_attention.explicit(inputs, packs, split.padded)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
    # Rank 0 holds the first and the last quarter, whose keys overlap if documents continue; rank 1
    # holds both middle ones. In a ring each also reads the other's keys.
    assert kernels.found.count(FLASH_BACKWARD) == (10 if ring else 4)


@pytest.mark.parametrize("ring", [False, True])
def test_split_queries_take_few_kernels(ring: bool, simulated: SimulatedPool) -> None:
    simulated.run(1, split_queries_take_few_kernels, ring)
