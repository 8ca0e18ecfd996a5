"""Keys of the transformer, and of recomputation and offloading in its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from parallel3d.config.conflicts import Conflict, Matches, NoneOf, OneOf
from parallel3d.config.values import (
    AUTO,
    CUDNN,
    DELTA_KERNELS,
    FLA,
    FLASH,
    FREE,
    HALF_PRECISION,
    KERNELS,
    MATH,
    NARROW,
    PACKAGES,
    REFUSED,
    REPORTED,
    TORCH,
    key,
)
from parallel3d.experts.keys import ExpertKeys
from parallel3d.models.dialect import (
    FULL,
    GATED_DELTANET,
    LAYER_TYPES,
    LINEAR,
    LLAMA3,
    LONGROPE,
    SLIDING,
    SLIDING_NOPE,
    YARN,
    AttentionKind,
    DeltaKeys,
    DialectKeys,
    LayerTypeKeys,
    Rope,
    RopeKeys,
)
from parallel3d.models.repeats import PARTS, WORDS, Repeats


@dataclass
class TransformerKeys:
    """The embedding, the attention, the MLP and the head of the transformer."""

    RESUME: ClassVar[str] = REFUSED
    name: str = key("custom", "name of the preset, for logs", resume=FREE)
    num_layers: int = key(4, "transformer layers", minimum=1, maximum=4096)
    hidden_size: int = key(128, "width of the residual stream", minimum=1)
    num_attention_heads: int = key(8, "query heads", minimum=1)
    num_query_groups: int | None = key(
        None,
        "key/value heads (GQA); null: as many as query heads",
        minimum=1,
        tried=(2,),
    )
    head_dim: int | None = key(
        None,
        "width of an attention head; null: hidden_size / num_attention_heads",
        minimum=1,
    )
    ffn_hidden_size: int | None = key(
        None,
        "width of the MLP; null: 4 × hidden_size, also for swiglu",
        minimum=1,
    )
    seq_length: int = key(256, "tokens in a training sample", minimum=1)
    max_position_embeddings: int | None = key(
        None,
        "rows of the learned position table; null: seq_length",
        minimum=1,
    )
    vocab_size: int = key(257, "number of distinct tokens (the byte tokenizer has 257)", minimum=2)
    vocab_multiple: int = key(
        128,
        "the vocabulary is padded to a multiple of this, whatever tp is; padded logits never count",
        minimum=1,
        resume=FREE,
    )
    norm: str = key(
        "layernorm",
        "normalisation",
        choices=("layernorm", "rmsnorm"),
    )
    norm_eps: float = key(1e-5, "epsilon inside the norms", above=0)
    position_embedding: str = key(
        "learned",
        "positions",
        choices=("learned", "rope", "none"),
    )
    rotary_percent: float = key(1.0, "share of each head that RoPE rotates", above=0, maximum=1)
    rotary_base: float = key(10000.0, "RoPE base θ", above=1)
    rope_scaling_factor: float = key(
        1.0,
        "scaled RoPE: frequencies are divided by this as rope_scaling says; 1: no scaling",
        minimum=1,
        tried=(4.0,),
    )
    rope_low_freq_factor: float = key(
        1.0,
        "llama3: frequencies with fewer turns than this in rope_original_length are divided",
        above=0,
    )
    rope_high_freq_factor: float = key(
        4.0,
        "llama3: frequencies with more turns than this in rope_original_length are unchanged",
        above=0,
    )
    rope_original_length: int = key(
        8192, "scaled RoPE: seq_length of the model's original training", minimum=1
    )
    qk_norm: bool = key(
        False,
        "RMSNorm of each head of q and k before RoPE (Qwen3)",
    )
    qk_norm_width: str = key(
        "head",
        "model.qk_norm normalises each head by itself, or all heads of q (and all of k) as one "
        "vector (OLMoE, MiniMax-M2)",
        choices=("head", "full"),
    )
    attention_gate: bool = key(
        False,
        "attention's output is multiplied by the sigmoid of a further projection of its input, "
        "element by element of each query head, before the output projection (Qwen3-Next)",
    )
    attention_sinks: bool = key(
        False,
        "attention has a trained number for each query head that joins the softmax as the score of "
        "a further key whose value is 0, so a head may attend to nothing (gpt-oss)",
    )
    activation: str = key(
        "gelu",
        "the MLP's non-linearity; gelu_tanh: the approximation of GPT-2's weights; "
        "geglu: gelu_tanh(gate) · up (Gemma)",
        choices=("gelu", "gelu_tanh", "relu", "swiglu", "geglu"),
    )
    swiglu_limit: float | None = key(
        None,
        "with swiglu: l of (u + 1) · g · σ(1.702 · g), where g is the gate up to l, and u is up "
        "within ±l (gpt-oss); null: silu(gate) · up",
        above=0,
        tried=(7.0,),
    )
    bias: bool = key(
        True,
        "biases in the linear layers",
    )
    attention_bias: str | None = key(
        None,
        "biases in attention: only in q, k and v (qkv, as in Qwen2), or also in the output (all); "
        "null: all or none, following bias",
        choices=("none", "qkv", "all"),
    )
    tie_embeddings: bool = key(
        True,
        "one table for the word embedding and the output head",
    )
    embedding: str = key(
        "vocab_parallel",
        "word embedding over tp: rows split, or the whole table on every rank",
        choices=("vocab_parallel", "replicated"),
        resume=FREE,
    )
    parallel_output: bool = key(
        True,
        "keep the logits split over tp up to the loss; false gathers them (slower, equal)",
        resume=FREE,
    )
    dropout: float = key(
        0.0,
        "probability of dropping an element of the output of the embedding, an attention or an "
        "MLP, or an attention probability; the same elements in every layout",
        minimum=0,
        below=1,
        resume=REPORTED,
        tried=(0.1,),
    )
    init_std: float = key(
        0.02,
        "standard deviation of the initial weights",
        above=0,
        resume=FREE,
    )


@dataclass
class OwnModelKeys:
    """A model of the user's own in place of the transformer."""

    RESUME: ClassVar[str] = REFUSED
    _target_: str | None = key(
        None,
        "class of a model of your own in place of the transformer, as my_package.my_model.MyModel",
    )
    fields: Any = key(
        None,
        "values of the fields of model._target_ by name; give them as model.NAME=…, not here",
        holds=dict[str, object],
    )


@dataclass
class ModelConfig(  # dataclass fields of the last base class come first
    OwnModelKeys, ExpertKeys, DialectKeys, RopeKeys, DeltaKeys, LayerTypeKeys, TransformerKeys
):
    """The transformer: GPT, Llama or anything between. Choose a preset: `model=llama_tiny`."""

    RESUME: ClassVar[str] = REFUSED
    # The class of its `Architecture`, as "module:class" of the package.
    ARCHITECTURE: ClassVar[str] = "models.transformer_architecture:TransformerArchitecture"

    @property
    def head_size(self) -> int:
        """Width of one attention head, even if `head_dim` is null."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def qkv_bias(self) -> bool:
        """Returns whether q, k and v have biases."""
        return self.bias if self.attention_bias is None else self.attention_bias != "none"

    @property
    def out_bias(self) -> bool:
        """Returns whether attention's output projection has a bias."""
        return self.bias if self.attention_bias is None else self.attention_bias == "all"

    @property
    def is_gated(self) -> bool:
        """Returns whether an MLP multiplies by a gate, which has a weight matrix of its own."""
        return self.activation in ("swiglu", "geglu")

    def layer_type(self, layer: int) -> str:
        """Returns the word of `layer_types` for a layer."""
        types = self.layer_types or [FULL]
        return types[layer % len(types)]

    def attention_kind(self, layer: int) -> AttentionKind:
        """Returns the kind of a layer's attention."""
        word = self.layer_type(layer)
        slides = word in (SLIDING, SLIDING_NOPE)
        rope = None
        if self.position_embedding == "rope" and word in (FULL, SLIDING):
            rope = Rope(self.rotary_base, is_scaled=True, pairs=self.rotary_pairs)
            if slides and self.sliding_rotary_base is not None:
                rope = rope._replace(base=self.sliding_rotary_base, is_scaled=False)
        window = self.sliding_window if slides else None
        heads = self.num_attention_heads
        return AttentionKind(window, rope, heads, self.kv_heads, self.head_size)

    @property
    def attention_reads_documents(self) -> bool:
        """Whether attention reads tables of documents even if each sample is one document."""
        others = self.sliding_window, self.attention_logit_cap
        return self.attention_sinks or any(key is not None for key in others)

    @property
    def attention_kinds(self) -> list[AttentionKind]:
        """The distinct kinds of attention, in the order of the first layer of each kind."""
        layers = range(self.num_layers)
        attend = (layer for layer in layers if self.layer_type(layer) in LAYER_TYPES)
        return list(dict.fromkeys(map(self.attention_kind, attend)))

    @property
    def ropes(self) -> list[Rope]:
        """The distinct rotary positions, in the order of the first layer that uses each."""
        ropes = [kind.rope for kind in self.attention_kinds if kind.rope is not None]
        return list(dict.fromkeys(ropes))

    def rotary_lengths(self, rope: Rope) -> list[int]:
        """Returns the lengths of documents that have a table of rotary positions of their own.

        Only LongRoPE has two, and only if a sample is longer than `rope_original_length`. A table
        has a row for each position of such a document.
        """
        switches = rope.is_scaled and self.rope_scaling == LONGROPE
        original = self.rope_original_length
        both = switches and self.seq_length > original
        return [original, self.seq_length] if both else [self.seq_length]

    @property
    def rotary_pairs(self) -> int:
        """Number of pairs of a head's dimensions that RoPE rotates."""
        return int(self.head_size * self.rotary_percent) // 2

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads, even if `num_query_groups` is null."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def key_heads(self) -> int:
        """Number of key heads of gated DeltaNet, even if `delta_key_heads` is null."""
        return self.delta_key_heads or self.num_attention_heads

    @property
    def value_heads(self) -> int:
        """Number of value heads of gated DeltaNet, even if `delta_value_heads` is null."""
        return self.delta_value_heads or self.key_heads

    @property
    def delta_sizes(self) -> tuple[int, int]:
        """Widths of a key head and of a value head of gated DeltaNet."""
        keys = self.delta_key_size or self.head_size
        return keys, self.delta_value_size or keys

    @property
    def ffn_size(self) -> int:
        """Width of the MLP, even if `ffn_hidden_size` is null."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_size(self) -> int:
        """Width of an expert, even if `expert_ffn_size` is null."""
        return self.expert_ffn_size or self.ffn_size

    @property
    def expert_layers(self) -> list[int]:
        """The numbers of the layers that have experts in place of an MLP."""
        return [layer for layer in range(self.num_layers) if self.has_experts(layer)]

    @property
    def max_positions(self) -> int:
        """Number of rows of the position table, even if `max_position_embeddings` is null."""
        return self.max_position_embeddings or self.seq_length

    @property
    def in_effect(self) -> dict[str, int | str]:
        """The effective values of the keys that may be null, by name."""
        return {
            "num_query_groups": self.kv_heads,
            "head_dim": self.head_size,
            "ffn_hidden_size": self.ffn_size,
            "attention_bias": self.attention_bias or ("all" if self.bias else "none"),
            "max_position_embeddings": self.max_positions,
            **(self.delta_in_effect if GATED_DELTANET in self.layer_types else {}),
            **({"expert_ffn_size": self.expert_size} if self.num_experts else {}),
        }

    @property
    def delta_in_effect(self) -> dict[str, int]:
        """The effective numbers of heads of gated DeltaNet, and their widths."""
        key_size, value_size = self.delta_sizes
        return {
            "delta_key_heads": self.key_heads,
            "delta_value_heads": self.value_heads,
            "delta_key_size": key_size,
            "delta_value_size": value_size,
        }

    @property
    def has_vocabulary(self) -> bool:
        """Whether samples consist of tokens below `vocab_size`."""
        return True

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding and of the head, with padding.

        It is `vocab_size` rounded up to a multiple of `vocab_multiple`.
        """
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass
class LayerKeys:
    """Keys that choose the activations that a layer keeps for its backward."""

    recompute: Any = key(
        "none",
        "parts of a layer that the backward recomputes, as [norm,activation]: norms' results, "
        "the MLP's non-linearity (mlp: the GEMM before it too), attention or another mixer between "
        "its projections, the whole layer; selective is [attention] (Korthikanti et al. 2022 §5), "
        "full is [layer]",
        choices=tuple(WORDS),
        list_of=PARTS,
        resume=FREE,
        alike=True,
        tried=("selective", "full", "[norm,attention,mlp]"),
    )
    recompute_layers: list[int] | None = key(
        None,
        "how many layers of a stage recompute, from its first one on: [2] on every stage, or a "
        "number for each, as the first stages hold most activations: [3,1,0,0]; null: all",
        resume=FREE,
        tried=([1],),
    )
    mlp_chunk_tokens: int | None = key(
        None,
        "with a recomputed MLP: tokens that go through it at a time, so that its inner activations "
        "never exist for a whole micro-batch; null: all",
        minimum=1,
        resume=FREE,
        tried=(1024,),
    )
    offload_layers: list[int] | None = key(
        None,
        "how many layers of a stage, from its first one on, move the activations kept for the "
        "backward to pinned host memory: [8] on every stage, or a number for each; null: none",
        resume=FREE,
        tried=([1],),
    )


@dataclass
class AttentionKeys:
    """The kernels of attention and of gated DeltaNet."""

    attention_kernel: str = key(
        AUTO,
        "attention kernel; auto: PyTorch's choice, but not cuDNN on a B200 where a rank has fewer "
        "than 8 key-value heads (tp divides them), because of wrong results (PyTorch issue "
        "193893); math materialises the scores; fa3, fa4: FlashAttention 3 or 4 if installed; "
        "training with model.dropout does not use the kernel",
        choices=KERNELS,
        resume=FREE,
    )
    delta_kernel: str = key(
        AUTO,
        "kernel of gated_deltanet; torch: PyTorch's operators, in any precision; fla: the package "
        "flash-linear-attention, in bf16 and fp16 on a GPU, after a small forward and backward has "
        "agreed with torch; auto: fla if it is installed and agrees, else torch, and torch "
        "with compile=true or deterministic=true",
        choices=DELTA_KERNELS,
        resume=FREE,
    )


def _leaves_mlp(recompute: Any) -> bool:
    return not Repeats.of(recompute).mlp


def _is_none(recompute: Any) -> bool:
    return not Repeats.of(recompute)


CONFLICTS = (
    Conflict(
        {"model.qk_norm_width": OneOf("full"), "model.qk_norm": OneOf(False)},
        "{model.qk_norm_width} is the width of norms, but {model.qk_norm}",
        (("model.qk_norm", True), ("model.qk_norm_width", "head")),
    ),
    Conflict(
        {
            "model.rope_attention_factor": NoneOf(None),
            "model.rope_scaling": OneOf(LLAMA3, LINEAR),
        },
        "{model.rope_attention_factor} belongs to yarn and longrope, but {model.rope_scaling}",
        (("model.rope_attention_factor", None), ("model.rope_scaling", YARN)),
    ),
    Conflict(
        {"model.norm_zero_centered": OneOf(True), "model.norm": OneOf("layernorm")},
        "{model.norm_zero_centered} adds 1 to the weights of RMSNorms, but {model.norm}",
        (("model.norm", "rmsnorm"), ("model.norm_zero_centered", False)),
    ),
    Conflict(
        {"model.swiglu_limit": NoneOf(None), "model.activation": NoneOf("swiglu")},
        "{model.swiglu_limit} is a limit of swiglu, but {model.activation}",
        (("model.activation", "swiglu"), ("model.swiglu_limit", None)),
    ),
    Conflict(
        {"mlp_chunk_tokens": NoneOf(None), "recompute": Matches(_leaves_mlp, "none")},
        "{mlp_chunk_tokens} cuts an MLP that the backward recomputes, and needs mlp in recompute, "
        "not {recompute}",
        (("recompute", "[norm,attention,mlp]"), ("mlp_chunk_tokens", None)),
    ),
    *(
        Conflict(
            {"mlp_chunk_tokens": NoneOf(None), other: NoneOf(off)},
            f"{{mlp_chunk_tokens}} cuts the sequence of a whole MLP, which {{{other}}} does not "
            "allow",
            ((other, off), ("mlp_chunk_tokens", None)),
        )
        for other, off in (("tensor_parallel.chunks", 1), ("compile", False))
    ),
    Conflict(
        {"recompute_layers": NoneOf(None), "recompute": Matches(_is_none, "none")},
        "{recompute_layers} says how many layers recompute, but {recompute}",
        (("recompute_layers", None), ("recompute", "full")),
    ),
    Conflict(
        {"attention_kernel": OneOf(CUDNN, *PACKAGES), "device": OneOf("cpu")},
        "{attention_kernel} is a kernel of GPUs, but {device} has flash and math",
        (("attention_kernel", FLASH),),
    ),
    Conflict(
        {
            "attention_kernel": OneOf(*NARROW),
            "device": NoneOf("auto", "cpu"),
            "precision.name": NoneOf(*HALF_PRECISION),
        },
        "{attention_kernel} only takes bf16 and fp16 on GPUs, but {precision.name}",
        (("attention_kernel", AUTO), ("precision.name", "bf16")),
    ),
    Conflict(
        {"delta_kernel": OneOf(FLA), "device": OneOf("cpu")},
        "{delta_kernel} is a kernel of GPUs, but {device} has torch",
        (("delta_kernel", TORCH),),
    ),
    Conflict(
        {"delta_kernel": OneOf(FLA), "precision.name": NoneOf(*HALF_PRECISION)},
        "{delta_kernel} only takes bf16 and fp16, but {precision.name}",
        (("delta_kernel", TORCH), ("precision.name", "bf16")),
    ),
    Conflict(
        {"delta_kernel": OneOf(FLA), "deterministic": OneOf(True)},
        "{delta_kernel} adds in an order that changes from run to run, but {deterministic}",
        (("delta_kernel", TORCH), ("deterministic", False)),
    ),
    Conflict(
        {"delta_kernel": OneOf(FLA), "compile": OneOf(True)},
        "{delta_kernel} calls kernels that the compiler cannot enter, but {compile}",
        (("delta_kernel", TORCH), ("compile", False)),
    ),
    Conflict(
        {"attention_kernel": OneOf(CUDNN), "model.sliding_window": NoneOf(None)},
        "{attention_kernel} has no window, but {model.sliding_window}",
        (("attention_kernel", FLASH), ("model.sliding_window", None)),
    ),
    Conflict(
        {
            "attention_kernel": OneOf(FLASH, CUDNN, *PACKAGES),
            "model.attention_logit_cap": NoneOf(None),
        },
        "{attention_kernel} does not cap scores, but {model.attention_logit_cap}",
        (("attention_kernel", MATH), ("model.attention_logit_cap", None)),
    ),
    Conflict(
        {"attention_kernel": OneOf(CUDNN), "model.attention_sinks": OneOf(True)},
        "{attention_kernel} does not return the sums that sinks join, but {model.attention_sinks}",
        (("attention_kernel", FLASH), ("model.attention_sinks", False)),
    ),
    Conflict(
        {"attention_kernel": OneOf(CUDNN), "data.document_mask": OneOf(True)},
        "{attention_kernel} has no kernel for documents of any length, but {data.document_mask}",
        (("attention_kernel", FLASH), ("data.document_mask", False)),
    ),
)
