"""metrics.jsonl: whole lines whatever happens, valid JSON whatever the values."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.metrics.jsonl import MetricsFile, finite, read_metrics, value, write_json


def test_every_line_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os, sys; from pathlib import Path\n"
        "from parallel3d.metrics.jsonl import MetricsFile\n"
        "file = MetricsFile(Path(sys.argv[1]))\n"
        "for step in range(1, 51): file.write({'step': step})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, env=environment)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(path)] == list(range(1, 51))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_valid_json_and_come_back(
    tmp_path: Path, odd: float
) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write({"step": 1, "loss": odd, "lr": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(token: str) -> float:
        raise AssertionError(f"{token} is no JSON")

    row = json.loads(text, parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "lr": 0.5, "nonfinite": {"loss": repr(odd)}}
    assert repr(value(row, "loss")) == repr(odd)
    assert value(row, "lr") == 0.5


def test_finite_rows_get_no_note() -> None:
    assert finite({"step": 1, "loss": 2.0}) == {"step": 1, "loss": 2.0}


def test_resume_drops_what_will_run_again_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in (1, 2, 3, 4):
            file.write({"step": step})
    with path.open("a") as torn:
        torn.write('{"step": 5, "lo')
    before = path.read_bytes()
    with MetricsFile(path, first_step=3) as file:
        assert [row["step"] for row in file.earlier] == [1, 2]
        file.write({"step": 3})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    assert (tmp_path / "metrics.jsonl.1").read_bytes() == before


def test_resume_without_anything_to_drop_leaves_the_file_untouched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 1, "loss": 0.1 + 0.2})
    before = path.read_bytes()
    MetricsFile(path, first_step=2).close()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_fresh_start_in_a_used_directory_keeps_the_old_curve_beside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 0, "eval_loss": 5.0})
        file.write({"step": 1})
    with MetricsFile(path, first_step=1) as file:
        assert file.earlier == []
    assert path.read_bytes() == b""
    assert len(read_metrics(tmp_path / "metrics.jsonl.1")) == 2


def test_write_json_replaces_the_whole_file_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": math.nan})
    assert json.loads(path.read_text()) == {"a": 1}
