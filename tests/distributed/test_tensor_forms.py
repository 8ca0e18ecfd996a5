"""Tests docs/tensor_parallel.md: its forms have equal results, and send the bytes on the page."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import parallel3d as p3d
from parallel3d.comm.operation_log import OperationLog
from parallel3d.estimate.traffic import transfers
from tests.tools.tensor_forms import FORMS, HEADS, attend

pytestmark = pytest.mark.more

DOCS = Path(__file__).parents[2] / "docs"
PAGE = runpy.run_path(str(DOCS / "tensor_forms.py"))
B, S, H, WORDS = 2, 8, 16, 24
TOLERANCE = 1e-12  # fp64
Calls = list[tuple[str, int]]


def problem(part: str) -> tuple[Tensor, list[Tensor]]:
    """Returns inputs and whole weights."""
    stream = torch.Generator().manual_seed(len(part))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=stream, dtype=torch.float64).requires_grad_()

    if part == "MLP":
        return drawn(B, S, H), [drawn(4 * H, H), drawn(H, 4 * H)]
    if part == "embedding":
        return torch.randint(WORDS, (B, S), generator=stream), [drawn(WORDS, H)]
    return drawn(B, S, H), [drawn(H, H) for _ in range(4)]


def alone(part: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    if part == "MLP":
        return F.linear(F.gelu(F.linear(x, weights[0])), weights[1])
    if part == "embedding":
        return F.embedding(x, weights[0])
    q, k, v = (F.linear(x, weight) for weight in weights[:3])
    return F.linear(attend(q, k, v, HEADS), weights[3])


def gradients(y: Tensor, like: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    """Returns the sum of y times the first numbers of a fixed sequence."""
    return list(torch.autograd.grad((y * like).sum(), wanted))


def each_form() -> dict[tuple[str, str], tuple[Calls, Calls]]:
    """Returns the messages of each form in forward and backward, after checking its results."""
    tp, sent = p3d.init(tp=None, dp=1).tp, {}
    for (part, form), compute in FORMS.items():
        log = OperationLog()
        group = replace(tp, log=log)
        split = "sequence" in form
        x, weights = problem(part)
        wanted = alone(part, x, weights)
        factor = torch.linspace(0, 1, wanted.numel(), dtype=torch.float64).sin().view_as(wanted)
        inputs = [x] if x.requires_grad else []
        right = gradients(wanted, factor, [*weights, *inputs])
        if split:
            wanted, factor, x = (t.chunk(tp.size, 1)[tp.index] for t in (wanted, factor, x))
            x, inputs = x.detach().requires_grad_(), []
            right[-1] = right[-1].chunk(tp.size, 1)[tp.index]
            inputs = [x]
        y = compute(x, tuple(weights), group)
        forward = counted(log, tp.size)
        got = gradients(y, factor, [*weights, *inputs])
        sent[part, form] = forward, counted(log, tp.size)[len(forward) :]
        for gradient in got[: len(weights)]:
            dist.all_reduce(gradient)
        for ours, theirs in zip([y, *got], [wanted, *right], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE, msg=form)
    return sent


def counted(log: OperationLog, ranks: int) -> Calls:
    """Returns collectives and the sizes of their whole buffers."""
    return [
        (call.name, math.prod(call.shape) * (ranks if call.name == "all_gather" else 1))
        for call in sorted(log.latest(1000), key=lambda call: call.number)
    ]


def test_every_form_computes_the_same_and_sends_the_listed_bytes(pool) -> None:
    for ranks in (2, 4):
        sizes = PAGE["Sizes"](B, S, H, HEADS, ranks, 8)
        for sent in pool.run(ranks, each_form):
            for (part, name), (forward, backward) in sent.items():
                form = PAGE["FORMS"][part][name]
                for found, listed in ((forward, form.forward), (backward, form.backward)):
                    wanted = [(call.op, sizes.elements(call.what)) for call in listed]
                    assert found == wanted, (part, name)
    listed = {(part, name) for part, forms in PAGE["FORMS"].items() for name in forms}
    assert listed - set(FORMS) == {("embedding", "a table on every rank")}


def test_our_form_sends_the_bytes_that_the_planner_counts() -> None:
    for sp, name in ((False, "columns, then rows"), (True, "the same, sequence split")):
        config = p3d.compose("tp=2", f"sp={sp}", world_size=2)
        model = config.model
        layout = p3d.Layout(tp=2)
        sizes = PAGE["Sizes"](config.micro_batch_size, model.seq_length, model.hidden_size, 1, 2, 4)
        heads = PAGE["FORMS"]["self-attention"]["whole heads" if not sp else name]
        calls = [c for form in (PAGE["FORMS"]["MLP"][name], heads) for c in (*form[0], *form[1])]
        layer = sum(PAGE["sent"](call, sizes) for call in calls)
        counted = [t for t in transfers(config, layout) if t.what == "activations of the layers"]
        factor = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}
        planned = sum(t.nbytes * t.count * factor[t.op] for t in counted)
        assert planned == layer * model.num_layers * config.num_microbatches


def test_the_page_has_the_generated_tables_and_pictures() -> None:
    page = (DOCS / "tensor_parallel.md").read_text("utf-8")
    for line in PAGE["tables"]().splitlines():
        assert line in page, "run: python docs/tensor_forms.py"
    for name, picture in PAGE["pictures"]().items():
        assert (DOCS / name).read_text("utf-8") == picture, "run: python docs/tensor_forms.py"
        assert f"({name})" in page
