"""benchmarks/gpu_first.py: every line that a CPU can answer, and how answers are judged."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_first, gpu_first_kernels, gpu_first_runs
from benchmarks.gpu_first_kernels import Answer, Given
from benchmarks.gpu_process import ROOT
from parallel3d.device import accelerator

TINY = ["--size", "tiny", "--device", "cpu"]
HERE = ["versions", "gemm", "addmm", "attention", "rms_norm", "adamw", "communicators", "losses"]
HERE += ["host syncs", "trace"]


def given(folder: Path) -> Given:
    return Given(torch.device("cpu"), "tiny", folder, {})


def rows(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "first.json").read_text())["sections"][0]["rows"]


def test_the_lines_that_need_no_other_process(tmp_path: Path) -> None:
    words = [*TINY, "--in-process", "--json", str(tmp_path / "first.json")]
    assert gpu_first.main([*words, "--folder", str(tmp_path / "runs"), "--only", *HERE]) == 0
    found = rows(tmp_path)
    assert list(found) == HERE
    verdicts = {name: row["verdict"] for name, row in found.items()}
    assert verdicts == dict.fromkeys(HERE, "PASS") | {
        "gemm": "NOTED", "addmm": "SKIPPED", "host syncs": "SKIPPED", "trace": "NOTED"
    }  # fmt: skip
    assert found["losses"]["figures"]["off"] == {"loss": 0.0, "grad_norm": 0.0}
    assert found["addmm"]["figures"]["two_steps_error"] > 1e-4  # which one step must be below
    assert found["adamw"]["figures"]["writes_gradient"] is True
    assert len(found["attention"]["figures"]["cases"]) == 2
    trace = found["trace"]["figures"]
    assert len(trace["top"]) == 15
    assert "traceEvents" in json.loads(Path(trace["trace"]).read_text())


def test_the_lines_that_run_parallel3d(tmp_path: Path) -> None:
    """The first of them in a process of its own, as all are without `--in-process`."""
    found = {}
    for only in (["train"], ["dryrun", "verify tp=2", "--in-process"]):
        (folder := tmp_path / only[0]).mkdir()
        words = [*TINY, "--json", str(folder / "first.json"), "--folder", str(folder / "runs")]
        assert gpu_first.main([*words, "--only", *only]) == 0
        found |= rows(folder)
    assert [found[name]["verdict"] for name in ("train", "verify tp=2")] == ["PASS", "PASS"]
    figures = found["train"]["figures"]
    (metrics,) = tmp_path.glob("train/runs/*/train/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    took = [step["step_time_s"] for step in steps]
    # Two sequences of 64 tokens a step; both are medians over steps, of other steps each.
    for seconds in (figures["seconds"], 2 * 64 / figures["tokens_per_s"]):
        assert 0.999 * min(took) <= seconds <= 1.001 * max(took)
    assert figures["losses"][1] < figures["losses"][0]
    assert found["dryrun"]["verdict"] in ("NOTED", "SKIPPED")


def test_a_line_that_fails_or_differs_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(given: Given) -> Answer:
        raise ValueError("no such kernel")

    words = [*TINY, "--in-process", "--json", str(tmp_path / "first.json"), "--only", "gemm"]
    words += ["--folder", str(tmp_path)]
    monkeypatch.setitem(gpu_first.LINES, "gemm", gpu_first.Line(fails, "fast", 1))
    assert gpu_first.main(words) == 1
    assert rows(tmp_path)["gemm"]["found"] == "ValueError: no such kernel"
    slow = Answer("DIFFERS", "slow", {})
    monkeypatch.setitem(gpu_first.LINES, "gemm", gpu_first.Line(lambda given: slow, "fast", 1))
    assert gpu_first.main(words) == 1
    assert rows(tmp_path)["gemm"] == slow._asdict() | {"expected": "fast"}


def test_a_run_that_ends_badly_says_its_own_sentence(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_first_runs, "run_words", lambda given, compiled: ["micro_batch_size=0"])
        with pytest.raises(gpu_first_runs.RunFailed, match="parallel3d: micro_batch_size=0"):
            gpu_first_runs.train(given(tmp_path))


def test_a_dryrun_is_held_against_the_run() -> None:
    measured = {"peak_bytes": 100, "seconds": 1.0}
    compared = gpu_first_runs.compared
    assert compared({"peak_bytes": 104, "seconds": 1.19}, measured).verdict == "PASS"
    assert compared({"peak_bytes": 106, "seconds": 1.0}, measured).verdict == "DIFFERS"
    assert compared({"peak_bytes": 100, "seconds": 0.79}, measured).verdict == "DIFFERS"
    assert compared({"peak_bytes": 100, "seconds": 1.0}, {}).verdict == "NOTED"


def test_host_syncs_are_counted_with_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        for _ in range(2 if mode == "warn" else 0):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    module = SimpleNamespace(set_sync_debug_mode=set_mode)
    monkeypatch.setattr(accelerator, "module", lambda device: module)
    found = gpu_first_runs.host_syncs(given(tmp_path))
    assert (found.verdict, found.figures["syncs"]) == ("DIFFERS", 2)
    assert list(found.figures["where"].values()) == [2]
    assert "test_gpu_first.py" in found.found
    assert modes == ["warn", "default"]


def test_busy_is_the_union_of_the_kernels_of_all_streams() -> None:
    assert gpu_first_runs._busy_share([(0, 4), (1, 3), (5, 10)]) == pytest.approx(0.9)
    assert gpu_first_runs._busy_share([(2, 3)]) == 1.0


def test_help_and_page_name_every_line() -> None:
    text = gpu_first.lines_text()
    assert all(name in text and line.expected in text for name, line in gpu_first.LINES.items())
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert [name for name in gpu_first.LINES if f"`{name}`" not in page] == []


def test_kernels_of_the_host_are_none_of_the_device() -> None:
    assert gpu_first_kernels.device_kernels(lambda: torch.ones(4).sum()) == []
