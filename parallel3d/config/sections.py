"""The keys of model and optimizer, and the values of `attention_kernel` and `recompute`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel3d.errors import nearest

AUTO, FLASH, CUDNN, MATH = "auto", "flash", "cudnn", "math"
# Flash attention of other packages: name in torch's registry, module that torch imports.
PACKAGES = {"fa3": ("FA3", "flash_attn_interface"), "fa4": ("FA4", "flash_attn.cute")}
KERNELS = (AUTO, FLASH, CUDNN, MATH, *PACKAGES)
HALF_PRECISION = ("bf16", "fp16")
# Kernels that GPUs have in half precision only. (Flash attention on a CPU takes all types.)
NARROW = (FLASH, CUDNN, *PACKAGES)


def in_other_precision(kernel: str) -> str:
    """Returns the kernel for a run's computations in fp32 or fp64 (`verify`, `generate`)."""
    return AUTO if kernel in NARROW else kernel


# `recompute`: the parts of a layer that are recomputed in the backward (`models/recompute.py`)

PARTS = ("norm", "activation", "attention", "mlp", "layer")
WORDS: dict[str, tuple[str, ...]] = {"none": (), "selective": ("attention",), "full": ("layer",)}
_IMPLIED = {"mlp": ("activation",), "layer": PARTS[:-1]}


def named_parts(recompute: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the parts named by a word, a part, a list of parts, or text such as `[norm,mlp]`."""
    if not isinstance(recompute, str):
        return tuple(recompute)
    if recompute in WORDS:
        return WORDS[recompute]
    return tuple(part.strip() for part in recompute.strip("[]").split(",") if part.strip())


def padded_length(length: int, cp: int, multiple: int = 1) -> int:
    """Returns the tokens of a sequence of `length` with its padding, split over cp ranks.

    2 · cp equal pieces, and on each rank a multiple of `multiple` tokens. One rank pads nothing.
    """
    step = 1 if cp == 1 else math.lcm(2 * cp, cp * multiple)
    return -(-length // step) * step


def parts_of(recompute: str | Sequence[str]) -> frozenset[str]:
    """Returns the named parts without those that others imply."""
    return _least(named_parts(recompute))


@functools.lru_cache(maxsize=256)
def _least(parts: tuple[str, ...]) -> frozenset[str]:
    return frozenset(parts).difference(*(_IMPLIED.get(part, ()) for part in parts))


def spelled(recompute: str | Sequence[str]) -> str:
    """Returns `recompute` as typed: a word if there is one, else `parts_of` in PARTS' order."""
    least = tuple(sorted(parts_of(recompute), key=PARTS.index))
    return next((word for word, means in WORDS.items() if means == least), f"[{','.join(least)}]")


def wrong_parts(recompute: object) -> str | None:
    """Returns None for a valid `recompute`, else the nearest one, as typed."""
    if isinstance(recompute, str):
        if recompute in WORDS or (recompute and set(named_parts(recompute)) <= {*PARTS}):
            return None
        return nearest(recompute, (*WORDS, *PARTS)) or "none"
    if not isinstance(recompute, (list, tuple)):
        return "none"
    if all(part in PARTS for part in recompute):
        return None
    near: list[str] = []
    for part in map(str, recompute):
        close = nearest(part, (*PARTS, *WORDS))
        near += WORDS.get(close or "", [close] if close else [])
    return spelled(near)


# Keys of the model and the optimizer


def key(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    list_of: tuple[str, ...] | None = None,
    wrong: Callable[[object], str | None] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    megatron: str | None = None,
    differs: str | None = None,
) -> Any:
    """Declares a key with default, range and help.

    `fields` enforces `choices`, `minimum` and `maximum` (inclusive), `above` and `below`
    (exclusive). With `list_of`, a list of such words may stand for a choice, and `wrong` returns
    the nearest allowed value, None for an allowed one. `megatron` names Megatron-LM's flags of the
    same meaning, `differs` in which way they differ.
    """
    meta = {
        "help": help,
        "choices": choices,
        "list_of": list_of,
        "wrong": wrong,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "below": below,
        "megatron": megatron,
        "differs": differs,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass
class ModelConfig:
    """The transformer, as GPT, Llama or anything between. Choose a preset: `model=llama_tiny`."""

    name: str = key("custom", "name of the preset, for logs")
    num_layers: int = key(4, "transformer layers", minimum=1, maximum=4096, megatron="--num-layers")
    hidden_size: int = key(128, "width of the residual stream", minimum=1, megatron="--hidden-size")
    num_attention_heads: int = key(8, "query heads", minimum=1, megatron="--num-attention-heads")
    num_query_groups: int | None = key(
        None,
        "key/value heads (GQA); null: as many as query heads",
        minimum=1,
        megatron="--num-query-groups",
    )
    head_dim: int | None = key(
        None,
        "width of an attention head; null: hidden_size / num_attention_heads",
        minimum=1,
        megatron="--kv-channels",
    )
    ffn_hidden_size: int | None = key(
        None,
        "width of the MLP; null: 4 × hidden_size, swiglu too",
        minimum=1,
        megatron="--ffn-hidden-size",
    )
    seq_length: int = key(256, "tokens in a training sample", minimum=1, megatron="--seq-length")
    max_position_embeddings: int | None = key(
        None,
        "rows of the learned position table; null: seq_length",
        minimum=1,
        megatron="--max-position-embeddings",
    )
    vocab_size: int = key(
        257, "tokens that exist (the byte tokenizer has 257)", minimum=2, megatron="--vocab-size"
    )
    vocab_multiple: int = key(
        128,
        "the tables are padded to a multiple of this, whatever tp is; padded logits never count",
        minimum=1,
        megatron="--make-vocab-size-divisible-by",
        differs="there times the tensor-parallel size; here the padding never depends on tp",
    )
    norm: str = key(
        "layernorm",
        "normalisation",
        choices=("layernorm", "rmsnorm"),
        megatron="--normalization",
        differs="spelled LayerNorm and RMSNorm there",
    )
    norm_eps: float = key(1e-5, "epsilon inside the norms", above=0, megatron="--norm-epsilon")
    position_embedding: str = key(
        "learned",
        "positions",
        choices=("learned", "rope", "none"),
        megatron="--position-embedding-type",
        differs="learned_absolute is learned",
    )
    rotary_percent: float = key(
        1.0, "share of each head that RoPE rotates", above=0, maximum=1, megatron="--rotary-percent"
    )
    rotary_base: float = key(10000.0, "RoPE base θ", above=1, megatron="--rotary-base")
    rope_scaling_factor: float = key(
        1.0,
        "Llama 3.1's scaled RoPE: slow turns are this much slower; 1: as they are",
        minimum=1,
        megatron="--rope-scaling-factor",
        differs="there with --use-rope-scaling; here 1 is without",
    )
    rope_low_freq_factor: float = key(
        1.0, "scaled RoPE: fewer turns than this in rope_original_length are slowed", above=0
    )
    rope_high_freq_factor: float = key(
        4.0, "scaled RoPE: more turns than this in rope_original_length stay", above=0
    )
    rope_original_length: int = key(
        8192, "scaled RoPE: seq_length that the model was first trained with", minimum=1
    )
    qk_norm: bool = key(
        False,
        "RMSNorm of each head of q and k before RoPE (Qwen3)",
        megatron="--qk-layernorm",
        differs="there the norm of --normalization",
    )
    activation: str = key(
        "gelu",
        "the MLP's non-linearity; gelu_tanh: the approximation that GPT-2's weights were made with",
        choices=("gelu", "gelu_tanh", "relu", "swiglu"),
        megatron="--swiglu",
        differs="--swiglu is model.activation=swiglu",
    )
    bias: bool = key(
        True,
        "biases in the linear layers",
        megatron="--disable-bias-linear",
        differs="the opposite: --disable-bias-linear is model.bias=false",
    )
    attention_bias: str | None = key(
        None,
        "biases in attention: of q, k and v alone (qkv, as Qwen2), of the output too (all); "
        "null: all or none, as bias says",
        choices=("none", "qkv", "all"),
        megatron="--add-qkv-bias",
        differs="--add-qkv-bias is model.attention_bias=qkv",
    )
    tie_embeddings: bool = key(
        True,
        "one table for the word embedding and the output head",
        megatron="--untie-embeddings-and-output-weights",
        differs="the opposite: --untie-embeddings-and-output-weights is model.tie_embeddings=false",
    )
    embedding: str = key(
        "vocab_parallel",
        "word embedding over tp: rows split, or the whole table on every rank",
        choices=("vocab_parallel", "replicated"),
    )
    parallel_output: bool = key(
        True,
        "keep the logits split over tp up to the loss; false gathers them (slower, equal)",
        megatron="--parallel-output",
        differs="the same sense; on unless set to false",
    )
    dropout: float = key(
        0.0,
        "probability of dropping an element of the embedding's, an attention's or an MLP's output, "
        "or of attention's probabilities; the same elements under every layout",
        minimum=0,
        below=1,
        megatron="--hidden-dropout",
        differs="--hidden-dropout and --attention-dropout are one key here",
    )
    init_std: float = key(
        0.02, "standard deviation of the initial weights", above=0, megatron="--init-method-std"
    )

    @property
    def head_size(self) -> int:
        """Width of one attention head, also where `head_dim` is null."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.bias if self.attention_bias is None else self.attention_bias != "none"

    @property
    def out_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.bias if self.attention_bias is None else self.attention_bias == "all"

    @property
    def kv_heads(self) -> int:
        """Key/value heads, also where `num_query_groups` is null."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP, also where `ffn_hidden_size` is null."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def max_positions(self) -> int:
        """Rows of the learned position table, also where `max_position_embeddings` is null."""
        return self.max_position_embeddings or self.seq_length

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the tables: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def full_shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns our tensors with their full shapes, without padding of the vocabulary."""
    hidden, ffn = model.hidden_size, model.ffn_size
    queries, keys = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size
    linears = {
        "attention.q": (queries, hidden),
        "attention.k": (keys, hidden),
        "attention.v": (keys, hidden),
        "attention.out": (hidden, queries),
        "mlp.up": (ffn, hidden),
        "mlp.down": (hidden, ffn),
    }
    if model.activation == "swiglu":
        linears["mlp.gate"] = (ffn, hidden)
    has_bias = dict.fromkeys(linears, model.bias)
    has_bias |= dict.fromkeys(("attention.q", "attention.k", "attention.v"), model.qkv_bias)
    has_bias["attention.out"] = model.out_bias
    vectors = ("weight", "bias") if model.norm == "layernorm" else ("weight",)

    shapes: dict[str, tuple[int, ...]] = {"embedding.word.weight": (model.vocab_size, hidden)}
    if model.position_embedding == "learned":
        shapes["embedding.position.weight"] = (model.max_positions, hidden)
    for layer in range(model.num_layers):
        for norm in ("input_norm", "mlp_norm"):
            shapes |= {f"layers.{layer}.{norm}.{part}": (hidden,) for part in vectors}
        for name, shape in linears.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
            if has_bias[name]:
                shapes[f"layers.{layer}.{name}.bias"] = shape[:1]
        if model.qk_norm:
            for part in ("q", "k"):
                shapes[f"layers.{layer}.attention.{part}_norm.weight"] = (model.head_size,)
    shapes |= {f"final_norm.{part}": (hidden,) for part in vectors}
    if not model.tie_embeddings:
        shapes["head.weight"] = (model.vocab_size, hidden)
    return shapes


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule: `optim=adamw`, `optim=sgd` or `optim=muon`."""

    name: str = key(
        "adamw",
        "optimizer; muon steps the matrices of the layers, and AdamW the rest",
        choices=("adamw", "sgd", "muon"),
        megatron="--optimizer",
    )
    lr: float = key(1e-3, "peak learning rate", above=0, megatron="--lr")
    min_lr: float = key(0.0, "floor of the schedule", minimum=0, megatron="--min-lr")
    lr_decay_style: str = key(
        "cosine",
        "shape after the warm-up",
        choices=("constant", "linear", "cosine", "inverse-square-root", "wsd"),
        megatron="--lr-decay-style",
        differs="WSD is wsd",
    )
    lr_decay_steps: int | None = key(
        None,
        "step at which min_lr is reached; null: train.steps",
        minimum=1,
        megatron="--lr-decay-iters",
    )
    lr_warmup_fraction: float = key(
        0.0,
        "share of lr_decay_steps spent warming up",
        minimum=0,
        below=1,
        megatron="--lr-warmup-fraction",
    )
    lr_warmup_steps: int = key(
        0,
        "steps spent warming up, instead of the fraction",
        minimum=0,
        megatron="--lr-warmup-iters",
    )
    wsd_decay_fraction: float = key(
        0.2,
        "wsd: share of lr_decay_steps spent in the final decay",
        above=0,
        maximum=1,
    )
    wsd_decay_steps: int | None = key(
        None,
        "wsd: steps of the final decay, instead of the share",
        minimum=1,
        megatron="--lr-wsd-decay-iters",
    )
    wsd_decay_style: str = key(
        "linear",
        "wsd: shape of the final decay; minus_sqrt is 1-sqrt (Hägele et al. 2024)",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
        megatron="--lr-wsd-decay-style",
        differs="the default there is exponential",
    )
    weight_decay: float = key(
        0.1,
        "decoupled for adamw and muon, L2 for sgd; never on biases and norms",
        minimum=0,
        megatron="--weight-decay",
        differs="the same, on matrices only",
    )
    beta1: float = key(0.9, "adamw: first moment", minimum=0, below=1, megatron="--adam-beta1")
    beta2: float = key(0.95, "adamw: second moment", minimum=0, below=1, megatron="--adam-beta2")
    eps: float = key(1e-8, "adamw: epsilon", above=0, megatron="--adam-eps")
    momentum: float = key(
        0.0,
        "sgd, muon: momentum, for muon Nesterov's",
        minimum=0,
        below=1,
        megatron="--sgd-momentum",
        differs="for muon --muon-momentum",
    )
    muon_scale: str = key(
        "match_rms_adamw",
        "muon: factor of an orthogonal update (m, n): match_rms_adamw 0.2·sqrt(max(m, n)), for "
        "AdamW's learning rate and decay (Liu et al. 2025); original sqrt(max(1, m / n))",
        choices=("match_rms_adamw", "original"),
        megatron="--muon-scale-mode",
        differs="its factors are others; match_rms_adamw is spectral with an extra factor of 0.2",
    )
    muon_dtype: str = key(
        "auto",
        "muon: type of Newton-Schulz and of what is sent for it; auto is bf16 with half precision, "
        "else the masters' (fp64 in fp64 runs), as fp32 always is",
        choices=("auto", "bf16", "fp32"),
    )
    state: str = key(
        "fp32",
        "type of moments and momentum: that of the master weights, or bf16, rounded stochastically",
        choices=("fp32", "bf16"),
        megatron="--exp-avg-dtype, --exp-avg-sq-dtype",
        differs="there rounded to the nearest",
    )
    ema_decay: float | None = key(
        None,
        "decay a step of an average of the weights, 0.999 say, which is evaluated too; null: none",
        above=0,
        below=1,
    )
    freeze: list[str] | None = key(  # noqa: RUF009
        None,
        "parameters that are not trained, by patterns of their names in safetensors: "
        "[embedding.*,layers.0.*]",
        megatron="--freeze-LM",
        differs="there the whole language model",
    )
    groups: Any = key(  # noqa: RUF009
        None,
        "factors of learning rate and weight decay by patterns of names, of which the first that "
        "matches counts: {embedding.*:{lr_mult:0.1,wd_mult:0}}",
    )
    clip_grad: float = key(
        1.0,
        "largest global gradient norm; 0 does not clip (the norm is still logged)",
        minimum=0,
        megatron="--clip-grad",
    )
