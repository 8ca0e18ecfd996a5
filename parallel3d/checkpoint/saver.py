"""Writes checkpoints, at once or in the background, so that each is whole or not there.

Every rank writes its file into `.saving-…`, flushes it and tells rank 0; rank 0 adds the manifest,
flushes, renames the folder to `step-…` and moves `latest`. In the background the ranks talk through
the store alone: a collective there would meet those of the training in any order.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import shutil
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from parallel3d import accelerator
from parallel3d.checkpoint.boxes import LogicalTensor
from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    LATEST,
    UNFINISHED,
    FileDigest,
    Manifest,
    flush_folder,
    list_checkpoints,
    step_folder,
    write_durably,
    write_manifest,
)
from parallel3d.checkpoint.retention import discard, too_many
from parallel3d.checkpoint.staging import Staging, State, device_of

if TYPE_CHECKING:
    from parallel3d.config import CheckpointConfig

POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """How a save ended: `problem` is None, or says why there is no new checkpoint.

    `is_bug`: not the disk's fault, but ours.
    """

    step: int
    problem: str | None = None
    is_bug: bool = False


@dataclass(frozen=True)
class Part:
    """What a rank wrote: its file (None if it had nothing to write) and the elements in it."""

    file: FileDigest | None
    elements: dict[str, int]
    outcome: Outcome

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Part:
        word = json.loads(text)
        file = FileDigest(**word["file"]) if word["file"] else None
        return cls(file, word["elements"], Outcome(**word["outcome"]))


@dataclass(frozen=True)
class Save:
    """One save under way. `facts` are the manifest without its files; `elements` of all parameters
    together, which the files must hold."""

    step: int
    number: int
    state: dict[str, LogicalTensor]
    facts: Manifest
    elements: int


class Saver:
    """One rank's part in the saves of a run; at most one is under way.

    Args:
        run_dir: on a file system that all hosts share.
        session: a word that all ranks of this start of the run share, and no other start has.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: CheckpointConfig,
        rank: int,
        world_size: int,
        session: str,
        timeout_s: float,
    ) -> None:
        self.run_dir, self.settings = run_dir, settings
        self.folder = run_dir / CHECKPOINTS
        self.rank, self.world_size, self.session = rank, world_size, session
        self.timeout_s = timeout_s
        self.outcome: Outcome | None = None
        self.thread: threading.Thread | None = None
        self.staging = Staging()
        self.copied = threading.Event()  # the values of the save under way may change again

    def start(self, save: Save, *, background: bool, copies: bool = True) -> None:
        """Begin a save; without `background` it has ended, on this rank, at the return.

        Then or later `outcome` says how it ended: on rank 0 the whole, elsewhere this rank's part.
        In the background the values may not change before `copied` is set: as soon as there is a
        copy, without `copies` (for the end of a run) when they are written. The calling thread is
        the one that computes them. Raises RuntimeError while another save is under way.
        """
        if self.thread is not None:
            raise RuntimeError("a save is under way, and its copies are where this one's would be")
        self.outcome = None
        if not background:
            self._work(save)
            return
        self.copied.clear()
        ready = self.staging.now(save.state)
        name = f"checkpoint of step {save.step}"
        self.thread = threading.Thread(
            target=self._in_background, args=(save, ready, copies), name=name, daemon=True
        )
        self.thread.start()

    def join(self) -> Outcome:
        """Wait for the save under way."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.outcome is None:
            raise RuntimeError("no save was started")
        return self.outcome

    def _in_background(self, save: Save, ready: Any, copies: bool) -> None:
        # A thread begins on device 0, and a call there would leave a context of this process on it.
        accelerator.make_current(device_of(save.state))
        copy = functools.partial(self.staging.copy, ready=ready) if copies else None
        self._work(save, copy)

    def _work(self, save: Save, copy: Callable[[State], State] | None = None) -> None:
        part = self._part(save, copy)
        outcome = part.outcome
        try:
            if self.rank == 0:
                outcome = self._finish(save, part)
            else:
                _store().set(self._key(save, self.rank), part.to_json())
        except Exception as error:
            outcome = _failed(save, self.rank, error)
        self.outcome = outcome

    def _part(self, save: Save, copy: Callable[[State], State] | None) -> Part:
        """Write this rank's file, of a copy of the values or of themselves."""
        unfinished = self._unfinished(save)
        try:
            state = copy(save.state) if copy is not None else save.state
            self.copied.set()
            # Here, as DCP takes half a second to import.
            from parallel3d.checkpoint.storage import write_state

            for folder in (self.folder, unfinished):
                folder.mkdir(mode=0o700, exist_ok=True)
            written = None
            if state:
                written = write_state(unfinished / f"rank-{self.rank:05d}.safetensors", state)
        except Exception as error:
            return Part(None, {}, _failed(save, self.rank, error))
        finally:
            self.copied.set()
        return Part(written, _elements_by_kind(save.state), Outcome(save.step))

    def _finish(self, save: Save, mine: Part) -> Outcome:
        """Rank 0: when every part is there, make a checkpoint of them, or remove them."""
        unfinished = self._unfinished(save)
        try:
            parts = [mine, *self._parts_of_others(save)]
            failed = [p.outcome for p in parts if p.outcome.problem is not None]
            if failed:
                return max(failed, key=lambda outcome: outcome.is_bug)
            totals = _sum([p.elements for p in parts])
            if any(total != save.elements for total in totals.values()):
                raise RuntimeError(f"the ranks wrote {totals} elements, not {save.elements}")
            self._commit(save, unfinished, [p.file for p in parts if p.file is not None])
        finally:
            self._pointer().unlink(missing_ok=True)
            if unfinished.exists():
                shutil.rmtree(unfinished)
        return Outcome(save.step)

    def _parts_of_others(self, save: Save) -> list[Part]:
        others = [self._key(save, rank) for rank in range(1, self.world_size)]
        if not others:
            return []
        store, deadline = _store(), time.monotonic() + self.timeout_s
        while not store.check(others):
            if time.monotonic() > deadline:
                raise TimeoutError(None, f"no word of every rank within {self.timeout_s:g} s")
            time.sleep(POLL_S)
        parts = [Part.from_json(store.get(key)) for key in others]
        for key in others:
            store.delete_key(key)
        return parts

    def _commit(self, save: Save, unfinished: Path, files: list[FileDigest]) -> None:
        for file in files:
            path = unfinished / file.name
            if not path.is_file() or path.stat().st_size != file.size:
                hint = "is runs_dir on a file system that all hosts share?"
                raise OSError(None, f"rank 0 does not see {file.name}: {hint}")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_manifest(
            unfinished, dataclasses.replace(save.facts, saved_at=now, files=tuple(files))
        )
        flush_folder(unfinished)
        pointer = self._pointer()
        final = self.folder / step_folder(save.step)
        write_durably(pointer, f"{final.name}\n".encode())  # before: the disk may be full
        if final.exists():  # of a future that was given up
            discard(final)
        os.rename(unfinished, final)
        os.replace(pointer, self.folder / LATEST)
        flush_folder(self.folder)
        for old in too_many(list_checkpoints(self.run_dir), self.settings):
            discard(old)

    def _unfinished(self, save: Save) -> Path:
        return self.folder / f"{UNFINISHED}{save.step:08d}-{self.session}"

    def _pointer(self) -> Path:
        return self.folder / f".{LATEST}-{self.session}"

    def _key(self, save: Save, rank: int) -> str:
        return f"parallel3d/checkpoint/{self.session}/{save.number}/{rank}"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _elements_by_kind(state: dict[str, LogicalTensor]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name, tensor in state.items():
        counts[name.partition("/")[0]] += sum(box.elements for box, _ in tensor.boxes)
    return dict(counts)


def _sum(counts: list[dict[str, int]]) -> dict[str, int]:
    kinds = sorted({kind for count in counts for kind in count})
    return {kind: sum(count.get(kind, 0) for count in counts) for kind in kinds}


def _failed(save: Save, rank: int, error: Exception) -> Outcome:
    """A full or broken disk is said in words, a mistake of ours with its trace."""
    if isinstance(error, OSError):
        return Outcome(save.step, f"{error.strerror or error} (rank {rank})")
    trace = "".join(traceback.format_exception(error))
    return Outcome(save.step, f"rank {rank}: {trace}", is_bug=True)
