"""Calls the kernel of flash-linear-attention for the gated delta rule (`delta_kernel=fla`)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel3d.context_parallel.documents import AttentionBlocks
from parallel3d.device import accelerator

MODULE = "fla.ops.gated_delta_rule"


def rule_by_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    cuts: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Does the same as `delta_rule` by the package's kernel; the state is None if none is given.

    `cuts`: where documents begin among the b · s tokens, followed by b · s, as in `cuts_of`; None:
    no document begins within a row.
    """
    rule = import_module(MODULE).chunk_gated_delta_rule
    times, (rows, length) = v.shape[2] // q.shape[2], v.shape[:2]
    if times > 1:
        q, k = (x.repeat_interleave(times, dim=2) for x in (q, k))
    how: dict[str, Any] = {"scale": 1.0, "output_final_state": state is not None}
    if cuts is None:
        found: tuple[Tensor, Tensor | None] = rule(q, k, v, g, beta, initial_state=state, **how)
        return found
    first_of_row = [cuts.index(row * length) for row in range(rows)]
    last_of_row = [*(at - 1 for at in first_of_row[1:]), len(cuts) - 2]
    states = None
    if state is not None:
        at = torch.tensor(first_of_row, device=v.device)
        states = state.new_zeros(len(cuts) - 1, *state.shape[1:]).index_copy(0, at, state)
    flat = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta))
    edges = accelerator.moved(torch.tensor(cuts), v.device)
    out, after = rule(*flat, initial_state=states, cu_seqlens=edges, **how)
    return out.view_as(v), None if state is None else after[torch.tensor(last_of_row)]


def cuts_of(blocks: AttentionBlocks, tokens: int, length: int) -> Tensor:
    """Returns where documents and rows of `length` tokens begin among all tokens, and their number.

    The result is int64 on the host.

    `blocks` has the segments of samples of `tokens` tokens each (`AttentionBlocks.table`).
    """
    table = blocks.table[0].numpy()
    segments = table[1 : table[0, 0] + 1]
    firsts = segments[:, 0] * tokens + segments[:, 1]
    total = int(segments[:, 2].sum())
    return torch.from_numpy(np.union1d(firsts, np.arange(0, total + 1, length)).astype(np.int64))
