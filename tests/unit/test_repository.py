"""The files for contributors agree with what they describe."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import parallel3d

ROOT = Path(__file__).parents[2]


def test_the_newest_version_of_the_changelog_is_the_packages() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest is not None and newest[1] == parallel3d.__version__


def test_hooks_run_the_ruff_that_is_pinned() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (ruff,) = (repo for repo in hooks["repos"] if repo["repo"].endswith("/ruff-pre-commit"))
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nruff=={ruff['rev'].removeprefix('v')}\n" in pinned
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]


def test_the_workflow_runs_what_ci_runs_on_the_oldest_python_that_is_allowed() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert {"run": ".ci/run"} in jobs["tests"]["steps"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert oldest in jobs["tests"]["strategy"]["matrix"]["python"]


def test_every_link_between_these_files_leads_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / name).read_text(encoding="utf-8"))
        assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_table_of_layers_has_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("\n## Layers\n")[1].split("\n## ")[0]
    package = ROOT / "parallel3d"
    names = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    names |= {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    assert {name for name in names if f"`{name}`" not in table} == set()
