"""Tests what srun's errors say about the end of its tasks, and that all of them are passed on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from parallel3d.slurm.step_errors import EndedTask, StepErrors, ended_tasks, ended_tasks_of
from parallel3d.slurm.verdict import Verdict

KILLED = EndedTask("h5", signal.SIGKILL)
SEGFAULT = EndedTask("h6", signal.SIGSEGV)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"srun: error: h6: task 1: Segmentation fault", {1: SEGFAULT}),
        (b"srun: error: h6: task 12: Segmentation fault (core dumped)", {12: SEGFAULT}),
        (
            b"srun: error: h[5-6]: tasks 0-1,3: Killed",
            dict.fromkeys((0, 1, 3), EndedTask("h[5-6]", signal.SIGKILL)),
        ),
        (b"srun: error: h6: task 1: Exited with exit code 1", {1: EndedTask("h6", None)}),
        (b"srun: error: h6: task 1: Exited", {}),
        (b"parallel3d: rank 0 says srun: error: h6: task 1: Killed", {}),
        (b"srun: error: h6: task 1-: Killed", {}),
        (b"srun: error: h6: task 9-1: Killed", {}),
        (b"srun: error: \xff: task 1: K\xffilled", {}),
    ],
)
def test_a_line_names_the_tasks_that_have_failed(line: bytes, found: dict[int, EndedTask]) -> None:
    assert ended_tasks(line) == found


def test_a_signal_counts_that_no_guard_has_seen() -> None:
    """The peers of a rank that dies notice at once, and srun may end before a guard has looked."""
    said = {0: KILLED, 1: SEGFAULT}
    assert [*ended_tasks_of(said, None).items()] == [(1, SEGFAULT), (0, KILLED)]


def test_a_rank_that_a_guard_has_ended_is_not_the_cause() -> None:
    verdict = Verdict(gone=(("h7", 2),))
    said = {0: KILLED, 1: SEGFAULT}
    assert ended_tasks_of(said, verdict) == {2: EndedTask("h7", None), 1: SEGFAULT}
    assert ended_tasks_of(said, Verdict(dead=("h7",))) == {1: SEGFAULT}


ABORTED, EXITED = EndedTask("h7", signal.SIGABRT), EndedTask("h7", None)


@pytest.mark.parametrize(
    ("said", "gone", "cause"),
    [
        ({1: KILLED, 2: ABORTED}, None, 1),  # by lack of memory; NCCL then aborts its peer
        ({2: ABORTED, 1: KILLED}, None, 2),  # srun has ended a rank that was left
        ({1: KILLED, 2: ABORTED}, [2], 1),  # another node's guard looked first
        ({1: KILLED, 2: EXITED}, [2], 1),  # so it did, as the peer of that rank ended at once
        ({1: KILLED, 2: EXITED}, [1, 2], 1),
        ({2: EXITED, 1: KILLED}, [2], 2),
        ({1: KILLED, 2: EXITED}, None, 1),
        ({2: ABORTED, 1: SEGFAULT}, [2], 1),
        ({2: ABORTED, 1: SEGFAULT}, [1, 2], 1),
        ({2: ABORTED, 1: KILLED}, [2], 2),  # a guard has ended a rank that was left
        ({1: KILLED}, [2], 2),
    ],
)
def test_a_rank_that_aborts_may_have_lost_the_one_that_is_the_cause(
    said: dict[int, EndedTask], gone: list[int] | None, cause: int
) -> None:
    verdict = None if gone is None else Verdict(gone=tuple(("h7", rank) for rank in gone))
    assert next(iter(ended_tasks_of(said, verdict))) == cause


def test_a_rank_that_a_guard_misses_has_ended_by_the_signal_that_srun_names() -> None:
    """The guard knows the node, where srun may name several at once."""
    said = {2: EndedTask("h[6-7]", signal.SIGKILL)}
    found = ended_tasks_of(said, Verdict(gone=(("h7", 2),)))
    assert found == {2: EndedTask("h7", signal.SIGKILL)}


CODE = """
import subprocess, sys
from parallel3d.slurm.step_errors import StepErrors

said = "x" * 100_000 + "\\nsrun: error: a: task 3: Killed\\nend"
write = f"import sys; sys.stderr.write({said!r})"
step = subprocess.Popen([sys.executable, "-c", write], stderr=subprocess.PIPE)
errors = StepErrors(step.stderr)
step.wait()
print({rank: (task.nodes, task.signal.name) for rank, task in errors.join(60).items()})
"""


def test_everything_is_passed_on_and_what_is_said_is_known() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stderr == "x" * 100_000 + "\nsrun: error: a: task 3: Killed\nend"
    assert done.stdout == "{3: ('a', 'SIGKILL')}\n"


def test_an_output_that_is_full_does_not_stop_srun() -> None:
    """srun would wait for ever if nobody read what it writes."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=full)
    assert done.stdout == b"{3: ('a', 'SIGKILL')}\n"


def test_a_pipe_that_another_process_holds_is_not_waited_for() -> None:
    reads, writes = os.pipe()
    errors = StepErrors(os.fdopen(reads, "rb"))
    os.write(writes, b"srun: error: a: task 0: Killed\n")
    for _ in range(600):
        if found := errors.join(0.1):
            break
    assert found == {0: EndedTask("a", signal.SIGKILL)}
    os.close(writes)
    errors.join(60)
