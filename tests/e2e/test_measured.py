"""Tests `plan` and `train layout=auto` on a measured machine, and `calibrate`'s refusals."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from parallel3d.host.devices import device_name
from parallel3d.host.quotas import available_cores
from tests.e2e.command import TINY, Shell
from tests.e2e.forked import Forked
from tests.e2e.here import answer
from tests.unit.estimate.measured_machine import MADE, machine

pytestmark = pytest.mark.nightly

FILE = "here.yaml"


def measured(folder: Path, **made: Any) -> None:
    """Writes a file of this device, except for the given changes."""
    here = {"name": device_name("cpu"), "count": available_cores()} | made
    of = machine(made=dataclasses.replace(MADE, **here))
    (folder / FILE).write_text(of.text())


def said(err: str) -> list[str]:
    """Returns the lines but those of progress, which a busy machine prints."""
    return [line for line in err.splitlines() if not line.startswith("plan: layout ")]


def test_plan_lists_layouts_of_the_measured_machine(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    measured(shell.cwd, count=2)
    ended = answer(shell, capfd, "plan", f"cluster={FILE}", "model=llama_tiny",
                   "cluster.gpus_per_node=4")  # fmt: skip
    assert (ended.code, said(ended.err)) == (0, [])
    # one row for each (tp, pp)
    assert len(re.findall(r"^ +\d+ +[124] +[124] +\d", ended.out, re.M)) == 6
    assert "4 " in ended.out.splitlines()[0] and "fp32" in ended.out.splitlines()[0]
    assert "published runs" not in ended.out, "this machine was measured"
    assert ended.out.count("Times are a guess, because ranks share the cores") == 1


def test_plan_lists_layouts_of_experts_and_of_windows(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    measured(shell.cwd, count=2)
    given = f"cluster={FILE}", "cluster.gpus_per_node=4"
    windows = "model=llama_tiny", "model.layer_types=[sliding,full]", "model.sliding_window=64"
    # With ep=2 a stage has two ranks or more.
    experts, overlap = ("model=moe_tiny", "ep=2"), "moe.overlap=true"
    for keys, rows in ((experts, 5), ((*experts, overlap), 5), (windows, 6)):
        ended = answer(shell, capfd, "plan", *given, *keys)
        assert (ended.code, said(ended.err)) == (0, [])
        assert len(re.findall(r"^ +\d+ +[124] +[124] +\d", ended.out, re.M)) == rows, ended.out
    assert "ep" not in ended.out.split("step s")[0].split()


REFUSED = {
    "no file": ("plan", ("cluster=none.yaml",), "cluster=none.yaml cannot be read"),
    "another type": ("plan", ("precision=bf16",), "precision=bf16 must be fp32.*run parallel3d"),
    "two hosts": ("plan", ("cluster.nodes=2",), "cluster.nodes=2 must be 1 .*take cluster.nodes=1"),
    "a batch": ("plan", ("global_batch_size=7", "dp=2"), "global_batch_size=7 must be .*nearest"),
    "too large": (
        "plan",
        ("model.num_layers=8", "model.hidden_size=4096", "tp=1", "pp=1", "micro_batch_size=1"),
        "fits no layout .*needs .* GiB more than .*nearest that fits is",
    ),
    "tp does not divide": ("train", ("layout=auto", "tp=3", "launch.ranks=4"),
                           "tp=3 must divide the 4 ranks .*nearest is 2"),
    "nothing measured": ("train", ("layout=auto", "cluster=laptop"),
                         "layout=auto needs to know .*then give cluster=calibrated.yaml"),
    "no GPU named": ("train", ("layout=auto", "cluster=laptop", "device=simulated"),
                     "layout=auto needs .*cluster=laptop names none; the nearest is cluster=local"),
    "heads": ("train", ("layout=auto", "model.hidden_size=100"), "hidden_size=100 .*nearest"),
    "a schedule": ("train", ("layout=auto", "schedule=auto"), "schedule=auto must be .*1f1b"),
    "ranks alone": ("train", ("launch.ranks=2",), "launch.ranks=2 must be left out .*is dp=2"),
    "verify": ("verify", ("layout=auto",), "layout=auto only works in parallel3d train"),
    "a file for others": ("topology", (f"cluster={FILE}",), f"cluster={FILE} must be one of"),
    "a word": ("train", ("layout=best",), "layout=best must be one of given, auto"),
    "ep": ("calibrate", ("ep=2", "model=moe_tiny"), "ep=2: calibrate measures groups"),
    "tp": ("calibrate", ("tp=2",), "tp=2: calibrate measures .*as in calibrate.ranks=4"),
    "ranks": ("calibrate", ("calibrate.ranks=6",), "calibrate.ranks=6 must be a power of two"),
    "a folder": ("calibrate", ("calibrate.file=no/x.yaml",), "must be in a folder .*x.yaml"),
    "an ending": ("calibrate", ("calibrate.file=x",), "must end in .yaml.*x.yaml"),
    "there already": ("calibrate", (f"calibrate.file={FILE}",), "already exists.*replace=true"),
    "fp64": ("calibrate", ("precision=fp64",), "precision=fp64 must be one of fp32, bf16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_sentence(
    shell: Shell, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    verb, words, said = REFUSED[case]
    measured(shell.cwd)
    reads = verb in ("plan", "train") and "cluster=laptop" not in words
    usual = {"cluster": FILE} if reads else {}
    keys = usual | {"device": "cpu"} | dict(word.split("=", 1) for word in words)
    ended = answer(shell, capfd, verb, *(f"{key}={value}" for key, value in keys.items()))
    assert ended.code == 2 and ended.out == "", ended.err
    assert ended.err.count("\n") == 1 and re.search(said, ended.err), ended.err


@pytest.mark.parametrize("made", [{"device": "cuda"}, {"name": "another"}, {"count": 4096}])
def test_a_calibration_of_another_device_is_refused(
    shell: Shell, capfd: pytest.CaptureFixture[str], made: dict[str, Any]
) -> None:
    measured(shell.cwd, **made)
    words = ("layout=auto", f"cluster={FILE}", "device=cpu", "launch.ranks=2")
    ended = answer(shell, capfd, "train", *words)
    assert ended.code == 2 and ended.err.count("\n") == 1
    wrong = f"cluster={FILE} must have been measured on this device, cpu .*give a new file"
    assert re.search(wrong, ended.err)


def test_layout_auto_prints_its_choice_and_trains_it(shell: Shell) -> None:
    """Tests a launcher's two ranks; typed keys are kept."""
    measured(shell.cwd)
    forked = Forked(shell)
    words = ("train", *TINY, *shell.text(), "layout=auto", f"cluster={FILE}", "tp=2", "run=a")
    forked.add_world(2, *words)
    forked.start()
    first, second = forked.finish()
    lines = [line for line in first.err.splitlines() if "layout=auto" in line]
    assert len(lines) == 1 and "layout=auto" not in second.err
    said = r"layout=auto: tp=2 pp=1 dp=1 .* s a step, a guess .*; .* of the step is computation"
    assert re.search(said, lines[0])
    kept = (shell.cwd / "runs" / "a" / "config.yaml").read_text()
    assert "\ntp: 2\n" in kept and "\nlayout: given\n" in kept
