"""Tests that remembered results of operators on meta tensors equal those of the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.private_names import storage_address
from parallel3d.simulated_device.meta_results import MetaResults

aten = torch.ops.aten


class Calls(TorchDispatchMode):
    """Counts the operators that reach PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.names.append(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def geometry(value: Any) -> Any:
    if isinstance(value, Tensor):
        size = value.untyped_storage().nbytes()
        return tuple(value.shape), value.stride(), value.dtype, value.device.type, size
    return tuple(map(geometry, value)) if isinstance(value, (list, tuple)) else value


def address(tensor: Tensor) -> int:
    return storage_address(tensor.untyped_storage())


HALF = torch.bfloat16
CASES: list[tuple[Callable[..., Any], Callable[[], list[Any]], dict[str, Any]]] = [
    (aten.mm.default, lambda: [meta(3, 4).t(), meta(3, 5)], {}),
    (aten.mul.Tensor, lambda: [meta(3, 1, dtype=HALF), meta(2).expand(3, 2)], {}),
    (aten.mul.Tensor, lambda: [meta(3, dtype=HALF), torch.tensor(2.0)], {}),
    (aten.add.Tensor, lambda: [meta(3), meta(3)], {"alpha": 2}),
    (aten.sum.dim_IntList, lambda: [meta(3, 4, dtype=HALF), [1]], {"dtype": torch.float32}),
    (aten.topk.default, lambda: [meta(3, 8), 2], {}),
    (aten.cat.default, lambda: [[meta(3, 2), meta(1, 2)]], {}),
    (aten.clone.default, lambda: [meta(4, 3).t()], {}),
    (aten.sigmoid.default, lambda: [meta(2, 3, 4).transpose(0, 2)], {}),
    (aten.native_layer_norm.default, lambda: [meta(3, 4), [4], meta(4), meta(4), 1e-5], {}),
    (aten.index.Tensor, lambda: [meta(3, 4), [None, meta(2, dtype=torch.int64)]], {}),
    (aten.new_zeros.default, lambda: [meta(3), [2, 2]], {}),
]


@pytest.mark.parametrize(
    ("operator", "arguments", "named"), CASES, ids=[str(case[0]) for case in CASES]
)
def test_results_are_made_without_the_operator(
    operator: Callable[..., Any], arguments: Callable[[], list[Any]], named: dict[str, Any]
) -> None:
    results = MetaResults()
    first = results.run(operator, arguments(), named)
    again = arguments()
    with Calls() as calls:
        second = results.run(operator, again, named)
    assert geometry(first) == geometry(second) == geometry(operator(*arguments(), **named))
    assert {*calls.names} == {"empty_strided"}


def test_operators_in_place_return_their_argument_without_running() -> None:
    results = MetaResults()
    for _ in range(2):
        target, other = meta(3), meta(3)
        with Calls() as calls:
            assert results.run(aten.add_.Tensor, [target, other], {}) is target
            assert results.run(aten._foreach_add_.List, [[target], [other]], {}) is None
    assert calls.names == []


def test_memory_that_an_argument_shares_is_never_replaced() -> None:
    results = MetaResults()
    for _ in range(2):
        source, out = meta(2, 3), meta(2)
        viewed = results.run(aten._unsafe_view.default, [source, [3, 2]], {})
        assert address(viewed) == address(source)
        given = results.run(aten.sum.IntList_out, [source, [1]], {"out": out})
        assert address(given) == address(out)
        turned = meta(2, 3)
        assert results.run(aten.transpose_.default, [turned, 0, 1], {}) is turned
        assert turned.shape == (3, 2)


def test_arguments_that_are_equal_but_of_other_types_have_their_own_results() -> None:
    results = MetaResults()
    whole = meta(3, dtype=torch.int64)
    made = [results.run(aten.mul.Scalar, [whole, n], {}).dtype for n in (1, 1.0, True, 1, 1.0)]
    assert made == [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32]


def test_a_tensor_that_is_given_twice_stands_for_no_other_pair() -> None:
    results = MetaResults()
    same, target, factor = meta(3), meta(3), meta(3)
    assert results.run(aten.mul_.Tensor, [same, same], {}) is same
    assert results.run(aten.mul_.Tensor, [target, factor], {}) is target


def test_the_default_dtype_decides_what_whole_numbers_become() -> None:
    results, before = MetaResults(), torch.get_default_dtype()
    for dtype in (torch.float32, HALF, torch.float32):
        try:
            torch.set_default_dtype(dtype)
            made = results.run(aten.mul.Scalar, [meta(3, dtype=torch.int64), 1.5], {})
        finally:
            torch.set_default_dtype(before)
        assert made.dtype == dtype


def test_numbers_that_change_at_each_step_do_not_fill_the_memory() -> None:
    results, target = MetaResults(most=3), meta(3)
    ran = []
    for factor in (1.0, 2.0, 1.0, 3.0, 1.0, 4.0, 1.0):
        with Calls() as calls:
            results.run(aten.mul_.Scalar, [target, factor], {})
        ran.append("mul_" in calls.names)
    assert ran == [True, True, False, True, False, True, True]  # forgotten before the fourth


def test_values_on_the_host_decide_sizes() -> None:
    results = MetaResults()
    for counts in ([1, 2], [4, 4]):
        repeats = torch.tensor(counts)
        made = results.run(aten.repeat_interleave.Tensor, [repeats], {})
        assert made.shape == (sum(counts),)


def test_a_wrong_call_raises_each_time() -> None:
    results = MetaResults()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reduction dim"):
            results.run(aten.mm.default, [meta(3, 4), meta(3, 4)], {})
