"""A pipeline's modules as one list: which stage each lies in, and their state dict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import Group
from parallel3d.errors import UserError
from parallel3d.schedules.placement import StageAssignment


def stages_of(
    modules: Sequence[nn.Module], placement: StageAssignment, split: Sequence[int] | None
) -> list[range]:
    """The modules of each stage. Raises UserError where they do not fill the stages."""
    count, stages = len(modules), placement.stages
    for i, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise UserError(f"module {i} of the pipeline must be an nn.Module, not {module!r}")
    if count < stages:
        raise UserError(
            f"the pipeline's {count} modules must be at least as many as its {stages} stages "
            f"({placement.ranks} ranks × {placement.chunks}): cut them finer, or take fewer ranks"
        )
    fair = even_split(count, placement)
    counts = fair if split is None else list(split)
    if len(counts) != stages or min(counts) < 1 or sum(counts) != count:
        raise UserError(
            f"Pipeline(split={counts}) must give each of {stages} stages at least one of the "
            f"{count} modules and leave none out; the nearest is split={fair}"
        )
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - size, end) for size, end in zip(counts, ends, strict=True)]


def even_split(count: int, placement: StageAssignment) -> list[int]:
    """Says how many of `count` equal modules each stage gets: one at least, and no rank more than
    one beyond another, over all of its stages. Of a rank's stages, and of ranks, those closest to
    the middle of the model get what is left over, as in `sizes.balance`."""
    stages, middle = range(placement.stages), placement.stages - 1
    ranks = [rank for rank, _ in placement.places]
    counts, left = [1] * placement.stages, count - placement.stages
    held, least = [placement.chunks] * placement.ranks, count // placement.ranks
    for given in range(left):
        # Ranks are filled to the least that each gets first, then some by one more.
        most = least + (given >= least * placement.ranks - placement.stages)
        stage = min(
            (s for s in stages if held[ranks[s]] < most),
            key=lambda s: (counts[s], abs(2 * s - middle), s),
        )
        counts[stage] += 1
        held[ranks[stage]] += 1
    return counts


def refuse_sharing(
    modules: Sequence[nn.Module], stages: Sequence[range], placement: StageAssignment
) -> None:
    """Raises UserError for a parameter in stages of two ranks: their copies would drift apart."""
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, members in enumerate(stages):
        rank = placement.places[stage][0]
        for i in members:
            for name, parameter in modules[i].named_parameters():
                first, known = seen.setdefault(parameter, (rank, f"{i}.{name}"))
                if first != rank:
                    raise UserError(
                        f"{i}.{name} is the same parameter as {known}, but lies on another rank "
                        "of the pipeline: what is shared must lie on one"
                    )


def whole_state_dict(own: Mapping[str, Any], group: Group, device: torch.device) -> dict[str, Any]:
    """What all ranks hold, by the modules' order, on every one of them; collective."""
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    facts = [[name, list(t.shape), str(t.dtype)] for name, t in tensors.items()]
    whole: dict[str, Any] = {}
    for index, theirs in enumerate(all_gather_json(facts, group.handle, device)):
        for name, shape, word in theirs:
            if index == group.index:
                mine = tensors[name].detach().contiguous()
                whole[name] = tensors[name]
            else:
                dtype = getattr(torch, word.removeprefix("torch."))
                mine = whole[name] = torch.empty(shape, dtype=dtype, device=device)
            if math.prod(shape):
                collectives.broadcast(mine.view(-1).view(torch.uint8), index, group)
    return {name: whole[name] for name in sorted(whole, key=lambda n: int(n.partition(".")[0]))}


def load_own(state_dict: Mapping[str, Any], mine: set[str], count: int) -> dict[str, Any]:
    """Without what belongs to others of the `count` modules."""
    others = {str(i) for i in range(count)} - mine
    return {k: v for k, v in state_dict.items() if k.partition(".")[0] not in others}
