"""Tests `parallel3d plan … plan.html=FILE`: one stand-alone page with the table's values."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.e2e.command import Shell
from tests.e2e.here import answer
from tests.pace import PATIENCE

pytestmark = pytest.mark.nightly

WORDS = ("model=llama3_8b", "cluster=dgx_h100", "cluster.nodes=2", "global_batch_size=64")
# Few layouts, and no simulated device in the tests' process.
ASKED = (*WORDS, "pp=4", "recompute=none", "micro_batch_size=1", "plan.confirm=0")
EMPTY = {"meta", "link", "br", "rect", "line", "path", "circle"}


class Reader(HTMLParser):
    """Checks that tags close in order; keeps links, scripts and the texts of titles and cells."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.outside: list[str] = []
        self.tables = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href")]
        self.outside += [tag] if tag in ("script", "link", "iframe") else []
        self.tables += tag == "table"
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["h1"], ["h2"]):
            self.headings.append(data)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A folder for several commands."""
    return Shell(tmp_path_factory.mktemp("plan"), tmp_path_factory.mktemp("scratch"))


@pytest.fixture
def page(asked: Shell, capfd: pytest.CaptureFixture[str]) -> str:
    """Returns the written page, made once."""
    file = asked.cwd / "plan.html"
    if not file.exists():
        ended = answer(asked, capfd, "plan", *ASKED, "plan.html=plan.html")
        assert (ended.code, ended.err) == (0, "")
        (asked.cwd / "printed.txt").write_text(ended.out)
    return file.read_text()


def test_the_page_is_one_file_that_needs_nothing_else(asked: Shell, page: str) -> None:
    html, printed = page, (asked.cwd / "printed.txt").read_text()
    reader = Reader()
    reader.feed(html)
    assert reader.open == [] and reader.outside == []
    assert "@import" not in html and "url(" not in html
    wanted = ("The best layout", "best layouts", "time goes", "in time")
    wanted += ("Memory along", "Where the ranks sit")
    assert all(any(words in heading for heading in reader.headings) for words in wanted)
    assert html.count("<svg") == 2 and reader.tables == 3
    assert "color-scheme:light dark" in html
    command = re.search(r"parallel3d train … .*", printed)
    assert command is not None and command[0] in html
    assert "Kernels have the rates" in html
    parts = re.search(r"class='big'>.*?class='bar'>(.*?)</div>", html, re.S)
    assert parts is not None
    widths = [float(w) for w in re.findall(r"width:([\d.]+)%", parts[1])]
    assert sum(widths) == pytest.approx(100, abs=0.2)


def test_only_its_own_page_is_overwritten(
    asked: Shell, capfd: pytest.CaptureFixture[str], page: str
) -> None:
    again = answer(asked, capfd, "plan", *ASKED, "plan.html=plan.html")
    assert again.code == 0 and (asked.cwd / "plan.html").read_text() == page
    (asked.cwd / "mine.html").write_text("<p>mine</p>")
    for path, said in (
        ("mine.html", "was not written by parallel3d plan"),
        ("nowhere/plan.html", "the folder nowhere does not exist"),
        (".", "is a folder"),
    ):
        ended = answer(asked, capfd, "plan", *ASKED, f"plan.html={path}")
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.count("\n") == 1 and said in ended.err
    assert (asked.cwd / "mine.html").read_text() == "<p>mine</p>"


# Measures by how much the widest table extends beyond the page.
CUT_TABLES = """<script>
const wide = [...document.querySelectorAll(".wide")];
document.body.dataset.cut = Math.max(...wide.map((node) => node.scrollWidth - node.clientWidth));
</script></body>"""


@pytest.mark.more
def test_a_browser_renders_the_page(page: str, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here, which .ci/run installs")
    file = tmp_path / "plan.html"
    file.write_text(page.replace("</body>", CUT_TABLES))
    done = subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
         "--window-size=1200,900", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for tag in ("section", "table", "tr", "td", "svg", "pre"):
        assert done.stdout.count(f"<{tag}") == page.count(f"<{tag}"), tag
    assert "data-cut='0'" in done.stdout.replace('"', "'")
