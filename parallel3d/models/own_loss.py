"""Takes the losses that a user's own model returns, and sums them over the micro-batches of a step.

The gradients of a step are those of Σ sum / Σ count over the global batch. The loss itself counts
its items, so the count is known only after the last forward: the backwards start with a scale that
does not contain it, and the optimizer divides by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.errors import UserError

TERM = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]{0,63}")  # the name of a term


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch: a sum and the number of items in it.

    The gradients of a step are those of Σ sum / Σ count over the global batch, however the batch is
    split over micro-batches and ranks. So neither may be a mean, and items that do not count are in
    neither. Under tensor parallelism every rank of tp returns the same loss.

    Attributes:
        sum: the sum of the items' losses, a scalar tensor.
        count: the number of items, a number or a scalar tensor; it may be a sum of weights.
        terms: further figures to log, each as a sum over the same items: their means are recorded.
    """

    sum: Tensor
    count: float | Tensor
    terms: Mapping[str, float | Tensor] = field(default_factory=dict)


class LossSums(NamedTuple):
    """The sums over the micro-batches of one rank in a step, scalar tensors in float64."""

    count: Tensor  # type: ignore[assignment]  # not the method of tuples
    terms: dict[str, Tensor]


class SumsOfLosses:
    """Checks the losses of the last stage, and sums their counts and terms."""

    def __init__(self) -> None:
        self._names: dict[bool, list[str]] = {}  # of terms, by whether the step trains
        self._sums = LossSums(torch.zeros((), dtype=torch.float64), {})

    def add(self, loss: Loss) -> Tensor:
        """Adds the loss of a micro-batch, and returns the tensor with which its backward begins.

        That tensor is in fp32 or better, so that half precision does not round the scale with which
        the backward begins. A step trains if autograd is enabled.

        Raises:
            UserError: if `loss` is no loss, or has other terms than the one before.
        """
        total = checked_sum(loss)
        is_training = torch.is_grad_enabled()
        if is_training and not total.requires_grad:
            raise UserError(
                "the loss returned a sum without a gradient; compute it from the outputs without "
                "detach(), item() or torch.no_grad(), so that backward() reaches the parameters"
            )
        count = checked_count(loss.count, total)
        terms = {name: _term(name, value, total) for name, value in _terms(loss).items()}
        names = self._names.setdefault(is_training, sorted(terms))
        if sorted(terms) != names:
            raise UserError(
                f"the loss returned the terms {_listed(sorted(terms))} for one micro-batch and "
                f"{_listed(names)} for another; return the same names each time, with the sum 0 "
                "for a term without items"
            )
        earlier = self._sums
        if earlier.count.device != count.device:
            earlier = LossSums(earlier.count.to(count.device), earlier.terms)
        sums = {name: term + earlier.terms.get(name, 0.0) for name, term in terms.items()}
        self._sums = LossSums(earlier.count + count, sums)
        return total.to(torch.promote_types(total.dtype, torch.float32))

    def take(self) -> LossSums:
        """Returns the sums of the losses that were added since the last call."""
        sums, self._sums = self._sums, LossSums(torch.zeros_like(self._sums.count), {})
        return sums


def checked_sum(loss: Any) -> Tensor:
    """Returns the sum of a loss. Raises UserError if it is no loss with a scalar sum."""
    if not isinstance(loss, Loss):
        raise UserError(
            f"the loss returned {_said(loss)}, but must return p3d.Loss(sum, count): the summed "
            "losses of this micro-batch, and the number of items in the sum"
        )
    total = loss.sum
    if not isinstance(total, Tensor):
        raise UserError(
            f"the loss returned p3d.Loss(sum=…) with {_said(total)}, but sum must be a tensor with "
            "one element and no dimension, computed from the outputs"
        )
    if total.dim():
        raise UserError(
            f"the loss returned p3d.Loss(sum=…) with {_said(total)}, but sum must have no "
            "dimension: add up the losses of all items with .sum()"
        )
    if not total.is_floating_point():
        raise UserError(
            f"the loss returned p3d.Loss(sum=…) of type {_dtype(total)}, but sum must be a "
            "floating-point tensor, such as float32"
        )
    return total


def checked_count(count: Any, like: Tensor) -> Tensor:
    """Returns a count as a float64 scalar on the device of `like`.

    Raises UserError if it is no number of items. Reading a value of an accelerator would block the
    host, so the values there are checked with the sums of the step (`trainer.check_count`).
    """
    if isinstance(count, Tensor):
        if count.numel() != 1 or count.is_complex():
            raise UserError(
                f"the loss returned p3d.Loss(count=…) with {_said(count)}, but count must be one "
                "number, such as mask.sum()"
            )
        found = count.detach().reshape(()).to(like.device, torch.float64)
        if count.device.type == "cpu":
            _check_count(count.item())
        return found
    try:
        number = float(count)
    except (TypeError, ValueError):
        raise UserError(
            f"the loss returned p3d.Loss(count=…) with {_said(count)}, but count must be the "
            "number of items in the sum, a number or a tensor with one element"
        ) from None
    _check_count(number)
    # A kernel fills the tensor, because copying a number to the device would block the host.
    return torch.full((), number, dtype=torch.float64, device=like.device)


def _check_count(count: float) -> None:
    if not (math.isfinite(count) and count >= 0):
        raise UserError(
            f"the loss returned p3d.Loss(count={count:g}), but count must be a number of items: 0 "
            "or more, and finite"
        )


def _terms(loss: Loss) -> Mapping[str, Any]:
    if not isinstance(loss.terms, Mapping):
        raise UserError(
            f"the loss returned p3d.Loss(terms=…) with {_said(loss.terms)}, but terms must map "
            "names to sums, such as terms={'cross_entropy': losses.sum()}"
        )
    for name in loss.terms:
        if not isinstance(name, str) or not TERM.fullmatch(name):
            raise UserError(
                f"the loss returned the term {name!r}, but a term must be named by a text of up to "
                "64 letters, digits, dots, dashes and underscores that begins with a letter, such "
                f"as {re.sub(r'[^A-Za-z0-9_.-]+', '_', str(name)).strip('_.-0123456789') or 'aux'}"
            )
    return loss.terms


def _term(name: str, value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(like.device, torch.float64)
    if isinstance(value, (int, float)):
        return torch.full((), float(value), dtype=torch.float64, device=like.device)
    raise UserError(
        f"the loss returned the term {name} with {_said(value)}, but a term must be the sum of its "
        "items' values: a number or a tensor with one element"
    )


def _said(value: Any) -> str:
    """Returns what a value is, in words."""
    if isinstance(value, Tensor):
        what = f"a tensor of shape {tuple(value.shape)}" if value.dim() else "a tensor"
        return f"{what} of type {_dtype(value)}"
    if value is None:
        return "None"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"an object of type {type(value).__name__}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    return f"({', '.join(names)})"
