"""The cases that the tests train and compare with the reference, of all their modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.distributed import matrix, test_fully_sharded, test_model_options
from tests.distributed.cases import Case
from tests.distributed.harness import Sizes


def exact_cases() -> Iterator[tuple[Sizes, Case]]:
    """Yields (tp, pp, dp), or (tp, pp, dp, cp), and the case."""
    yield from ((matrix.layout(levels), matrix.case(levels)) for levels in matrix.chosen().found)
    listed: Iterable[tuple[Sizes, list[Case]]] = [
        *test_model_options.CASES,
        *test_fully_sharded.CASES.items(),
    ]
    for sizes, cases in listed:
        yield from ((sizes, case) for case in cases)
    for levels in matrix.on_streams():
        case = matrix.case(levels)
        yield matrix.layout(levels), replace(case, keys=(*case.keys, ("device", "simulated")))
