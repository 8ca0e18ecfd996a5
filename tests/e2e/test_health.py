"""Tests gradients that are not finite, and replicas that drift: the messages, and the effects."""

from __future__ import annotations

import re
import socket

import pytest

from parallel3d.metrics.jsonl import rows_of
from tests.e2e.command import PARALLEL3D, Shell
from tests.e2e.test_failures import words

HOST = re.escape(socket.gethostname())
SETTINGS = ("checkpoint.every=2", "recovery.max_skipped=2")
pytestmark = [pytest.mark.at_once(2), pytest.mark.nightly]


def test_too_many_skipped_steps_end_the_run_and_name_the_gradient(shell: Shell) -> None:
    shell.environ = shell.failing("nan:1:5")
    large = "model.vocab_size=25800"  # for bytes: reported at the start, by one rank
    ended = shell.run(*PARALLEL3D, *words(shell, "dp=2", *SETTINGS, "train.steps=20", large))
    assert ended.code == 1
    assert (
        ended.err.count(
            "defaults for a model of 859 k: data=text (read as bytes); parallel3d recipes"
        )
        == 1
    )
    assert "restart" not in ended.err  # a restart would only repeat it
    assert re.search(
        r"TrainingFailure: step 7: gradients were not finite for 3 steps in a row; "
        rf"the first bad gradient in the model's order is that of \S+ on rank 1 \(.*\) on {HOST}",
        ended.errors[-1],
    )
    rows = [r for r in rows_of(shell.cwd / "runs" / "mine" / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in rows if r.get("skipped")] == [5, 6, 7]


def test_a_run_rolls_back_bad_steps_and_names_a_drifted_replica(shell: Shell) -> None:
    more = ("recovery.after_skipped=rollback", "recovery.drift_every=1", "train.steps=12")
    shell.environ = shell.failing("nan:1:5,flip:1:10")
    ended = shell.run(*PARALLEL3D, *words(shell, "cp=2", *SETTINGS, *more))
    assert ended.code == 0, ended.err
    back = [e for e in ended.errors if "rollback" in e]
    assert len(back) == 1
    assert (
        "back to the parameters of step 6, continuing with new samples (rollback 1 of 3)" in back[0]
    )
    rows = [r for r in rows_of(shell.cwd / "runs" / "mine" / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in rows] == list(range(1, 13))
    drifted = [e for e in ended.errors if "drifted" in e]
    assert re.fullmatch(
        rf"parallel3d: step 10: rank 0 \(.*cp 0.*\) on {HOST} and rank 1 \(.*cp 1.*\) on {HOST} "
        r"drifted apart: \S+, which is replicated over dp_cp, differs",
        drifted[0],
    )
    assert len(drifted) == 3  # steps 10, 11 and 12: nothing repairs it
