"""Tests a node's self-test: each fault has its sentence; a shared folder is never the node's."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.host import gpus, self_test
from parallel3d.host.self_test import Product, SelfTest, Tell, faults_of_device
from tests.pace import in_time
from tests.tools.played_gpus import Driver, Host, cards, played

CARDS = cards(2)


def smi(used: tuple[int, int] = (4, 4), errors: tuple[str, str] = ("0", "0")) -> str:
    """Returns what nvidia-smi says of the two cards: MiB in use and uncorrected errors."""
    return "".join(
        f"{card.number}, GPU-{uuid.UUID(bytes=card.raw)}, {card.name}, {mib}, {bad}\n"
        for card, mib, bad in zip(CARDS, used, errors, strict=True)
    )


def host(text: str = smi(), code: int = 0, shown: int = 2) -> Host:
    return Host(driver=Driver(cards=cards(shown)), smi=(code, text))


def told(part: Callable[..., None], *given: Any) -> tuple[list[str], list[str]]:
    """Returns the faults, and the sentences on what is shared, that a part of the test tells."""
    rows: list[Mapping[str, Any]] = []
    part(rows.append, *given)
    faults, shared = ([row[key] for row in rows if key in row] for key in ("fault", "shared"))
    return faults, shared


def of_cards(host: Host, root: Path, expected: int | None = 2) -> list[str]:
    with played(host, root):
        return told(self_test._try_cards, expected, 0.0)[0]


HELD = smi(used=(71 * 1024, 4))


@pytest.mark.parametrize(
    ("host", "fault"),
    [
        (host(), None),
        (host(code=12), None),  # no NVML here, though the driver works
        (host(smi(errors=("[N/A]", "[N/A]"))), None),
        (host(shown=1), "1 GPU of 2 can be used"),
        (Host(driver=Driver(code=802)), "the driver does not start (cuInit: 802"),
        (Host(driver=None), "0 GPUs of 2 can be used (there is no driver library"),
        (host(smi(errors=("0", "3"))), "GPU 1 (NVIDIA H100 80GB HBM3): 3 uncorrected errors"),
        (host(HELD), "GPU 0 (NVIDIA H100 80GB HBM3): 71 GiB are held by other processes"),
        (host("Unable to determine the device handle: GPU is lost", 15), "ended with code 15"),
    ],
)
def test_faults_of_gpus(host: Host, fault: str | None, tmp_path: Path) -> None:
    found = of_cards(host, tmp_path)
    assert len(found) == (fault is not None) and (fault or "") in "".join(found)


def test_a_node_of_a_cpu_cluster_needs_no_gpu(tmp_path: Path) -> None:
    for expected in (None, 0):
        assert of_cards(Host(build="cpu"), tmp_path, expected) == []


def test_a_torch_for_cpus_alone_is_no_fault_of_the_node(tmp_path: Path) -> None:
    with played(Host(build="cpu"), tmp_path):
        faults, (shared,) = told(self_test._try_cards, 8, 0.0)
    assert not faults and shared.endswith("is a build without CUDA")


def test_memory_that_ending_ranks_free_in_time_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [HELD, HELD, smi()]
    monkeypatch.setattr(self_test, "_smi", lambda query: (0, texts.pop(0)))
    monkeypatch.setattr(self_test, "POLL_S", 0.01)
    with played(host(), tmp_path):
        assert told(self_test._try_cards, 2, 10.0) == ([], []) and texts == []


def test_processes_that_hold_memory_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (f"GPU-{uuid.UUID(bytes=card.raw)}" for card in CARDS)

    def answer(query: str) -> tuple[int, str]:
        rows = f"{first}, 4711\n{second}, 5\n{first}, 12\n"
        return 0, rows if "compute-apps" in query else HELD

    monkeypatch.setattr(self_test, "_smi", answer)
    with played(host(), tmp_path):
        (fault,), _ = told(self_test._try_cards, 2, 0.0)
    assert fault.endswith("held by other processes (pids 4711, 12)")


def test_a_card_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong element of a product, whichever it is, and one flipped bit of the memory."""
    product, cpu = Product.make(64), torch.device("cpu")
    assert faults_of_device(cpu, "the card", product, 1 << 16) == []
    right = product.a.float() @ product.b.float()
    for row, column in ((0, 0), (63, 63), (17, 40)):
        wrong = right.clone()
        wrong[row, column] += 1
        assert product.is_wrong(wrong)
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: torch.matmul(a, b) + 1)
    assert faults_of_device(cpu, "the card", product, 0) == ["the card multiplies matrices wrongly"]
    monkeypatch.undo()
    full = torch.full

    def losing(*given: Any, **how: Any) -> torch.Tensor:
        made = full(*given, **how)
        made[-1] &= ~4
        return made

    monkeypatch.setattr(torch, "full", losing)
    assert faults_of_device(cpu, "it", product, 1 << 16) == ["it loses bits of its memory"]


def test_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(self_test._try_folder, tmp_path) == ([], []) and os.listdir(tmp_path) == []
    faults, shared = told(self_test._try_folder, tmp_path / "gone")
    assert "may not be mounted" in faults[0] and not shared
    for number in (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EIO, errno.ESTALE):

        def ill(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(self_test, "write_all", ill)
        faults, (sentence,) = told(self_test._try_folder, tmp_path)
        assert not faults and os.strerror(number) in sentence and os.listdir(tmp_path) == []


def test_full_disks_and_bad_memory_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    mounts, counter = tmp_path / "proc/self/mounts", tmp_path / "sys/devices/system/edac/mc/mc0"
    for folder in (mounts.parent, counter):
        folder.mkdir(parents=True)
    mounts.write_text("none / ext4 rw 0 0\nserver:/tmp /tmp nfs4 rw 0 0\nnone /dev/shm tmpfs rw\n")
    (counter / "ue_count").write_text("0\n")
    monkeypatch.setenv("TMPDIR", "/tmp")
    assert told(self_test._try_space) == ([], [])
    usage = type("Usage", (), {"free": 5_000_000})
    monkeypatch.setattr(self_test.shutil, "disk_usage", lambda _: usage)
    (counter / "ue_count").write_text("2\n")
    faults, shared = told(self_test._try_space)
    assert faults == [
        "/dev/shm of this node is full: 5 MB are free",  # and /tmp is shared
        "the host's memory has 2 uncorrected errors",
    ]
    assert not shared
    mounts.write_text("none / ext4 rw 0 0\n")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # also if nothing can be written there any more
    monkeypatch.setattr(self_test.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0}))
    assert f"{tmp_path} of this node is full: 0 MB are free" in told(self_test._try_space)[0]


def stubs(monkeypatch: pytest.MonkeyPatch, **parts: Callable[..., None]) -> None:
    """Replaces parts of the test; the one that computes ends at once unless it is given."""

    def nothing(tell: Tell, *_: object) -> None:
        tell({"facts": {}})

    for name in ("compute", "try_cards", "try_space", "try_folder"):
        monkeypatch.setattr(self_test, f"_{name}", parts.get(name, nothing))


def hang(stage: str) -> Callable[..., None]:
    def part(tell: Tell, *given: object) -> None:
        if stage in (self_test.ON_CPU, self_test.ON_GPUS):
            tell({"stage": self_test.READY})
            assert os.read(given[0], 1)
        tell({"stage": stage})
        time.sleep(60)

    return part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "stage", "why", "shared"),
    [
        ("try_cards", "asking nvidia-smi", "the driver did not answer within", ""),
        ("compute", self_test.ON_GPUS, "the test of computing did not answer within", ""),
        ("try_space", "asking for free space", "a disk of the node did not answer within", ""),
        ("try_folder", "writing into /runs", "", "/runs did not answer within"),
        ("compute", self_test.IMPORT, "", "importing torch did not end within"),
        ("compute", self_test.ON_CPU, "", "computing on the CPU did not end within"),
        ("try_space", self_test.STARTING, "", "a disk of the node did not begin within"),
    ],
)
def test_a_part_that_hangs_holds_up_no_answer(
    part: str, stage: str, why: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs(monkeypatch, **{part: hang(stage)})
    monkeypatch.setattr(self_test, "WARM_S", 8)
    monkeypatch.setattr(self_test, "COMPUTE_S", 1.5)
    limit_s = 1.0
    answer = self_test.self_test(SelfTest(folder=Path("/runs"), warm=True, limit_s=limit_s))
    assert in_time(answer.facts["seconds"], 5 * limit_s)
    assert answer.ok == (not why) and why in answer.why
    assert shared in answer.facts.get("shared", "") and bool(shared) == ("shared" in answer.facts)
    assert not why or stage in answer.why


def test_a_part_that_fails_or_dies_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tell: Tell, *_: object) -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    def dies(tell: Tell, *_: object) -> None:
        tell({"stage": "computing on the GPUs"})
        os.kill(os.getpid(), 11)

    stubs(monkeypatch, compute=fails)
    answer = self_test.self_test(SelfTest(warm=True))
    assert answer.why.startswith("ImportError: libcudart.so.13")
    stubs(monkeypatch, compute=dies)
    answer = self_test.self_test(SelfTest(warm=True))
    assert answer.why == "the self-test ended while computing on the GPUs"
    assert json.loads(answer.line())["ok"] is False


@pytest.mark.parametrize(
    ("host", "test", "imports"),
    [
        (host(), SelfTest(gpus=2), True),
        (Host(driver=Driver(cards=CARDS), files=("dev/nvidia0",)), SelfTest(), True),
        (host(), SelfTest(), False),  # no device file: whatever the driver says
        (host(), SelfTest(gpus=0), False),
        (Host(build="cpu"), SelfTest(gpus=2), False),
        (Host(build="cpu"), SelfTest(warm=True), True),
    ],
)
def test_without_gpus_torch_is_imported_to_warm_the_cache_alone(
    host: Host, test: SelfTest, imports: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(tell: Tell, *_: object) -> None:
        tell({"facts": {"import_s": 1.0}, "stage": self_test.READY})

    stubs(monkeypatch, compute=compute)
    with played(host, tmp_path):
        assert ("import_s" in self_test.self_test(test).facts) == imports


def test_waiting_for_leftovers_moves_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(tell: Tell, *_: object) -> None:
        tell({"waits": True, "stage": "waiting for others"})
        time.sleep(2 * limit_s)

    limit_s = 1.0
    stubs(monkeypatch, try_cards=waits)
    assert self_test.self_test(SelfTest(limit_s=limit_s, leftover_s=60.0)).ok
    late = self_test.self_test(SelfTest(limit_s=limit_s, leftover_s=0.1))
    assert not late.ok and "the driver did not answer" in late.why


@pytest.mark.parametrize(
    "words", [("--limit-s", "nan"), ("--limit-s", "inf"), ("--limit-s=-1",), ("--gpus=-2",)]
)
def test_limits_that_test_nothing_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        self_test.main(words)
    assert ended.value.code == 2 and "must be a" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_one_line_and_leaves_0(tmp_path: Path) -> None:
    """With a part that prints: its words must not mix with the answer."""
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "parallel3d.host.self_test", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*words, "--warm", "--limit-s", "60"],
        capture_output=True,
        text=True,
        env=environ,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer["ok"], answer
    assert answer["facts"]["import_s"] > 0 and answer["facts"]["free"] and not done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_test_itself_imports_no_torch() -> None:
    check = "import sys, parallel3d.host.self_test; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.slow
def test_an_import_that_is_late_computes_nothing_beside_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def imports(tell: Tell, go: int) -> None:
        tell({"stage": self_test.IMPORT})
        time.sleep(1.5)
        (tmp_path / ("computes" if os.read(go, 1) else "warm")).touch()

    stubs(monkeypatch, compute=imports)
    assert self_test.self_test(SelfTest(warm=True, limit_s=0.5)).ok
    until = time.monotonic() + 30
    while not os.listdir(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert os.listdir(tmp_path) == ["warm"]
