"""Tests that planted bugs change the package through `tests/distributed/seams.py` alone, by public
names."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from parallel3d.library import sequences
from parallel3d.models import attention
from tests.distributed import seams
from tests.distributed.seams import ATTENTION, SHARE_OF_NORM, Seam, found, planted

FOLDER = Path(seams.__file__).parent
FILES = [
    *FOLDER.glob("test_mutations*.py"),
    *FOLDER.glob("test_experts_*.py"),
    FOLDER / "test_frozen.py",
    Path(__file__).parent / "experts" / "test_router.py",
    Path(__file__).parent / "models" / "test_gated_deltanet.py",
]
PLANTED = {path.name: ast.parse(path.read_text()) for path in FILES}
SEAMS = {name: seam for name, seam in vars(seams).items() if isinstance(seam, Seam)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_a_seam_is_a_public_function() -> None:
    for place in (place for seam in SEAMS.values() for place in seam.places):
        module, path = place.split(":")
        assert not any(map(is_private, [*module.split("."), *path.split(".")])), place
        owner, attribute, function = found(place)
        assert callable(function), place
        assert getattr(owner, attribute) is function, place  # a plain method, no class method


@pytest.mark.parametrize("file", PLANTED)
def test_planted_bugs_change_the_package_through_seams_alone(file: str) -> None:
    nodes = list(ast.walk(PLANTED[file]))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    imported = {
        a.name for n in nodes if isinstance(n, ast.ImportFrom | ast.Import) for a in n.names
    }
    assert not names & {"setattr", "delattr", "monkeypatch"}
    assert not imported & {"patch", "mock", "unittest.mock", "MonkeyPatch"}
    asked = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
    # Methods of named tuples.
    private = {ast.unparse(node) for node in asked if node.attr != "_replace"}
    assert {name for name in private if not name.startswith("torch.")} == set()


def test_a_bug_is_planted_at_each_seam() -> None:
    named = {
        alias.name
        for tree in PLANTED.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == seams.__name__
        for alias in node.names
    }
    assert SEAMS.keys() - named == set()


def test_a_function_is_replaced_wherever_the_package_has_imported_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = attention.attend_split
    later = ModuleType("parallel3d.imported_later")
    with ATTENTION.replaced(lambda function, *given: (function is sound, *given)):
        assert attention.attend_split is sequences.attend_split is not sound
        assert sequences.attend_split(1, 2) == (True, 1, 2)
        later.attend_split = attention.attend_split  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, later.__name__, later)
    assert attention.attend_split is sequences.attend_split is sound
    assert later.attend_split is sound


def test_a_replaced_method_is_restored_after_an_error() -> None:
    owner, name, sound = found(*SHARE_OF_NORM.places)

    @planted(SHARE_OF_NORM)
    def nothing_counts(function: Any, trainer: Any) -> int:
        assert function is sound
        return 0

    with pytest.raises(KeyError, match="a run"), nothing_counts():
        assert getattr(owner, name)(None) == 0
        raise KeyError("a run")
    assert getattr(owner, name) is sound
