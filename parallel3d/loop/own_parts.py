"""Holds the parts of a run that a script brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel3d.data.sampler import Finite, SampleSource
from parallel3d.errors import UserError
from parallel3d.loop.hooks import Hook
from parallel3d.run_config import Config

if TYPE_CHECKING:
    from parallel3d.optim.own import OptimizerFactory

# Samples, or a function that makes them on each rank from the run's configuration.
Samples = SampleSource | Callable[[Config], SampleSource]


@dataclass(frozen=True)
class OwnParts:
    """The parts of a run that a script gives `fit`; what it leaves out is the configuration's.

    Attributes:
        hooks: hooks around the steps, in the order in which they are called.
        train, valid: the samples to train on and the held-out samples; without `train`, both are
            those of the configuration.
        optimizer: makes the optimizer of parameter groups.
    """

    hooks: Sequence[Hook] = ()
    train: Samples | None = None
    valid: Samples | None = None
    optimizer: OptimizerFactory | None = None


def opened(given: Samples | None, name: str, config: Config) -> SampleSource | None:
    """Returns the samples that a script gave as `name`. Raises UserError if they do not fit."""
    if given is None:
        return None
    is_source = hasattr(given, "sample") and not isinstance(given, type)
    source = given if is_source else given(config)  # type: ignore[operator]
    if not hasattr(source, "sample") or not hasattr(source, "seq_length"):
        raise UserError(
            f"fit({name}=…) must give an object with seq_length and sample(i), or a function of "
            f"the configuration that returns one, but gives {type(source).__name__}"
        )
    if source.seq_length != config.model.seq_length:
        raise UserError(
            f"fit({name}=…) has samples of {source.seq_length} tokens, but must have "
            f"model.seq_length={config.model.seq_length}; the nearest is "
            f"model.seq_length={source.seq_length}"
        )
    if name == "valid" and config.train.eval_batches is None and not isinstance(source, Finite):
        raise UserError(
            "train.eval_batches=null evaluates all samples of fit(valid=…), so their object must "
            "have their number as windows; the nearest is train.eval_batches=8"
        )
    return source
