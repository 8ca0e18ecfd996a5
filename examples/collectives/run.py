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
    """Runs a collective in place on `buffer` (count,), on every rank; the group's first is root.

    Before the call rank r's data fill the whole buffer (broadcast: the root's; reductions) or are
    in block r (gathers; for a scatter all blocks are in the root's buffer). After it the results
    are in the same places; the rest of the buffer may hold partial sums. A barrier leaves its
    buffer as it is. The segmented forms choose their number of segments for `link`; without it they
    use one.

    Returns what this rank sent. Raises ValueError for an unknown name, a buffer that is not one
    contiguous dimension, or a mean of whole numbers: on every rank, before anything is sent. The
    backend raises an error if the buffers' lengths differ.
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
    """Returns whether the rank holds the reduced result (for a reduce-scatter: in its block)."""
    return collective in ("all_reduce", "reduce_scatter") or (collective == "reduce" and rank == 0)


def run_rounds(
    rounds: Rounds,
    buffer: Tensor,
    reduce: Callable[[Tensor, Tensor], object],
    group: dist.ProcessGroup | None = None,
) -> Sent:
    """Runs any rounds on this rank; returns the messages and elements that it sent.

    All messages of a round are posted together, which NCCL needs and gloo allows. Data to be
    reduced is received into separate memory, other data directly into its place. On an accelerator
    the empty messages of barriers get one element, since NCCL may skip empty ones.
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
