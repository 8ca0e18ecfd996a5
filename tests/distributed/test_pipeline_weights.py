"""Tests that a pipeline's loss is the mean over the unmasked targets, however micro-batches share
them.

It is compared with one process in fp64 that takes the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d as p3d
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

MICROBATCHES, CLASSES, LENGTH = 4, 5, 6
CLASS_WEIGHTS = torch.arange(1.0, 6.0, dtype=torch.float64)


def modules() -> list[nn.Module]:
    torch.manual_seed(2)
    return [nn.Linear(3, 8).double(), nn.Tanh(), nn.Linear(8, CLASSES).double()]


def batch(replica: int, kept: tuple[int, ...], ignored: int = -100) -> tuple[Tensor, Tensor]:
    """`kept`: the number of learned targets of each micro-batch's sequence."""
    stream = torch.Generator().manual_seed(replica)
    x = torch.randn(MICROBATCHES, LENGTH, 3, generator=stream, dtype=torch.float64)
    y = torch.randint(CLASSES, (MICROBATCHES, LENGTH), generator=stream)
    for row, count in zip(y, kept, strict=True):
        row[count:] = ignored
    return x, y


def loss_of(out: Tensor, y: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), **how)


def count(y: Tensor) -> Tensor:
    return (y != -100).sum()


# Name → (loss_fn, weight, numbers of learned targets, value of the other targets).
TAKEN: dict[str, tuple[Callable[..., Tensor], Any, tuple[int, ...], int]] = {
    "uneven": (loss_of, count, (6, 1, 3, 2), -100),
    "one has none": (loss_of, count, (0, 5, 6, 2), -100),
    "all": (loss_of, count, (6, 6, 6, 6), -100),
    "a number": (loss_of, lambda y: float(count(y)), (6, 1, 3, 2), -100),
    "padding": (partial(loss_of, ignore_index=3), lambda y: (y != 3).sum(), (6, 1, 3, 2), 3),
    "classes": (
        partial(loss_of, weight=CLASS_WEIGHTS),
        lambda y: CLASS_WEIGHTS[y[y >= 0]].sum(),
        (6, 1, 3, 2),
        -100,
    ),
}


def alone(name: str, replicas: int) -> tuple[list[float], float, dict[str, Tensor]]:
    """Returns the mean loss of each replica's batch, the mean loss of all, and its gradients."""
    loss_fn, _, kept, ignored = TAKEN[name]
    net = nn.Sequential(*modules())
    batches = [batch(r, kept[r:] + kept[:r], ignored) for r in range(replicas)]
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    loss = loss_fn(net(x), y)
    loss.backward()
    own = [float(loss_fn(net(x), y)) for x, y in batches]
    return own, float(loss), {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def trained(replicas: int) -> None:
    groups = p3d.init(pp=2, device="cpu")
    for name, (loss_fn, weight, kept, ignored) in TAKEN.items():
        own, _, grads = alone(name, replicas)
        for schedule in ("1f1b", "zb_h1"):
            pipe = p3d.Pipeline(
                modules(), groups.pp, loss_fn=loss_fn, weight=weight, schedule=schedule,
                num_microbatches=MICROBATCHES, dp=groups.dp,
            )  # fmt: skip
            r = groups.dp.index
            x, y = batch(r, kept[r:] + kept[:r], ignored)
            for times in (1, 2):  # gradients are added to existing ones
                loss = pipe.step(x if pipe.is_first else None, y if pipe.is_last else None)
                assert float(loss) == pytest.approx(own[r], rel=1e-12), name
                for key, parameter in pipe.named_parameters():
                    torch.testing.assert_close(
                        parameter.grad, times * grads[key], rtol=1e-12, atol=1e-14, msg=name
                    )
                if replicas > 1:
                    # A second step averages existing gradients again, like any data parallelism.
                    break
            evaluated = pipe.evaluate(x if pipe.is_first else None, y if pipe.is_last else None)
            assert float(evaluated) == pytest.approx(own[r], rel=1e-12), name


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_mean_is_over_all_unmasked_targets(replicas: int, pool: Pool) -> None:
    pool.run(2 * replicas, trained, replicas)


def mean_of_valid(out: Tensor, y: Tensor) -> Tensor:
    return loss_of(out, y, reduction="sum") / 24


# (loss_fn, weight, learned targets, others, dp) → "" if accepted, or the beginning of the error.
UNEVEN, EVEN = (6, 1, 3, 2), (4, 4, 4, 4)
THREES = "the micro-batches have 3, 5, 4, 4 targets of 3, which"
HOLD = "the micro-batches have 0, 5, 3, 4 targets of -100, which the loss leaves out"
MODULE, W = nn.CrossEntropyLoss(), "Pipeline(weight=…)"
CASES: list[tuple[str, Callable[..., Tensor], Any, tuple[int, ...], int, str]] = [
    ("plain", loss_of, None, UNEVEN, -100, HOLD),
    ("in a module", lambda o, y: MODULE(o.flatten(0, 1), y.flatten()), None, UNEVEN, -100, HOLD),
    ("as many", loss_of, None, EVEN, -100, ""),
    ("none", loss_of, None, (6, 6, 6, 6), -100, ""),
    ("other value", partial(loss_of, ignore_index=3), None, UNEVEN, 3, THREES),
    ("other value, no mark", partial(loss_of, ignore_index=9), None, UNEVEN, 3, ""),
    ("a sum", partial(loss_of, reduction="sum"), None, UNEVEN, -100, ""),
    ("its own count", mean_of_valid, lambda y: 1, UNEVEN, -100, ""),
    ("two numbers", loss_of, lambda y: count(y).repeat(2), UNEVEN, -100, f"{W} gave a tensor of"),
    ("negative", loss_of, lambda y: -1.0, UNEVEN, -100, f"{W} gave -1.0, but must"),
    ("no number", loss_of, lambda y: float("nan"), UNEVEN, -100, f"{W} gave nan"),
    ("nothing", loss_of, count, (0, 0, 0, 0), -100, f"{W} is 0 for all micro-batches"),
    ("raises", loss_of, lambda y: y.unknown, UNEVEN, -100, "'Tensor' object has no attribute"),
]  # fmt: skip


def answers() -> list[str]:
    groups, found = p3d.init(pp=2, device="cpu"), []
    weighted = partial(F.cross_entropy, weight=CLASS_WEIGHTS)
    for loss_fn, weight, kept, ignored in [case[1:5] for case in CASES]:
        pipe = p3d.Pipeline(
            modules(), groups.pp, loss_fn=loss_fn, weight=weight, num_microbatches=MICROBATCHES
        )
        found.append(said(pipe, *batch(0, kept, ignored)))
    for loss_fn in (weighted, nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)):
        pipe = p3d.Pipeline(modules(), groups.pp, loss_fn=loss_fn, num_microbatches=MICROBATCHES)
        found.append(said(pipe, torch.ones(8, 3).double(), torch.arange(8) % CLASSES))
    pipe = p3d.Pipeline(modules(), groups.pp, weight=count, num_microbatches=MICROBATCHES)
    found.append(said(pipe, *batch(0, EVEN)))
    later = p3d.Pipeline(modules(), groups.pp, loss_fn=loss_of, num_microbatches=MICROBATCHES)
    found += [said(later, *batch(0, (6, 6, 6, 6))), said(later, *batch(0, UNEVEN))]
    return found


def said(pipe: p3d.Pipeline, x: Tensor, y: Tensor) -> str:
    try:
        pipe.step(x if pipe.is_first else None, y if pipe.is_last else None)
    except Exception as error:
        return str(error)
    return ""


def test_means_that_would_be_wrong_are_refused_on_every_rank(pool: Pool) -> None:
    wanted = [
        *(case[5] for case in CASES),
        *("", ""),  # torch's own divisor is known
        "Pipeline(weight=…) reads the targets of loss_fn",
        *("", HOLD),  # also in a later step
    ]
    first, second = pool.run(2, answers)
    names = [case[0] for case in CASES] + ["classes", "classes", "no loss_fn", "before", "later"]
    for name, mine, theirs, beginning in zip(names, first, second, wanted, strict=True):
        assert (theirs == "") == (beginning == "") == (mine == ""), (name, mine, theirs)
        if name == "raises":
            assert mine.endswith(f"raised AttributeError: {theirs}")
        else:
            assert mine == theirs
        assert theirs.startswith(beginning), name


def over_replicas() -> tuple[str, str]:
    groups = p3d.init(pp=2, device="cpu")
    made = {"dp": groups.dp, "num_microbatches": MICROBATCHES}
    masked = said(p3d.Pipeline(modules(), groups.pp, loss_fn=loss_of, **made), *batch(0, EVEN))
    kept = EVEN if groups.dp.index else (0, 0, 0, 0)  # one replica has nothing to learn
    pipe = p3d.Pipeline(modules(), groups.pp, loss_fn=loss_of, weight=count, **made)
    return masked, said(pipe, *batch(dist.get_rank(), kept))


def test_replicas_with_different_numbers_of_targets_are_weighted(pool: Pool) -> None:
    for masked, weighted in pool.run(4, over_replicas):
        assert masked.startswith("the micro-batches have 2, 2, 2, 2 targets of -100")
        assert weighted == ""
