"""Tests that ranks of one host only listen on its loopback, and store nothing that is code.

test_runs.py watches ranks that train over gloo, test_bench.py the ranks of bench, and
test_checkpoint_command.py the ranks of generate.
"""

from __future__ import annotations

import base64
import signal
import time

import pytest
import torch.distributed as dist

from tests.e2e.command import PARALLEL3D, TINY, Shell
from tests.e2e.test_failures import SECONDS, assert_stopped_and_saved, start_training
from tests.e2e.watched import Watched, listeners
from tests.pace import in_time

pytestmark = [pytest.mark.at_once(2), pytest.mark.nightly]


def test_verify_listens_on_the_loopback_only(shell: Shell) -> None:
    words = ("verify", *TINY, *shell.text(), "tp=1", "dp=2", "zero=1", "verify.steps=2")
    words += ("launch.shared_memory=false", "optim.state=bf16", "optim.ema_decay=0.9")
    with Watched(shell) as watched:
        # Variables of a machine with several hosts do not apply to a run on one.
        ended = shell.run(*PARALLEL3D, *words, GLOO_SOCKET_IFNAME="eth0")
    assert ended.code == 0, ended.err  # the answer of its store
    assert "fp64" in ended.out
    assert watched.elsewhere == []
    assert watched.seen


def test_shared_memory_the_store_without_pickles_and_sigterm(shell: Shell) -> None:
    """Starts a run, inspects it and the content of its store, and then stops it."""
    shell.environ = {"GLOO_SOCKET_IFNAME": "eth0"}
    with Watched(shell) as watched:
        process = start_training(shell, "tp=2", "checkpoint.every=500", pp=1)
    assert watched.elsewhere == []
    assert watched.seen
    ((_, port),) = listeners([process.pid])
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    keys = store.list_keys()
    values = {key: store.get(key) for key in keys}
    assert any("parallel3d/" in key for key in keys)
    assert not any("rendezvous" in key for key in keys)
    for key, value in values.items():
        assert not is_pickle(value), key
    started = time.monotonic()
    process.terminate()
    ended = shell.finish(process, started, 30)
    assert in_time(ended.wall_s, SECONDS)
    assert ended.code == 0, ended.err
    assert_stopped_and_saved(shell, ended, signal.SIGTERM)
    assert (shell.cwd / "runs" / "mine" / "requeue").exists()


def is_pickle(value: bytes) -> bool:
    """Returns whether it begins like pickles of protocol 2 and later, plainly or in base64."""
    try:
        decoded = base64.b64decode(value, validate=True)
    except ValueError:
        decoded = b""
    begins = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
    return any(v.startswith(begins) and v.endswith(b".") for v in (value, decoded))
