"""Runs ranks on the simulated accelerator: whole cases, and steps in which waits are counted.

This is a module of its own because a new worker imports it, and building the matrix takes seconds.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.device.grouped import has_grouped_kernels
from parallel3d.models import ops
from parallel3d.simulated_device.device import this_machine
from parallel3d.simulated_device.machine import Kernel, Observer
from parallel3d.trainer import StepResult
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import Outcome, Sizes, make_trainer, plain_groups, run_cases
from tests.distributed.simulated import here

DROPS = Problem("llama_tiny", "adamw", True, "bf16", (("dropout", 0.1),))
STEPS = 2  # steps in which the host's waits are counted, after the first one


class Waits(Observer):
    """A reason and a place of a wait of the host."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def host_wait(self, why: str) -> None:
        frames = traceback.extract_stack(limit=20)[::-1]
        lines = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
        self.found.append(f"{why} at {lines}")


@contextmanager
def waits() -> Iterator[list[str]]:
    """Collects the waits of the host inside the block."""
    observer = Waits()
    this_machine().observers.append(observer)
    try:
        yield observer.found
    finally:
        this_machine().observers.remove(observer)


def check_one_wait(found: list[str], experts: int = 0) -> None:
    """Asserts that a step has one wait, for its numbers, and `experts` waits for counts of rows:
    one in each forward of a layer with experts."""
    of_experts = [why for why in found if "rows.py" in why]
    found = [why for why in found if why not in of_experts]
    assert len(of_experts) == experts, "\n".join(of_experts)
    assert len(found) == 1, "\n".join(found)
    assert found[0].startswith("tolist at") and "trainer.py" in found[0]


@contextmanager
def one_wait_a_step() -> Iterator[None]:
    """Makes each step of a trainer, except the first, fail unless the host waits exactly once in
    it."""
    plain = Trainer.train_step

    def train_step(self: Trainer) -> StepResult:
        with waits() as found:
            result = plain(self)
        if self.steps_done > 1:
            check_one_wait(found, forwards_of_experts(self))
        return result

    with patch.object(Trainer, "train_step", train_step):
        yield


def forwards_of_experts(trainer: Trainer) -> int:
    """Returns the forwards of layers with experts in the trainer's last step on this rank in which
    the host must know how many rows the experts get."""
    if trainer.balance is None:
        return 0
    if trainer.groups.ep.size == 1 and has_grouped_kernels(trainer.device, trainer.dtype):
        return 0
    return len(trainer.balance.routers) * trainer.schedule.microbatches


@contextmanager
def residuals_lose_their_gradient() -> Iterator[None]:
    """Plants a bug: the fused norm's backward only passes on the gradient that came through the
    norm."""

    def backward(grad_total: Tensor, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor]:
        return ops.rms_norm_backward(grad, *saved)

    with patch.object(ops, "add_rms_norm_backward", backward):
        yield


def run_without_residual_gradients(sizes: Sizes, cases: Sequence[Case]) -> list[Outcome]:
    return run_cases(sizes, cases, residuals_lose_their_gradient)


def run_on_own_device(
    sizes: Sizes,
    cases: Sequence[Case],
    condition: Callable[[], AbstractContextManager[None]] = nullcontext,
    make_groups: Callable[[Layout], ProcessGroups] = plain_groups,
) -> list[Outcome]:
    """Does the same as `run_cases`, and asserts that the host waits once per step and that contexts
    are on this rank's device alone."""

    @contextmanager
    def both() -> Iterator[None]:
        with condition(), one_wait_a_step():
            yield

    outcomes = run_cases(sizes, cases, both, make_groups)
    assert this_machine().touched == {dist.get_rank()}
    return outcomes


def waits_a_step(sizes: Sizes, case: Case) -> list[list[str]]:
    """Returns, for each step except the first, where the host waited for the device."""
    groups = plain_groups(Layout(*sizes))
    trainer = make_trainer(case, groups)
    trainer.train_step()
    steps = []
    for _ in range(STEPS):
        with waits() as found:
            trainer.train_step()
        steps.append(found)
    groups.close()
    return steps


class BehindCounts(Observer):
    """Counts the matrix products that the host launches between the copy of a layer's counts and
    its wait for them."""

    PRODUCTS = ("mm", "addmm", "linear", "matmul")

    def __init__(self) -> None:
        self.found: list[int] = []
        self._launched = 0

    def kernel(self, kernel: Kernel) -> None:
        if kernel.name == "copy to the host":
            self._launched = 0
        self._launched += kernel.name in self.PRODUCTS

    def host_wait(self, why: str) -> None:
        if any(Path(f.filename).name == "rows.py" for f in traceback.extract_stack(limit=20)):
            self.found.append(self._launched)


def products_behind_counts(sizes: Sizes, case: Case) -> list[int]:
    """Returns the matrix products behind which each wait for counts of a step is hidden."""
    groups = plain_groups(Layout(*sizes))
    trainer = make_trainer(case, groups)
    observer = BehindCounts()
    this_machine().observers.append(observer)
    trainer.train_step()
    this_machine().observers.remove(observer)
    groups.close()
    return observer.found


def warned_of_a_step(case: Case) -> list[str]:
    """Returns the warnings of PyTorch's sync debug mode in the second step."""
    trainer = make_trainer(case, plain_groups(Layout()))
    trainer.train_step()
    api = torch.get_device_module(here())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        api.set_sync_debug_mode("warn")
        trainer.train_step()
        api.set_sync_debug_mode("default")
    return [f"{Path(w.filename).name}: {w.message}" for w in caught]
