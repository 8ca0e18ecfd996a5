"""Tests docs/ as a site: every page is in the navigation, every link and anchor has a target."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import parallel3d

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Names of readers' files in examples.
THEIRS = {"my_train.py", "page.py", "small.py", "examples/pretrain_gpt_distributed_with_mp.sh"}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir")
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        (*command, str(tmp_path)), cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "search_index.json" in {path.name for path in tmp_path.rglob("*.json")}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages == {path.parent.name for path in tmp_path.glob("*/index.html")}


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    """Matches whole paths, or their ends: `comm/store.py`. A page about one folder may shorten this
    to `store.py`."""
    folders = ("parallel3d", "tests", "benchmarks", "docs", "conf", "launch", "slurm", "examples")
    there = [
        f"/{path.relative_to(ROOT)}" for name in folders for path in (ROOT / name).rglob("*.*")
    ]
    named = re.findall(
        r"(?<![\w/.*-])(?:\./)?((?:[\w-]+/)*[\w-]+\.(?:py|sh|sbatch))\b",
        page.read_text("utf-8"),
    )
    gone = {name for name in named if not any(path.endswith(f"/{name}") for path in there)}
    assert gone - THEIRS == set()


def test_dotted_names_of_modules_lead_somewhere() -> None:
    gone = {}
    for page in PAGES:
        for name in re.findall(r"\bparallel3d(?:\.\w+)+", page.read_text("utf-8")):
            parts = name.split(".")
            tried = [ROOT.joinpath(*parts[:end]) for end in range(2, len(parts) + 1)]
            offered = parts[1] in parallel3d.__all__
            if not offered and not any(
                path.is_dir() or path.with_suffix(".py").exists() for path in tried
            ):
                gone[name] = page.name
    assert not gone
