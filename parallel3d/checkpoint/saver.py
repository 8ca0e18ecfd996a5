"""Writes checkpoints in the foreground or background, so that each is complete or does not exist.

Every rank writes its file into the folder `.saving-…`, flushes it and notifies rank 0. Rank 0 adds
the manifest, flushes it, and renames the folder to `step-…`. The save has then succeeded, even if
updating `latest` or removing old checkpoints fails. Background threads communicate only through the
store, because collectives in them would interleave with the collectives of training.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    CLAIM,
    DAMAGED,
    LATEST,
    REMOVED,
    UNFINISHED,
    FileDigest,
    Manifest,
    entries,
    list_checkpoints,
    reason,
    step_folder,
    step_of,
    write_manifest,
)
from parallel3d.checkpoint.storage import State, write_state
from parallel3d.comm.store import get_all, put
from parallel3d.device import accelerator
from parallel3d.files import (
    flush_folder,
    lock,
    parse_json,
    plain,
    read_bounded,
    replace_durably,
)
from parallel3d.parameters.segments import Chunk
from parallel3d.private_names import default_store, foreach_copy_

if TYPE_CHECKING:
    from parallel3d.checkpoint.keys import CheckpointConfig


# The lease on a run's checkpoints, and the removal of expired checkpoints and of leftovers

_LARGEST = 1 << 16  # maximum bytes of a claim


class Lease:
    """Claims a run's checkpoints for one start of the run, on file systems without locks.

    If the file system has locks, a lock keeps a second start out (`run.directory.take_run`).
    Otherwise two starts would remove each other's files. Rank 0 of each start therefore writes its
    session into the folder; a start that finds another session there writes nothing and ends.

    Args:
        session: a name that is unique to this start.
    """

    def __init__(self, run_dir: Path, session: str) -> None:
        self.run_dir = run_dir
        self.session = session
        self.path = run_dir / CHECKPOINTS / CLAIM
        self.tried = self.taken = False

    def take(self) -> list[str]:
        """Claims the folder, unless this was done before; returns sentences to log."""
        if self.taken:
            return []
        self.tried, before = True, self._current()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        mine = {"session": self.session, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_durably(self.path, f"{json.dumps(mine | {'since': since})}\n".encode())
            self.taken = True
            if before is None or _has_locks(self.path):
                return []
        except OSError as error:
            return [
                f"{self.path} cannot be written ({reason(error)}): make sure that no other start "
                "of this run is active"
            ]
        return [
            f"{self.run_dir} is on a file system without locks: if the earlier start, at "
            f"{_who(before)}, is still running, that start ends at its next save"
        ]

    def lost_to(self) -> str | None:
        """Returns a sentence if another start has claimed the folder, or None otherwise.

        If there is no other start, this start claims the folder, unless it has done so already. An
        unreadable claim does not prove that there is another start.
        """
        current = None if self.tried and not self.taken else self._current()
        if current is not None and current.get("session") != self.session:
            return f"{self.run_dir} was taken over by another start, at {_who(current)}"
        self.take()
        return None

    def _current(self) -> dict[str, object] | None:
        try:
            found = parse_json(read_bounded(self.path, _LARGEST))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def _who(claim: dict[str, object]) -> str:
    return plain(f"{claim.get('since')} on {claim.get('host')} (process {claim.get('pid')})")


def _has_locks(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return lock(descriptor)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


_LEFTOVERS = (UNFINISHED, REMOVED, f".{LATEST}", f".{CLAIM}.")


def expired(newest_first: Iterable[Path], settings: CheckpointConfig) -> list[Path]:
    """Returns the checkpoints to remove.

    The newest `keep` checkpoints stay, as do all whose step is a multiple of `keep_every`. Saves by
    time rarely meet a multiple, so the first checkpoint from each multiple on stays, also when the
    run goes on with saves by steps. A checkpoint that these have made is a multiple of `every`.
    """
    listed, every = list(newest_first), settings.keep_every
    old = listed[settings.keep :]
    if not every:
        return old
    before = [*map(step_of, listed[settings.keep + 1 :]), 0]

    def stays(step: int, before: int) -> bool:
        may_be_by_time = settings.is_timed or not settings.every or step % settings.every != 0
        return step % every == 0 or (may_be_by_time and step // every > before // every)

    return [p for p, step in zip(old, before, strict=False) if not stays(step_of(p), step)]


def remove_leftovers(run_dir: Path) -> list[str]:
    """Removes the files that interrupted saves and removals left in the folder.

    Returns a sentence for each failed removal.
    """
    try:
        left = [path for path in entries(run_dir) if path.name.startswith(_LEFTOVERS)]
    except OSError as error:
        folder = run_dir / CHECKPOINTS
        return [f"{folder} cannot be searched for leftovers ({reason(error)})"]
    return remove_all(left)


def remove_all(paths: Iterable[Path]) -> list[str]:
    """Removes files, folders and checkpoints; returns a sentence for each failed removal."""
    notes = []
    for path in paths:
        try:
            if not path.is_dir():
                path.unlink(missing_ok=True)
                continue
            # A checkpoint is renamed first, so that a half-removed one does not look complete.
            if not path.name.startswith(_LEFTOVERS):
                path = path.rename(path.with_name(f"{REMOVED}{path.name}-{uuid.uuid4().hex[:8]}"))
            shutil.rmtree(path)
        except OSError as error:
            notes.append(plain(f"{path.name} could not be removed ({reason(error)})"))
    return notes


def describe_newest(run_dir: Path) -> str:
    """Returns a clause that names the run's newest checkpoint, for messages on failed saves."""
    try:
        old = list_checkpoints(run_dir)
    except OSError as error:
        return f"the other checkpoints cannot be listed ({reason(error)})"
    return f"{old[0].name} remains the newest" if old else "there is no checkpoint yet"


def set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint, so that it is ignored but can be inspected. Raises OSError."""
    number, aside = 1, folder.with_name(DAMAGED + folder.name)
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{DAMAGED}{folder.name}.{number}")
    os.rename(folder, aside)
    return aside


# Saving


@dataclass(frozen=True)
class SaveResult:
    """Describes how a whole save, or one rank's part of it, ended.

    Attributes:
        problem: reason why the save failed, or None if it succeeded.
        is_bug: whether a bug caused the problem, rather than a disk error.
        is_overtaken: whether the save failed because another start has taken over the run.
        notes: sentences on other errors, which do not make the save fail.
        file: the file that the rank wrote; None if it had nothing to write, and for a whole save.
        elements: number of elements of each kind in the rank's file.
    """

    problem: str | None = None
    is_bug: bool = False
    is_overtaken: bool = False
    notes: tuple[str, ...] = ()
    file: FileDigest | None = None
    elements: dict[str, int] = field(default_factory=dict)


def count_elements(state: State) -> dict[str, int]:
    """Counts the elements of each kind, where a kind is a word such as "parameter"."""
    counts: Counter[str] = Counter()
    for name, tensor in state.items():
        counts[name.partition("/")[0]] += sum(chunk.elements for chunk, _ in tensor.chunks)
    return dict(counts)


# The number of elements of some kinds together, such as parameter, or exp_avg and momentum.
ElementSums = Mapping[tuple[str, ...], int]


def missing(expected: ElementSums, totals: Mapping[str, int]) -> str | None:
    """Returns a clause on elements that are missing or surplus, or None.

    `totals` is the number of elements of each kind that all ranks wrote.
    """
    known = {kind for kinds in expected for kind in kinds}
    wanted = dict(expected) | {(kind,): 0 for kind in totals if kind not in known}
    clauses = []
    for kinds, count in wanted.items():
        found = sum(totals.get(kind, 0) for kind in kinds)
        if found != count:
            clauses.append(f"{found} elements of {' and '.join(kinds)}, not {count}")
    return "; ".join(clauses) or None


def failed(rank: int, error: Exception) -> SaveResult:
    """Returns the result of a failed save.

    An OSError is described in words. Any other error is a bug, and is given with its traceback
    after a first line that says what it is.
    """
    if isinstance(error, OSError):
        return SaveResult(f"{error.strerror or error} (rank {rank})")
    trace = "".join(traceback.format_exception(error))
    first = plain(f"{type(error).__name__}: {error}")
    return SaveResult(f"{first} (rank {rank})\n{trace}", is_bug=True)


# The folder of a checkpoint, from its first file to its final name


def unfinished_folder(run_dir: Path, step: int, session: str) -> Path:
    """Returns the folder in which a checkpoint is written before it gets its final name.

    The name contains `session`, so that leftovers of an earlier attempt are not in the way.
    """
    return run_dir / CHECKPOINTS / f"{UNFINISHED}{step:08d}-{session}"


def write_part(unfinished: Path, rank: int, state: State) -> FileDigest | None:
    """Creates the folders and writes a rank's file; returns None if the rank has nothing to write.

    Raises OSError.
    """
    for folder in (unfinished.parent, unfinished):
        folder.mkdir(mode=0o700, exist_ok=True)
    return write_state(unfinished / f"rank-{rank:05d}.safetensors", state) if state else None


def complete(unfinished: Path, facts: Manifest, files: Sequence[FileDigest]) -> Path:
    """Assembles the checkpoint from the ranks' files, and returns its folder.

    An existing checkpoint of the same step is kept instead. Raises OSError.

    Args:
        facts: the manifest without its files and its time.
    """
    for file in files:
        path = unfinished / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            hint = "are the checkpoints on a file system that all hosts share?"
            raise OSError(None, f"rank 0 does not see {file.name}: {hint}")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_manifest(unfinished, dataclasses.replace(facts, saved_at=now, files=tuple(files)))
    flush_folder(unfinished)
    final = unfinished.with_name(step_folder(facts.step))
    try:
        os.rename(unfinished, final)
    except OSError:
        # The folder may exist: another start made it, or NFS lost the reply to a completed rename.
        if not os.path.isdir(final):
            raise
    return final


_ALIGNED = 64  # alignment of staged chunks in bytes
# Bytes of a slab. torch rounds pinned allocations up to a power of two, so that a single slab of
# 33 GiB would take 64 GiB of host memory.
SLAB = 1 << 30


class Staging:
    """Copies chunks to CPU memory, so that training can continue during a save.

    The copy is made while the next step computes its gradients: parameters and moments do not
    change before the update, which waits for the copy (`Trainer.copied`). The memory is kept
    between saves and holds one copy, which the next save overwrites; `Saver.start` refuses a new
    save while the previous one is in flight.
    """

    def __init__(self) -> None:
        self.slabs: list[Tensor] = []  # uint8, pinned for chunks on an accelerator
        self.stream: Any = None  # stream of copies that overlap with training

    def prepare(self, state: State) -> list[tuple[str, Chunk, Tensor, Tensor]]:
        """Allocates the memory that `state` needs, unless it is allocated already.

        This takes about half a second per GB, so a caller does it before the first save. Returns
        (name, chunk, values, place in a slab) for every chunk. Chunks are packed into slabs, the
        largest first.
        """
        pinned = accelerator.is_accelerator(device_of(state))
        used: list[int] = []  # bytes of each slab
        places = []
        for name, chunk, values in sorted(_parts(state), key=lambda part: -part[2].nbytes):
            size = -(-values.nbytes // _ALIGNED) * _ALIGNED
            slab = next((i for i, taken in enumerate(used) if taken + size <= SLAB), len(used))
            if slab == len(used):
                used.append(0)
            places.append((name, chunk, values, slab, used[slab]))
            used[slab] += size
        for i, size in enumerate(used):
            if i == len(self.slabs) or self.slabs[i].numel() < size:
                new = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                self.slabs[i : i + 1] = [new if pinned else new.zero_()]
        found = []
        for name, chunk, values, slab, at in places:
            memory = self.slabs[slab][at : at + values.nbytes]
            found.append((name, chunk, values, memory.view(values.dtype).view(values.shape)))
        return found

    def now(self, state: State) -> Any:
        """Returns an event that follows all queued work, which computes the values of `state`.

        On a CPU the values are ready, and the result is None.
        """
        device = device_of(state)
        if not accelerator.is_accelerator(device):
            return None
        event = accelerator.module(device).Event()
        event.record(accelerator.module(device).current_stream(device))
        return event

    def copy(self, state: State, ready: Any = None) -> State:
        """Copies the values into the slabs and returns the copies.

        Chunks larger than a slab are cut by rows. With `ready`, an event from `now`, the values are
        copied on a separate stream as soon as the event has occurred, without waiting for work that
        was queued later. The copy is complete when this returns.
        """
        copied = {name: dataclasses.replace(tensor, chunks=[]) for name, tensor in state.items()}
        pairs = []
        for name, chunk, source, target in self.prepare(state):
            copied[name].chunks.append((chunk, target))
            pairs.append((target, source))
        if ready is not None:
            self._copy_on_stream(pairs, device_of(state), ready)
        elif pairs:
            targets, sources = zip(*pairs, strict=True)
            foreach_copy_(targets, sources)
        return copied

    def _copy_on_stream(
        self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, ready: Any
    ) -> None:
        if self.stream is None:
            self.stream = accelerator.module(device).Stream(device)
        self.stream.wait_event(ready)
        try:
            with accelerator.on_stream(self.stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
        finally:  # needed even after an error, because queued copies still write to the slabs
            self.stream.synchronize()


def device_of(state: State) -> torch.device:
    chunks = (values for tensor in state.values() for _, values in tensor.chunks)
    return next((values.device for values in chunks), torch.device("cpu"))


def _parts(state: State) -> Iterator[tuple[str, Chunk, Tensor]]:
    """Yields (name, chunk, values) of every chunk; cuts chunks larger than a slab by rows."""
    for name, tensor in state.items():
        for chunk, values in tensor.chunks:
            if values.nbytes <= SLAB:
                yield name, chunk, values
                continue
            rows = max(1, SLAB // values[0].nbytes)
            for first in range(0, chunk.sizes[0], rows):
                part = values[first : first + rows]
                start = (chunk.offsets[0] + first, *chunk.offsets[1:])
                yield name, Chunk(start, tuple(part.shape)), part


POLL_S = 0.02


@dataclass(frozen=True)
class Save:
    """Describes a save in flight.

    Attributes:
        step: optimizer steps done.
        number: number of this save since the start of the session.
        state: this rank's chunks.
        facts: the manifest without its files and its time.
        expected: the numbers of elements that all ranks together write; None if the caller knows
            that they make up the state.
        copied: cleared while the values of a background save must not change.
    """

    step: int
    number: int
    state: State
    facts: Manifest
    expected: ElementSums | None
    copied: threading.Event = field(default_factory=threading.Event)


class Saver:
    """Writes one rank's part of a run's saves; at most one save is in flight.

    Args:
        run_dir: the run's folder, on a file system that all hosts share.
        session: a name that is the same on all ranks, and different for each start of the run.
        lease: the lease on the folder, for rank 0. With None, another start is not detected.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: CheckpointConfig,
        rank: int,
        world_size: int,
        session: str,
        timeout_s: float,
        lease: Lease | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.settings = settings
        self.folder = run_dir / CHECKPOINTS
        self.rank = rank
        self.world_size = world_size
        self.session = session
        self.timeout_s = timeout_s
        self.lease = lease
        self.outcome: SaveResult | None = None
        self.thread: threading.Thread | None = None
        self.staging = Staging()

    def start(self, save: Save, *, background: bool, copies: bool = True) -> None:
        """Begins a save; without `background`, also completes this rank's part of it.

        At the end, `outcome` is set. It describes the whole save on rank 0, and only the rank's own
        part on other ranks.
        During a background save the values must not change before `save.copied` is set or, without
        `copies` (at the end of a run), before the save has ended. This must be called by the thread
        that computes the values. Raises RuntimeError if another save is in flight.
        """
        if self.thread is not None:
            raise RuntimeError("a save is in flight and still uses the memory for copies")
        self.outcome = None
        if not background:
            self._work(save)
            return
        save.copied.clear()
        ready = self.staging.now(save.state)

        def work() -> None:
            # A new thread uses device 0 by default, where its first call would create a context.
            accelerator.make_current(device_of(save.state))
            self._work(save, lambda state: self.staging.copy(state, ready) if copies else state)

        name = f"checkpoint of step {save.step}"
        self.thread = threading.Thread(target=work, name=name, daemon=True)
        self.thread.start()

    def join(self) -> SaveResult:
        """Waits for the end of the save on this rank and returns its outcome."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.outcome is None:
            raise RuntimeError("no save was started")
        return self.outcome

    def _work(self, save: Save, copy: Callable[[State], State] = lambda state: state) -> None:
        outcome = self._part(save, copy)
        try:
            if self.rank == 0:
                outcome = self._finish(save, outcome)
            else:
                put(_store(), self._key(save, self.rank), dataclasses.asdict(outcome))
        except Exception as error:
            outcome = failed(self.rank, error)
        self.outcome = outcome

    def _part(self, save: Save, copy: Callable[[State], State]) -> SaveResult:
        """Copies this rank's values with `copy`, sets `save.copied`, and writes the rank's file."""
        try:
            state = copy(save.state)
            save.copied.set()
            file = write_part(self._unfinished(save), self.rank, state)
            return SaveResult(file=file, elements=count_elements(state))
        except Exception as error:
            return failed(self.rank, error)
        finally:
            save.copied.set()

    def _finish(self, save: Save, mine: SaveResult) -> SaveResult:
        """Waits for the parts of all ranks, and completes the checkpoint or removes the parts."""
        try:
            parts = [mine, *self._parts_of_others(save)]
            # The lease is checked first, because another start may have caused failures of parts.
            if self.lease is not None and (other := self.lease.lost_to()) is not None:
                return SaveResult(other, is_overtaken=True)
            bad = [part for part in parts if part.problem is not None]
            outcome = max(bad, key=lambda p: p.is_bug) if bad else self._complete(save, parts)
        except Exception as error:
            outcome = failed(self.rank, error)
        left = remove_all([self._unfinished(save)])  # the folder is gone if the save succeeded
        return dataclasses.replace(outcome, notes=(*outcome.notes, *left))

    def _complete(self, save: Save, parts: list[SaveResult]) -> SaveResult:
        """Assembles the checkpoint from all parts.

        Raises OSError if writing fails, and RuntimeError if elements are missing or surplus.
        """
        totals: Counter[str] = sum((Counter(part.elements) for part in parts), Counter())
        if save.expected is not None and (clause := missing(save.expected, totals)):
            raise RuntimeError(f"the ranks wrote {clause}")
        files = [part.file for part in parts if part.file is not None]
        complete(self._unfinished(save), save.facts, files)
        return SaveResult(notes=tuple(self._clean_up(save)))

    def _parts_of_others(self, save: Save) -> list[SaveResult]:
        others = [self._key(save, rank) for rank in range(1, self.world_size)]
        if not others:
            return []
        store, deadline = _store(), time.monotonic() + self.timeout_s
        while not store.check(others):
            if time.monotonic() > deadline:
                raise TimeoutError(None, f"some ranks did not finish in {self.timeout_s:g} s")
            time.sleep(POLL_S)
        try:
            parts = [_part_of(facts) for facts in get_all(store, others)]
        except ValueError as error:  # a message was not signed by a rank of this job
            raise OSError(None, str(error)) from None
        for key in others:
            store.delete_key(key)
        return parts

    def _clean_up(self, save: Save) -> list[str]:
        """Updates `latest` and removes expired checkpoints; returns a sentence for each error."""
        try:
            replace_durably(self.folder / LATEST, f"{step_folder(save.step)}\n".encode())
            gone = expired(list_checkpoints(self.run_dir), self.settings)
        except OSError as error:  # nothing is removed until the new checkpoint is listed
            done = f"{step_folder(save.step)} is written"
            return [f"{done}, but {LATEST} or the folder could not be updated ({reason(error)})"]
        return remove_all(gone)

    def _unfinished(self, save: Save) -> Path:
        return unfinished_folder(self.run_dir, save.step, f"{self.session}-{save.number}")

    def _key(self, save: Save, rank: int) -> str:
        return f"parallel3d/checkpoint/{self.session}/{save.number}/{rank}"


def _part_of(facts: dict[str, Any]) -> SaveResult:
    file = FileDigest(**facts["file"]) if facts["file"] else None
    return SaveResult(**facts | {"file": file, "notes": tuple(facts["notes"])})


def _store() -> dist.Store:
    return default_store()
