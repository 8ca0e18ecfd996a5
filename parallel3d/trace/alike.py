"""Tells which blocks of a user's own model compute alike, so that one trace is enough for them.

Two blocks do if their modules, what these hold, and the code of their classes are equal. The number
of the layer distinguishes them only if a method reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

DEPTH = 4  # of objects within objects
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # what torch keeps in each module, such as its hooks


def facts_of(module: nn.Module, number: int) -> list[Any]:
    """Returns what a module may compute by, beside its parameters, to be compared as a text.

    `number`: the number of the layer.
    """
    found: list[Any] = []
    every = [(path, each, [*_methods(type(each))]) for path, each in module.named_modules()]
    # A module may read the number that another one holds, as self.child.number.
    read = {name for *_, methods in every for m in methods for name in _names(m.__code__)}
    for path, each, methods in every:
        for name, value in vars(each).items():
            may_be_number = bool(methods) and type(value) is int and value == number
            # What a torch class keeps for itself follows from its sizes.
            counts = name not in OF_EVERY_MODULE if methods else not name.startswith("_")
            if counts and not (may_be_number and name not in read):
                found.append((path, name, _facts(value, DEPTH)))
            elif name.endswith(("ward_hooks", "ward_pre_hooks")):  # forward or backward
                found.append((path, name, _facts([*value.values()], DEPTH)))
        buffers = each.named_buffers(recurse=False)
        found += [(path, name, _facts(buffer, DEPTH)) for name, buffer in buffers]
        found += [(path, _facts(method, DEPTH)) for method in methods]
    return found


def _methods(cls: type) -> Iterator[FunctionType]:
    """Yields the methods of a user's class that run after its modules are built."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, value in vars(base).items():
                if isinstance(value, property):
                    value = value.fget
                elif isinstance(value, functools.cached_property):
                    value = value.func
                elif isinstance(value, staticmethod | classmethod):
                    value = value.__func__
                if isinstance(value, FunctionType) and name != "__init__":
                    yield value


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names of attributes and globals that a code reads, also within lambdas."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable has no value now
            yield None


def _facts(value: Any, depth: int) -> Any:
    """Describes a value by its content; functions by their code and what they close over."""
    if isinstance(value, nn.Module):
        return repr(value)
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, MethodType):
        return _facts(value.__func__, depth)
    if isinstance(value, functools.partial):
        return [_facts(each, depth) for each in (value.func, value.args, value.keywords)]
    if isinstance(value, FunctionType):
        held = [*_closed_over(value), *(value.__defaults__ or ())]
        held += (value.__kwdefaults__ or {}).values()
        return id(value.__code__), [_facts(each, depth - 1) for each in held if depth]
    if isinstance(value, Mapping):
        return [(repr(key), _facts(each, depth - 1)) for key, each in value.items() if depth]
    if isinstance(value, list | tuple):
        return [_facts(each, depth - 1) for each in value if depth]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        about = [(name, _facts(each, depth - 1)) for name, each in vars(value).items() if depth]
        return type(value).__qualname__, about
    return repr(value)
