"""Tests benchmarks/compiled/kernels.py without Triton: its cases, figures, tables and refusals."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import parallel3d
from benchmarks.compiled import calls as compiled_calls
from benchmarks.compiled import kernels as compiled_kernels
from benchmarks.compiled.calls import Call, fused_functions, uncalled
from benchmarks.compiled.table import compiled_table, faults, interpreted_table, resources
from tests.e2e.ready import run_module

pytestmark = pytest.mark.more

PACKAGE = Path(parallel3d.__file__).parent

# The output of Triton 3.6's cuobjdump for a norm's kernel, and for the same one limited to 32
# registers.
WHOLE = """
Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:8
 Function rms:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:576 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SPILLING = WHOLE.replace("REG:168 STACK:0", "REG:32 STACK:664")


def test_registers_and_spilled_bytes_are_read_from_cuobjdump() -> None:
    assert resources(WHOLE) == {"registers": 168, "spilled": 0}
    assert resources(SPILLING) == {"registers": 32, "spilled": 664}
    assert resources(SPILLING.replace("LOCAL:0", "LOCAL:8"))["spilled"] == 672


@pytest.mark.parametrize("text", ["", "Resource usage:\n Common:\n  GLOBAL:0\n", WHOLE + WHOLE])
def test_output_that_does_not_describe_one_function_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the resources of one function"):
        resources(text)


@pytest.mark.slow
def test_every_decorated_function_is_in_the_list() -> None:
    decorated = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("parallel3d", *path.relative_to(PACKAGE).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            names = (n for d in node.decorator_list for n in ast.walk(d) if isinstance(n, ast.Name))
            if any(name.id == "fused" for name in names):
                decorated.add(f"{module}.{node.name}")
    assert decorated
    assert fused_functions() == decorated


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["large", "small"])
def test_training_steps_call_every_function(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the steps in another process, which has the simulated device."""
    calls, out = str(tmp_path / "calls.pt"), tmp_path / "uncalled.json"
    ended = run_module("benchmarks.compiled.calls", kind, calls)
    assert ended.returncode == 0, ended.stderr
    monkeypatch.setattr(sys, "argv", ["compiled_calls", "uncalled", str(out), calls])
    compiled_calls.main()
    assert json.loads(out.read_text()) == []


def test_a_function_without_a_call_is_named() -> None:
    found = uncalled([Call("", "parallel3d.models.ops", "swiglu_forward", ())])
    assert "parallel3d.models.ops.swiglu_backward" in found
    assert "parallel3d.models.ops.swiglu_forward" not in found


def compiled_row(card: str, registers: int, spilled: int = 0, **more: Any) -> dict[str, Any]:
    one = {"blocks": "XBLOCK=512", "registers": 8, "spilled": 0, "shared": 0, "warps": 8}
    other = one | {"registers": registers, "spilled": spilled, "shared": 2048}
    kernel = {"kernel": "triton_poi", "launches": 2, "bytes": 3000, "candidates": [one, other]}
    row = {"card": card, "case": "llama_1b", "function": "swiglu_forward", "elements": 1000}
    return row | {"kernels": [kernel]} | more


def interpreted_row(is_right: bool = True, kind: str = "torch.bfloat16") -> dict[str, Any]:
    result = {"type": kind, "elements": 4, "error": 0.00123, "is_right": is_right}
    place = {"card": "H100", "case": "dropout", "function": "drop", "kind": "as called"}
    return place | {"launches": 1, "results": [result]}


def test_the_table_has_the_most_of_any_candidate_and_the_cards_side_by_side() -> None:
    lines = compiled_table([compiled_row("H100", 32), compiled_row("B200", 40)]).splitlines()
    assert len(lines) == 3
    assert "H100: registers" in lines[0] and "B200: registers" in lines[0]
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:4] == ["`swiglu_forward`", "llama_1b", "2", "6.0"]
    assert cells[4:] == ["32", "0", "2,048", "40", "0", "2,048"]
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


def test_two_calls_of_one_size_are_two_lines() -> None:
    rows = [compiled_row(card, n) for card in ("H100", "B200") for n in (32, 48)]
    lines = compiled_table(rows).splitlines()[2:]
    assert [line.split("|")[5].strip() for line in lines] == ["32", "48"]
    assert [line.split("|")[8].strip() for line in lines] == ["32", "48"]


def test_unavailable_gpu_figures_are_shown_as_a_dash() -> None:
    refused = compiled_row("B200", 0, error="RuntimeError: no") | {"kernels": []}
    line = compiled_table([compiled_row("H100", 32), refused]).splitlines()[2]
    assert line.endswith("| 32 | 0 | 2,048 | – | – | – |")


def test_errors_of_the_interpreter_are_shown_by_type() -> None:
    rows = [interpreted_row(), interpreted_row(kind="torch.int32")]
    line = interpreted_table(rows).splitlines()[2]
    assert line == "| `drop` | 2 | 1.2e-03 | – | equal |"


def test_without_faults_none_are_reported() -> None:
    assert faults([compiled_row("H100", 32)], [interpreted_row()], []) == []


@pytest.mark.parametrize(
    ("compiled", "interpreted", "uncalled_names", "said"),
    [
        ([compiled_row("H100", 255, spilled=24)], [], [], "triton_poi spills 24 bytes with XBLOCK"),
        ([compiled_row("H100", 32, error="PTXASError: no")], [], [], "swiglu_forward: PTXASError"),
        ([], [interpreted_row(is_right=False)], [], "result 0 differs by 1.2e-03"),
        ([], [interpreted_row() | {"error": "InterpreterError: no"}], [], "drop: InterpreterErr"),
        ([], [], ["parallel3d.models.ops.f"], "no training step calls parallel3d.models.ops.f"),
    ],
)
def test_each_fault_is_found(
    compiled: list, interpreted: list, uncalled_names: list[str], said: str
) -> None:
    (fault,) = faults(compiled, interpreted, uncalled_names)
    assert said in fault


@pytest.mark.parametrize(
    ("has_triton", "compiler", "said"),
    [(False, sys.executable, "Triton is not installed"), (True, "no-such-c++", "no C++ compiler")],
)
def test_a_missing_compiler_is_reported_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_triton: bool,
    compiler: str,
    said: str,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_triton else None)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(sys, "argv", ["compiled_kernels"])
    monkeypatch.setattr(compiled_kernels, "worker", lambda *_, **__: pytest.fail("it went on"))
    assert compiled_kernels.main() == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and said in told.err
