"""Tests `parallel3d report`: the page of two runs, one of them resumed, as a browser shows it."""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.commands.report.command import MARK
from parallel3d.commands.report.page import COLUMNS, Point, page_of, read_run, thinned
from parallel3d.loop.keys import TrainConfig
from parallel3d.metrics.peak import Peak
from parallel3d.metrics.recorder import Recorder
from parallel3d.metrics.starts import STARTS
from parallel3d.models.keys import ModelConfig
from parallel3d.run.directory import make_run_directory, next_name, save_config
from parallel3d.run_config import Config
from parallel3d.topology.assumptions import preset
from tests.e2e.command import Shell
from tests.e2e.here import answer
from tests.pace import PATIENCE

pytestmark = pytest.mark.nightly

STEPS = 30


def begin(config: Config, folder: Path, first: int) -> Recorder:
    recorder = Recorder(config, folder, 1e6, Peak(1e9, "test"), first)
    recorder.start({})
    return recorder


def steps(recorder: Recorder, first: int, last: int, scale: float) -> None:
    for step in range(first, last + 1):
        loss = math.nan if step == 7 else scale / step
        recorder.step(step, loss, 9.0 / step, 1e-3, 1000, 0.1)
        if step % 10 == 0 and scale < 5:
            recorder.evaluation(step, scale, {"code": 2.0, "web": None})


@pytest.fixture
def runs(shell: Shell) -> Path:
    """A folder with an uninterrupted run, and one killed at step 25 and resumed from step 20."""
    folder = shell.cwd / "runs"
    config = Config(runs_dir=str(folder), train=TrainConfig(steps=STEPS), tp=2, dp=1)
    config.cluster = ClusterConfig(**preset("cluster", "rails_3x2"))
    config.model, config.global_batch_size = ModelConfig(name="gpt_tiny", seq_length=125), 8
    config.run, config.seed = "<whole>", 3
    _, whole = make_run_directory(config)
    recorder = begin(config, whole, 1)
    steps(recorder, 1, STEPS, 6.0)
    times = {kind: 0.01 for kind in ("forward", "backward", "tp", "idle")}
    times |= dict.fromkeys(("cp", "ep", "pp", "dp", "model", "optimizer", "data"), 0.0)
    place = {"pp": 0, "dp": 0, "cp": 0}
    ranks = [{"rank": n} | place | {"tp": n} | times | {"step": 0.04} for n in range(2)]
    recorder.breakdown(ranks, [{"allocated": 3 * 10**9, "reserved": 4 * 10**9}] * 2)
    recorder.finish()
    config.run, config.seed, config.optim.lr = "resumed", 4, 0.5
    _, resumed = make_run_directory(config)
    place = {"host": "node7", "pp": 0, "dp": 0, "cp": 0}
    places = [place | {"rank": rank, "local_index": rank, "tp": rank} for rank in range(2)]
    (resumed / "placement.json").write_text(json.dumps({"ranks": places}))
    steps(begin(config, resumed, 1), 1, 25, 4.0)  # the run is killed, so that nothing is closed
    config.optim.lr = 0.25
    save_config(config, resumed, next_name(resumed))
    steps(begin(config, resumed, 21), 21, 28, 4.0)  # the second resume
    return folder


# A reader's actions, and the text that the page then shows.
READER = """<script>
const found = {};
const all = (selector) => [...document.querySelectorAll(selector)];
const texts = (selector) => all(selector).map((node) => node.textContent);
const click = (selector) => document.querySelector(selector).click();
found.titles = texts("figcaption");
found.points = all("figure:first-child path").map((path) => +path.dataset.points);
found.restarts = texts(".restart");
found.odd = texts("figure:first-child .odd title");
found.atTheEnd = texts(".read")[0];
const chart = document.querySelector(".chart"), box = chart.getBoundingClientRect();
chart.focus();
const press = (key) => chart.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
press("Home"); press("ArrowRight"); press("ArrowRight");
found.key = texts(".read")[0];
const clientX = box.left + 62 + (box.width - 72) / 29 * 19;  // of step 20 among 1 to 30
chart.dispatchEvent(new PointerEvent("pointermove", {clientX}));
found.hover = texts(".read")[0];
found.steps = texts("figure:first-child svg > text[text-anchor=middle]:not(.odd)");
click("input[value=t]");
found.tokens = texts("figure:first-child svg > text[text-anchor=middle]:not(.odd)");
click("#log");
found.logarithmic = texts("figure:first-child svg > text[text-anchor=end]");
click(".shown[value='0']");
found.shown = all("figure:first-child path").map((path) => path.dataset.run);
found.paper = getComputedStyle(document.querySelector(".controls")).backgroundColor;
found.ink = getComputedStyle(document.body).color;
found.overflow = document.documentElement.scrollWidth - innerWidth;
found.cut = all(".wide").map((node) => node.scrollWidth - node.clientWidth);
const end = document.body.appendChild(document.createElement("pre"));
end.id = "found";
end.textContent = "<<<" + JSON.stringify(found) + ">>>";
</script></body>"""


def read_in_the_dark(page: str, folder: Path) -> dict[str, Any]:
    """Returns what READER finds in a browser whose user prefers dark pages."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here, which .ci/run installs")
    file = folder / "read.html"
    file.write_text(page.replace("</body>", READER))
    done = subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
         "--blink-settings=preferredColorScheme=0", "--window-size=1200,900", "--dump-dom",
         file.as_uri()],
        capture_output=True, text=True, timeout=120 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = done.stdout.partition("&lt;&lt;&lt;")[2].partition("&gt;&gt;&gt;")[0]
    return json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.more
def test_a_browser_shows_curves_restarts_and_what_differs(
    shell: Shell, capfd: pytest.CaptureFixture[str], runs: Path, tmp_path: Path
) -> None:
    ended = answer(shell, capfd, "report", "run=<whole>", "run=resumed", "to=both.html")
    assert (ended.code, ended.err) == (0, "")
    assert "<whole>       30 steps  finished\n" in ended.out
    assert "resumed       28 steps  killed (it left no summary)\n" in ended.out
    page = (shell.cwd / "both.html").read_text()
    assert "color-scheme:light dark" in page and "src=" not in page
    # Nothing from other hosts.
    assert "Content-Security-Policy' content=\"default-src 'none'" in page
    assert "<whole>" not in page  # names and errors are text
    differing = page.partition("<h2>What differs</h2>")[2].partition("</section>")[0]
    rows = [row.split("<td>")[1:] for row in differing.split("<tr>")[2:]]
    cells = [[cell.partition("</td>")[0] for cell in row] for row in rows]
    assert cells == [["<code>optim.lr</code>", "0.001", "0.25"], ["<code>seed</code>", "3", "4"]]
    # figures of the second start
    assert "<code>optim.lr</code></td><td>0.5</td><td>0.25</td>" in page
    assert "40 ms" in page and "4 GB" in page and "node7" in page

    found = read_in_the_dark(page, tmp_path)
    charts = ["Training loss", "Held-out loss", "Held-out loss of code", "Gradient norm"]
    charts += ["Learning rate", "Speed"]
    assert [title.partition(" nats")[0].strip() for title in found["titles"]][:3] == charts[:3]
    assert len(found["titles"]) == 6
    assert found["points"] == [29, 27]  # all steps except the one without a number
    assert len(found["restarts"]) == 6
    assert found["restarts"][0].startswith("resumed restarted after step 20, 20")
    assert found["odd"] == ["<whole>, step 7: nan", "resumed, step 7: nan"]
    assert found["atTheEnd"] == "<whole> 0.2resumed 0.14286at the end"
    assert found["key"] == "<whole> 2resumed 1.3333step 3 · 3000 tokens"
    assert found["hover"] == "<whole> 0.3resumed 0.2step 20 · 20 k tokens"
    assert found["steps"] == ["10", "20"]
    assert found["tokens"] == ["10 k", "20 k"]
    assert {"0.2", "0.5", "1", "2", "5"} <= {*found["logarithmic"]}
    assert found["shown"] == ["resumed"]
    dark, light = (sum(map(int, found[part][4:-1].split(","))) for part in ("paper", "ink"))
    assert dark < 150 < 600 < light
    assert found["overflow"] <= 0
    assert set(found["cut"]) == {0}


def test_the_page_shows_a_resumed_run_and_overwrites_no_other_file(
    shell: Shell, capfd: pytest.CaptureFixture[str], runs: Path
) -> None:
    with (runs / "resumed" / "config.yaml").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # like its launcher
        assert answer(shell, capfd, "report", "run=resumed").out.startswith("resumed       28 s")
        page = (shell.cwd / "report.html").read_text()
    assert "<td>running</td>" in page and "What differs" not in page
    assert answer(shell, capfd, "report", "run=resumed").code == 0  # overwrites its own page
    (shell.cwd / "mine.html").write_text("<p>mine</p>")
    summary = runs / "<whole>" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"parameters": "x"}))
    for words, said in (
        (("run=resumed", "to=mine.html"), "was not written by parallel3d report"),
        (("run=<whole>",), "run=<whole> has a damaged file"),
        (("run=resumd",), "the nearest is run=resumed"),
        (("run=resumed", "runs_dir=nowhere"), "which has none (runs_dir=nowhere)"),
        (("to=a.html",), "report needs run=…"),
        (("run=resumed", "runs_dri=x"), "the nearest is runs_dir"),
        (tuple(f"run={n}" for n in range(13)), "run= may be given at most 12 times"),
    ):
        ended = answer(shell, capfd, "report", *words)
        assert (ended.code, ended.out) == (2, "") and ended.err.count("\n") == 1
        assert said in ended.err
    assert (shell.cwd / "mine.html").read_text() == "<p>mine</p>"


@pytest.mark.parametrize(
    ("length", "notes", "shown"),
    [
        (TrainConfig(steps=STEPS), False, f"9 of {STEPS}"),
        (TrainConfig(tokens=STEPS * 16 * 256.0), False, f"9 of {STEPS}"),
        (TrainConfig(epochs=0.5), True, f"9 of {STEPS}"),
        (TrainConfig(epochs=0.5), False, "<td>9</td>"),
    ],
    ids=["steps", "tokens", "epochs", "epochs of an older run"],
)
def test_the_length_of_a_run_is_shown_whichever_key_gives_it(
    tmp_path: Path, length: TrainConfig, notes: bool, shown: str
) -> None:
    config = Config(runs_dir=str(tmp_path), train=length, run="mine", dp=1)
    config.model, config.global_batch_size = ModelConfig(seq_length=256), 16
    _, folder = make_run_directory(config)
    known = replace(config, train=TrainConfig(steps=STEPS))  # as the trainer knows it from the data
    steps(begin(known, folder, 1), 1, 9, 6.0)
    if not notes:
        (folder / STARTS).unlink()
    assert shown in page_of([read_run(tmp_path, "mine")], MARK)


def test_a_long_curve_keeps_its_spikes_and_its_nans() -> None:
    odd = {500: math.nan, 60_001: math.inf, 70_000: 1e6, 70_001: -1e6}
    curve = thinned([Point(n, 8 * n, odd.get(n, 3.0)) for n in range(1, 100_001)])
    assert len(curve["s"]) == len(curve["y"]) == COLUMNS
    assert (curve["s"][-1], curve["t"][-1]) == (100_000, 800_000)
    assert (max(curve["high"]), min(curve["low"])) == (1e6, -1e6)
    assert [kind for *_, kind in curve["odd"]] == ["nan", "inf"]
    json.dumps(curve, allow_nan=False)


def test_the_page_has_a_map_of_layers_and_experts(runs: Path) -> None:
    recorder = begin(Config(runs_dir=str(runs)), runs / "resumed", 29)
    load = {"load": {"1": 1.5, "3": 2.0}, "unused": {"1": 0, "3": 1}}
    recorder.step(29, 0.1, 0.3, 1e-3, 1000, 0.1, experts=load)
    recorder.expert_counts(29, {1: [10, 30, 20, 20], 3: [0, 40, 20, 20]})
    recorder.finish()
    record = read_run(runs, "resumed")
    page = page_of([record], MARK)
    assert record.experts == (29, {"1": [10, 30, 20, 20], "3": [0, 40, 20, 20]})
    assert record.last_value("experts/load") == 2.0
    # In each layer two ranks have 40 tokens each; one of four ranks has 40 of 80.
    assert "with ep=2: 1.00, ep=4: 2.00." in page_of([record], MARK)
    assert page.count("title='layer 1, expert ") == page.count("title='layer 3, expert ") == 4
    assert "layer 3, expert 1: 40 tokens, 2.00 of the mean" in page
    assert "Tokens of the experts" not in page_of([read_run(runs, "<whole>")], MARK)


def test_the_page_of_a_run_without_starts_and_of_one_without_a_line(runs: Path) -> None:
    (runs / "<whole>" / "starts.jsonl").unlink()
    shutil.copy(runs / "resumed" / "placement.json", runs / "<whole>")
    old = read_run(runs, "<whole>")
    assert (old.state, old.starts, len(old.ranks)) == ("finished", [], 2)
    assert "finished" in page_of([old], MARK)
    (runs / "resumed" / "metrics.jsonl").unlink()
    (runs / "resumed" / "placement.json").write_text("{torn")
    empty = read_run(runs, "resumed")
    assert empty.last == (0, 0) and empty.ranks == []


def test_terms_of_an_own_loss_are_curves(shell: Shell) -> None:
    config = Config(runs_dir=str(shell.cwd / "runs"), run="own", train=TrainConfig(steps=2))
    config.model = ModelConfig(name="gpt_tiny")
    _, folder = make_run_directory(config)
    recorder = begin(config, folder, 1)
    for step in (1, 2):
        recorder.step(step, 1.0, 1.0, 1e-3, 10, 0.1, terms={"aux": step / 2})
    recorder.evaluation(2, 1.0, {}, {}, {"accuracy": 0.25})
    recorder.finish()
    found = read_run(shell.cwd / "runs", "own")
    assert [point.value for point in found.curves["terms/aux"]] == [0.5, 1.0]
    assert [point.value for point in found.curves["eval_terms/accuracy"]] == [0.25]
    page = page_of([found], MARK)
    assert '"name":"Term aux","unit":""' in page
    assert '"name":"Held-out term accuracy","unit":""' in page
