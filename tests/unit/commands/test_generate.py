"""Tests that the decoder with its cache equals the model, and that draws only depend on seed and
logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.from_run import GENERATE, config_from_run, take_prompt
from parallel3d.commands.generate import TokenSampler, check_length
from parallel3d.commands.options import GenerateConfig
from parallel3d.errors import UserError
from parallel3d.models.decoding import Decoder, blank_stage
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.transformer import Stage
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config

GPT = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=12,
    vocab_size=61,
    vocab_multiple=8,
    max_position_embeddings=20,
)
LLAMA = dataclasses.replace(
    GPT,
    norm="rmsnorm",
    position_embedding="rope",
    activation="swiglu",
    bias=False,
    tie_embeddings=False,
    num_query_groups=2,
)
QWEN3 = dataclasses.replace(
    LLAMA, qk_norm=True, head_dim=6, attention_bias="all", rope_scaling_factor=4.0
)

OLMOE = dataclasses.replace(
    LLAMA, qk_norm=True, qk_norm_width="full", num_experts=4, shared_expert_size=8
)

SLIDING = dataclasses.replace(
    LLAMA, layer_types=["sliding", "full_nope"], sliding_window=4, attention_scale=0.3
)
OLMO3 = dataclasses.replace(LLAMA, layer_types=["sliding"], sliding_window=7, rotary_base=50.0)


GEMMA = dataclasses.replace(
    QWEN3,
    activation="geglu",
    norm_position="both",
    norm_zero_centered=True,
    embedding_scale=5.7,
    residual_scale=0.6,
    attention_scale=0.3,
    attention_logit_cap=0.5,
    logit_scale=0.7,
    logit_cap=2.0,
    query_temperature=0.4,
    rope_scaling="yarn",
    rope_original_length=5,
)
LONGROPE = dataclasses.replace(
    SLIDING,
    layer_types=["sliding", "full"],
    sliding_rotary_base=50.0,
    rope_scaling="longrope",
    rope_scaling_factor=2.0,
    rope_original_length=8,
    rope_short_factors=[1.0, 1.2, 1.4, 1.1],
    rope_long_factors=[1.5, 3.0, 2.0, 4.0],
)
OLMO2 = dataclasses.replace(OLMOE, norm_position="after")
GATED = dataclasses.replace(
    QWEN3, attention_gate=True, layer_types=["sliding", "full"], sliding_window=4
)
SINKS = dataclasses.replace(
    QWEN3, attention_sinks=True, layer_types=["sliding", "full"], sliding_window=4
)
GPT_OSS = dataclasses.replace(
    SINKS,
    **{"num_experts": 4, "experts_per_token": 2, "bias": False, "attention_bias": "all"},
    **{"expert_bias": True, "router_logit_bias": True, "swiglu_limit": 0.5, "qk_norm": False},
)
DELTA = dataclasses.replace(
    LLAMA,
    layer_types=["gated_deltanet", "full"],
    delta_key_heads=1,
    delta_value_heads=2,
    delta_key_size=5,
)


def decoder_of(model: ModelConfig) -> tuple[Decoder, Stage]:
    config = Config(model=model, dp=1)
    config.precision.name = "fp64"
    groups = ProcessGroups.single()
    stage = blank_stage(blueprint_of(config), groups, torch.device("cpu"))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return Decoder(model, groups, stage), stage


def whole_forward(stage: Stage, tokens: list[int]) -> Tensor:
    """Returns logits of the last position by the trained forward pass, without a cache."""
    with torch.no_grad():
        x = stage.embedding(torch.tensor([tokens]), LayerInputs())
        inputs = stage.with_positions(LayerInputs(), 1, len(tokens))
        for block in stage.layers.values():
            x = block(x, inputs)
        return stage.head.logits(x)[0, -1, : stage.head.model.vocab_size]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model",
    [
        GPT,
        LLAMA,
        QWEN3,
        OLMOE,
        SLIDING,
        OLMO3,
        GEMMA,
        OLMO2,
        LONGROPE,
        GATED,
        SINKS,
        DELTA,
        GPT_OSS,
    ],
    ids=[
        *("gpt", "llama", "qwen3", "olmoe", "sliding", "olmo3", "gemma", "olmo2", "longrope"),
        *("gate", "sinks", "deltanet", "gpt-oss"),
    ],
)
@pytest.mark.parametrize("prompt", [1, 5, 12, 31])
def test_cached_logits_are_those_of_the_whole_sequence_in_view(
    model: ModelConfig, prompt: int
) -> None:
    decoder, stage = decoder_of(model)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 61, (prompt + 30,), generator=generator).tolist()
    views = set()
    for length in range(prompt, len(tokens) + 1):
        logits = decoder.logits(tokens[:length])
        view = tokens[decoder.start : length]
        # The window never exceeds the training length, and is never below half of it.
        assert min(length, model.seq_length // 2) <= len(view) <= model.seq_length
        assert length > model.seq_length or decoder.start == 0
        torch.testing.assert_close(logits, whole_forward(stage, view), rtol=1e-9, atol=1e-9)
        views.add(decoder.start)
    assert len(views) > 3


def test_text_that_needs_the_long_factors_of_a_short_run_is_refused() -> None:
    check_length(LONGROPE, 5, 100)
    short = dataclasses.replace(LONGROPE, seq_length=8)
    check_length(short, 5, 4)
    with pytest.raises(UserError, match=r"the nearest is generate\.max_tokens=4, or import"):
        check_length(short, 5, 5)
    with pytest.raises(UserError, match="give a shorter prompt"):
        check_length(short, 9, 1)


def test_several_new_tokens_at_once_give_the_same_logits() -> None:
    decoder, stage = decoder_of(LLAMA)
    tokens = list(range(9))
    decoder.logits(tokens[:4])
    logits = decoder.logits(tokens)
    torch.testing.assert_close(logits, whole_forward(stage, tokens), rtol=1e-9, atol=1e-9)


def test_a_sliding_layer_caches_its_window_alone() -> None:
    decoder, _ = decoder_of(SLIDING)
    assert [state.kept.shape[3] for state in decoder.states.values()] == [4, 12]
    short, _ = decoder_of(dataclasses.replace(SLIDING, sliding_window=40))
    assert [state.kept.shape[3] for state in short.states.values()] == [12, 12]


def test_a_cache_that_is_one_key_too_short_shows() -> None:
    decoder, stage = decoder_of(SLIDING)
    decoder.states["0"].kept = decoder.states["0"].kept[:, :, :, :-1]
    tokens = list(range(9))
    for length in range(4, 10):
        logits = decoder.logits(tokens[:length])
    assert (logits - whole_forward(stage, tokens)).abs().max() > 1e-6


def draws(seed: int, logits: Tensor, count: int, **settings: object) -> list[int]:
    sampler = TokenSampler(GenerateConfig(**settings), seed)
    return [sampler.draw(logits) for _ in range(count)]


@pytest.mark.nightly
def test_draws_follow_the_softmax_and_the_seed() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -50.0])
    some = draws(1, logits, 4000, temperature=0.5)
    shares = torch.bincount(torch.tensor(some), minlength=4) / len(some)
    expected = torch.softmax(logits / 0.5, 0)
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.03)
    assert some == draws(1, logits, 4000, temperature=0.5)
    assert some != draws(2, logits, 4000, temperature=0.5)
    noise = 1e-7 * torch.randn(4, generator=torch.Generator().manual_seed(3))
    # Another layout rounds differently.
    assert some == draws(1, logits + noise, 4000, temperature=0.5)


def test_top_k_and_temperature_zero_leave_out_the_rest() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 1.9])
    assert set(draws(1, logits, 500, temperature=1.0, top_k=2)) == {1, 3}
    assert set(draws(1, logits, 500, temperature=1.0, top_k=400)) == {0, 1, 2, 3}
    assert draws(1, logits, 5, temperature=0.0) == [1] * 5


def test_the_prompt_is_used_exactly_as_given() -> None:
    words = ["run=a", "prompt=def f(x): # ${y}, '=\n ", "tp=2"]
    assert take_prompt(words) == (["run=a", "tp=2"], "def f(x): # ${y}, '=\n ")
    assert take_prompt(["run=a"]) == (["run=a"], None)


@pytest.mark.parametrize("word", ["model=llama_tiny", "model.num_layers=3", "dp=2", "optim.lr=1"])
def test_keys_that_the_run_decides_cannot_be_given(word: str) -> None:
    with pytest.raises(UserError) as refused:
        config_from_run(GENERATE, Config(run="a"), ["tp=2", word], None)
    assert str(refused.value).startswith(f"{word}: generate takes")
