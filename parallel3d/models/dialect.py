"""Keys in which model families differ: types of attention layers, RoPE, norms, scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from parallel3d.config.values import REFUSED, key

# Values of `model.layer_types`: attention with or without a window, and without positions (NoPE).
FULL, SLIDING, FULL_NOPE, SLIDING_NOPE = "full", "sliding", "full_nope", "sliding_nope"
LAYER_TYPES = (FULL, SLIDING, FULL_NOPE, SLIDING_NOPE)
# A further value: a recurrence over the tokens in place of attention.
GATED_DELTANET = "gated_deltanet"

NORM_POSITIONS = ("before", "after", "both")
# Values of `model.rope_scaling`.
LLAMA3, LINEAR, YARN, LONGROPE = "llama3", "linear", "yarn", "longrope"


class Rope(NamedTuple):
    """Rotary positions of a kind of attention.

    Attributes:
        base: base θ.
        is_scaled: whether `model.rope_scaling` applies.
        pairs: number of pairs of a head's dimensions that are rotated.
    """

    base: float
    is_scaled: bool
    pairs: int


class AttentionKind(NamedTuple):
    """The attention of a layer.

    Attributes:
        window: number of keys that a query sees, including its own, or None for all up to its own.
        rope: rotary positions, or None if RoPE does not rotate q and k.
        heads: number of query heads.
        kv_heads: number of key-value heads.
        head_size: width of a head.
    """

    window: int | None
    rope: Rope | None
    heads: int
    kv_heads: int
    head_size: int


@dataclass
class LayerTypeKeys:
    """Types of attention layers, and the window of sliding ones."""

    RESUME: ClassVar[str] = REFUSED
    layer_types: list[str] = key(
        [],
        "attention of each layer, a pattern that is repeated, as [sliding,sliding,full]: full, or "
        "sliding with model.sliding_window, or either without positions (full_nope, "
        "sliding_nope), or gated_deltanet in its place (Yang et al. 2025); []: every layer is full",
    )
    sliding_window: int | None = key(
        None,
        "number of keys that a query of a sliding layer sees, its own included; null: no sliding "
        "layers",
        minimum=1,
        tried=(5,),
    )
    sliding_rotary_base: float | None = key(
        None,
        "RoPE base θ of sliding layers, whose frequencies are then unscaled; null: the same as in "
        "full layers",
        above=1,
    )


@dataclass
class DeltaKeys:
    """The heads of gated DeltaNet (Yang et al. 2025), and its convolution."""

    RESUME: ClassVar[str] = REFUSED
    delta_key_heads: int | None = key(
        None,
        "gated_deltanet: heads of q and k, which value heads share; null: as many as query heads",
        minimum=1,
        tried=(2,),
    )
    delta_value_heads: int | None = key(
        None,
        "gated_deltanet: heads of v, of the gates and of the output; null: delta_key_heads",
        minimum=1,
    )
    delta_key_size: int | None = key(
        None, "gated_deltanet: width of a head of q and k; null: head_dim", minimum=1
    )
    delta_value_size: int | None = key(
        None, "gated_deltanet: width of a value head; null: delta_key_size", minimum=1
    )
    delta_convolution: int = key(
        4,
        "gated_deltanet: tokens that the convolution of q, k and v reads, its own included",
        minimum=1,
        tried=(2,),
    )
    delta_negative: bool = key(
        False,
        "gated_deltanet: the learning rate β is 2σ instead of σ, so that states may change their "
        "sign (Grazzi et al. 2025; Olmo Hybrid)",
    )
    delta_norm_eps: float | None = key(
        None,
        "gated_deltanet: epsilon inside the norm of each head's output; null: norm_eps",
        above=0,
    )
    delta_norm_position: str | None = key(
        None,
        "where a gated_deltanet layer has norms over hidden_size (OLMo Hybrid: before, as the "
        "others have them after); null: norm_position",
        choices=NORM_POSITIONS,
    )


@dataclass
class RopeKeys:
    """The ways in which RoPE is scaled to longer sequences."""

    RESUME: ClassVar[str] = REFUSED
    rope_scaling: str = key(
        LLAMA3,
        "how RoPE is scaled: linear divides all frequencies by rope_scaling_factor; llama3 only "
        "the low ones; yarn only those with fewer turns than rope_beta_fast (Peng et al. 2023); "
        "longrope has a divisor for each pair (Ding et al. 2024)",
        choices=(LLAMA3, LINEAR, YARN, LONGROPE),
    )
    rope_beta_fast: float = key(
        32.0,
        "yarn: frequencies with more turns than this in rope_original_length are unchanged",
        above=0,
    )
    rope_beta_slow: float = key(
        1.0, "yarn: frequencies with fewer turns than this are divided by the factor", above=0
    )
    rope_truncate: bool = key(
        True, "yarn: the pairs at which the ramp begins and ends are whole numbers"
    )
    rope_attention_factor: float | None = key(
        None,
        "yarn and longrope: factor of cos and sin; null: 0.1 · ln f + 1 in yarn and "
        "√(1 + ln f / ln rope_original_length) in longrope, with f = rope_scaling_factor",
        above=0,
        tried=(1.2,),
    )
    rope_short_factors: list[float] = key(
        [],
        "longrope: divisors of the frequencies in documents of at most rope_original_length tokens",
    )
    rope_long_factors: list[float] = key(
        [], "longrope: divisors of the frequencies in longer documents"
    )


@dataclass
class DialectKeys:
    """Positions of the norms, the form of their weights, and constant scale factors."""

    RESUME: ClassVar[str] = REFUSED
    norm_position: str = key(
        "before",
        "where a layer has norms: before attention and MLP, after them (OLMo 2), or both (Gemma, "
        "GLM-4)",
        choices=NORM_POSITIONS,
    )
    norm_zero_centered: bool = key(
        False,
        "RMSNorms multiply by 1 + weight, whose initial value is 0 (Gemma)",
    )
    embedding_scale: float = key(
        1.0,
        "factor of the word embedding, rounded to the dtype of the computation (Gemma: "
        "√hidden_size)",
        above=0,
    )
    residual_scale: float = key(
        1.0,
        "factor of the outputs of attention and MLP before they are added to the residual stream "
        "(Granite)",
        above=0,
    )
    attention_scale: float | None = key(
        None, "factor of the attention scores; null: head_dim^-½", above=0
    )
    attention_logit_cap: float | None = key(
        None,
        "c of c · tanh(score / c), to which attention caps its scaled scores before the mask "
        "(Gemma 2); no kernel does so, so the scores are materialised; null: no cap",
        above=0,
        tried=(50.0,),
    )
    logit_scale: float = key(1.0, "factor of the logits (Granite, Cohere)", above=0)
    logit_cap: float | None = key(
        None, "c of c · tanh(logits / c), after the scale (Gemma); null: no cap", above=0
    )
    query_temperature: float = key(
        0.0,
        "β of the factor 1 + β · ln(1 + ⌊position / rope_original_length⌋) of queries "
        "(Ministral 3); 0: none",
        minimum=0,
    )
