"""Batches with masked targets for `p3d.Pipeline`: the loss of the whole batch, or a sentence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d as p3d
from benchmarks.inputs.door_inputs.answers import Input
from parallel3d.comm.group import SINGLE

CLASSES, WIDTH = 4, 3
PLACES = 10  # tolerance of the losses that are compared


def inputs(rng: random.Random, folder: Path) -> Iterator[Input]:
    while True:
        count, length = rng.choice((1, 2, 4)), rng.choice((1, 3, 5))
        ignored = rng.choice((-100, -100, -100, -1, 0, 3))
        stream = torch.Generator().manual_seed(rng.randrange(1 << 30))
        x = torch.randn(count * 2, length, WIDTH, generator=stream, dtype=torch.float64)
        y = torch.randint(CLASSES, (count * 2, length), generator=stream)
        how = rng.choice(("none", "alike", "any", "any", "one", "most"))
        _mask(rng, y, how, ignored)
        if not int((y != ignored).sum()):
            continue
        named: dict[str, Any] = {} if ignored == -100 else {"ignore_index": ignored}
        by_class = rng.random() < 0.2
        if by_class:
            named["weight"] = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
        loss_name = rng.choice(("partial", "module", "flat lambda"))
        if loss_name == "flat lambda" and named:
            continue  # parallel3d cannot see the arguments inside a lambda
        loss_fn = _loss(loss_name, named)
        weight = None
        if rng.random() < 0.4:
            weight = partial(_weight, ignored, named.get("weight"))
        with torch.no_grad():
            right = round(float(_loss(loss_name, named)(_model()(x), y)), PLACES)
        masked = count > 1 and (how not in ("none", "alike") or by_class)
        text = f"{count} micro-batches, {how} masked as {ignored}, {loss_name}, " + (
            f"{'class weights, ' * by_class}{'weight=' if weight else 'no weight='}"
        )
        take = partial(_taken, x, y, count, loss_fn, weight)
        known = loss_name != "flat lambda"  # torch's own function or module
        yield Input(text, take, right, common=known or not masked or weight is not None)


def _mask(rng: random.Random, y: Tensor, how: str, ignored: int) -> None:
    y[y == ignored] = (ignored + 1) % CLASSES if 0 <= ignored < CLASSES else 0
    for number, row in enumerate(y):
        if how == "alike":
            row[-1] = ignored  # as with labels that are shifted by one
        elif how == "any":
            row[rng.randrange(len(row) + 1) :] = ignored
        elif how == "most" or (how == "one" and number == 0):
            row[1:] = ignored


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES), Last()).double()


class Last(nn.Module):
    """Maps (b, s, classes) → (b, classes, s), as torch's losses take it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def _loss(name: str, named: dict[str, Any]) -> Callable[..., Tensor]:
    if name == "module":
        return nn.CrossEntropyLoss(**named)
    return partial(F.cross_entropy, **named) if name == "partial" else _plain


def _plain(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def _weight(ignored: int, of_class: Tensor | None, y: Tensor) -> Tensor:
    kept = y[y != ignored]
    return torch.tensor(len(kept)) if of_class is None else of_class[kept].sum()


def _taken(x: Tensor, y: Tensor, count: int, loss_fn: Callable[..., Tensor], weight: Any) -> float:
    pipe = p3d.Pipeline(
        list(_model()), SINGLE, loss_fn=loss_fn, weight=weight, num_microbatches=count
    )
    loss = pipe.step(x, y)
    alone = _model()
    loss_fn(alone(x), y).backward()
    for mine, theirs in zip(pipe.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    return round(float(loss), PLACES)
