"""Says which defaults, made for a model of 0.9 M parameters, a large model is trained with."""

from __future__ import annotations

from operator import attrgetter

from parallel3d.config.fields import all_keys, spell
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.estimate.ops import parameter_count
from parallel3d.metrics.text import si

LARGE = 100  # times the parameters of the default model, and times its vocabulary
# What a recipe sets for its model. One of the first two at its default is enough to speak.
TELLING = ("precision.name", "optim.lr")
OTHERS = ("optim.lr_warmup_steps", "global_batch_size")


def toy_defaults(config: Config) -> str | None:
    """Returns a sentence on defaults that do not suit the model; None where nothing is to say."""
    keys, small = all_keys(), ModelConfig()
    wrong = []
    parameters = parameter_count(config.model)
    if parameters > LARGE * parameter_count(small):
        left = [name for name in TELLING + OTHERS if attrgetter(name)(config) == keys[name].default]
        if config.optim.lr_warmup_fraction > 0 and OTHERS[0] in left:
            left.remove(OTHERS[0])
        if set(TELLING) & set(left):
            wrong += [spell(name, keys[name].default) for name in left]
    if config.data.reads_bytes and config.model.vocab_size > LARGE * small.vocab_size:
        wrong.append(f"data={config.data.name} (bytes)")
    if not wrong:
        return None
    return (
        f"{config.model.name} has {si(parameters)}parameters and is trained with defaults for one "
        f"of {si(parameter_count(small)).strip()}: {', '.join(wrong)}; parallel3d recipes lists "
        "configurations for such models"
    )
