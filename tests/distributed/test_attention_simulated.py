"""Tests `attention_kernel` on the simulated accelerator, whose kernels take the same dtypes as a
GPU's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from parallel3d.errors import UserError
from parallel3d.models.attention import AttentionOptions, causal_attention, choose_kernel
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config
from parallel3d.simulated_device.attention import FLASH, FLASH_BACKWARD
from parallel3d.simulated_device.device import this_machine
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import Outcome, References, differences, run_cases
from tests.distributed.simulated import SimulatedPool, here
from tests.distributed.simulated_runs import Sizes
from tests.distributed.test_documents_simulated import Attention

pytestmark = pytest.mark.nightly

SHAPE = 4, 2, 8


@contextmanager
def kernels() -> Iterator[list[str]]:
    """Collects the kernels of attention that are launched inside the block."""
    observer = Attention()
    this_machine().observers.append(observer)
    try:
        yield observer.found
    finally:
        this_machine().observers.remove(observer)


def attended(kernel: str, kind: torch.dtype) -> tuple[list[str], list[torch.Tensor]]:
    """Returns the kernels of attention that ran, and the result with its gradient."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 24, 64, generator=generator).to(kind).to(here()).requires_grad_()
    with kernels() as found:
        y = causal_attention(x, SHAPE, LayerInputs(), AttentionOptions(kernel))
        (grad,) = torch.autograd.grad(y.sum(), x)
    return found, [y.detach().cpu(), grad.cpu()]


def kernels_of_each_value() -> None:
    for kernel in ("auto", "flash", "cudnn", "not cudnn"):
        assert attended(kernel, torch.bfloat16)[0] == [FLASH, FLASH_BACKWARD]
    for kernel in ("auto", "not cudnn"):  # the memory-efficient kernel
        assert attended(kernel, torch.float32)[0] == [FLASH, FLASH_BACKWARD]
    for kind, few in ((torch.bfloat16, 0.03), (torch.float64, 1e-12)):
        names, written_out = attended("math", kind)
        assert names == []
        _, usual = attended("auto", kind)
        torch.testing.assert_close(written_out, usual, rtol=few, atol=few)


def refused_in_wide_types() -> None:
    model = ModelConfig(num_attention_heads=4, num_query_groups=2, head_dim=8)
    for kernel in ("flash", "cudnn"):
        made = Config(attention_kernel=kernel, model=model)
        made.precision.name = "bf16"
        assert choose_kernel(blueprint_of(made), here()) == kernel
        made.precision.name = "fp32"
        with pytest.raises(UserError, match=r"No available kernel.*attention_kernel=auto"):
            choose_kernel(blueprint_of(made), here())


def test_each_value_runs_its_kernel(simulated: SimulatedPool) -> None:
    simulated.run(1, kernels_of_each_value)


def test_kernels_of_half_precision_are_refused_in_other_types(simulated: SimulatedPool) -> None:
    simulated.run(1, refused_in_wide_types)


LLAMA = Problem("llama_tiny", "sgd", True, layers=2, steps=2, batch=12)
MATH = ("attention_kernel", "math")
CASES = [
    Case(LLAMA, sp=True, keys=(MATH, ("recompute", ["attention"]))),
    Case(replace(LLAMA, precision="bf16"), keys=(("attention_kernel", "flash"),)),
    Case(replace(LLAMA, documents=True), keys=(MATH,)),
]


def run_and_tell(sizes: Sizes, cases: Sequence[Case]) -> list[tuple[Outcome, list[str]]]:
    """Returns each case's outcome, and the kernels of attention that it launched."""
    told: list[list[str]] = []

    @contextmanager
    def listening() -> Iterator[None]:
        with kernels() as found:
            told.append(found)
            yield

    return list(zip(run_cases(sizes, cases, listening), told, strict=True))


def test_training_with_a_named_kernel_equals_the_reference(
    simulated: SimulatedPool, references: References
) -> None:
    by_rank = simulated.run(2, run_and_tell, (2, 1, 1), CASES, timeout_s=900)
    for case, told in zip(CASES, zip(*by_rank, strict=True), strict=True):
        outcomes, kernels = zip(*told, strict=True)
        assert not differences(outcomes, references.of(case.problem), case.problem), str(case)
        by_flash = ("attention_kernel", "flash") in case.keys
        assert all(bool(names) == by_flash for names in kernels), str(case)
