"""Plants bugs in the norms, scales, caps and positions of model families: each is caught.

This continues test_mutations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.build import Trainer
from parallel3d.comm.group import SINGLE, Group
from parallel3d.context_parallel.document_attention import Block
from parallel3d.models.embedding_and_head import Embedding
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext, Norm
from parallel3d.models.ops import Rotary
from parallel3d.models.transformer import Attention, Stage, TransformerBlock
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.state import spec_of
from parallel3d.tensor_parallel.layers import RowParallelLinear
from parallel3d.tensor_parallel.mappings import gather_heads, reduce_from_tensor_parallel
from tests.distributed.cases import Case
from tests.distributed.harness import References, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    ADDED_BY_ATTENTION,
    DIFFERENTIATED,
    GATE,
    LOGITS,
    NORM,
    POSITIONS,
    PROJECTED,
    ROTARY,
    ROW_PARALLEL,
    SLOPE_OF_LOGITS,
    STEP,
    WORDS,
    Mutation,
    planted,
)
from tests.distributed.test_mutations import ALL_NUMBERS, ONE_HEAD

pytestmark = pytest.mark.more


@planted(STEP)
def one_plus_the_weight_decays(sound: Any, trainer: Trainer) -> Any:
    """Weight decay shrinks 1 + w, the factor of the norm, instead of w."""
    found, optim = sound(trainer), trainer.config.optim
    with torch.no_grad():
        for name, weight in trainer.parameters.items():
            if name.endswith("norm.weight"):
                weight.sub_(optim.lr * optim.weight_decay * (1 + weight))
    return found


@planted(WORDS)
def scale_not_rounded(_: Any, embedding: Embedding, tokens: Tensor) -> Tensor:
    """The factor of the embedding is not rounded to the dtype of the computation."""
    return embedding.word(tokens) * embedding.scale


@planted(LOGITS)
def capped_after_the_maximum(_: Any, products: Tensor, scale: float, cap: float) -> Tensor:
    """The cap is applied to logits from which the loss has subtracted their maximum."""
    z = products * scale
    return cap * torch.tanh((z - z.amax(-1, keepdim=True)) / cap)


@planted(SLOPE_OF_LOGITS)
def the_cap_has_no_gradient(_: Any, z: Tensor, scale: float, cap: float) -> float:
    return scale


@planted(ROTARY)
def only_cos_grows(sound: Any, *of: Any) -> Rotary:
    """YaRN's factor of attention multiplies cos, but not sin."""
    cos, sin = sound(*of)
    return cos, sin / cos[0, 0, 0]


@planted(POSITIONS)
def temperature_counts_in_the_sample(
    sound: Any, stage: Stage, inputs: LayerInputs, batch: int, length: int
) -> LayerInputs:
    """The temperature of a query depends on its place in the pack, not in its document."""
    found = sound(stage, inputs, batch, length)
    positions = found.positions._replace(temperature=stage.temperature[:length])
    return replace(found, positions=positions)


@contextmanager
def output_norms_of_partial_sums() -> Iterator[None]:
    """Each tensor-parallel rank normalises its own part of an output, and the results are
    summed."""
    groups: list[Group] = []

    def partial(sound: Any, layer: RowParallelLinear, x: Tensor) -> Tensor:
        group, layer.group = layer.group, SINGLE
        groups.append(group)
        y = sound(layer, x)
        layer.group = group
        return y

    def normed(sound: Any, norm: Norm, x: Tensor) -> Tensor:
        y = sound(norm, x)
        is_output = spec_of(norm.weight).shards[0].name.endswith("_output_norm.weight")
        return reduce_from_tensor_parallel(y, groups[-1]) if is_output else y

    with ROW_PARALLEL.replaced(partial), NORM.replaced(normed):
        yield


@planted(ADDED_BY_ATTENTION)
def attention_is_not_scaled(sound: Any, block: TransformerBlock, *of: Any) -> Tensor:
    """The residual stream gets the MLP's output times the factor, but attention's output
    unscaled."""
    return sound(block, *of) / block.residual_scale


@planted(DIFFERENTIATED)
def usual_scale_in_the_backward(sound: Any, *before: Any) -> None:
    """The gradient of attention uses the usual scale of the scores, head_dim^-½."""
    *tensors, block, kernel = before
    assert isinstance(block, Block)
    sound(*tensors, block._replace(scale=None), kernel)


@planted(GATE)
def the_gate_is_multiplied_in_too(sound: Any, y: Tensor, gate: Tensor) -> Tensor:
    """Attention's output is multiplied by SiLU(gate), as an MLP's is, instead of σ(gate)."""
    return sound(y, gate) * gate


@planted(GATE)
def the_gate_has_no_gradient(sound: Any, y: Tensor, gate: Tensor) -> Tensor:
    return sound(y, gate.detach())


@planted(GATE)
def heads_have_the_gate_of_the_next_one(sound: Any, y: Tensor, gate: Tensor) -> Tensor:
    """The heads of a rank take the gates of each other."""
    return sound(y, gate.roll(gate.shape[-1] // 2, -1))


@planted(PROJECTED)
def the_gate_is_gathered_as_a_part_of_q(sound: Any, attention: Attention, *of: Any) -> Tensor:
    """With gathered q and k, the gate of this rank's heads is that of the other rank's."""
    found, size = sound(attention, *of), attention.gate_size
    every = gather_heads(found[..., :size].contiguous(), attention.tp)
    return torch.cat((every[attention.tp.index - 1], found[..., size:]), -1)


def dialect(**keys: Any) -> Case:
    return Case(replace(ONE_HEAD, model=(*ONE_HEAD.model, *keys.items())))


CENTRED = dialect(norm_zero_centered=True)
CAPPED = dialect(logit_scale=0.7, logit_cap=2.0)
YARN = dialect(rope_scaling="yarn", rope_scaling_factor=4.0, rope_original_length=8)
HEATED = dialect(query_temperature=0.5, rope_original_length=3)
DOCUMENTS = replace(HEATED, problem=replace(HEATED.problem, documents=True))
SCALED = dialect(attention_scale=0.1)
GATED = dialect(attention_gate=True)
PLANTED = [
    pytest.param(one_plus_the_weight_decays, (1, 1, 2), CENTRED, ALL_NUMBERS, id="decay-of-1+w"),
    pytest.param(capped_after_the_maximum, (2, 1, 1), CAPPED, ALL_NUMBERS, id="cap-after-max"),
    pytest.param(the_cap_has_no_gradient, (2, 1, 1), CAPPED, ALL_NUMBERS, id="no-gradient-of-cap"),
    pytest.param(only_cos_grows, (1, 1, 2), YARN, ALL_NUMBERS, id="factor-on-cos-only"),
    pytest.param(
        temperature_counts_in_the_sample,
        (1, 1, 2),
        DOCUMENTS,
        ALL_NUMBERS,
        id="temperature-in-sample",
    ),
    pytest.param(
        output_norms_of_partial_sums,
        (2, 1, 1),
        dialect(norm_position="after"),
        ALL_NUMBERS | {"replicas"},
        id="norm-of-partial-sums",
    ),
    pytest.param(
        attention_is_not_scaled,
        (2, 1, 1),
        dialect(residual_scale=0.6),
        ALL_NUMBERS,
        id="one-branch-scaled",
    ),
    pytest.param(
        usual_scale_in_the_backward,
        (1, 1, 2),
        replace(SCALED, problem=replace(SCALED.problem, documents=True)),
        ALL_NUMBERS,
        id="scale-in-backward",
    ),
    pytest.param(the_gate_is_multiplied_in_too, (2, 1, 1), GATED, ALL_NUMBERS, id="silu-gate"),
    pytest.param(the_gate_has_no_gradient, (2, 1, 1), GATED, ALL_NUMBERS, id="detached-gate"),
    pytest.param(
        heads_have_the_gate_of_the_next_one, (2, 1, 1), GATED, ALL_NUMBERS, id="gate-of-next-head"
    ),
    pytest.param(
        the_gate_is_gathered_as_a_part_of_q,
        (2, 1, 1),
        replace(GATED, keys=(*GATED.keys, ("tensor_parallel.attention", "gather_qk"))),
        ALL_NUMBERS,
        id="gate-of-other-rank",
    ),
]


@pytest.mark.parametrize(("mutation", "sizes", "case", "told_by"), PLANTED)
def test_a_planted_bug_of_a_dialect_is_caught(
    mutation: Mutation,
    sizes: tuple[int, int, int],
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, told_by, pool, references)


def embedded() -> tuple[Tensor, Tensor]:
    """Returns scaled embeddings of some tokens in bf16, and the expected ones."""
    model = ModelConfig(hidden_size=64, vocab_size=61, embedding_scale=math.sqrt(2560))
    init = Initializer(0, torch.bfloat16, torch.device("cpu"))
    embedding = Embedding(model, BuildContext(init, SINGLE, sp=False), 1, tied=False)
    tokens = torch.arange(60).view(2, 30)
    return embedding.of_words(tokens), embedding.word(tokens) * torch.tensor(50.5).bfloat16()


def test_the_scale_of_embeddings_is_rounded() -> None:
    assert torch.equal(*embedded())
    with scale_not_rounded():
        assert not torch.equal(*embedded())
