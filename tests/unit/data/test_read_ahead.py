"""Tests that samples read ahead are the requested ones, whatever thread reads them and whatever
errors occurred."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

from parallel3d.data.loader import Batches, ReadAhead
from parallel3d.data.sampler import Sample

SEQ = 4
WAIT_S = 60


class Numbered:
    """A source that makes sample i from i, records reads and their threads, and can fail or
    wait."""

    seq_length, masks = SEQ, True

    def __init__(self) -> None:
        self.read: list[int] = []
        self.told: list[int] = []
        self.threads: set[int] = set()
        self.changed = threading.Condition()
        self.bad: set[int] = set()

    def will_read(self, i: int) -> None:
        self.told.append(i)

    def sample(self, i: int) -> Sample:
        with self.changed:
            self.read.append(i)
            self.threads.add(threading.get_ident())
            self.changed.notify_all()
        if i in self.bad:
            raise OSError(f"sample {i} cannot be read")
        return Sample(np.full(SEQ + 1, i, np.int64), np.arange(SEQ) < i % SEQ)

    def wait_for(self, count: int) -> list[int]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.read) >= count, WAIT_S)
            return list(self.read)


def test_the_next_step_is_read_while_this_one_is_taken() -> None:
    source = Numbered()
    ahead = ReadAhead(source, offset=3, share=3, stride=6)
    ahead.step(0)
    assert source.wait_for(6) == [3, 4, 5, 9, 10, 11] == source.told
    assert [int(ahead.sample(i).tokens[0]) for i in (3, 4, 5)] == [3, 4, 5]
    assert source.wait_for(9)[6:] == [15, 16, 17]
    assert threading.get_ident() not in source.threads


def test_at_most_this_step_and_the_next_are_held() -> None:
    source = Numbered()
    ahead = ReadAhead(source, 0, 4, 4)
    for first in range(0, 400, 4):
        ahead.step(first)
        for i in range(first, first + 4):
            assert ahead.sample(i, keep=True).tokens[0] == i
        assert [int(ahead.sample(i).tokens[0]) for i in range(first, first + 4)] == list(
            range(first, first + 4)
        )
    assert max(source.read) < 400 + 8 and sorted(source.read) == list(range(len(source.read)))


def test_a_run_that_jumps_reads_from_its_new_position() -> None:
    source = Numbered()
    ahead = ReadAhead(source, 0, 2, 2)
    for first in (0, 2, 100, 102, 4, 4, 6):
        ahead.step(first)
        assert [int(ahead.sample(first + k).tokens[0]) for k in (0, 1)] == [first, first + 1]


def test_a_sample_that_was_not_read_ahead_is_read_at_once() -> None:
    source = Numbered()
    ahead = ReadAhead(source, 0, 2, 2)
    assert ahead.sample(50).tokens[0] == 50
    ahead.step(0)
    assert ahead.sample(77).tokens[0] == 77
    assert ahead.sample(1).tokens[0] == 1
    assert ahead.sample(1).tokens[0] == 1


def test_an_error_is_raised_when_the_sample_is_taken_and_not_before() -> None:
    source = Numbered()
    source.bad = {3}
    ahead = ReadAhead(source, 0, 2, 2)
    ahead.step(0)
    source.wait_for(4)
    assert ahead.sample(0).tokens[0] == 0 and ahead.sample(1).tokens[0] == 1
    ahead.step(2)
    assert ahead.sample(2).tokens[0] == 2
    with pytest.raises(OSError, match="sample 3 cannot be read"):
        ahead.sample(3)
    ahead.step(4)
    assert ahead.sample(4).tokens[0] == 4


def test_the_thread_ends_with_its_reader() -> None:
    before = set(threading.enumerate())
    ahead = ReadAhead(Numbered(), 0, 2, 2)
    ahead.step(0)
    (thread,) = set(threading.enumerate()) - before
    gone = weakref.ref(ahead)
    del ahead
    gc.collect()
    thread.join(WAIT_S)
    assert gone() is None and not thread.is_alive()


@pytest.mark.parametrize(("dp", "size"), [(1, 4), (2, 3), (3, 2), (4, 1)])
def test_micro_batches_are_the_same(dp: int, size: int) -> None:
    count = 12 // (dp * size)
    for rank in range(dp):
        usual = Batches(Numbered(), size, count, rank, "cpu")
        ahead = Batches(Numbered(), size, count, rank, "cpu", stride=12)
        for first in (0, 12, 24, 36):
            assert usual.token_count(first) == ahead.token_count(first)
            for m in range(count):
                one, other = usual.micro_batch(first, m), ahead.micro_batch(first, m)
                assert all(map(torch.equal, one[:3], other[:3]))
                assert torch.equal(one.inputs.samples, other.inputs.samples)


def test_a_batch_of_another_size_reads_its_own_share_ahead() -> None:
    source = Numbered()
    batches = Batches(source, 2, 1, 1, "cpu", stride=4)
    assert batches.micro_batch(0, 0).inputs.samples.tolist() == [2, 3]
    assert source.wait_for(4)[:4] == [2, 3, 6, 7]
    batches.resize(2, 8)
    assert [batches.micro_batch(4, m).inputs.samples.tolist() for m in (0, 1)] == [[8, 9], [10, 11]]
    ahead = {8, 9, 10, 11, 16, 17, 18, 19}
    with source.changed:
        assert source.changed.wait_for(lambda: ahead <= {*source.read}, WAIT_S)
    with pytest.raises(IndexError):
        batches.indices(4, 2)
