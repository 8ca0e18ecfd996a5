"""Tests that the files for contributors agree with what they describe."""

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


def test_the_table_of_changes_names_the_files_that_define_what_it_names() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.split("\n## Where do I change …?\n")[1].split("\n### ")[0]
    roots = (ROOT, ROOT / "parallel3d")
    files = {path for path in re.findall(r"`([\w./]+\.\w+)`", table) if "/" in path}
    files = {path for path in files if "NAME" not in path}
    found = {path: [root / path for root in roots if (root / path).is_file()] for path in files}
    assert [path for path, there in found.items() if len(there) != 1] == []
    named = re.findall(r"((?:`[\w.]+`(?:, | and )?)+) (?:in |\()`(\w+/[\w./]+\.py)`", table)
    assert len(named) > 30
    missing = []
    for names, path in named:
        text = found[path][0].read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names.replace("` and `", " ")):
            defined = rf"^\s*(?:(?:def|class) {name}\b|{name}\b(?:: .*)?(?: =|$))"
            # The factors of the matrix are texts.
            if path != "tests/distributed/matrix.py" and not re.search(defined, text, re.MULTILINE):
                missing.append((name, path))
    assert missing == []


def test_the_table_of_benchmarks_has_every_script_and_its_pages() -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    named = [row[0].strip("| `") for row in rows]
    scripts = {
        str(path.relative_to(folder)).removesuffix("/__main__.py")
        for path in (*folder.glob("*/**/*.py"), *folder.glob("*/*.sh"))
        if path.suffix == ".sh" or "__main__" in path.name + path.read_text(encoding="utf-8")
    }
    assert sorted(named) == sorted(scripts)
    for row in rows:
        for link in re.findall(r"\]\(([^)]+)\)", row[-1]):
            text = (folder / link).read_text(encoding="utf-8")
            path = row[0].strip("| `").removesuffix(".py")
            module = path.replace("/", ".")
            short = module.rpartition(".")[2] if module != "gpu.first" else "gpu_first"
            names = (f"benchmarks.{module}", f"benchmarks.{short}", f"benchmarks/{path}")
            assert any(name in text for name in names), (link, row[0])


def test_commands_with_short_names_call_a_script_in_a_folder() -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text(encoding="utf-8")
    short = {path.stem for path in folder.glob("*.py")}
    sentence = page.split("have short names too: ")[1].split(", as")[0]
    assert short == set(re.findall(r"`(\w+)`", sentence))
    for name in short:
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        (module,) = re.findall(r"^from (benchmarks\.\w+\.\w+) import main$", text, re.MULTILINE)
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
        assert f"`python -m benchmarks.{name}`" in text


# Participles and pronouns that call a thing by what was done with it.
NO_NOUNS = re.compile(
    "Done|Each|Found|Given|Held|Is|Made|Other|Sent|Shown|Taken|Taught|Theirs|Told|Where"
    "|[A-Z][a-z]+ed"
)


def test_a_public_class_has_a_noun_as_its_name_and_no_two_have_the_same() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "parallel3d").rglob("*.py")):
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text("utf-8"), re.MULTILINE):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: there for name, there in places.items() if len(there) > 1} == {}
    assert [name for name in places if NO_NOUNS.fullmatch(name)] == []
