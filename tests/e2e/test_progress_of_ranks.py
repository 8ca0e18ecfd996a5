"""Tests what real ranks write into the files that the guard of their host reads."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from parallel3d.faults.progress import PROGRESS, Seen, read
from parallel3d.host.processes import state_letter
from tests.e2e.command import Shell
from tests.e2e.test_launchers import by_hand, ended, start
from tests.pace import PATIENCE
from tests.ports import free_port

pytestmark = pytest.mark.nightly


def seen(folder: Path) -> list[Seen]:
    found = [read(str(folder / f"rank-{rank}")) for rank in range(2)]
    return [each for each in found if each is not None]


def test_ranks_count_their_steps_and_say_that_they_are_done(shell: Shell, tmp_path: Path) -> None:
    folder, port = tmp_path / "progress", str(free_port())
    ranks = [
        start(shell, by_hand(rank, int(port)) | {PROGRESS: str(folder)}, "run=w", "train.steps=5")
        for rank in range(2)
    ]
    assert [ended(rank).code for rank in ranks] == [0, 0]
    assert [(each.rank, each.steps, each.state) for each in seen(folder)] == [
        (0, 5, "done"),
        (1, 5, "done"),
    ]
    assert all(each.median > 0 for each in seen(folder))


def test_a_killed_rank_and_those_that_fail_after_it_are_not_done(
    shell: Shell, tmp_path: Path
) -> None:
    folder, port = tmp_path / "progress", free_port()
    words = "run=w", "train.steps=100000"
    ranks = [
        start(shell, by_hand(rank, port) | {PROGRESS: str(folder)}, *words) for rank in range(2)
    ]
    limit = time.monotonic() + 60 * PATIENCE
    while len(seen(folder)) < 2 or seen(folder)[1].steps < 3:
        assert time.monotonic() < limit
        time.sleep(0.05)
    killed = seen(folder)[1]
    assert killed.state == "stepping" and state_letter(killed.pid, killed.born) not in ("", "Z")
    os.kill(killed.pid, signal.SIGKILL)
    assert ended(ranks[0]).code == 1
    ended(ranks[1])
    assert [each.state for each in seen(folder)] == ["stepping", "stepping"]


def test_an_error_of_the_user_is_no_loss_of_a_rank(shell: Shell, tmp_path: Path) -> None:
    folder, port = tmp_path / "progress", free_port()
    words = "run=w", "train.eval_only=true"  # needs a checkpoint
    ranks = [
        start(shell, by_hand(rank, port) | {PROGRESS: str(folder)}, *words) for rank in range(2)
    ]
    assert [ended(rank).code for rank in ranks] == [2, 2]
    assert [each.state for each in seen(folder)] == ["done", "done"]
