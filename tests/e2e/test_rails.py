"""Tests on a network that groups follow the wires: the switches count the bytes.

Hosts are network namespaces with a NIC for each GPU slot on its own rail; a router, the spine,
joins the rails. All cables to the spine have a tenth of a rail's bandwidth. CI runs this as root
with iproute2; elsewhere the tests are skipped with the reason.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from parallel3d.blueprint.cluster import LinkClass, cluster_from_config
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.comm.process_groups import DATA_KINDS
from parallel3d.estimate.network import price_step
from parallel3d.estimate.traffic import transfers
from parallel3d.pipeline.p2p import LATENCY_TRIES
from parallel3d.resolve import layout_of
from parallel3d.run.directory import load_config
from tests.e2e.command import Shell
from tests.e2e.forked import Forked
from tests.e2e.rails import Rails, Ran, why_not

# CI has all of it, and must not pass by skipping.
REASON = None if os.environ.get("CI") else why_not()
pytestmark = [pytest.mark.more, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

RAIL_MBIT, SPINE_MBIT = 400, 40
STEPS = 3
SMALL = (
    "model.hidden_size=128",
    "model.num_attention_heads=4",
    "model.seq_length=64",
    "micro_batch_size=2",
    "global_batch_size=16",
    "train.eval_batches=0",
    "train.eval_every=0",
    "checkpoint.every=0",
    "launch.peak_tflops=0.1",  # given, so that the start does not measure it
    "launch.timeout_s=60",
    "launch.shared_memory=false",
    "device=cpu",
    "cluster.nvlink_interface=nvl0",
    "cluster.rail_interface=rail*",
)
SIX = ("cluster=rails_3x2", "tp=2", "pp=3", "model.num_layers=3")
EIGHT = (
    *("tp=2", "pp=2", "dp=2", "model.num_layers=4"),
    *("cluster.nodes=4", "cluster.gpus_per_node=2"),
    *("cluster.rail_gb_per_s=0.05", "cluster.oversubscription=10", "cluster.nvlink_gb_per_s=1"),
)
# One process per GPU, numbered like some launchers do: without regard to hosts.
SCRAMBLED = ["h3g0", "h1g1", "h4g0", "h2g1", "h3g1", "h1g0", "h4g1", "h2g0"]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("rails"), tmp_path_factory.mktemp("scratch"))
    yield shell
    shell.end_all()


@pytest.fixture(scope="module")
def forked(shell: Shell) -> Iterator[Forked]:
    forked = Forked(shell)
    yield forked


@dataclass(frozen=True)
class Runs:
    """The same launch on the same network, placed by a search and by the launcher's numbers."""

    placed: Ran
    naive: Ran


@pytest.fixture(scope="module")
def runs(shell: Shell, forked: Forked) -> Iterator[Runs]:
    limits = ("--rail-mbit", str(RAIL_MBIT), "--spine-mbit", str(SPINE_MBIT))
    network = Rails.start(shell.scratch / "net", hosts=4, gpus=2, options=limits)
    try:
        words = (*EIGHT, *SMALL, *shell.text(), f"train.steps={STEPS}")
        yield Runs(
            placed=network.train(forked, SCRAMBLED, *words, "placement=auto"),
            naive=network.train(forked, SCRAMBLED, *words, "placement=default"),
        )
    finally:
        network.stop()


def priced_bytes(folder: Path) -> dict[LinkClass, float]:
    """Returns the predicted bytes that the run's groups send in all steps, by link class.

    At the start neighbouring stages time round trips of a message: LATENCY_TRIES of the step's own
    messages, each of one micro-batch.
    """
    config = load_config(folder)
    cluster = cluster_from_config(config.cluster, None)
    rows = Ran.map_in(folder)
    slots = [2 * (int(rows[rank]["host"][1:]) - 1) + rows[rank]["local_index"] for rank in rows]
    placement = RankMapping(cluster, layout_of(config), np.array(slots), "read back")
    step = price_step(placement, transfers(config, placement.layout), algorithms=("ring",))
    sums = dict.fromkeys((LinkClass.NVLINK, LinkClass.RAIL, LinkClass.SPINE), 0.0)
    for dim, price in step.dims.items():
        if dim in DATA_KINDS:
            timed = LATENCY_TRIES / config.num_microbatches if dim == "pp" else 0
            for kind, nbytes in price.nbytes.items():
                sums[kind] += nbytes * (config.train.steps + timed)
    return sums


def test_a_shuffled_launch_is_placed_on_nvlink_and_rails(runs: Runs) -> None:
    rows = runs.placed.placed
    assert rows[0]["launch_rank"] == 0
    for first in range(0, 8, 2):  # the two ranks of a tensor group share a host
        assert rows[first]["host"] == rows[first + 1]["host"]
    for row in rows.values():  # every other group stays on its rail
        assert row["tp"] == (row["local_index"] + rows[0]["local_index"]) % 2


def test_with_our_placement_the_spine_carries_under_a_hundredth(runs: Runs) -> None:
    rail, spine = runs.placed.on("rail"), runs.placed.on("spine")
    print(f"\nplaced: nvlink {runs.placed.on('nvl'):,} B, rail {rail:,} B, spine {spine:,} B")
    assert rail > 20e6
    assert spine < 0.01 * rail


def test_in_the_launchers_order_the_spine_carries_most(runs: Runs) -> None:
    rail, spine = runs.naive.on("rail"), runs.naive.on("spine")
    print(f"\nnaive: nvlink {runs.naive.on('nvl'):,} B, rail {rail:,} B, spine {spine:,} B")
    assert spine > 0.5 * rail


@pytest.mark.parametrize("which", ["placed", "naive"])
def test_switches_count_the_priced_bytes(runs: Runs, which: str) -> None:
    ran: Ran = getattr(runs, which)
    priced = priced_bytes(ran.folder)
    expected = {
        "nvl": priced[LinkClass.NVLINK],
        # Traffic over the spine enters through a rail's switch.
        "rail": priced[LinkClass.RAIL] + priced[LinkClass.SPINE],
        "spine": priced[LinkClass.SPINE],
    }
    for kind, nbytes in expected.items():
        print(f"\n{which} {kind}: counted {ran.on(kind):,} B, priced {nbytes:,.0f} B")
        assert ran.on(kind) == pytest.approx(nbytes, rel=0.1, abs=0.002 * ran.on("rail"))


def test_with_a_thin_spine_the_launchers_order_is_several_times_slower(runs: Runs) -> None:
    placed, naive = (statistics.median(r.step_times_s[1:]) for r in (runs.placed, runs.naive))
    print(f"\nstep: placed {placed:.3f} s, naive {naive:.3f} s, ratio {naive / placed:.1f}")
    assert naive > 1.5 * placed


def test_the_runs_train_to_the_same_numbers(runs: Runs) -> None:
    assert runs.placed.losses == runs.naive.losses
    assert len(runs.placed.losses) == STEPS


def test_six_gpus_on_two_rails_leave_the_spine_untouched(shell: Shell, forked: Forked) -> None:
    network = Rails.start(shell.scratch / "six", hosts=3, gpus=2)
    try:
        slots = ["h2g0", "h2g1", "h3g0", "h3g1", "h1g0", "h1g1"]
        words = (*SIX, *SMALL, *shell.text(), "train.steps=2", "placement=auto")
        ran = network.train(forked, slots, *words)
    finally:
        network.stop()
    rows = ran.placed
    for rank, row in rows.items():
        assert row["local_index"] == row["tp"]  # A's is on rail 1, B's on rail 2
        assert row["host"] == rows[rank - row["tp"]]["host"]
    assert sorted({row["host"] for row in rows.values()}) == ["h1", "h2", "h3"]
    a, b = ran.nbytes["switch"]["rail0"], ran.nbytes["switch"]["rail1"]
    print(f"\nsix GPUs: rail 1 {a:,} B, rail 2 {b:,} B, spine {ran.on('spine'):,} B")
    assert a > 1e6
    assert a == pytest.approx(b, rel=0.05)
    assert ran.on("spine") == 0
