"""Says what the trace of a layer depends on."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.dispatch import most_load
from parallel3d.blueprint.layout import Layout
from parallel3d.models.declared import KnownModel, LayerKind
from parallel3d.models.repeats import NOTHING
from parallel3d.models.survey import OwnModelConfig


def digest_of(facts: Any) -> str:
    """Returns a digest of dataclasses, and of what JSON can hold."""
    text = json.dumps(facts, sort_keys=True, default=vars)
    return hashlib.sha256(text.encode()).hexdigest()


# Keys of a model that no layer reads: models that differ only in them have the same traces.
OF_NO_LAYER = frozenset(
    (
        *("name", "num_layers", "max_position_embeddings", "tie_embeddings"),
        *("vocab_size", "vocab_multiple", "logit_scale", "logit_cap"),
    )
)


@functools.lru_cache(maxsize=64)
def digest_of_layers(of: KnownModel) -> str:
    """Returns a digest of all keys of a model that its layers depend on."""
    model = of.model
    if isinstance(model, OwnModelConfig):  # only its code knows what its blocks depend on
        return digest_of(model)
    facts = {key: value for key, value in vars(model).items() if key not in OF_NO_LAYER}
    return digest_of([facts, model.ropes])  # a stage has tables for all layers' rotary positions


@dataclass(frozen=True, eq=False)
class WantedTrace:
    """A layer of one rank whose trace is wanted; those with the same `key` have the same.

    Attributes:
        blueprint: a run with such a layer, without dimensions that do not change what it does.
        layer: number of the layer in the model.
        recomputed: whether the backward repeats a part of its forward.
        of_inputs: whether its input has a gradient.
        sharded: whether FSDP2 gathers its parameters.
        defers: whether the trace must cover a backward that defers the gradients of weights.
        sizes: numbers of sequences in a micro-batch, which the trace must cover.
    """

    blueprint: Blueprint
    layer: int
    recomputed: bool
    of_inputs: bool
    sharded: bool
    defers: bool
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, blueprint: Blueprint, layer: int, recomputed: bool) -> WantedTrace:
        """Returns the wanted trace of a layer of a run."""
        tp, cp, ep = blueprint.layout.tp, blueprint.layout.cp, blueprint.layout.ep
        dp = ep // math.gcd(ep, tp * cp) if ep else 1
        # No rank has more than the tokens of its group.
        load = min(blueprint.load, most_load(blueprint.model, ep)) if ep > 1 else 1.0
        return cls(
            replace(blueprint, layout=Layout(tp=tp, cp=cp, dp=dp, ep=ep), load=load),
            layer,
            recomputed and bool(blueprint.layer.repeats),
            blueprint.first_trained < layer,
            blueprint.data.zero > 1 and blueprint.layout.most_copies > 1,
            blueprint.pipeline.may_split,
            (blueprint.micro_batch_size,),
        )

    @property
    def tokens(self) -> int:
        """Tokens of a sequence in this rank's part of the residual stream."""
        run = self.blueprint
        return run.local_seq_length // (run.layout.tp if run.sequence_parallel else 1)

    @functools.cached_property
    def key(self) -> str:
        """A digest of all that the trace depends on, but for the versions of the software."""
        run, kind = self.blueprint, LayerKind.of(self.blueprint.model, self.layer)
        settings = dict(vars(run.layer))
        if not self.recomputed:
            settings |= {"repeats": NOTHING, "mlp_chunks": 1}
        if run.layout.cp == 1:
            settings |= {"cp_style": "", "cp_balance": False, "cp_states": ""}
        if run.layout.ep <= 1:
            settings["dispatch"] = ""
        prefix = f"layers.{self.layer}."
        facts: dict[str, Any] = {
            "model": digest_of_layers(run.known_model),
            "kind": kind,
            "sizes": (run.layout.tp, run.layout.cp, run.layout.ep, run.local_seq_length),
            "settings": settings,
            "precision": run.precision.name,
            "balance": (run.balance.aux_loss > 0, run.balance.z_loss > 0, run.balance.routing),
            "load": run.load,
            "frozen": sorted(n.removeprefix(prefix) for n in run.frozen if n.startswith(prefix)),
            "recomputed": self.recomputed,
            "of_inputs": self.of_inputs,
            "sharded": self.sharded,
        }
        return digest_of(facts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WantedTrace) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)
