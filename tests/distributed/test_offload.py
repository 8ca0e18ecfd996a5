"""Tests activation offload: the bits of a run without it, slabs that are returned, and planted
bugs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.device import accelerator
from parallel3d.pipeline import offload
from parallel3d.pipeline.offload import ActivationOffload
from tests.distributed.cases import Case, Problem
from tests.distributed.conditions import tiny_slabs
from tests.distributed.harness import digests, make_trainer, plain_groups
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.simulated import SimulatedPool, here
from tests.distributed.simulated_runs import one_wait_a_step

Sizes = tuple[int, ...]
Mutation = Callable[[], AbstractContextManager[Any]]
Keys = tuple[tuple[str, Any], ...]
STEPS = 2

LLAMA = Problem("llama_tiny", "sgd", True, layers=4, batch=12)
GPT = Problem(
    "gpt_tiny", "sgd", False, layers=3, batch=12
)  # q, k and v are views of the projection
PACKED = replace(LLAMA, precision="bf16", documents=True)
V: Keys = (("vpp", 2),)


class Run(NamedTuple):
    """The results of one rank: losses and norms, digests of the weights, numbers of all slabs and
    of free ones."""

    steps: list[tuple[float | None, float]]
    weights: dict[str, str]
    slabs: tuple[int, int]


def run(case: Case, groups: ProcessGroups) -> Run:
    trainer = make_trainer(case, groups)
    trainer.evaluate()
    found = trainer.executor.offload
    assert found is None or found.host.count == 0  # an evaluation keeps nothing
    waits = one_wait_a_step() if accelerator.is_accelerator(here()) else nullcontext()
    with waits:
        results = [trainer.train_step() for _ in range(STEPS)]
    assert found is None or not (found.newest or found.leaving)
    slabs = (0, 0) if found is None else (found.host.count, len(found.host.free))
    steps = [(r.loss, r.grad_norm) for r in results]
    return Run(steps, digests(trainer.full_parameters()), slabs)


def run_both(
    sizes: Sizes, cases: Sequence[tuple[Case, list[int]]], mutation: Mutation = nullcontext
) -> list[tuple[Run, Run]]:
    """Runs each case without and with `offload_layers`."""
    groups, found = plain_groups(Layout(*sizes)), []
    with tiny_slabs(), mutation():
        for case, layers in cases:
            away = replace(case, keys=(*case.keys, ("offload_layers", layers)))
            found.append((run(case, groups), run(away, groups)))
    groups.close()
    return found


def check(by_rank: list[list[tuple[Run, Run]]]) -> None:
    for plain, offloaded in (pair for found in by_rank for pair in found):
        assert offloaded.steps == plain.steps
        assert offloaded.weights == plain.weights
        assert offloaded.slabs[0] == offloaded.slabs[1]
    # The layers of the first stage always wait for a backward, or for the layers after them.
    assert all(offloaded.slabs[0] > 0 for _, offloaded in by_rank[0])


# The matrix has offload with everything else; here bits are compared, as rounding could hide
# errors.
CASES: list[tuple[Sizes, list[tuple[Case, list[int]]]]] = [
    (
        (1, 1, 1),
        [
            (Case(GPT), [3]),
            (Case(PACKED, keys=(("recompute", "[norm,mlp]"),)), [2]),
        ],
    ),
    (
        (1, 2, 1),
        [
            (Case(replace(LLAMA, precision="fp16"), "zb_h1", microbatches=4), [2, 0]),
            (Case(LLAMA, "zbv", microbatches=3, keys=(*V, ("recompute", "full"))), [1, 1, 0, 1]),
        ],
    ),
]


def named(runs: list[tuple[Sizes, list[tuple[Case, list[int]]]]]) -> list[str]:
    return ["-".join(map(str, sizes)) for sizes, _ in runs]


@pytest.mark.nightly
@pytest.mark.parametrize(("sizes", "cases"), CASES, ids=named(CASES))
def test_bits_equal_a_run_without_offload(
    sizes: Sizes, cases: list[tuple[Case, list[int]]], pool: Pool
) -> None:
    check(pool.run(math.prod(sizes), run_both, sizes, cases, timeout_s=900))


@pytest.mark.nightly
def test_no_access_on_the_device_is_unordered(simulated: SimulatedPool) -> None:
    """Races, and pinned memory that is overwritten before its copy, raise; the host waits once.

    `matrix.on_streams` has offload on streams with everything else.
    """
    case = Case(replace(LLAMA, precision="bf16"), "zb_h1", microbatches=3)
    check(simulated.run(2, run_both, (1, 2, 1), [(case, [2])], timeout_s=900))


def slabs_over(steps: int) -> list[tuple[int, int]]:
    """Returns the slabs that exist and are free after each step."""
    case = Case(replace(LLAMA, layers=2, batch=2), keys=(("offload_layers", [2]),))
    found = []
    with tiny_slabs():
        trainer = make_trainer(case, plain_groups(Layout()))
        pool = trainer.executor.offload.host
        for _ in range(steps):
            trainer.train_step()
            found.append((pool.count, len(pool.free)))
    return found


@pytest.mark.nightly
def test_no_slab_leaks(pool: Pool) -> None:
    (found,) = pool.run(1, slabs_over, 20)
    assert set(found) == {found[0]} and found[0][0] == found[0][1] > 0


# --- what is copied ---------------------------------------------------------------------------


def copied() -> tuple[list[int], int]:
    """Returns, for one layer's forward, how often each storage is copied, and how many of these are
    parameters or rotary tables."""
    case = Case(LLAMA, microbatches=1, keys=(("offload_layers", [1]),))
    sent: list[int] = []
    with tiny_slabs(), patch.object(offload, "OFFLOADED_BYTES", 1):
        trainer = make_trainer(case, plain_groups(Layout()))
        plain = ActivationOffload.send

        def send(self: ActivationOffload, layer: Any) -> None:
            sent.extend(stored.flat.data_ptr() for stored in layer.storages.values())
            plain(self, layer)

        with patch.object(ActivationOffload, "send", send):
            trainer.train_step()
    tables = [table for pair in trainer.stages[0].rotary for table in pair]
    resident = {t.data_ptr() for t in (*trainer.stages[0].parameters(), *tables)}
    return [sent.count(address) for address in set(sent)], len(resident & set(sent))


def test_a_storage_is_copied_once_and_parameters_never(pool: Pool) -> None:
    ((counts, resident),) = pool.run(1, copied)
    assert resident == 0
    assert len(counts) > 5 and set(counts) == {1}


def offloaded() -> list[int]:
    """Returns how many layers are offloaded in a step of two micro-batches if all of them may be,
    on a stage whose backward follows each forward."""
    case = Case(LLAMA, microbatches=2, keys=(("offload_layers", [LLAMA.layers]),))
    with tiny_slabs(), patch.object(offload, "OFFLOADED_BYTES", 1):
        trainer = make_trainer(case, plain_groups(Layout()))
        plain, sent = ActivationOffload.send, []

        def send(self: ActivationOffload, layer: Any) -> None:
            sent.append(len(layer.storages))
            plain(self, layer)

        with patch.object(ActivationOffload, "send", send):
            trainer.train_step()
    return sent


def test_a_layer_whose_backward_is_next_is_not_offloaded(pool: Pool) -> None:
    (sent,) = pool.run(1, offloaded)
    assert len(sent) == 2 * (LLAMA.layers - 1) and min(sent) > 0


# --- planted mistakes -------------------------------------------------------------------------


@contextmanager
def slabs_are_freed_with_the_copy_to_them() -> Iterator[None]:
    plain = ActivationOffload.send

    def send(self: ActivationOffload, layer: Any) -> None:
        plain(self, layer)
        self.host.give(list(layer.slabs))

    with patch.object(ActivationOffload, "send", send):
        yield


@contextmanager
def nothing_waits_for_copies_back() -> Iterator[None]:
    plain = ActivationOffload.fetch

    def fetch(self: ActivationOffload, layer: Any) -> None:
        plain(self, layer)
        layer.returned = None

    with patch.object(ActivationOffload, "fetch", fetch):
        yield


@contextmanager
def tensors_are_freed_before_they_are_copied() -> Iterator[None]:
    plain = ActivationOffload.send

    def send(self: ActivationOffload, layer: Any) -> None:
        plain(self, layer)
        layer.copied = None

    with patch.object(ActivationOffload, "send", send):
        yield


@contextmanager
def copies_do_not_wait_for_what_they_copy() -> Iterator[None]:
    plain = ActivationOffload.copying

    @contextmanager
    def copying(self: ActivationOffload) -> Iterator[None]:
        if self.stream is None:
            self.stream = accelerator.module(self.device).Stream(device=self.device)
        with accelerator.on_stream(self.stream), plain(self):  # it waits for itself
            yield

    with patch.object(ActivationOffload, "copying", copying):
        yield


@contextmanager
def views_forget_where_they_begin() -> Iterator[None]:
    plain = ActivationOffload.unpack

    def unpack(self: ActivationOffload, saved: Any) -> Tensor:
        return plain(self, saved if isinstance(saved, Tensor) else saved._replace(offset=0))

    with patch.object(ActivationOffload, "unpack", unpack):
        yield


@pytest.mark.more
@pytest.mark.parametrize(
    "mutation", [slabs_are_freed_with_the_copy_to_them, views_forget_where_they_begin]
)
def test_planted_bugs_that_change_bits_are_caught(mutation: Mutation, pool: Pool) -> None:
    ((found,),) = pool.run(1, run_both, (1, 1, 1), [(Case(GPT), [3])], mutation)
    assert found[0].steps != found[1].steps and found[0].weights != found[1].weights


@pytest.mark.more
@pytest.mark.parametrize(
    "mutation",
    [
        nothing_waits_for_copies_back,
        tensors_are_freed_before_they_are_copied,
        copies_do_not_wait_for_what_they_copy,
    ],
)
def test_planted_races_are_caught(mutation: Mutation, simulated: SimulatedPool) -> None:
    with pytest.raises(WorkerFailure, match=r"Race: .* nothing orders the two"):
        simulated.run(1, run_both, (1, 1, 1), [(Case(GPT), [3])], mutation)
