"""Tests benchmarks/gpu/node.py: each kind of line with two CPU ranks, and the judgement of
answers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import commands as gpu_commands
from benchmarks.gpu import node as gpu_node
from benchmarks.gpu import tasks as gpu_tasks
from benchmarks.gpu.process import ROOT
from benchmarks.gpu.tasks import Given
from parallel3d.cli.overrides import compose
from parallel3d.commands.options import CommandConfig
from parallel3d.commands.plan import plan
from parallel3d.device import accelerator
from tests.e2e.ready import run_command

pytestmark = pytest.mark.more

LINES = {name: line for name, line in gpu_node.LINES.items() if line.by_command}


def given(folder: Path, size: str = "tiny") -> Given:
    return Given(torch.device("cpu"), size, folder, {})


@pytest.mark.slow
def test_each_kind_of_line_with_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_commands, gpu_node):
        monkeypatch.setattr(module, "parallel3d", run_command)
    verified = gpu_node.verify(given(tmp_path), "tp=2 sp=true")
    assert verified == {"verdict": "PASS", "found": "the layout does not change the model"}
    measured = gpu_node.comm(given(tmp_path), "dp=2")
    assert measured["verdict"] == "NOTED"
    assert {row["op"] for row in measured["rows"]} == set(gpu_node.COLLECTIVES)
    assert all(row["times_price"] > 0.0 for row in measured["rows"])
    trained = gpu_node.train(given(tmp_path), "dp=2 zero=1")
    assert trained["verdict"] == "PASS"
    assert len(trained["losses"]) == 5
    assert trained["plan"].keys() == {"step s", "MFU %", "GiB"}
    assert trained["dryrun"]["peak_bytes"] > 0 and "dryrun: seconds" in trained["found"]


@pytest.mark.parametrize("name", LINES)
def test_the_configurations_for_eight_ranks_are_valid(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests lines that only a node runs: the first command of each."""
    seen = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        # bench reads no batch otherwise
        of_batch = ["micro_batch_size=1"] if "bench" in command else []
        words = [word for word in command if "=" in word]
        seen.append(compose(*words, *of_batch, world_size=8, schema=CommandConfig))
        return subprocess.CompletedProcess(command, 1, "", "parallel3d: seen.\n")

    monkeypatch.setattr(gpu_commands.subprocess, "run", run)
    with pytest.raises(gpu_commands.RunFailed, match=r"parallel3d: seen\."):
        LINES[name].run(given(tmp_path, "full"))
    assert len(seen) == 1


@pytest.mark.parametrize("words", gpu_node.LAYOUTS)
def test_each_layout_fits_by_the_planner(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: str, *typed: str) -> str:
        plan(compose(*typed, schema=CommandConfig), typed)
        return capsys.readouterr().out

    monkeypatch.setattr(gpu_node, "run", run)
    planned = gpu_node.planned(given(tmp_path, "full"), words, gpu_node.SEQUENCES)
    assert 1.0 < planned["step s"] < 4.0 and planned["GiB"] < 80.0


def test_a_row_of_a_plan_is_read_by_its_names() -> None:
    text = "llama on 8 GPUs\n\n  #   tp  pp schedule  recompute  zero  step s   MFU %  GiB  why\n"
    text += "  1    2   1 1f1b      none          1    1.89    50.6   47  97 % of the step"
    assert gpu_node.row_of_plan(text) == {"step s": 1.89, "MFU %": 50.6, "GiB": 47.0}


def test_ranks_of_a_layout() -> None:
    assert [gpu_node.ranks_of(words) for words in ("tp=2 sp=true pp=2 dp=2 vpp=8", "dp=8")] == [
        8,
        8,
    ]
    for words in (*gpu_node.LAYOUTS, *gpu_node.VERIFIED, *gpu_node.MEASURED):
        assert gpu_node.ranks_of(words) == 8


def on_card(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: int, name: str = "NVIDIA H100"
) -> Given:
    """Returns the arguments of a line on a node with that many GPUs."""
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    module = SimpleNamespace(device_count=lambda: devices, get_device_name=lambda device: name)
    monkeypatch.setattr(accelerator, "module", lambda device: module)
    return Given(torch.device("cpu"), "full", folder, {})


@pytest.mark.parametrize("name", LINES)
def test_with_too_few_devices_a_line_is_skipped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = LINES[name].run(on_card(tmp_path, monkeypatch, 4))
    assert found == {"skipped": "4 device(s) here, 8 needed"}


def test_on_a_shared_card_only_verify_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(
        gpu_node,
        "parallel3d",
        lambda *words: subprocess.CompletedProcess(words, 0, "", ""),
    )
    card = on_card(tmp_path, monkeypatch, 1)
    assert gpu_node.verify(card, "dp=8 zero=3")["verdict"] == "PASS"
    assert gpu_node.train(card, "dp=8 zero=3") == {"skipped": "1 device(s) here, 8 needed"}


@pytest.mark.parametrize(
    ("times", "findings", "verdict"),
    [(1.4, [], "PASS"), (1.6, [], "DIFFERS"), (1.4, [{"rank": 3}], "DIFFERS")],
)
def test_collectives_are_judged_by_price(
    times: float, findings: list, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"dim": "tp", "reduction": "sum", "mode": "alone", "seconds": 1.0, "bus_gb_per_s": 2.0}

    def run(*words: str) -> str:
        keys = dict(word.split("=", 1) for word in words if "=" in word)
        assert keys["cluster"] == "dgx_h100"
        folder = Path(keys["runs_dir"]) / keys["run"]
        folder.mkdir()
        rows = [
            common | {"op": "all_reduce", "bytes": gpu_node.LARGE, "times_the_price": times},
            # the result is recorded
            common | {"op": "all_reduce", "bytes": 65536, "times_the_price": 9.0},
            # It is not used.
            common | {"op": "gather", "bytes": gpu_node.LARGE, "times_the_price": 9.0},
        ]
        report = {"rows": rows, "findings": findings, "fitted": {}}
        (folder / "bench.json").write_text(json.dumps(report))
        return ""

    monkeypatch.setattr(gpu_node, "run", run)
    found = gpu_node.comm(on_card(tmp_path, monkeypatch, 8), "tp=8")
    assert (found["verdict"], len(found["rows"])) == (verdict, 2)


@pytest.mark.parametrize(
    ("losses", "peak", "seconds", "verdict"),
    [
        ([3.0, 2.0], 104, 0.9, "PASS"),
        ([3.0, 3.0], 104, 0.9, "DIFFERS"),
        ([3.0, float("nan")], 104, 0.9, "DIFFERS"),
        ([3.0, 2.0], 106, 0.9, "DIFFERS"),
        # the prediction is slower than the measurement, which includes communication
        ([3.0, 2.0], 104, 1.1, "DIFFERS"),
    ],
)
def test_a_trained_layout_is_compared_with_its_dry_run(
    losses: list[float], peak: int, seconds: float, verdict: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    figures = {"tokens_per_s": 1.0, "mfu": 0.4, "peak_source": "a datasheet", "seconds": 1.0}
    figures |= {"peak_bytes": 100, "losses": losses}
    foretold = {"peak_bytes": peak, "seconds": seconds, "fits": True, "mfu": 0.5}
    plan = {"step s": 1.0, "MFU %": 50.0, "GiB": 60.0}
    monkeypatch.setattr(gpu_node, "trained", lambda words, run_dir: dict(figures))
    monkeypatch.setattr(gpu_node, "dry_run", lambda given, *words: foretold)
    monkeypatch.setattr(gpu_node, "planned", lambda *_: plan)
    found = gpu_node.train(on_card(tmp_path, monkeypatch, 8), "dp=8 zero=3")
    assert (found["verdict"], found["plan"]) == (verdict, plan)
    assert "MFU 40.0 % of a datasheet" in found["found"] and "plan: 1 s, MFU 50 %" in found["found"]


def test_a_layout_that_changes_the_model_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(*words: str) -> subprocess.CompletedProcess[str]:
        keys = dict(word.split("=", 1) for word in words if "=" in word)
        folder = Path(keys["runs_dir"]) / keys["run"]
        folder.mkdir()
        (folder / "verify.json").write_text(json.dumps({"failure": "layers.0 is off"}))
        return subprocess.CompletedProcess(words, 1, "", "")

    monkeypatch.setattr(gpu_node, "parallel3d", verify)
    found = gpu_node.verify(given(tmp_path), "tp=2")
    assert found == {"verdict": "DIFFERS", "found": "layers.0 is off"}


def test_the_calls_and_the_page_have_every_line() -> None:
    bench, page = gpu_node.BENCH, (ROOT / "benchmarks/gpu/README.md").read_text(encoding="utf-8")
    planned = [name for names in bench.calls for name in names]
    assert sorted(planned) == sorted(gpu_node.LINES)
    seconds = [gpu_tasks.call_seconds(names, bench.tasks) for names in bench.calls]
    assert max(seconds) <= gpu_tasks.CALL_S and sum(seconds) <= gpu_tasks.ALL_CALLS_S
    rows = "\n".join(bench.page_rows())
    assert f"|---|---|---|---|\n{rows}\n\n" in page
    assert f"{' + '.join(map(str, seconds))} s in three calls" in page
