"""Tests benchmarks/gpu/card.py at a size for a CPU: rows that need no GPU, and its files."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from benchmarks.gpu import card
from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu import process as gpu_process
from benchmarks.gpu import results as gpu_results
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu import shards as gpu_shards
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu import tasks as gpu_tasks
from benchmarks.gpu.tasks import Task
from parallel3d.blueprint.layout import Layout
from parallel3d.comm import collectives
from parallel3d.device import accelerator
from parallel3d.run_config import conf_dir
from tests.pace import PATIENCE

pytestmark = pytest.mark.more

TINY = ["--size", "tiny", "--device", "cpu"]
CPU = torch.device("cpu")


def files(folder: Path) -> list[str]:
    return ["--json", str(folder / "gpu.json"), "--markdown", str(folder / "gpu.md")]


def sections(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "gpu.json").read_text())["sections"]


@pytest.mark.slow
def test_every_row_of_a_cpu_is_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    absent = ("torchtitan",)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name in absent else find_spec(name, *a),
    )
    rows = ["gemm", "parallel3d 1b", "parallel3d 3b", "transformers 1b", "torchtitan 1b"]
    rows += ["shard llama3_70b", "shard gpt3_175b", "fp8", "1b side by side"]
    assert card.main([*TINY, "--in-process", *files(tmp_path), "--only", *rows]) == 0
    (section,) = sections(tmp_path)
    found = section["rows"]
    assert list(found) == rows
    assert found["torchtitan 1b"]["skipped"] == "torchtitan is not installed"
    assert found["fp8"]["skipped"] == "fp8 needs a GPU"
    # 64 tokens in a step of 2 sequences of 32; the peers count the same model.
    ours = found["parallel3d 1b"]
    assert ours["tokens_per_s"] == pytest.approx(64e3 / ours["step_ms"])
    assert sum(ours["breakdown"].values()) > 0.0
    if "skipped" not in found["transformers 1b"]:
        assert found["transformers 1b"]["parameters"] == ours["parameters"]
    # A layer of the tiny Llama on one of eight ranks: an eighth of attention's 4 · 64² and of the
    # MLP's 3 · 64 · 96, and two whole norms.
    assert found["shard llama3_70b"]["parameters"] == (4 * 64**2 + 3 * 64 * 96) // 8 + 2 * 64
    assert found["shard gpt3_175b"]["layers"] == 1
    beside = found["1b side by side"]
    if "skipped" not in beside:
        assert beside["trainers"].keys() == {"parallel3d", "transformers"}
        assert beside["trainers"]["parallel3d"]["times_ours"] == 1.0
        assert len(beside["trainers"]["transformers"]["rounds"]) == gpu_peers.ROUNDS
        assert beside["absent"] == {"torchtitan": "torchtitan is not installed"}
    text = (tmp_path / "gpu.md").read_text()
    assert "- torchtitan 1b: torchtitan is not installed" in text
    assert "| llama3_70b | tp 8, pp 10 | 1 |" in text
    assert not torch.distributed.is_initialized()


def test_groups_take_less_than_eight_minutes_and_hold_every_row() -> None:
    for group in card.BENCH.groups:
        names = [name for name, row in card.ROWS.items() if row.group == group]
        assert gpu_tasks.call_seconds(names, card.ROWS) <= gpu_tasks.CALL_S, group
    assert all(row.group and row.limit_s >= 2 * row.seconds for row in card.ROWS.values())
    assert all(name in card.BENCH.plan_text() for name in (*card.BENCH.groups, *card.ROWS))


def test_rows_join_what_the_file_has_and_failures_replace_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*TINY, "--in-process", *files(tmp_path)]
    assert card.main([*words, "--only", "gemm"]) == 0
    assert card.main([*words, "--only", "fp8"]) == 0
    (section,) = sections(tmp_path)
    assert list(section["rows"]) == ["gemm", "fp8"]

    def fails(*_: object) -> None:
        raise ValueError("no luck\ntoday")

    monkeypatch.setitem(card.ROWS, "gemm", Task(fails, 1))
    # and the benchmark continued
    assert card.main([*words, "--only", "gemm", "shard gpt3_175b"]) == 1
    (section,) = sections(tmp_path)
    assert section["rows"]["gemm"]["tflops"] > 0.0
    assert section["rows"]["gemm"]["again"] == "ValueError: no luck"
    assert section["rows"]["shard gpt3_175b"]["layers"] == 1
    assert "- gemm, when repeated: ValueError: no luck" in (tmp_path / "gpu.md").read_text()

    monkeypatch.setattr(gpu_tasks, "machine", lambda device: {"device": "another", "torch": "9"})
    assert card.main([*words, "--only", "fp8"]) == 0
    first, second = sections(tmp_path)
    assert (list(first["rows"]), list(second["rows"])) == (list(section["rows"]), ["fp8"])
    assert "## another, torch 9" in (tmp_path / "gpu.md").read_text()


def test_missing_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[str] = []
    for name, row in (("gemm", {"tflops": 1.0, "size": 1}), ("fp8", {"skipped": "no"})):
        call = lambda *_, n=name, r=row: run.append(n) or dict(r)  # noqa: E731
        monkeypatch.setitem(card.ROWS, name, Task(call, 1))
    words = [*TINY, "--in-process", *files(tmp_path), "--only", "gemm", "fp8"]
    assert card.main(words) == 0
    assert card.main([*words, "--missing"]) == 0
    assert run == ["gemm", "fp8", "fp8"]


@pytest.mark.parametrize("name", ["gpu.json", "gpu.md"])
def test_a_users_own_file_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).write_text("mine")
    assert card.main([*TINY, "--in-process", *files(tmp_path), "--only", "gemm"]) == 2
    assert f"{name} was not written by this command" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "mine"


def test_both_files_are_written_after_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(*_: object) -> None:
        assert "gemm" in sections(tmp_path)[0]["rows"]
        assert "GEMM at 64³" in (tmp_path / "gpu.md").read_text()
        raise KeyboardInterrupt

    monkeypatch.setitem(card.ROWS, "fp8", Task(second, 1))
    with pytest.raises(KeyboardInterrupt):
        card.main([*TINY, "--in-process", *files(tmp_path), "--only", "gemm", "fp8"])


@pytest.mark.slow
def test_a_row_runs_in_a_separate_process_with_a_time_limit(tmp_path: Path) -> None:
    words = [*TINY, *files(tmp_path), "--only", "gemm"]
    assert card.main(words) == 0
    assert sections(tmp_path)[0]["rows"]["gemm"]["size"] == 64
    options = card.BENCH.parser().parse_args([*words, "--limit", "0.05"])
    options.folder = tmp_path
    failed = card.BENCH.ask("fp8", options, {})
    assert failed.pop("took_s") < 5.0 and failed == {"failed": "took longer than 0.05 s"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


def test_at_its_time_limit_a_process_and_its_children_end(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"sleep 60 & echo $! > {child}; wait"
    ended = gpu_process.run_limited(["bash", "-c", script], 1.0)
    assert ended.code is None
    assert gpu_process.reason(ended, 1.0) == "took longer than 1 s"
    _wait_for(lambda: not _runs(int(child.read_text())))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_benchmark_leaves_no_child_process(tmp_path: Path, number: int) -> None:
    child = tmp_path / "child"
    row = "import os, sys, time; from benchmarks.gpu import process\n"
    row += "process.die_with_parent(int(sys.argv[1])); open(sys.argv[2], 'w').write(str("
    row += "os.getpid())); os.rename(sys.argv[2], sys.argv[3]); time.sleep(60)"
    main = "import os, sys; from benchmarks.gpu import process\n"
    main += "with process.stops_on_sigterm():\n"
    main += "    words = [sys.executable, '-c', sys.argv[1], str(os.getpid()), *sys.argv[2:]]\n"
    main += "    process.run_limited(words, 60)"
    words = [sys.executable, "-c", main, row, f"{child}.new", str(child)]
    parent = subprocess.Popen(words, cwd=gpu_process.ROOT)
    try:
        _wait_for(child.exists)
        pid = int(child.read_text())
        parent.send_signal(number)
        assert parent.wait(10) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
        _wait_for(lambda: not _runs(pid))
    finally:
        parent.kill()


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0 * PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_the_users_allocator_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in gpu_process.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert gpu_process.environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert gpu_process.environment() == dict(os.environ)


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n'


@pytest.mark.parametrize(
    ("code", "err", "said"),
    [
        (1, f"{TRACE}ValueError: first\n\n{TRACE}KeyError: 'x'\n", "KeyError: 'x'"),
        (1, f"{TRACE}ValueError: bad\nsome/file.py:3: UserWarning: leaked\n", "ValueError: bad"),
        (1, f"{TRACE}OSError: full\nException ignored in: <f>\n{TRACE}TypeError: late\n",
         "OSError: full"),
        (1, "".join(f"[rank0]: {line}\n" for line in f"{TRACE}ValueError: r".splitlines()),
         "ValueError: r"),
        (2, "W: slow\nparallel3d: tp=3 cannot work.\nnote\n", "parallel3d: tp=3 cannot work."),
        (3, "", "exit code 3"),
        (-9, "warning\n", "ended by SIGKILL (is the host out of memory?)"),
        (-11, "", "ended by SIGSEGV"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure_is_its_exception(code: int, err: str, said: str) -> None:
    assert gpu_process.reason(gpu_process.Ended(code, "", err, 1.0), 9.0) == said


@pytest.mark.slow
def test_it_imports_only_torch_and_numpy() -> None:
    script = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"omegaconf", "hydra", "wandb", "antlr4", "yaml", "rich"}:
            raise ImportError("not in this image: " + name)
sys.meta_path.insert(0, Absent())
import torch
import parallel3d.build
from pathlib import Path
from benchmarks.gpu import card, first, node, tasks
given = tasks.Given(torch.device("cpu"), "tiny", Path("."), {})
found = card.ROWS["parallel3d 1b"].run(given)
assert found["micro_batch"] == 2, found
for bench in (first, node):
    for name, line in bench.LINES.items():
        if line.by_command:
            row = line.run(given)
            assert "needs a package" in row["skipped"], (name, row)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=gpu_process.ROOT
    )
    assert done.returncode == 0, done.stderr


def test_presets_are_read_as_omegaconf_reads_them() -> None:
    presets = sorted((conf_dir() / "model").glob("*.yaml"))
    assert len(presets) >= 8
    for path in presets:
        assert gpu_rows.read_preset(path) == OmegaConf.to_container(OmegaConf.load(path)), path.name


def test_the_presets_are_of_the_size_in_their_name() -> None:
    size = gpu_rows.SIZES["full"]
    for name, billions in (("1b", 1.24), ("3b", 3.21), ("llama3_70b", 70.6), ("gpt3_175b", 174.6)):
        model = gpu_rows.model_of(name, size)
        assert gpu_rows.parameter_count(model) / 1e9 == pytest.approx(billions, rel=0.01), name
    assert gpu_rows.model_of("1b", size).seq_length == 4096


def test_out_of_memory_is_retried_with_smaller_micro_batches() -> None:
    tried = []

    def run(micro_batch: int) -> dict[str, int]:
        tried.append(micro_batch)
        if micro_batch > 2:
            raise torch.OutOfMemoryError
        return {"tokens_per_s": 1}

    size = gpu_rows.SIZES["full"]
    assert gpu_rows.first_that_fits(size, CPU, run) == {"tokens_per_s": 1, "micro_batch": 2}
    assert tried == [8, 4, 2]


class Events:
    """Stands in for `accelerator.module`; the clock of its device advances by 2 ms per action."""

    def __init__(self) -> None:
        self.now_ms, self.said = 0.0, []

    def Event(self, enable_timing: bool = False) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now_ms)
        event.elapsed_time = lambda later: later.at - event.at
        return event

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.said.append(name) or 3e9


def test_an_accelerator_is_timed_by_its_events_and_its_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Events()
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    monkeypatch.setattr(accelerator, "module", lambda device: module)
    size = gpu_rows.SIZES["tiny"]

    def action() -> None:
        module.now_ms += 2.0

    assert gpu_rows.seconds_of(action, CPU, size) == pytest.approx(2e-3)
    assert module.now_ms == 2.0 * (size.warm_up + size.steps)
    assert module.said == ["synchronize", "synchronize"]
    assert gpu_rows.peak_memory_gb(CPU) == 3.0

    def run(micro_batch: int) -> dict[str, int]:
        if micro_batch == 2:
            raise torch.OutOfMemoryError
        return {}

    module.said.clear()
    assert gpu_rows.first_that_fits(size, CPU, run) == {"micro_batch": 1}
    assert module.said == ["empty_cache", "reset_peak_memory_stats"]


@pytest.mark.parametrize("backend", ["of this torch", "that leaves its output as it was"])
def test_a_reduction_with_the_fake_backend_returns_this_ranks_own_numbers(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n)]
    if backend != "of this torch":
        for name in names:
            monkeypatch.setattr(dist, name, lambda out, tensor, **_: collectives.CompletedWork())
    before = [getattr(dist, name) for name in names]
    with gpu_shards.fake_groups(Layout(tp=8), 3, CPU) as groups:
        whole = torch.arange(16.0).reshape(16, 1).expand(16, 5)
        for _ in range(3):  # freed memory may contain the right numbers by chance
            out, work = collectives.reduce_scatter_async(whole, groups.tp)
            work.wait()
            assert torch.equal(out, whole[6:8])
            out.fill_(torch.nan)
    assert [getattr(dist, name) for name in names] == before


def test_tables_show_both_shares() -> None:
    model = {"model_tflops": 400.0, "tokens_per_s": 1.0, "micro_batch": 8, "step_ms": 1.0}
    rows = {
        "gemm": {"size": 8192, "tflops": 800.0},
        "parallel3d 1b": model | {"peak_memory_gb": 70.0, "commit": "abc1234"},
    }
    here = {"device": "NVIDIA H200", "torch": "2.11", "datasheet_tflops": 1000.0, "datasheet": "d"}
    text = gpu_tables.markdown([{"machine": here, "size": "full", "rows": rows}])
    assert "GEMM at 8192³: 800 TFLOP/s, 80 % of it. Commit abc1234." in text
    assert "| parallel3d 1b | 8 | 1.0 | 1 | 40.0 % | 50.0 % | 70.0 |" in text


def test_tables_show_answers_and_trainers_in_turns() -> None:
    ours, theirs = ({"step_ms": ms, "tokens_per_s": 2e6 / ms} for ms in (100.0, 150.0))
    rows = {
        "train": {"verdict": "PASS", "found": "a | b", "expected": "c", "tokens_per_s": 1.0},
        "1b side by side": {
            "micro_batch": 2,
            "trainers": {"parallel3d": ours | {"times_ours": 1.0},
                         "transformers": theirs | {"times_ours": 1.5}},
        },
        "verify tp=2": {"skipped": "one device"},
    }  # fmt: skip
    section = {"machine": {"device": "card"}, "size": "full", "rows": rows}
    lines = gpu_tables.markdown([section]).splitlines()
    assert "| train | PASS | a \\| b | c |" in lines
    assert "| 1b side by side | 2 | transformers | 150.0 | 13,333 | 1.50× |" in lines
    assert lines[-1] == "- verify tp=2: one device"
    assert not any(line.startswith("| model |") for line in lines)


def test_a_file_of_results_is_replaced_whole(tmp_path: Path) -> None:
    results = gpu_results.ResultFiles(tmp_path / "a.json")
    results.add({"device": "a"}, "tiny", "gemm", {"tflops": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert results.rows({"device": "a"}, "tiny") == {"gemm": {"tflops": 1.0}}
    assert results.rows({"device": "a"}, "full") == {}


def test_without_a_gpu_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert card.main(["--in-process", *files(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
