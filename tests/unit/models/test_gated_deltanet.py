"""Tests gated DeltaNet's parts by themselves: its convolution, its norms, documents, decoding."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.context_parallel.documents import Pieces, make_documents
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.models.convolution import causal_convolution
from parallel3d.models.declared import layer_kinds
from parallel3d.models.decoding import Decoder, blank_stage
from parallel3d.models.gated_deltanet import DeltaState, GatedDeltaNet, with_length
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.transformer import Stage
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config
from tests.distributed.seams import DECODED, planted

MODEL = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=80, vocab_size=61,
    vocab_multiple=8, norm="rmsnorm", position_embedding="rope", bias=False,
    layer_types=["gated_deltanet", "full"], delta_key_heads=2, delta_value_heads=4,
    delta_key_size=4, delta_value_size=6, delta_negative=True,
)  # fmt: skip
# Places in documents of the tokens of two samples
PLACES = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 0], [0, 0, 1, 2, 0, 1, 2, 3, 4]])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()


def stage_of(model: ModelConfig = MODEL) -> tuple[Stage, Decoder]:
    """Returns the model in fp64 with large weights, and its decoder."""
    config = Config(model=model, dp=1)
    config.precision.name = "fp64"
    groups = ProcessGroups.single()
    stage = blank_stage(blueprint_of(config), groups, torch.device("cpu"))
    rng = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(0, 0.3, generator=rng)
    return stage, Decoder(model, groups, stage)


def mixer_of(stage: Stage) -> GatedDeltaNet:
    mixer = stage.blocks["0"].attention
    assert isinstance(mixer, GatedDeltaNet)
    return mixer


def test_the_convolution_is_that_of_torch_in_each_document() -> None:
    x, weight = drawn(2, 9, 5), drawn(5, 4, seed=1)
    whole = torch.cat(causal_convolution(x, weight, None, (2, 3)), dim=-1)
    found = torch.cat(causal_convolution(x, weight, PLACES, (5,)), dim=-1)

    def plain(part: Tensor) -> Tensor:
        padded = F.pad(part.mT, (3, 0)).unsqueeze(0)
        return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=5))[0].mT

    for sample, places in enumerate(PLACES.tolist()):
        torch.testing.assert_close(whole[sample], plain(x[sample]), rtol=1e-14, atol=1e-14)
        begins = [t for t, place in enumerate(places) if place == 0]
        for first, end in zip(begins, [*begins[1:], 9], strict=True):
            expected = plain(x[sample, first:end])
            torch.testing.assert_close(found[sample, first:end], expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("given", [0, 1, 3, 5])
def test_tokens_before_are_read_and_get_their_gradients(given: int) -> None:
    """The first tokens are of another piece of the sequence, or of an earlier call."""
    x, weight = drawn(2, 9, 5), drawn(5, 4, seed=1)
    whole = torch.cat(causal_convolution(x, weight, None, (5,)), dim=-1)
    places = torch.arange(given, 9)
    (part,) = causal_convolution(x, weight, places, (5,))
    torch.testing.assert_close(part, whole[:, given:], rtol=0.0, atol=0.0)
    for seen in (places, PLACES[:, given:]):
        assert torch.autograd.gradcheck(
            lambda x, w, seen=seen: causal_convolution(x, w, seen, (2, 3)), (x, weight)
        )


def test_norms_have_the_gradients_of_their_formulas() -> None:
    y, z = drawn(2, 3, 4, 6), drawn(2, 3, 24, seed=1)
    norm = mixer_of(stage_of()[0]).norm
    root = (y.square().mean(-1, keepdim=True) + MODEL.norm_eps).sqrt()
    expected = (y / root * norm.weight).flatten(2) * F.silu(z)
    torch.testing.assert_close(norm(y, z), expected)
    inputs = (y, z, norm.weight)
    grad = drawn(2, 3, 24, seed=2)
    pairs = (torch.autograd.grad(out, inputs, grad) for out in (norm(y, z), expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda y: with_length(y, 0.3), (y,))
    length = (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(with_length(y, 0.3), 0.3 * y / length, rtol=1e-14, atol=1e-14)


def documents_of(places: Tensor) -> LayerInputs:
    starts = (torch.arange(places.shape[1]) - places).numpy().astype(np.int32)
    split = SequenceSplit(places.shape[1])
    return LayerInputs(documents=make_documents(starts, torch.device("cpu"), split))


def test_packed_documents_give_what_each_gives_alone() -> None:
    """The documents begin within chunks of 64 tokens, at their edges, and side by side."""
    mixer = mixer_of(stage_of()[0])
    begins = [0, 1, 5, 64, 65, 70]
    starts = torch.tensor([max(b for b in begins if b <= t) for t in range(80)])
    x, grad = drawn(1, 80, 16), drawn(1, 80, 16, seed=1)
    parameters = list(mixer.parameters())
    together = mixer(x, lambda x: x, documents_of((torch.arange(80) - starts)[None]))
    of_pack = torch.autograd.grad(together, (x, *parameters), grad)
    of_each: list[Any] = []
    for first, end in zip(begins, [*begins[1:], 80], strict=True):
        alone = mixer(x[:, first:end], lambda x: x, LayerInputs())
        torch.testing.assert_close(together[:, first:end], alone, rtol=1e-12, atol=1e-12)
        of_each.append(torch.autograd.grad(alone, (x, *parameters), grad[:, first:end]))
    for pack, *each in zip(of_pack, *of_each, strict=True):
        torch.testing.assert_close(pack, sum(each), rtol=1e-12, atol=1e-12)


def decoded(mixer: GatedDeltaNet, x: Tensor, prompt: int) -> Tensor:
    """Returns the outputs for a prompt, and then for one token at a time."""
    state = mixer.decoding(len(x), x)
    positions: Any = None  # it reads none
    parts = [state.step(x[:, :prompt], 0, positions)]
    parts += [state.step(x[:, t : t + 1], t, positions) for t in range(prompt, x.shape[1])]
    return torch.cat(parts, dim=1)


@planted(DECODED)
def the_last_tokens_are_forgotten(sound: Any, state: DeltaState, *of: Any) -> Tensor:
    """Each token passes the convolution as if it were the first."""
    state.last = None
    return sound(state, *of)


@pytest.mark.parametrize("prompt", [1, 2, 16])
@torch.no_grad()
def test_64_tokens_one_by_one_give_what_they_give_at_once(prompt: int) -> None:
    mixer, x = mixer_of(stage_of()[0]), drawn(1, prompt + 64, 16)
    expected = mixer(x, lambda x: x, LayerInputs())
    found = decoded(mixer, x, prompt)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    with the_last_tokens_are_forgotten():
        assert (decoded(mixer, x, prompt) - expected).abs().max() > 1e-3


def test_an_evaluation_takes_the_way_of_states_that_is_configured() -> None:
    config = Config(model=MODEL, dp=1)
    config.context_parallel.states = "heads"
    groups = ProcessGroups.single()
    stage = blank_stage(blueprint_of(config), groups, torch.device("cpu"))
    assert mixer_of(stage).states == "heads"


@torch.no_grad()
def test_a_sequence_begins_without_the_states_of_the_one_before() -> None:
    mixer, x = mixer_of(stage_of()[0]), drawn(2, 9, 16)
    state, positions = mixer.decoding(9, x), LayerInputs().positions
    state.step(x[:1], 0, positions)
    again = state.step(x[1:], 0, positions)
    assert torch.equal(again, mixer.decoding(9, x).step(x[1:], 0, positions))
    assert state.matrices is not None and state.matrices.shape == (1, 4, 4, 6)
    assert state.last is not None and state.last.shape == (1, 3, 4 * 6 + 2 * 2 * 4)


def test_16_bit_layers_compute_states_rates_and_norms_in_fp32() -> None:
    """Rates near 1 in 16 bits would be off by up to 0.4 %, and states by more."""
    exact, x = mixer_of(stage_of()[0]), drawn(2, 80, 16).detach()
    narrow = copy.deepcopy(exact).to(torch.bfloat16)
    for name, parameter in exact.named_parameters():
        if name in ("rates.A_log", "rates.dt_bias", "norm.weight"):
            narrow.get_parameter(name).data = parameter.data.float()
    a, b = (drawn(2, 80, 4, seed=seed).bfloat16() for seed in (1, 2))
    for rate, expected in zip(narrow.rates(a, b), exact.rates(a.double(), b.double()), strict=True):
        assert rate.dtype == torch.float32
        torch.testing.assert_close(rate.double(), expected, rtol=1e-5, atol=1e-6)
    found = narrow(x.bfloat16(), lambda x: x, LayerInputs())
    expected = exact(x, lambda x: x, LayerInputs())
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).abs().max() < 0.02 * expected.abs().max()


def test_kinds_have_the_heads_of_their_mixer() -> None:
    found = {kind.mixer: (kind.heads, kind.kv_heads, kind.head_size) for kind in layer_kinds(MODEL)}
    assert found == {"gated_deltanet": (4, 2, 6), "attention": (4, 4, 4)}


@pytest.mark.parametrize("cp", [2, 4])
def test_auto_takes_the_way_of_fewer_bytes_over_cp(cp: int) -> None:
    """A rank gives its pieces' states to all others, or all but its share of its tokens."""
    heads, keys, dk, dv, taps, item = 8, 4, 4, 6, 4, 2
    of_z, values, of_keys = heads * dv, heads * dv, keys * dk
    channels = values + 2 * of_keys
    of_state = heads * dk * (dk + dv) * 4 + (taps - 1) * channels * item
    by_chain = (cp - 1) * 2 * of_state
    of_token = (2 * heads + channels + values) * item  # b, a, v, q, k, and the output
    places = torch.zeros(1, 2, dtype=torch.int64)
    mixer: Any = SimpleNamespace(
        cp=SimpleNamespace(group=SimpleNamespace(size=cp)),
        inner=SimpleNamespace(sizes=(of_z, heads, heads, values, of_keys, of_keys)),
        conv=SimpleNamespace(weight=torch.empty(channels, taps)),
        states="auto",
        key_size=dk,
        value_size=dv,
    )
    taken = []
    for tokens in (1, 10, 20, 40, 80, 200):
        x = torch.empty(1, tokens, channels, dtype=torch.bfloat16)
        is_by_heads = GatedDeltaNet.sends_less_by_heads(mixer, x, Pieces(places, places))
        assert is_by_heads == ((cp - 1) / cp * tokens * of_token < by_chain)
        taken.append(is_by_heads)
    assert taken[0] and not taken[-1]
