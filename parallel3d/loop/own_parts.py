"""Holds the parts of a run that a script brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from parallel3d.data.sampler import FieldSource, Finite, SampleSource
from parallel3d.errors import UserError
from parallel3d.loop.hooks import Hook
from parallel3d.models.survey import OwnModelConfig
from parallel3d.run_config import AnyConfig, Config

if TYPE_CHECKING:
    from parallel3d.optim.own import OptimizerFactory

# Samples, or a function that makes them on each rank from the run's configuration. Only a model of
# the script's own takes those of any form (`FieldSource`).
Source = SampleSource | FieldSource
Samples = Source | Callable[[Config], Source]


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


def with_example(config: AnyConfig, own: OwnParts | None) -> AnyConfig:
    """Returns the configuration whose own model has an example of the script's samples.

    Dry runs and traces of layers need its shapes. Other configurations are returned as they are.
    """
    if own is None or own.train is None or not isinstance(config.model, OwnModelConfig):
        return config
    source = opened(own.train, "train", config)
    assert source is not None
    return replace(config, model=replace(config.model, example=source.sample(0)))


def opened(given: Samples | None, name: str, config: Config) -> SampleSource | None:
    """Returns the samples that a script gave as `name`. Raises UserError if they do not fit.

    Samples for a model of the script's own may have any form, and then need no `seq_length`.
    """
    if given is None:
        return None
    is_source = hasattr(given, "sample") and not isinstance(given, type)
    source: Any = given if is_source else given(config)  # type: ignore[operator]
    model = config.model
    is_own = isinstance(model, OwnModelConfig)
    has_length = hasattr(source, "seq_length")
    if not callable(getattr(source, "sample", None)) or not (has_length or is_own):
        raise UserError(
            f"fit({name}=…) must give an object with {'' if is_own else 'seq_length and '}"
            "sample(i), or a function of the configuration that returns one, but gives "
            f"{type(source).__name__}"
        )
    is_of_text = model.is_of_text if isinstance(model, OwnModelConfig) else True
    if has_length and is_of_text and source.seq_length != model.seq_length:
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
