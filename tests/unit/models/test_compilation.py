"""Tests `compile=true`: which rank compiles when, on a CPU host and on one with accelerators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.fx import GraphModule

from parallel3d import private_names
from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.comm.group import SINGLE
from parallel3d.models import checkpointing, transformer
from parallel3d.models.transformer import (
    VARIANTS,
    BuildContext,
    Stage,
    compile_blocks,
    different_graphs,
    graph_size,
)
from parallel3d.parameters.initializer import Initializer
from tests.kernels import no_kernels
from tests.unit.models.test_checkpointing import MODEL, NOTHING, hidden, middle_stage


@pytest.mark.nightly
@pytest.mark.parametrize("on_accelerator", [False, True])
def test_ranks_take_turns_to_compile_on_a_cpu_only(
    on_accelerator: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Puts the locks in `tmp_path`; the compiler itself keeps its cache, and so its headers."""
    from torch._inductor import codecache, cpp_builder  # noqa: F401  (they know the real folder)

    monkeypatch.setattr(private_names, "inductor_cache", lambda: str(tmp_path))
    if on_accelerator:
        monkeypatch.setattr(checkpointing, "is_on_accelerator", lambda tensor: True)
    torch._dynamo.reset()
    stage = middle_stage("none", layers=1)
    compile_blocks([stage], saves_operands=False)
    # A graph that another test has compiled would be taken from there.
    with no_kernels(), torch._functorch.config.patch(enable_autograd_cache=False):
        stage(hidden(), *NOTHING).sum().backward()
    assert bool(list(tmp_path.glob("parallel3d-*.lock"))) != on_accelerator


FAR, NEAR = "full", "sliding"
GEMMA = [*[NEAR] * 5, FAR]
# a list of layers without a period, as that of a pruned model
IRREGULAR = [NEAR if n * n % 11 < 5 else FAR for n in range(80)]


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ([FAR] * 80, 8),
        (GEMMA * 10 + GEMMA[:2], 6),
        ([NEAR, FAR] * 24, 8),
        ([NEAR] * 20 + [FAR], 8),  # the last layer differs: three different graphs
        (IRREGULAR, 1),
        ([*[NEAR] * 9, FAR] * 8, 1),  # the period is longer than a graph
        ([FAR], 8),
    ],
)
def test_graphs_have_whole_periods_of_the_layers_or_one_block(
    pattern: list[str], size: int
) -> None:
    assert graph_size(pattern, pattern) == size


@pytest.mark.slow
def test_many_layers_without_a_period_train_compiled() -> None:
    """Compiles with a backend that only traces, in each of the two modes of a run."""
    model = replace(
        MODEL,
        num_layers=len(IRREGULAR),
        layer_types=IRREGULAR,
        sliding_window=5,
    )
    context = BuildContext(Initializer(5, torch.float32, torch.device("cpu")), SINGLE, sp=False)
    stage = Stage(model, StageBlueprint.plain(range(80)), context)
    assert different_graphs([stage]) == 2
    traced: list[object] = []

    def trace(graph: GraphModule, inputs: object) -> object:
        traced.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with patch.object(transformer, "shared_inductor", trace):
        compile_blocks([stage], saves_operands=False)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            stage(hidden(), *NOTHING)
    assert len(traced) <= 8  # not one for each of 80 layers


@pytest.mark.slow
def test_stages_of_one_rank_that_begin_anywhere_in_a_pattern_raise_dynamos_limit() -> None:
    model = replace(MODEL, num_layers=40, layer_types=GEMMA, sliding_window=5)
    context = BuildContext(Initializer(5, torch.float32, torch.device("meta")), SINGLE, sp=False)
    held = [StageBlueprint.plain(range(n, n + 7)) for n in (0, 7, 14, 21)]
    stages = [Stage(model, each, context) for each in held]
    with patch.object(torch, "compile", wraps=torch.compile) as compiled:
        compile_blocks(stages, saves_operands=False)
    needed = {call.kwargs.get("recompile_limit") for call in compiled.call_args_list}
    # Four graphs of six layers, each a layer further, and two kinds of a single layer.
    assert needed <= {VARIANTS * 6, None}
