"""What `calibrate` measures, and how the other ranks wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel3d import optim
from parallel3d.commands.calibrate import measure
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.estimate.ops import stage_parameters
from parallel3d.run.launch import Worker
from tests.operators import Operators

CPU = torch.device("cpu")


MODEL = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
    seq_length=16, vocab_size=256,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_on_an_accelerator_is_the_optimizers(name: str, dtype: torch.dtype) -> None:
    """One norm of the whole segment, and no clipping apart from the fused kernel."""
    run = measure.update(name, 2 * optim.NORM_PIECE, dtype, CPU)
    with (
        patch.object(optim, "is_accelerator", lambda device: True),
        patch.object(torch, "_foreach_norm", wraps=torch._foreach_norm) as norms,
        patch.object(torch, f"_fused_{name}_", wraps=getattr(torch, f"_fused_{name}_")) as kernel,
        Operators() as operators,
    ):
        run()
    assert [len(call.args[0]) for call in norms.call_args_list] == [1]
    assert "_foreach_mul_" not in operators.names
    assert kernel.call_args.kwargs["grad_scale"] == pytest.approx(2.0)
    assert ("copy_" in operators.names) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_shard_holds_the_parameters_of_a_tensor_rank(tp: int) -> None:
    """Against `stage_parameters`, which tests/unit/test_traffic.py holds against the model."""
    shard = stage_parameters(measure.shard_of(MODEL, tp), 1, range(2), True, True)
    rank = stage_parameters(MODEL, tp, range(2), True, True)
    assert [p.numel for p in shard] == [p.numel for p in rank]


def test_pieces_are_the_whole_of_a_step() -> None:
    config = Config(device="cpu", model=MODEL, global_batch_size=1)
    pieces = measure.Pieces(config, MODEL, 1, CPU, [(), ("layer",)])
    plain, again = pieces.executor.stages[1:3]
    times = pieces.best()
    kinds = {kind: {chunk for of, chunk in times if of == kind} for kind in "FIW"}
    assert kinds == {kind: {0, 1, 2, 3} for kind in "FIW"}
    assert min(times.values()) > 0
    with Operators() as operators:
        pieces.run()
    products = 4 * 2 * 2 * 2  # of two blocks of two stages, two micro-batches: forward and input
    assert operators.names.count("addmm") + operators.names.count("mm") >= products
    assert all(block.recompute for block in again.blocks.values())
    assert not any(block.recompute for block in plain.blocks.values())


def test_other_ranks_wait_for_rank_0_at_the_store() -> None:
    """Not in a collective, whose time-out is shorter than rank 0's compiling and measuring."""
    store = dist.HashStore()
    worker = Worker(1, 1, 2, 2, Path(), "local", store=store)
    with (
        patch.object(measure, "collectives", lambda *_: {}),
        patch.object(measure, "slowing", lambda *_: None),
        ThreadPoolExecutor() as threads,
    ):
        code = threads.submit(measure.calibrate, Config(device="cpu"), worker)
        with pytest.raises(TimeoutError):
            code.result(0.2)
        store.set(measure.MEASURED_KEY, "")
        assert code.result(60) == 0
