"""Tests the names that `import parallel3d` offers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import parallel3d
from parallel3d.errors import UserError
from parallel3d.run_config import Config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, parallel3d; print(dir(parallel3d)); parallel3d.Layout(tp=2); "
        "print({'torch', 'numpy', 'hydra', 'omegaconf', 'wandb', 'rich'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed, heavy = out.stdout.splitlines()
    assert set(parallel3d.__all__) < set(ast.literal_eval(listed))
    assert heavy == "set()"


def test_every_public_name_exists_and_type_checkers_find_the_same_object() -> None:
    tree = ast.parse(Path(parallel3d.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == parallel3d._HOME
    assert sorted([*typed, "__version__"]) == sorted(parallel3d.__all__)
    for name, module in typed.items():
        assert getattr(parallel3d, name).__module__ == module


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainor'"):
        _ = parallel3d.Trainor


def test_the_library_page_lists_the_public_names() -> None:
    table = "\n".join(re.findall(r"^\| (`.*?) \|", PAGE.split("\n## ")[0], re.MULTILINE))
    assert set(re.findall(r"`(\w+)", table)) == set(parallel3d.__all__) - {"__version__"}


def test_the_reference_has_every_public_name() -> None:
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: parallel3d\.(\w+)$", reference, re.MULTILINE)
    assert sorted(shown) == sorted(set(parallel3d.__all__) - {"__version__"})


@pytest.mark.slow
def test_composing_equals_the_command() -> None:
    config = parallel3d.compose("tp=2", "model=llama_tiny", "train.steps=7", world_size=4)
    assert isinstance(config, Config)
    assert (config.tp, config.dp, config.train.steps) == (2, 2, 7)
    assert config.model.activation == "swiglu"
    assert parallel3d.compose().dp == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("tpp=2", "nearest is tp"),
        ("tp=3", "tp=3 must divide"),
        ("tp=1,2", "several values"),
        ("model=gpt_tinny", "nearest is model=gpt_tiny"),
        ("--tp=2", "without dashes"),
    ],
)
def test_an_invalid_argument_is_refused_in_one_sentence(word: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        parallel3d.compose(word)


def test_a_mistake_of_the_caller_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nearest is tp"):
        parallel3d.compose("tpp=2")
    assert issubclass(UserError, ValueError)
