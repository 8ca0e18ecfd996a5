"""Which parameters a backward will not reach, read from the graph before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def unreached(outputs: Iterable[Tensor], numbers: Mapping[nn.Parameter, int]) -> set[int]:
    """Numbers of the parameters from which no output was computed.

    Walks the graph of autograd: what it takes is Python's time for each of its nodes.
    """
    left = dict(numbers)
    nodes: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes and left:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            left.pop(variable, None)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    for tensor in outputs:
        left.pop(tensor, None)  # a parameter itself
    return set(left.values())
