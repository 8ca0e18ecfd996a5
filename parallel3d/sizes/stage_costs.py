"""What the stages of a pipeline compute, by the sizes of the model."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.recompute import parts_of
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.schedules.choose import Weights
from parallel3d.schedules.placement import StageAssignment
from parallel3d.sizes.balance import balance_chunks, layers_per_stage_given
from parallel3d.sizes.recompute import flops_again, layer_flops, recomputing

# The head makes its gradients with its loss, in the forward (`tensor_parallel/head_loss.py`).
HEAD_PRODUCTS = 3


def layer_cost(model: ModelConfig) -> float:
    """Forward FLOPs of one layer and token."""
    return sum(layer_flops(model))


def head_cost(model: ModelConfig) -> float:
    """Forward FLOPs of the output head for one token, padding included."""
    return 2.0 * model.hidden_size * model.padded_vocab_size


@dataclass(frozen=True)
class StageWeights:
    """By placement, what each stage weighs in layers of an average rank (see `choose.Work`).

    A look-up in the embedding takes next to no time.

    Args:
        layer, head: their costs, in one unit. ranks: of the pipeline.
        again: of a layer's forward, what the backward of one that recomputes makes again.
        recompute_layers: of each stage (see `recomputing`); of another number of them: all.
        given: `schedule.layers_per_stage`, if there is one: then no placement with other stages
            fits, unless `balances` says that those are balanced.
    """

    layers: int
    layer: float
    head: float
    ranks: int
    given: tuple[int, ...] | None = None
    balances: bool = False
    again: float = 0.0
    recompute_layers: tuple[int, ...] = ()

    @classmethod
    def of_run(cls, config: Config, balances: bool = False) -> StageWeights:
        model, given = config.model, config.schedule.layers_per_stage
        costs = layer_cost(model), head_cost(model)
        kept = None if given is None else tuple(given)
        again = flops_again(model, parts_of(config.recompute)) / costs[0]
        some = tuple(config.recompute_layers or ())
        return cls(model.num_layers, *costs, config.pp, kept, balances, again, some)

    def __call__(self, placement: StageAssignment) -> Weights | None:
        """None: the model cannot be laid out so."""
        stages, layers = placement.stages, self.layers
        is_given = self.given is not None and len(self.given) == stages
        if stages > layers or not (is_given or self.given is None or self.balances):
            return None
        if is_given:
            sizes = placement.ranks, placement.chunks
            counts = layers_per_stage_given(self.given, layers, *sizes)
        else:
            counts = balance_chunks(self.layer, layers, placement, last_extra=self.head)
        extras = [0.0] * (stages - 1) + [HEAD_PRODUCTS * self.head / self.layer]
        given = self.recompute_layers if len(self.recompute_layers) in (1, stages) else ()
        again = [
            self.again * recomputing(given, stage, count) for stage, count in enumerate(counts)
        ]
        of_rank = layers / self.ranks
        return [
            (n / of_rank, more / of_rank, twice / of_rank)
            for n, more, twice in zip(counts, extras, again, strict=True)
        ]
