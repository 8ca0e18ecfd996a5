"""`recompute` on one rank: what is kept, what is run again, and that gradients are added once."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import yaml
from torch import Tensor

from parallel3d.comm.group import SINGLE
from parallel3d.config.schema import ModelConfig, conf_dir
from parallel3d.models import transformer
from parallel3d.models.transformer import BuildContext, Stage, compile_blocks
from parallel3d.parameters.pieces import Initializer
from parallel3d.sizes.recompute import recomputing
from parallel3d.tensor_parallel import linear_nodes
from tests.kernels import no_kernels

LAYERS, BATCH, SEQUENCE, HIDDEN = 3, 2, 16, 32
MODEL = ModelConfig(
    num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=8, num_query_groups=2,
    ffn_hidden_size=56, seq_length=SEQUENCE, vocab_size=61, norm="rmsnorm",
    position_embedding="rope", activation="swiglu", bias=False, tie_embeddings=False,
)  # fmt: skip
NOTHING = (None, None, None)


def middle_stage(recompute: str, layers: int = LAYERS, first: int | None = None) -> Stage:
    """Layers without embedding and head; parameters keep their gradients in main_grad. `first`:
    how many of them recompute."""
    init = Initializer(5, torch.float32, torch.device("cpu"))
    context = BuildContext(init, SINGLE, sp=False, recompute=recompute)
    stage = Stage(MODEL, range(layers), False, False, context, recomputed=first)
    for parameter in stage.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.gradient_added = lambda: None
    return stage


def hidden() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator).requires_grad_()


def kept_bytes(stage: Stage) -> int:
    """Of the activations that a forward leaves for its backward."""
    own = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    own |= {t.untyped_storage().data_ptr() for t in stage.rotary}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Compiled code keeps numbers too: layers' handles, states of generators.
        if tensor.is_floating_point() and storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = stage(hidden(), *NOTHING)  # alive: no storage is used twice
    kept = sum(sizes.values())
    del out
    return kept


INPUTS = LAYERS * BATCH * SEQUENCE * HIDDEN * 4


def test_full_keeps_the_layers_inputs_and_selective_no_heads() -> None:
    kept = {way: kept_bytes(middle_stage(way)) for way in ("none", "selective", "full")}
    assert kept["full"] == INPUTS < 0.1 * kept["none"]
    # Heads of q, and of k and v repeated for q's, against the fused projection of 8 + 2 + 2 heads.
    assert kept["none"] - kept["selective"] >= 3 * INPUTS - 1.5 * INPUTS


@pytest.mark.parametrize("way", ["selective", "full"])
def test_some_layers_recompute_and_the_others_keep_what_they_kept(way: str) -> None:
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


def test_compiled_full_keeps_the_layers_inputs() -> None:
    stage = middle_stage("full", layers=2)
    compile_blocks([stage], keeps_operands=False)
    with no_kernels():
        assert kept_bytes(stage) == INPUTS * 2 // LAYERS


def gradients(recompute: str) -> tuple[Tensor, dict[str, Tensor]]:
    stage, x = middle_stage(recompute), hidden()
    (stage(x, *NOTHING) ** 2).sum().backward()
    return x.grad, {n: p.main_grad for n, p in stage.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradients_are_those_without_it_bit_for_bit(recompute: str) -> None:
    plain, again = gradients("none"), gradients(recompute)
    assert torch.equal(plain[0], again[0])
    assert plain[1].keys() == again[1].keys()
    for name, grad in plain[1].items():
        assert grad.abs().max() > 0
        assert torch.equal(grad, again[1][name]), name


@pytest.mark.parametrize(
    ("recompute", "columns", "rows", "attentions"),
    [("none", 2, 2, 1), ("selective", 2, 2, 2), ("full", 4, 3, 2)],
)
def test_what_runs_again_is_what_the_backward_needs(
    recompute: str, columns: int, rows: int, attentions: int
) -> None:
    """Calls by layer. The second row-parallel GEMM, a layer's last, is never run again."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: object) -> object:
        def call(*args: object) -> object:
            calls[name] += 1
            return function(*args)

        return call

    stage = middle_stage(recompute)
    told: Counter[str] = Counter()
    for name, parameter in stage.named_parameters():
        parameter.gradient_added = lambda name=name: told.update([name])
    with (
        patch.object(
            linear_nodes, "column_forward", counted("column", linear_nodes.column_forward)
        ),
        patch.object(linear_nodes, "row_forward", counted("row", linear_nodes.row_forward)),
        patch.object(
            transformer, "causal_attention", counted("attention", transformer.causal_attention)
        ),
    ):
        stage(hidden(), *NOTHING).sum().backward()
    assert calls == {
        "column": columns * LAYERS,
        "row": rows * LAYERS,
        "attention": attentions * LAYERS,
    }
    linears = [name for name, p in stage.named_parameters() if p.dim() == 2]
    assert told == Counter(linears)  # each bucket hears of each weight once


def test_evaluation_keeps_nothing() -> None:
    stage = middle_stage("full")
    with torch.no_grad():
        assert kept_bytes(stage) == 0


def test_layers_of_an_8b_model_keep_two_gib_of_activations_for_a_sequence() -> None:
    """What lets Llama 3 8B train on eight GPUs of 80 GB, as dp=8 zero=1 or tp=8: 32 inputs of
    8192 × 4096 in bf16, where `recompute=none` keeps above 30 GiB. Nothing is computed here."""
    model = ModelConfig(**yaml.safe_load((conf_dir() / "model" / "llama3_8b.yaml").read_text()))
    kept = {}
    for recompute in ("none", "full"):
        context = BuildContext(
            Initializer(1, torch.bfloat16, torch.device("meta")), SINGLE, False, recompute
        )
        stage = Stage(model, range(model.num_layers), False, False, context)
        sizes: dict[int, int] = {}
        own = {p.untyped_storage()._cdata for p in (*stage.parameters(), *stage.rotary)}

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
