"""benchmarks/gpu.py at a size for a CPU: every row that needs no GPU, and the files it writes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_rows


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
    rows += ["shard llama3_70b", "shard gpt3_175b", "fp8"]
    files = ["--json", str(tmp_path / "gpu.json"), "--markdown", str(tmp_path / "gpu.md")]
    size = ["--size", "tiny", "--device", "cpu", "--in-process"]
    assert gpu.main([*size, *files, "--only", *rows]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert list(found) == rows
    assert found["torchtitan 1b"] == {"skipped": "torchtitan is not installed"}
    assert found["fp8"] == {"skipped": "fp8 needs a GPU"}
    # 64 tokens a step of 2 sequences of 32; the peers count the same model.
    ours = found["parallel3d 1b"]
    assert ours["tokens_per_s"] == pytest.approx(64e3 / ours["step_ms"])
    assert sum(ours["breakdown"].values()) > 0.0
    if "skipped" not in found["transformers 1b"]:
        assert found["transformers 1b"]["parameters"] == ours["parameters"]
    # A layer of the tiny Llama on one of eight ranks: 4 · 64² of attention and 3 · 64 · 96 of the
    # MLP in eighths, two norms whole.
    assert found["shard llama3_70b"]["parameters"] == (4 * 64**2 + 3 * 64 * 96) // 8 + 2 * 64
    assert found["shard gpt3_175b"]["layers"] == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "- torchtitan 1b: torchtitan is not installed" in text
    assert "| llama3_70b | tp 8, pp 10 | 1 |" in text
    assert not torch.distributed.is_initialized()


def test_the_presets_are_of_the_size_in_their_name() -> None:
    size = gpu_rows.SIZES["full"]
    for name, billions in (("1b", 1.24), ("3b", 3.21), ("llama3_70b", 70.6), ("gpt3_175b", 174.6)):
        model = gpu_rows.model_of(name, size)
        assert gpu_rows.parameter_count(model) / 1e9 == pytest.approx(billions, rel=0.01), name
    assert gpu_rows.model_of("1b", size).seq_length == 4096


def test_what_does_not_fit_is_tried_with_smaller_micro_batches() -> None:
    tried = []

    def run(micro_batch: int) -> dict[str, int]:
        tried.append(micro_batch)
        if micro_batch > 2:
            raise torch.OutOfMemoryError
        return {"tokens_per_s": 1}

    size, cpu = gpu_rows.SIZES["full"], torch.device("cpu")
    assert gpu_rows.first_that_fits(size, cpu, run) == {"tokens_per_s": 1, "micro_batch": 2}
    assert tried == [8, 4, 2]


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
