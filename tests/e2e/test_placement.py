"""Tests a placement on the command line: its files, its messages, and the rank named in a
failure."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time

import pytest

from tests.e2e.command import PARALLEL3D, TINY, Ended, Shell, wait_for
from tests.e2e.forked import run_forked
from tests.pace import in_time

pytestmark = pytest.mark.nightly

HOST = socket.gethostname()
FOUR = ("tp=2", "pp=2", "run=mine", *TINY)


def train_on_two(shell: Shell, *words: str) -> Ended:
    return run_forked(shell, "train", "tp=2", "run=mine", *TINY, *shell.text(), *words)


def saved(shell: Shell) -> dict:
    return json.loads((shell.cwd / "runs" / "mine" / "placement.json").read_text())


def test_a_killed_process_is_named_by_its_placed_rank(shell: Shell) -> None:
    words = (*FOUR, *shell.text(), "placement=pp-tp", "train.steps=100000")
    process = shell.start(*PARALLEL3D, "train", *words)
    metrics = shell.cwd / "runs" / "mine" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, 90, "the first step")
    started = time.monotonic()
    os.kill(shell.rank_pid(1), signal.SIGKILL)  # the launcher's number 1 is on stage 1
    ended = shell.finish(process, started, 30)
    assert in_time(ended.wall_s, 10)
    assert ended.code == 1
    assert ended.errors[-1].startswith(
        f"parallel3d: rank 2 (pp 1, dp 0, tp 0) on {HOST} was killed by SIGKILL"
    )


def test_four_ranks_by_a_rank_file_report_problems_once_and_save_the_map(
    shell: Shell,
) -> None:
    lines = [f"{rank} {HOST} {local}" for rank, local in enumerate([0, 3, 1, 2])]
    (shell.cwd / "ranks").write_text("\n".join(lines))
    more = (
        "placement=file",
        "rank_file=ranks",
        "preflight=false",
        "cluster.rail_interface=lo",
        "train.steps=1",
    )
    here = ("cluster=rails_3x2", "cluster.nodes=2")
    ended = run_forked(shell, "train", *FOUR, *shell.text(), *more, *here, ranks=4)
    assert ended.code == 0, ended
    misfit = f"{HOST} runs 4 ranks but has 2 GPUs"
    note = f"{misfit}: GPUs of cluster rails_3x2 are assigned in launch order"
    assert [line for line in ended.errors if "launch order" in line] == [f"parallel3d: {note}"]
    found = saved(shell)
    assert (found["how"], found["note"]) == ("file", note)
    assert [row["local_index"] for row in found["ranks"]] == [0, 3, 1, 2]
    assert [(row["pp"], row["tp"]) for row in found["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_wrong_rank_file_is_refused_once_and_leaves_no_run(shell: Shell) -> None:
    (shell.cwd / "ranks").write_text(f"0 {HOST} 0\n1 nowhere.else 1\n")
    ended = train_on_two(shell, "placement=file", "rank_file=ranks")
    assert ended.code == 2
    (line,) = ended.errors
    said = (
        "parallel3d: rank_file: ranks line 2 names nowhere.else 1, where no rank of this run was "
    )
    assert re.fullmatch(f"{said}started; the nearest is {HOST} [01].", line)
    assert list((shell.cwd / "runs").iterdir()) == []


def test_an_interface_that_no_host_has_is_refused(shell: Shell) -> None:
    ended = train_on_two(
        shell, "cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.rail_interface=ib*"
    )
    assert ended.code == 2
    # Every rank detects this, and one reports it, after the notice on two ranks on a host with one
    # GPU.
    assert len(ended.errors) == 2
    assert ended.errors[-1].startswith(
        f"parallel3d: cluster.rail_interface=ib*: host {HOST} has no such network interface; it "
        "must be one of lo"
    )
