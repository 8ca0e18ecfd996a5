"""Tests groups, exchanges between ranks, the clock and checkpoints on the simulated accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel3d.blueprint.layout import Layout
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.manifest import list_checkpoints
from parallel3d.checkpoint.storage import read_full
from parallel3d.comm import exchange
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.comm.step_timer import KINDS
from parallel3d.metrics.peak import peak_memory
from parallel3d.parameters import gather
from parallel3d.run.keys import LaunchConfig
from parallel3d.simulated_device.device import this_machine
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import array, make_trainer, plain_groups
from tests.distributed.simulated import SimulatedPool, here
from tests.distributed.test_exchange import AS_JSON, WORDS

pytestmark = pytest.mark.nightly

GPT = Problem("gpt_tiny", "adamw", True)
SMALL = Problem("gpt_tiny", "adamw", True, layers=2, batch=6)


# --- groups -----------------------------------------------------------------------------------


def what_was_made(layout: Layout, launch: LaunchConfig) -> tuple[dict[str, Any], list[str]]:
    """Returns (kind → None for the world's own group, else priority and the largest number of CTAs;
    kinds in the order of closing)."""
    groups = ProcessGroups.create(layout, here().type, 60.0, launch)
    found: dict[str, Any] = {}
    for group in (groups.tp, groups.dp, groups.pp, groups.world):
        if group.size > 1 and group.handle is dist.group.WORLD:
            found[group.name] = None
        elif group.size > 1:
            options = group.handle._get_backend(here()).options
            found[group.name] = (options.is_high_priority_stream, options.config.max_ctas)
    world = dist.group.WORLD._get_backend(here())
    groups.close()
    return found, [group.description for group in world.ended]


def test_options_reach_their_kind_and_groups_close_in_order(
    simulated: SimulatedPool,
) -> None:
    launch = LaunchConfig(nccl_settings=["dp.max_ctas:8"])
    for found, closed in simulated.run(4, what_was_made, Layout(tp=2, dp=2), launch):
        assert found["dp"] == (False, 8)
        assert found["tp"][0] is True and found["tp"][1] != 8
        assert found["world"] is None
        assert closed == ["tp", "dp"]
    for found, closed in simulated.run(2, what_was_made, Layout(dp=2), launch):
        assert found == {"dp": (False, 8), "world": None}
        assert closed == ["dp"]
    for found, closed in simulated.run(2, what_was_made, Layout(dp=2), LaunchConfig()):
        assert (found, closed) == ({"dp": None, "world": None}, [])


# --- exchanges --------------------------------------------------------------------------


def told() -> list[Any]:
    word, world = WORDS[dist.get_rank()], dist.group.WORLD
    return [
        exchange.all_gather_json(word, world, here()),
        exchange.broadcast_json(word, world, here()),
    ]


def test_ranks_exchange_messages(simulated: SimulatedPool) -> None:
    for found in simulated.run(4, told):
        assert found == [AS_JSON, AS_JSON[0]]


def most_memory_of_a_gather(message_bytes: int) -> tuple[int, int, int]:
    """Returns the bytes that a message needs on this rank's device, the bytes of all messages, and
    the bytes of the largest shard."""
    groups = plain_groups(Layout(tp=2, dp=2))
    trainer = make_trainer(Case(GPT), groups)
    gather.MESSAGE_BYTES = message_bytes
    api = torch.get_device_module(here())
    api.synchronize()
    api.reset_peak_memory_stats()
    before = api.memory_allocated()
    boxes = gather.gather_shards(trainer.parameters.values(), groups)
    more = api.max_memory_allocated() - before
    sizes = [box.nbytes for rank, _, box in boxes if rank > 0]
    groups.close()
    return more, sum(sizes), max(sizes, default=0)


def test_rank_0_holds_one_message_of_the_others_boxes(simulated: SimulatedPool) -> None:
    message = 4096
    more, came, largest = simulated.run(4, most_memory_of_a_gather, message)[0]
    words = 100_000  # each rank's report about its shards
    assert came > 300_000
    assert more < max(message, largest) + words


# --- the clock --------------------------------------------------------------------------------


def clocked_steps(sizes: tuple[int, int, int], keys: tuple, steps: int) -> dict[str, Any]:
    groups = plain_groups(Layout(*sizes))
    trainer = make_trainer(Case(SMALL, microbatches=sizes[1], keys=keys), groups)
    known, marked = [], []
    for step in range(1, steps + 1):
        trainer.train_step()
        marked = marked or [kind for _, (kind, _) in trainer.step_timer.times.marks]
        if trainer.step_timer.last is not None:
            known.append(step)
    means = trainer.step_timer.means()
    groups.close()
    found = {"known": known, "means": means, "memory": peak_memory(here()), "marked": marked}
    return found | {"floors": trainer.step_timer.baseline_latency}


@pytest.mark.parametrize(("sizes", "kind", "steps"), [((2, 1, 1), "tp", 12), ((1, 2, 1), "pp", 3)])
def test_some_steps_times_are_reported_one_step_later(
    sizes: tuple[int, int, int], kind: str, steps: int, simulated: SimulatedPool
) -> None:
    for found in simulated.run(2, clocked_steps, sizes, (), steps):
        assert ("pp" in found["floors"]) is (kind == "pp")
        # Times of steps 1, 2, 3, 4 and 11.
        assert found["known"] == [step for step in (2, 3, 4, 5, 12) if step <= steps]
        means = found["means"]
        assert list(means) == list(KINDS) and min(means.values()) >= 0
        assert all(means[k] > 0 for k in ("forward", "backward", kind, "optimizer"))
        assert found["memory"]["allocated"] > 0


def test_work_on_fsdp2s_streams_is_not_time_of_the_compute_stream(
    simulated: SimulatedPool,
) -> None:
    for found in simulated.run(2, clocked_steps, (1, 1, 2), (("zero", 3),), 3):
        assert found["marked"].count("dp") == 1  # the sum of the tokens
        assert found["means"]["backward"] > 0


# --- checkpoints ------------------------------------------------------------------------------


def saves_beside_the_training(run_dir: Path) -> dict[str, Any]:
    """Runs three steps, each of them saved, the last save at a run's end. Any unordered access
    raises.

    The weights come from a second run that saves nothing: to read them, the host would have to
    wait.
    """
    groups = plain_groups(Layout(dp=2))
    keys = (("zero", 1), ("run", run_dir.name), ("checkpoint.every", 1), ("train.steps", 3))
    case, weights = Case(SMALL, microbatches=1, keys=keys), {}
    twin = make_trainer(case, groups)
    for step in (1, 2, 3):
        twin.train_step()
        weights[step] = {name: array(w) for name, w in twin.full_parameters().items()}
    trainer = make_trainer(case, groups)
    checkpoints = Checkpoints(trainer.config, run_dir, groups, print)
    checkpoints.restore(trainer)
    slabs = checkpoints.saver.staging.slabs
    room = [slab.is_pinned() for slab in slabs]
    for _ in range(3):
        trainer.train_step()
        checkpoints.after_step(trainer)
    assert checkpoints.close()
    found = {"weights": weights, "room": room, "devices": set(this_machine().touched)}
    found["kept"] = checkpoints.saver.staging.slabs is slabs and len(slabs) == len(room)
    groups.close()
    return found


def test_a_background_save_holds_its_step_and_uses_only_its_device(
    simulated: SimulatedPool, tmp_path: Path
) -> None:
    by_rank = simulated.run(2, saves_beside_the_training, tmp_path)
    for rank, found in enumerate(by_rank):
        assert found["devices"] == {rank}
        assert found["room"] and all(found["room"]) and found["kept"]
    folders = list_checkpoints(tmp_path)
    assert len(folders) > 1
    for folder in folders:
        expected = by_rank[0]["weights"][int(folder.name.removeprefix("step-"))]
        saved = read_full(folder)
        assert saved.keys() == {f"parameter/{name}" for name in expected}
        for name, weight in expected.items():
            assert np.array_equal(array(saved[f"parameter/{name}"]), weight), (folder, name)
