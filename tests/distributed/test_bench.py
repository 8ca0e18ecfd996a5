"""Tests `bench comm` and preflight on real ranks: all rows are there, and errors and slow parts
show."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.build import groups_of_run
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.timed_operations import TimedOperation, WrongResult, send_receive, sites
from parallel3d.commands.bench.comm import bench_comm
from parallel3d.commands.bench.keys import BenchConfig
from parallel3d.commands.bench.measure import BenchRow, Measurement, all_rows
from parallel3d.commands.options import CommandConfig
from parallel3d.estimate.network import collective_time
from parallel3d.faults.probe import preflight, probe
from parallel3d.run.cluster_view import ClusterView
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import Worker
from tests.distributed.pool import Pool
from tests.pace import pace

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")
DELAY_S = 0.003
OUTLIER = 1.5


def outlier_here() -> float:
    """Returns a factor that no healthy rank reaches here, since a busy machine slows any rank."""
    return OUTLIER * max(1.0, pace() / 1.5)  # factor on a quiet machine


# The expected rows, written by hand, because the code's own list is under test.
REDUCED = ("all_reduce", "reduce", "reduce_scatter")
MOVED = ("broadcast", "all_gather", "scatter", "gather", "all_to_all", "send_recv")


class Bench:
    """Returns the objects that a measurement needs, on one rank."""

    def __init__(self, run_dir: Path = Path(), tp: int = 2, pp: int = 1, dp: int = 2, **keys: Any):
        self.config = CommandConfig(tp=tp, pp=pp, dp=dp, **keys)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.worker = Worker(rank, rank, world, world, run_dir, "local")
        self.groups = groups_of_run(self.config, self.worker.device, self.worker.placement)
        self.where = ClusterView.find(self.config.cluster, self.worker, self.groups.layout)
        self.sites = sites(self.groups, CPU, self.config.launch)

    def measurement(
        self, rows: list[BenchRow], calls: int = 1, budget_s: float = 60.0
    ) -> Measurement:
        return Measurement(rows, self.sites, self.where, 0, calls, budget_s)

    def rows(self, *sizes: int) -> list[BenchRow]:
        return all_rows(self.sites, sizes, self.groups.layout)[0]

    def close(self) -> None:
        for site in self.sites.values():
            site.close()
        self.groups.close()


# --- the rows --------------------------------------------------------------------------------


def all_results(tp: int, pp: int, dp: int, sizes: tuple[int, ...]) -> list[dict]:
    bench = Bench(tp=tp, pp=pp, dp=dp)
    done = [row for _, rows in bench.measurement(bench.rows(*sizes)).results() for row in rows]
    bench.close()
    return done


def expected_rows(dims: dict[str, int], sizes: tuple[int, ...]) -> set[tuple]:
    """Returns (dim, op, reduction, size, mode) of every row of the backend."""
    keys = set()
    for dim, groups in dims.items():
        for mode in ("alone", "together") if groups > 1 else ("alone",):
            keys.add((dim, "barrier", None, 0, mode))
            keys |= {(dim, op, None, size, mode) for op, size in product(MOVED, sizes)}
            for op, reduction, size in product(REDUCED, ("sum", "avg", "max", "min"), sizes):
                keys.add((dim, op, reduction, size, mode))
    return keys


Results = Callable[[dict[str, int], tuple[int, ...]], list[dict]]


@pytest.fixture(scope="module")
def results(pool: Pool) -> Results:
    """Returns the rows of a layout of four ranks for some sizes, each measured once."""

    @functools.cache
    def known(tp: int, pp: int, dp: int, sizes: tuple[int, ...]) -> list[dict]:
        first, *others = pool.run(4, all_results, tp, pp, dp, sizes, timeout_s=900)
        assert others == [[]] * 3  # only rank 0 has rows
        return first

    def of(layout: dict[str, int], sizes: tuple[int, ...]) -> list[dict]:
        return known(*(layout.get(dim, 1) for dim in ("tp", "pp", "dp")), sizes)

    return of


TP_AND_DP, ODD_SIZES = {"tp": 2, "dp": 2}, (1024, 6001)


@pytest.mark.parametrize(
    ("layout", "sizes"), [(TP_AND_DP, ODD_SIZES), ({"pp": 2, "dp": 2}, (1024,))]
)
def test_every_collective_has_its_row_in_every_dimension_size_and_mode(
    results: Results, layout: dict[str, int], sizes: tuple[int, ...]
) -> None:
    rows = results(layout, sizes)
    by_backend = [row for row in rows if not row["training_path"]]
    key = ("dim", "op", "reduction", "size", "mode")
    keys = [tuple(row[name] for name in key) for row in by_backend]
    groups = {dim: 4 // size for dim, size in layout.items()} | {"world": 1}
    assert sorted(map(str, keys)) == sorted(map(str, expected_rows(groups, sizes)))
    own = {(row["dim"], row["op"], row["path"]) for row in rows if row["training_path"]}
    shared = {
        (dim, op, "shared memory")
        for dim in layout.keys() - {"pp"}
        for op in ("all_reduce", "all_gather", "reduce_scatter")
    }
    assert own == shared | ({("pp", "send_recv", "mailbox")} if "pp" in layout else set())


def test_a_row_keeps_each_ranks_time_and_counts_bytes_as_nccl_tests_does(results: Results) -> None:
    rows = [row for row in results(TP_AND_DP, ODD_SIZES) if row["size"] == ODD_SIZES[1]]
    world = {(row["op"], row["reduction"]): row for row in rows if row["dim"] == "world"}
    row = world["all_reduce", "sum"]
    assert row["bytes"] == 6000  # four equal parts of whole numbers
    assert [len(group["rank_seconds"]) for group in row["groups"]] == [4]
    # With one call, the group's time is its slowest rank's.
    assert row["seconds"] == max(row["groups"][0]["rank_seconds"])
    assert row["algorithm_gb_per_s"] == pytest.approx(6000 / row["seconds"] / 1e9)
    assert row["bus_gb_per_s"] == pytest.approx(row["algorithm_gb_per_s"] * 1.5)
    assert row["times_the_price"] == pytest.approx(row["seconds"] / row["priced_s"])
    alone = [row for row in rows if row["dim"] == "tp" and row["mode"] == "alone"]
    assert all([g["ranks"] for g in row["groups"]] == [[0, 1], [2, 3]] for row in alone)
    assert all(row["seconds"] == max(g["seconds"] for g in row["groups"]) for row in rows)


def own_rows_without_shared_memory() -> list:
    bench = Bench(launch=LaunchConfig(shared_memory=False))
    found = [row for row in bench.rows(4096) if row.operation.own]
    bench.close()
    return found


def test_without_shared_memory_training_uses_the_backend(pool: Pool) -> None:
    assert pool.run(4, own_rows_without_shared_memory) == [[]] * 4


def priced_links(cluster: ClusterConfig) -> dict[str, tuple]:
    bench = Bench(cluster=cluster)
    rows = [BenchRow(dim, TimedOperation("all_gather"), 4096, "alone") for dim in ("tp", "dp")]
    done = [row for _, rows in bench.measurement(rows).results() for row in rows]
    bench.close()
    return {row["dim"]: (row["link"], row["priced_s"]) for row in done}


def test_the_price_uses_the_links_that_the_group_crosses(pool: Pool) -> None:
    cluster = ClusterConfig(
        **{"nodes": 2, "gpus_per_node": 2, "nvlink_gb_per_s": 1.0, "nvlink_latency_us": 1.0},
        **{"rail_gb_per_s": 0.5, "rail_latency_us": 10.0},
    )
    found = pool.run(4, priced_links, cluster)[0]
    # α + half of the bytes / B
    assert found["tp"] == ("nvlink", pytest.approx(1e-6 + 2048 / 1e9))
    assert found["dp"] == ("rail", pytest.approx(10e-6 + 2048 / 0.5e9))


def without_average() -> tuple[set[str | None], dict[str, str]]:
    real = dist.all_reduce

    def refuse(tensor: Tensor, op: object = dist.ReduceOp.SUM, *args: Any, **keys: Any) -> Any:
        if op == dist.ReduceOp.AVG:
            raise RuntimeError("Cannot use ReduceOp.AVG with Gloo")
        return real(tensor, op, *args, **keys)

    with mock.patch.object(dist, "all_reduce", refuse):
        bench = Bench()
        rows, left_out = all_rows(bench.sites, (1024,), bench.groups.layout)
        bench.close()
    return {row.operation.reduction for row in rows}, left_out


def test_unsupported_collectives_are_left_out_with_a_reason(pool: Pool) -> None:
    for reductions, left_out in pool.run(4, without_average):
        assert reductions == {"sum", "max", "min", None}
        assert "has no AVG" in left_out["avg"]


def in_a_hurry() -> list[tuple[list[int], int]]:
    """Returns the calls of each row, and the number of rows with fewer, with much time and with
    hardly any."""
    bench, found = Bench(), []
    for budget_s in (1e6, 0.001):
        measurement = bench.measurement(bench.rows(1024)[:12], calls=3, budget_s=budget_s)
        calls = [row["calls"] for _, rows in measurement.results() for row in rows]
        found.append((calls, measurement.rows_cut))
    bench.close()
    return found


def test_a_small_budget_reduces_calls_and_keeps_every_row(pool: Pool) -> None:
    (full, _), (short, cut) = pool.run(4, in_a_hurry)[0]
    assert full == [3] * 12
    assert (short, cut) == ([1] * 12, 12)


# --- wrong results ---------------------------------------------------------------------------


def spoiled(real: Callable[..., Any]) -> Callable[..., Any]:
    """Spoils one number of the first tensor of a collective."""

    def call(tensor: Tensor, *args: Any, **keys: Any) -> Any:
        done = real(tensor, *args, **keys)
        tensor.view(-1)[3] += 1
        return done

    return call


def swapped(real: Callable[..., Any]) -> Callable[..., Any]:
    """Swaps the halves of a collective's result."""

    def call(out: Tensor, *args: Any, **keys: Any) -> Any:
        done = real(out, *args, **keys)
        out.copy_(out.roll(out.numel() // 2))
        return done

    return call


def summed_once_more(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, group: real(real(tensor, group), group)


WRONG = {
    "all_reduce sum": (dist, "all_reduce", spoiled, "number 3"),
    "reduce max": (dist, "reduce", spoiled, "number 3"),
    "broadcast": (dist, "broadcast", spoiled, "number 3"),
    "all_to_all": (dist, "all_to_all_single", swapped, "number 0"),
    "all_gather": (dist, "all_gather_single", swapped, "number 0"),
    "reduce_scatter sum": (dist, "reduce_scatter_single", spoiled, "number 3"),
    "scatter": (dist, "scatter", spoiled, "number 3"),
    "all_reduce sum own": (collectives, "all_reduce", summed_once_more, "number 0"),
}


def wrong_result(name: str) -> str | None:
    """Returns the messages about a row with a wrong collective, by the ranks that can detect it."""
    words = name.split()
    reduction = words[1] if len(words) > 1 else None
    row = BenchRow("tp", TimedOperation(words[0], reduction, own=len(words) > 2), 4096, "together")
    module, function, spoil, _ = WRONG[name]
    bench = Bench(tp=2, dp=1)
    measurement = bench.measurement([row])
    said = None
    with mock.patch.object(module, function, spoil(getattr(module, function))):
        if module is dist:  # a broadcast distributes the plan, and may be the spoiled one
            measurement._agreed = lambda plan: (0, 1)
        try:
            list(measurement.results())
        except WrongResult as error:
            said = str(error)
        except RuntimeError as error:  # the root has detected it and left
            assert "Connection closed" in str(error) or "reset by peer" in str(error)
    return said


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_is_an_error_that_names_the_row(pool: Pool, name: str) -> None:
    def operation(label: str) -> str:
        return label.replace(" own", "").replace("_", "-")

    rooted = name.startswith("reduce max")  # only the root holds a result
    said = pool.run(2, wrong_result, name)[: 1 if rooted else 2]
    for rank, sentence in enumerate(said):
        assert sentence is not None
        assert sentence.startswith(f"tp {operation(name)}, 4096 bytes")
        assert f"together, rank {rank}: " in sentence
        assert WRONG[name][3] in sentence


# --- slow ranks ------------------------------------------------------------------------------


@contextmanager
def delayed(slow_rank: int, slow_peer: int | None = None) -> Iterator[None]:
    """Delays one rank in the probe's exchanges, always or with one peer alone."""

    def send(sent: Tensor, to: int, received: Tensor, source: int, group: Group) -> None:
        if dist.get_rank() == slow_rank and slow_peer in (None, to):
            time.sleep(DELAY_S)
        send_receive(sent, to, received, source, group)

    with mock.patch("parallel3d.faults.probe.send_receive", send):
        yield


def probed(
    tp: int,
    pp: int,
    dp: int,
    slow_rank: int,
    slow_peer: int | None,
    repeats: int,
    outlier: float = OUTLIER,
) -> list[list]:
    """Returns the ranks of each finding, for several probes."""
    bench = Bench(tp=tp, pp=pp, dp=dp)
    with delayed(slow_rank, slow_peer):
        found = [probe(bench.where, bench.groups, CPU, outlier)[0] for _ in range(repeats)]
    bench.close()
    return [[list(finding.ranks) for finding in findings] for findings in found]


def test_only_the_slowed_rank_is_named(pool: Pool) -> None:
    """Asserts that all ranks agree."""
    assert pool.run(4, probed, 2, 1, 2, 3, None, 1) == [[[[3]]]] * 4


def test_a_slow_pair_is_named_as_a_pair(pool: Pool) -> None:
    assert pool.run(4, probed, 2, 1, 2, 1, 3, 1) == [[[[1, 3]]]] * 4


@pytest.mark.parametrize("layout", [(2, 1, 2), (1, 1, 3)])
def test_without_a_slow_rank_none_is_named(pool: Pool, layout: tuple[int, int, int]) -> None:
    tp, pp, dp = layout
    found = pool.run(tp * pp * dp, probed, tp, pp, dp, -1, None, 3, outlier_here(), timeout_s=900)
    assert found[0] == [[]] * 3


def test_two_ranks_are_not_compared_with_each_other(pool: Pool) -> None:
    assert pool.run(2, probed, 2, 1, 1, 1, None, 1) == [[[]]] * 2


# --- the whole command -------------------------------------------------------------------------


def whole_bench(run_dir: str, slow_rank: int) -> int:
    rank = dist.get_rank()
    bench = BenchConfig(sizes=[4096], iterations=1, warmup=0)
    worker = Worker(rank, rank, 4, 4, Path(run_dir), "local")
    with delayed(slow_rank):
        return bench_comm(CommandConfig(tp=2, pp=1, dp=2, bench=bench), worker)


def test_bench_comm_reports_the_slowed_rank_with_host_and_rail_and_exits_with_0(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(4, whole_bench, str(tmp_path), 2, timeout_s=900) == [0] * 4
    report = json.loads((tmp_path / "bench.json").read_text())
    (finding,) = report["findings"]
    (slow,) = finding["ranks"]
    assert (finding["kind"], slow["rank"], slow["rail"]) == ("rank", 2, 2)
    assert (slow["pp"], slow["dp"], slow["tp"]) == (0, 1, 0)
    assert slow["host"] == report["ranks"][2]["host"] != ""
    assert slow["groups"] == ["tp group 2 3", "dp group 0 2"]
    assert finding["seconds"] > DELAY_S > finding["median_s"]


def flown(run_dir: str, slow_rank: int, outlier: float = OUTLIER) -> list[str]:
    bench = Bench(Path(run_dir), bench=BenchConfig(outlier=outlier))
    said: list[str] = []
    with delayed(slow_rank):
        keys = bench.config
        preflight(
            bench.groups,
            bench.worker,
            said.append,
            keys.cluster,
            keys.launch,
            collective_time,
            keys.bench.outlier,
        )
    bench.close()
    return said


def test_preflight_warns_once_and_writes_its_measurements(pool: Pool, tmp_path: Path) -> None:
    """Accepts one undisturbed flight out of a few, because a busy machine slows other ranks,
    too."""
    for _ in range(6):
        (found, *others) = pool.run(4, flown, str(tmp_path), 3)
        assert others == [[]] * 3
        if len(found) == 1:
            break
    (line,) = found
    assert line.startswith("preflight: slow rank: rank 3 (pp 0, dp 1, tp 1) on ")
    assert "rail 3" in line
    assert "dp group 1 3" in line
    report = json.loads((tmp_path / "preflight.json").read_text())
    assert report["warnings"] == [line.removeprefix("preflight: ")]
    groups = {
        dim: [g["ranks"] for g in report["groups"] if g["dim"] == dim] for dim in ("tp", "dp")
    }
    assert groups == {
        "tp": [[0, 1], [2, 3]],
        "dp": [[0, 2], [1, 3]],
    }
    assert all(g["times_the_price"] == g["seconds"] / g["priced_s"] for g in report["groups"])


def test_preflight_without_a_slow_rank_prints_nothing(pool: Pool, tmp_path: Path) -> None:
    """Accepts one undisturbed flight out of a few, because a busy machine slows ranks at random."""
    flights = (pool.run(4, flown, str(tmp_path), -1, outlier_here()) for _ in range(6))
    assert any(said == [[]] * 4 for said in flights)
