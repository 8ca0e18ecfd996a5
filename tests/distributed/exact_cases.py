"""The cases that the tests train and compare with the reference, of all their modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.distributed import (
    test_context_parallel,
    test_documents,
    test_engines,
    test_exactness,
    test_fully_sharded,
    test_hierarchical,
    test_model_options,
    test_overlap,
    test_precision,
    test_schedules,
    test_simulated_exactness,
)
from tests.distributed.cases import Case
from tests.distributed.harness import Sizes


def exact_cases() -> Iterator[tuple[Sizes, Case]]:
    """Yields (tp, pp, dp), or (tp, pp, dp, cp), and the case.

    Those of `test_precision` are compared by losses and norms.
    """
    for sizes in test_exactness.LAYOUTS:
        yield from ((sizes, case) for case in test_exactness.all_cases(*sizes))
    for sizes in test_precision.LAYOUTS:
        yield from ((sizes, case) for case in test_precision.low_precision_cases(*sizes))
    yield from test_engines.all_cases()
    yield from ((sizes, test_hierarchical.CASE) for sizes in test_hierarchical.LAYOUTS)
    yield from map(test_context_parallel.sizes_and_case, test_context_parallel.chosen_levels())
    for module in (test_schedules, test_documents):
        yield from ((levels.layout, levels.case()) for levels in module.chosen_levels())
    listed: Iterable[tuple[Sizes, list[Case]]] = [
        *test_overlap.RUNS.items(),
        *test_model_options.CASES,
        *test_fully_sharded.CASES.items(),
        ((1, 1, 4), test_fully_sharded.COPIES),
    ]
    for sizes, cases in listed:
        yield from ((sizes, case) for case in cases)
    for sizes, case in test_simulated_exactness.all_cases():
        yield sizes, replace(case, keys=(*case.keys, ("device", "simulated")))
