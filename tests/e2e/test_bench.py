"""Tests `parallel3d bench comm` as typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.command import PARALLEL3D, Ended, Shell
from tests.e2e.forked import Forked
from tests.e2e.here import answer
from tests.e2e.watched import Watched

pytestmark = pytest.mark.nightly

BENCH = (*PARALLEL3D, "bench", "comm", "device=cpu")
MOVED = ("broadcast", "all_gather", "scatter", "gather", "all_to_all", "send_recv")
REDUCED = product(("all_reduce", "reduce", "reduce_scatter"), ("sum", "avg", "max", "min"))
OPERATIONS = [*((op, None) for op in MOVED), *REDUCED]
SIZES = (4096, 65536)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Yields the output of the bench on four ranks, and its directory."""
    shell = Shell(tmp_path_factory.mktemp("four"), tmp_path_factory.mktemp("scratch"))
    forked = Forked(shell)
    # Neither the batch nor the data would be valid for training: they are not checked.
    forked.add_world(
        *(4, "bench", "comm", "device=cpu", "tp=2", "pp=2", "run=b", "bench.budget_s=1"),
        f"bench.sizes=[{','.join(map(str, SIZES))}]",
        *("global_batch_size=7", "data=text", "data.path=nowhere"),
    )
    try:
        forked.start()
        first, *others = forked.finish(timeout_s=60)
        assert first.errors == [] and not any(each.out + each.err for each in others)
        yield first.out, shell.cwd
    finally:
        shell.end_all()


def test_four_ranks_give_every_row_in_under_a_minute(four: tuple[str, Path]) -> None:
    out, cwd = four
    report = json.loads((cwd / "runs/b/bench.json").read_text())
    found = {
        (row["dim"], row["op"], row["reduction"], row["size"], row["mode"]): row
        for row in report["rows"]
        if not row["training_path"]
    }
    modes = {dim: ("alone", "together") for dim in ("tp", "pp")} | {"world": ("alone",)}
    for dim, of_dim in modes.items():
        for mode in of_dim:
            assert found.pop((dim, "barrier", None, 0, mode))["seconds"] > 0
            for (op, reduction), size in product(OPERATIONS, SIZES):
                row = found.pop((dim, op, reduction, size, mode))
                assert row["calls"] >= 1
                assert row["bytes"] == size
                assert row["seconds"] > 0
                assert row["priced_s"] > 0
    assert found == {}
    for words in ("tp: 2 groups of 2", "world: 1 group of 4", "reduce-scatter max", "send/receive"):
        assert words in out
    assert "\x1b" not in out  # plain without a terminal
    assert "Measured here: cluster.nvlink_gb_per_s=" in out
    # no rank or some ranks may be slow, because this machine may be busy
    assert "times the median" in out
    assert len(report["pairs"]) == 6  # all four ranks


def test_the_measured_speeds_are_valid_keys_of_the_cluster(
    four: tuple[str, Path], shell: Shell
) -> None:
    lines = four[0].splitlines()
    line = next(line for line in lines if line.startswith("Measured here: "))
    keys = line.removeprefix("Measured here: ").split(" (")[0].split()
    few = ("bench.iterations=1", "bench.warmup=0", "bench.sizes=[4194304]", "bench.json=out.json")
    with Watched(shell) as watched:
        words = ("dp=2", "run=c", "launch.shared_memory=false", *few, *keys)
        again = shell.run(*BENCH, *words, GLOO_SOCKET_IFNAME="eth0")
    assert again.code == 0
    assert watched.seen and watched.elsewhere == []  # all listeners are on the loopback
    assert "world is not measured: it has the same ranks as dp." in again.out
    prices = {
        (row["op"], row["size"]): row["priced_s"]
        for row in json.loads((shell.cwd / "out.json").read_text())["rows"]
    }
    speed, latency = (float(key.split("=")[1]) for key in keys)
    expected = 2 * latency * 1e-6 + 4194304 / (speed * 1e9)
    assert prices["all_reduce", 4194304] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("dp=2", "bench.sizes=[]"), "bench.sizes=[] must have at least one size"),
        (("dp=2", "bench.sizes=[1,4096]"), "the nearest is bench.sizes=[4,4096]"),
        (("dp=2", "bench.json=no/such/file.json"), "there is no folder no/such"),
        (("dp=2", "bench.outlier=1"), "bench.outlier=1"),
    ],
)
def test_impossible_measurements_are_refused_in_one_line(
    shell: Shell, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str
) -> None:
    assert_refused(answer(shell, capfd, "bench", "comm", "device=cpu", *words), sentence)
    assert not (shell.cwd / "runs").exists()


def test_a_single_rank_is_refused(shell: Shell) -> None:
    ended = shell.run(*BENCH)
    assert_refused(ended, "tp=1, pp=1 and dp=1 make a single rank, which has nothing to send")
    assert not (shell.cwd / "runs").exists()


def assert_refused(ended: Ended, sentence: str) -> None:
    assert ended.code == 2
    (line,) = ended.errors
    assert sentence in line
