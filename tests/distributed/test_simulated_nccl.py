"""Tests that the simulated backend behaves like NCCL, and names both sides where NCCL would
hang."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from parallel3d.simulated_device.machine import Race
from parallel3d.simulated_device.nccl import Mismatch
from tests.distributed.pool import WorkerFailure
from tests.distributed.simulated import SimulatedPool, here
from tests.distributed.test_reference_collectives import check_barriers
from tests.distributed.test_simulated_device import module, raises

pytestmark = pytest.mark.nightly


def rank() -> int:
    return dist.get_rank()


def filled(n: int = 4, value: float | None = None) -> torch.Tensor:
    return torch.full((n,), float(rank() if value is None else value), device=here())


def collectives_compute() -> None:
    size = dist.get_world_size()
    x = filled()
    dist.all_reduce(x)
    assert x.tolist() == [sum(range(size))] * 4
    dist.all_reduce(x := filled(), op=dist.ReduceOp.MAX)
    assert x.tolist() == [size - 1] * 4
    dist.broadcast(x := filled(), 1)
    assert x.tolist() == [1.0] * 4
    out = torch.empty(4 * size, dtype=torch.bfloat16, device=here())
    dist.all_gather_into_tensor(out, filled().bfloat16())
    assert out.tolist() == [float(r) for r in range(size) for _ in range(4)]
    own = torch.empty(4, device=here())
    dist.reduce_scatter_tensor(own, out.float())
    assert own.tolist() == [float(size * rank())] * 4
    given = torch.arange(size, device=here()) + 10 * rank()
    dist.all_to_all_single(taken := torch.empty_like(given), given)
    assert taken.tolist() == [10 * r + rank() for r in range(size)]


def gathers_in_place_take_the_own_part_alone() -> None:
    size = dist.get_world_size()
    whole = filled(4 * size)
    dist.all_gather_into_tensor(whole, whole.chunk(size)[rank()])
    assert whole.tolist() == [float(r) for r in range(size) for _ in range(4)]
    wrong = whole.chunk(size)[(rank() + 1) % size]
    raises(RuntimeError, "in place", lambda: dist.all_gather_into_tensor(whole, wrong))
    raises(RuntimeError, "in place", lambda: dist.reduce_scatter_tensor(wrong, whole))


def a_result_is_there_after_its_wait() -> None:
    x = filled()
    work = dist.all_reduce(x, async_op=True)
    assert x.data_.isnan().all()
    raises(Race, "mul_ on stream .* allreduce on stream", lambda: x.mul_(2))
    work.wait()
    module().synchronize()
    assert not x.isnan().any()


def a_side_stream_does_not_wait_for_others_waits() -> None:
    side = module().Stream()
    x = filled()
    dist.all_reduce(x, async_op=True).wait()
    with module().stream(side):
        raises(Race, "add on stream", lambda: x + 1)


def tensors_of_the_host_and_of_other_devices_are_refused() -> None:
    raises(RuntimeError, "No backend type .* cpu", lambda: dist.all_reduce(torch.ones(3)))
    other = torch.ones(3, device="simulated:7")
    raises(RuntimeError, "a tensor is on simulated:7", lambda: dist.all_reduce(other))
    raises(ValueError, "contiguous", lambda: dist.all_reduce(filled(16).view(4, 4).t()))


def messages_are_matched_by_position() -> None:
    peer = 1 - rank()
    tensors = [filled(value=10 * rank() + i) for i in range(2)]
    got = [torch.empty(4, device=here()) for _ in range(2)]
    calls = [dist.P2POp(dist.isend, t, peer, tag=i) for i, t in enumerate(tensors)]
    calls += [dist.P2POp(dist.irecv, t, peer, tag=i) for i, t in enumerate(got)]
    works = dist.batch_isend_irecv(calls)
    assert len(works) == 1
    works[0].wait()
    assert [t.tolist()[0] for t in got] == [10 * peer, 10 * peer + 1]


def a_send_list_in_another_order() -> None:
    peer = 1 - rank()
    order = (0, 1) if rank() == 0 else (1, 0)
    got = [torch.empty(4, device=here()) for _ in range(2)]
    calls = [dist.P2POp(dist.isend, filled(), peer, tag=i) for i in order]
    calls += [dist.P2POp(dist.irecv, got[i], peer, tag=i) for i in range(2)]
    dist.batch_isend_irecv(calls)[0].wait()


def another_operation_on_one_rank() -> None:
    dist.all_reduce(filled()) if rank() else dist.broadcast(filled(), 0)


def another_size_on_one_rank() -> None:
    dist.all_reduce(filled(4 + rank()))


def a_group_made_by_some() -> None:
    if rank() == 0:
        dist.split_group(split_ranks=[[0, 1]], group_desc="tp")
    dist.all_reduce(filled())


def what_is_empty_is_not_waited_for() -> None:
    """Rank 1 posts its part after rank 0 has continued: it never would if rank 0 waited."""
    empty, peer = torch.empty(0, device=here()), 1 - rank()
    if rank() == 0:
        dist.all_reduce(empty)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, empty, peer)]):
            work.wait()
    dist.barrier()
    if rank() == 1:
        dist.all_reduce(empty)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, empty, peer)]):
            work.wait()


def memory_is_free_once_its_tensors_are_gone() -> None:
    """A communicator's thread keeps no tensor of an operation that has been waited for."""
    size, before = dist.get_world_size(), module().memory_allocated()

    def alike() -> list[torch.Tensor]:
        return [filled() for _ in range(size)]

    for call in (
        lambda: dist.all_to_all_single(filled(size), filled(size)),
        lambda: dist.gather(filled(), alike() if rank() == 0 else None),
        lambda: dist.scatter(filled(), alike() if rank() == 0 else None),
        lambda: dist.all_gather(alike(), filled()),
        lambda: dist.reduce_scatter_tensor(filled(), filled(4 * size)),
        lambda: dist.reduce(filled(), 0),
        lambda: dist.all_reduce(filled()),
    ):
        call()
        assert module().memory_allocated() == before


def destroyed_by_one_rank() -> None:
    if rank() == 0:
        dist.destroy_process_group()
    else:
        dist.all_reduce(filled())


def a_group_destroyed_by_one_rank() -> None:
    group = dist.split_group(split_ranks=[[0, 1]], group_desc="tp")
    if rank() == 0:
        dist.destroy_process_group(group)
        dist.destroy_process_group()
    else:
        dist.all_reduce(filled(), group=group)


def groups_destroyed_in_another_order() -> None:
    groups = [dist.split_group(split_ranks=[[0, 1]], group_desc=name) for name in ("tp", "dp")]
    for group in groups if rank() else groups[::-1]:
        dist.destroy_process_group(group)
    dist.destroy_process_group()


SOUND = (
    collectives_compute,
    gathers_in_place_take_the_own_part_alone,
    a_result_is_there_after_its_wait,
    a_side_stream_does_not_wait_for_others_waits,
    tensors_of_the_host_and_of_other_devices_are_refused,
    messages_are_matched_by_position,
    what_is_empty_is_not_waited_for,
    memory_is_free_once_its_tensors_are_gone,
)
DIFFERENT = {
    a_send_list_in_another_order: "with tag 0 as message 0 of member .* sent .* with tag 1",
    another_operation_on_one_rank: "calls (allreduce|broadcast) .* calls (allreduce|broadcast)",
    another_size_on_one_rank: r"float32\[4\].*float32\[5\]|float32\[5\].*float32\[4\]",
    a_group_made_by_some: "calls (split|allreduce) .* calls (split|allreduce)",
}


@pytest.mark.parametrize("check", SOUND, ids=lambda check: check.__name__)
def test_behaviour_of_the_simulated_backend_on_two_ranks(
    check: Callable[[], None], simulated: SimulatedPool
) -> None:
    simulated.run(2, check)


def told(check: Callable[[], None]) -> str:
    """Returns this rank's error, if it detected one."""
    try:
        check()
    except Mismatch as error:
        module().machine.forget()
        return str(error)
    return ""


@pytest.mark.parametrize("check", DIFFERENT, ids=lambda check: check.__name__)
def test_ranks_that_differ_are_named(check: Callable[[], None], simulated: SimulatedPool) -> None:
    said = simulated.run(2, told, check)
    assert any(re.search(DIFFERENT[check], words) for words in said), said


BAD_ENDS = {
    groups_destroyed_in_another_order: r"destroyed its groups in the order \w+, \w+",
    destroyed_by_one_rank: "of default_pg calls (destroy|allreduce) .* calls (destroy|allreduce)",
    a_group_destroyed_by_one_rank: "of tp calls (destroy|allreduce) .* calls (destroy|allreduce)",
}


@pytest.mark.parametrize("check", BAD_ENDS, ids=lambda check: check.__name__)
def test_different_ends_of_ranks_are_named(
    check: Callable[[], None], simulated: SimulatedPool
) -> None:
    with pytest.raises(WorkerFailure, match=BAD_ENDS[check]):
        simulated.run(2, check)


def test_textbook_barriers_wait(simulated: SimulatedPool) -> None:
    """Tests barriers, which are made of messages without data."""
    check_barriers(simulated)
