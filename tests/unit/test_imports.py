"""Tests which module may import which: the layers of pyproject.toml, and no import cycles."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

import parallel3d

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "parallel3d"


def lint(folder: Path) -> tuple[int, str]:
    """Runs import-linter on the package in `folder`, next to its pyproject.toml."""
    environ = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"}
    command = (str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Returns a folder with a copy of the package, into which imports are planted."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "parallel3d", ignore=ignored)
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "import_layers.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    return tmp_path


def plant(copy: Path, file: str, code: str) -> None:
    path = copy / "parallel3d" / file
    path.write_text(path.read_text(encoding="utf-8") + code, encoding="utf-8")


@pytest.mark.slow
def test_layers_import_downwards_and_arithmetic_imports_no_torch() -> None:
    code, output = lint(ROOT)
    assert code == 0, output


@pytest.mark.more
def test_an_import_upwards_or_of_torch_is_found_anywhere(copy: Path) -> None:
    plant(copy, "comm/exchange.py", "\nfrom parallel3d.metrics import jsonl\n")
    plant(copy, "optim/optimizer.py", "\ndef f():\n    import parallel3d.trainer\n")
    plant(copy, "data/tokens.py", "\nif TYPE_CHECKING:\n    import parallel3d.run.worker\n")
    plant(copy, "config/fields.py", "\nfrom parallel3d.comm import exchange\n")
    plant(copy, "comm/group.py", "\nfrom parallel3d.run_config import Config\n")
    plant(copy, "optim/keys.py", "\nfrom parallel3d.optim import thaws\n")
    plant(copy, "models/checks.py", "\nfrom parallel3d.models import rotary\n")
    plant(copy, "files.py", "\ndef f():\n    import torch.distributed\n")
    plant(copy, "dryrun/facts.py", "\nfrom parallel3d.estimate import search\n")
    plant(copy, "commands/train.py", "\nfrom parallel3d.commands.bench import comm\n")
    plant(copy, "loop/hooks.py", "\nfrom parallel3d.commands import generate\n")
    plant(copy, "faults/probe.py", "\ndef f():\n    from parallel3d.models import transformer\n")
    code, output = lint(copy)
    assert code != 0
    for edge in (
        "parallel3d.comm.exchange -> parallel3d.metrics.jsonl",
        "parallel3d.optim.optimizer -> parallel3d.trainer",
        "parallel3d.data.tokens -> parallel3d.run.worker",
        "parallel3d.config.fields -> parallel3d.comm.exchange",
        "parallel3d.comm.group -> parallel3d.run_config",
        "parallel3d.optim/keys -> parallel3d.optim.thaws",
        "parallel3d.models/checks -> parallel3d.models.rotary",
        "parallel3d.files -> torch",
        "parallel3d.dryrun.facts -> parallel3d.estimate.search",
        "parallel3d.commands.train -> parallel3d.commands.bench.comm",
        "parallel3d.loop.hooks -> parallel3d.commands.generate",
        "parallel3d.faults.probe -> parallel3d.models.transformer",
    ):
        assert edge in output, edge


def test_no_contract_has_an_exemption() -> None:
    linted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = linted["tool"]["importlinter"]["contracts"]
    assert [each["name"] for each in contracts if "ignore_imports" in each] == []


@pytest.mark.more
def test_a_new_package_needs_a_layer(copy: Path) -> None:
    (copy / "parallel3d" / "attic").mkdir()
    (copy / "parallel3d" / "attic" / "__init__.py").touch()
    code, output = lint(copy)
    assert code != 0
    assert "attic" in output


def cycle_of(package: str) -> list[str]:
    """Returns a cycle of imports between files of `package`, or []. It includes imports in
    functions and for types."""
    graph = grimp.build_graph(package, cache_dir=None)
    below = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    below[package] = set()  # the public names, which are imported on demand
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert cycle_of("parallel3d") == []


def test_a_circle_of_files_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "circle").mkdir()
    for name, text in (("__init__", ""), ("a", "from circle import b"), ("b", "import circle.a")):
        (tmp_path / "circle" / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert {"circle.a", "circle.b"} <= set(cycle_of("circle"))


@pytest.mark.slow
def test_no_module_imports_a_public_name_from_the_package_itself() -> None:
    """The contract of layers does not follow these names to the modules that define them."""
    names = set(parallel3d.__all__) - {"__version__"}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "parallel3d":
                found += [(path, alias.name) for alias in node.names if alias.name in names]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "parallel3d":
                found += [(path, node.attr)] if node.attr in names else []
    assert not found


def imported_by(tree: ast.Module) -> Iterator[str]:
    """Yields modules that a file imports when it runs, also in functions; some names may not be
    modules."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        nodes += ast.iter_child_nodes(node)


def closure_of(module: str, root: Path = ROOT) -> dict[str, int]:
    """Returns all modules of the package that `module` needs, including itself, with their
    lines."""
    found: dict[str, int] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = root.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in found or name.split(".")[0] != module.split(".")[0] or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        found[name] = len(text.splitlines())
        waiting += imported_by(ast.parse(text))
    return found


@pytest.mark.slow
def test_init_imports_little_of_the_package() -> None:
    code = (
        "import sys, parallel3d; parallel3d.init; "
        "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'parallel3d'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = [Path(name) for name in out.stdout.split()]
    assert len(files) <= 45, files
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 8000


@pytest.mark.parametrize(
    ("name", "files", "lines"),
    [
        ("ColumnParallelLinear", 25, 4500),
        ("VocabParallelEmbedding", 26, 4800),
        ("DistributedDataParallel", 30, 4200),
    ],
)
def test_a_part_of_the_library_needs_little_of_the_package(
    name: str, files: int, lines: int
) -> None:
    found = closure_of(getattr(parallel3d, name).__module__)
    told = ", ".join(sorted(found))
    assert len(found) <= files, told
    assert sum(found.values()) <= lines, told


def test_the_step_needs_no_keys_of_others() -> None:
    """`trainer.py` takes values. Imports for types count, as a reader follows them, too."""
    found = grimp.build_graph("parallel3d", cache_dir=None).find_upstream_modules(
        "parallel3d.trainer"
    )
    assert len(found) <= 90, ", ".join(sorted(found))
    assert "parallel3d.run_config" not in found


def test_the_optimizer_needs_little_of_the_package() -> None:
    found = closure_of("parallel3d.optim.optimizer")
    assert len(found) <= 15, ", ".join(sorted(found))


def test_imports_in_functions_count_and_those_for_types_do_not(tmp_path: Path) -> None:
    (tmp_path / "sample" / "deep").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "a": "import os\nif TYPE_CHECKING:\n    import sample.d\n\ndef f():\n    import sample.b\n",
        "b": "from sample.deep import c, number\n",
        "d": "",
        "deep/__init__": "number = 1\n",
        "deep/c": "import sample.a\n",
    }.items():
        (tmp_path / "sample" / f"{name}.py").write_text(text, encoding="utf-8")
    lines = {"sample.a": 6, "sample.b": 1, "sample.deep": 1, "sample.deep.c": 1}
    assert closure_of("sample.a", tmp_path) == lines


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples"])
def test_no_script_is_named_like_a_module_of_python(folder: str) -> None:
    """`python folder/script.py` imports its neighbours first: a `tokenize.py` would break
    others."""
    names = {path.stem for path in (ROOT / folder).rglob("*.py")}
    assert names and not names & sys.stdlib_module_names
