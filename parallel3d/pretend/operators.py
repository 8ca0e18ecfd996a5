"""What is known of PyTorch's operators: which launch a kernel, what it reads and writes, at what
cost where the sizes of the tensors do not say it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

# Operators that make a tensor without filling it, or tell something about one: no kernel.
_NO_KERNEL = frozenset(
    ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "detach",
     "alias", "lift_fresh", "lift", "_unsafe_view", "_reshape_alias", "set_", "sym_size",
     "sym_stride", "sym_numel", "sym_storage_offset", "is_same_size")
)  # fmt: skip
# Written without being read, though their names end like those that change a tensor.
_OVERWRITING = frozenset(
    ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "_foreach_copy_",
     "_foreach_zero_")
)  # fmt: skip
# The host waits for their result, or for its size.
HOST_WAITS = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
     "bincount", "is_nonzero")
)  # fmt: skip
# Tensors that one launch of PyTorch's multi-tensor kernels takes, by the number of lists.
_BY_LISTS = {1: 110, 2: 64, 3: 48, 4: 36}


class OverloadFacts(NamedTuple):
    """Of one overload: `written` and `read` are the names of arguments that are tensors."""

    name: str
    launches: bool
    waits: bool
    written: frozenset[str]
    read: frozenset[str]
    arguments: tuple[str, ...]
    in_place: bool


@functools.cache
def facts_of(operator: Any) -> OverloadFacts:
    """What the schema says, and the names above."""
    schema = operator._schema
    name = schema.name.partition("::")[2]
    written, read = set(), set()
    for argument in schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written.add(argument.name)
        if not is_written or not (argument.is_out or name in _OVERWRITING):
            read.add(argument.name)
    is_view = operator.is_view and not written
    names = tuple(argument.name for argument in schema.arguments)
    launches = not is_view and name not in _NO_KERNEL
    in_place = bool(written)
    return OverloadFacts(
        name, launches, name in HOST_WAITS, frozenset(written), frozenset(read), names, in_place
    )


def launches_of(facts: OverloadFacts, tensors: Sequence[Sequence[Tensor]]) -> int:
    """Kernels that a GPU launches for an operator; `tensors`: of its lists of tensors."""
    if not (facts.name.startswith("_foreach_") or facts.name.startswith("_fused_adam")):
        return 1
    lists = [t for t in tensors if len(t) > 1 or t]
    if not lists:
        return 1
    count = max(len(t) for t in lists)
    a_launch = _BY_LISTS.get(len([t for t in lists if len(t) == count]), 36)
    # Large tensors are cut into chunks of 64 Ki elements, of which a launch takes 320.
    chunks = sum(-(-t.numel() // 65536) for t in max(lists, key=len))
    launches = max(-(-count // a_launch), -(-chunks // 320))
    return launches + (1 if facts.name == "_foreach_norm" else 0)


def _bytes(t: Tensor) -> int:
    return t.numel() * t.itemsize


def touched(facts: OverloadFacts, arguments: dict[str, Any], out: Any) -> dict[str, int]:
    """Bytes of an argument that are touched, where that is not the whole of the tensor.

    A lookup reads the rows that it is asked for, and an addition into rows those alone.
    """
    rule = _TOUCHED.get(facts.name)
    return {} if rule is None else rule(arguments, out)


def _lookup(table: str) -> Callable[[dict[str, Any], Any], dict[str, int]]:
    return lambda arguments, out: {table: _bytes(out)}


def _rows_added(source: str) -> Callable[[dict[str, Any], Any], dict[str, int]]:
    def rule(arguments: dict[str, Any], out: Any) -> dict[str, int]:
        table, rows = arguments["self"], arguments[source]
        return {"self": min(_bytes(table), rows.numel() * table.itemsize)}

    return rule


_TOUCHED: dict[str, Callable[[dict[str, Any], Any], dict[str, int]]] = {
    "embedding": _lookup("weight"),
    "index_select": _lookup("self"),
    "gather": _lookup("self"),
    "index_add_": _rows_added("source"),
    "scatter_add_": _rows_added("src"),
}
