"""Plants bugs in gated DeltaNet: each is caught. This continues test_mutations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.build import Trainer
from parallel3d.models.delta_rule import RuleChunks
from parallel3d.models.gated_deltanet import GatedNorm, Rates
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from tests.distributed.cases import Case
from tests.distributed.harness import References, Sizes, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    CHUNKS,
    CONVOLUTION,
    DELTA_RULE,
    GATED_NORM,
    INITIAL_VALUES,
    LENGTH,
    PARAMETER,
    RATES,
    SHARED_HEADS,
    STEP,
    Mutation,
    planted,
)
from tests.distributed.test_mutations import ALL_NUMBERS, SGD, at_zero
from tests.distributed.test_mutations_dialect import the_gate_is_multiplied_in_too

pytestmark = pytest.mark.nightly


@planted(SHARED_HEADS)
def the_norms_of_heads_are_not_summed(*_: Any) -> None:
    """The weight of the heads' norm gets the gradient of the rank's own heads only."""


@planted(CONVOLUTION)
def the_convolution_reads_the_document_before(
    sound: Any, x: Tensor, weight: Tensor, _: Tensor | None, widths: tuple[int, ...]
) -> tuple[Tensor, ...]:
    return sound(x, weight, None, widths)


@planted(CONVOLUTION)
def the_first_tap_is_the_token(
    sound: Any, x: Tensor, weight: Tensor, *of: Any
) -> tuple[Tensor, ...]:
    """The taps are read backwards."""
    return sound(x, weight.flip(-1), *of)


@planted(DELTA_RULE)
def the_state_stays_where_a_document_begins(
    sound: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any, **__: Any
) -> Tensor:
    return sound(q, k, v, g, beta)


@planted(DELTA_RULE)
def value_heads_take_turns_at_key_heads(
    sound: Any, q: Tensor, k: Tensor, v: Tensor, *of: Any, **how: Any
) -> Tensor:
    """Value head j reads key head j mod key heads."""
    times = v.shape[2] // k.shape[2]
    return sound(q.repeat(1, 1, times, 1), k.repeat(1, 1, times, 1), v, *of, **how)


@planted(DELTA_RULE)
def the_decay_follows_the_update(
    sound: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *of: Any, **how: Any
) -> Tensor:
    """A token decays the state after it has written, and reads it then."""
    after = F.pad(g[:, :-1], (0, 0, 1, 0))  # the next token decays what it finds
    return g.exp().unsqueeze(-1) * sound(q, k, v, after, *of, **how)


@planted(CHUNKS)
def rates_are_missing_in_w(
    sound: Any, chunks: RuleChunks, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *of: Any
) -> None:
    """In chunks of four tokens, what they subtract of the state is not multiplied by β."""
    sound(chunks, q, k, v, g, *of[:2], chunk=4)
    given = torch.cat((chunks.beta * chunks.v, chunks.k_since), dim=-1)
    chunks.solved = torch.linalg.solve_triangular(
        chunks.lower, given, upper=False, unitriangular=True
    )
    sizes = chunks.v.shape[-1], chunks.k.shape[-1]
    chunks.u, chunks.w = chunks.solved.split(sizes, dim=-1)
    chunks.added, moved = (chunks.k_until.mT @ chunks.solved).split(sizes, dim=-1)
    whole = chunks.whole.expand(*chunks.k.shape[:2], 1, sizes[1])
    chunks.moves = torch.diag_embed(whole.squeeze(-2)) - moved


@planted(LENGTH)
def epsilon_is_outside_the_root(_: Any, x: Tensor, length: float) -> Tensor:
    return length * x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6)


@planted(RATES)
def rates_may_not_reach_two(sound: Any, rates: Rates, a: Tensor, b: Tensor) -> Any:
    """With `model.delta_negative`, σ(2b) is taken for 2σ(b)."""
    g, beta = sound(rates, a, 2.0 * b)
    return g, beta / 2.0


@planted(GATED_NORM)
def one_plus_the_weight(sound: Any, norm: GatedNorm, y: Tensor, z: Tensor) -> Tensor:
    """The heads' norm multiplies by 1 + w, as the other norms of Qwen3.5 do."""
    whole, norm.weight = norm.weight, nn.Parameter(1.0 + norm.weight.detach())
    try:
        shifted = sound(norm, y, z)
    finally:
        norm.weight = whole
    return shifted + 0.0 * whole.sum()


@planted(GATED_NORM)
def the_gate_comes_before_the_norm(sound: Any, norm: GatedNorm, y: Tensor, z: Tensor) -> Tensor:
    """RMS(y · SiLU(z)) is taken for RMS(y) · SiLU(z)."""
    gated = y * F.silu(z).view(y.shape)
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + norm.eps)
    return (gated * scale * norm.weight).flatten(2)


@planted(INITIAL_VALUES)
def times_of_the_first_heads(
    sound: Any, initializer: Initializer, shard: ShardSpec, out: Tensor
) -> None:
    """Every tp rank has dt_bias of the first heads, as if it were no vector of heads."""
    sound(initializer, at_zero(shard) if shard.name.endswith("dt_bias") else shard, out)


@planted(STEP)
def rates_of_decay_decay(sound: Any, trainer: Trainer) -> Any:
    """AdamW shrinks A_log."""
    found, optim = sound(trainer), trainer.config.optim
    with torch.no_grad():
        for name, weight in trainer.parameters.items():
            if name.endswith("A_log"):
                weight.mul_(1.0 - optim.lr * optim.weight_decay)
    return found


@planted(PARAMETER)
def muon_takes_the_convolution(
    sound: Any, initializer: Initializer, spec: ParameterSpec
) -> nn.Parameter:
    """The taps are orthogonalised as if they were a matrix."""
    shards = tuple(
        replace(shard, muon=shard.muon or shard.name.endswith("_conv.weight"))
        for shard in spec.shards
    )
    return sound(initializer, replace(spec, shards=shards))


HEADS = (
    *(("layer_types", ("gated_deltanet", "full")), ("seq_length", 12)),
    *(("delta_key_heads", 2), ("delta_value_heads", 4)),
    *(("delta_key_size", 4), ("delta_value_size", 6)),
)
DELTA = replace(SGD, preset="llama_tiny", tied=False, model=HEADS)
PLAIN, PACKS = Case(DELTA), Case(replace(DELTA, documents=True))
NEGATIVE = Case(replace(DELTA, model=(*HEADS, ("delta_negative", True))))
GATED = Case(replace(DELTA, model=(*HEADS, ("attention_gate", True))))
ADAMW = Case(replace(DELTA, optimizer="adamw", optim=()))
MUON = Case(replace(DELTA, optimizer="muon", optim=()))
STEPPED = ALL_NUMBERS - {"evaluation"}  # it is of SGD only
APART = ALL_NUMBERS | {"replicas"}
ONE: Sizes = (1, 1, 1)
PLANTED = [
    pytest.param(the_norms_of_heads_are_not_summed, (2, 1, 1), PLAIN, APART, id="norm-apart"),
    pytest.param(
        the_norms_of_heads_are_not_summed,
        (2, 1, 1),
        replace(PLAIN, sp=True),
        APART,
        id="norm-apart-with-sp",
    ),
    pytest.param(
        the_convolution_reads_the_document_before, ONE, PACKS, ALL_NUMBERS, id="taps-of-others"
    ),
    pytest.param(the_first_tap_is_the_token, ONE, PLAIN, ALL_NUMBERS, id="taps-backwards"),
    pytest.param(
        the_state_stays_where_a_document_begins, ONE, PACKS, ALL_NUMBERS, id="state-of-others"
    ),
    pytest.param(value_heads_take_turns_at_key_heads, ONE, PLAIN, ALL_NUMBERS, id="j-mod-heads"),
    pytest.param(the_decay_follows_the_update, ONE, PLAIN, ALL_NUMBERS, id="decay-after-update"),
    pytest.param(rates_are_missing_in_w, ONE, PLAIN, ALL_NUMBERS, id="no-beta-in-w"),
    pytest.param(epsilon_is_outside_the_root, ONE, PLAIN, ALL_NUMBERS, id="eps-outside"),
    pytest.param(rates_may_not_reach_two, ONE, NEGATIVE, ALL_NUMBERS, id="beta-of-2b"),
    pytest.param(one_plus_the_weight, ONE, PLAIN, ALL_NUMBERS, id="1+w"),
    pytest.param(the_gate_comes_before_the_norm, ONE, PLAIN, ALL_NUMBERS, id="gate-first"),
    pytest.param(
        times_of_the_first_heads,
        (2, 1, 1),
        PLAIN,
        ALL_NUMBERS | {"initial weights"},
        id="dt_bias-of-first-heads",
    ),
    pytest.param(the_gate_is_multiplied_in_too, ONE, GATED, ALL_NUMBERS, id="silu-gate-beside"),
    pytest.param(rates_of_decay_decay, ONE, ADAMW, STEPPED, id="decay-of-A_log"),
    pytest.param(muon_takes_the_convolution, ONE, MUON, STEPPED, id="muon-of-taps"),
]


@pytest.mark.parametrize(("mutation", "sizes", "case", "told_by"), PLANTED)
def test_a_planted_bug_of_gated_deltanet_is_caught(
    mutation: Mutation,
    sizes: Sizes,
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, told_by, pool, references)
