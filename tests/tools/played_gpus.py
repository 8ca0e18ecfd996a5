"""Simulates a host's GPUs: the driver's library, torch's build, device files, nvidia-smi."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from parallel3d.host import gpus
from parallel3d.host.gpus import Answer

BUILDS: dict[str, dict[str, Any]] = {
    "cuda": {"cuda": "13.0", "hip": None, "__version__": "2.13.0+cu130"},
    "hip": {"cuda": None, "hip": "7.1", "__version__": "2.13.0+rocm7.1"},
    "cpu": {"cuda": None, "hip": None, "__version__": "2.13.0+cpu"},
}
GIB = 1 << 30
NO_GPUS = Answer()


@dataclass(frozen=True)
class Card:
    """A GPU of a simulated host."""

    number: int = 0
    name: str = "NVIDIA H100 80GB HBM3"
    units: int = 132
    memory: int = 80 * GIB
    capability: int = 9

    @property
    def raw(self) -> bytes:
        return bytes([1 + self.number] * 16)


def cards(count: int, name: str = "NVIDIA H100 80GB HBM3") -> tuple[Card, ...]:
    return tuple(Card(number, name) for number in range(count))


@dataclass
class Driver:
    """The parts of libcuda.so.1 that are called, simulated.

    `code`: the code that cuInit returns; `started`: processes that called it. CUDA_VISIBLE_DEVICES
    is read like CUDA does: numbers up to the first that does not exist.
    """

    code: int = 0
    cards: tuple[Card, ...] = cards(8)
    version: int = 13000
    started: list[int] = field(default_factory=list)

    def shown(self) -> list[Card]:
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        if mask is None:
            return list(self.cards)
        found: list[Card] = []
        for word in mask.split(","):
            if not word.strip().isdecimal() or int(word) >= len(self.cards):
                break
            found.append(self.cards[int(word)])
        return [] if len(set(found)) < len(found) else found

    def cuInit(self, flags: int) -> int:
        self.started.append(os.getpid())
        return self.code or (0 if self.shown() else 100)

    def cuDriverGetVersion(self, pointer: Any) -> int:
        pointer._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, pointer: Any) -> int:
        pointer._obj.value = len(self.shown())
        return 0

    def cuDeviceGet(self, pointer: Any, index: int) -> int:
        pointer._obj.value = index
        return 0

    def cuDeviceGetUuid_v2(self, raw: Any, gpu: Any) -> int:
        raw[:] = self.shown()[gpu.value].raw
        return 0

    def cuDeviceGetName(self, text: Any, length: int, gpu: Any) -> int:
        text.value = self.shown()[gpu.value].name.encode()[: length - 1]
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, length: int, gpu: Any) -> int:
        text.value = f"0000:{0x10 + self.shown()[gpu.value].number:02x}:00.0".encode()
        return 0

    def cuDeviceTotalMem_v2(self, pointer: Any, gpu: Any) -> int:
        pointer._obj.value = self.shown()[gpu.value].memory
        return 0

    def cuDeviceGetAttribute(self, pointer: Any, attribute: int, gpu: Any) -> int:
        card = self.shown()[gpu.value]
        pointer._obj.value = {16: card.units, 75: card.capability}[attribute]
        return 0


@dataclass(frozen=True)
class Host:
    """A simulated host.

    Attributes:
        build: torch's build: cuda, hip or cpu.
        driver: NVIDIA's library; None: there is none.
        rocm: the answer of torch for ROCm, or the error that it raises.
        files: below /, empty, as in dev/nvidia0; `texts`: files with text.
        smi: the exit code and output of nvidia-smi; None: it is not installed.
        environ: all variables of the process.
    """

    build: str = "cuda"
    driver: Driver | None = None
    rocm: Answer | Exception = NO_GPUS
    files: tuple[str, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    smi: tuple[int, str] | None = None
    environ: dict[str, str] = field(default_factory=dict)


@contextmanager
def played(host: Host, root: Path) -> Iterator[None]:
    """Makes this process find `host` instead of its own; `root`: an empty folder, for its files."""
    for name, text in {**dict.fromkeys(host.files, ""), **host.texts}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    def which(name: str) -> str | None:
        return None if host.smi is None or name != "nvidia-smi" else "/usr/bin/nvidia-smi"

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert host.smi is not None and words[0] == "nvidia-smi"
        return subprocess.CompletedProcess(words, host.smi[0], host.smi[1], "")

    def ask_rocm() -> Answer:
        if isinstance(host.rocm, Exception):
            raise host.rocm
        return host.rocm

    def here(ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except Exception as error:
            return Answer(error=f"{type(error).__name__}: {error}")

    gpus._asked_cuda.cache_clear()
    gpus._asked_rocm.cache_clear()
    with ExitStack() as stack:
        for target, name, value in (
            (gpus, "ROOT", root),
            (gpus, "torch_build", lambda: BUILDS[host.build]),
            (gpus, "_driver", lambda: host.driver),
            (gpus, "ask_rocm", ask_rocm),
            (gpus, "in_subprocess", here),
            (shutil, "which", which),
            (subprocess, "run", run),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch.dict(os.environ, host.environ, clear=True))
        yield
    gpus._asked_cuda.cache_clear()
    gpus._asked_rocm.cache_clear()
