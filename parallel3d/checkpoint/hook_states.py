"""Saves and restores the states of a script's hooks: tensors, and values of JSON.

The values and the shapes stand in the manifest's `progress`, the tensors in the ranks' files. Every
rank reads all entries, so a run resumes with them under any layout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel3d.checkpoint.manifest import HOOKS, DamagedCheckpoint, Manifest
from parallel3d.checkpoint.storage import DTYPES, State, TensorChunks
from parallel3d.errors import UserError

KIND = "hook"  # the kind of their tensors in a checkpoint
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Stateful(Protocol):
    """An object with a state, such as a `Hook`."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class SavedStates:
    """The states of all hooks at a save.

    Attributes:
        state: the tensors that this rank writes.
        progress: the entry of the manifest's `progress`; {} without hooks.
        elements: number of elements of all ranks' tensors.
    """

    state: State = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    elements: int = 0


def collect(
    hooks: Mapping[str, Stateful],
    share: Callable[[Any], list[Any]],
    rank: int,
    device: torch.device,
) -> SavedStates:
    """Asks the hooks for their states; collective over the ranks of `share`.

    The first rank that holds an entry writes it. Raises UserError on every rank for a value that a
    checkpoint cannot hold, and for an entry that differs between the ranks that hold it.
    """
    if not hooks:
        return SavedStates()
    mine = {name: dict(hook.state_dict()) for name, hook in hooks.items()}
    facts: dict[str, dict[str, Any]] = {}
    refused = None
    for name, entries in mine.items():
        for key, value in entries.items():
            what = f"hook {name}: state_dict()[{key!r}]"
            if not isinstance(key, str):
                refused = f"{what} must have a text as its name"
            elif isinstance(value, Tensor):
                if value.dtype not in NAMES:
                    refused = f"{what} is a tensor of {value.dtype}, which no checkpoint holds"
                    continue
                flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
                facts.setdefault(name, {})[key] = [NAMES[value.dtype], [*value.shape], digest]
            else:
                facts.setdefault(name, {})[key] = (text := _as_json(value))
                if text is None:
                    refused = (
                        f"{what} is a {type(value).__name__} that JSON does not keep as it is; "
                        "give texts, finite numbers, lists and dicts with texts as keys, or a "
                        "tensor"
                    )
    everyone = share([refused, facts])
    if refusals := [each for each, _ in everyone if each is not None]:
        raise UserError(refusals[0])
    progress: dict[str, Any] = {name: {"values": {}, "tensors": {}} for name in hooks}
    state: State = {}
    elements = 0
    first: dict[tuple[str, str], tuple[int, Any]] = {}
    for holder, (_, theirs) in enumerate(everyone):
        for name, entries in theirs.items():
            for key, fact in entries.items():
                known, other = first.setdefault((name, key), (holder, fact))
                if other != fact:
                    raise UserError(
                        f"hook {name}: state_dict()[{key!r}] differs between rank {known} and rank "
                        f"{holder}; give what differs a name of its own on each rank, or sum it"
                    )
    for (name, key), (holder, fact) in first.items():
        if isinstance(fact, str):
            progress[name]["values"][key] = json.loads(fact)
            continue
        dtype, shape, _ = fact
        progress[name]["tensors"][key] = [dtype, shape]
        size = torch.Size(shape).numel()
        elements += size
        if holder == rank and size:
            # A copy, because the hook may change its tensor while the file is written.
            flat = mine[name][key].detach().to(device, copy=True).reshape(-1)
            state[_stored(name, key)] = TensorChunks.whole(flat)
    return SavedStates(state, {HOOKS: progress}, elements)


@dataclass
class RestoredStates:
    """The states of a checkpoint, to be read; `state` is what `read_state` fills."""

    there: dict[str, Any]
    state: State

    @classmethod
    def of(
        cls, manifest: Manifest, hooks: Mapping[str, Stateful], device: torch.device
    ) -> RestoredStates:
        """Makes room for the tensors of those hooks that the run has.

        Raises DamagedCheckpoint if the files cannot hold them.
        """
        there = {n: e for n, e in manifest.progress.get(HOOKS, {}).items() if n in hooks}
        for entry in there.values():
            for dtype, shape in entry["tensors"].values():
                if dtype not in DTYPES or torch.Size(shape).numel() > manifest.size:
                    raise DamagedCheckpoint(
                        f"the checkpoint of step {manifest.step} names a state {shape} {dtype} of "
                        "a hook that its files do not hold"
                    )
        state = {
            _stored(name, key): TensorChunks.whole(
                torch.empty(torch.Size(shape).numel(), dtype=DTYPES[dtype], device=device)
            )
            for name, entry in there.items()
            for key, (dtype, shape) in entry["tensors"].items()
            if torch.Size(shape).numel()
        }
        return cls(there, state)

    def give(self, hooks: Mapping[str, Stateful], device: torch.device) -> None:
        """Gives the hooks their states."""
        for name, entry in self.there.items():
            found = dict(entry["values"])
            for key, (dtype, shape) in entry["tensors"].items():
                flat = torch.empty(0, dtype=DTYPES[dtype], device=device)
                if chunks := self.state.get(_stored(name, key)):
                    flat = chunks.chunks[0][1]
                found[key] = flat.reshape(shape)
            hooks[name].load_state_dict(found)


def notes(progress: Mapping[str, Any], hooks: Mapping[str, Stateful], step: int) -> list[str]:
    """Returns sentences on states that only the checkpoint or only the run has."""
    there = progress.get(HOOKS, {})
    return [
        *(
            f"hook {n} begins anew: the checkpoint of step {step} has no state of it"
            for n in hooks
            if n not in there
        ),
        *(
            f"the state of hook {n} in the checkpoint of step {step} is not read, because the run "
            "has no such hook"
            for n in there
            if n not in hooks
        ),
    ]


def _stored(name: str, key: str) -> str:
    return f"{KIND}/{name}/{key}"


def _as_json(value: Any) -> str | None:
    """Returns the value's JSON, or None if reading it would give another value."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return text if json.dumps(json.loads(text)) == text and _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(k) is str and _is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
