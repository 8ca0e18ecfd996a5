"""Compares the tables of each RoPE scaling with transformers' frequencies and with the formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from parallel3d.context_parallel.documents import Documents, make_documents, whole_samples
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.models.dialect import Rope
from parallel3d.models.keys import ModelConfig
from parallel3d.models.rotary import (
    frequencies,
    length_with_short_factors,
    rope_switch,
    rotary_tables,
    rows_read,
    temperatures,
)

PAIRS = 12
PLAIN = ModelConfig(
    hidden_size=128,
    num_attention_heads=4,
    rotary_percent=0.75,
    position_embedding="rope",
    rotary_base=10000.0,
    seq_length=40,
    rope_original_length=32,
)
SHORT = [1.0 + 0.1 * i for i in range(PAIRS)]
LONG = [2.0 + 0.5 * i for i in range(PAIRS)]
LISTS = {"rope_short_factors": SHORT, "rope_long_factors": LONG}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"rope_scaling": "linear", "rope_scaling_factor": 8.0},
        {"rope_type": "linear", "factor": 8.0},
    ),
    (
        {"rope_scaling": "llama3", "rope_scaling_factor": 8.0, "rope_original_length": 4096},
        {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 4096},
        },
    ),
    (
        {"rope_scaling": "yarn", "rope_scaling_factor": 16.0, "rope_original_length": 4096},
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    ),
    (
        {
            **{"rope_scaling": "yarn", "rope_scaling_factor": 32.0, "rope_original_length": 4096},
            **{"rope_beta_fast": 20.0, "rope_beta_slow": 2.0, "rope_truncate": False},
            "rope_attention_factor": 1.7,
        },
        {
            **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.7},
        },
    ),
    *(
        (
            {"rope_scaling": "longrope", "rope_scaling_factor": 4.0, "seq_length": length, **LISTS},
            {
                **{"rope_type": "longrope", "factor": 4.0, "short_factor": SHORT},
                **{"long_factor": LONG, "original_max_position_embeddings": 32},
            },
        )
        for length in (32, 33)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "theirs"), CASES)
def test_frequencies_are_those_of_transformers(
    keys: dict[str, Any], theirs: dict[str, Any]
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = replace(PLAIN, **keys)
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=4 * model.rope_original_length,
        rope_parameters={**theirs, "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    )
    compute = ROPE_INIT_FUNCTIONS[theirs["rope_type"]]
    expected, factor = compute(config, torch.device("cpu"), seq_len=model.seq_length)
    found, ours = frequencies(model, Rope(10000.0, is_scaled=True, pairs=PAIRS), model.seq_length)
    torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=0.0)
    assert ours == pytest.approx(factor, rel=1e-12)
    cos, sin = rotary_tables(model, Rope(10000.0, True, PAIRS), torch.float64, torch.device("cpu"))
    angle = torch.arange(model.seq_length).double()[:, None] * found
    read = rows_read(model.seq_length, None, rope_switch(model, Rope(10000.0, True, PAIRS)))
    torch.testing.assert_close(cos[read].squeeze(1), ours * angle.cos())
    torch.testing.assert_close(sin[read].squeeze(1), ours * angle.sin())


def test_layers_that_are_not_scaled_have_plain_frequencies_of_their_base() -> None:
    model = replace(PLAIN, rope_scaling="yarn", rope_scaling_factor=16.0)
    found, factor = frequencies(model, Rope(500.0, is_scaled=False, pairs=PAIRS), 40)
    assert factor == 1.0
    assert found.tolist() == pytest.approx([500.0 ** (-d / PAIRS) for d in range(PAIRS)])


@pytest.mark.slow
def test_temperatures_are_those_of_transformers() -> None:
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    model = replace(PLAIN, query_temperature=0.1, rope_original_length=7)
    found = temperatures(model, torch.float64, torch.device("cpu"))
    assert found is not None
    expected = get_llama_4_attn_scale(torch.arange(40)[None], 0.1, 7)
    torch.testing.assert_close(found.flatten().float(), expected.flatten().float())
    assert temperatures(PLAIN, torch.float64, torch.device("cpu")) is None


def longrope(**changes: Any) -> ModelConfig:
    keys: dict[str, Any] = {"rope_scaling": "longrope", "rope_attention_factor": 1.0, **LISTS}
    return replace(PLAIN, **keys | changes)


def read_by(model: ModelConfig, documents: Documents) -> torch.Tensor:
    """Returns the angle of the last pair, which turns slowly, for each token."""
    rope = Rope(10000.0, is_scaled=True, pairs=PAIRS)
    cos, sin = rotary_tables(model, rope, torch.float64, torch.device("cpu"))
    rows = rows_read(0, documents, rope_switch(model, rope))
    return torch.atan2(sin[rows], cos[rows])[..., 0, -1]


def expected(positions: list[int], lengths: list[int]) -> torch.Tensor:
    slow = 10000.0 ** -((PAIRS - 1) / PAIRS)
    factors = [LONG[-1] if length > 32 else SHORT[-1] for length in lengths]
    return torch.tensor([[p * slow / f for p, f in zip(positions, factors, strict=True)]]).double()


@pytest.mark.parametrize("first", [7, 8, 32, 33])
def test_each_document_of_a_sample_has_the_factors_of_its_own_length(first: int) -> None:
    starts = np.array([[0] * first + [first] * (40 - first)], dtype=np.int32)
    documents = make_documents(starts, torch.device("cpu"), SequenceSplit(40))
    positions = [*range(first), *range(40 - first)]
    lengths = [first] * first + [40 - first] * (40 - first)
    torch.testing.assert_close(read_by(longrope(), documents), expected(positions, lengths))


def test_context_parallel_ranks_know_the_length_of_documents_that_others_hold() -> None:
    starts = np.array([[0] * 34 + [34] * 6], dtype=np.int32)
    for index in range(2):
        split = SequenceSplit(40, 2, index)
        documents = make_documents(split.pad_starts(starts), torch.device("cpu"), split)
        assert documents.shard is not None
        held = documents.shard.held[index, 0].tolist()
        places = [p if p < 34 else p - 34 for p in held]
        lengths = [34 if p < 34 else 6 for p in held]
        torch.testing.assert_close(read_by(longrope(), documents), expected(places, lengths))


@pytest.mark.parametrize("used", [32, 33])
def test_padding_does_not_count_as_length(used: int) -> None:
    documents = whole_samples(1, torch.device("cpu"), SequenceSplit(40), [used])
    found = read_by(longrope(), documents)[:, :used]
    torch.testing.assert_close(found, expected([*range(used)], [used] * used))


def test_a_model_whose_samples_are_short_has_one_table() -> None:
    model, rope = longrope(), Rope(10000.0, is_scaled=True, pairs=PAIRS)
    assert rope_switch(model, rope) == 32 and length_with_short_factors(model) is None
    model = longrope(seq_length=32)
    assert rope_switch(model, rope) is None and length_with_short_factors(model) == 32
    assert rope_switch(model, Rope(10000.0, is_scaled=False, pairs=PAIRS)) is None


def test_tables_of_a_device_without_values_take_no_memory_of_the_host() -> None:
    """The tables of 10^12 positions would be larger than any host's memory."""
    model = replace(PLAIN, seq_length=10**12, query_temperature=0.1)
    meta = torch.device("meta")
    cos, sin = rotary_tables(model, Rope(10000.0, True, PAIRS), torch.float32, meta)
    assert cos.shape == sin.shape == (10**12, 1, PAIRS)
    found = temperatures(model, torch.float32, meta)
    assert found is not None and found.shape == (10**12, 1)
