"""Tests `recompute` on one rank: the kept tensors, the repeated parts, and that gradients are added
once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import yaml
from torch import Tensor

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.blueprint.sizes import recomputing
from parallel3d.comm.group import SINGLE
from parallel3d.models import ops, transformer
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.repeats import Repeats
from parallel3d.models.transformer import BuildContext, Stage, compile_blocks
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.state import state_of
from parallel3d.run_config import conf_dir
from parallel3d.tensor_parallel import linear_ops
from tests.kernels import no_kernels

LAYERS, BATCH, SEQUENCE, HIDDEN = 3, 2, 16, 32
MODEL = ModelConfig(
    num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=8, num_query_groups=2,
    ffn_hidden_size=56, seq_length=SEQUENCE, vocab_size=61, norm="rmsnorm",
    position_embedding="rope", activation="swiglu", bias=False, tie_embeddings=False,
)  # fmt: skip
NOTHING = (None, None, None, LayerInputs())


def middle_stage(recompute: str = "none", layers: int = LAYERS, first: int | None = None) -> Stage:
    """Layers without embedding and head; parameters keep their gradients in main_grad. `first`:
    how many of them recompute."""
    init = Initializer(5, torch.float32, torch.device("cpu"))
    context = BuildContext(init, SINGLE, sp=False, repeats=Repeats.of(recompute))
    held = StageBlueprint.plain(range(layers))
    if first is not None:
        held = replace(held, recomputed=first)
    stage = Stage(MODEL, held, context)
    for parameter in stage.parameters():
        state_of(parameter).main_grad = torch.zeros_like(parameter)
    return stage


def hidden() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator).requires_grad_()


def kept_bytes(stage: Stage) -> int:
    """Returns the activations that a forward keeps for its backward."""
    own = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    own |= {t.untyped_storage().data_ptr() for pair in stage.rotary for t in pair}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Compiled code also keeps numbers: layers' handles, states of generators.
        if tensor.is_floating_point() and storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = stage(hidden(), *NOTHING)  # keeps the tensors alive, so that no storage is used twice
    kept = sum(sizes.values())
    del out
    return kept


INPUTS = LAYERS * BATCH * SEQUENCE * HIDDEN * 4
QKV, HEADS = 1.5, 3.0  # inputs: the projection of 8 + 2 + 2 heads; q, and k and v repeated for it
ATTENDED = 2.0  # by head for attention's backward, by token for the following projection
UP, INNER = 3.5, 1.75  # gate and up, 56 columns each; their product is as wide as silu(gate)
STATISTICS = 1 / HIDDEN  # statistics of a norm
SUMS = 8 / HIDDEN  # statistics of each head of attention
# Kept tensors by part, in units of a layer's input.
NORMS, ATTENTION, MLP = 2 * (1 + STATISTICS), HEADS + ATTENDED + SUMS, UP + 2 * INNER
ALL = 2 + NORMS + ATTENTION + MLP
KEPT = {
    "none": ALL,
    "[norm]": ALL - NORMS,
    "[activation]": ALL - 2 * INNER,
    "selective": ALL - ATTENTION + QKV,
    "[mlp]": ALL - MLP,
    "[norm,activation]": ALL - NORMS - 2 * INNER,
    "[norm,mlp]": ALL - NORMS - MLP,
    "[norm,attention,mlp]": 2 + QKV,
    "full": 1,
}


@pytest.mark.parametrize("way", KEPT)
def test_each_recomputed_part_is_not_kept(way: str) -> None:
    assert kept_bytes(middle_stage(way)) == KEPT[way] * INPUTS


@pytest.mark.parametrize("way", ["[norm,attention]", "full"])
def test_some_layers_recompute_and_the_others_keep_everything(way: str) -> None:
    none, full = (kept_bytes(middle_stage(how)) for how in ("none", way))
    for first in range(LAYERS + 1):
        kept = kept_bytes(middle_stage(way, first=first))
        assert kept == none - (none - full) * first // LAYERS


@pytest.mark.parametrize(
    ("given", "counts"),
    [((), [3, 2, 2]), ((1,), [1, 1, 1]), ((3, 1, 0), [3, 1, 0]), ((9,), [3, 2, 2])],
)
def test_how_many_layers_of_a_stage_recompute(given: tuple[int, ...], counts: list[int]) -> None:
    assert [recomputing(given, s, n) for s, n in enumerate((3, 2, 2))] == counts


@pytest.mark.slow
def test_compiled_blocks_keep_as_little_and_repeat_as_little() -> None:
    """Tests a graph of two layers, recomputed in parts and as a whole."""
    stage, calls = middle_stage("[norm,attention,mlp]", layers=2), Counter()
    stage.layers["1"] = middle_stage("full", layers=2).layers["1"]
    compile_blocks([stage], saves_operands=False)

    def counted(name: str) -> object:
        run = getattr(linear_ops, name)
        return patch.object(linear_ops, name, lambda *args: calls.update([name]) or run(*args))

    with no_kernels(), counted("column_forward"), counted("row_forward"):
        assert kept_bytes(stage) == (2 + QKV + 1) * INPUTS // LAYERS
        calls.clear()
        of_compiled = gradients(stage)
    assert calls == {"column_forward": 3 + 4, "row_forward": 2 + 3}
    of_eager = gradients(middle_stage(layers=2))
    for name, grad in of_eager.items():
        torch.testing.assert_close(of_compiled[name], grad, rtol=1e-4, atol=1e-5)


def gradients(stage: Stage) -> dict[str, Tensor]:
    x = hidden()
    (stage(x, *NOTHING) ** 2).sum().backward()
    kept = {
        n: state_of(p).main_grad if p.dim() == 2 else p.grad for n, p in stage.named_parameters()
    }
    return {"x": x.grad, **kept}


@pytest.mark.parametrize("recompute", [*KEPT][1:])
def test_gradients_with_recomputation_are_bit_equal(recompute: str) -> None:
    plain, again = gradients(middle_stage()), gradients(middle_stage(recompute))
    assert plain.keys() == again.keys()
    for name, grad in plain.items():
        assert grad.abs().max() > 0
        assert torch.equal(grad, again[name]), name


@pytest.mark.parametrize(
    ("recompute", "columns", "rows", "attentions", "norms"),
    [
        ("none", 2, 2, 1, 2),
        ("[norm,activation]", 2, 2, 1, 4),
        ("selective", 2, 2, 2, 2),
        ("[mlp]", 3, 2, 1, 2),
        ("[norm,attention,mlp]", 3, 2, 2, 4),
        ("full", 4, 3, 2, 4),
    ],
)
def test_recomputation_repeats_only_what_the_backward_needs(
    recompute: str, columns: int, rows: int, attentions: int, norms: int
) -> None:
    """Counts calls by layer. The GEMM that ends a recomputed part, in a layer the last one, is not
    repeated."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: object) -> object:
        def call(*args: object) -> object:
            calls[name] += 1
            return function(*args)

        return call

    stage = middle_stage(recompute)
    told: Counter[str] = Counter()
    for name, parameter in stage.named_parameters():
        state_of(parameter).register_grad_ready = lambda name=name: told.update([name])
    with (
        patch.object(linear_ops, "column_forward", counted("column", linear_ops.column_forward)),
        patch.object(linear_ops, "row_forward", counted("row", linear_ops.row_forward)),
        patch.object(
            transformer, "causal_attention", counted("attention", transformer.causal_attention)
        ),
        patch.object(ops, "rms_norm_forward", counted("norm", ops.rms_norm_forward)),
    ):
        stage(hidden(), *NOTHING).sum().backward()
    assert calls == {
        "column": columns * LAYERS,
        "row": rows * LAYERS,
        "attention": attentions * LAYERS,
        "norm": norms * LAYERS,
    }
    linears = [name for name, p in stage.named_parameters() if p.dim() == 2]
    assert told == Counter(linears)  # each bucket gets the gradient of each weight once


def test_evaluation_keeps_nothing() -> None:
    stage = middle_stage("full")
    with torch.no_grad():
        assert kept_bytes(stage) == 0


@pytest.mark.slow
def test_layers_of_an_8b_model_keep_two_gib_of_activations_for_a_sequence() -> None:
    """Tests the savings that let Llama 3 8B train on eight GPUs of 80 GB, as dp=8 zero=1 or tp=8.

    It keeps 32 inputs of 8192 × 4096 in bf16, where `recompute=none` keeps above 30 GiB. Nothing is
    computed here.
    """
    model = ModelConfig(**yaml.safe_load((conf_dir() / "model" / "llama3_8b.yaml").read_text()))
    kept = {}
    for recompute in ("none", "full"):
        context = BuildContext(
            Initializer(1, torch.bfloat16, torch.device("meta")),
            SINGLE,
            False,
            Repeats.of(recompute),
        )
        stage = Stage(model, StageBlueprint.plain(range(model.num_layers)), context)
        sizes: dict[int, int] = {}
        tables = [table for pair in stage.rotary for table in pair]
        own = {p.untyped_storage()._cdata for p in (*stage.parameters(), *tables)}

        def pack(tensor: Tensor, own: set = own, sizes: dict = sizes) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                sizes[storage._cdata] = storage.nbytes()
            return tensor

        x = torch.empty(1, model.seq_length, model.hidden_size, dtype=torch.bfloat16, device="meta")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = stage(x.requires_grad_(), *NOTHING)
        kept[recompute] = sum(sizes.values())
        del out
    assert kept["full"] == 32 * 8192 * 4096 * 2 == 2 * 2**30
    assert kept["none"] > 30 * 2**30
