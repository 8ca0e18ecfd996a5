"""The cases that the tests train and compare with the reference, of all their modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.distributed import (
    matrix,
    test_fully_sharded,
    test_hierarchical,
    test_model_options,
    test_overlap,
    test_precision,
)
from tests.distributed.cases import Case
from tests.distributed.harness import Sizes


def exact_cases() -> Iterator[tuple[Sizes, Case]]:
    """Yields (tp, pp, dp), or (tp, pp, dp, cp), and the case.

    Those of `test_precision` are compared by losses and norms.
    """
    yield from ((matrix.layout(levels), matrix.case(levels)) for levels in matrix.chosen().found)
    for sizes in test_precision.LAYOUTS:
        yield from ((sizes, case) for case in test_precision.low_precision_cases(*sizes))
    yield from ((sizes, test_hierarchical.CASE) for sizes in test_hierarchical.LAYOUTS)
    listed: Iterable[tuple[Sizes, list[Case]]] = [
        *test_overlap.RUNS.items(),
        *test_model_options.CASES,
        *test_fully_sharded.CASES.items(),
        ((1, 1, 4), test_fully_sharded.COPIES),
    ]
    for sizes, cases in listed:
        yield from ((sizes, case) for case in cases)
    for levels in matrix.on_streams():
        case = matrix.case(levels)
        yield matrix.layout(levels), replace(case, keys=(*case.keys, ("device", "simulated")))
