"""Tests samples of any form: how they are stacked, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from parallel3d.data.loader import Batches, OwnMicroBatch
from parallel3d.data.sampler import FirstSamples, Sample
from parallel3d.errors import UserError


class Images:
    """Samples with an image, a class and a weight."""

    def sample(self, i: int) -> dict[str, Any]:
        image = np.full((2, 3), i, dtype=np.float32)
        return {"image": image, "label": i % 3, "weight": torch.tensor(i / 2), "seen": i % 2 == 0}


class Named:
    """A source of given samples."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def sample(self, i: int) -> Any:
        return self.samples[i]


def batches(source: Any, micro: int = 2, dtype: torch.dtype = torch.float64) -> Batches:
    return Batches(source, micro, 2, 1, "cpu", fields_in=dtype)


def fields(source: Any, **named: Any) -> Mapping[str, torch.Tensor]:
    batch = batches(source, **named).micro_batch(0, 0)
    assert isinstance(batch, OwnMicroBatch)
    return batch.inputs.batch


def test_fields_are_stacked_and_floats_get_the_compute_dtype() -> None:
    batch = batches(Images()).micro_batch(8, 1)  # the second micro-batch of the second replica
    assert len(batch) == 1
    inputs = batch.inputs
    assert inputs.samples.tolist() == [14, 15]
    assert {name: (tuple(field.shape), field.dtype) for name, field in inputs.batch.items()} == {
        "image": ((2, 2, 3), torch.float64),
        "label": ((2,), torch.int64),
        "weight": ((2,), torch.float64),
        "seen": ((2,), torch.bool),
    }
    assert inputs.batch["image"][1].unique().tolist() == [15.0]
    assert inputs.batch["weight"].tolist() == [7.0, 7.5]
    assert fields(Images(), dtype=torch.bfloat16)["image"].dtype == torch.bfloat16


def test_a_text_has_tokens_labels_and_the_mask() -> None:
    text = Sample(np.arange(5, dtype=np.uint16), np.array([1, 1, 0, 1], bool))
    found = fields(Named(*[text] * 6))
    assert found["tokens"].tolist() == [[0, 1, 2, 3]] * 2
    assert found["labels"].tolist() == [[1, 2, 3, 4]] * 2
    assert found["loss_mask"].tolist() == [[True, True, False, True]] * 2
    assert [field.dtype for field in found.values()] == [torch.int64, torch.int64, torch.bool]


def test_other_models_get_no_fields() -> None:
    text = Sample(np.arange(5), np.ones(4, bool))
    assert Batches(Named(text, text), 2, 1, 0, "cpu").micro_batch(0, 0).inputs.batch == {}


def test_samples_beyond_the_last_are_masked() -> None:
    source = Named({"x": 1.0, "loss_mask": 1.0}, {"x": 2.0, "loss_mask": 0.5})
    found = [FirstSamples(source, 2).sample(i) for i in range(4)]  # type: ignore[arg-type]
    assert [each["x"] for each in found] == [1.0, 2.0, 2.0, 2.0]
    assert [float(each["loss_mask"]) for each in found] == [1.0, 0.5, 0.0, 0.0]


def test_texts_beyond_the_last_are_masked_for_a_source_without_a_length() -> None:
    text = Sample(np.arange(5), np.array([1, 1, 0, 1], bool))
    last = FirstSamples(Named(text), 1).sample(1)  # type: ignore[arg-type]
    assert last.loss_mask.tolist() == [False] * 4


ONE = {"x": 1.0, "y": 2}
BAD: dict[str, tuple[list[Any], str]] = {
    "a list": ([[1.0]], "sample 4 is of type list, but a sample must be a p3d.Sample, or a mappi"),
    "numbers as names": ([{0: 1.0}], "sample 4 is of type dict, but a sample must be"),
    "nothing": ([{}], "sample 4 has no field"),
    "text": ([{"x": "cat"}], "the field x of sample 4 is of type str .*but a field must be a numb"),
    "an object": ([{"x": None}], "the field x of sample 4 is of type NoneType, but a field must"),
    "rows": ([{"x": [[1], [1, 2]]}], "the field x of sample 4 is of type list, but a field"),
    "complex": ([{"x": 1j}], "of type complex with elements of complex128, but a field must be"),
    "another name": ([ONE, {"x": 1.0}], "sample 5 has the fields x, but sample 4 has x, y; all"),
    "another shape": (
        [ONE, {"x": np.ones(2), "y": 1}],
        r"the field x of sample 5 has shape \(2,\), but that of sample 4 has \(\); all",
    ),
    "another type": (
        [ONE, {"x": 1, "y": 1}],
        "the field x of sample 5 is of type int64, but that of sample 4 is of type float64",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_sample_of_another_form_is_refused_with_its_number(name: str) -> None:
    samples, said = BAD[name]
    with pytest.raises(UserError, match=said):
        fields(Named(*[ONE] * 4, *samples, ONE))


def test_a_later_batch_must_have_the_form_of_the_first() -> None:
    source = Named(*[ONE] * 6, ONE, {"x": 1.0, "y": [1]})
    loaded = batches(source)
    loaded.micro_batch(0, 0)
    with pytest.raises(UserError, match=r"field y of sample 7 has shape \(1,\), .* sample 4 has"):
        loaded.micro_batch(0, 1)
