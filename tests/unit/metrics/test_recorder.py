"""Tests the recorder: its files and output, also when a run ends badly."""

from __future__ import annotations

import errno
import functools
import io
import json
import math
import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console
from rich.text import Text

from parallel3d.blueprint.parameters import parameter_count
from parallel3d.comm.step_timer import KINDS
from parallel3d.errors import UserError
from parallel3d.metrics import recorder as recorder_module
from parallel3d.metrics.jsonl import STEP, rows_of
from parallel3d.metrics.loggers import figures_of
from parallel3d.metrics.peak import Peak
from parallel3d.metrics.provenance import provenance
from parallel3d.metrics.recorder import Recorder
from parallel3d.metrics.screen import evaluation_lines, make_console
from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import ModelSurvey, OwnModelConfig
from parallel3d.run_config import Config
from parallel3d.trainer import Score
from tests.pace import PATIENCE, in_time
from tests.tools.failing_files import FailingFiles, Fault

STEP_KEYS = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_time_s"]
PEAK = Peak(1e9, "a datasheet")


@pytest.fixture(autouse=True, scope="module")
def _git_is_asked_once() -> Iterator[None]:
    """Each recorder asks git for the commit, which takes longer than all else in these tests."""
    with patch.object(recorder_module, "provenance", functools.cache(provenance)):
        yield


def make_config(steps: int = 20) -> Config:
    config = Config(tp=2, pp=2)
    config.model = ModelConfig(name="gpt_tiny")
    config.train.steps = steps
    return config


def make_recorder(
    folder: Path, config: Config, *, terminal: bool = False, first_step: int = 1
) -> tuple[Recorder, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=80, highlight=False)
    recorder = Recorder(config, folder, 1000.0, PEAK, first_step=first_step, console=console)
    return recorder, screen


def wait_until_drawn(screen: io.StringIO, text: str) -> None:
    """Waits for the bar, which a thread draws four times a second."""
    deadline = time.monotonic() + 5 * PATIENCE
    while text not in " ".join(Text.from_ansi(screen.getvalue()).plain.split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run_steps(recorder: Recorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        recorder.step(step, 5.0 / step, 0.5, 1e-3, 4096, 0.5)


def test_a_line_per_step_with_the_promised_keys(tmp_path: Path) -> None:
    recorder, _ = make_recorder(tmp_path, make_config(2))
    with recorder:
        recorder.start({})
        recorder.step(1, 5.5, 1.25, 1e-3, 4096, 0.5)
        recorder.step(2, 5.0, 1.5, 2e-3, 4096, 0.25)
        recorder.evaluation(2, 5.25)
    first, second, evaluation = [*rows_of(tmp_path / "metrics.jsonl")]
    assert list(first) == [*STEP_KEYS, "goodput"]
    assert (first["tokens"], second["tokens"]) == (4096, 8192)
    assert second["tokens_per_s"] == 4096 / 0.25
    # 1000 FLOPs per token; four devices of 1 GFLOP/s.
    assert second["mfu"] == pytest.approx(4096 / 0.25 * 1000 / (4 * 1e9))
    assert evaluation == {"step": 2, "eval_loss": 5.25, "tokens": 8192}


def test_a_profiled_step_is_marked_and_not_counted_in_the_throughput(tmp_path: Path) -> None:
    recorder, _ = make_recorder(tmp_path, make_config(7))
    with recorder:
        recorder.start({})
        for step in range(1, 8):
            seconds = 100.0 if step == 5 else 0.5
            recorder.step(step, 3.0, 0.5, 1e-3, 1000, seconds, profiled=step == 5)
        assert recorder.finish()["tokens_per_s"] == {
            "mean": 2000.0, "median": 2000.0, "warmup_steps_excluded": 3
        }  # fmt: skip
    rows = [*rows_of(tmp_path / "metrics.jsonl")]
    assert [row["step"] for row in rows if "profiled" in row] == [5]
    assert rows[4]["profiled"] is True and rows[4]["step_time_s"] == 100.0


def test_summary_explains_mfu_and_leaves_out_the_warm_up(tmp_path: Path) -> None:
    recorder, _ = make_recorder(tmp_path, make_config(6))
    with recorder:
        recorder.start({})
        for step, seconds in enumerate([100.0, 100.0, 100.0, 1.0, 1.0, 2.0], start=1):
            recorder.step(step, 3.0, 0.5, 1e-3, 1000, seconds)
            recorder.evaluation(step, 2.0 + abs(step - 4))
        summary = recorder.finish()
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["tokens_per_s"] == {"mean": 750.0, "median": 1000.0, "warmup_steps_excluded": 3}
    assert summary["mfu"]["value"] == pytest.approx(750 * 1000 / (4 * 1e9))
    assert summary["mfu"]["peak_source"] == "a datasheet"
    assert (summary["eval_loss"], summary["best_eval_loss"]) == (4.0, 2.0)
    assert (summary["eval_step"], summary["best_eval_step"]) == (6, 4)
    assert summary["bits_per_byte"] == pytest.approx(4.0 / math.log(2))
    assert summary["layout"] == {"tp": 2, "pp": 2, "dp": 1, "cp": 1, "world_size": 4}
    assert summary["parameters"] == parameter_count(make_config().model)
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("finished", 6, 6000)
    assert summary["code"]["torch"]


def test_an_exception_closes_everything_and_propagates(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config())
    with pytest.raises(ValueError, match="planted"), recorder:
        recorder.start({})
        run_steps(recorder, 1, 3)
        raise ValueError("planted\nsecond line")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 3)
    assert summary["error"] == "ValueError: planted"
    assert "failed after 3 steps" in screen.getvalue()
    with pytest.raises(ValueError, match="closed"):
        run_steps(recorder, 4, 4)


def test_ctrl_c_is_an_interruption_not_a_failure(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config())
    with pytest.raises(KeyboardInterrupt), recorder:
        recorder.start({})
        raise KeyboardInterrupt
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["loss"]) == ("interrupted", 0, None)
    assert "loss" not in screen.getvalue() and "grad" not in screen.getvalue(), "no step was taken"


def test_an_error_before_start_is_not_hidden_by_the_recorder(tmp_path: Path) -> None:
    recorder, _ = make_recorder(tmp_path, make_config())
    with pytest.raises(ValueError, match="planted"), recorder:
        raise ValueError("planted")
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_shows_its_own_error(tmp_path: Path) -> None:
    recorder, _ = make_recorder(tmp_path / "absent", make_config())
    with pytest.raises(UserError, match=r"absent.* cannot be written \(No such file"), recorder:
        recorder.start({})


def test_the_recorder_finishes_once(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config(2))
    with recorder:
        recorder.start({})
        run_steps(recorder, 1, 2)
        summary = recorder.finish("stopped")
    assert recorder.finish() is summary
    assert summary["status"] == "stopped"
    assert screen.getvalue().count("stopped after 2 steps") == 1


def test_a_nan_loss_is_recorded_and_shown(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config(4))
    with recorder:
        recorder.start({})
        for step in range(1, 5):
            recorder.step(step, math.nan, math.inf, 1e-3, 4096, 0.5)
        recorder.evaluation(4, math.nan)
    content = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert content["loss"] is None
    assert content["nonfinite"]["loss"] == "nan"
    assert content["best_eval_loss"] is None
    assert "not finite" in screen.getvalue()


def test_resume_continues_tokens_curve_and_best_evaluation(tmp_path: Path) -> None:
    config = make_config(4)
    first, _ = make_recorder(tmp_path, config)
    with first:
        first.start({})
        run_steps(first, 1, 2)
        first.evaluation(2, 1.0)
        run_steps(first, 3, 3)
    second, _ = make_recorder(tmp_path, config, first_step=3)
    with second:
        second.start({})
        run_steps(second, 3, 4)
        second.evaluation(4, 2.0)
        summary = second.finish()
    steps = [row["step"] for row in rows_of(tmp_path / "metrics.jsonl") if "loss" in row]
    assert steps == [1, 2, 3, 4]
    assert summary["tokens"] == 4 * 4096
    assert (summary["best_eval_loss"], summary["eval_loss"]) == (1.0, 2.0)


def test_tokens_of_a_step_without_a_line_count_too(tmp_path: Path) -> None:
    first, _ = make_recorder(tmp_path, make_config(4))
    with first:
        first.start({})
        run_steps(first, 1, 2)
    second, _ = make_recorder(tmp_path, make_config(4), first_step=4)
    with second:
        second.start({})
        run_steps(second, 4, 4)
        assert second.finish()["tokens"] == 4 * 4096


def test_without_a_terminal_only_plain_lines_at_the_asked_steps(tmp_path: Path) -> None:
    config = make_config(25)
    config.train.log_every = 10
    recorder, screen = make_recorder(tmp_path, config)
    with recorder:
        recorder.start({})
        run_steps(recorder, 1, 25)
    text = screen.getvalue()
    shown = [line.split()[1] for line in text.splitlines() if line.startswith("step")]
    assert "\x1b" not in text
    assert "\r" not in text
    assert shown == ["1/25", "10/25", "20/25", "25/25"]


def test_on_a_terminal_a_bar_and_evaluations_above_it(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config(4), terminal=True)
    with recorder:
        recorder.start({})
        run_steps(recorder, 1, 2)
        recorder.evaluation(2, 2.5)
        run_steps(recorder, 3, 4)
    text = screen.getvalue()
    assert "\x1b[?25l" in text  # the live display hides the cursor …
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # … and shows it again
    assert "step 4/4" in text  # the last picture, drawn when the display stops
    assert "held-out loss 2.5000 · 3.607 bits per byte" in text


def test_progress_false_draws_no_bar_on_a_terminal(tmp_path: Path) -> None:
    config = make_config(2)
    config.train.progress = False
    recorder, screen = make_recorder(tmp_path, config, terminal=True)
    with recorder:
        recorder.start({})
        run_steps(recorder, 1, 2)
    assert "\x1b[?25l" not in screen.getvalue()
    assert "step 2/2" in screen.getvalue()


def test_redirected_output_is_not_a_terminal_under_any_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert not make_console().is_terminal


def test_a_log_in_ascii_gets_only_ascii(tmp_path: Path) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", errors="replace"), width=80)
    with Recorder(make_config(5), tmp_path, 1000.0, PEAK, console=console) as recorder:
        recorder.start({"data": "Bücher × 2"})
        run_steps(recorder, 1, 5)
        recorder.evaluation(5, 1.0)
    console.file.flush()
    assert b"B?cher ? 2" in raw.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_header_and_summary_fit_the_screen_and_are_complete(tmp_path: Path, width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=False, highlight=False)
    with Recorder(make_config(), tmp_path, 1e6, PEAK, console=console) as recorder:
        recorder.start({"data": "stdlib · 11 M tokens"})
        run_steps(recorder, 1, 20)
        recorder.evaluation(20, 1.9)
    framed = [line for line in screen.getvalue().splitlines() if line[:1] in "╭│╰"]
    assert {len(line) for line in framed} == {min(width, 100)}
    text = screen.getvalue()
    for words in (
        "tp 2 × pp 2 × dp 1 = 4 ranks",
        "16 sequences = 4 × 4 micro-batches × dp 1 · 4,096 tokens",
        "stdlib · 11 M tokens",
        "859 k parameters",
        "1.9000 nats per token · 2.741 bits per byte",
        "of 4 × 1.00 GFLOP/s",
        "metrics.jsonl  config.yaml  summary.json",
    ):
        assert words in text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_costs_less_than_a_millisecond(tmp_path: Path, terminal: bool) -> None:
    recorder, _ = make_recorder(tmp_path, make_config(400), terminal=terminal)
    times = []
    with recorder:
        recorder.start({})
        for step in range(1, 401):
            begin = time.perf_counter()
            recorder.step(step, 5.0 / step, 0.5, 1e-3, 4096, 0.5)
            times.append(time.perf_counter() - begin)
    print(f"median {statistics.median(times) * 1e6:.0f} µs")
    assert in_time(statistics.median(times), 1e-3)


def rank_times(count: int) -> list[dict[str, float]]:
    share = dict.fromkeys(KINDS, 0.0) | {"forward": 0.1, "backward": 0.2, "idle": 0.05}
    times = [{"rank": rank} | share | {"dp": rank / 1000} for rank in range(count)]
    return [one | {"step": 0.35 + one["dp"]} for one in times]


def test_time_by_rank_is_in_the_panel_and_the_summary(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config(1))
    with recorder:
        recorder.start({})
        recorder.step(1, 5.0, 0.5, 1e-3, 4096, 0.5, times={"forward": 0.1234567, "idle": 0.25})
        recorder.breakdown(rank_times(3))
        summary = recorder.finish()
    assert next(rows_of(tmp_path / "metrics.jsonl"))["times"] == {
        "forward": 0.123457,
        "idle": 0.25,
    }
    ranks = summary["breakdown"]["ranks"]
    assert [(r["rank"], r["dp"], round(r["step"], 6)) for r in ranks][2] == (2, 0.002, 0.352)
    lines = [line.split() for line in screen.getvalue().splitlines()]
    assert ["│", "ms", "a", "step", "fwd", "bwd", "dp", "idle", "step", "│"] in lines
    assert ["│", "rank", "2", "100", "200", "2.00", "50.0", "352", "│"] in lines


def test_many_ranks_are_summarised_as_minimum_mean_and_maximum(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config(1))
    with recorder:
        recorder.start({})
        recorder.step(1, 5.0, 0.5, 1e-3, 4096, 0.5)
        recorder.breakdown(rank_times(21))
    lines = [line.split() for line in screen.getvalue().splitlines()]
    for name, dp, step in (
        ("least", "0.00", "350"),
        ("mean", "10.0", "360"),
        ("most", "20.0", "370"),
    ):
        assert ["│", name, "100", "200", dp, "50.0", step, "│"] in lines


def test_steps_without_labels_have_no_loss_and_are_reported_once(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config(40))
    with recorder:
        recorder.start({})
        recorder.step(1, 2.0, 1.0, 1e-3, 4096, 0.5)
        for step in (2, 3):
            recorder.step(step, None, 0.0, 1e-3, 4096, 0.5, skipped=True)
        recorder.evaluation(3, None, {"a": None, "b": 1.0})
        summary = recorder.finish("stopped")
    assert (summary["skipped_steps"], summary["unlearned_steps"], summary["loss"]) == (2, 2, None)
    assert summary["eval_loss"] is summary["best_eval_loss"] is None
    assert "nonfinite" not in summary
    rows = [*rows_of(tmp_path / "metrics.jsonl")]
    assert [row["loss"] for row in rows[:3]] == [2.0, None, None]
    assert [row.get("skipped") for row in rows[:3]] == [None, True, True]
    assert rows[3]["eval_loss"] is None and rows[3]["eval_losses"] == {"a": None, "b": 1.0}
    assert not any("nonfinite" in row for row in rows)
    text = " ".join(screen.getvalue().split())
    assert text.count("changes nothing, because its samples have no token to learn") == 1
    assert "1 such step so far" in text and "SKIPPED: gradients" not in text
    assert "held-out loss none · a none · b 1.0000" in text
    assert "2 steps, because samples had no token to learn" in text
    assert "none, because the last step had no token to learn" in text
    again, screen = make_recorder(tmp_path, make_config(5), terminal=True, first_step=4)
    with again:
        again.start({})
        again.step(4, None, 0.0, 1e-3, 4096, 0.5, skipped=True)
        wait_until_drawn(screen, "loss none")
        summary = again.finish()
    assert (summary["skipped_steps"], summary["unlearned_steps"]) == (3, 3)
    plain = " ".join(Text.from_ansi(screen.getvalue()).plain.split())
    assert "3 such steps so far" in plain and "loss none" in plain


def test_skipped_steps_are_shown_counted_and_summarised(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config(40))
    with recorder:
        recorder.start({})
        for step in range(1, 5):
            skipped = step in (2, 3)
            recorder.step(
                step, math.inf if skipped else 2.0, 1.0, 1e-3, 4096, 0.5,
                skipped=skipped, loss_scale=2.0 ** (16 - step),
            )  # fmt: skip
        assert recorder.finish("stopped")["skipped_steps"] == 2
    lines = [line for line in screen.getvalue().splitlines() if line.startswith("step")]
    # The first step and skipped ones are recorded, although only every tenth is due.
    assert [line.split()[1] for line in lines] == ["1/40", "2/40", "3/40"]
    assert re.search("scale 16384  left .*  SKIPPED: gradients not finite$", lines[1])
    assert "SKIPPED" not in lines[0]
    rows = [*rows_of(tmp_path / "metrics.jsonl")]
    assert [row.get("skipped") for row in rows] == [None, True, True, None]
    assert [row["loss_scale"] for row in rows] == [32768, 16384, 8192, 4096]
    again, screen = make_recorder(tmp_path, make_config(5), terminal=True, first_step=5)
    with again:
        again.start({})
        again.step(5, 2.0, 1.0, 1e-3, 4096, 0.5, skipped=True, loss_scale=2048.0)
        wait_until_drawn(screen, "skipped 1")
        assert again.finish()["skipped_steps"] == 3
    assert "loss 2.0000 · skipped 1 · grad" in Text.from_ansi(screen.getvalue()).plain
    assert "3 steps, because gradients were not finite" in screen.getvalue()


def test_the_memory_of_accelerators_is_in_the_lines_the_summary_and_the_panel(
    tmp_path: Path,
) -> None:
    recorder, screen = make_recorder(tmp_path, make_config(2))
    with recorder:
        recorder.start({})
        recorder.step(
            1,
            5.5,
            1.25,
            1e-3,
            4096,
            0.5,
            memory={"allocated": 50_000_000_000, "reserved": 60_000_000_000},
        )
        memory = [
            {"allocated": 50_000_000_000, "reserved": 60_000_000_000},
            {"allocated": 61_200_000_000, "reserved": 64_000_000_000},
        ]
        recorder.breakdown(rank_times(2), memory)
    (line,) = [*rows_of(tmp_path / "metrics.jsonl")]
    assert line["memory"] == {"allocated": 50_000_000_000, "reserved": 60_000_000_000}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["memory"]["ranks"][1] == {
        "rank": 1,
        "allocated": 61_200_000_000,
        "reserved": 64_000_000_000,
    }
    assert "61.2 GB at most, on rank 1 · 64.0 GB reserved" in screen.getvalue()


def test_a_cpu_run_says_nothing_of_memory(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config(2))
    with recorder:
        recorder.start({})
        run_steps(recorder, 1, 2)
    assert "memory" not in next(rows_of(tmp_path / "metrics.jsonl"))
    assert json.loads((tmp_path / "summary.json").read_text())["memory"] is None
    assert "memory" not in screen.getvalue()


def test_before_a_checkpoint_lines_are_flushed_or_stored_in_it(tmp_path: Path) -> None:
    fault, path = Fault("EIO", "kind"), tmp_path / "metrics.jsonl"
    with FailingFiles(path, fault, ("write", 3)) as calls:
        recorder, _ = make_recorder(tmp_path, make_config(5))
        recorder.start({})
        run_steps(recorder, 1, 3)
        assert calls.counts["fsync"] == 0
        assert recorder.waiting() == ()
        assert calls.counts["fsync"] == 1
        run_steps(recorder, 4, 5)
        assert [json.loads(line)["step"] for line in recorder.waiting()] == [4, 5]


def test_a_full_disk_at_the_end_is_logged_and_does_not_fail_the_run(tmp_path: Path) -> None:
    recorder, screen = make_recorder(tmp_path, make_config(2))

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch, recorder:
        recorder.start({})
        run_steps(recorder, 1, 2)
        recorder.breakdown(rank_times(2))
        patch.setattr("parallel3d.metrics.jsonl.replace_durably", full)
        assert recorder.finish()["status"] == "finished"
    text = screen.getvalue().replace("\n", "")
    assert "summary.json cannot be written (No space left on device)" in text


def test_rows_with_missing_figures_are_ignored_on_resume(tmp_path: Path) -> None:
    figures = (1, 2.0, 0.5, 1e-3, 4096, 1.0, 0.1, 0.1)
    good = dict(zip(STEP, figures, strict=True))
    odd = [{"step": 2}, good | {"step": 2, "loss": "x"}, good | {"step": 2, "nonfinite": 3}]
    odd.append({"step": 2, "eval_loss": 1.0})
    lines = "".join(json.dumps(row) + "\n" for row in [good, *odd])
    (tmp_path / "metrics.jsonl").write_text(lines)
    recorder, _ = make_recorder(tmp_path, make_config(4), first_step=3)
    with recorder:
        recorder.start({})
        run_steps(recorder, 3, 3)
        summary = recorder.finish()
    assert (summary["tokens"], summary["eval_loss"]) == (3 * 4096, None)


def test_the_terms_of_an_own_loss_are_recorded_and_its_loss_has_no_nats(tmp_path: Path) -> None:
    config = make_config(2)
    config.data.name, config.data.tokenizer = "stdlib", "byte"
    names = {f.name: getattr(config.model, f.name) for f in fields(ModelConfig)}
    held = ModelSurvey({}, ({},), (0,), {})
    config.model = OwnModelConfig(**names | {"num_layers": 1, "seq_length": 1}, survey=held)
    recorder, screen = make_recorder(tmp_path, config)
    scores = {"far": Score(6.0, 4, terms={"huber": 0.25})}
    with recorder:
        recorder.start({})
        recorder.step(1, 5.0, 0.5, 1e-3, 16, 0.5, terms={"huber": 0.5, "l1": math.nan})
        recorder.step(2, 4.0, 0.5, 1e-3, 16, 0.5, terms={"huber": 0.75, "l1": 2.0})
        recorder.evaluation(2, 1.9, {}, scores, {"accuracy": 0.125})
        summary = recorder.finish()
    first, second, evaluation = [*rows_of(tmp_path / "metrics.jsonl")]
    assert first["terms"] == {"huber": 0.5, "l1": None, "nonfinite": {"l1": "nan"}}
    assert second["terms"] == {"huber": 0.75, "l1": 2.0}
    assert evaluation["eval_terms"] == {"accuracy": 0.125}
    assert evaluation["valid"] == {"far": {"loss": 1.5, "count": 4, "terms": {"huber": 0.25}}}
    assert figures_of(second)["terms/huber"] == 0.75
    assert figures_of(evaluation)["eval_terms/accuracy"] == 0.125
    assert figures_of(evaluation)["valid/far/terms/huber"] == 0.25
    assert summary["terms"] == second["terms"]
    assert summary["eval_terms"] == evaluation["eval_terms"]
    assert summary["bits_per_byte"] is None
    text = screen.getvalue()
    assert "nats" not in text and "bits" not in text and "tok" not in text
    for words in (
        "16 samples = 4 × 4 micro-batches × dp 1",
        "huber   0.5000",
        "32.0 samples/s",
        "held-out loss 1.9000 · accuracy 0.1250",
        "far: loss 1.5000 · huber 0.2500 · 4 items",
        "4.0000 per item, last step",
        "huber 0.7500 · l1 2.0000",
    ):
        assert words in text


def test_an_evaluation_beyond_the_last_step_has_its_step_alone() -> None:
    (there,) = evaluation_lines(False, 20, {"step": 8, "eval_loss": 1.0})
    (beyond,) = evaluation_lines(False, 4, {"step": 16, "eval_loss": 1.0})
    assert there.startswith("eval  8/20  held-out")
    assert beyond.startswith("eval 16  held-out")
