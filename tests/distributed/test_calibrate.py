"""`calibrate` on real ranks, over grids of a few points: its file is whole and prices a step."""

from __future__ import annotations

from pathlib import Path

from parallel3d.commands.calibrate.measure import Grids, calibrate
from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.estimate.profiled_cost import TABLES, MeasuredMachine, read, step_parts
from parallel3d.run.launch import Worker
from tests.distributed.pool import Pool

FEW = Grids(
    gemm=((64, 512), (64, 256), (64, 256)),
    attention=((2, 8), (32, 128), (16, 32)),
    norm=((64, 512), (64, 256)),
    elements=((1 << 12, 1 << 18),),
    loss=((64, 512), (64, 512)),
    update=((1 << 12, 1 << 18),),
)


def be_rank(rank_dir: str, file: str) -> int:
    import torch.distributed as dist

    config = Config(dp=dist.get_world_size(), device="cpu")
    config.calibrate.file, config.calibrate.passes = file, 1
    rank, world = dist.get_rank(), dist.get_world_size()
    worker = Worker(rank, rank, world, world, Path(rank_dir), "local")
    worker.store = dist.FileStore(f"{rank_dir}/store", world)
    return calibrate(config, worker, FEW)


def step(machine: MeasuredMachine, dp: int = 1, **sizes: int) -> float:
    model = ModelConfig(num_attention_heads=4, **({"hidden_size": 128, "num_layers": 2} | sizes))
    config = Config(dp=dp, global_batch_size=8, micro_batch_size=2, model=model)
    return step_parts(check_config(config, dp, own_samples=True), machine).core


def test_two_ranks_measure_a_file_that_prices_steps(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    assert pool.run(2, be_rank, str(tmp_path), str(file), timeout_s=240) == [0, 0]
    machine = read(str(file))
    assert machine.made.device == "cpu" and machine.made.type == "fp32" and machine.ranks == 2
    assert set(machine.tables) == set(TABLES)
    # 16 times the FLOPs, and 64 times the bytes: orders that no neighbour on the machine turns.
    assert machine["gemm.forward"](512, 256, 256) > 2 * machine["gemm.forward"](512, 64, 64)
    assert machine["add"](1 << 18) > 2 * machine["add"](1 << 12)
    assert step(machine, num_layers=8) > 2 * step(machine)
    assert step(machine, hidden_size=256) > 1.2 * step(machine)
    assert step(machine, dp=2) > step(machine), "gradients are summed, and updated twice"
