"""Tests that each kind of layer has its own heads, in shapes, in stages and in the decoder, and
that a half of a layer may be absent.

Each test of heads also plants the bug that uses the heads of the first kind for all.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

import pytest
import torch

from parallel3d.blueprint import parameters
from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.comm.group import Group
from parallel3d.models import declared
from parallel3d.models.declared import LayerKind
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layers import BuildContext
from parallel3d.models.transformer import Stage
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.state import spec_of
from tests.distributed.cases import TwoKinds
from tests.distributed.seams import Seam, planted
from tests.reference.model import ReferenceModel
from tests.reference.train import build
from tests.unit.commands.test_generate import decoder_of, whole_forward

MODEL = TwoKinds(
    num_layers=3, hidden_size=32, num_attention_heads=8, num_query_groups=4, head_dim=4,
    seq_length=12, vocab_size=61, vocab_multiple=8, norm="rmsnorm", position_embedding="rope",
    activation="swiglu", bias=False, layer_types=["full", "sliding"], sliding_window=5,
    qk_norm=True,
)  # fmt: skip


@planted(Seam("models.declared:heads_of"))
def the_first_kind_declares_all_tensors(sound: Any, kind: Any) -> Any:
    return sound(kind._replace(heads=8, kv_heads=4, head_size=4))


@planted(Seam("blueprint.parameters:stage_parameters"))
def the_first_kind_is_held_by_all_stages(
    sound: Any, model: Any, tp: int, layers: range, *ends: bool
) -> Any:
    like = sound(model, tp, range(1), *ends)
    return [
        p._replace(name=p.name.replace("layers.0.", f"layers.{layer}."))
        for layer in layers
        for p in like
    ]


@planted(Seam("models.key_value_cache:KeyValueCache.__init__"))
def the_first_kind_is_decoded_everywhere(
    sound: Any, cache: Any, attention: Any, length: int, like: Any
) -> None:
    sound(cache, attention, length, like)
    cache.kept = like.new_zeros(2, 1, 4, cache.kept.shape[3], 4)


def shapes_agree() -> None:
    theirs = {name: tuple(p.shape) for name, p in ReferenceModel(MODEL).named_parameters()}
    assert declared.full_shapes_of(MODEL) == theirs


def stages_agree() -> None:
    tp = Group("tp", (0, 1, 2, 3), 1, None)
    context = BuildContext(Initializer(1, torch.float32, torch.device("meta")), tp, sp=False)
    built = Stage(MODEL, StageBlueprint.plain(range(1, 3)), context)
    held = parameters.stage_parameters(MODEL, 4, range(1, 3), False, False)
    shown = [(p.name, p.numel) for p in held]
    assert shown == [(name, p.numel()) for name, p in built.named_parameters()]


def decoders_agree() -> None:
    decoder, stage = decoder_of(MODEL)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    for length in range(2, len(tokens) + 1):
        logits = decoder.logits(tokens[:length])
        theirs = whole_forward(stage, tokens[:length])
        torch.testing.assert_close(logits, theirs, rtol=1e-9, atol=1e-9)


BUGS = {
    "shapes": (shapes_agree, the_first_kind_declares_all_tensors),
    "stages": (stages_agree, the_first_kind_is_held_by_all_stages),
    "decoder": (decoders_agree, the_first_kind_is_decoded_everywhere),
}


@pytest.mark.parametrize("place", BUGS)
def test_heads_of_the_first_kind_show_where_all_layers_have_them(place: str) -> None:
    agree, bug = BUGS[place]
    agree()
    with bug(), pytest.raises((AssertionError, RuntimeError)):
        agree()


class Halves(ModelConfig):
    """A model with a layer without an MLP, and one without attention."""

    absent: ClassVar = ((0, "mlp"), (1, "attention"))


@pytest.mark.parametrize("place", ["before", "after", "both"])
def test_a_half_of_a_layer_may_be_absent(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = LayerKind.of

    def of(model: ModelConfig, layer: int) -> LayerKind:
        halves = {"mlp": "mlp", "attention": "mixer"}
        return sound(model, layer)._replace(
            **{halves[half]: None for number, half in Halves.absent if number == layer}
        )

    monkeypatch.setattr(LayerKind, "of", staticmethod(of))
    keys = {f.name: getattr(MODEL, f.name) for f in fields(ModelConfig)}
    model = Halves(**keys | {"norm_position": place, "layer_types": [], "sliding_window": None})
    decoder, stage = decoder_of(model)
    weights = {shard.name: shard.of_local(p.detach()) for p in stage.parameters()
               for shard in spec_of(p).shards}  # fmt: skip
    reference = build(model, weights, torch.float64)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    theirs = reference(torch.tensor([tokens]))[0, -1]
    for length in range(2, len(tokens) + 1):
        logits = decoder.logits(tokens[:length])
    assert logits is not None
    torch.testing.assert_close(logits, theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole_forward(stage, tokens), theirs, rtol=1e-9, atol=1e-9)
    held = parameters.stage_parameters(model, 1, range(3), True, True)
    assert [p.name for p in held] == [name for name, _ in stage.named_parameters()]
