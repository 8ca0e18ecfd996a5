"""Tests reference collectives on real ranks: the backend's results, and exactly the expected
messages.

One run has every form on every number of ranks, in a hundred sizes drawn at random.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from itertools import cycle, product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples.collectives import run as collectives_run
from examples.collectives.compare import Row, WrongResult, check, orders, table
from examples.collectives.compare import compare as compare_forms
from examples.collectives.forms import FORMS, own_block, segments_of
from examples.collectives.run import run
from parallel3d.blueprint.cluster import Link
from parallel3d.device import accelerator
from tests.distributed.pool import Pool
from tests.distributed.simulated import SimulatedPool, here
from tests.reference import collectives as formulas

pytestmark = pytest.mark.more

RANKS = 8
COUNT = 1500
ALL = [(name, form) for name, forms in formulas.FORMS.items() for form in forms]
# At this price, segments have half a kilobyte or more.
LINK = Link(gb_per_s=0.001, latency_us=500.0)
OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "mean": dist.ReduceOp.AVG,
}


def numbers(rank: int, count: int, seed: int) -> Tensor:
    """Returns (count,) small whole numbers, whose sums are exact in any order."""
    return (
        torch.randint(-99, 99, (count,), generator=torch.Generator().manual_seed(seed + rank)) * 1.0
    )


def by_backend(name: str, mine: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup) -> Tensor:
    """Returns (count,), the result of the backend's own collective; zeros where it leaves nothing.

    Blocks are padded to one size if it needs equal ones.
    """
    n, me, count = dist.get_world_size(group), dist.get_rank(group), mine.numel()
    blocks = [own_block(r, n, count) for r in range(n)]
    longest = -(-count // n)
    out = torch.zeros(count)

    def padded(block: Tensor) -> Tensor:
        return torch.nn.functional.pad(block, (0, longest - block.numel()))

    if name == "all_reduce":
        dist.all_reduce(out.copy_(mine), op, group)
    elif name == "reduce":
        dist.reduce(out.copy_(mine), 0, op, group)
    elif name == "broadcast":
        dist.broadcast(out.copy_(mine), 0, group)
    elif name == "reduce_scatter":
        whole = [padded(mine[block]) for block in blocks]
        part = torch.empty(longest)
        dist.reduce_scatter(part, whole, op, group)
        out[blocks[me]] = part[: len(out[blocks[me]])]
    elif name == "scatter":
        part = torch.empty(longest)
        dist.scatter(part, [padded(mine[b]) for b in blocks] if me == 0 else None, 0, group)
        out[blocks[me]] = part[: len(out[blocks[me]])]
    elif name in ("gather", "all_gather"):
        parts = [torch.empty(longest) for _ in range(n)]
        block = padded(mine[blocks[me]])
        if name == "gather":
            dist.gather(block, parts if me == 0 else None, 0, group)
        else:
            dist.all_gather(parts, block, group)
        if name == "all_gather" or me == 0:
            out = torch.cat([p[: b.stop - b.start] for p, b in zip(parts, blocks, strict=True)])
    return out


def seen(name: str, buffer: Tensor, rank: int, n: int) -> Tensor:
    """Returns the part of the buffer that holds this rank's result."""
    if name in ("reduce", "gather") and rank > 0:
        return buffer[:0]
    block = name in ("scatter", "reduce_scatter")
    return buffer[own_block(rank, n, buffer.numel())] if block else buffer


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Collects the numbers of elements of every message that this rank passes to the backend."""
    found: list[int] = []
    post = dist.batch_isend_irecv

    def watched(messages: list[dist.P2POp]) -> list[dist.Work]:
        found.extend(m.tensor.numel() for m in messages if m.op is dist.isend)
        return post(messages)

    with patch.object(dist, "batch_isend_irecv", watched):
        yield found


def compare(seed: int) -> list[str]:
    """Compares every form on every number of ranks with backend and formula, a new size for every
    third; returns the errors of this rank."""
    draw = random.Random(seed)
    groups = {n: dist.new_group(range(n)) for n in range(2, RANKS + 1)}
    reductions, me, count = cycle(OPS), dist.get_rank(), 0
    wrong = []
    for number, (n, (name, form)) in enumerate(product(groups, ALL)):
        if number % 3 == 0:
            count = round(3000 ** draw.random())
        group, reduction = groups[n], next(reductions)
        if me >= n:
            continue
        mine = numbers(me, count, 1000 * number)
        expected = by_backend(name, mine, OPS[reduction], group)
        buffer = torch.full((count,), torch.nan)
        held = own_block(me, n, count) if name in ("gather", "all_gather") else slice(None)
        if me == 0 or name not in ("scatter", "broadcast"):
            buffer[held] = mine[held]
        with counted() as messages:
            said = run(name, form, buffer, reduction, group, LINK)
        what = f"{name} {form} {reduction} of {count} on {n}"
        result = seen(name, buffer, me, n)
        if name != "barrier" and not torch.allclose(
            result, seen(name, expected, me, n), rtol=1e-6, atol=0
        ):
            wrong.append(f"{what}: {result} is not {expected}")
        segments = segments_of(form, n, count, 4, LINK)
        formula = formulas.sends(name, form, n, count, segments)[me]
        if not (len(messages), sum(messages)) == tuple(said) == formula:
            wrong.append(f"{what}: sent {messages}, said {said}, not {formula}")
    return wrong


def test_a_hundred_sizes_give_the_backends_results_with_the_expected_messages(
    pool: Pool,
) -> None:
    assert len(ALL) * (RANKS - 1) >= 3 * 100
    assert pool.run(RANKS, compare, 0) == [[]] * RANKS


def left_barriers(late_rank: int, seconds: float) -> dict[str, tuple[float, float]]:
    """Returns form → the times at which this rank came to the barrier and left it, on a clock that
    all ranks share."""
    times = {}
    for form in FORMS["barrier"]:
        dist.barrier()
        if dist.get_rank() == late_rank:
            time.sleep(seconds)
        came = time.monotonic()
        run("barrier", form, torch.ones(1, device=here()))
        accelerator.synchronize(here())
        times[form] = (came, time.monotonic())
    return times


def check_barriers(pool: Pool | SimulatedPool) -> None:
    """Asserts that no rank leaves before the last one has come."""
    by_rank = pool.run(5, left_barriers, 3, 0.05)
    for form in FORMS["barrier"]:
        assert min(left for _, left in (times[form] for times in by_rank)) >= by_rank[3][form][0]


def test_no_rank_leaves_a_barrier_before_the_last_has_arrived(pool: Pool) -> None:
    check_barriers(pool)


def compared(count: int) -> tuple[list[Row], str]:
    """Returns the example's measurements on this rank, and its output about them."""
    rows = compare_forms(count, 1, LINK, torch.device("cpu"))
    return rows, table(rows)


def test_the_example_times_every_form_and_counts_what_it_sends(pool: Pool) -> None:
    ranks = 3
    (rows, printed), *others = pool.run(ranks, compared, COUNT)
    assert {(row.collective, row.form) for row in rows} == set(ALL)
    assert all(found == rows for found, _ in others)  # the slowest rank's time, on each rank
    for row in rows:
        assert row.seconds > 0 and row.priced > 0
        count = COUNT if row.collective != "barrier" else 0
        segments = segments_of(row.form, ranks, count, 4, LINK)
        sends = formulas.sends(row.collective, row.form, ranks, count, segments)
        assert row.messages == max(each.messages for each in sends)
        assert row.nbytes == 4 * max(each.elements for each in sends)
    for words in ("messages", "double_tree", "recursive_halving", "the cheaper was the faster in"):
        assert words in printed


def test_a_cheaper_form_counts_as_faster_only_if_it_is() -> None:
    def row(form: str, seconds: float, priced: float, name: str = "reduce") -> Row:
        return Row(name, form, 1, 1, seconds, priced)

    rows = [row("chain", 1.0, 1.0), row("tree", 2.0, 1.1), row("naive", 1.5, 2.0)]
    assert orders([*rows, row("ring", 9.0, 0.1, "barrier")]) == (2, 1)


def leave_out_an_addition() -> str:
    """Returns the example's report on a sum that lacks rank 1's message."""

    def forgetful(held: Tensor, heard: Tensor) -> None:
        if dist.get_rank() != 1:
            held.add_(heard)

    with patch.dict(collectives_run.REDUCTIONS, {"sum": forgetful}):
        try:
            check("reduce_scatter", "ring", 8, LINK, torch.device("cpu"))
        except WrongResult as error:
            return str(error)
    return ""


def test_a_form_that_leaves_a_wrong_sum_is_found(pool: Pool) -> None:
    fine, wrong = pool.run(2, leave_out_an_addition)
    assert fine == ""
    assert wrong.startswith("reduce_scatter as ring: rank 1 of 2 holds")


def refused() -> list[str]:
    """Returns this rank's errors for impossible calls; nothing must be sent."""
    flat = torch.ones(8)
    calls = [
        ("all_reduce", "star", flat, "sum"),
        ("all_reduce", "ring", flat, "product"),
        ("all_reduce", "ring", torch.ones(2, 4), "sum"),
        ("all_reduce", "ring", torch.ones(16)[::2], "sum"),
        ("all_reduce", "ring", torch.ones(8, dtype=torch.int64), "mean"),
    ]
    said = []
    with patch.object(collectives_run, "run_rounds", side_effect=AssertionError("sent")):
        for call in calls:
            with pytest.raises(ValueError, match="must be") as error:
                run(*call)
            said.append(str(error.value))
    return said


def test_invalid_calls_are_refused_on_every_rank_without_a_message(pool: Pool) -> None:
    first, second = pool.run(2, refused)
    assert first == second
    for line, words in zip(first, ("'star'", "'product'", "(2, 4)", "(8,)", "int64"), strict=True):
        assert words in line and "the nearest is" in line
