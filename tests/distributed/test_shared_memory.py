"""Tests collectives through shared memory: correct at any pace, bounded in time, and without
leftovers."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.comm import collectives, shared_memory
from parallel3d.comm import shared_memory as shared_collectives
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.pipeline.p2p import SLOTS, SharedP2P
from tests.distributed.pool import Pool
from tests.pace import in_time

pytestmark = pytest.mark.nightly


def tp_group(size: int, timeout_s: float = 30.0) -> Group:
    return ProcessGroups.create(Layout(tp=size), "cpu", timeout_s).tp


def value(rank: int, operation: int, rows: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * operation + rank)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(dtype)


def many_operations(size: int) -> int:
    """Runs 300 operations of changing kind, size and dtype, with ranks that are delayed at
    different times."""
    group = tp_group(size)
    assert group.shared is not None
    plan, own = random.Random(0), random.Random(group.index)
    for operation in range(300):
        rows, dtype = size * plan.randrange(1, 400), plan.choice([torch.float32, torch.float64])
        everyone = [value(rank, operation, rows, dtype) for rank in range(size)]
        mine, total = everyone[group.index].clone(), sum(everyone[1:], everyone[0])
        kind = plan.choice(["all_reduce", "all_gather", "reduce_scatter"])
        if own.random() < 0.05:
            time.sleep(0.003)
        got = getattr(collectives, kind)(mine, group)
        expected = {
            "all_reduce": total,
            "all_gather": torch.cat(everyone),
            "reduce_scatter": total.chunk(size)[group.index],
        }[kind]
        if not torch.equal(got, expected):
            return operation
    return -1


def uneven_messages(size: int, most: int | None) -> tuple[int, int]:
    """Runs 60 uneven all-to-alls, some of them empty, between sums; returns the first wrong one,
    and the number that went through shared memory."""
    group = tp_group(size)
    assert group.shared is not None
    plan = random.Random(1)
    before = group.shared.operations
    for operation in range(60):
        counts = [[plan.choice([0, 0, 1, 7, 300]) for _ in range(size)] for _ in range(size)]
        sent = [value(rank, operation, sum(counts[rank]), torch.float64) for rank in range(size)]
        given = counts[group.index]
        taken = [row[group.index] for row in counts]
        as_numbers = [3 * n for n in given], [3 * n for n in taken]
        flat = sent[group.index].reshape(-1)
        got = collectives.all_to_all_uneven(flat, group, *as_numbers, most)
        parts = (sent[rank].split(counts[rank])[group.index] for rank in range(size))
        if not torch.equal(got, torch.cat([part.reshape(-1) for part in parts])):
            return operation, -1
        total = collectives.all_reduce(torch.ones(2), group)
        if total.tolist() != [size, size]:
            return operation, -1
    return -1, group.shared.operations - before - 60


@pytest.mark.parametrize("size", [2, 4])
def test_uneven_messages_use_the_memory_if_they_fit(pool: Pool, size: int) -> None:
    most = 3 * 300 * size
    assert pool.run(size, uneven_messages, size, most) == [(-1, 60)] * size
    too_many = shared_memory.SLOT_BYTES // 8
    assert pool.run(size, uneven_messages, size, too_many) == [(-1, 0)] * size


@pytest.mark.parametrize("size", [2, 4])
def test_three_hundred_mixed_operations_are_exact(pool: Pool, size: int) -> None:
    assert pool.run(size, many_operations, size) == [-1] * size


def overlapped(size: int) -> list[float]:
    group = tp_group(size)
    tensors = [torch.full((5,), float(i)) for i in range(4)]
    works = [collectives.all_reduce_async(tensor, group) for tensor in tensors[:3]]
    works[1].wait()
    works.append(collectives.all_reduce_async(tensors[3], group))  # written before the third
    for work in (works[2], works[0], works[3]):
        work.wait()
    return [tensor[0].item() for tensor in tensors]


def test_operations_in_flight_may_be_waited_for_in_any_order(pool: Pool) -> None:
    assert pool.run(2, overlapped, 2) == [[0.0, 2.0, 4.0, 6.0]] * 2


def other_size(size: int) -> str:
    group = tp_group(size)
    collectives.all_reduce(torch.ones(3), group)
    with pytest.raises(RuntimeError) as failure:
        collectives.all_reduce(torch.ones(3 + group.index), group)
    return str(failure.value)


def test_tensors_of_different_sizes_are_refused_on_both_ranks(pool: Pool) -> None:
    assert pool.run(2, other_size, 2) == [
        "member 1 of the group brought 16 bytes to a collective, but this rank 12",
        "member 0 of the group brought 12 bytes to a collective, but this rank 16",
    ]


def missing_peer(size: int) -> str:
    group = tp_group(size, timeout_s=0.3)
    answer = ""
    if group.index == 0:
        with pytest.raises(TimeoutError) as failure:
            collectives.all_reduce(torch.ones(3), group)
        answer = str(failure.value)
    dist.barrier()
    return answer


def test_a_missing_peer_is_named_after_the_timeout(pool: Pool) -> None:
    answers = pool.run(2, missing_peer, 2)
    assert answers[0] == "member 1 of the group has sent no signal for 0.3 s"


def peer_that_lets_go(size: int) -> str:
    """A process that ends loses its locks; here rank 1 releases its lock and never comes."""
    group = tp_group(size)
    if group.index == 1:
        group.shared.memory.close()
    dist.barrier()
    answer = ""
    if group.index == 0:
        with pytest.raises(ConnectionError) as failure:
            collectives.all_reduce(torch.ones(3), group)
        answer = str(failure.value)
    dist.barrier()
    return answer


def test_a_peer_that_ended_is_named_long_before_the_timeout(pool: Pool) -> None:
    start = time.monotonic()
    assert pool.run(2, peer_that_lets_go, 2)[0] == "member 1 of the group has ended"
    assert in_time(time.monotonic() - start, 10)


def several_large_sums(size: int) -> list[bool]:
    """Runs three sums larger than a slot, started together and waited for in order, like
    buckets."""
    group = tp_group(size)
    count = shared_collectives.SLOT_BYTES // 4 + 12345
    everyone = [torch.arange(count, dtype=torch.float32) * (r + 1) for r in range(size)]
    tensors = [everyone[group.index] + shift for shift in range(3)]
    works = [collectives.all_reduce_async(tensor, group) for tensor in tensors]
    for work in works:
        work.wait()
    sums = [sum((e + shift for e in everyone[1:]), everyone[0] + shift) for shift in range(3)]
    return [torch.equal(a, b) for a, b in zip(tensors, sums, strict=True)]


def test_sums_larger_than_a_slot_are_sent_in_pieces(pool: Pool) -> None:
    assert pool.run(4, several_large_sums, 4) == [[True] * 3] * 4


def without_room(size: int) -> tuple[bool, float]:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.posix_fallocate, before = full, os.posix_fallocate
    try:
        group = tp_group(size)
    finally:
        os.posix_fallocate = before
    return group.shared is None, collectives.all_reduce(torch.ones(1), group).item()


def test_ranks_that_cannot_share_memory_use_the_network(pool: Pool) -> None:
    assert pool.run(4, without_room, 4) == [(True, 4.0)] * 4


def links_of_the_memory(size: int) -> tuple[int, list[str]]:
    """Returns how many names the file has in folders while it is opened, and later in the maps."""
    names = []
    attach, create = shared_memory._attach, shared_memory._create

    def made(*arguments: Any) -> int:
        descriptor = create(*arguments)
        names.append(os.fstat(descriptor).st_nlink)
        return descriptor

    def opened(*arguments: Any) -> int:
        descriptor = attach(*arguments)
        names.append(os.fstat(descriptor).st_nlink)
        return descriptor

    shared_memory._attach, shared_memory._create = opened, made
    try:
        group = tp_group(size)
    finally:
        shared_memory._attach, shared_memory._create = attach, create
    assert group.shared is not None
    collectives.all_reduce(torch.ones(3), group)
    maps = Path("/proc/self/maps").read_text().splitlines()
    # Libraries are private mappings.
    shared = [line for line in maps if line.split()[1].endswith("s")]
    return max(names), [line.split("/", 1)[1] for line in shared if "parallel3d" in line]


def test_the_memory_never_has_a_name_that_could_be_left_behind(pool: Pool) -> None:
    for names, files in pool.run(2, links_of_the_memory, 2):
        assert names == 0
        assert files and all(name == "memfd:parallel3d (deleted)" for name in files)


def other_file(size: int) -> bool:
    """Another process may have the first rank's pid in another PID namespace."""
    attach = shared_memory._attach
    shared_memory._attach = lambda path, identity: attach("/dev/null", identity)
    try:
        return tp_group(size).shared is None
    finally:
        shared_memory._attach = attach


def test_another_file_in_its_place_is_not_used(pool: Pool) -> None:
    assert pool.run(2, other_file, 2) == [True, True]


def wait_with_the_clock_set_back(size: int) -> float:
    """Returns the seconds that a wait of 0.3 s takes if the time of day is set an hour ahead."""
    group = tp_group(size, timeout_s=0.3)
    before = time.time
    time.time = lambda: before() + 3600
    started, answer = time.monotonic(), 0.0
    try:
        if group.index == 0:
            with pytest.raises(TimeoutError):
                collectives.all_reduce(torch.ones(3), group)
            answer = time.monotonic() - started
    finally:
        time.time = before
    assert group.shared.memory.clock == time.CLOCK_MONOTONIC
    dist.barrier()
    return answer


def test_setting_the_clock_moves_no_deadline(pool: Pool) -> None:
    assert in_time(pool.run(2, wait_with_the_clock_set_back, 2)[0], 3)


def messages_in_both_directions(size: int) -> list[bool]:
    """Sends each stage's neighbours numbered messages, at most SLOTS ahead, and checks theirs."""
    pp = ProcessGroups.create(Layout(pp=size), "cpu").pp
    boxes = SharedP2P.open(pp, 30.0)
    assert boxes is not None
    neighbours = [peer for peer in (pp.index - 1, pp.index + 1) if 0 <= peer < size]
    own, right = random.Random(pp.index), []
    for first in range(0, 60, SLOTS):
        for number in range(first, first + SLOTS):
            for peer in neighbours:
                message = value(100 * pp.index + peer, number, 5, torch.float32)
                boxes.send(message, peer)
                message.zero_()  # a sent message does not depend on its tensor
        if own.random() < 0.2:
            time.sleep(0.003)
        for number in range(first, first + SLOTS):
            for peer in neighbours:
                tensor = torch.empty(5, 3)
                boxes.receive(tensor, peer).wait()
                expected = value(100 * peer + pp.index, number, 5, torch.float32)
                right.append(torch.equal(tensor, expected))
    return right


def test_neighbours_get_each_message_once_and_in_order(pool: Pool) -> None:
    for right in pool.run(3, messages_in_both_directions, 3):
        assert len(right) >= 60 and all(right)
