"""Tests which states of hooks a checkpoint keeps, who writes them, and that all ranks get them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel3d.checkpoint.hook_states import RestoredStates, SavedStates, collect, notes
from parallel3d.checkpoint.manifest import COUNTS, DamagedCheckpoint, Manifest, read_manifest
from parallel3d.checkpoint.saver import complete, write_part
from parallel3d.checkpoint.storage import read_state
from parallel3d.errors import UserError

CPU = torch.device("cpu")


class Keeps:
    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def on_ranks(*states: dict[str, Any]) -> list[SavedStates]:
    """Returns what the ranks collect of a hook that has one of these states on each."""
    told: list[Any] = []

    def tell(value: Any) -> list[Any]:
        told.append(json.loads(json.dumps(value)))
        raise InterruptedError

    for state in states:
        with pytest.raises(InterruptedError):
            collect({"probe": Keeps(**state)}, tell, 0, CPU)
    return [
        collect({"probe": Keeps(**state)}, lambda _: told, rank, CPU)
        for rank, state in enumerate(states)
    ]


def test_every_rank_reads_the_entries_of_all_ranks(tmp_path: Path) -> None:
    same = {"mean": torch.arange(6.0).view(2, 3), "seen": 3, "more": {"a": [1.5, None, True]}}
    first = {**same, "of 0": torch.tensor(2.5, dtype=torch.float64)}
    second = {**same, "of 1": torch.ones(2, dtype=torch.bfloat16), "none": torch.empty(0, 4)}
    ranks = on_ranks(first, second)
    assert [len(each.state) for each in ranks] == [2, 1]  # an equal entry is written once
    assert ranks[0].progress == ranks[1].progress
    assert {each.elements for each in ranks} == {9}
    part = tmp_path / "checkpoints" / ".saving-x"
    files = [write_part(part, rank, each.state) for rank, each in enumerate(ranks)]
    progress = {**dict.fromkeys(COUNTS, 0), "steps": 4, "loss_scale": 1.0, **ranks[0].progress}
    folder = complete(part, Manifest(4, progress, {}, {}, "", {}, ()), [f for f in files if f])
    hook = Keeps()
    restored = RestoredStates.of(read_manifest(folder), {"probe": hook}, CPU)
    read_state(folder, restored.state)
    restored.give({"probe": hook}, CPU)
    wanted = first | second
    assert hook.state.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert hook.state[key].dtype == value.dtype
            assert hook.state[key].shape == value.shape
            assert torch.equal(hook.state[key], value)
        else:
            assert hook.state[key] == value


def test_an_entry_that_differs_between_ranks_is_refused_on_both() -> None:
    with pytest.raises(UserError, match=r"'mean'. differs between rank 0 and rank 1"):
        on_ranks({"mean": torch.zeros(2)}, {"mean": torch.ones(2)})


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), object(), [1j]])
def test_a_value_that_would_come_back_as_another_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="JSON does not keep as it is; give texts, finite numbers"):
        on_ranks({"value": value})


def test_a_copy_is_saved_so_a_hook_may_change_its_tensor_at_once() -> None:
    mean = torch.zeros(2)
    (kept,) = on_ranks({"mean": mean})
    mean += 1
    assert torch.equal(kept.state["hook/probe/mean"].chunks[0][1], torch.zeros(2))


def test_sentences_name_states_that_only_one_side_has() -> None:
    there = {"hooks": {"old": {"values": {}, "tensors": {}}}}
    begins, left = notes(there, {"new": Keeps()}, 4)
    assert begins == "hook new begins anew: the checkpoint of step 4 has no state of it"
    assert left.startswith("the state of hook old in the checkpoint of step 4 is not read")


def test_a_shape_beyond_the_files_is_damage_and_takes_no_memory() -> None:
    entry = {"values": {}, "tensors": {"mean": ["F32", [1 << 40]]}}
    manifest = SimpleNamespace(progress={"hooks": {"probe": entry}}, step=4, size=100)
    with pytest.raises(DamagedCheckpoint, match="names a state"):
        RestoredStates.of(manifest, {"probe": Keeps()}, CPU)
