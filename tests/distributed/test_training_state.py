"""Tests `save` and `load`: training resumes under any other split as if it had not stopped."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler

import parallel3d as p3d
from parallel3d.checkpoint import saver
from parallel3d.checkpoint.manifest import entries, list_checkpoints, read_manifest, write_manifest
from parallel3d.checkpoint.storage import read_full, verify_checkpoint
from tests.distributed.pool import Pool
from tests.distributed.test_grad_norm import WIDTH, WORDS, loss_of, mine, net

pytestmark = pytest.mark.nightly

TOLERANCE = 1e-11
# By number of ranks: each resumes from the preceding one, in few runs of the pool.
SPLITS: dict[int, dict[str, dict[str, int]]] = {
    1: {"one": {}},
    2: {"tp": {"tp": 2}, "pp": {"pp": 2}, "dp": {"dp": 2}},
    4: {"fsdp": {"dp": 4}, "pp and dp": {"pp": 2, "dp": 2}},
    8: {"tp, pp and fsdp": {"tp": 2, "pp": 2, "dp": 2}},
}
# The states of the other optimizer only differ in their kinds, so few splits suffice.
MOST_RANKS = {"adamw": 8, "sgd": 2}
OPTIMIZERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


class Training:
    """A split network with two parameter groups, a schedule, and a number that the user saves."""

    def __init__(self, split: str, sizes: dict[str, int], optimizer: str) -> None:
        self.groups = groups = p3d.init(**sizes)
        modules: nn.Module = net(groups.tp)
        modules[0].register_buffer("seen", torch.tensor(0))
        if "fsdp" in split:
            for part in modules:
                fully_shard(part, mesh=groups.mesh["dp"])
        self.net = self.wrapped = modules
        if groups.pp.size > 1:
            dp = p3d.ProcessGroups.single().dp if "fsdp" in split else groups.dp
            self.net = p3d.Pipeline(modules, groups.pp, loss_fn=loss_of, num_microbatches=2, dp=dp)
        elif split == "dp":
            self.net = p3d.DistributedDataParallel(modules, process_group=groups.dp)
        parameters = list(self.net.named_parameters())
        wide = [p for name, p in parameters if "weight" in name]
        flat = [p for name, p in parameters if "weight" not in name]
        # A stage may lack one kind, but the groups are the same on every rank.
        self.optimizer = OPTIMIZERS[optimizer](
            [{"params": wide}, {"params": flat, "weight_decay": 0.0}]
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def step(self) -> None:
        self.optimizer.zero_grad()
        inputs, targets = mine(self.groups.dp)
        if isinstance(self.net, p3d.Pipeline):
            self.net.step(inputs, targets)
        else:
            loss_of(self.net(inputs), targets).backward()
        p3d.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()
        for name, buffer in self.net.named_buffers():
            if name.endswith("seen"):
                buffer.add_(1)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.net,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "seed": 0,
        }

    def weights(self) -> dict[str, Tensor]:
        return p3d.full_state_dict(self.net)


def resume(
    splits: dict[str, dict[str, int]], optimizer: str, steps: int, folder: Path
) -> dict[str, Any]:
    """Returns, by split, the weights two steps after the last saved one, on rank 0; `steps`: the
    steps so far."""
    found = {}
    for name, sizes in splits.items():
        training = Training(name, sizes, optimizer)
        if steps:
            training.step()  # to be overwritten
        state = training.state()
        with patch.object(pickle, "Unpickler", None), patch.object(torch, "load", None):
            loaded = p3d.load(state, checkpoint_id=folder)
        assert loaded == (steps or None)
        if loaded is not None:
            assert state["seed"] == 7
            assert training.optimizer.param_groups[1]["weight_decay"] == 0.0
        for _ in range(2):
            training.step()
        steps += 2
        path = p3d.save({**training.state(), "seed": 7}, checkpoint_id=folder, step=steps)
        assert path.name == f"step-{steps:08}"
        found[name] = {key: value.numpy() for key, value in training.weights().items()}
    return found


def uninterrupted(optimizer: str, times: int) -> list[dict[str, Any]]:
    """Returns the weights after every second step."""
    training, found = Training("one", {}, optimizer), []
    for _ in range(times):
        training.step()
        training.step()
        found.append({name: value.clone().numpy() for name, value in training.weights().items()})
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_resumes_under_another_split(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    most, found, steps = MOST_RANKS[optimizer], [], 0
    taken = [(ranks, splits) for ranks, splits in SPLITS.items() if ranks <= most]
    for ranks, splits in (*taken, (1, {"one again": {}})):
        found += pool.run(ranks, resume, splits, optimizer, steps, tmp_path)[0].items()
        steps += 2 * len(splits)
    (wanted,) = pool.run(1, uninterrupted, optimizer, len(found))
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == len(found) == len(wanted)
    for number, ((split, ours), theirs) in enumerate(zip(found, wanted, strict=True)):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert abs(ours[name] - value).max() <= TOLERANCE, (split, name)
        assert ours["0.seen"] == 2 * (number + 1)
        path = tmp_path / "checkpoints" / f"step-{2 * (number + 1):08}"
        verify_checkpoint(path)  # each element is saved once, even if ranks hold copies
        whole = read_full(path)
        assert whole["parameter/1.up.weight"].shape == (4 * WIDTH, WIDTH)
        assert whole["parameter/0.weight"].shape == (WORDS, WIDTH)


def the_newest_or_a_step(folder: str) -> None:
    layer = p3d.ColumnParallelLinear(4, 4, p3d.init(tp=2).tp)
    for step in (2, 10):
        nn.init.constant_(layer.weight, step)
        p3d.save({"model": layer}, checkpoint_id=folder, step=step)
    for step, wanted in ((None, 10), (2, 2)):
        assert p3d.load({"model": layer}, checkpoint_id=folder, step=step) == wanted
        assert bool((layer.weight == wanted).all())


def test_the_newest_checkpoint_or_that_of_a_step_is_loaded(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, the_newest_or_a_step, str(tmp_path))


def said(call: Callable[..., object], *args: Any, **named: Any) -> str:
    try:
        call(*args, **named)
    except (p3d.Parallel3dError, OSError) as error:
        return str(error)
    return ""


class Counting(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def refusals(folder: str) -> list[str]:
    group = p3d.init(pp=2).pp
    rank = group.index
    pipe = p3d.Pipeline([nn.Linear(2, 3), nn.Linear(3, 2)], group)
    optimizer = torch.optim.Adam(pipe.parameters())
    p3d.save({"model": pipe, "optimizer": optimizer, "a": 1}, checkpoint_id=folder, step=1)
    for parameter in pipe.parameters():
        nn.init.constant_(parameter, 7.0)
    counting = p3d.Pipeline([nn.Linear(2, 2), Counting(2, 2)], group)
    complex_ = p3d.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)], group)
    wider = p3d.Pipeline([nn.Linear(2, 4), nn.Linear(4, 2)], group)
    longer = p3d.Pipeline([nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 2)], group)
    unlike = nn.Linear(2, 2 + rank)
    factored = torch.optim.Adafactor(nn.Linear(5, 6).parameters())
    other = nn.Linear(5, 6)
    factored = torch.optim.Adafactor(other.parameters())
    other(torch.ones(1, 5)).sum().backward()
    factored.step()
    two = [{"params": [p]} for p in pipe.parameters()]

    def save(step: int, net: nn.Module | None, **others: Any) -> str:
        state = others if net is None else {"model": net, **others}
        return said(p3d.save, state, checkpoint_id=folder, step=step)

    def load(net: nn.Module, step: Any = None, **others: Any) -> str:
        return said(p3d.load, {"model": net, **others}, checkpoint_id=folder, step=step)

    found = [
        save(1, pipe, optimizer=optimizer),
        save(-1, pipe),
        save(2, pipe, a={3} if rank else 0),
        save(2, None, a=1),
        save(2, counting),
        save(2, complex_),
        save(2, unlike),
        save(2, other, optimizer=factored),
        save(2, pipe, optimizer=torch.optim.SGD(other.parameters(), lr=1.0)),
        said(p3d.load, folder, checkpoint_id=folder),
        load(pipe, 7),
        load(pipe, "7"),
        load(wider),
        load(longer),
        load(pipe, **({"b": 1} if rank else {})),
        load(pipe, optimizer=torch.optim.Adam(two)),
    ]
    assert all((p == 7.0).all() for p in pipe.parameters()), "a refused load changed the module"
    with patch.object(os, "rename", side_effect=OSError(28, "No space left on device")):
        found.append(save(2, pipe))
    parent = Path(folder) / "checkpoints"
    if rank == 0:
        assert sorted(p.name for p in parent.iterdir()) == ["latest", "step-00000001"]
        file = next((parent / "step-00000001").glob("rank-0*"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    found.append(load(pipe, optimizer=optimizer))
    return found


def test_state_that_cannot_be_saved_or_loaded_is_refused_on_every_rank(
    pool: Pool, tmp_path: Path
) -> None:
    first, second = pool.run(2, refusals, str(tmp_path))
    assert first == second
    wanted = (
        "step-00000001 is there already, but must be new; give another step",
        "save(step=-1) must be a whole number",
        "save: a must be JSON",
        "has 0 modules and 0 optimizers, but must have one module and at most one optimizer",
        "1._extra_state is a dict, but must be a tensor",
        "parameter/1.weight has type torch.complex64, but must have one that a checkpoint",
        "parameter/weight has shape [3, 2] on rank 1, but must have [2, 2]",
        "but must have that of the parameter, (6, 5); use an optimizer such as AdamW",
        "not in the module; all its parameters must belong to the module",
        'as in load({"model": net, "optimizer": optimizer}, checkpoint_id="runs/mine")',
        "load(step=7) must be a checkpoint in",
        "load(step='7') must be a whole number from 0 on; or give step=None for the newest",
        "has parameter/0.weight of shape (3, 2), but must have it of shape (4, 2)",
        "does not belong to this model: 2.bias is missing; the nearest is",
        "has no b, which this state dict has",
        "was saved from an optimizer with 1 parameter groups, but this optimizer has 2",
        "No space left on device",
        "is not what was written; give another step",
    )
    for sentence, part in zip(first, wanted, strict=True):
        assert part in sentence, sentence


def test_one_process_needs_no_world(tmp_path: Path) -> None:
    layer, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m, lr in ((layer, 0.1), (twin, 0.2))]
    layer(torch.ones(1, 3)).sum().backward()
    optimizers[0].step()
    path = p3d.save({"model": layer, "adam": optimizers[0]}, checkpoint_id=tmp_path, step=1)
    assert p3d.load({"model": twin, "adam": optimizers[1]}, checkpoint_id=tmp_path) == 1
    assert torch.equal(twin.weight, layer.weight)
    ours, theirs = (o.state_dict() for o in optimizers)
    assert json.dumps(ours["param_groups"]) == json.dumps(theirs["param_groups"])
    for number, state in ours["state"].items():
        for key, value in state.items():
            assert torch.equal(theirs["state"][number][key], value)
            assert theirs["state"][number][key].shape == value.shape
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    assert [entry.name for entry in list_checkpoints(tmp_path)] == [path.name]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 5], 0.5),
    "in a row": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, 1.0, 3), lr_scheduler.MultiStepLR(o, [2], 0.5)], [4]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_where_it_stopped(kind: str, tmp_path: Path) -> None:
    def begun() -> dict[str, Any]:
        layer = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        return {"model": layer, "optimizer": optimizer, "schedule": SCHEDULES[kind](optimizer)}

    def rates(stop: int | None) -> list[float]:
        state, found = begun(), []
        for step in range(8):
            if step == stop:
                p3d.save(state, checkpoint_id=tmp_path, step=step)
                state = begun()
                p3d.load(state, checkpoint_id=tmp_path)
            state["optimizer"].step()
            state["schedule"].step(*([1.0] if kind == "plateau" else []))
            found.append(state["optimizer"].param_groups[0]["lr"])
        return found

    wanted = rates(None)
    assert len(set(wanted)) > 2
    assert rates(2) == wanted


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    layer = nn.Linear(1, 1)
    values = {
        "counts": {3: {"a": math.inf}, None: [1.5, -math.inf], (1, 2): {}},
        "shape": (1, [2, "b"]),
        "flags": [True, None],
    }
    p3d.save({"model": layer, **values}, checkpoint_id=tmp_path, step=1)
    state = {"model": layer, "counts": {}, "shape": (0,), "flags": None}
    p3d.load(state, checkpoint_id=tmp_path)
    del state["model"]
    assert state == values


def test_values_that_could_not_be_read_again_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel3d.checkpoint.manifest._LARGEST_MANIFEST", 5000)
    state = {"model": nn.Linear(1, 1), "order": list(range(1000))}
    sentence = said(p3d.save, state, checkpoint_id=tmp_path, step=1)
    assert "keep long lists in a buffer of the module" in sentence
    assert entries(tmp_path) == []


def test_files_of_the_first_version_are_read(tmp_path: Path) -> None:
    """Names of files have the rank without leading zeros."""
    layer, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    path = p3d.save({"model": layer}, checkpoint_id=tmp_path, step=1)
    (file,) = path.glob("manifest-*")
    manifest = read_manifest(path)
    file.unlink()
    (digest,) = manifest.files
    assert digest.name == "rank-00000.safetensors"  # like the trainer's files
    (path / digest.name).rename(path / "rank-0.safetensors")
    old = dataclasses.replace(digest, name="rank-0.safetensors")
    write_manifest(path, dataclasses.replace(manifest, files=(old,)))
    assert p3d.load({"model": twin}, checkpoint_id=tmp_path) == 1
    assert torch.equal(twin.weight, layer.weight)


def test_a_folder_that_hosts_do_not_share_makes_no_checkpoint(tmp_path: Path) -> None:
    """Tests a folder that hosts do not share, with the trainer's own check."""
    layer = nn.Linear(3, 2)
    write = saver.write_state

    def elsewhere(path: Path, state: Any) -> Any:
        digest = write(path, state)
        path.unlink()
        return digest

    with patch.object(saver, "write_state", elsewhere):
        sentence = said(p3d.save, {"model": layer}, checkpoint_id=tmp_path, step=1)
    assert sentence.startswith("rank 0 does not see rank-00000.safetensors: are the checkpoints")
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    "script",
    [
        None,
        3,
        {"optimizer": {}, "extra": {}},
        {"optimizer": {"groups": [], "group_of": {}, "values": {"step/weight": 3}}, "extra": {}},
        {"optimizer": {"groups": [3], "group_of": {}, "values": {}}, "extra": {}},
        {"optimizer": {"groups": [], "group_of": {}, "values": {}}, "extra": []},
    ],
)
def test_a_manifest_of_somebody_else_is_refused(script: Any, tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    path = p3d.save({"model": layer}, checkpoint_id=tmp_path, step=1)
    (file,) = path.glob("manifest-*")
    manifest = read_manifest(path)
    file.unlink()
    write_manifest(path, dataclasses.replace(manifest, config={"script": script}))
    with pytest.raises(p3d.Parallel3dError, match=r"must be a checkpoint of parallel3d\.save"):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        p3d.load({"model": layer, "optimizer": optimizer}, checkpoint_id=tmp_path)


def test_a_checkpoint_cannot_change_the_parameters_of_a_group(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    state = {"model": layer, "optimizer": optimizer}
    path = p3d.save(state, checkpoint_id=tmp_path, step=1)
    (file,) = path.glob("manifest-*")
    manifest = read_manifest(path)
    file.unlink()
    manifest.config["script"]["optimizer"]["groups"][0] |= {"params": [], "fused": True, "lr": 0.2}
    write_manifest(path, manifest)
    p3d.load(state, checkpoint_id=tmp_path)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.2
    assert group["params"] == list(layer.parameters())
    assert not group["fused"]
