"""Compares layers of attention with sinks with transformers' gpt-oss, and packs with documents
alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.comm.group import SINGLE
from parallel3d.context_parallel.documents import make_documents
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.models.transformer import Attention, Stage
from parallel3d.parameters.initializer import Initializer
from tests.unit.context_parallel.test_split import starts_of

LENGTH, PACKS = 24, [[9, 4, 11], [24]]
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=4,
    seq_length=LENGTH,
    layer_types=["sliding", "full"],
    sliding_window=5,
    position_embedding="rope",
    rotary_base=100.0,
    attention_bias="all",
    attention_sinks=True,
)


def drawn_stage(dtype: torch.dtype) -> Stage:
    """Returns a stage whose weights, biases and sinks have a standard deviation near 1."""
    init = Initializer(1, dtype, torch.device("cpu"))
    stage = Stage(
        MODEL, StageBlueprint.plain(range(2), True, True), BuildContext(init, SINGLE, sp=False)
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            std = 0.4 if name.endswith("weight") else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return stage


def attention_of(stage: Stage, layer: int) -> Attention:
    attention = stage.blocks[str(layer)].attention
    assert isinstance(attention, Attention)
    return attention


def inputs_of(stage: Stage, packs: Sequence[list[int]], length: int = LENGTH) -> LayerInputs:
    split = SequenceSplit(length, window=MODEL.sliding_window)
    starts = starts_of(*packs, padded=length)
    documents = make_documents(starts, torch.device("cpu"), split)
    return stage.with_positions(LayerInputs(documents=documents), len(packs), length)


def theirs(stage: Stage, layer: int) -> Any:
    """Returns gpt-oss's attention with the weights of a layer."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    config = GptOssConfig(
        hidden_size=MODEL.hidden_size,
        num_attention_heads=MODEL.num_attention_heads,
        num_key_value_heads=MODEL.kv_heads,
        head_dim=MODEL.head_size,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=MODEL.sliding_window,
        attention_bias=True,
    )
    config._attn_implementation = "eager"
    made, ours = GptOssAttention(config, layer), attention_of(stage, layer)
    sizes = [heads * MODEL.head_size for heads in (4, 2, 2)]
    values = {"sinks": ours.sinks, "o_proj.weight": ours.out.weight, "o_proj.bias": ours.out.bias}
    for kind in ("weight", "bias"):
        parts = getattr(ours.qkv, kind).split(sizes)
        values |= {f"{n}_proj.{kind}": x for n, x in zip("qkv", parts, strict=True)}
    made.load_state_dict({name: x.detach() for name, x in values.items()})
    return made


def rotary(places: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin as gpt-oss's rotary module does, for the base of the model."""
    pairs = MODEL.head_size // 2
    angles = places.double().unsqueeze(-1) * 100.0 ** (-torch.arange(pairs).double() / pairs)
    return angles.cos().float(), angles.sin().float()


@pytest.mark.nightly
@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
def test_a_layer_is_that_of_gpt_oss(layer: int) -> None:
    stage = drawn_stage(torch.float32)
    ours, other = attention_of(stage, layer), theirs(stage, layer)
    generator = torch.Generator().manual_seed(4)
    x, grad = torch.randn(2, 2, LENGTH, MODEL.hidden_size, generator=generator).unbind()
    starts = torch.from_numpy(starts_of(*PACKS, padded=LENGTH))
    at = torch.arange(LENGTH)
    seen = (at <= at[:, None]) & (at >= starts[:, None, :].mT)
    if layer == 0:
        seen = seen & (at > at[:, None] - 5)
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).unsqueeze(1)
    expected, _ = other(x, rotary(at - starts), mask)
    found = ours(x, lambda x: x, inputs_of(stage, PACKS))
    expected.backward(grad)
    found.backward(grad)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    for mine, their in (
        (ours.sinks, [other.sinks]),
        (ours.qkv.weight, [other.q_proj.weight, other.k_proj.weight, other.v_proj.weight]),
        (ours.qkv.bias, [other.q_proj.bias, other.k_proj.bias, other.v_proj.bias]),
        (ours.out.weight, [other.o_proj.weight]),
    ):
        of_theirs = torch.cat([parameter.grad for parameter in their])
        assert mine is not None and mine.grad is not None
        assert (mine.grad - of_theirs).abs().max() <= 1e-4 * of_theirs.abs().max()


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
def test_packed_documents_are_those_alone(layer: int) -> None:
    stage = drawn_stage(torch.float64)
    attention, generator = attention_of(stage, layer), torch.Generator().manual_seed(4)
    x, grad = torch.randn(2, 1, LENGTH, 16, generator=generator, dtype=torch.float64).unbind()
    packed = attention(x, lambda x: x, inputs_of(stage, PACKS[:1]))
    parameters = dict(attention.named_parameters())
    of_packed = torch.autograd.grad(packed, list(parameters.values()), grad)
    alone, sums, begin = [], [torch.zeros_like(p) for p in parameters.values()], 0
    for length in PACKS[0]:
        part = slice(begin, begin + length)
        found = attention(x[:, part], lambda x: x, inputs_of(stage, [[length]], length))
        gradients = torch.autograd.grad(found, list(parameters.values()), grad[:, part])
        sums = [total + one for total, one in zip(sums, gradients, strict=True)]
        alone.append(found)
        begin += length
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-12, atol=1e-12)
    for one, other in zip(of_packed, sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
