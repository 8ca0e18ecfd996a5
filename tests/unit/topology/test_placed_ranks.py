"""Tests how launched processes become ranks: by default, by a placement, by a rank file."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from parallel3d.blueprint.cluster import Cluster, Link, natural
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.errors import UserError
from parallel3d.run.agreement import PROCESS_KEY, RANKS_KEY, assign_rank, refuse
from parallel3d.run.launch import Worker
from parallel3d.run.rendezvous import seen_key
from parallel3d.run_config import Config
from parallel3d.topology import placed_ranks
from parallel3d.topology.placed_ranks import (
    Process,
    from_message,
    hosts_in_order,
    launch_ranks_by_file,
    place_processes,
    rank_of_launch,
    save,
    slots_of,
    to_message,
    with_rank_0_at,
)

SPEEDS = (Link(100.0, 1.0), Link(10.0, 5.0), Link(10.0, 8.0))


def cluster(nodes: int, gpus: int, **more) -> Cluster:
    return Cluster("test", nodes, gpus, more.pop("domain", gpus), gpus, *SPEEDS, **more)


def launched(*hosts: str, gpus: int = 2) -> list[Process]:
    """Returns `gpus` processes on each host, in the launcher's order."""
    return [Process(host, local) for host in hosts for local in range(gpus)]


def config(placement: str = "default", rank_file: Path | None = None, **sizes: int) -> Config:
    made = Config(**sizes)
    made.placement = placement
    made.rank_file = None if rank_file is None else str(rank_file)
    return made


def host_of(placed: placed_ranks.PlacedRanks, rank: int) -> str:
    return placed.processes[placed.launch_ranks[rank]].host


# --- where processes are ----------------------------------------------------------------------


def test_numbers_in_host_names_count_as_numbers() -> None:
    names = ["node10", "node9", "b", "node9b"]
    assert sorted(names, key=natural) == ["b", "node9", "node9b", "node10"]


def test_hosts_under_one_switch_are_adjacent_whatever_their_names() -> None:
    address = {"n1": "core.leaf2.n1", "n2": "core.leaf1.n2", "n3": "core.leaf2.n3"}
    processes = [Process(host, 0, address[host]) for host in ("n3", "n2", "n1")]
    assert hosts_in_order(processes) == ["n2", "n1", "n3"]


def test_hosts_in_any_order_take_the_slots_of_their_nodes() -> None:
    named, slots, note = slots_of(cluster(3, 2), launched("h3", "h1", "h2"))
    assert slots.tolist() == [4, 5, 0, 1, 2, 3]
    assert (named.node_name(2), note) == ("h3", None)


def test_a_cluster_that_knows_its_nodes_names_them_by_full_or_short_name() -> None:
    known = cluster(3, 2, node_names=("b.site", "a.site", "c.site"))
    _, slots, note = slots_of(known, launched("a", "b.site"))
    assert slots.tolist() == [2, 3, 0, 1]
    assert note is None


def test_nodes_of_unequal_size_keep_every_process_on_its_own_gpu() -> None:
    uneven = cluster(2, 4, node_names=("x", "y"), node_gpus=(3, 4))
    processes = [*launched("y", gpus=4), *launched("x", gpus=3)]
    _, slots, note = slots_of(uneven, processes)
    assert slots.tolist() == [3, 4, 5, 6, 0, 1, 2]
    assert note is None


def test_more_ranks_than_gpus_on_a_host_are_reported() -> None:
    made_up, slots, note = slots_of(cluster(3, 2), launched("laptop", gpus=6))
    assert slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert made_up.node_name(0) == "node0"
    assert note == (
        "laptop runs 6 ranks but has 2 GPUs: GPUs of cluster test are assigned in launch order"
    )


def test_a_host_outside_the_cluster_is_reported() -> None:
    _, slots, note = slots_of(cluster(2, 2, node_names=("a", "b")), launched("a", "z"))
    assert slots.tolist() == [0, 1, 2, 3]
    assert note is not None and note.startswith("z is not one of the 2 nodes of the cluster")


# --- the map ----------------------------------------------------------------------------------


def test_default_is_the_launchers_order_and_needs_no_cluster() -> None:
    run = config(tp=2, pp=2, dp=2)
    assert not placed_ranks.wants_cluster(
        run.placement, run.cluster, preflight=False, hierarchical=False
    )
    placed = place_processes(run, launched("d", "c", "b", "a"), None)
    assert placed.launch_ranks == tuple(range(8))
    assert placed.placement is None


@pytest.mark.parametrize("placement", ["tp-cp-dp-pp", "tp-cp-pp-dp", "dp-tp-pp", "dp2-tp2-pp2"])
def test_ranks_follow_the_order_even_if_hosts_come_shuffled(placement: str) -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    hosts = ["h1", "h4", "h2", "h3"]
    processes = launched(*hosts)
    placed = place_processes(config(placement, tp=2, pp=2, dp=2), processes, cluster(4, 2))
    for slot, rank in enumerate(Tiling.parse(placement, layout).rank_of_slot(layout)):
        process = placed.processes[placed.launch_ranks[rank]]
        assert process == Process(f"h{slot // 2 + 1}", slot % 2)


@pytest.mark.slow
def test_launch_rank_0_is_rank_0_on_any_host() -> None:
    for hosts in itertools.permutations(["h1", "h2", "h3", "h4"]):
        placed = place_processes(
            config("tp-cp-pp-dp", tp=2, pp=2, dp=2), launched(*hosts), cluster(4, 2)
        )
        assert placed.launch_ranks[0] == 0
        assert host_of(placed, 0) == hosts[0]


def groups_of_slots(placement: RankMapping, *dims: str) -> set[frozenset[int]]:
    return {
        frozenset(placement.slots[list(group)].tolist()) for group in placement.layout.groups(*dims)
    }


def neighbours(placement: RankMapping, dim: str) -> set[frozenset[int]]:
    """Returns pairs of slots that follow each other in a group, including the last and the
    first."""
    pairs = set()
    for group in placement.layout.groups(dim):
        for a, b in zip(group, group[1:] + group[:1], strict=True):
            pairs.add(frozenset(placement.slots[[a, b]].tolist()))
    return pairs


def test_moving_rank_0_to_a_slot_keeps_every_group_and_ring() -> None:
    layout = Layout(tp=2, pp=3, dp=4)
    start = RankMapping.tiled(cluster(6, 4), layout, Tiling.parse("tp-dp-pp", layout))
    for slot in range(24):
        turned = with_rank_0_at(start, slot)
        assert turned.slots[0] == slot
        for dim in ("tp", "dp", "pp"):
            assert groups_of_slots(turned, dim) == groups_of_slots(start, dim)
            assert neighbours(turned, dim) == neighbours(start, dim)


def test_a_pipeline_whose_last_stage_must_come_first_is_reversed() -> None:
    layout = Layout(pp=4)
    start = RankMapping.tiled(cluster(4, 1), layout, Tiling.parse("pp", layout))
    assert with_rank_0_at(start, 3).slots.tolist() == [3, 2, 1, 0]
    assert with_rank_0_at(start, 1).slots.tolist() == [1, 2, 3, 0]


@pytest.mark.nightly
def test_random_launch_orders_lose_no_process() -> None:
    rng = random.Random(3)
    for _ in range(100):
        tp, pp, dp = rng.choice([(2, 2, 2), (1, 4, 2), (4, 1, 2), (2, 1, 4)])
        hosts = [f"h{n}" for n in range(1, 5)]
        rng.shuffle(hosts)
        order = "-".join(rng.sample(["tp", "cp", "dp", "pp"], 4))
        placed = place_processes(
            config(order, tp=tp, pp=pp, dp=dp), launched(*hosts), cluster(4, 2)
        )
        assert sorted(placed.launch_ranks) == list(range(8))
        assert [placed.launch_ranks[r] for r in placed.rank_of_launch] == list(range(8))


def test_a_missing_node_leaves_its_slots_empty() -> None:
    run = config("tp-cp-dp-pp", tp=2, dp=2)
    whole = cluster(3, 2, node_names=("a", "b", "c"))
    placed = place_processes(run, launched("c", "a"), whole)
    assert placed.placement is not None
    assert sorted(placed.placement.slots.tolist()) == [0, 1, 4, 5]
    assert [host_of(placed, r) for r in range(4)] == ["c", "c", "a", "a"]


def test_the_map_survives_the_store_and_the_disk(tmp_path: Path) -> None:
    processes = launched("h1", "h3", "h2", "h4")
    run = config("tp-cp-pp-dp", tp=2, pp=2, dp=2)
    placed = place_processes(run, processes, cluster(4, 2, unit_nodes=2))
    message = json.loads(json.dumps(to_message(placed)))
    ranks, placement = from_message(message, placed.layout)
    assert ranks == placed.rank_of_launch
    assert placement is not None and placed.placement is not None
    assert placement.cluster == placed.placement.cluster
    assert np.array_equal(placement.slots, placed.placement.slots)
    assert placed.predicted_s is not None and placed.predicted_s > 0

    path = tmp_path / "placement.json"
    save(placed, path)
    said = json.loads(path.read_text())
    assert said["predicted_communication_s"] == placed.predicted_s
    row = said["ranks"][5]
    process = placed.processes[row["launch_rank"]]
    assert (row["host"], row["local_index"]) == (process.host, process.local)
    assert (row["pp"], row["dp"], row["tp"]) == (1, 0, 1)
    assert row["gpu"] == f"{process.host} GPU {process.local}"
    for launch, rank in enumerate(placed.rank_of_launch):
        assert rank_of_launch(path, launch) == rank


def test_without_a_map_the_rank_is_the_launch_rank(tmp_path: Path) -> None:
    assert rank_of_launch(tmp_path / "placement.json", 5) == 5


def test_a_map_of_16384_ranks_is_made_and_packed_small() -> None:
    hosts = [f"node{n}" for n in range(2048)]
    random.Random(0).shuffle(hosts)
    run = config("tp-cp-pp-dp", tp=8, pp=8, dp=256, global_batch_size=1024)
    run.model.num_layers = 8
    placed = place_processes(run, launched(*hosts, gpus=8), cluster(2048, 8, unit_nodes=32))
    assert sorted(placed.launch_ranks) == list(range(16384))
    assert len(zlib.compress(json.dumps(to_message(placed)).encode())) < 200_000


# --- rank files -------------------------------------------------------------------------------

PROCESSES = launched("h1", "h2.site")
GOOD = """
# a comment
0 h1 0
1 h2 1   # the first label will do
rank 2=h2.site slot=0
rank 3 = h1 slots=1
"""


def test_both_spellings_of_a_rank_file_are_read() -> None:
    assert launch_ranks_by_file(GOOD, "ranks", PROCESSES) == [0, 3, 2, 1]


def test_the_map_follows_the_rank_file(tmp_path: Path) -> None:
    file = tmp_path / "ranks"
    file.write_text(GOOD)
    placed = place_processes(config("file", file, tp=2, dp=2), PROCESSES, None)
    assert placed.launch_ranks == (0, 3, 2, 1)
    with_cluster = place_processes(config("file", file, tp=2, dp=2), PROCESSES, cluster(2, 2))
    assert with_cluster.launch_ranks == (0, 3, 2, 1)
    assert with_cluster.placement is not None
    assert with_cluster.placement.slots.tolist() == [0, 3, 2, 1]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("0 h1 0\n1 h1", r"ranks line 2, '1 h1', cannot be read: it must be `rank host local"),
        ("0 h1 0\n4 h1 1", r"ranks line 2 places rank 4, .* ranks 0 to 3; the nearest is 3"),
        (
            "0 h1 0\n\n0 h1 1",
            r"ranks line 3 gives h1 1 to rank 0, but line 1 already names that rank",
        ),
        ("0 h1 0\n1 h3 1", r"ranks line 2 names h3 1, where no rank .*; the nearest is h1 1"),
        ("0 h1 0\n1 h2.site 2", r"ranks line 2 names h2\.site 2, .* nearest is h2\.site [01]"),
        (
            "0 h1 0\n1 h1 0",
            r"ranks line 2 gives h1 0 to rank 1, but line 1 already names that process",
        ),
        ("0 h1 0\n1 h1 1\n3 h2 1", r"no line for rank 2; add a line such as `2 h2\.site 0`"),
        ("# none", r"no line for rank 0 and 3 more; add a line such as `0 h1 0`"),
        ("0 h1 1\n1 h1 0\n2 h2 0\n3 h2 1", r"line 1 places rank 0 on another .* must be `0 h1 0`"),
    ],
)
def test_a_wrong_line_is_named_with_a_correction(lines: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        launch_ranks_by_file(lines, "ranks", PROCESSES)


def test_localhost_is_the_only_host() -> None:
    one = launched("laptop")
    assert launch_ranks_by_file("0 localhost 0\n1 localhost 1", "f", one) == [0, 1]
    with pytest.raises(UserError, match="names localhost 0, where no rank"):
        launch_ranks_by_file("0 localhost 0", "f", PROCESSES)


def test_a_missing_rank_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        place_processes(config("file", tmp_path / "none", dp=4), PROCESSES, None)


def test_random_rank_files_are_followed_line_by_line() -> None:
    rng = random.Random(7)
    for _ in range(100):
        order = [0, *rng.sample(range(1, 4), 3)]
        rows = [f"{rank} {PROCESSES[p].host} {PROCESSES[p].local}" for rank, p in enumerate(order)]
        rng.shuffle(rows)
        assert launch_ranks_by_file("\n".join(rows), "f", PROCESSES) == order


# --- through the store ------------------------------------------------------------------------


class Store:
    """A store with the methods in use; every call is counted."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}
        self.calls = 0

    def set(self, key: str, value: str | bytes) -> None:
        self.calls += 1
        self.held[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self.calls += 1
        return self.held[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls += 1
        return [self.held[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]


SLURM_NODES = ["n4", "n1", "n3", "n2"]


def take_ranks(
    run: Config, store: Store, folder: Path, app: str = "train"
) -> tuple[list[Worker], list[str]]:
    """Returns the ranks of all processes, two per node; the last process asks first and launch rank
    0 last."""
    workers = [Worker(n, n % 2, 8, 2, folder, "slurm") for n in range(8)]
    errors = []
    # The others would wait for launch rank 0, so they are called twice here.
    for repeat in (False, True):
        for me in reversed(workers):
            me.rank = workers.index(me)
            if repeat and me.rank == 0:
                continue
            node = SLURM_NODES[me.rank // 2]
            environ = {
                "SLURMD_NODENAME": node,
                "SLURM_TOPOLOGY_ADDR": f"core.leaf{1 if node in ('n1', 'n4') else 2}.{node}",
                "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
            }
            try:
                assign_rank(run, me, store, environ, app)
            except KeyError:
                assert not repeat  # a real store would have waited here
            except UserError as error:
                errors.append(str(error))
    return workers, errors


def test_the_default_placement_needs_one_message_from_each_rank(tmp_path: Path) -> None:
    store = Store()
    workers, errors = take_ranks(config(tp=2, pp=2, dp=2), store, tmp_path)
    assert errors == []
    # All ranks read it, so it must not grow with their number.
    assert len(store.held[RANKS_KEY]) < 100
    assert [me.rank for me in workers] == list(range(8))
    assert all(me.placement is None for me in workers)
    saved = json.loads((tmp_path / "placement.json").read_text())
    assert [row["launch_rank"] for row in saved["ranks"]] == list(range(8))


def test_a_single_rank_needs_no_placement(tmp_path: Path) -> None:
    store = Store()
    assign_rank(config(), Worker(0, 0, 1, 1, tmp_path, "local"), store, {}, "train")
    assert store.calls == 0
    assert list(tmp_path.iterdir()) == []


def test_slurms_arbitrary_node_order_is_sorted_by_its_switches(tmp_path: Path) -> None:
    run = config("tp-cp-pp-dp", tp=2, pp=2, dp=2)
    run.cluster.gpus_per_node, run.cluster.nodes, run.cluster.unit_nodes = 2, 4, 2
    workers, errors = take_ranks(run, Store(), tmp_path)
    assert errors == []
    assert workers[0].rank == 0
    placement = workers[5].placement
    assert placement is not None
    assert placement.cluster.node_names == ("n1", "n4", "n2", "n3")
    layout = placement.layout
    leaf = {"n1": 1, "n4": 1, "n2": 2, "n3": 2}
    for group in layout.groups("tp", "pp"):  # a replica stays under its leaf switch
        hosts = {SLURM_NODES[w // 2] for w, me in enumerate(workers) if me.rank in group}
        assert len({leaf[host] for host in hosts}) == 1


def test_every_process_gets_the_reason_of_a_refused_placement(tmp_path: Path) -> None:
    file = tmp_path / "ranks"
    file.write_text("0 n4 0\n1 n9 0\n")
    store = Store()
    store.counts[seen_key(RANKS_KEY)] = 7  # otherwise launch rank 0 would wait for its readers
    _, errors = take_ranks(config("file", file, dp=8), store, tmp_path)
    assert len(errors) == 8
    assert set(errors) == {
        "rank_file: ranks line 2 names n9 0, where no rank of this run was started; "
        "the nearest is n4 0"
    }
    assert not (tmp_path / "placement.json").exists()


def test_every_process_learns_that_another_one_refuses(tmp_path: Path) -> None:
    class Refused(Store):
        def set(self, key: str, value: str | bytes) -> None:
            if key != f"{PROCESS_KEY}/5" or key not in self.held:
                super().set(key, value)

    store = Refused()
    refuse(store, 5, UserError("on host n2: no GPU"))  # type: ignore[arg-type]
    store.counts[seen_key(RANKS_KEY)] = 7
    _, errors = take_ranks(config(dp=8), store, tmp_path)
    assert errors == ["on host n2: no GPU"] * 8
    assert not (tmp_path / "placement.json").exists()


def test_bench_comm_always_knows_where_its_ranks_are(tmp_path: Path) -> None:
    run = config(tp=2, pp=2, dp=2)
    run.cluster.gpus_per_node = 2
    workers, _ = take_ranks(run, Store(), tmp_path, app="bench comm")
    assert [me.rank for me in workers] == list(range(8))
    assert all(me.placement is not None for me in workers)


def test_a_placement_that_does_not_fit_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config("tp-cp-pp-dp", tp=2, pp=2, dp=2)
    run.cluster.nodes, run.cluster.gpus_per_node = 8, 1
    take_ranks(run, Store(), tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("parallel3d: n4 runs 2 ranks but has 1 GPU: GPUs of cluster")


def test_two_hosts_with_the_same_name_are_refused() -> None:
    """Tests clones of a virtual machine, which share a name."""
    clones = [Process("ubuntu", local) for local in (0, 1, 0, 1)]
    with pytest.raises(UserError, match="2 ranks have the local index 0 on hosts named ubuntu"):
        place_processes(config("auto", dp=4), clones, cluster(2, 2))
    place_processes(config("default", dp=4), clones, None)  # then no names are needed
