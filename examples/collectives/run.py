"""Runs the rounds on real ranks, over point-to-point messages of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from examples.collectives.forms import check_form, check_name, rounds_of, segments_of
from examples.collectives.messages import Rounds, Sent
from parallel3d.blueprint.cluster import Link
from parallel3d.device.accelerator import is_on_accelerator

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda held, heard: held.add_(heard),
    "mean": lambda held, heard: held.add_(heard),  # divided at the end
    "min": lambda held, heard: torch.minimum(held, heard, out=held),
    "max": lambda held, heard: torch.maximum(held, heard, out=held),
}


def run(
    collective: str,
    form: str,
    buffer: Tensor,
    reduction: str = "sum",
    group: dist.ProcessGroup | None = None,
    link: Link | None = None,
) -> Sent:
    """One collective on `buffer` (count,), in place, by every rank of the group; its first is root.

    Before, rank r's own data are in the whole buffer (broadcast: of the root; reductions) or in
    block r (gathers; of a scatter all are the root's); after, so are the results. What else is in
    the buffer is lost to partial sums. A barrier takes any buffer and leaves it. `link`: what the
    segmented forms choose their segments for; without it they send whole.

    Returns what this rank sent. Raises ValueError for a name that is not there, a buffer that is
    not one contiguous dimension, or a mean of whole numbers: on every rank, before anything is
    sent. Buffers of unlike length are an error of the backend's.
    """
    check_form(collective, form)
    check_name("reduction", reduction, tuple(REDUCTIONS))
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"a buffer of shape {tuple(buffer.shape)} must be one contiguous dimension; the "
            "nearest is buffer.contiguous().view(-1)."
        )
    if reduction == "mean" and not buffer.is_floating_point():
        raise ValueError(f"the mean of {buffer.dtype} must be of floats; the nearest is a sum.")
    n, me = dist.get_world_size(group), dist.get_rank(group)
    segments = segments_of(form, n, buffer.numel(), buffer.element_size(), link)
    sent = run_rounds(rounds_of(collective, form, n, buffer.numel(), segments), buffer,
                      REDUCTIONS[reduction], group)  # fmt: skip
    if reduction == "mean" and is_reduced(collective, me):
        buffer /= n
    return sent


def is_reduced(collective: str, rank: int) -> bool:
    """Whether the rank holds what was reduced afterwards (of a reduce-scatter: in its block)."""
    return collective in ("all_reduce", "reduce_scatter") or (collective == "reduce" and rank == 0)


def run_rounds(
    rounds: Rounds,
    buffer: Tensor,
    reduce: Callable[[Tensor, Tensor], object],
    group: dist.ProcessGroup | None = None,
) -> Sent:
    """Any rounds, on this rank: returns the messages and elements that it sent.

    All messages of a round are posted together, which NCCL needs and gloo allows. What is to be
    reduced comes into memory of its own, what takes a place comes there at once. On an accelerator
    a message of no elements, of which barriers are made, takes one: NCCL may skip an empty one.
    """
    group = group or dist.group.WORLD
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    sent = Sent(0, 0)
    for messages in rounds:
        leaving, coming, sums = [], [], []
        for m in messages:
            if me not in (m.source, m.target):
                continue
            held = buffer[m.start : m.stop]
            if m.count == 0 and is_on_accelerator(buffer):
                held = buffer.new_zeros(1)
            if m.source == me:
                leaving.append(dist.P2POp(dist.isend, held, ranks[m.target], group))
                sent = Sent(sent.messages + 1, sent.elements + m.count)
            else:
                heard = torch.empty_like(held) if m.adds else held
                coming.append(dist.P2POp(dist.irecv, heard, ranks[m.source], group))
                sums += [(held, heard)] if m.adds else []
        posts = coming + leaving  # gloo's sender waits to hear that its receiver is ready
        for work in dist.batch_isend_irecv(posts) if posts else ():
            work.wait()
        for held, heard in sums:
            reduce(held, heard)
    return sent
