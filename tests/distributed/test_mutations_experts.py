"""Plants known bugs of mixtures of experts: each is caught, by exactly the named quantities.

This continues test_mutations. Each is a bug that another trainer has had: norms that leave out or
repeat experts, gradients multiplied by a size of the layout, balancing losses divided by the wrong
number, biases that follow other counts, choices that are made again. test_experts_extremes plants
bugs that only show with ties, padding, unused experts or numbers that are not finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.build import Trainer
from parallel3d.data.loader import Batches, MicroBatch
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.experts.balance import Balance, BalanceLosses, BalanceOfRun, ExpertFigures, Tally
from parallel3d.experts.route import TokenRoute
from parallel3d.experts.router import Router, RouterSettings
from parallel3d.experts.rows import Rows
from parallel3d.models.experts import MixtureOfExperts
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.optim.muon import Muon, newton_schulz
from parallel3d.optim.optimizer import Optimizer, sum_of_powers
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.segments import Segment
from parallel3d.parameters.spec import ShardSpec
from parallel3d.parameters.state import spec_of
from tests.distributed.cases import GLOBAL_BATCH, HALVED, Case, Problem
from tests.distributed.harness import References, Sizes, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    ACTIVATION,
    ATTACHED_LOSSES,
    BALANCE_SCALES,
    BIAS_UPDATE,
    BUCKET,
    CHOICE_WEIGHTS,
    CHOSEN,
    EXPERT_GRADIENT,
    EXPERTS,
    INITIAL_VALUES,
    LAYER_OF_EXPERTS,
    LAYER_SUMS,
    MATRICES_OF_TP,
    MICRO_BATCH,
    NORM_GRADIENTS,
    PART_OF_TOKENS,
    ROUTED_TOKENS,
    ROUTER,
    SCORES,
    SHARE_OF_NORM,
    SUMMED_SLOTS,
    TALLY,
    UPDATE,
    UPDATED_BIAS,
    Mutation,
    planted,
)

pytestmark = pytest.mark.more

# The norm


def runs_of_experts(segments: list[Segment]) -> list[tuple[bool, Tensor]]:
    """Returns the gradients of experts, and whether this rank counts them."""
    experts = [s for s in segments if s.spec.is_expert]
    return [(copies.is_first, run.grad) for s in experts for copies, run in s.by_copies()]


def squares_of(grads: list[Tensor], trainer: Trainer) -> Tensor:
    """Returns the sum of the squares of some gradients."""
    return sum_of_powers(grads, trainer.device)


@planted(SHARE_OF_NORM)
def experts_of_other_ranks_left_out(sound: Any, trainer: Trainer, *how: Any) -> Tensor:
    """The norm only knows the experts of the first rank of ep."""
    counted = [grad for first, grad in runs_of_experts(trainer.optimizer.segments) if first]
    left_out = counted if trainer.groups.ep.index > 0 else []
    return sound(trainer, *how) - squares_of(left_out, trainer)


@planted(UPDATE)
def each_rank_clips_by_its_own_experts(
    sound: Any, optimizer: Optimizer, rate: float, norm: float, *how: Any
) -> None:
    """Every rank divides by the norm of its own parameters, as if it held the whole model."""
    own = sum_of_powers([grad for _, grad in runs_of_experts(optimizer.segments)], optimizer.device)
    counted = [grad for first, grad in runs_of_experts(optimizer.segments) if first]
    total = sum_of_powers(counted, optimizer.device)
    dist.all_reduce(total)
    sound(optimizer, rate, (norm**2 - total.item() + own.item()) ** 0.5, *how)


@planted(SHARE_OF_NORM)
def copies_of_experts_counted(sound: Any, trainer: Trainer, *how: Any) -> Tensor:
    """Every rank of edp counts its copies of experts."""
    copies = [grad for first, grad in runs_of_experts(trainer.optimizer.segments) if not first]
    return sound(trainer, *how) + squares_of(copies, trainer)


@planted(SHARE_OF_NORM)
def experts_counted_like_other_matrices(sound: Any, trainer: Trainer, *how: Any) -> Tensor:
    """The first rank of dp and cp counts experts, as if tensor-parallel ranks held different
    ones."""
    runs = runs_of_experts(trainer.optimizer.segments)
    right = [grad for first, grad in runs if first]
    wrong = [grad for _, grad in runs] if trainer.groups.dp_cp.index == 0 else []
    return sound(trainer, *how) - squares_of(right, trainer) + squares_of(wrong, trainer)


@planted(SHARE_OF_NORM)
def biases_in_the_norm(sound: Any, trainer: Trainer, *how: Any) -> Tensor:
    """The norm counts the routers' biases, as if they were gradients."""
    assert trainer.balance is not None
    biases = [*trainer.balance.states.values()] if dist.get_rank() == 0 else []
    return sound(trainer, *how) + squares_of(biases, trainer)


# Gradients


def gradients_times(factor: float) -> AbstractContextManager[None]:
    """The gradients of experts are a mean over ranks, or a sum of too many."""

    def bug(sound: Any, weight: Tensor, grad: Callable[[], Tensor], *how: Any) -> Tensor | None:
        return sound(weight, lambda: grad() * factor, *how)

    return EXPERT_GRADIENT.replaced(bug)


@planted(BUCKET)
def experts_summed_like_other_matrices(
    sound: Any, engine: BucketedDataParallel, index: int
) -> None:
    """Gradients of experts are summed over dp and cp, not over the ranks with the same experts."""
    dense = [b for b in engine.buckets if not spec_of(next(iter(b.params.values()))).is_expert]
    bucket = engine.buckets[index]
    if bucket not in dense:
        bucket.data = dense[0].data
    sound(engine, index)


@planted(NORM_GRADIENTS)
def router_not_summed_over_tp(sound: Any, segments: list[Segment], *groups: Any) -> None:
    """Each rank steps its router by the gradient of its own tokens."""
    with_own(sound, segments, "router", groups)


def with_own(sound: Any, segments: list[Segment], part: str, groups: tuple[Any, ...]) -> None:
    """Sums all gradients over tp, except where a name contains `part`."""
    runs = [run for s in segments for run in s.by_kind(lambda shard: part in shard.name)]
    kept = [(run.grad, run.grad.clone()) for is_part, run in runs if is_part]
    sound(segments, *groups)
    for grad, own in kept:
        grad.copy_(own)


@planted(CHOICE_WEIGHTS)
def weights_without_gradient(sound: Any, *given: Any) -> Tensor:
    """A gather without autograd cuts the router off."""
    return sound(*given).detach()


@planted(ATTACHED_LOSSES)
def losses_not_attached(sound: Any, losses: BalanceLosses, x: Tensor, balance: Balance) -> Tensor:
    """The balancing losses are computed and reported, but nothing differentiates them."""
    return x


@planted(EXPERTS)
def gradient_of_slots_elsewhere(
    sound: Any, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, rows: Rows, *how: Any
) -> Tensor:
    """Choices of other ranks' experts give the router a gradient, although they added nothing."""
    elsewhere = rows.places == len(rows.tokens)
    # an equal gradient of all slots would be normalised away
    nothing = (weights * elsewhere)[:, :1].to(x.dtype)
    return sound(x, weights, up, down, rows, *how) + nothing - nothing.detach()


@contextmanager
def rows_of_another_microbatch() -> Iterator[None]:
    """A deferred gradient uses the rows of the previous micro-batch, which has as many."""
    before: dict[int, Callable[[], Tensor]] = {}

    def bug(sound: Any, weight: Tensor, grad: Any, x: Any, counts: Any) -> Tensor | None:
        exchanged = before.get(id(weight), x)
        before[id(weight)] = x
        return sound(weight, grad, exchanged, counts)

    with EXPERT_GRADIENT.replaced(bug):
        yield


@planted(SUMMED_SLOTS)
def stale_row_behind_the_last(sound: Any, rows: Tensor, places: Tensor) -> Tensor:
    """A choice of another rank's expert reads the last row instead of zeros."""
    return sound(rows, places.clamp(max=len(rows) - 1))


@planted(SUMMED_SLOTS)
def results_of_other_tokens(sound: Any, rows: Tensor, places: Tensor) -> Tensor:
    """Results return to the next token."""
    return sound(rows, places.roll(1, 0))


@planted(ROUTER)
def chosen_again(
    sound: Any, router: Router, x: Tensor, route: TokenRoute, balance: Balance | None
) -> Tensor:
    """A recomputed forward chooses again, and takes the next experts where scores are close."""
    if route.experts is not None:
        route = copy(route)
        route.experts = (route.experts + 1) % router.settings.experts
    return sound(router, x, route, balance)


# Balance


@planted(BALANCE_SCALES)
def by_microbatches(sound: Any, run: BalanceOfRun, balance: Balance, scale: float, *by: Any) -> Any:
    """The losses of micro-batches are means, and their mean is taken again."""
    return sound(run, balance, scale / 2, *by)


@planted(BALANCE_SCALES)
def by_tokens(
    sound: Any, run: BalanceOfRun, balance: Balance, scale: float, batch: int, routed: Tensor
) -> Balance:
    """The auxiliary loss is divided by the number of tokens, like the main loss."""
    return sound(run, balance, scale, batch * 16, routed)


@planted(BALANCE_SCALES)
def by_the_largest_batch(
    sound: Any, run: BalanceOfRun, balance: Balance, scale: float, batch: int, routed: Tensor
) -> Balance:
    """The auxiliary loss does not know that the batch grows."""
    return sound(run, balance, scale, GLOBAL_BATCH, routed)


@planted(BALANCE_SCALES)
def of_own_tokens(
    sound: Any, run: BalanceOfRun, balance: Balance, scale: float, batch: int, routed: Tensor
) -> Balance:
    """The z-loss is a mean over the tokens of a micro-batch."""
    return sound(run, balance, scale, batch, balance.lengths.sum())


@planted(ROUTED_TOKENS)
def by_tokens_of_the_loss(sound: Any, batches: Batches, first: int) -> int:
    """The z-loss is divided by the number of learned tokens."""
    return batches.token_count(first)


@planted(BALANCE_SCALES)
def counts_over_tp_alone(sound: Any, run: BalanceOfRun, *given: Any) -> Balance:
    """The ranks of cp that share a sequence do not add their counts."""
    scaled = sound(run, *given)
    return dataclasses.replace(scaled, sequence=scaled.sequence[:-1])


@planted(TALLY)
def counts_summed_in_place(sound: Any, tally: Tally, losses: BalanceLosses) -> None:
    """Each rank counts the sum over the ranks of a sequence as its own tokens."""
    assert losses.counts is not None
    sound(tally, dataclasses.replace(losses, chosen=losses.counts.sum(0)))


@planted(ROUTER)
def counted_again(
    sound: Any, router: Router, x: Tensor, route: TokenRoute, balance: Balance | None
) -> Tensor:
    """A recomputed forward adds its tokens and losses to the sums again."""
    route.experts = None
    return sound(router, x, route, balance)


@planted(LAYER_OF_EXPERTS)
def losses_of_the_second_chunk_lost(
    sound: Any, layer: MixtureOfExperts, x: Tensor, inputs: LayerInputs
) -> Tensor:
    """Only the first chunk of a rank's layers gets the scales of the losses."""
    if inputs.balance is not None and layer.router.name.startswith(("layers.2.", "layers.3.")):
        balance = dataclasses.replace(inputs.balance, aux_scale=None, z_scale=None)
        inputs = dataclasses.replace(inputs, balance=balance)
    return sound(layer, x, inputs)


@planted(SCORES)
def softmax_twice(sound: Any, logits: Tensor, settings: RouterSettings) -> Tensor:
    """The scores pass through the softmax twice."""
    return sound(sound(logits, settings), settings)


@planted(MICRO_BATCH)
def padding_counted(sound: Any, batches: Batches, *which: int) -> MicroBatch:
    """Padding counts like other tokens."""
    batch = sound(batches, *which)
    lengths = torch.full_like(batch.inputs.balance.lengths, batches.source.seq_length)
    balance = dataclasses.replace(batch.inputs.balance, used=None, lengths=lengths)
    return batch._replace(inputs=dataclasses.replace(batch.inputs, balance=balance))


@planted(PART_OF_TOKENS)
def padding_of_another_part(
    sound: Any, balance: Balance, index: int, ranks: int, tokens: int
) -> Balance:
    """Each tensor-parallel rank uses the padding mask of the next rank's part."""
    return sound(balance, (index + 1) % ranks, ranks, tokens)


# Biases


@planted(BIAS_UPDATE)
def biases_never_updated(sound: Any, run: BalanceOfRun, figures: ExpertFigures) -> None:
    """The biases stay as they are."""


@planted(BIAS_UPDATE)
def biases_updated_twice(sound: Any, run: BalanceOfRun, figures: ExpertFigures) -> None:
    """Both chunks of a rank's layers update all biases."""
    sound(run, figures)
    sound(run, figures)


@contextmanager
def biases_by_own_counts() -> Iterator[None]:
    """Each rank updates its biases only from the tokens that it has routed itself."""
    own: dict[int, Tensor] = {}

    def take(sound: Any, run: BalanceOfRun, like: Tensor) -> Tensor:
        own[id(run)] = sound(run, like)
        return own[id(run)]

    def update(sound: Any, run: BalanceOfRun, figures: ExpertFigures) -> None:
        sound(run, run.figures(own[id(run)].tolist(), 1))

    with ExitStack() as stack:
        stack.enter_context(LAYER_SUMS.replaced(take))
        stack.enter_context(BIAS_UPDATE.replaced(update))
        yield


@planted(UPDATED_BIAS)
def away_from_balance(sound: Any, bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The bias moves the wrong way: experts with many tokens get even more of them."""
    return sound(bias, counts, -rate)


@contextmanager
def bias_in_the_weights() -> Iterator[None]:
    """The weights of the chosen experts include the bias."""
    given: list[Tensor | None] = [None]

    def choose(sound: Any, scores: Tensor, bias: Tensor | None, settings: Any) -> Tensor:
        given[0] = bias
        return sound(scores, bias, settings)

    def weights(sound: Any, scores: Tensor, *more: Any) -> Tensor:
        bias = given[0]
        return sound(scores if bias is None else scores + bias, *more)

    with ExitStack() as stack:
        stack.enter_context(CHOSEN.replaced(choose))
        stack.enter_context(CHOICE_WEIGHTS.replaced(weights))
        yield


# Experts


@planted(ACTIVATION)
def gate_and_up_exchanged(sound: Any, activation: str, x: Tensor, **limit: Any) -> Tensor:
    """The non-linearity is applied to `up` instead of `gate`."""
    return sound(activation, torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1), **limit)


@planted(CHOSEN)
def groups_by_their_two_best(
    sound: Any, scores: Tensor, bias: Tensor | None, settings: RouterSettings
) -> Tensor:
    """Groups of softmax scores are chosen like groups of sigmoid scores."""
    return sound(scores, bias, dataclasses.replace(settings, score="sigmoid"))


@planted(NORM_GRADIENTS)
def gate_not_summed_over_tp(sound: Any, segments: list[Segment], *groups: Any) -> None:
    """Each rank steps the gate of the shared expert by the gradient of its own tokens."""
    with_own(sound, segments, "shared_gate", groups)


@planted(ROUTER)
def frozen_router_cut_off(sound: Any, router: Router, x: Tensor, *how: Any) -> Tensor:
    """A router that is not trained passes no gradient to the tokens."""
    return sound(router, x.detach() if router.name.startswith("layers.0.") else x, *how)


@planted(INITIAL_VALUES)
def experts_drawn_by_local_index(
    sound: Any, initializer: Initializer, shard: ShardSpec, out: Tensor
) -> None:
    """All ranks of ep start with the experts of the first one."""
    parts = shard.name.split(".")
    if "experts" in parts:
        place = parts.index("experts") + 1
        parts[place] = str(int(parts[place]) % 4)
    sound(initializer, dataclasses.replace(shard, name=".".join(parts)), out)


@planted(MATRICES_OF_TP)
def orthogonal_over_all_experts(sound: Any, muon: Muon, *shards: Any) -> dict[str, Tensor]:
    """The experts of a rank are treated as one tall matrix."""
    whole = sound(muon, *shards)
    for part in ("gate", "up", "down"):
        names = [name for name in whole if ".experts." in name and f".{part}." in name]
        if names:
            tall = newton_schulz(torch.cat([whole[name] for name in names]))
            whole |= zip(names, tall.chunk(len(names)), strict=True)
    return whole


EXPERTS_OF = (
    ("num_experts", 8),
    ("experts_per_token", 2),
    ("expert_ffn_size", 24),
    ("router_score", "sigmoid"),
    ("router_bias", True),
    ("router_scale", 2.5),
)
LOSSES = (("aux_loss", 0.1), ("z_loss", 0.01), ("bias_update_rate", 0.05))
# The samples are packed, and some are padded.
SGD = Problem(
    *("llama_tiny", "sgd", False),
    model=EXPERTS_OF,
    layers=2,
    steps=2,
    batch=12,
    moe=LOSSES,
    documents=True,
    optim=(("clip_grad", 0.3),),
)
ADAMW = dataclasses.replace(SGD, optimizer="adamw", optim=())
MUON = dataclasses.replace(SGD, optimizer="muon", optim=())
SOFTMAX = dataclasses.replace(SGD, model=EXPERTS_OF[:3])
# Softmax over all experts, the best of groups, a shared expert with a gate, and an ordinary MLP.
GATED = dataclasses.replace(
    SGD,
    layers=3,
    model=(
        *EXPERTS_OF[:3],
        ("router_normalize", False),
        ("router_groups", 4),
        ("router_top_groups", 2),
        ("shared_expert_size", 16),
        ("shared_expert_gate", True),
        ("dense_layers", (1,)),
    ),
)
FROZEN = dataclasses.replace(
    SGD, optim=(*SGD.optim, ("freeze", ("layers.0.mlp.router.weight", "layers.1.mlp.experts.3.*")))
)
GROWING = dataclasses.replace(SGD, batches=HALVED, batch=GLOBAL_BATCH)
FOUR_LAYERS = dataclasses.replace(SGD, layers=4)

# A wrong gradient shows in the norm, and after a step in every result.
TOLD = {"grad norm", "loss", "weights", "evaluation", "aux", "z"}
# Some bugs change scores so much that other experts are chosen, and a few so much that an expert
# crosses the mean.
COUNTED = TOLD | {"counts"}
ALL = COUNTED | {"biases"}


def experts(problem: Problem = SGD, way: str = "gather", **more: Any) -> Case:
    """Returns a sequence-parallel case of `problem`."""
    keys = {"moe.dispatch": way, **more.pop("keys", {})}
    return Case(problem, sp=True, keys=tuple(keys.items()), **more)


ONE = (1, 1, 1, 1, 1)  # tp, pp, dp, cp, ep
TP = (2, 1, 1, 1, 1)
PP = (1, 2, 1, 1, 1)
DP = (1, 1, 2, 1, 1)
CP = (1, 1, 1, 2, 1)
EP = (1, 1, 2, 1, 2)
# No two sizes are equal, so that groups cannot be confused.
TP_IN_EP = (2, 1, 2, 1, 4)
EP_IN_TP = (4, 1, 1, 1, 2)
ALL_TO_ALL = experts(way="all_to_all")
FULL = experts(keys={"recompute": "full"})
MLP = experts(keys={"recompute": "[mlp]"})
ZBV = experts(FOUR_LAYERS, schedule="zbv", keys={"vpp": 2})
BY_SAMPLE = experts(microbatches=12)
PLANTED = {
    "norm-of-one-ep-rank": (experts_of_other_ranks_left_out, EP, experts(), ALL),
    "norm-of-half-a-tp-group": (experts_of_other_ranks_left_out, EP_IN_TP, ALL_TO_ALL, ALL),
    "clipped-by-own-norm": (each_rank_clips_by_its_own_experts, EP, experts(), ALL | {"replicas"}),
    "copies-in-norm": (copies_of_experts_counted, (2, 1, 2, 1, 2), experts(), COUNTED),
    # Without clipping the norm is only reported: AdamW does not see a factor.
    "copies-in-norm-adamw": (copies_of_experts_counted, DP, experts(ADAMW), {"grad norm"}),
    "counted-like-dense-tp": (experts_counted_like_other_matrices, TP, experts(), COUNTED),
    "counted-like-dense-ep": (experts_counted_like_other_matrices, TP_IN_EP, experts(), ALL),
    # Biases are zero in the first step.
    "biases-in-norm": (biases_in_the_norm, ONE, experts(), {"grad norm", "weights", "evaluation"}),
    "gradient-times-ep": (partial(gradients_times, 2), EP, experts(), COUNTED),
    "gradient-mean-of-edp": (partial(gradients_times, 0.5), TP, experts(), ALL),
    "summed-like-dense-tp": (
        *(experts_summed_like_other_matrices, TP, experts()),
        COUNTED | {"replicas"},
    ),
    "summed-like-dense-ep": (experts_summed_like_other_matrices, TP_IN_EP, ALL_TO_ALL, COUNTED),
    "router-apart": (router_not_summed_over_tp, TP, experts(), TOLD | {"replicas"}),
    "router-apart-ep": (router_not_summed_over_tp, TP_IN_EP, experts(), TOLD | {"replicas"}),
    "gate-apart": (gate_not_summed_over_tp, TP, experts(GATED), TOLD | {"replicas"}),
    "router-cut-off": (weights_without_gradient, ONE, experts(), COUNTED),
    "frozen-router-cut-off": (frozen_router_cut_off, EP, experts(FROZEN), COUNTED),
    "losses-not-attached": (losses_not_attached, ONE, experts(), COUNTED),
    "slots-elsewhere": (gradient_of_slots_elsewhere, EP, experts(), COUNTED),
    "slots-elsewhere-all-to-all": (gradient_of_slots_elsewhere, EP, ALL_TO_ALL, COUNTED),
    "stale-row": (stale_row_behind_the_last, EP, experts(), ALL),
    "results-of-others": (results_of_other_tokens, EP, ALL_TO_ALL, ALL),
    "rows-of-another-microbatch": (
        *(rows_of_another_microbatch, PP, experts(schedule="zb_h1")),
        ALL,
    ),
    "rows-of-another-microbatch-zbv": (rows_of_another_microbatch, PP, ZBV, COUNTED),
    "chosen-again": (chosen_again, ONE, FULL, ALL),
    "chosen-again-mlp": (chosen_again, ONE, MLP, ALL),
    "loss-by-microbatches": (by_microbatches, ONE, experts(), TOLD),
    "loss-by-tokens": (by_tokens, ONE, BY_SAMPLE, TOLD),
    "loss-of-own-tokens": (of_own_tokens, ONE, experts(), ALL),
    "loss-by-learned-tokens": (by_tokens_of_the_loss, ONE, experts(), ALL),
    "loss-by-the-largest-batch": (
        *(by_the_largest_batch, ONE, experts(GROWING)),
        {"grad norm", "weights", "evaluation"},
    ),
    "loss-of-one-chunk": (losses_of_the_second_chunk_lost, PP, ZBV, COUNTED),
    "counts-without-cp": (counts_over_tp_alone, CP, experts(), TOLD),
    "counts-without-cp-ep": (counts_over_tp_alone, (2, 1, 1, 2, 4), experts(), TOLD),
    "counts-in-place": (counts_summed_in_place, CP, experts(), {"counts", "z"}),
    # Doubled counts are on the same side of their mean, so the biases do not differ.
    "counted-again": (counted_again, ONE, FULL, {"counts", "aux"}),
    "padding-counted": (padding_counted, ONE, experts(), COUNTED),
    "padding-of-another-part": (padding_of_another_part, TP, experts(), ALL),
    "softmax-twice": (softmax_twice, ONE, experts(SOFTMAX), COUNTED),
    "groups-by-two": (groups_by_their_two_best, ONE, experts(GATED), COUNTED),
    "biases-stay": (biases_never_updated, ONE, experts(), ALL),
    "biases-twice": (biases_updated_twice, ONE, experts(), ALL),
    "biases-by-own-counts": (biases_by_own_counts, DP, experts(), ALL),
    "biases-away": (away_from_balance, ONE, experts(), ALL),
    "bias-in-weights": (bias_in_the_weights, ONE, experts(), COUNTED),
    "gate-up": (gate_and_up_exchanged, ONE, experts(), ALL),
    "drawn-by-local-index": (
        *(experts_drawn_by_local_index, EP, experts()),
        ALL | {"initial weights"},
    ),
    # Shards of experts are on other ranks than shards of other matrices.
    "muon-over-all": (
        *(orthogonal_over_all_experts, TP, experts(MUON, keys={"zero": 1})),
        COUNTED - {"evaluation"},
    ),
}


@pytest.mark.parametrize(
    ("mutation", "sizes", "case", "told_by"), PLANTED.values(), ids=PLANTED.keys()
)
def test_a_bug_of_experts_is_caught(
    mutation: Mutation,
    sizes: Sizes,
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, told_by, pool, references)
