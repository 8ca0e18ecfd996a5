"""Tests benchmarks/gpu/first.py: all lines that a CPU or the simulated device can answer, the
judgement of answers, and the calls."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import commands as gpu_commands
from benchmarks.gpu import first as gpu_first
from benchmarks.gpu import first_runs, first_values
from benchmarks.gpu import process as gpu_process
from benchmarks.gpu import tasks as gpu_tasks
from benchmarks.gpu.process import ROOT
from benchmarks.gpu.tasks import Given, Row, Task
from parallel3d.cli.overrides import compose
from parallel3d.commands.options import CommandConfig
from parallel3d.context_parallel import attention
from parallel3d.device import accelerator, fused
from parallel3d.models import dropout, ops
from parallel3d.trainer import StepResult
from tests.e2e.ready import run_command, run_module

pytestmark = pytest.mark.more

TINY = ["--size", "tiny", "--device", "cpu"]
COMMANDS = [name for name, line in gpu_first.LINES.items() if line.by_command]
HERE = [name for name in gpu_first.LINES if name not in COMMANDS]


def given(folder: Path, size: str = "tiny") -> Given:
    return Given(torch.device("cpu"), size, folder, {})


def rows(folder: Path) -> dict[str, Row]:
    return json.loads((folder / "first.json").read_text())["sections"][0]["rows"]


def verdicts(found: dict[str, Row]) -> dict[str, str]:
    return {name: gpu_tasks.verdict_of(row) for name, row in found.items()}


@pytest.mark.slow
def test_the_lines_that_need_no_other_process(tmp_path: Path) -> None:
    words = [*TINY, "--in-process", "--json", str(tmp_path / "first.json")]
    assert gpu_first.main([*words, "--folder", str(tmp_path / "runs"), "--only", *HERE]) == 0
    found = rows(tmp_path)
    assert list(found) == HERE
    assert verdicts(found) == dict.fromkeys(HERE, "PASS") | {
        "gemm": "NOTED", "host syncs": "SKIPPED", "host syncs experts": "SKIPPED", "trace": "NOTED"
    }  # fmt: skip
    for name in ("losses", "losses experts", "losses experts bf16"):
        assert found[name]["off"] == {"loss": 0.0, "grad_norm": 0.0}, name
    assert len(found["kernels"]["functions"]) == 23
    assert found["addmm"]["two_steps_error"] > 1e-4  # the limit for the error of one step
    assert found["adamw"]["writes_gradient"] is True
    assert len(found["attention"]["cases"]) == 2
    errors = next(iter(found["attention values"]["errors"].values()))
    assert errors.keys() == {"default", "flash"}
    trace = found["trace"]
    assert len(trace["top"]) == 15
    with gzip.open(trace["trace"], "rt") as file:
        assert "traceEvents" in json.load(file)
    assert "| kernels | PASS |" in (tmp_path / "first.md").read_text()


@pytest.mark.slow
def test_the_lines_on_the_simulated_device(tmp_path: Path) -> None:
    """Runs in a process of its own, because it changes torch; there it forks a rank for a run."""
    names = [*HERE, "forked rank", "train compile"]
    words = ["--size", "tiny", "--device", "simulated", "--in-process"]
    words += ["--json", str(tmp_path / "first.json"), "--folder", str(tmp_path / "runs")]
    done = run_module("benchmarks.gpu_first", *words, "--only", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path)
    for name in ("host syncs", "host syncs experts"):
        assert found.pop(name).get("verdict", "PASS") == "PASS"  # only if the device counts them
    assert verdicts(found) == dict.fromkeys(found, "PASS") | {
        "gemm": "NOTED", "trace": "NOTED", "train compile": "SKIPPED"
    }  # fmt: skip
    errors = next(iter(found["attention values"]["errors"].values()))
    assert errors.keys() == {"default", "flash", "cudnn", "efficient"}
    assert found["document attention"]["all_in_one"] is True
    assert found["addmm"]["by_gemm"] is True
    assert found["losses bf16"]["off"]["loss"] > 0.0, "two devices were compared"


@pytest.mark.slow
def test_the_lines_that_run_parallel3d(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run reads the figures of the first line from the file."""
    monkeypatch.setattr(gpu_commands, "parallel3d", run_command)
    words = [*TINY, "--in-process", "--json", str(tmp_path / "first.json")]
    words += ["--folder", str(tmp_path / "runs")]
    for name in ("train", "dryrun", "train olmoe", "dryrun olmoe"):
        assert gpu_first.main([*words, "--only", name]) == 0
    found = rows(tmp_path)
    assert verdicts(found) == {
        "train": "PASS", "dryrun": "NOTED", "train olmoe": "PASS", "dryrun olmoe": "NOTED"
    }  # fmt: skip
    assert all("seconds_off" in found[name] for name in ("dryrun", "dryrun olmoe"))
    assert 1.0 < found["train olmoe"]["load"] < 4.0
    figures = found["train"]
    (metrics,) = tmp_path.glob("runs/*/train/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    took = [step["step_time_s"] for step in steps]
    # Two sequences of 64 tokens per step; both are medians, over different steps.
    for seconds in (figures["seconds"], 2 * 64 / figures["tokens_per_s"]):
        assert 0.999 * min(took) <= seconds <= 1.001 * max(took)
    assert figures["losses"] == [step["loss"] for step in steps]


@pytest.mark.slow
def test_a_run_is_saved_resumes_and_generates_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_commands, "parallel3d", run_command)
    found = first_runs.save_and_resume(given(tmp_path))
    assert found["verdict"] == "PASS", found
    assert len(found["whole"]) == 4 and found["whole"] == found["parted"]
    assert found["text"].startswith("the")
    (run_dir,) = tmp_path.glob("*/parted")
    assert (run_dir / "metrics.jsonl").exists() and not (run_dir / "checkpoints").exists()


@pytest.mark.parametrize(
    ("losses", "text", "verdict"),
    [
        ((1.0, 2.0, 3.0, 4.0), "the end", "PASS"),
        ((1.0, 2.0, 3.0, 4.000001), "the end", "DIFFERS"),
        ((1.0, 2.0), "the end", "DIFFERS"),  # the run did not continue
        ((1.0, 2.0, 3.0, 4.0), "", "DIFFERS"),
    ],
)
def test_a_resumed_run_must_have_the_bits_of_the_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: tuple[float, ...],
    text: str,
    verdict: str,
) -> None:
    def run(command: str, *words: str) -> str:
        keys = dict(word.split("=", 1) for word in words)
        folder = Path(keys["runs_dir"]) / keys["run"]
        folder.mkdir(exist_ok=True)
        of_run = losses if keys["run"] == "parted" else (1.0, 2.0, 3.0, 4.0)
        lines = [json.dumps({"loss": loss, "grad_norm": 1.0}) for loss in of_run]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        return text if command == "generate" else ""

    monkeypatch.setattr(first_runs, "run", run)
    assert first_runs.save_and_resume(given(tmp_path))["verdict"] == verdict


@pytest.mark.parametrize("losses", [[[3.0, 2.0, 1.0]], [[3.0, 2.0]] * 2, [[3.0, 2.0, 1.0]] * 2])
def test_forked_ranks_must_be_two_with_three_losses_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[list[float]]
) -> None:
    def run(*words: str) -> None:
        runs = Path(dict(w.split("=", 1) for w in words if "=" in w)["runs_dir"])
        for number, of_run in enumerate(losses):
            (runs / str(number)).mkdir()
            lines = [json.dumps({"loss": loss}) for loss in of_run]
            (runs / str(number) / "metrics.jsonl").write_text("\n".join(lines))

    monkeypatch.setattr(first_runs, "run", run)
    assert first_runs.forked_rank(given(tmp_path))["verdict"] == "DIFFERS"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_configurations_of_full_size_are_valid(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests lines that only a card runs: the first command of each."""
    seen = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        words = command[command.index("parallel3d") + 2 :]
        seen.append(
            compose(
                *(w.replace("1,2", "1") for w in words if w != "-m"),
                world_size=1,
                schema=CommandConfig,
            )
        )
        return subprocess.CompletedProcess(command, 1, "", "parallel3d: seen.\n")

    monkeypatch.setattr(gpu_commands.subprocess, "run", run)
    with pytest.raises(gpu_commands.RunFailed, match=r"parallel3d: seen\."):
        gpu_first.LINES[name].run(given(tmp_path, "full"))
    assert seen[0].precision.name == "bf16"


def test_a_run_that_ends_badly_says_its_own_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = lambda given, compiled: ["micro_batch_size=0"]  # noqa: E731
    monkeypatch.setattr(first_runs, "train_words", wrong)
    with pytest.raises(gpu_commands.RunFailed, match="parallel3d: micro_batch_size=0"):
        first_runs.train(given(tmp_path))


def test_a_line_that_fails_or_differs_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(given: Given) -> Row:
        raise ValueError("no such kernel")

    words = [*TINY, "--in-process", "--json", str(tmp_path / "first.json"), "--only", "gemm"]
    words += ["--folder", str(tmp_path)]
    monkeypatch.setitem(gpu_first.BENCH.tasks, "gemm", Task(fails, 1, "fast"))
    assert gpu_first.main(words) == 1
    assert rows(tmp_path)["gemm"]["failed"] == "ValueError: no such kernel"
    slow = {"verdict": "DIFFERS", "found": "slow"}
    monkeypatch.setitem(gpu_first.BENCH.tasks, "gemm", Task(lambda given: slow, 1, "fast"))
    assert gpu_first.main(words) == 1
    assert rows(tmp_path)["gemm"].items() >= (slow | {"expected": "fast"}).items()


class Planted:
    """Changes the results of a fused function like a bad kernel might."""

    def __init__(self, right: Any, change: Callable[[Any], Any]) -> None:
        self.function, self.change = right.function, change

    def __call__(self, *args: Any) -> Any:
        return self.change(self.function(*args))


@pytest.mark.parametrize(
    ("module", "name", "change", "named"),
    [
        (ops, "swiglu_backward", lambda y: 1.02 * y, "swiglu backward"),
        (ops, "rms_norm_forward",
         lambda y: (y[0].masked_fill(y[0] == y[0][0, 0, 0], torch.nan), y[1]), "rms_norm inf"),
        (ops, "split_heads_forward", lambda y: (y[0], y[2], y[1]), "split_heads"),
        (ops, "swiglu_forward", lambda y: y.float(), "swiglu inf"),
        (dropout, "row_keys", lambda y: (y[0], y[1] ^ 1), "dropout's keys"),
        # The elements that stay are right, but too many are dropped: the ones of the smallest size.
        (dropout, "drop", lambda y: y.masked_fill(y.abs() < 1e-2, 0.0), "dropout inf"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_is_named(
    module: Any,
    name: str,
    change: Callable[[Any], Any],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, Planted(getattr(module, name), change))
    found = first_values.kernels(given(tmp_path))
    assert found["verdict"] == "DIFFERS"
    assert found["found"].startswith(f"too far off: {named}") and "," not in found["found"]


def test_the_memory_that_a_kernel_writes_into_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = first_values.loss
    right = module.logits_to_gradient

    class Written(Planted):
        def __call__(self, logits: Tensor, *args: Any) -> None:
            self.function(logits, *args)
            logits[:, -1] = 1.0

    monkeypatch.setattr(module, "logits_to_gradient", Written(right, lambda y: y))
    found = first_values.kernels(given(tmp_path))
    assert found["found"].startswith("too far off: loss's gradient ")


def test_a_kernel_that_was_not_compiled_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(y: Tensor) -> Tensor:
        fused.log.warning("swiglu_forward runs as separate operations: no Triton")
        return y

    monkeypatch.setattr(ops, "swiglu_forward", Planted(ops.swiglu_forward, told))
    found = first_values.kernels(given(tmp_path))
    assert found["verdict"] == "DIFFERS"
    assert "not compiled: swiglu_forward runs as separate operations" in found["found"]
    assert logging.getLogger(fused.__name__).handlers == []


def test_wrong_attention_is_named_with_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = first_values._attend
    monkeypatch.setattr(first_values, "_attend", lambda *qkv: 1.03 * right(*qkv))
    found = first_values.attention_values(given(tmp_path))
    assert found["verdict"] == "DIFFERS"
    assert found["found"].startswith("too far off: heads 4/4, s 64, d 16: default 3.")


def test_attention_to_other_documents_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lambda q, k, v, documents: first_values._attend(q, k, v)  # noqa: E731
    monkeypatch.setattr(attention, "attend_within", whole)
    assert first_values.document_values(given(tmp_path))["verdict"] == "DIFFERS"


@pytest.mark.parametrize(
    ("precision", "loss", "norm", "verdict"),
    [
        ("fp32", 5e-5, 5e-4, "PASS"),
        ("fp32", 2e-4, 0.0, "DIFFERS"),
        ("fp32", 0.0, 2e-3, "DIFFERS"),
        ("bf16", 5e-3, 5e-3, "PASS"),
        ("bf16", 2e-2, 0.0, "DIFFERS"),
        ("bf16", 0.0, 2e-2, "DIFFERS"),
        ("bf16", float("nan"), 0.0, "DIFFERS"),
    ],
)
def test_losses_are_judged_by_precision_with_every_kernel_fused(
    precision: str, loss: float, norm: float, verdict: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    results = iter([(3.0 * (1.0 + loss), 2.0 * (1.0 + norm))] * 5 + [(3.0, 2.0)] * 5)
    asked = []

    def step() -> StepResult:
        assert fused.LEAST_ELEMENTS == 0
        return StepResult(1, *next(results), lr=0.0, tokens=1)

    def trainer_of(model: Any, device: torch.device, *_: Any) -> Any:
        asked.append((device, _[-1]))
        return SimpleNamespace(train_step=step)

    monkeypatch.setattr(first_values, "trainer_of", trainer_of)
    before = fused.LEAST_ELEMENTS
    assert first_values.losses(given(tmp_path), precision)["verdict"] == verdict
    assert asked == [(torch.device("cpu"), precision)] * 2
    assert fused.LEAST_ELEMENTS == before > 0


def test_a_dry_run_is_compared_with_the_run() -> None:
    measured = {"peak_bytes": 100, "seconds": 1.0}
    compared = gpu_commands.compared
    assert compared({"peak_bytes": 104, "seconds": 1.19}, measured)["verdict"] == "PASS"
    assert compared({"peak_bytes": 106, "seconds": 1.0}, measured)["verdict"] == "DIFFERS"
    assert compared({"peak_bytes": 100, "seconds": 0.79}, measured)["verdict"] == "DIFFERS"
    assert compared({"peak_bytes": 100, "seconds": 1.0}, {})["verdict"] == "NOTED"


@pytest.mark.parametrize(("syncs", "verdict"), [(1, "PASS"), (2, "DIFFERS")])
def test_torchs_warning_about_the_mode_is_not_counted_as_a_host_sync(
    syncs: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode != "warn":
            return
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all "
            "synchronizing operations",
            stacklevel=1,
        )
        for _ in range(syncs):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    module = SimpleNamespace(set_sync_debug_mode=set_mode)
    monkeypatch.setattr(accelerator, "module", lambda device: module)
    found = first_runs.host_syncs(given(tmp_path))
    assert (found["verdict"], found["syncs"]) == (verdict, syncs)
    assert list(found["where"].values()) == [syncs]
    assert "test_gpu_first.py" in found["found"]
    assert modes == ["warn", "default"]


def test_busy_is_the_union_of_the_kernels_of_all_streams() -> None:
    assert first_runs._busy_share([(0, 4), (1, 3), (5, 10)]) == pytest.approx(0.9)
    assert first_runs._busy_share([(2, 3)]) == 1.0


def test_host_operations_are_not_counted_as_device_kernels() -> None:
    assert first_values.device_kernels(lambda: torch.ones(4).sum()) == []


def test_the_calls_fit_a_card_that_is_lent_for_half_an_hour() -> None:
    bench = gpu_first.BENCH
    seconds = [gpu_tasks.call_seconds(names, bench.tasks) for names in bench.calls]
    assert max(seconds) <= gpu_tasks.CALL_S
    assert sum(seconds) <= gpu_tasks.ALL_CALLS_S
    planned = [name for names in bench.calls for name in names]
    assert len(planned) == len(set(planned))
    assert set(gpu_first.LINES) <= set(planned)
    text = bench.plan_text()
    assert all(f" s  {name}" in text for name in planned)
    assert f"--call 1: {seconds[0]} s" in text and text.endswith(f"{sum(seconds)} s in all")
    assert planned.index("train") < planned.index("dryrun"), "which reads its figures"


def test_a_plan_is_printed_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_first.main(["--plan"]) == 0
    assert capsys.readouterr().out.strip() == gpu_first.BENCH.plan_text()


def test_help_and_page_have_every_line() -> None:
    bench, page = gpu_first.BENCH, (ROOT / "benchmarks/gpu/README.md").read_text(encoding="utf-8")
    assert all(name in bench.tasks_text() for name in bench.tasks)
    assert all(line.expected in bench.tasks_text() for line in gpu_first.LINES.values())
    rows = "\n".join(bench.page_rows())
    assert f"|---|---|---|---|\n{rows}\n\n" in page
    seconds = [gpu_tasks.call_seconds(names, bench.tasks) for names in bench.calls]
    assert f"{' + '.join(map(str, seconds))} s of the four calls" in page
    assert f"\n{sum(seconds)} s are planned" in page


def called(
    words: list[str],
    tasks: dict[str, Task],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Returns the output of a call of these tasks."""
    bench = dataclasses.replace(gpu_first.BENCH, tasks=tasks, calls=(tuple(tasks),), default=None)
    where = ["--json", str(folder / "first.json"), "--folder", str(folder)]
    assert bench.main([*TINY, "--in-process", *where, *words]) == 0
    return capsys.readouterr().out


def test_a_gpu_check_starts_only_what_fits_its_time_and_resumes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 560 s, a task of 300 s fits, then one of 400 s does not, and one of 200 s does. The
    clock only advances in the tasks."""
    now, ran = [1000.0], []
    monkeypatch.setattr(gpu_tasks.time, "monotonic", lambda: now[0])

    def line(name: str, seconds: int) -> Task:
        def run(given: Given) -> Row:
            ran.append(name)
            now[0] += seconds
            return {"verdict": "PASS", "found": "fine"}

        return Task(run, seconds)

    tasks = {name: line(name, s) for name, s in (("a", 300), ("b", 400), ("c", 200))}
    out = called(["--call", "1"], tasks, tmp_path, capsys)
    assert ran == ["a", "c"]
    assert "No time left for: b. --missing runs them." in out
    assert rows(tmp_path).keys() == {"a", "c"}
    out = called(["--call", "1", "--missing"], tasks, tmp_path, capsys)
    assert ran == ["a", "c", "b"] and "No time left" not in out
    assert called(["--call", "1", "--missing", "--within", "9"], tasks, tmp_path, capsys) == (
        f"runs and traces are in {tmp_path}\n"
    )
    called(["--only", "a"], tasks, tmp_path, capsys)  # without a call there is no deadline
    called(["--only", "a", "c"], tasks, tmp_path, capsys)
    assert ran == [*"acb", "a", *"ac"]


def test_a_line_is_ended_at_the_deadline_of_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task of 100 s may take 250, but not if 180 are left."""
    limits = []

    def run_limited(command: list[str], limit_s: float) -> gpu_process.Ended:
        limits.append(limit_s)
        name = command[command.index("--task") + 1]
        folder = Path(command[command.index("--folder") + 1])
        row = {"device": "card"} if name == gpu_tasks.MACHINE else {"verdict": "PASS", "found": ""}
        (folder / "row.json").write_text(json.dumps(row))
        return gpu_process.Ended(0, "", "", 1.0)

    monkeypatch.setattr(gpu_process, "run_limited", run_limited)
    tasks = {"a": Task(lambda given: {}, 100)}
    bench = dataclasses.replace(gpu_first.BENCH, tasks=tasks, calls=(("a",),), default=None)
    where = ["--json", str(tmp_path / "first.json"), "--folder", str(tmp_path)]
    for words in (["--call", "1"], ["--call", "1", "--within", "180"]):
        assert bench.main([*TINY, *where, *words]) == 0
    assert limits[:2] == [120, 250]
    assert limits[2] == 120 and 170 <= limits[3] <= 180
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.json", "first.md"]
