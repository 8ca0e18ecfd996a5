"""Tests arguments of `parallel3d checkpoint`: each invalid line gives one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parallel3d.cli.hydra_run import without_alias
from parallel3d.cli.verbs import parse
from parallel3d.commands.checkpoint.command import VERBS, checkpoint
from parallel3d.errors import UserError


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("verfy run=a", ["verfy", "verify"]),
        ("ls rnu=a", ["rnu", "nearest is run"]),
        ("ls my_run", ["my_run", "run=my_run"]),
        ("ls --run=a", ["--run", "nearest is run"]),
        ("verify", ["run=…"]),
        ("verify run=a step=last", ["step=last", "whole number"]),
        ("verify run=a run=b", ["run is given twice"]),
        ("export run=a", ["to=…"]),
        ("export run=a to=", ["to=", "empty"]),
        ("export run=a to=b dtype=bf61", ["dtype=bf61", "dtype=bf16"]),
        ("export run=a to=b tp=2", ["tp is not one of its keys"]),
        ("import run=a", ["from=…"]),
        ("import from=a run=b prove=ture", ["prove=ture", "nearest is prove=true"]),
        ("import from=a run=b fron=c", ["fron", "from"]),
        ("diff a", ["b=…"]),
        ("diff a b c", ["c is not of the form"]),
    ],
)
def test_a_wrong_line_is_refused_with_the_nearest(line: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        checkpoint(line.split())
    sentence = str(refused.value)
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence


def test_arguments_reach_their_parameters() -> None:
    line = ["from=hf", "run=a", "model.seq_length=64", "optim=sgd", "+foo.bar=1"]
    given, overrides = parse("checkpoint import", VERBS["import"], line)
    assert given == {"from": "hf", "run": "a"}
    assert overrides == ["model.seq_length=64", "optim=sgd", "+foo.bar=1"]
    assert parse("checkpoint diff", VERBS["diff"], ["x@3", "b=y"])[0] == {"a": "x@3", "b": "y"}
    assert parse("checkpoint diff", VERBS["diff"], ["b=y", "x"])[0] == {"a": "x", "b": "y"}


def test_async_is_another_spelling_of_async_save() -> None:
    assert without_alias("checkpoint.async=false") == "checkpoint.async_save=false"
    assert without_alias("++checkpoint.async=a,b") == "++checkpoint.async_save=a,b"
    for word in ("checkpoint.asynchronous=1", "data.path=checkpoint.async", "--cfg"):
        assert without_alias(word) == word


@pytest.mark.nightly
def test_help_and_ls_import_no_torch() -> None:
    code = (
        "import sys; from parallel3d.cli.command_line import main; "
        "codes = main(['checkpoint', '--help']), main(['checkpoint', 'ls', 'runs_dir=/nowhere']); "
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended
    for verb in ("ls", "verify", "export", "import", "diff"):
        assert f"  {verb} " in ended.stdout
