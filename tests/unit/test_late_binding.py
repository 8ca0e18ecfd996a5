"""Tests that an object gets what it works with from its constructor, and not later by assignment.

The rule: an attribute that a class's constructor sets to a placeholder (None, a constant, a lambda
or a function) is assigned by the methods of that class alone. A class that is no module may leave
it to other code of its own file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallel3d

ROOT = Path(parallel3d.__file__).parent
TYPES = {"tuple", "list", "dict"}
# Attributes that another file assigns, because they change while the object works.
STATE = {
    "first": "the progress of reading chat rows",
    "counts": "what the router decides about a micro-batch",
    "experts": "what the router decides about a micro-batch",
    "watch": "what `verify` observes in its second run",
    "action_times": "a step that is timed",
    "failure": "a batch of the library's pipeline",
    "steps_done": "a run that goes back to its checkpoint",
    "consumed_samples": "a run that goes back to its checkpoint",
    "gathers_state": "a state dict in the making",
    "hook": "a communication hook that a user registers",
}
# Attributes of others' objects and of tuples, whose names the package has too.
OTHERS = {"is_high_priority_stream", "last"}


def targets(tree: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr | None, int]]:
    """Yields the attributes that are assigned, with the assigned value and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            of_node = node.targets
        elif isinstance(node, ast.AnnAssign):
            of_node = [node.target]
        else:
            continue
        for target in of_node:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute):
                    yield one, node.value, node.lineno


def is_self(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls", "ctx")


def placeholders(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yields the attributes of a file's classes, and whether the class is a module."""
    functions = TYPES | {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    classes = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
    for of_class in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
        is_module = any("Module" in ast.unparse(base) for base in of_class.bases)
        for method in of_class.body:
            made = isinstance(method, ast.FunctionDef) and method.name in (
                "__init__",
                "__post_init__",
            )
            for target, value, _ in targets(method) if made else ():
                named = isinstance(value, ast.Name) and value.id in functions
                if isinstance(value, ast.Attribute):  # a method, as in `Block.forward`
                    named = isinstance(value.value, ast.Name) and value.value.id in classes
                if is_self(target) and (named or isinstance(value, ast.Lambda | ast.Constant)):
                    yield target.attr, is_module


def late(files: dict[str, str]) -> list[str]:
    """Returns the assignments that break the rule."""
    trees = {name: ast.parse(text) for name, text in files.items()}
    held: dict[str, set[str]] = {}  # attribute → the files whose own code may assign it
    for name, tree in trees.items():
        for attribute, is_module in placeholders(tree):
            held.setdefault(attribute, set()).update([] if is_module else [name])
    return [
        f"{name}:{line} assigns {ast.unparse(target)}"
        for name, tree in trees.items()
        for target, _, line in targets(tree)
        if not is_self(target) and name not in held.get(target.attr, {name})
    ]


@pytest.mark.slow
def test_nothing_is_given_to_an_object_after_its_construction() -> None:
    files = {str(p.relative_to(ROOT)): p.read_text("utf-8") for p in ROOT.rglob("*.py")}
    found = {line: line.rpartition(".")[2] for line in late(files)}
    known = STATE.keys() | OTHERS
    assert not [line for line, name in found.items() if name not in known]
    assert known <= set(found.values()), "a name is in the list for nothing"


OWNER = """
def usual(): ...
class Trainer:
    def __init__(self):
        self.stop = lambda: False
        self.waiting: object = tuple
        self.offload: object = None
        self.offloaded = 0
        self.run = usual
        self.own = Trainer.step
        self.made = []
"""


@pytest.mark.parametrize("name", ["stop", "waiting", "offload", "offloaded", "run", "own"])
def test_a_placeholder_that_another_file_fills_is_found(name: str) -> None:
    other = f"def build(trainer):\n    trainer.{name} = trainer.made = 1\n"
    assert late({"a.py": OWNER, "b.py": other}) == [f"b.py:2 assigns trainer.{name}"]


def test_a_file_may_fill_its_own_objects_unless_they_are_modules() -> None:
    own = OWNER + "def build(trainer):\n    trainer.run = build\n"
    assert late({"a.py": own}) == []
    module = own.replace("class Trainer:", "class Trainer(nn.Module):")
    assert late({"a.py": module}) == ["a.py:13 assigns trainer.run"]
