"""Tests the layouts in which a job goes on that has lost nodes, and the sentences without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.fields import with_values
from parallel3d.errors import UserError
from parallel3d.run.directory import save_config
from parallel3d.run_config import Config, check_config
from parallel3d.slurm.decide import SmallerLayout
from parallel3d.slurm.smaller import check_shrink, config_of_run, smaller_layouts

EXPERTS = {"model.num_experts": 4, "ep": 4}


def config(batch: int, **changes: Any) -> Config:
    sizes = {"global_batch_size": batch, "micro_batch_size": 1}
    return with_values(Config(), sizes | changes)


@pytest.mark.parametrize(
    ("batch", "changes", "nodes", "tasks", "expected"),
    [
        (12, {}, 4, 1, [(3, 3), (2, 2), (1, 1)]),
        (16, {}, 4, 1, [(2, 2), (1, 1)]),
        (12, {"micro_batch_size": 2}, 3, 1, [(2, 2), (1, 1)]),
        (48, {"tp": 8}, 6, 8, [(4, 4), (3, 3), (2, 2), (1, 1)]),
        (48, {"tp": 2}, 6, 8, [(4, 16), (3, 12), (2, 8), (1, 4)]),
        # a replica on two nodes: three nodes would leave half of one
        (12, {"pp": 2, "tp": 8}, 6, 8, [(4, 2), (2, 1)]),
        (12, {"cp": 2}, 4, 1, [(2, 1)]),
        (12, {"ddp.shard_size": 2, "zero": 2}, 6, 1, [(4, 4), (2, 2), (1, 1)]),
        (24, EXPERTS, 4, 2, [(2, 4)]),
        (12, {"train.batch_schedule": {0: 4, 99: 12}}, 4, 1, [(2, 2), (1, 1)]),
        (12, {"placement": "file", "rank_file": "ranks.txt"}, 4, 1, []),
        (12, {"placement": "dp2-dp2"}, 4, 1, []),
        (12, {"placement": "dp-tp"}, 4, 1, [(3, 3), (2, 2), (1, 1)]),
        (12, {"profile.steps": [1, 2], "profile.ranks": [2]}, 4, 1, [(3, 3)]),
        (12, {}, 1, 8, []),
    ],
)
def test_smaller_layouts_are_those_of_whole_nodes_that_the_run_allows(
    batch: int, changes: dict[str, Any], nodes: int, tasks: int, expected: list[tuple[int, int]]
) -> None:
    found = smaller_layouts(config(batch, **changes), nodes, tasks)
    assert found == tuple(SmallerLayout(number, (f"dp={dp}",)) for number, dp in expected)


def test_each_smaller_layout_passes_the_check_of_the_whole_configuration() -> None:
    given = config(48, tp=2, pp=2, vpp=2, **{"schedule.name": "interleaved"})
    found = smaller_layouts(given, 6, 4)
    assert found
    for layout in found:
        dp = int(layout.words[0].removeprefix("dp="))
        assert check_config(given, 4 * layout.nodes, own_samples=True).dp == dp


@pytest.mark.parametrize(
    ("batch", "changes", "nodes", "tasks", "words"),
    [
        (16, {}, 1, 8, ["dp=8 on 1 node has none", "nearest is recovery.shrink=false"]),
        (8, {"tp": 8}, 1, 8, ["dp=1 on 1 node has none"]),
        (12, {"tp": 8, "pp": 2}, 2, 8, ["dp=1 on 2 nodes has none"]),
        (12, {"ddp.shard_size": 4, "zero": 2}, 2, 2, ["at dp=2 ddp.shard_size=4 must divide"]),
        (12, EXPERTS, 2, 2, ["at dp=2 ep=4", "nearest is recovery.shrink=false"]),
        (12, {"placement": "dp2-dp2"}, 4, 1, ["at dp=3 placement=dp2-dp2", "multiplies to 4"]),
        (12, {"layout": "auto"}, 4, 1, ["layout=auto", "nearest is layout=given"]),
        (12, {}, 4, 0, ["--ntasks-per-node"]),
    ],
)
def test_a_job_without_a_smaller_layout_is_refused_in_one_sentence(
    batch: int,
    changes: dict[str, Any],
    nodes: int,
    tasks: int,
    words: list[str],
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError) as refused:
        check_shrink(config(batch, **changes), tmp_path / "run", nodes, tasks)
    for word in words:
        assert word in str(refused.value)


def test_a_job_with_a_smaller_layout_is_not_refused(tmp_path: Path) -> None:
    check_shrink(config(12), tmp_path / "run", 4, 1)
    # What does not work on all nodes is refused by the ranks.
    check_shrink(config(12, tp=3), tmp_path / "run", 4, 1)
    check_shrink(config(9), tmp_path / "run", 1, 2)


def test_a_job_of_an_older_run_is_not_refused_by_keys_that_the_run_has(tmp_path: Path) -> None:
    check_shrink(config(12), tmp_path, 1, 8)
    with pytest.raises(UserError, match="--ntasks-per-node"):
        check_shrink(config(12), tmp_path, 4, 0)


def test_the_configuration_is_that_of_the_runs_own_starts(tmp_path: Path) -> None:
    given, run_dir = config(12), tmp_path / "run"
    assert config_of_run(given, run_dir, started=False) is given
    run_dir.mkdir()
    assert config_of_run(given, run_dir, started=False) is None, "of an earlier job"
    save_config(check_config(config(24, tp=2), 4, own_samples=True), run_dir)
    found = config_of_run(given, run_dir, started=True)
    assert found is not None and (found.global_batch_size, found.tp) == (24, 2)
    # The layouts do not depend on the dp of the last start, which may have been a smaller one.
    assert smaller_layouts(found, 4, 2) == smaller_layouts(with_values(found, {"dp": 1}), 4, 2)
