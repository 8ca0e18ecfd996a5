"""docs/ as a site: every page is in the navigation, every link and anchor leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
