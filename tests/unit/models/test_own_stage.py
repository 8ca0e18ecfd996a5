"""Tests what a stage of a user's own model passes on, and how it treats buffers and dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.fields import with_values
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.own_model import Parallel, own_config
from parallel3d.run_config import Config
from tests.distributed.planted_models import Block, Embedding, ProcessDropout, Samples, Sound

pytestmark = pytest.mark.nightly


def trainer_of(model: Sound, **keys: Any) -> Trainer:
    values = {"global_batch_size": 4, "micro_batch_size": 2, "device": "cpu", **keys}
    config = with_values(Config(model=own_config(ModelConfig(), model)), values)
    groups = ProcessGroups.single()
    return Trainer(config, groups, groups.device, train_source=Samples())


class Pair(NamedTuple):
    hidden: Tensor
    penalty: Tensor


class Passing(Sound):
    """Its embedding returns x in a form, which the first block keeps."""

    form: Any = None

    class Forming(Embedding):
        form: Any = None

        def forward(self, inputs: LayerInputs) -> Any:
            x = super().forward(inputs)
            return self.form(x)

    class Taking(Block):
        def forward(self, x: Any, inputs: LayerInputs) -> Any:
            self.given = x
            return super().forward(x if isinstance(x, Tensor) else x[0], inputs)

    def embedding(self, parallel: Parallel) -> nn.Module:
        made = self.Forming(self.hidden)
        made.form = self.form
        return made

    def block(self, number: int, parallel: Parallel) -> nn.Module:
        return self.Taking(self.hidden, parallel)


def passing(form: Any) -> Passing:
    made = Passing()
    made.form = form
    return made


@pytest.mark.parametrize("form", [lambda x: (x, x), lambda x: [x, x], lambda x: Pair(x, x)])
def test_the_next_part_gets_what_the_next_stage_would_get(form: Any) -> None:
    trainer = trainer_of(passing(form))
    trainer.train_step()
    assert type(trainer.stages[0].blocks["0"].given) is tuple


@pytest.mark.parametrize(("form", "kind"), [(lambda x: (x,), "tuple"), (lambda x: [x], "list")])
def test_a_tuple_of_one_tensor_is_refused(form: Any, kind: str) -> None:
    with pytest.raises(UserError, match=f"embedding of Passing .* not a {kind} of one; give back"):
        trainer_of(passing(form))


class Buffered(Sound):
    class Adding(Block):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.register_buffer("place", torch.linspace(0, 1, 3)[:, None])
            self.register_buffer("kind", torch.arange(3))

        def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
            return super().forward(x + self.place, inputs)

    def block(self, number: int, parallel: Parallel) -> nn.Module:
        return self.Adding(self.hidden, parallel)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp64", torch.double)])
def test_floating_buffers_have_the_dtype_of_the_precision(
    precision: str, dtype: torch.dtype
) -> None:
    trainer = trainer_of(Buffered(), **{"precision.name": precision})
    trainer.train_step()
    block = trainer.stages[0].blocks["1"]
    assert (block.place.dtype, block.kind.dtype) == (dtype, torch.int64)


def test_a_repeated_forward_drops_what_the_forward_dropped() -> None:
    found = []
    for recompute in ("none", "full"):
        keys = {"recompute": recompute, "precision.name": "fp64", "optim.lr": 0.1}
        trainer = trainer_of(ProcessDropout(), **keys)
        torch.manual_seed(1)
        steps = [trainer.train_step() for _ in range(2)]
        found.append([(step.loss, step.grad_norm) for step in steps])
    assert found[0] == found[1]
