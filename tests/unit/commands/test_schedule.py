"""Tests `parallel3d schedule`: pictures, tables and refusals, without torch."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parallel3d.cli.command_line import main
from parallel3d.errors import UserError
from parallel3d.schedules.draw import render_svg, render_text
from parallel3d.schedules.schedule import NAMED_SCHEDULES, make
from parallel3d.schedules.table import read_table, write_table
from parallel3d.schedules.walk import Costs, time_orders
from tests.pace import PATIENCE


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["schedule", *words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.nightly
def test_timeline_table_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, table, rows = tmp_path / "a.svg", tmp_path / "a.csv", tmp_path / "a.json"
    words = ["pp=4", "vpp=2", "num_microbatches=8", "schedule=zbv", "schedule.hop=0.1"]
    files = [f"schedule.svg={svg}", f"schedule.csv={table}", f"schedule.json={rows}"]
    code, out, err = run(capsys, *words, *files)
    assert (code, err) == (0, "")
    assert "zbv, 4 ranks, 2 chunks as a V, 8 micro-batches" in out
    assert "Sound: complete, ordered, paired, free of deadlock" in out
    drawn = ElementTree.fromstring(svg.read_text())
    assert len([rect for rect in drawn if rect.find("{*}title") is not None]) == 4 * 2 * 3 * 8
    written = json.loads(rows.read_text())
    by_name = {row["name"]: row for row in written["schedules"]}
    assert set(NAMED_SCHEDULES) | {"auto"} <= set(by_name)
    assert {"name", "overhead", "bubble", "peak_live"} <= set(by_name["zbv"])
    assert by_name["zbv"]["peak_live"] == 1
    again = ["pp=4", "num_microbatches=8", "schedule=file", f"schedule.file={table}"]
    code, out, _ = run(capsys, *again)
    assert code == 0
    assert "file, 4 ranks, 2 chunks as a V" in out
    # It overwrites its own files, but not a table, because people edit tables.
    assert run(capsys, *words, files[0], files[2])[0] == 0
    code, _, err = run(capsys, *words, files[1])
    assert code == 2 and "exists; it is never overwritten" in err


@pytest.mark.nightly
def test_stages_cost_as_much_as_the_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The head with its loss makes the last stage's forward longer, so the other stages get more
    layers. The overhead is relative to the compute of the busiest rank.
    """
    words = ["pp=2", "num_microbatches=4", "schedule=1f1b", "model.num_layers=8"]
    sizes = ["model.hidden_size=64", "model.num_attention_heads=4", "model.ffn_hidden_size=256"]
    vocabulary = ["model.seq_length=128", "model.vocab_size=4096", "schedule.of_model=true"]
    svg, rows = tmp_path / "a.svg", tmp_path / "a.json"
    files = [f"schedule.svg={svg}", f"schedule.json={rows}"]
    code, out, err = run(capsys, *words, *sizes, *vocabulary, *files)
    assert (code, err) == (0, "")
    assert "F:I:W = 1:1:1 and the head" in out
    widths: dict[str, set[str]] = {}
    for box in ElementTree.parse(svg).getroot():
        if (tip := box.findtext("{*}title")) is not None:
            widths.setdefault(tip[0], set()).add(str(box.get("width")))
    assert {kind: len(found) for kind, found in widths.items()} == {"F": 2, "B": 2}
    found = json.loads(rows.read_text())
    assert found["of_model"]
    by_name = {row["name"]: row for row in found["schedules"]}
    assert by_name["auto"]["overhead"] <= by_name["1f1b"]["overhead"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("pp=4 vpp=4 schedule=zbv", "schedule=zbv .* vpp=4 must be 2"),
        ("pp=4 vpp=1 schedule=v_half", "vpp=1 must be 2"),
        ("schedule.costs=[1,0,1]", "must be three positive numbers"),
        ("schedule.costs=[1,1]", "must be three positive numbers"),
        ("schedule.costs=[1,nan,1]", "must be three positive numbers"),
        ("schedule.hop=-1", "schedule.hop=-1.0 must be"),
        ("pp=8 num_microbatches=32 schedule.memory=0.1", "nearest is schedule.memory=0.125"),
        ("num_microbatches=0", "num_microbatches=0 must be"),
        (
            "pp=4 vpp=3 model.num_layers=8 schedule=interleaved schedule.of_model=true",
            "12 stages must be at most model.num_layers=8.*nearest is schedule.of_model=false",
        ),
        ("schedule=file", "schedule=file needs schedule.file"),
        ("schedule.file=a.csv", "nearest is schedule=file"),
        ("schedule=file schedule.file=none.csv", "cannot be read"),
        (
            "pp=512 vpp=8 num_microbatches=9999",
            "too many to draw; the nearest is num_microbatches=",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(sentence, err), err


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_tables_are_read_in_bounds(tmp_path: Path, kind: str) -> None:
    """Runs in a process of its own with limits of memory and time, which reading without bounds
    would exceed."""
    table = tmp_path / "table.csv"
    if kind == "pipe":
        os.mkfifo(table)
    elif kind == "device":
        table.symlink_to("/dev/zero")
    else:
        with table.open("wb") as file:
            file.truncate(10 << 30)
    command = [sys.executable, "-m", "parallel3d", "schedule", "schedule=file"]
    ended = subprocess.run(
        [*command, f"schedule.file={table}"],
        capture_output=True,
        text=True,
        timeout=20 * PATIENCE,
        preexec_fn=bounded,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "cannot be read" in ended.stderr and ended.stderr.count("\n") == 1


def test_a_table_may_begin_with_a_byte_order_mark(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    table.write_text(write_table(make("1f1b", 2, 4, 1)), encoding="utf-8-sig")
    words = ("schedule=file", f"schedule.file={table}", "pp=2", "num_microbatches=4")
    assert run(capsys, *words)[0] == 0


@pytest.mark.nightly
def test_no_torch_is_imported() -> None:
    code = (
        "import sys\n"
        "from parallel3d.cli.command_line import main\n"
        "assert main(['schedule', 'pp=4', 'vpp=2', 'num_microbatches=6', 'schedule=auto']) == 0\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMED_SCHEDULES)
def test_tables_survive_a_round_trip(name: str) -> None:
    chunks = 3 if "interleaved" in name else 2 if name in ("zbv", "v_half") else 1
    made = make(name, 3, 7, chunks)
    back = read_table(write_table(made), "t.csv", 3, 7)
    assert back.orders == made.orders
    assert back.assignment.places == made.assignment.places


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("0F1", "0X1", "line 1: '0X1' is not an action: an action is a stage"),
        ("0F1,", "", "rank 0 never does 0F1"),
        ("1B1", "1B1,1B1", "rank 1 has 1B1 twice"),
        ("0F1", "0F1,0F7", "rank 0 has 0F7, but micro-batches are 0 to 1"),
        ("1F1,1B1", "1B1,1F1", "rank 1 does 1B1 before 1F1"),
        ("1F0,1B0,1F1,1B1", "1F1,1B1,1F0,1B0", None),
        ("0F0,0F1,0B0,0B1", "0F0,0B0,0F1,0B1", None),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F1",
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0",
            "rank 0 waits for ever for the input of 0B0, while rank 1 does not go beyond 1F1",
        ),
        ("1F0,1B0,1F1,1B1", "", "has 1 rows of actions, one per rank, but pp=2"),
        ("1F0", "2F0", "rank 1 has the stages [1, 2]"),
    ],
)
def test_a_table_is_checked(old: str, new: str, sentence: str | None) -> None:
    text = GOOD.replace(old, new)
    if sentence is None:
        assert read_table(text, "t.csv", 2, 2).microbatches == 2
        return
    with pytest.raises(UserError) as caught:
        read_table(text, "t.csv", 2, 2)
    assert sentence in str(caught.value)


def test_a_wide_schedule_is_shown_in_full_as_letters() -> None:
    made = make("interleaved_zb", 8, 32, 4)
    timeline = time_orders(made.orders, made.assignment, Costs.even(made.assignment))
    heading, *rows = render_text(timeline, 100).splitlines()
    assert "I input gradient" in heading
    assert {len(row) for row in rows} == {100}
    assert all(set(row[8:-9]) <= set("FIW·") for row in rows)
    assert rows[0][8] == "F" and rows[-1][8] == "·"


@pytest.mark.nightly
def test_large_pictures_are_small_files() -> None:
    made = make("interleaved_zb", 64, 64, 2)
    timeline = time_orders(made.orders, made.assignment, Costs.even(made.assignment))
    drawn = render_svg(timeline, assignment=made.assignment, hop=0.1)
    assert len(drawn) < 1_500_000
    assert ElementTree.fromstring(drawn).get("height") is not None
