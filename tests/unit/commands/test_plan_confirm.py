"""Tests rows of a plan whose memory a dry run confirms."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel3d.cli.overrides import compose
from parallel3d.commands import plan
from parallel3d.commands.plan import BOUND, DRY_RUN, Plan, confirmed, searched
from parallel3d.errors import UserError
from parallel3d.estimate.memory import nearly_fullest, peak_memory
from parallel3d.estimate.search import LayoutChoice
from parallel3d.optim.own import OptimizerFactory
from parallel3d.run_config import Config
from tests.e2e.ready import run_code

pytestmark = pytest.mark.nightly

GB = 1e9
WORDS = ("model=llama3_8b", "cluster=dgx_h100", "cluster.nodes=2", "global_batch_size=64")


def bf16(*words: str) -> Config:
    config = compose(*words)
    return replace(config, precision=replace(config.precision, name="bf16"))


@pytest.fixture(scope="module")
def found() -> Plan:
    return searched(bf16(*WORDS), {}, 16)


Peaks = dict[LayoutChoice, float | UserError]


def plays(patch: pytest.MonkeyPatch, peaks: Peaks, usual: float = 50 * GB) -> list[LayoutChoice]:
    """Replaces dry runs: layouts need `peaks`, else `usual`. Returns the list of layouts that were
    asked for."""
    asked: list[LayoutChoice] = []

    def dry_run(
        found: Plan, choice: LayoutChoice, optimizer: OptimizerFactory | None
    ) -> dict[int, dict[str, Any]]:
        asked.append(choice)
        peak = peaks.get(choice, usual)
        if isinstance(peak, UserError):
            raise peak
        return {0: {"peak_bytes": peak}}

    patch.setattr(plan, "dry_run", dry_run)
    return asked


def test_the_best_rows_have_the_dry_runs_memory(
    found: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = [found.priced.choices[i] for i in found.rows[:3]]
    asked = plays(monkeypatch, {}, 41 * GB)
    seen = confirmed(found, 3, {}, math.inf)
    assert asked == best == [seen.priced.choices[i] for i in seen.rows[:3]]
    assert [seen.by(i) for i in seen.rows[:4]] == [DRY_RUN] * 3 + [BOUND]
    # These include the reserve that tensors cannot use.
    assert all(seen.priced.memory[i] == (41 + 4) * GB for i in seen.rows[:3])
    assert seen.priced.memory[seen.rows[3]] == found.priced.memory[seen.rows[3]]
    rows = re.findall(r"^ +\d+ .* (dry run|bound)  ", seen.table(), re.M)
    assert rows == [DRY_RUN] * 3 + [BOUND] * 7


def test_the_next_row_replaces_one_that_does_not_fit_or_is_refused(
    found: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (found.priced.choices[i] for i in found.rows[:2])
    asked = plays(monkeypatch, {first: 82 * GB, second: UserError("tp=2 is not allowed")})
    seen = confirmed(found, 2, {}, math.inf)
    left = [seen.priced.choices[i] for i in seen.rows]
    # The next layout may be another variant of the same tp, cp and pp.
    assert {first, second} <= {*asked} and not {first, second} & {*left}
    assert len(seen.priced.order) == len(found.priced.order) - 2
    assert [seen.by(i) for i in seen.rows[:3]] == [DRY_RUN, DRY_RUN, BOUND]
    assert {*left[:2]} == {*asked} - {first, second}


def test_a_plan_without_any_row_left_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {"tp": 1, "pp": 1, "zero": 3, "recompute": "none", "micro_batch_size": 1}
    found = searched(bf16(*WORDS, "dp=16"), fixed | {"dp": 16}, 16)
    plays(monkeypatch, {}, 82 * GB)
    with pytest.raises(
        UserError, match=r"fits no layout on cluster.nodes=2: .* needs .* more than"
    ):
        confirmed(found, 3, fixed, math.inf)
    plays(monkeypatch, dict.fromkeys(found.priced.choices, UserError("a reason")))
    with pytest.raises(UserError, match="a reason"):
        confirmed(found, 3, fixed, math.inf)


def test_without_time_or_torch_a_line_says_so(found: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = plays(monkeypatch, {})
    seen = confirmed(found, 3, {}, -1.0)
    assert not asked and "Dry runs confirmed 0 of the first 3 rows" in seen.table()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    seen = confirmed(found, 3, {}, math.inf)
    assert not asked and "torch is missing" in seen.table()
    assert DRY_RUN not in {seen.by(i) for i in seen.rows}


def test_dry_runs_are_of_the_fullest_ranks() -> None:
    config = bf16(*WORDS, "pp=4", "dp=4", "micro_batch_size=1")
    totals = [peak_memory(config, index).total for index in range(4)]
    assert nearly_fullest(config) == [0] and totals[0] == max(totals)
    alike = replace(config, vpp=2, schedule=replace(config.schedule, name="v_half"))
    assert len(nearly_fullest(alike)) > 1


SCRIPT = """
import contextlib, io, json, sys
from dataclasses import replace
from parallel3d.cli.command_line import main
from parallel3d.commands import plan
from parallel3d.commands.dry_ranks import find_facts

seen, real = [], plan.dry_run

def dry_run(found, choice, optimizer):
    seen.append((found, choice, real(found, choice, optimizer)))
    return seen[-1][-1]

plan.dry_run = dry_run
out = io.StringIO()
with contextlib.redirect_stdout(out):
    code = main(["plan", *json.loads(sys.argv[1])])
found, choice, played = seen[0]
config = plan.configure(found.config, choice)
facts = {row["stage"]: row for row in find_facts(config)["rows"]}
both = [(ran["peak_bytes"], facts[stage]["peak_bytes"]) for stage, ran in played.items()]
print(json.dumps([code, out.getvalue(), both]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("experts", [(), ("model=olmoe_1b_7b", "ep=4", "zero=1")])
def test_confirmed_rows_are_the_dry_runs_own_figures(
    tmp_path: Path, experts: tuple[str, ...]
) -> None:
    """Runs in a process of its own: the simulated device is enabled once and for all there."""
    file = tmp_path / "plan.html"
    usual = [word for word in WORDS if not (experts and word.startswith("model="))]
    words = [*usual, *experts, "model.num_layers=4", "pp=2", "tp=2", "micro_batch_size=1"]
    words += ["plan.confirm=1", "schedule=1f1b", f"plan.html={file}"]
    done = run_code(SCRIPT, json.dumps(words))
    assert done.returncode == 0, done.stderr
    code, out, both = json.loads(done.stdout.splitlines()[-1])
    assert code == 0 and both and all(ran == facts for ran, facts in both)
    [row] = re.findall(r"^ +1 .*", out, re.M)
    peak = max(ran for ran, _ in both) + 4 * GB
    assert f"  {peak / 2**30:.0f}  dry run  " in row
    page = file.read_text()
    assert "on the fullest GPU according to a dry run." in page and "<td>dry run</td>" in page
