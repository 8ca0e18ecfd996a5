"""What ranks say of a save: how their part of it went, and how it ended."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import shutil
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    LATEST,
    UNFINISHED,
    FileDigest,
    Manifest,
    list_checkpoints,
    reason,
    step_folder,
    write_manifest,
)
from parallel3d.checkpoint.planners import Box, LogicalTensor
from parallel3d.checkpoint.retention import (
    Claim,
    Overtaken,
    discard,
    make_way,
    not_removed,
    too_many,
)
from parallel3d.comm.store import get_all, put
from parallel3d.device import accelerator
from parallel3d.files import flush_folder, write_durably

if TYPE_CHECKING:
    from parallel3d.config.schema import CheckpointConfig


@dataclass(frozen=True)
class Outcome:
    """How a save ended: `problem` is None, or says why there is no new checkpoint.

    `is_bug`: not the disk's fault, but ours. `is_overtaken`: another start has the run now.
    `notes`: sentences on what went wrong beside it and changes nothing.
    """

    step: int
    problem: str | None = None
    is_bug: bool = False
    is_overtaken: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenFile:
    """What a rank wrote: its file (None if it had nothing to write) and the elements in it."""

    file: FileDigest | None
    elements: dict[str, int]
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """What JSON has of it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, word: dict[str, Any]) -> WrittenFile:
        file = FileDigest(**word["file"]) if word["file"] else None
        outcome = Outcome(**word["outcome"] | {"notes": tuple(word["outcome"]["notes"])})
        return cls(file, word["elements"], outcome)


def elements_by_kind(state: dict[str, LogicalTensor]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name, tensor in state.items():
        counts[name.partition("/")[0]] += sum(box.elements for box, _ in tensor.boxes)
    return dict(counts)


def summed(counts: list[dict[str, int]]) -> dict[str, int]:
    kinds = sorted({kind for count in counts for kind in count})
    return {kind: sum(count.get(kind, 0) for count in counts) for kind in kinds}


def failed(step: int, rank: int, error: Exception) -> Outcome:
    """A full or broken disk is said in words, a mistake of ours with its trace."""
    if isinstance(error, OSError):
        return Outcome(step, f"{error.strerror or error} (rank {rank})")
    trace = "".join(traceback.format_exception(error))
    return Outcome(step, f"rank {rank}: {trace}", is_bug=True)


# A copy of what a save writes, so that training can go on while it is written.
#
# The copy itself is made while the next step computes its gradients: parameters and moments stay as
# they are until its update, which waits for the copy (`Trainer.before_update`).


_ALIGNED = 64  # bytes: every staged box begins at a multiple
# Bytes. torch pins a power of two: in one piece 33 GiB would take 64 of the host's memory.
SLAB = 1 << 30

State = dict[str, LogicalTensor]


class Staging:
    """Room in CPU memory for copies of boxes, kept from save to save.

    One copy is in it at a time: whoever calls `copy` again has done with the last one, which is
    overwritten (`Saver.start` waits for the save before).
    """

    def __init__(self) -> None:
        self.slabs: list[Tensor] = []  # uint8, pinned for boxes on an accelerator
        self.stream: Any = None  # for copies beside the training

    def prepare(self, state: State) -> None:
        """Make room for `state`, if there is not enough.

        It is filled, or pinned, here and not in the middle of a step: at half a second a GB.
        """
        pinned = accelerator.is_accelerator(device_of(state))
        _, sizes = _places([part.nbytes for _, _, part in _parts(state)])
        for i, size in enumerate(sizes):
            if i < len(self.slabs) and self.slabs[i].numel() >= size:
                continue
            slab = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self.slabs[i : i + 1] = [slab if pinned else slab.zero_()]

    def now(self, state: State) -> Any:
        """Where the values of `state` are those to be saved: an event, to be recorded by the thread
        that computes them; None for the CPU's, whose values are there."""
        device = device_of(state)
        if not accelerator.is_accelerator(device):
            return None
        event = accelerator.module(device).Event()
        event.record(accelerator.module(device).current_stream(device))
        return event

    def copy(self, state: State, ready: Any = None) -> State:
        """The same values, in the slabs; boxes larger than a slab are cut by rows.

        From an accelerator they are copied on a stream of their own, behind `ready` (of `now`): not
        behind what was queued since. At the return all is copied, or nothing writes any more.
        """
        self.prepare(state)
        parts = list(_parts(state))
        places, _ = _places([part.nbytes for _, _, part in parts])
        copied = {name: dataclasses.replace(tensor, boxes=[]) for name, tensor in state.items()}
        pairs = []
        for (name, box, source), (slab, at) in zip(parts, places, strict=True):
            room = self.slabs[slab][at : at + source.nbytes]
            target = room.view(source.dtype).view(source.shape)
            copied[name].boxes.append((box, target))
            pairs.append((target, source))
        if ready is not None:
            self._copy_beside(pairs, device_of(state), ready)
        elif pairs:
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, sources)
        return copied

    def _copy_beside(
        self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, ready: Any
    ) -> None:
        if self.stream is None:
            self.stream = accelerator.module(device).Stream(device)
        self.stream.wait_event(ready)
        try:
            with accelerator.on_stream(self.stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
        finally:  # also if one cannot be queued: the slabs are written to until here
            self.stream.synchronize()


def device_of(state: State) -> torch.device:
    """Where the values of `state` are; the CPU if it has none."""
    boxes = (values for tensor in state.values() for _, values in tensor.boxes)
    return next((values.device for values in boxes), torch.device("cpu"))


def _parts(state: State) -> Iterator[tuple[str, Box, Tensor]]:
    """(name, box, values) of every box, cut by rows to parts that fit a slab."""
    for name, tensor in state.items():
        for box, values in tensor.boxes:
            if values.nbytes <= SLAB:
                yield name, box, values
                continue
            rows = max(1, SLAB // values[0].nbytes)
            for first in range(0, box.sizes[0], rows):
                part = values[first : first + rows]
                start = (box.offsets[0] + first, *box.offsets[1:])
                yield name, Box(start, tuple(part.shape)), part


def _places(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """(slab, first byte) of each part, and the bytes of each slab.

    The largest first, each into the first slab with room: little is left over.
    """
    places, used = [(0, 0)] * len(sizes), []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        room = _padded(sizes[i])
        fitting = (slab for slab, taken in enumerate(used) if taken + room <= SLAB)
        slab = next(fitting, len(used))
        if slab == len(used):
            used.append(0)
        places[i] = (slab, used[slab])
        used[slab] += room
    return places, used


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


# Writes checkpoints, at once or in the background, so that each is whole or not there.
#
# Every rank writes its file into `.saving-…`, flushes it and tells rank 0; rank 0 adds the
# manifest, flushes and renames the folder to `step-…`: then the save has succeeded, and what
# follows (`latest`, the checkpoints that are too many) may fail without changing that. In the
# background the ranks talk through the store alone: a collective there would meet those of the
# training in any order.


POLL_S = 0.02


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
        claim: rank 0's to the folder; None where no other start can be.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: CheckpointConfig,
        rank: int,
        world_size: int,
        session: str,
        timeout_s: float,
        claim: Claim | None = None,
    ) -> None:
        self.run_dir, self.settings = run_dir, settings
        self.folder = run_dir / CHECKPOINTS
        self.rank, self.world_size, self.session = rank, world_size, session
        self.timeout_s, self.claim = timeout_s, claim
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
                put(_store(), self._key(save, self.rank), part.to_json())
        except Exception as error:
            outcome = failed(save.step, self.rank, error)
        self.outcome = outcome

    def _part(self, save: Save, copy: Callable[[State], State] | None) -> WrittenFile:
        """Write this rank's file, of a copy of the values or of themselves."""
        unfinished = self._unfinished(save)
        try:
            state = copy(save.state) if copy is not None else save.state
            self.copied.set()
            # Imported by `Checkpoints`; not at the top: a run without saves needs none of it.
            from parallel3d.checkpoint.storage import write_state

            for folder in (self.folder, unfinished):
                folder.mkdir(mode=0o700, exist_ok=True)
            written = None
            if state:
                written = write_state(unfinished / f"rank-{self.rank:05d}.safetensors", state)
        except Exception as error:
            return WrittenFile(None, {}, failed(save.step, self.rank, error))
        finally:
            self.copied.set()
        return WrittenFile(written, elements_by_kind(save.state), Outcome(save.step))

    def _finish(self, save: Save, mine: WrittenFile) -> Outcome:
        """Rank 0: when every part is there, make a checkpoint of them, or remove them."""
        try:
            parts = [mine, *self._parts_of_others(save)]
            if self.claim is not None:
                self.claim.check()  # first: what failed may have failed by the other start
            bad = [p.outcome for p in parts if p.outcome.problem is not None]
            outcome = max(bad, key=lambda o: o.is_bug) if bad else self._made(save, parts)
        except Overtaken as other:
            return Outcome(save.step, str(other), is_overtaken=True)
        except Exception as error:
            outcome = failed(save.step, self.rank, error)
        notes = outcome.notes
        for path, remove in ((self._pointer(), os.unlink), (self._unfinished(save), shutil.rmtree)):
            try:
                remove(path)
            except FileNotFoundError:
                pass  # as it should be after a save that succeeded
            except OSError as error:
                notes = (*notes, not_removed(path, error))
        return dataclasses.replace(outcome, notes=notes)

    def _made(self, save: Save, parts: list[WrittenFile]) -> Outcome:
        """The checkpoint of all parts. Raises OSError and RuntimeError if there is none."""
        totals = summed([p.elements for p in parts])
        if any(total != save.elements for total in totals.values()):
            raise RuntimeError(f"the ranks wrote {totals} elements, not {save.elements}")
        old = self._commit(save, [p.file for p in parts if p.file is not None])
        return Outcome(save.step, notes=tuple(self._keep_house(save, old)))

    def _parts_of_others(self, save: Save) -> list[WrittenFile]:
        others = [self._key(save, rank) for rank in range(1, self.world_size)]
        if not others:
            return []
        store, deadline = _store(), time.monotonic() + self.timeout_s
        while not store.check(others):
            if time.monotonic() > deadline:
                raise TimeoutError(None, f"no word of every rank within {self.timeout_s:g} s")
            time.sleep(POLL_S)
        try:
            parts = [WrittenFile.from_json(word) for word in get_all(store, others)]
        except ValueError as stranger:  # no rank's word: nothing that this save can be made of
            raise OSError(None, str(stranger)) from None
        for key in others:
            store.delete_key(key)
        return parts

    def _commit(self, save: Save, files: list[FileDigest]) -> Path | None:
        """Make the checkpoint; what this raises leaves all others as they were.

        Returns where one of the same step is now: of a future that was given up.
        """
        unfinished = self._unfinished(save)
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
        final = self.folder / step_folder(save.step)
        # Before: the disk may be full.
        write_durably(self._pointer(), f"{final.name}\n".encode())
        old = make_way(final) if final.exists() else None
        try:
            os.rename(unfinished, final)
        except OSError:
            if not os.path.isdir(final):  # NFS may lose the answer of a rename that was done
                if old is not None:
                    with suppress(OSError):  # or else the next start brings it back
                        os.rename(old, final)
                raise
        return old

    def _keep_house(self, save: Save, old: Path | None) -> list[str]:
        """What follows a save that has succeeded: its errors are sentences, and change nothing."""
        try:
            os.replace(self._pointer(), self.folder / LATEST)
            flush_folder(self.folder)
            gone = too_many(list_checkpoints(self.run_dir), self.settings)
        except OSError as error:  # until the new one is certain, the older ones stay
            done = f"{step_folder(save.step)} is written"
            return [f"{done}, but {LATEST} or the folder could not be ({reason(error)})"]
        notes = []
        for path in ([old] if old else []) + gone:
            try:
                shutil.rmtree(path) if path == old else discard(path)
            except OSError as error:
                notes.append(not_removed(path, error))
        return notes

    def _unfinished(self, save: Save) -> Path:
        # The number: what an earlier try could not remove is not in the way of the next.
        return self.folder / f"{UNFINISHED}{save.step:08d}-{self.session}-{save.number}"

    def _pointer(self) -> Path:
        return self.folder / f".{LATEST}-{self.session}"

    def _key(self, save: Save, rank: int) -> str:
        return f"parallel3d/checkpoint/{self.session}/{save.number}/{rank}"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
