"""Who may import whom, and where imports stand.

Where each room stands is said in pyproject.toml, [tool.importlinter].
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallel3d

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "parallel3d"
HOUSE_PY = runpy.run_path(str(ROOT / "docs" / "house.py"))
SCRIPTS = ("benchmarks", "benchmarks/peers", "docs", "examples", "examples/collectives")
FILES = sorted(HOUSE.rglob("*.py"))

# Imports inside a function, file → what, by why they do not stand at the top of their file.
INNER = {
    "the file starts without torch: for `--help`, a refusal, a launcher": {
        "__main__.py": "parallel3d.cli.command_line",
        "cli/command_line.py": "parallel3d.commands.dryrun.command parallel3d.commands.plan "
        "parallel3d.commands.schedule "
        "parallel3d.topology.map.report",
        "comm/job_store.py": "torch.distributed",
        "commands/checked.py": "parallel3d.commands.best_layout",
        "commands/checkpoint/command.py": "parallel3d.commands.checkpoint.listing "
        "parallel3d.commands.checkpoint.compare parallel3d.commands.checkpoint.huggingface",
        "commands/data/command.py": "parallel3d.commands.data.making parallel3d.commands.data.show",
        "commands/dryrun/command.py": "parallel3d.commands.dryrun.facts "
        "parallel3d.commands.dryrun.report parallel3d.commands.dryrun.roofline "
        "parallel3d.commands.dryrun.world",
        "host/devices.py": "torch",
        "run/meeting.py": "torch.distributed",
        "run/local_workers.py": "torch",
        "run/worker.py": "torch torch.distributed parallel3d.comm.group_options "
        "parallel3d.device.accelerator",
    },
    "a part of torch that takes its time to load, or that not every build has": {
        "checkpoint/checkpoints.py": "parallel3d.checkpoint.storage",
        "checkpoint/saver.py": "parallel3d.checkpoint.storage",
        "data_parallel/engine.py": "parallel3d.data_parallel.fully_sharded",
        "device/fused.py": "torch.utils._triton torch._inductor.config torch._dynamo.exc",
        "faults/flight_record.py": "torch._C",
        "models/compilation.py": "torch._inductor.compile_fx torch._inductor.runtime.runtime_utils",
        "run/worker.py": "parallel3d.pretend.enable",
    },
    "a package that a run without it need not load": {
        "commands/checkpoint/proof.py": "transformers",
        "data/chat/corpus.py": "parallel3d.data.making.inputs parallel3d.data.making.opening",
        "data/chat/template.py": "jinja2 jinja2.ext jinja2.sandbox",
        "data/text/file_tokenizer.py": "tokenizers",
        "data/making/opening.py": "zstandard",
        "data/making/pieces.py": "pyarrow.parquet",
        "data/making/training.py": "tokenizers",
        "data/text/hub.py": "huggingface_hub huggingface_hub.errors",
        "commands/train.py": "safetensors.torch",
        "data/corpora/paired.py": "parallel3d.data.remote.opening",
        "config/schema.py": "hydra.core.config_store",
        "metrics/wandb_file.py": "wandb.proto.wandb_internal_pb2",
        "metrics/wandb_logger.py": "wandb",
    },
}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in FILES:
        yield path.relative_to(HOUSE), ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def imported(node: ast.AST) -> set[str]:
    """The modules that import statements inside `node` name."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom):
            names = {f"{inner.module}.{alias.name}" for alias in inner.names}
            modules = {name for name in names if _is_ours(name)}
            found |= modules or {str(inner.module)}
        elif isinstance(inner, ast.Import):
            found |= {alias.name for alias in inner.names}
    return found


def _is_ours(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def lint(folder: Path) -> tuple[int, str]:
    """What import-linter says of the package that lies in `folder`, beside its pyproject.toml."""
    environ = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"}
    command = (str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package, to plant in."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HOUSE, tmp_path / "parallel3d", ignore=ignored)
    return tmp_path


def plant(copy: Path, file: str, code: str) -> None:
    path = copy / "parallel3d" / file
    path.write_text(path.read_text(encoding="utf-8") + code, encoding="utf-8")


def test_every_room_imports_downwards_and_arithmetic_without_torch() -> None:
    code, said = lint(ROOT)
    assert code == 0, said


def test_an_import_upwards_or_of_torch_is_found_wherever_it_stands(copy: Path) -> None:
    plant(copy, "comm/exchange.py", "\nfrom parallel3d.metrics import jsonl\n")
    plant(copy, "optim/state.py", "\ndef f():\n    from parallel3d.trainer import Trainer\n")
    plant(copy, "data/tokens.py", "\nif TYPE_CHECKING:\n    import parallel3d.run.worker\n")
    plant(copy, "config/fields.py", "\nfrom parallel3d.topology import layout\n")
    plant(copy, "files/reading.py", "\ndef f():\n    import torch.distributed\n")
    code, said = lint(copy)
    assert code != 0
    for edge in (
        "parallel3d.comm.exchange -> parallel3d.metrics.jsonl",
        "parallel3d.optim.state -> parallel3d.trainer",
        "parallel3d.data.tokens -> parallel3d.run.worker",
        "parallel3d.config.fields -> parallel3d.topology.layout",
        "parallel3d.files.reading -> torch",
    ):
        assert edge in said, edge


@pytest.mark.parametrize("room", ["attic", "topology/attic"])
def test_a_new_room_needs_a_line(copy: Path, room: str) -> None:
    (copy / "parallel3d" / room).mkdir()
    (copy / "parallel3d" / room / "__init__.py").touch()
    code, said = lint(copy)
    assert code != 0
    assert "attic" in said


def test_no_room_takes_a_name_from_the_front_door() -> None:
    """The contract does not follow these names to where they come from."""
    names = set(parallel3d.__all__) - {"__version__"}
    taken = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "parallel3d":
                taken += [(path, alias.name) for alias in node.names if alias.name in names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                of_door = node.value.id == "parallel3d" and node.attr in names
                taken += [(path, node.attr)] if of_door else []
    assert not taken


@pytest.mark.parametrize("folder", SCRIPTS)
def test_no_script_has_a_name_of_pythons_own(folder: str) -> None:
    """`python folder/script.py` imports its neighbours first: one named tokenize broke them all."""
    names = {path.stem for path in (ROOT / folder).glob("*.py")}
    assert names and not names & sys.stdlib_module_names


def test_imports_stand_at_the_top_but_for_those_with_a_reason() -> None:
    found = {
        (str(path), module)
        for path, tree in trees()
        for node in functions(tree)
        for module in imported(node)
    }
    rows = [row for files in INNER.values() for row in files.items()]
    allowed = {(path, module) for path, modules in rows for module in modules.split()}
    assert found - allowed == set(), "move it to the top of its file, or say why not"
    assert allowed - found == set(), "these are gone: take them out of the list"


def test_the_picture_shows_an_import_upwards_in_red(copy: Path) -> None:
    before = HOUSE_PY["picture"](copy).count('class="wrong"')
    plant(copy, "errors.py", "\ndef f():\n    from parallel3d.topology import layout\n")
    assert HOUSE_PY["picture"](copy).count('class="wrong"') == before + 1


def test_the_table_of_rooms_names_each_once_in_the_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("\n## Rooms\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    named = [name.strip("`/") for row in rows for name in row.replace("topology/", "").split(", ")]
    ordered = [name.removeprefix("topology.") for name in HOUSE_PY["order"]()]
    assert [name.removesuffix(".py") for name in named] == ordered
