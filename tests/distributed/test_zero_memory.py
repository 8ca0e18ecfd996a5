"""Tests the memory of a rank under the stages of ZeRO: at the start, in a step and between
steps."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d import build as build_module
from parallel3d.blueprint.layout import Layout
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from parallel3d.parameters.state import spec_of
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer, plain_groups
from tests.distributed.pool import Pool
from tests.distributed.test_fully_sharded import EVERY, ONCE

pytestmark = pytest.mark.nightly


def bytes_of_tensors(shared: torch.UntypedStorage | None = None) -> int:
    """Returns the bytes of all tensors that this process holds and that are not frozen, each
    storage once, without memory that ranks share."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), FakeTensor):
            continue  # a compiled graph of an earlier test has left it; it holds no memory
        if issubclass(type(found), torch.Tensor) and found.layout == torch.strided:
            local = found.to_local() if hasattr(found, "to_local") else found
            storage = local.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    if shared is not None:
        storages.pop(shared._cdata, None)
    return sum(storages.values())


def held(stage: int) -> dict[str, float]:
    """Returns the bytes that a trainer holds between steps, relative to its stage's parameters in
    fp32, and the share of the parameters that this rank steps."""
    groups = plain_groups(Layout(dp=4))
    problem = Problem("gpt_tiny", "adamw", True, "fp32", model=(("hidden_size", 128),))
    gc.collect()
    gc.freeze()  # tensors that earlier tests have left are neither searched nor counted
    trainer = make_trainer(Case(problem, microbatches=1, keys=(("zero", stage),)), groups)
    for _ in range(2):
        trainer.train_step()
    trainer.data_parallel.wait_for_all_gathers()
    numel = sum(p.numel() for p in trainer.parameters.values())
    shared = groups.dp.shared
    memory = None if shared is None else shared.memory.data.untyped_storage()
    found = {"held": bytes_of_tensors(memory) / (4 * numel)}
    parameters = 0
    for slice_ in trainer.parameter_slices():
        parameters += slice_.values["parameter"].numel()
    found["stepped"] = parameters / numel
    groups.close()
    return found


def held_by_stages() -> list[dict[str, float]]:
    return [held(stage) for stage in (0, 1, 2, 3)]


def test_memory_falls_with_dp(pool: Pool) -> None:
    held_by_stage = {}
    for stage, by_rank in enumerate(zip(*pool.run(4, held_by_stages), strict=True)):
        held_by_stage[stage] = max(found["held"] for found in by_rank)
        stepped = sum(found["stepped"] for found in by_rank)
        assert stepped == pytest.approx(4 if stage == 0 else 1)
    # parameters, gradients and two moments, in units of the parameters
    assert held_by_stage[0] == pytest.approx(4, rel=0.1)
    assert held_by_stage[1] == pytest.approx(2.5, rel=0.1)
    for stage in (2, 3):
        assert held_by_stage[stage] == pytest.approx(1, rel=0.15)


def made_at_start(stage: int, tied: bool) -> dict[str, float]:
    """Returns the costs of creating a trainer, with sizes to compare them with.

    The costs are the elements drawn, the largest tensor that the initializer makes, and the peak of
    bytes before there is an optimizer. The sizes are numels: of all parameters of the stage, of the
    largest one, and of the largest unit that FSDP2 shards.
    """
    groups = plain_groups(Layout(1, 1, 2))
    model = (("hidden_size", 128), ("vocab_size", 120))
    problem = Problem("gpt_tiny", "adamw", tied, "bf16", model, layers=4)
    found = {"drawn": 0, "largest": 0}
    gc.collect()
    gc.freeze()
    peak = Peak()
    fill, values, optimizer = Initializer.fill, Initializer.values, build_module.Optimizer

    def counted_fill(self: Initializer, piece: ShardSpec, out: torch.Tensor) -> None:
        found["drawn"] += out.numel()
        fill(self, piece, out)

    def counted_values(self: Initializer, spec: ParameterSpec) -> torch.Tensor:
        found["largest"] = max(found["largest"], math.prod(spec.shape))
        return values(self, spec)

    def counted_optimizer(*args: Any) -> Any:
        found["peak"] = peak.most
        return optimizer(*args)

    with (
        patch.object(Initializer, "fill", counted_fill),
        patch.object(Initializer, "values", counted_values),
        patch.object(build_module, "Optimizer", counted_optimizer),
        peak,
    ):
        case = Case(problem, microbatches=1, keys=(("zero", stage),))
        trainer = make_trainer(case, groups)
    numels = {name: math.prod(spec_of(p).shape) for name, p in trainer.parameters.items()}
    found["whole"] = sum(numels.values())
    found["parameter"] = max(numels.values())
    units: Counter[str] = Counter()
    for name, numel in numels.items():
        units[name[: len("layers.0")] if name.startswith("layers.") else "rest"] += numel
    found["unit"] = max(units.values())
    groups.close()
    return found


class Peak(TorchDispatchMode):
    """Returns the peak of bytes of tensors that were made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # a DTensor holds one of them
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes


STARTS = [(0, True), (1, False), (2, True), (3, False)]  # stage, tied


def made_at_starts() -> list[dict[str, float]]:
    return [made_at_start(*start) for start in STARTS]


def test_no_rank_makes_more_at_start_than_it_keeps_and_a_layer(pool: Pool) -> None:
    by_start = zip(*pool.run(2, made_at_starts), strict=True)
    for (stage, _), by_rank in zip(STARTS, by_start, strict=True):
        check_start(stage, by_rank)


def check_start(stage: int, by_rank: Sequence[dict[str, float]]) -> None:
    for found in by_rank:
        whole, dp = found["whole"], 2
        assert found["largest"] <= found["parameter"]
        if stage < 2:  # parameters in bf16, gradients and masters in fp32, and one parameter
            kept = 2 * whole + 4 * whole + 4 * whole // (dp if stage else 1)
            spare = 4 * found["parameter"]
        else:  # a shard in fp32 and its gradients, and one whole unit
            kept, spare = 2 * 4 * whole // dp, 4 * found["unit"]
        drawing = 4 * found["parameter"]  # the band that is being drawn
        assert found["peak"] <= 1.01 * (kept + spare + drawing), found
        assert found["peak"] > kept
    drawn = [found["drawn"] for found in by_rank]
    assert sum(drawn) == whole * (dp if stage < 2 else 1), "rows of other ranks are not drawn"


def held_before_the_last_backward(every: bool) -> float:
    """Returns the bytes that were made in a step and are held at its end, relative to the stage's
    parameters in fp32."""
    groups = plain_groups(Layout(1, 1, 2))
    problem = Problem("gpt_tiny", "sgd", True, "fp32", (("hidden_size", 128),))
    trainer = make_trainer(Case(problem, keys=(("zero", 3), EVERY if every else ONCE)), groups)
    engine, peak, found = trainer.data_parallel, Peak(), []
    sound = engine.start_last_microbatch

    def start_last_microbatch() -> None:
        found.append(peak.now)
        sound()

    with patch.object(engine, "start_last_microbatch", start_last_microbatch), peak:
        trainer.train_step()
    groups.close()
    return found[0] / (4 * sum(p.numel() for p in trainer.parameters.values()))


def test_no_rank_holds_whole_gradients_between_microbatches(pool: Pool) -> None:
    every, once = (pool.run(2, held_before_the_last_backward, way) for way in (True, False))
    for at_once, added_up in zip(every, once, strict=True):
        assert added_up - at_once == pytest.approx(1, abs=0.05)
