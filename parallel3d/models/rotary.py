"""Tables of rotary positions (RoPE, Su et al. 2021), scaled to longer sequences in four ways."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.context_parallel.documents import Documents
from parallel3d.device.accelerator import has_values
from parallel3d.models.dialect import LLAMA3, LONGROPE, YARN, Rope
from parallel3d.models.keys import ModelConfig
from parallel3d.models.ops import Rotary


class Positions(NamedTuple):
    """The position data that attention needs for the tokens of a micro-batch.

    Attributes:
        rotary: cos and sin for each kind of rotary positions in the model (`model.ropes`).
        temperature: factors that multiply the queries, (s, 1) or (b, 1, s, 1), or None.
    """

    rotary: tuple[Rotary, ...] = ()
    temperature: Tensor | None = None


def rotary_tables(
    model: ModelConfig, rope: Rope, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """Returns cos and sin of position · frequency: (rows, 1, r/2) each, fp32 or better.

    The frequency of pair d is base^(-2d/r), scaled by `model.rope_scaling` if `rope.is_scaled`. The
    row of a position is its number, except that with a `rope_switch` as many rows for documents
    of at most that length come first. `rows_read` returns the rows of tokens.
    """
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    lengths = model.rotary_lengths(rope)
    if not has_values(device):  # a host has no room for those of the longest sequences of a plan
        shape = sum(lengths), 1, rope.pairs
        cos, sin = (torch.empty(shape, dtype=kind, device=device) for _ in range(2))
        return cos, sin
    angles, factor = [], 1.0
    for length in lengths:
        frequency, factor = frequencies(model, rope, length)
        # fp32 is too coarse for the angles of late positions.
        angles.append(torch.outer(torch.arange(length, dtype=torch.float64), frequency))
    angle = torch.cat(angles)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return cos.unsqueeze(1).to(device, kind), sin.unsqueeze(1).to(device, kind)


def rope_switch(model: ModelConfig, rope: Rope) -> int | None:
    """Returns the length up to which documents are rotated with other frequencies.

    It is None if documents of all lengths have the same frequencies. Only LongRoPE has a switch,
    and only if a sample is longer.
    """
    short, *longer = model.rotary_lengths(rope)
    return short if longer else None


def length_with_short_factors(model: ModelConfig) -> int | None:
    """Returns the length beyond which a text needs LongRoPE's long factors.

    It is None if the model reads texts of that length, or has only one set of factors.
    """
    switches = model.rope_scaling == LONGROPE and any(rope.is_scaled for rope in model.ropes)
    original = model.rope_original_length
    return original if switches and model.seq_length <= original else None


def rows_read(length: int, documents: Documents | None, switch: int | None) -> slice | Tensor:
    """Returns the rows of a table from `rotary_tables` that the tokens of samples read.

    Args:
        length: number of tokens of each sample, if `documents` is None.
        documents: the documents, or None if each sample is one document.
        switch: the table's `rope_switch`.
    """
    if documents is None:
        first = switch if switch is not None and length > switch else 0
        return slice(first, first + length)
    read = documents.positions()
    return read if switch is None else read + switch * documents.are_longer_than(switch)


def frequencies(model: ModelConfig, rope: Rope, length: int) -> tuple[Tensor, float]:
    """Returns the frequencies of the pairs, (r/2,) in fp64, and the factor for cos and sin.

    The frequency of a pair is the angle by which it turns from one position to the next. `length`
    is the number of tokens of the document.
    """
    rotated = rope.pairs * 2
    exponent = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    plain = rope.base**-exponent
    if not rope.is_scaled:
        return plain, 1.0
    if model.rope_scaling == LONGROPE:
        return _longrope(plain, model, length), _attention_factor(model)
    if model.rope_scaling == YARN:
        return _yarn(plain, rope.base, model), _attention_factor(model)
    if model.rope_scaling_factor == 1:
        return plain, 1.0
    if model.rope_scaling == LLAMA3:
        return _llama3(plain, model), 1.0
    return plain / model.rope_scaling_factor, 1.0


def _llama3(frequency: Tensor, model: ModelConfig) -> Tensor:
    """Scales frequencies like `apply_scaling` in Llama 3.1's reference_impl.

    A pair that turns less than `rope_low_freq_factor` times in `rope_original_length` tokens turns
    `rope_scaling_factor` times slower, and a pair that turns more than `rope_high_freq_factor`
    times is unchanged. In between, the factor is linear in the number of turns.
    """
    turns = frequency * model.rope_original_length / (2 * math.pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / model.rope_scaling_factor)


def _yarn(frequency: Tensor, base: float, model: ModelConfig) -> Tensor:
    """Scales frequencies like YaRN (Peng et al. 2023, arXiv:2309.00071, §3.2).

    A pair that turns more than `rope_beta_fast` times in `rope_original_length` tokens is
    unchanged, and a pair that turns less than `rope_beta_slow` times turns `rope_scaling_factor`
    times slower. In between, the two are blended linearly in the index of the pair.
    """
    pairs = len(frequency)

    def pair_of(turns: float) -> float:
        ratio = model.rope_original_length / (turns * 2 * math.pi)
        return pairs * math.log(ratio) / math.log(base)

    first, last = pair_of(model.rope_beta_fast), pair_of(model.rope_beta_slow)
    if model.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    # Like the transformers library, this clips to the number of rotated dimensions, not of pairs.
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 1e-3
    slowed = ((torch.arange(pairs, dtype=torch.float64) - first) / width).clamp(0, 1)
    return frequency * (1 - slowed) + frequency / model.rope_scaling_factor * slowed


def _longrope(frequency: Tensor, model: ModelConfig, length: int) -> Tensor:
    """Divides each frequency by its factor (LongRoPE, Ding et al. 2024, arXiv:2402.13753).

    Like in the transformers library, the length of a whole document decides between short and long
    factors. The length of the other documents in its batch has no influence.
    """
    is_long = length > model.rope_original_length
    factors = model.rope_long_factors if is_long else model.rope_short_factors
    return frequency / torch.tensor(factors, dtype=torch.float64)


def _attention_factor(model: ModelConfig) -> float:
    """Returns the factor that multiplies cos and sin; scores grow with its square."""
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    log = math.log(model.rope_scaling_factor)
    if model.rope_scaling == YARN:
        return 0.1 * log + 1.0
    return math.sqrt(1.0 + log / math.log(model.rope_original_length))


def temperatures(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Returns the factor for the query at each position, (seq_length, 1) in fp32 or better.

    If `model.query_temperature` is 0, it returns None, and queries are not scaled. The factors grow
    with every further `rope_original_length` tokens, to keep attention over more keys equally sharp
    (Llama 4, Ministral 3).
    """
    if not model.query_temperature:
        return None
    wide = torch.promote_types(dtype, torch.float32)
    if not has_values(device):
        return torch.empty(model.seq_length, 1, dtype=wide, device=device)
    position = torch.arange(model.seq_length, dtype=torch.float64)
    periods = torch.floor(position / model.rope_original_length)
    factor = 1.0 + model.query_temperature * torch.log1p(periods)
    return factor.unsqueeze(1).to(device, wide)
