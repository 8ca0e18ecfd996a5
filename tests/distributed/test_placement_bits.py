"""Tests that training gives the same bits however ranks are assigned to processes.

Processes take their ranks like in a real launch (`assign_rank` through a store, gloo started with
the permuted ranks, the whole training loop); only the launcher is the tests' pool.
"""

from __future__ import annotations

import functools
import json
import math
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.numpy import load_file

from parallel3d.blueprint.layout import Layout
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig
from parallel3d.run import worker
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config, check_config
from tests.distributed.pool import Pool
from tests.ports import free_port

pytestmark = pytest.mark.nightly

STEPS = 2
# The results of a step, except its duration.
NUMBERS = ("step", "loss", "grad_norm", "lr", "eval_loss")
PLACEMENTS = {
    "tp=2 pp=2 dp=2": ["pp-dp-tp"],
    "tp=1 pp=2 dp=2": ["auto", "file"],
}
OPTIM = {
    "sgd": OptimConfig(name="sgd", lr=0.5, weight_decay=0.0),
    "adamw": OptimConfig(name="adamw", lr=0.01),
}


def train_as_placed(config: Config, run_dir: str, port: int) -> int:
    """Runs one launched process from its launch rank to the end of training. Returns its rank."""
    launch_rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # waits until all are connected, so that none sees another one leave too early
    dist.destroy_process_group()  # the pool's own group: ours starts anew with the permuted ranks
    store = dist.TCPStore(
        "localhost", port, world, is_master=launch_rank == 0, wait_for_workers=True
    )
    me = Worker(launch_rank, launch_rank, world, world, Path(run_dir), "local", "cpu")
    worker._join("train", config, me, store)
    assert worker._work("train", config, me, None) == 0
    return me.rank


def config_of(layout: str, optimizer: str, placement: str, folder: Path) -> Config:
    sizes = {name: int(size) for name, size in (word.split("=") for word in layout.split())}
    book = folder / "book.txt"
    book.write_text("".join(f"{n} bottles of beer on the wall.\n" for n in range(300)))
    world = math.prod(sizes.values())
    config = Config(**sizes, micro_batch_size=1, global_batch_size=8, device="cpu")
    config.model = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=32, init_std=0.2
    )
    config.optim = OPTIM[optimizer]
    config.train.steps, config.train.eval_batches = STEPS, 1
    config.train.save_weights, config.train.progress = True, False
    config.launch.peak_tflops, config.launch.timeout_s = 0.1, 30.0
    config.data.name, config.data.path = "text", str(book)
    config.data.cache_dir = str(folder / "cache")
    config.cluster.nodes, config.cluster.gpus_per_node = world // 2, 2
    config.placement = placement
    if placement == "file":
        config.rank_file = str(folder / "ranks")
        order = [0, *random.Random(f"{layout} {placement}").sample(range(1, world), world - 1)]
        lines = (f"{rank} localhost {launch}\n" for rank, launch in enumerate(order))
        (folder / "ranks").write_text("".join(lines))
    return check_config(config, world)


def run(pool: Pool, config: Config, folder: Path) -> dict[str, Any]:
    """Returns the ranks by launch rank, and the results that must not depend on them."""
    folder.mkdir()
    world = config.tp * config.pp * config.dp
    ranks = pool.run(world, train_as_placed, config, str(folder), free_port(), timeout_s=900)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [{k: r[k] for k in NUMBERS if k in r} for r in map(json.loads, lines)]
    bits = {
        f"{when} {name}": tensor.tobytes()
        for when in ("initial", "final")
        for name, tensor in load_file(folder / f"weights-{when}.safetensors").items()
    }
    assert sum("grad_norm" in record for record in records) == STEPS
    placement = json.loads((folder / "placement.json").read_text())
    return {"ranks": ranks, "records": records, "bits": bits, "placement": placement}


Runs = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Returns the result of `run` for a layout, an optimizer and a placement; each runs once."""

    @functools.cache
    def known(layout: str, optimizer: str, placement: str, shared_memory: bool = True) -> Any:
        folder = tmp_path_factory.mktemp("placed")
        config = config_of(layout, optimizer, placement, folder)
        config.launch.shared_memory = shared_memory
        return run(pool, config, folder / "run")

    return known


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("tp=2 pp=2 dp=2", "adamw"),
        ("tp=1 pp=2 dp=2", "sgd"),
    ],
)
def test_losses_norms_and_weights_are_the_same_bits_under_every_placement(
    runs: Runs, layout: str, optimizer: str
) -> None:
    expected = runs(layout, optimizer, "default")
    in_order = list(range(len(expected["ranks"])))
    assert expected["ranks"] == in_order
    finals = [bits for name, bits in expected["bits"].items() if name.startswith("final")]
    starts = [bits for name, bits in expected["bits"].items() if name.startswith("initial")]
    assert finals != starts
    permuted = 0
    for placement in PLACEMENTS[layout]:
        placed = runs(layout, optimizer, placement)
        by_launch = {row["launch_rank"]: row["rank"] for row in placed["placement"]["ranks"]}
        assert [by_launch[launch] for launch in in_order] == placed["ranks"]
        permuted += placed["ranks"] != in_order
        assert placed["records"] == expected["records"], placement
        assert placed["bits"] == expected["bits"], placement
    assert permuted >= len(PLACEMENTS[layout]) - ("auto" in PLACEMENTS[layout])


def test_the_network_gives_the_same_bits_as_shared_memory(runs: Runs) -> None:
    """With two members per group, both orders add the same two numbers."""
    of = ("tp=1 pp=2 dp=2", "sgd", "file")
    by_memory, by_network = runs(*of), runs(*of, shared_memory=False)
    assert by_network["records"] == by_memory["records"]
    assert by_network["bits"] == by_memory["bits"]


def test_the_saved_map_has_host_and_coordinates_of_every_rank(runs: Runs) -> None:
    saved = runs("tp=2 pp=2 dp=2", "adamw", "pp-dp-tp")["placement"]
    layout = Layout(tp=2, pp=2, dp=2)
    assert saved["how"] == "pp2-dp2-tp2"
    for row in saved["ranks"]:
        assert row["host"] == socket.gethostname()
        assert row["local_index"] == row["launch_rank"]
        coordinates = layout.coordinates(row["rank"])._asdict()
        assert {name: row[name] for name in coordinates} == coordinates
