"""Tests a node before ranks start on it, and answers in one line of JSON within seconds.

    {"ok": false, "why": "GPU 3 (NVIDIA H100): 2 uncorrected errors of its memory", "facts": {…}}

`ok` is false if the node is at fault: a GPU is missing, hangs, computes wrongly, has errors of its
memory, or has its memory held by other processes; the host's memory has errors; no space is left on
its own disks; the run's folder is not there. A folder that several nodes share may be full,
read-only or slow, and so may the file system from which torch is imported: the node stays `ok`, and
`facts["shared"]` says it.

A driver's call may never return, so each part of the test is a process of its own, which is killed
or left behind. Nothing but the part that computes imports torch. Without GPUs it runs only to warm
the file cache, as on a spare node. The import goes on after the answer if it takes longer.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from parallel3d.errors import first_line
from parallel3d.files import write_all
from parallel3d.host import gpus
from parallel3d.host.gpus import GpuFindings
from parallel3d.text import count

if TYPE_CHECKING:
    import torch

LIMIT_S = 15.0  # until the answer …
COMPUTE_S = 10.0  # … or until this after a slow import of torch …
LEFTOVER_S = 45.0  # … and so much longer if a GPU's memory is still held by ranks that end
LONGEST_S = 3600.0  # that may be given as the limit
WARM_S = 120.0  # the import of torch may go on for so long after the answer
POLL_S = 2.0
HELD = 2 << 30  # bytes in use on a GPU that no process computes on
# Free bytes of a node's own folders; the whole /dev/shm of a container may have 64 MiB.
LEAST_SPACE = 16 << 20
SMI_S = 10.0
FELL_OFF = 15  # the exit code of nvidia-smi for a GPU that has fallen off the bus
STARTING = "starting"
IMPORT = "importing torch"
READY = "waiting to begin"
ON_CPU, ON_GPUS = "computing on the CPU", "computing on the GPUs"
SIZE, SIZE_OF_CPU = 4096, 512  # of the matrices that are multiplied
MULTIPLYING_S = 0.3
PATTERNS = (0x5555555555555555, -0x5555555555555556)  # all bits change between the two
CHUNK = 1 << 30  # bytes of a GPU's memory that are written at once
# File systems on which several nodes see the same files.
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "afs", "cifs", "smb3", "9p")

Tell = Callable[[Mapping[str, Any]], None]


class SelfTest(NamedTuple):
    """What is to be tested.

    Attributes:
        gpus: number of GPUs that the node must have; None if any number is right.
        folder: a folder that must be there and should be writable; None for none.
        warm: whether to import torch and to compute on the CPU even without GPUs.
        limit_s: seconds until the answer.
        leftover_s: further seconds in which other processes may free a GPU's memory.
    """

    gpus: int | None = None
    folder: Path | None = None
    warm: bool = False
    limit_s: float = LIMIT_S
    leftover_s: float = LEFTOVER_S


@dataclass(frozen=True)
class SelfTestAnswer:
    """The result: whether the node is in order, and why not."""

    ok: bool
    why: str
    facts: Mapping[str, Any]

    def line(self) -> str:
        return json.dumps({"ok": self.ok, "why": self.why, "facts": self.facts})


def self_test(test: SelfTest) -> SelfTestAnswer:
    """Tests this node; see the module's docstring. The caller should not have used CUDA."""
    begun = time.monotonic()
    until = begun + test.limit_s
    reading, go = os.pipe()
    may_compute = test.warm or (test.gpus != 0 and _may_have_gpus(test.gpus))
    computing = Part(lambda tell: _compute(tell, reading), reads=reading) if may_compute else None
    os.close(reading)
    folder = Part(lambda tell: _try_folder(tell, test.folder))
    space = Part(_try_space)
    cards = Part(lambda tell: _try_cards(tell, test.gpus, test.leftover_s))
    cards.read(until)
    if cards.waits:
        until += test.leftover_s
        cards.read(until)
    cards.late("the driver")
    parts = [cards, space, folder]
    if computing is not None and not cards.faults:
        parts.append(computing)
        computing.read(until, READY)
        # An import that is late goes on, but computes nothing beside the ranks that start then.
        if computing.stage == READY:
            with suppress(BrokenPipeError):
                os.write(go, b"!")
            computing.read(max(until, computing.since + COMPUTE_S), ON_GPUS)
            if computing.stage == ON_GPUS:
                computing.read(max(until, computing.since + COMPUTE_S))
    os.close(go)  # nothing is computed beside a GPU that does not work
    for part in (folder, space):
        part.read(until)
    folder.late_shared(f"{test.folder} did not answer")
    space.late("a disk of the node")
    if computing in parts:
        if computing.stage in (IMPORT, ON_CPU):
            computing.late_shared(f"{computing.stage} did not end", keep=computing.stage == IMPORT)
        else:
            computing.late("the test of computing")
    facts: dict[str, Any] = {"host": socket.gethostname()}
    for part in parts:
        facts |= part.facts
    if shared := [sentence for part in parts for sentence in part.shared]:
        facts["shared"] = "; ".join(shared)
    facts["seconds"] = round(time.monotonic() - begun, 3)
    faults = [sentence for part in parts for sentence in part.faults]
    return SelfTestAnswer(not faults, "; ".join(faults), facts)


@dataclass
class Part:
    """A part of the test in a process of its own, which tells what it finds line by line.

    Attributes:
        work: what it does, given the function that tells.
        facts: what it found.
        faults: sentences on what is wrong with the node.
        shared: sentences on what is wrong, but not with the node.
        stage: what it was doing when it was last heard of.
        since: when it began that, by time.monotonic.
        waits: whether it waits for other processes.
    """

    work: Callable[[Tell], None]
    reads: int = 0  # a descriptor that it needs beside the standard ones
    facts: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    stage: str = STARTING
    since: float = field(default_factory=time.monotonic)
    waits: bool = False
    is_done: bool = False
    _begun: float = field(default_factory=time.monotonic)
    _text: bytes = b""

    def __post_init__(self) -> None:
        self._pipe, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._live(writing)
        os.close(writing)

    def _live(self, writing: int) -> None:
        """Runs the part, and ends this process. What it prints must not mix with the answer."""
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(WARM_S))
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            # Pipes of other parts would seem open for as long as this one lives.
            begin = 3
            for kept in sorted({writing, self.reads or writing}):
                os.closerange(begin, kept)
                begin = kept + 1
            os.closerange(begin, 1 << 20)

            def tell(row: Mapping[str, Any]) -> None:
                write_all(writing, memoryview(json.dumps(row).encode() + b"\n"))

            try:
                self.work(tell)
            except Exception as error:
                tell({"fault": f"{type(error).__name__}: {first_line(error)}"})
            tell({"done": True})
        finally:
            os._exit(0)

    def read(self, until: float, stage: str = "") -> None:
        """Takes what the part tells.

        It returns if the part is done, waits for others or has come to `stage`, or if the time has
        passed.
        """
        waited = self.waits
        while not self.is_done:
            left = max(0.0, until - time.monotonic())  # what has been told is read in any case
            if not select.select([self._pipe], [], [], left)[0]:
                break
            said = os.read(self._pipe, 1 << 16)
            if not said:
                self.is_done = True
                self.faults.append(f"the self-test ended while {self.stage}")
            self._text += said
            *lines, self._text = self._text.split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            if (self.waits and not waited) or self.stage == stage:
                break
        if self.is_done:
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def _take(self, row: Mapping[str, Any]) -> None:
        if "stage" in row:
            self.stage, self.since = row["stage"], time.monotonic()
        self.waits = self.waits or "waits" in row
        self.facts |= row.get("facts", {})
        self.faults += [row["fault"]] if "fault" in row else []
        self.shared += [row["shared"]] if "shared" in row else []
        self.is_done = self.is_done or "done" in row

    def late(self, name: str) -> None:
        """Counts it as the node's fault if the part has not ended, and kills it.

        A part that has not even begun says that the host is busy, and no more.
        """
        if self.stage == STARTING:
            self.late_shared(f"the host is so busy that the test of {name} did not begin")
        elif not self.is_done:
            self.faults.append(f"{name} did not answer within {self._after} ({self.stage})")
            self._kill()

    def late_shared(self, sentence: str, *, keep: bool = False) -> None:
        """Says `sentence` if the part has not ended, and kills it unless `keep`."""
        if not self.is_done:
            self.shared.append(f"{sentence} within {self._after}")
            if not keep:
                self._kill()

    @property
    def _after(self) -> str:
        return f"{time.monotonic() - self._begun:.3g} s"

    def _kill(self) -> None:
        """Kills the part; a process within a call of the kernel cannot be waited for."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError, ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, os.WNOHANG)


# The GPUs, as their driver sees them


class Card(NamedTuple):
    """A GPU as nvidia-smi sees it: bytes in use, and uncorrected errors since the last boot."""

    uuid: str
    label: str
    used: int
    uncorrected: int


def _try_cards(tell: Tell, expected: int | None, leftover_s: float) -> None:
    tell({"stage": "asking the driver for GPUs"})
    found = gpus.find(os.environ)
    names = sorted({gpu.name for gpu in found.gpus})
    tell({"facts": {"gpus": len(found.gpus), "kinds": names}})
    build = gpus.torch_build()
    if expected and not found.gpus and not (build.get("cuda") or build.get("hip")):
        tell({"shared": found.lack})  # no node's GPUs could be used
        return
    if fault := _missing(found, expected):
        tell({"fault": fault})
        return
    if not found.gpus or shutil.which("nvidia-smi") is None:
        return
    tell({"stage": "asking nvidia-smi"})
    seen = {gpu.uuid for gpu in found.gpus}
    until = time.monotonic() + leftover_s
    while True:
        cards = [card for card in _cards(tell) if card.uuid in seen]
        held = [card for card in cards if card.used > HELD]
        if not held or time.monotonic() >= until:
            break
        tell({"waits": True, "stage": "waiting for other processes to free a GPU's memory"})
        time.sleep(min(POLL_S, max(0.0, until - time.monotonic())))
    for card in cards:
        if card.uncorrected:
            errors = count(card.uncorrected, "uncorrected error")
            tell({"fault": f"{card.label}: {errors} of its memory"})
    for card in held:
        held_by = "other processes" + _pids(card.uuid)
        tell({"fault": f"{card.label}: {card.used / (1 << 30):.3g} GiB are held by {held_by}"})


def _missing(found: GpuFindings, expected: int | None) -> str:
    """Returns a sentence if GPUs are missing or cannot be used, or ""."""
    if found.fault or not expected or len(found.gpus) >= expected:
        return found.fault if expected != 0 else ""
    lack = f" ({found.lack})" if found.lack and not found.gpus else ""
    return f"{count(len(found.gpus), 'GPU')} of {expected} can be used{lack}"


def _cards(tell: Tell) -> list[Card]:
    """Asks nvidia-smi for the GPUs; those that it does not know are left out."""
    fields = "index,uuid,name,memory.used,ecc.errors.uncorrected.volatile.total"
    code, text = _smi(f"--query-gpu={fields}")
    if code == FELL_OFF or "is lost" in text:
        tell({"fault": f"nvidia-smi ended with code {code}: {text.strip().splitlines()[-1][:200]}"})
    if code != 0:
        tell({"facts": {"nvidia_smi": f"ended with code {code}"}})
        return []
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 5 and words[0].isdecimal():
            index, uuid, name, used, errors = words
            label = f"GPU {index} ({name})"
            found.append(Card(uuid, label, _number(used) << 20, _number(errors)))
    return found


def _pids(uuid: str) -> str:
    """Returns the processes that hold memory of a GPU, as in " (pids 12, 15)", or ""."""
    code, text = _smi("--query-compute-apps=gpu_uuid,pid")
    rows = [line.split(",") for line in text.splitlines() if code == 0 and line.count(",") == 1]
    pids = [pid.strip() for gpu, pid in rows if gpu.strip() == uuid]
    return f" (pids {', '.join(pids)})" if pids else ""


def _smi(query: str) -> tuple[int, str]:
    """Returns the exit code and the output of nvidia-smi. Raises TimeoutExpired if it hangs."""
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=SMI_S, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def _number(word: str) -> int:
    """Returns a number of nvidia-smi, or 0 for "[N/A]"."""
    return int(word) if word.isdecimal() else 0


# Computing


def _may_have_gpus(expected: int | None) -> bool:
    """Returns whether torch could use GPUs, and the host has some or should have."""
    build = gpus.torch_build()
    devices = gpus.ROOT / "dev"
    seen = (devices / "kfd").exists() or any(devices.glob("nvidia[0-9]*"))
    return bool(build.get("cuda") or build.get("hip")) and (seen or bool(expected))


def _compute(tell: Tell, go: int) -> None:
    tell({"stage": IMPORT})
    begun = time.monotonic()
    import torch

    tell({"facts": {"import_s": round(time.monotonic() - begun, 3)}, "stage": READY})
    if not os.read(go, 1):
        return
    tell({"stage": ON_CPU})
    product = Product.make(SIZE_OF_CPU)
    for fault in faults_of_device(torch.device("cpu"), "the CPU", product, 1 << 26):
        tell({"fault": fault})
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return
    number = torch.accelerator.device_count()
    tell({"stage": ON_GPUS})
    from parallel3d.device import accelerator

    product = Product.make(SIZE)

    def one(index: int) -> list[str]:
        device = torch.device(kind.type, index)
        label = f"GPU {index}"
        try:
            label += f" ({accelerator.name(device)})"
            free, _ = accelerator.module(device).mem_get_info(device)
            return faults_of_device(device, label, product, free // 10 * 9)
        except RuntimeError as error:
            return [f"{label}: {first_line(error)}"]

    with ThreadPoolExecutor(number) as pool:
        for faults in pool.map(one, range(number)):
            for fault in faults:
                tell({"fault": fault})
    tell({"facts": {"computed_on": number}})


@dataclass(frozen=True)
class Product:
    """Two matrices of -1, 0 and 1, and what proves their product right.

    All sums are small integers, which every format and every order of additions gives exactly, so
    that the product has the same bits on all cards of all kinds. It times `vector`, of positive
    numbers, must be `expected`: a single wrong element changes that.
    """

    a: torch.Tensor
    b: torch.Tensor
    vector: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def make(cls, size: int) -> Product:
        import torch

        generator = torch.Generator().manual_seed(size)

        def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator, dtype=torch.int8)

        a, b = (drawn(-1, 2, size, size) * drawn(0, 2, size, size) for _ in range(2))
        vector = drawn(1, 100, size).double()
        expected = a.double() @ (b.double() @ vector)
        return cls(a, b, vector, expected)

    def is_wrong(self, found: torch.Tensor) -> bool:
        return bool((found.cpu().double() @ self.vector != self.expected).any())


def faults_of_device(device: torch.device, label: str, product: Product, nbytes: int) -> list[str]:
    """Returns sentences on a device that multiplies wrongly or whose memory loses bits.

    Args:
        device: the device.
        label: its name in the sentences.
        product: what it multiplies.
        nbytes: bytes of its memory that are tried.
    """
    import torch

    is_gpu = device.type != "cpu"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    a, b = (matrix.to(device, dtype) for matrix in (product.a, product.b))
    found = a @ b
    faults = []
    if product.is_wrong(found):
        faults.append(f"{label} multiplies matrices wrongly")
    until = time.monotonic() + MULTIPLYING_S * is_gpu
    while not faults and time.monotonic() < until:
        if not torch.equal(a @ b, found):
            faults.append(f"{label} multiplies the same matrices with different results")
    del a, b, found
    if is_gpu:
        from parallel3d.device.accelerator import module

        module(device).empty_cache()
    if any(_loses_bits(device, nbytes, pattern) for pattern in PATTERNS):
        faults.append(f"{label} loses bits of its memory")
    return faults


def _loses_bits(device: torch.device, nbytes: int, pattern: int) -> bool:
    """Fills memory of a device with a pattern, and returns whether it reads another one."""
    import torch

    chunks = []
    for begin in range(0, nbytes, CHUNK):
        size = min(CHUNK, nbytes - begin) // 8
        try:
            chunks.append(torch.full((size,), pattern, dtype=torch.int64, device=device))
        except torch.OutOfMemoryError:  # another process was faster
            break
    return any(bool((chunk != pattern).any()) for chunk in chunks)


# The node's own disks and memory, and the run's folder


def _try_space(tell: Tell) -> None:
    tell({"stage": "asking for free space"})
    free = {}
    # tempfile.gettempdir would pass over a folder that is full.
    own = os.environ.get("TMPDIR", "")
    for folder in (own if os.path.isdir(own) else "/tmp", "/dev/shm"):
        if not os.path.isdir(folder) or _is_shared(folder):
            continue
        free[folder] = shutil.disk_usage(folder).free
        if free[folder] < LEAST_SPACE:
            left = f"{free[folder] / 1e6:.3g} MB"
            tell({"fault": f"{folder} of this node is full: {left} are free"})
    tell({"facts": {"free": free}})
    tell({"stage": "asking for errors of the host's memory"})
    errors = 0
    for path in (gpus.ROOT / "sys/devices/system/edac/mc").glob("mc*/ue_count"):
        with suppress(OSError):
            errors += _number(path.read_text().strip())
    if errors:
        tell({"fault": f"the host's memory has {count(errors, 'uncorrected error')}"})


def _is_shared(folder: str) -> bool:
    """Returns whether a folder is on a file system of several nodes, without touching it."""
    found, longest = "", -1
    with suppress(OSError):
        for line in (gpus.ROOT / "proc/self/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            is_inside = folder == mount or folder.startswith(f"{mount.rstrip('/')}/")
            if is_inside and len(mount) >= longest:
                found, longest = kind, len(mount)
    return found in SHARED or found.startswith("fuse")


def _try_folder(tell: Tell, folder: Path | None) -> None:
    if folder is None:
        return
    tell({"stage": f"writing into {folder}"})
    file = folder / f".self-test-{socket.gethostname()}-{os.getpid()}"
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            write_all(descriptor, memoryview(b"\0" * 4096))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(file)
    except OSError as error:
        if error.errno == errno.ENOENT:
            tell({"fault": f"{folder} is not on this node: its file system may not be mounted"})
        else:
            tell({"shared": f"{folder} cannot be written ({error.strerror})"})


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 0")
    return int(text)


def _limit(text: str) -> float:
    with suppress(ValueError):
        if 1 <= float(text) <= LONGEST_S:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} must be a number of seconds from 1 to {LONGEST_S:g}")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the answer of this node as one line of JSON, and returns 0 whatever it is."""
    parser = argparse.ArgumentParser(prog="parallel3d slurm self-test", description=main.__doc__)
    parser.add_argument("--gpus", type=_whole_number, help="number of GPUs that the node must have")
    parser.add_argument("--folder", type=Path, help="a folder that must be there, such as runs/")
    parser.add_argument("--warm", action="store_true", help="import torch even without GPUs")
    parser.add_argument("--limit-s", type=_limit, default=LIMIT_S, help="seconds until the answer")
    words = parser.parse_args(argv)
    answer = self_test(SelfTest(words.gpus, words.folder, words.warm, words.limit_s))
    sys.stdout.write(f"{answer.line()}\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
