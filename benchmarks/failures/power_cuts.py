"""Simulates power cuts during `train`: copies the disk at a system call, and runs the command again
on it.

The command runs on an ext4 file system in a file (a loop device). At the n-th call of a kind it is
stopped, and the file is copied: the copy has everything that was flushed, and nothing that was only
in the host's memory. It is mounted in ext4's least safe mode (`data=writeback,noauto_da_alloc`: a
rename may be on the disk before the content of the renamed file). In half of the cuts, the journal
alone is written at the last moment. Then the same command runs on the copy.

    python -m benchmarks.command_faults --pairs 0 --blocks 0 --cuts 60

Needs root, mkfs.ext4 and a free loop device.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.failures.command_cases import RUN, Calls, Stage
from benchmarks.failures.command_checks import given_again, lost, whole_ones
from benchmarks.failures.command_world import World
from parallel3d.host.processes import born, state_letter
from tests.e2e.namespaces import NEW_MOUNTS, PRIVATE, RECURSIVE, call
from tests.tools.failing_files import Fault, Point

SCENARIOS = ("a new run", "resumes", "resumes, settings changed", "resumes, stray files")
SIZE = 24 << 20
UNKIND = "loop,data=writeback,noauto_da_alloc,commit=300"


class Stops(Calls):
    """Stops all threads of the process at the point."""

    def meets(self, kind: str) -> Fault | None:
        if super().meets(kind) is not None:
            os.kill(os.getpid(), signal.SIGSTOP)
        return None


@dataclass
class Cut:
    """The outcome of a cut: whether its point was reached, and the faults found."""

    met: bool
    wrong: list[str]
    had: str  # the files of the run on the disk


def tool(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def can_mount() -> bool:
    """Returns whether power cuts are possible here."""
    tools = all(map(shutil.which, ("mkfs.ext4", "mount", "umount")))
    return os.geteuid() == 0 and tools and os.path.exists("/dev/loop-control")


def alone_with_mounts() -> None:
    """Enters a mount namespace, so that later mounts end with this process."""
    call("unshare", NEW_MOUNTS)
    call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)


class Disk:
    """A file system in a file, mounted where a stage's commands run."""

    def __init__(self, world: World, stage: Stage) -> None:
        self.world, self.stage = world, stage
        self.image = stage.home / "disk.img"
        self.images: dict[str, Path] = {}  # scenario → the files at its start

    def image_of(self, name: str) -> Path:
        if name not in self.images:
            image = self.images[name] = self.stage.home / f"{len(self.images)}.img"
            case, prepared = self.world.cases[name], self.world.stage("prepared")
            self.world.lay(prepared, case)
            with image.open("wb") as file:
                file.truncate(SIZE)
            lazy = "lazy_itable_init=0,lazy_journal_init=0"
            tool("mkfs.ext4", "-q", "-E", lazy, "-J", "size=4", "-d", prepared.folder, image)
        return self.images[name]

    def mount(self, options: str) -> None:
        self.stage.folder.mkdir(exist_ok=True)
        tool("mount", "-o", options, self.image, self.stage.folder)

    def umount(self) -> None:
        tool("umount", self.stage.folder)

    def copied(self, to: Path) -> None:
        """Copies the file as it is at one moment: two equal copies show that nothing changed in
        between."""
        to.write_bytes(b"")
        while (now := self.image.read_bytes()) != to.read_bytes():
            to.write_bytes(now)


def cut(disk: Disk, name: str, point: Point, flushes_journal: bool) -> Cut:
    """Cuts the power at one call of a command, and runs the command again."""
    stage, case = disk.stage, disk.world.cases[name]
    shutil.copyfile(disk.image_of(name), disk.image)
    disk.mount(UNKIND)
    after, live = stage.home / "after.img", set()

    def fall(pid: int) -> None:
        while state_letter(pid, born(pid)) != "T":
            time.sleep(0.001)
        live.update(sorted(whole_ones(stage.folder / RUN))[:-1])
        if flushes_journal:
            with open(stage.folder / "lost+found" / "word", "wb") as file:
                os.fsync(file.fileno())
        disk.copied(after)
        os.kill(pid, signal.SIGKILL)

    ended = stage.give(case, Fault("power cut"), point, calls=Stops, when_met=fall)
    disk.umount()
    if ended.code != -signal.SIGKILL:
        return Cut(False, [], "")
    os.replace(after, disk.image)
    disk.mount("loop")
    run_dir = stage.folder / RUN
    had = "no run" if not run_dir.exists() else f"{len(whole_ones(run_dir))} checkpoints"
    wrong = [f"{step} is gone" for step in lost(live, run_dir)]
    wrong += given_again(case, name, stage, disk.world.reference)
    disk.umount()
    return Cut(True, wrong, had)


def moments(world: World, count: int, seed: int) -> Iterator[tuple[str, Point, bool]]:
    """Draws this many cuts, half of them with the journal written at the last moment.

    A third of them are at the last calls of a kind: a run that reports its end must have its files
    on the disk.
    """
    random_ = random.Random(seed)
    for number in range(count):
        names = [name for name in SCENARIOS if name in world.found]
        name = names[number % len(names)]
        points = world.found[name]
        if random_.random() < 1 / 3:
            points = [(kind, n) for kind, n in points if (kind, n + 2) not in points]
        yield name, random_.choice(points), random_.random() < 0.5


def campaign(world: World, count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Makes this many cuts. Returns the counts and the errors."""
    start, disk = time.monotonic(), Disk(world, world.stage("power"))
    counts: Counter[str] = Counter()
    wrong = []
    for name, point, flushes_journal in moments(world, count, seed):
        result = cut(disk, name, point, flushes_journal)
        counts["met"] += result.met
        counts[f"{name}: {result.had}"] += result.met
        for sentence in result.wrong:
            how = "after the journal" if flushes_journal else "at once"
            wrong.append(f"{name}, power cut {how} at {point[0]} {point[1]}: {sentence}")
            say(wrong[-1])
    seconds = round(time.monotonic() - start, 1)
    return {"tried": count, **dict(sorted(counts.items())), "wrong": wrong, "seconds": seconds}
