"""Tests that a process of this host is only killed if the kernel confirms that it belongs to the
job."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from parallel3d.host import processes
from parallel3d.host.processes import born, kill, of_this_job

JOB = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711", "WORLD_SIZE": "2"}
ASKS = """
import json, sys
from parallel3d.host.processes import of_this_job
print(of_this_job(json.loads(sys.argv[1])))
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen]]:
    running: list[subprocess.Popen] = []
    yield running
    for process in running:
        process.kill()
        process.wait()


def sleeper(started: list[subprocess.Popen], **environ: str) -> dict[str, object]:
    """A process with this environment, as a rank would describe itself."""
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, **environ})
    started.append(process)
    return {"pid": process.pid, "born": born(process.pid), "host": socket.gethostname()}


def answer(records: list[dict[str, object]], **environ: str) -> str:
    """Returns the records that a rank with this environment accepts."""
    command = [sys.executable, "-c", ASKS, json.dumps(records)]
    environ = {**os.environ, **environ}
    asked = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout.strip()


def test_an_entry_in_the_store_alone_kills_no_process(started: list[subprocess.Popen]) -> None:
    ours, other = sleeper(started, **JOB), sleeper(started, **JOB | {"MASTER_PORT": "4712"})
    nobodys = sleeper(started)
    away = ours | {"host": "elsewhere"}
    found = answer([ours, other, nobodys, away, None], **JOB)
    assert found == str([(ours["pid"], ours["born"])])
    assert answer([ours, nobodys]) == "[]"  # a process that belongs to no job knows no peers


def test_processes_of_other_users_are_never_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    me = {"pid": os.getpid(), "born": born(os.getpid()), "host": socket.gethostname()}
    monkeypatch.setattr(processes, "_job", lambda pid: {b"MASTER_PORT": b"1"})
    assert of_this_job([me]) == [(me["pid"], me["born"])]
    monkeypatch.setattr(processes, "_owner", lambda pid: os.getuid() + 1)
    assert of_this_job([me]) == []


def test_a_kill_that_the_system_refuses_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def refuse(pid: int, number: int) -> None:
        refused.append(pid)
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    kill(os.getpid(), born(os.getpid()))
    assert refused == [os.getpid()]


def test_a_kill_hits_exactly_the_checked_process(started: list[subprocess.Popen]) -> None:
    record = sleeper(started)
    kill(record["pid"], record["born"] + 1)
    assert started[0].poll() is None
    kill(record["pid"], record["born"])
    assert started[0].wait(10) == -signal.SIGKILL
