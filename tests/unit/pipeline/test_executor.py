"""Tests the executor on one rank, whose stages pass their results to each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.comm.group import SINGLE
from parallel3d.device import accelerator
from parallel3d.errors import UserError
from parallel3d.pipeline.executor import Executor, MicroBatches
from parallel3d.pipeline.p2p import P2PRoute, StageOutputs
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import make

CPU = torch.device("cpu")
MICROBATCHES = 3


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6).double()

    def forward(self, _: None, batch: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.linear(batch), batch.mean(1)


class Middle(nn.Module):
    """A stage that returns one of its inputs unchanged, and reads no other."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: tuple[Tensor, Tensor], *_: Any) -> Tensor:
        if self.wrong == "raises":
            raise ValueError("seven")
        return x[0][:, :5] if self.wrong == "shape" else x[0].sin()


class Last(nn.Module):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x.square().sum()


def made(wrong: str = "", **words: Any) -> tuple[Executor, list[nn.Module]]:
    torch.manual_seed(0)
    stages = [First(), Middle(wrong), Last()]
    sends = [StageOutputs(((2, 6), (2,)), torch.double), StageOutputs(((2, 6),), torch.double)]
    route = P2PRoute(SINGLE, StageAssignment(1, 3))
    return Executor(stages, route, sends, CPU, **words), stages


def batch(m: int) -> tuple[Tensor]:
    return (torch.full((2, 4), 1.0 + m, dtype=torch.double),)


PLANS = [make("interleaved", 1, MICROBATCHES, 3), make("interleaved_zb", 1, MICROBATCHES, 3)]


@pytest.mark.parametrize("schedule", PLANS, ids=lambda schedule: schedule.name)
def test_stages_in_a_row_have_the_gradients_of_one_module(schedule: Any) -> None:
    executor, stages = made()
    total = executor.train_step(schedule.program()[0], batch, torch.tensor(0.5))
    mine = [p.grad for p in stages[0].parameters()]
    stages[0].zero_grad()
    wanted = sum(stages[0].linear(*batch(m)).sin().square().sum() for m in range(MICROBATCHES))
    (0.5 * wanted).backward()
    assert torch.allclose(total, wanted.double(), rtol=1e-12)
    for grad, parameter in zip(mine, stages[0].parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)
    evaluated = executor.evaluate(schedule.forwards()[0], batch)
    assert torch.equal(evaluated, total)
    assert not (executor.live or executor.deferred or executor.local_handoff or executor.outbox)


@pytest.mark.parametrize("schedule", PLANS, ids=lambda schedule: schedule.name)
def test_a_stage_that_fails_is_raised_or_kept_to_the_end_of_the_step(schedule: Any) -> None:
    program, scale = schedule.program()[0], torch.tensor(0.5)
    with pytest.raises(ValueError, match="seven"):
        made("raises")[0].train_step(program, batch, scale)
    executor, stages = made("raises", keeps_failures=True)
    assert executor.train_step(program, batch, scale) == 0
    sentence = "stage 1 in the forward of micro-batch 0 raised ValueError: seven"
    assert str(executor.failure) == sentence
    assert not (executor.live or executor.deferred or executor.local_handoff or executor.outbox)
    executor.failure, stages[1].wrong = None, ""
    assert torch.equal(
        executor.train_step(program, batch, scale), made()[0].train_step(program, batch, scale)
    )


def test_outputs_of_another_shape_than_the_message_are_refused() -> None:
    sentence = r"stage 1 returned torch.float64\[2, 5\] for micro-batch 0, but must return "
    with pytest.raises(UserError, match=sentence):
        made("shape")[0].train_step(PLANS[0].program()[0], batch, torch.tensor(0.5))


def test_a_message_packs_several_tensors_and_sends_a_single_one_directly() -> None:
    several = StageOutputs(((2, 3), (), (4,)), torch.float)
    tensors = torch.randn(2, 3), torch.randn(()), torch.randn(4)
    message = several.message(tensors)
    assert message.shape == several.shape == (11,)
    assert several == StageOutputs.of(list(tensors), 0)
    assert all(map(torch.equal, several.values(message), tensors))
    assert str(several) == "torch.float32[2, 3] and torch.float32[] and torch.float32[4]"
    single = StageOutputs.of(tensors[0], 0)
    assert single.message(tensors[:1]) is tensors[0] and single.shape == (2, 3)
    turned = single.message((torch.randn(3, 2).t(),))
    assert turned.is_contiguous() and single.values(turned)[0].shape == (2, 3)


def test_a_micro_batch_is_loaded_once_for_all_stages_of_a_rank() -> None:
    loaded: list[int] = []
    order = [0, 1, 0, 2, 1, 2]
    batches = MicroBatches(lambda m: loaded.append(m) or (m,), order)
    assert [batches.take() for _ in order] == [(m,) for m in order]
    assert loaded == [0, 1, 2]
    assert not batches.held, "what the last chunk has read is kept no longer"


def test_the_next_micro_batch_is_loaded_ahead_if_asked_for() -> None:
    loaded: list[int] = []
    batches = MicroBatches(lambda m: loaded.append(m) or (m,), [2, 0, 1])
    assert batches.take() == (2,)
    batches.look_ahead()  # the forward is queued
    batches.look_ahead()  # one micro-batch ahead is enough
    assert loaded == [2, 0]
    assert [batches.take(), batches.take()] == [(0,), (1,)]
    batches.look_ahead()  # nothing is left
    assert loaded == [2, 0, 1] and not batches.held


@pytest.mark.parametrize("kind", ["cpu", "accelerator"])
def test_an_accelerator_computes_while_the_next_micro_batch_is_loaded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor looks ahead before the host queues the backward; a CPU has finished the forward
    by then."""
    monkeypatch.setattr(accelerator, "is_accelerator", lambda _: kind == "accelerator")
    events: list[str] = []

    def load(m: int) -> tuple[Tensor]:
        events.append(f"load {m}")
        return batch(m)

    class Whole(nn.Linear):
        def forward(self, _: None, batch: Tensor, scale: Tensor | None) -> Tensor:
            y = super().forward(batch.float()).sum()
            y.register_hook(lambda _: events.append("backward"))
            return y

    executor = Executor([Whole(4, 1)], P2PRoute(SINGLE, StageAssignment(1)), [], CPU)
    executor.train_step(make("1f1b", 1, 2).program()[0], load, torch.tensor(1.0))
    first = ["load 0", "load 1", "backward"] if kind == "accelerator" else ["load 0", "backward"]
    assert events[: len(first)] == first
    assert sorted(events) == ["backward", "backward", "load 0", "load 1"]
