"""Tests TensorBoard: its own reader finds every step once, also after a kill, and nothing stops a
run."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

from parallel3d.cli.hydra_run import without_alias
from parallel3d.config.fields import check_fields
from parallel3d.errors import UserError
from parallel3d.metrics.checks import check_loggers
from parallel3d.metrics.keys import LoggerConfig
from parallel3d.metrics.loggers import figures_of
from parallel3d.metrics.peak import Peak
from parallel3d.metrics.recorder import Recorder
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config


def session(
    run_dir: Path, first: int, last: int, scale: float = 4.0, name: object = "tensorboard"
) -> Recorder:
    """Trains steps `first` to `last` and evaluates every five; everything logged is flushed."""
    config = Config(logger=LoggerConfig(name=name))
    config.model = ModelConfig(name="gpt_tiny")
    recorder = Recorder(config, run_dir, 1e6, Peak(1e9, "test"), first)
    recorder.start({})
    for step in range(first, last + 1):
        loss = math.nan if step == 7 else scale / step
        recorder.step(step, loss, 0.5, 1e-3, 4096, 0.1, times={"forward": 0.04})
        if step % 5 == 0:
            recorder.evaluation(step, scale / step, {"code": 2.0, "web": None})
    recorder.waiting()
    return recorder


def killed(run_dir: Path, first: int, last: int) -> None:
    """Does the same in a process of its own, which dies without closing anything."""
    child = os.fork()
    if child == 0:
        try:
            session(run_dir, first, last)
            os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9


def age(run_dir: Path) -> None:
    """Makes the files of all sessions so far a few seconds older, as between real starts."""
    for file in (run_dir / "tensorboard").iterdir():
        head, second, *rest = file.name.rsplit(".", 4)
        file.rename(file.with_name(".".join([head, f"{int(second) - 10:010d}", *rest])))


def curves(run_dir: Path) -> dict[str, dict[int, float]]:
    """Returns what TensorBoard shows, by tag and step; fails if a step is twice in a curve."""
    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    found = {}
    for tag in board.Tags()["scalars"]:
        points = board.Scalars(tag)
        found[tag] = {point.step: point.value for point in points}
        assert len(found[tag]) == len(points), tag
    return found


@pytest.mark.nightly
def test_a_killed_run_that_resumes_has_every_step_once(tmp_path: Path) -> None:
    killed(tmp_path, 1, 12)
    age(tmp_path)
    session(tmp_path, 11, 16, scale=8.0).finish()  # its checkpoint was at step 10
    age(tmp_path)
    session(tmp_path, 16, 17, scale=9.0).finish()  # this session begins before the last step
    files = sorted((tmp_path / "tensorboard").iterdir())
    events = [event for file in files for event in RawEventFileLoader(str(file)).Load()]
    assert sum(b"train/loss" in event for event in events) == 12 + 6 + 2  # the files contain them

    found = curves(tmp_path)
    losses = found["train/loss"]
    assert math.isnan(losses.pop(7)) and sorted({*losses, 7}) == list(range(1, 18))
    scales = [4.0] * 10 + [8.0] * 5 + [9.0] * 2
    expected = {step: scale / step for step, scale in enumerate(scales, 1) if step != 7}
    assert losses == pytest.approx(expected)
    assert found["tokens"] == {step: 4096.0 * step for step in range(1, 18)}
    assert found["eval/loss"] == pytest.approx({5: 4 / 5, 10: 4 / 10, 15: 8 / 15})
    assert found["eval/loss of code"] == {5: 2.0, 10: 2.0, 15: 2.0}
    whole = {"train/grad_norm", "train/lr", "speed/tokens_per_s", "speed/mfu", "speed/step_time_s"}
    assert all(len(found[tag]) == 17 for tag in whole | {"time/forward"})
    assert not any("web" in tag for tag in found)


@pytest.mark.slow
def test_without_the_purge_a_step_would_be_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import tensorboard

    real = tensorboard.SummaryWriter
    monkeypatch.setattr(tensorboard, "SummaryWriter", lambda *a, purge_step, **k: real(*a, **k))
    session(tmp_path, 1, 3).finish()
    age(tmp_path)
    session(tmp_path, 3, 4).finish()
    with pytest.raises(AssertionError):
        curves(tmp_path)


@pytest.mark.nightly
def test_a_restart_from_step_1_and_a_late_logger_have_every_step_once(tmp_path: Path) -> None:
    session(tmp_path, 1, 3, name="none").finish()
    session(tmp_path, 4, 5).finish()
    assert sorted(curves(tmp_path)["train/loss"]) == [1, 2, 3, 4, 5]
    age(tmp_path)
    session(tmp_path, 1, 2, scale=5.0).finish()  # without a checkpoint, the run starts over
    assert curves(tmp_path)["train/loss"] == {1: 5.0, 2: 2.5}


def test_unwritable_files_are_reported_once_and_training_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    summary = session(tmp_path, 1, 3).finish()
    said = " ".join(capfd.readouterr().out.split())
    assert summary["steps"] == 3 and said.count("cannot be written") == 1
    assert "metrics.jsonl has everything" in said


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tensorbord", "tensorboard"),
        (["wandb", "tensorbord"], "[wandb,tensorboard]"),
        (["none", "wandb"], "[wandb]"),
        (3, "none"),
        ({"wandb": True}, "none"),
    ],
)
def test_other_loggers_are_refused_with_the_nearest(name: object, near: str) -> None:
    with pytest.raises(UserError, match="must be one of none, wandb, tensorboard or a list") as no:
        check_fields(Config(logger=LoggerConfig(name=name)))
    assert str(no.value).endswith(f"the nearest is logger={near}.")


def test_loggers_are_a_word_or_a_list() -> None:
    for typed, names in (("none", ()), ("wandb", ("wandb",)), ([], ())):
        assert LoggerConfig(name=typed).names == names
    both = Config(logger=LoggerConfig(name=["wandb", "tensorboard"]))
    check_fields(both)
    assert both.logger.names == ("wandb", "tensorboard")
    assert without_alias("logger=[wandb,tensorboard]") == "logger.name=[wandb,tensorboard]"
    assert without_alias("logger=wandb") == "logger=wandb"


def test_figures_are_named_by_section_and_nulls_are_left_out() -> None:
    figures = {"loss": None, "perplexity": 3.0, "tokens": 7, "nonfinite": {"loss": "inf"}}
    line = {"step": 5, "eval_loss": None, "tokens": 9, "valid": {"web": figures}}
    found = {"valid/web/loss": math.inf, "valid/web/perplexity": 3.0, "valid/web/tokens": 7}
    assert figures_of(line) == {"step": 5, "tokens": 9} | found
    line = {"step": 5, "loss": None, "lr": 1.0, "skipped": True, "memory": {"reserved": 2}}
    named = {"train/lr": 1.0, "train/skipped": True, "memory/reserved": 2}
    assert figures_of(line) == {"step": 5} | named


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_loggers(LoggerConfig(name="wandb"), {})
    with pytest.raises(UserError, match=r"run pip install 'parallel3d\[tensorboard\]', or "):
        check_loggers(LoggerConfig(name="tensorboard"), {})
    with pytest.raises(UserError, match=r"logger=\[wandb\]$"):
        check_loggers(LoggerConfig(name=["tensorboard", "wandb"]), {})
