"""The whole configuration: every key with its default, range and meaning, declared once.

Hydra composes `conf/` over these dataclasses, `docs/configuration.md` is generated from them, and
`config.checks` checks a whole configuration. Without torch, so that a bad key is refused at once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.config.values import (
    AUTO,
    KERNELS,
    LOGGERS,
    PARTS,
    RANKS,
    WORDS,
    BatchSizes,
    key,
    padded_length,
    words_of,
)


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
        """Returns whether q, k and v have biases."""
        return self.bias if self.attention_bias is None else self.attention_bias != "none"

    @property
    def out_bias(self) -> bool:
        """Returns whether attention's output projection has a bias."""
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
    def in_effect(self) -> dict[str, int | str]:
        """The keys that may be null, with the values that hold."""
        return {
            "num_query_groups": self.kv_heads,
            "head_dim": self.head_size,
            "ffn_hidden_size": self.ffn_size,
            "attention_bias": self.attention_bias or ("all" if self.bias else "none"),
            "max_position_embeddings": self.max_positions,
        }

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
class DataConfig:
    """Source of tokens: Python's sources (`data=stdlib`), text, a corpus, a blend, a chat."""

    name: str = key(
        "stdlib", "kind of source", choices=("stdlib", "text", "corpus", "blend", "chat")
    )
    path: str | None = key(
        None,
        "text, chat: file, folder or glob, several joined by commas; corpus: prefix of a .bin/.idx "
        "pair",
        holds=Path,
        megatron="--data-path",
    )
    blend: Any = key(
        None,
        "blend: weights by prefix, {web:0.7,code:0.3}; or the word tokens: as many as it has",
        holds=dict[Path, float],
    )
    blend_stages: Any = key(
        None,
        "blend: other weights from a number of tokens on, {1000000000:{web:0.5,math:0.5}}",
        holds=dict[float, dict[Path, float]],
    )
    most_epochs: float | None = key(
        None,
        "refuse a blend of which a part would be read more often; null: one read more than 4 times "
        "is logged",
        above=0,
    )
    held_out_sets: int = key(
        32,
        "blend: parts, the heaviest, that have a held-out loss of their own",
        minimum=0,
    )
    block_cache_gb: float = key(
        20.0,
        "gigabytes that blocks of corpora at an address (s3://…) take in the cache folder",
        above=0,
    )
    packing: str = key(
        "concat",
        "samples: concat, windows of the documents one after another; best_fit, whole documents "
        "that fit together, by a plan that is made once; padded, a document each",
        choices=("concat", "best_fit", "padded"),
    )
    cut_documents: bool = key(
        False, "best_fit, padded: cut documents longer than a sample; false: refuse them"
    )
    skip_bad_rows: float = key(
        0.0,
        "chat: the largest share of rows that are left out as they are no conversations, such as "
        "0.01; 0: the first such row ends the start",
        minimum=0,
        maximum=1,
    )
    tokenizer: str | None = key(
        None,
        "byte, a tokenizer.json, a folder with one, or a name on Hugging Face's hub; null: the "
        "run's own or the corpus's, else byte",
        holds=Path,
        megatron="--tokenizer-type",
        differs="there a kind of tokenizer, here the tokenizer itself",
    )
    add_bos: bool = key(
        True,
        "data=text: begin documents with the tokens that the tokenizer puts before every text, as "
        "Llama's <|begin_of_text|>; data tokenize has the key, too",
    )
    valid: Any = key(
        None,
        "validation sets by name, {web:corpora/web,code:code.txt}: prefixes of pairs, or what "
        "data.path takes for text; each has a loss of its own",
        holds=dict[str, Path],
        megatron="--valid-data-path",
        differs="there a blend, or with --multiple-validation-sets several; here sets by name",
    )
    valid_fraction: float | None = key(
        None,
        "share of the training text held out for evaluation; null: 0.05, or 0 beside data.valid",
        minimum=0,
        maximum=0.5,
        megatron="--split",
        differs="there the shares of train, validation and test, here the share held out",
    )
    eod_mask_loss: bool = key(
        False,
        "do not train on predicting the first token of the next document",
        megatron="--eod-mask-loss",
    )
    document_mask: bool = key(
        False,
        "attention within documents, and positions that count from each one's first token",
        megatron="--reset-attention-mask",
        differs="there positions restart by --reset-position-ids",
    )
    cache_dir: str | None = key(
        None,
        "folder of the token cache; null: the user's cache folder",
        holds=Path,
        megatron="--data-cache-path",
    )

    @property
    def held_out(self) -> float:
        """The share of the text that is not trained on; 1 for a validation set."""
        if self.valid_fraction is None:
            return 0.0 if self.valid else 0.05
        return self.valid_fraction

    @property
    def reads_bytes(self) -> bool:
        """Returns whether tokens are bytes, as far as the keys determine it."""
        return self.tokenizer == "byte" or (
            self.tokenizer is None and self.name in ("stdlib", "text")
        )


MULTIPLIERS = ("lr_mult", "wd_mult")  # the names in Megatron-LM's parameter groups


class Treatment(NamedTuple):
    """How the optimizer treats a parameter: factors of learning rate and decay, or not at all."""

    lr_mult: float = 1.0
    wd_mult: float = 1.0
    frozen: bool = False


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
    freeze: list[str] | None = key(
        None,
        "parameters that are not trained, by patterns of their names in safetensors: "
        "[embedding.*,layers.0.*]",
        megatron="--freeze-LM",
        differs="there the whole language model",
    )
    groups: Any = key(
        None,
        "factors of learning rate and weight decay by patterns of names, of which the first that "
        "matches counts: {embedding.*:{lr_mult:0.1,wd_mult:0}}",
        holds=dict[str, dict[str, float]],
    )
    clip_grad: float = key(
        1.0,
        "largest global gradient norm; 0 does not clip (the norm is still logged)",
        minimum=0,
        megatron="--clip-grad",
    )

    def treatment(self, name: str) -> Treatment:
        """Returns the treatment of a full tensor: of the first of `groups` that matches."""
        frozen = any(fnmatchcase(name, pattern) for pattern in self.freeze or ())
        for pattern, factors in (self.groups or {}).items():
            if fnmatchcase(name, str(pattern)):
                lr_mult, wd_mult = (float(factors.get(key, 1.0)) for key in MULTIPLIERS)
                return Treatment(lr_mult, wd_mult, frozen)
        return Treatment(frozen=frozen)


@dataclass
class TensorParallelConfig:
    """Computation and communication of tensor-parallel layers; does not change results."""

    attention: str = key(
        "heads",
        "heads: each rank attends with its own heads; gather_qk: q and k are all-gathered first "
        "and v stays local (equal results, more bytes: for comparison)",
        choices=("heads", "gather_qk"),
    )
    chunks: int = key(
        1,
        "pieces in which sp gathers and scatters the sequence, each while the GEMM of the piece "
        "beside it runs (asynchronous tensor parallelism); 1: in one",
        minimum=1,
        megatron="--tp-comm-overlap",
        differs="there on or off, here the number of pieces",
    )


@dataclass
class ContextParallelConfig:
    """Splitting of sequences over cp ranks; does not change results."""

    style: str = key(
        "gather",
        "how attention reads the other ranks' tokens: gather all-gathers keys and values (Llama 3 "
        "report, §3.3.2); heads gives each rank all tokens of a part of the heads by all-to-all "
        "(Ulysses, Jacobs et al. 2023); ring passes keys and values from rank to rank (Liu et al. "
        "2023); auto takes the one that the planner prices lowest on cluster=",
        choices=("gather", "heads", "ring", "auto"),
        megatron="--cp-comm-type",
        differs="--cp-comm-type is context_parallel.style: p2p is ring, a2a heads, allgather "
        "gather",
    )
    balance: bool = key(
        True,
        "with data.document_mask: where documents make the attention of equal halves uneven, give "
        "each rank as many blocks of a sequence, by their work; not for style heads, which is even",
    )


@dataclass
class LossConfig:
    """The training loss. Held-out losses are always plain cross-entropies."""

    label_smoothing: float = key(
        0.0,
        "share of each target spread evenly over the vocabulary (Szegedy et al. 2016 §7)",
        minimum=0,
        below=1,
        megatron="--label-smoothing",
    )
    z_loss: float = key(
        0.0,
        "weight of the squared log of the softmax's sum (PaLM, Chowdhery et al. 2022 §5)",
        minimum=0,
    )
    chunk_tokens: int | None = key(
        None,
        "tokens whose logits exist at a time; null: as many as take 2 GiB on one GPU, or on a CPU "
        "64 MiB in fp32, but at least 1024",
        minimum=1,
    )


@dataclass
class CheckpointConfig:
    """Saving of checkpoints: `checkpoint.every=500 checkpoint.keep=3`."""

    every: int = key(
        500,
        "save every so many steps and at the end; 0: never",
        minimum=0,
        megatron="--save-interval",
    )
    keep: int = key(3, "newest checkpoints that are kept; older ones are removed", minimum=1)
    keep_every: int | None = key(
        None,
        "checkpoints of steps that are multiples of this are kept for good",
        minimum=1,
        megatron="--save-retain-interval",
    )
    async_save: bool = key(
        True,
        "write in the background while training goes on; may be typed checkpoint.async",
        megatron="--async-save",
    )
    load: bool = key(
        True, "resume from the run's newest good checkpoint; false refuses a run that exists"
    )


@dataclass
class RecoveryConfig:
    """Detection of failures, and reactions to them."""

    max_restarts: int = key(
        3,
        "times that the local ranks are started again after one of them died, from the newest good "
        "checkpoint (without one the run ends), and times that `after_skipped` rolls back",
        minimum=0,
    )
    max_skipped: int = key(
        10,
        "steps in a row whose gradients are not finite and that are skipped, before "
        "`after_skipped` happens",
        minimum=0,
    )
    after_skipped: str = key(
        "stop",
        "after too many skipped steps: stop, naming the first bad parameter, or roll back to the "
        "newest checkpoint and pass over the samples between",
        choices=("stop", "rollback"),
    )
    watchdog_s: float | None = key(
        None,
        "seconds without progress after which a hang is reported and the job ended; null: nine "
        "tenths of launch.timeout_s, before a collective's own time-out. Below 120 it is not for "
        "GPUs, which compile a kernel for each new shape",
        above=0,
    )
    spike_factor: float = key(
        3.0,
        "report a loss above so many times the median of the last 50 steps; 0: never",
        minimum=0,
    )
    drift_every: int = key(
        100,
        "every so many steps compare the parameters of data-parallel replicas by a hash; 0: never",
        minimum=0,
    )


WEIGHTS = "those of the steps, or ema: their average (optim.ema_decay)"


@dataclass
class GenerateConfig:
    """Options of `parallel3d generate`."""

    max_tokens: int = key(200, "tokens to write", minimum=1)
    temperature: float = key(
        0.8, "of the softmax that tokens are drawn from; 0 takes the likeliest", minimum=0
    )
    top_k: int | None = key(
        None, "draw from the likeliest k tokens alone; null: from all", minimum=1
    )
    step: int | None = key(None, "step of the checkpoint; null: the newest", minimum=0)
    weights: str = key("model", WEIGHTS, choices=("model", "ema"))


@dataclass
class EvalConfig:
    """Options of `parallel3d eval`."""

    tasks: str | None = key(
        None,
        "jsonl, a row a context with choices and answer, or with a continuation; typed tasks=",
        holds=Path,
    )
    to: str | None = key(
        None,
        "file for the scores of all rows, as JSON; null: in eval/ of the run directory",
        holds=Path,
    )
    batch_tokens: int = key(8192, "tokens of a forward of one rank, padding included", minimum=1)
    step: int | None = key(None, "step of the checkpoint; null: the newest", minimum=0)
    weights: str = key("model", WEIGHTS, choices=("model", "ema"))


@dataclass
class DryrunConfig:
    """Options of `parallel3d dryrun`."""

    rank: int | None = key(
        None,
        "the rank that is played; null: the first of the first, a middle and the last pipeline "
        "stage, with details of the one whose memory peaks highest",
        minimum=0,
    )
    reserve_gb: float = key(
        4.0,
        "memory of a GPU, in 1e9 B, that no tensor gets: CUDA's context, NCCL's buffers, cuBLAS's "
        "workspace and what the allocator loses to fragments",
        minimum=0,
    )
    json: str | None = key(None, "file for everything shown and more, as JSON", holds=Path)


@dataclass
class PlanConfig:
    """Options of `parallel3d plan`."""

    html: str | None = key(
        None, "plan: file for the whole plan as one page, with pictures", holds=Path
    )
    confirm: int = key(
        3,
        "plan: best rows whose memory a dry run confirms, as many as begin within a minute unless "
        "this is typed; 0: none, and no torch",
        minimum=0,
    )


@dataclass
class ScheduleConfig:
    """The pipeline schedule, `schedule=1f1b`, and the output of `parallel3d schedule`."""

    name: str = key(
        "1f1b",
        "pipeline schedule; auto: the fastest on the clock, file: a table of one's own",
        choices=(
            *("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "v_half"),
            *("auto", "file"),
        ),
    )
    file: str | None = key(
        None, "for schedule=file: CSV, a row a rank, cells such as 0F3 or 1I2", holds=Path
    )
    layers_per_stage: list[int] | None = key(
        None,
        "layers of each stage, pp · vpp of them in the order of the model, e.g. [3,5]; null "
        "balances them by cost",
    )
    slices: bool | None = key(
        None,
        "with tp > 1 and no sp: each tensor-parallel rank sends its part of the sequence to the "
        "next stage, whose ranks gather the parts; null: on accelerators",
        megatron="--no-scatter-gather-tensors-in-pipeline",
        differs="--no-scatter-gather-tensors-in-pipeline is schedule.slices=false",
    )
    num_microbatches: int | None = key(
        None,
        "parallel3d schedule: micro-batches of a step, typed num_microbatches; null: what "
        "global_batch_size makes",
        minimum=1,
    )
    costs: list[float] = key(
        [1.0, 1.0, 1.0],
        "for auto and parallel3d schedule: time of a micro-batch in all layers of one rank: "
        "forward, gradient of the input, gradient of the weights",
    )
    hop: float = key(
        0.0, "for auto and parallel3d schedule: time of a message, in the unit of costs", minimum=0
    )
    of_model: bool = key(
        False,
        "parallel3d schedule: stages cost what those of `model` do, as they always do for auto in "
        "training: layers as they are split, and the head with its loss; an average rank's layers "
        "then take schedule.costs",
    )
    memory: float | None = key(
        None,
        "activations that auto may hold, of 1F1B's peak; null: 1, and the table of parallel3d "
        "schedule shows what more would give",
        above=0,
    )
    timeline: bool = key(
        False,
        "draw the third step of a start: when each pipeline rank computed what, measured and on "
        "the clock, as timeline.svg and, for Perfetto, timeline.json in the run directory",
    )
    svg: str | None = key(None, "parallel3d schedule: file for the timeline as SVG", holds=Path)
    csv: str | None = key(
        None, "parallel3d schedule: file for the schedule as a table of actions", holds=Path
    )
    json: str | None = key(
        None, "parallel3d schedule: file for the table of all schedules as JSON", holds=Path
    )


@dataclass
class PrecisionConfig:
    """Number formats: `precision=fp32`. Master weights and gradients are never below fp32."""

    name: str = key(
        "fp32",
        "compute type",
        choices=("fp64", "fp32", "tf32", "bf16", "fp16"),
        megatron="--fp16",
        differs="--fp16 is precision=fp16 and --bf16 is precision=bf16",
    )
    lm_cross_entropy: str = key(
        "fp32",
        "type in which the training loss is made of the logits: fp32, or (fp16) each logit, "
        "exponential, sum and loss rounded to fp16, with precision=fp16; held-out losses are fp32",
        choices=("fp32", "fp16"),
        megatron="--fp16-lm-cross-entropy",
        differs="--fp16-lm-cross-entropy is precision.lm_cross_entropy=fp16",
    )
    loss_scale: float | None = key(
        None,
        "fp16: a fixed loss scale; null: a dynamic one",
        above=0,
        megatron="--loss-scale",
    )
    initial_loss_scale: float = key(
        65536.0, "fp16: the dynamic scale at the start", above=0, megatron="--initial-loss-scale"
    )
    min_loss_scale: float = key(
        1.0, "fp16: floor of the dynamic scale", above=0, megatron="--min-loss-scale"
    )
    loss_scale_growth: float = key(2.0, "fp16: factor after a window without overflow", above=1)
    loss_scale_backoff: float = key(0.5, "fp16: factor after an overflow", above=0, below=1)
    loss_scale_window: int = key(
        1000,
        "fp16: steps in a row without overflow before the scale grows",
        minimum=1,
        megatron="--loss-scale-window",
    )
    loss_scale_hysteresis: int = key(
        2,
        "fp16: overflows in a row before the scale backs off",
        minimum=1,
        megatron="--hysteresis",
    )


@dataclass
class DataParallelConfig:
    """Gradient buckets and their reduction."""

    bucket_cap_mb: float | None = key(
        None,
        "MiB at which a gradient bucket closes, as in PyTorch's DDP; null: first 1, then 25, or "
        "128 on a GPU",
        above=0,
        megatron="--ddp-bucket-size",
        differs="there a number of parameters, here MiB of gradients",
    )
    overlap: bool = key(
        True,
        "reduce each bucket during the last backward",
        megatron="--overlap-grad-reduce",
        differs="off unless given there, on by default here",
    )
    hierarchical: bool = key(
        False,
        "where data-parallel groups straddle NVLink domains, reduce inside each domain first and "
        "then between domains; sums in another order, so not bit for bit what one level gives",
    )
    comm_hook: str = key(
        "none",
        "what travels for a gradient bucket: none (fp32 sums) or bf16 (half the bytes, rounded)",
        choices=("none", "bf16"),
    )
    shard_size: int | None = key(
        None,
        "zero=2 and 3: ranks of dp that a copy of the model is sharded over, the rest are "
        "replicas (HSDP); null: all of dp",
        minimum=1,
    )
    reduce_every_microbatch: bool | None = key(
        None,
        "zero=2 and 3: reduce-scatter the gradients in every backward, so that none are held "
        "whole, or (false) add them up whole and reduce-scatter once a step; null: true under "
        "zero=3, false under zero=2",
    )

    def reduces_every_microbatch(self, zero: int) -> bool:
        """`reduce_every_microbatch` under a stage of ZeRO, 2 or 3, decided where it is null.

        Whoever takes stage 3 is short of memory, and whole gradients in fp32 take twice that of
        the bf16 parameters which it frees. Stage 2 keeps the parameters, and sends less.
        """
        if self.reduce_every_microbatch is None:
            return zero == 3
        return self.reduce_every_microbatch


@dataclass
class LoggerConfig:
    """Where metrics go besides `metrics.jsonl`: `logger=wandb`, `logger=[wandb,tensorboard]`."""

    name: Any = key(
        "none",
        "logger or loggers; in a file, name: [wandb, tensorboard]",
        choices=("none", *LOGGERS),
        list_of=LOGGERS,
    )
    project: str | None = key(
        None, "W&B project; null: WANDB_PROJECT, or parallel3d", megatron="--wandb-project"
    )
    entity: str | None = key(
        None, "W&B user or team; null: WANDB_ENTITY, or the key's own", megatron="--wandb-entity"
    )
    group: str | None = key(None, "W&B group")
    job_type: str | None = key(None, "W&B job type, as train; null: WANDB_JOB_TYPE")
    notes: str | None = key(None, "W&B notes: a sentence on the run; null: WANDB_NOTES")
    tags: list[str] = key([], "W&B tags")
    mode: str = key(
        "auto",
        "auto: as WANDB_MODE says (offline, disabled); else online if a key is at hand",
        choices=("auto", "online", "offline"),
    )
    system_metrics: bool = key(
        False, "W&B also samples CPU, memory and GPUs of rank 0's host, every 15 s"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The loggers that `name` asks for."""
        return tuple(word for word in dict.fromkeys(words_of(self.name)) if word != "none")


DEFAULT_STEPS = 600


@dataclass
class TrainConfig:
    """Length of the run, evaluation and logging."""

    steps: int | None = key(
        None,
        f"optimizer steps; null: as tokens or epochs says, else {DEFAULT_STEPS}",
        minimum=1,
        megatron="--train-iters",
    )
    tokens: float | None = key(
        None,
        "tokens to train on instead of a number of steps, masked ones too, rounded up to whole "
        "steps, as in 9.8e6 or 2e12",
        minimum=1,
        maximum=1e18,
        megatron="--train-samples",
        differs="there a number of samples, of model.seq_length tokens each",
    )
    epochs: float | None = key(
        None,
        "passes over the training part of the corpus instead of a number of steps, rounded up to "
        "whole steps; not for a blend",
        above=0,
    )
    batch_schedule: Any = key(
        None,
        "global batch by the samples read before a step, {0:16,1000:32}: 16, and 32 from 1000 "
        "samples on; it ends with global_batch_size; null: that one always",
        holds=dict[float, float],
        megatron="--rampup-batch-size",
        differs="there start, increment and samples; here any sizes",
    )
    eval_every: int = key(
        100,
        "evaluate every so many steps; 0: only at the end",
        minimum=0,
        megatron="--eval-interval",
    )
    eval_batches: int | None = key(
        4,
        "global batches of each validation set per evaluation, at most all of it; null: all; 0: "
        "no evaluation",
        minimum=0,
        megatron="--eval-iters",
        differs="the same, in global batches",
    )
    eval_only: bool = key(
        False,
        "evaluate the newest checkpoint of run=, append the figures to its evaluations.jsonl, and "
        "train nothing",
    )
    log_every: int = key(
        10,
        "without a terminal, print a line every so many steps",
        minimum=1,
        megatron="--log-interval",
    )
    progress: bool = key(True, "progress bar (on a terminal)")
    noise_scale: bool = key(
        False,
        "measure the gradient noise scale (McCandlish et al. 2018), the batch beyond which a "
        "larger one saves few steps: from the gradients of replicas, with dp=1 of micro-batches",
    )
    save_weights: bool = key(
        False, "write the first and the last weights, unsharded, as safetensors (small models)"
    )


@dataclass
class ProfileConfig:
    """Steps under `torch.profiler`: `profile.steps=[10,12] profile.ranks=[0]`."""

    steps: list[int] | None = key(
        None,
        "first and last step to profile, both included; each rank of profile.ranks writes a Chrome "
        "trace into profile/ of the run directory; null or []: none",
        megatron="--profile --profile-step-start --profile-step-end",
        differs="--profile-step-start=10 --profile-step-end=12 is profile.steps=[11,12]: there "
        "steps count from 0 and the end is left out",
    )
    ranks: Any = key(
        [0],
        "whose steps",
        choices=("all",),
        list_of=RANKS,
        megatron="--profile-ranks",
    )
    memory: bool = key(
        False,
        "on GPUs, also a snapshot of the allocator and what it did in these steps, for "
        "pytorch.org/memory_viz",
        megatron="--record-memory-history",
        differs="there of the whole run",
    )


@dataclass
class LaunchConfig:
    """Start and failure of local workers."""

    master_port: int = key(
        0,
        "port of the rendezvous; 0 picks a free one, under Slurm one by the job's number",
        minimum=0,
        maximum=65535,
    )
    master_addr: str | None = key(
        None,
        "address of the host of rank 0, for ranks of srun or mpirun; null: as the launcher says",
    )
    ranks: int | None = key(
        None,
        "layout=auto: ranks to start on this host; null: one a GPU or core",
        minimum=1,
    )
    timeout_s: float = key(
        600.0,
        "seconds after which a stuck collective fails",
        above=0,
        megatron="--distributed-timeout-minutes",
        differs="minutes there, seconds here",
    )
    grace_s: float = key(
        60.0,
        "seconds that a signal (SIGTERM, SIGUSR1, Ctrl-C) leaves the ranks to end their step and "
        "save, before they are killed",
        above=0,
    )
    shared_memory: bool = key(
        True, "CPU ranks of one host exchange through shared memory; false: through the network"
    )
    nccl_high_priority: list[str] = key(
        ["tp", "cp", "pp"],
        "kinds of groups whose kernels get high-priority streams",
        megatron="--high-priority-stream-groups",
    )
    nccl_settings: list[str] = key(
        [],
        "of the groups of a kind: min_ctas, max_ctas or cga_cluster_size, as in dp.max_ctas:8",
        megatron="--nccl-communicator-config-path",
        differs="there the path of a YAML file that holds the same",
    )
    huge_pages: bool = key(
        True,
        "CPU ranks keep the memory that they free, in huge pages where the system offers them "
        "(Linux with glibc); false: they give large blocks back, slower and with less memory",
    )
    numa_binding: bool = key(
        True,
        "keep each rank on the CPUs of its GPU's NUMA node, unless whoever started it has chosen "
        "its CPUs already",
    )
    peak_tflops: float | None = key(
        None, "peak of one device for MFU; null: the datasheet's, or measured on CPU", above=0
    )


@dataclass
class ClusterConfig:
    """The machines and their network. Choose a preset: `cluster=dgx_h100`."""

    name: str = key("custom", "name of the preset, for logs")
    source: str = key(
        "config",
        "where nodes, domains and switches come from: these keys, or discovered and laid over them",
        choices=("config", "slurm", "local"),
    )
    nodes: int | None = key(
        None,
        "nodes; null: as many as the ranks need, or one NVLink domain where they are unknown",
        minimum=1,
    )
    gpus_per_node: int | None = key(
        8, "GPUs of a node; null: the ranks shared out evenly (8 where they are unknown)", minimum=1
    )
    intra: str = key(
        "nvlink", "what joins the GPUs of a domain, by nvlink_gb_per_s", choices=("nvlink", "pcie")
    )
    network: str = key(
        "infiniband",
        "what the NICs speak: infiniband (or RoCE: RDMA), or socket (TCP over Ethernet); only "
        "between infiniband and nvlink does NCCL forward to another rail (PXN)",
        choices=("infiniband", "socket"),
    )
    domain_gpus: int | None = key(
        None,
        "GPUs joined by NVLink or PCIe: part of a node, a node or several; null: a node",
        minimum=1,
    )
    rails: int | None = key(
        None,
        "NICs of a node, each on its own rail; GPU g has rail g mod rails; null: one a GPU",
        minimum=1,
    )
    unit_nodes: int | None = key(
        None, "nodes under one set of leaf switches (a scalable unit); null: all", minimum=1
    )
    spine: bool = key(True, "whether anything joins the rails; false: rail-only")
    oversubscription: float = key(
        1.0, "what the NICs could send over what the spine carries", minimum=1
    )
    nvlink_gb_per_s: float = key(
        50.0, "of one GPU to its domain, one way, 1e9 B/s, as the datasheet has it", above=0
    )
    nvlink_latency_us: float = key(2.0, "of one message inside the domain", minimum=0)
    rail_gb_per_s: float = key(
        10.0, "of one GPU's NIC, one way, 1e9 B/s, as the datasheet has it", above=0
    )
    rail_latency_us: float = key(5.0, "of one message through a leaf switch", minimum=0)
    spine_latency_us: float = key(8.0, "of one message over the spine", minimum=0)
    gpu: str | None = key(
        None, "dryrun: name of the GPU, as its driver tells it, by which its peaks are known"
    )
    gpu_memory_gb: float | None = key(
        None, "dryrun: memory of a GPU, 1e9 B, as its driver counts it", above=0
    )
    gpu_memory_gb_per_s: float | None = key(
        None, "dryrun: of a GPU to its memory, 1e9 B/s, as the datasheet has it", above=0
    )
    file: str | None = key(
        None,
        "plan and layout=auto: a machine that parallel3d calibrate measured; may be typed "
        "cluster=FILE.yaml",
        holds=Path,
    )
    topology_file: str | None = key(
        None,
        "with source=slurm: a topology.conf, or what `scontrol show topology` printed",
        holds=Path,
    )
    nvlink_interface: str | None = key(
        None, "on CPU: network interface for groups inside one domain; null: the system's choice"
    )
    rail_interface: str | None = key(
        None, "on CPU: interface for groups that leave the domain, a glob such as 'rail*'"
    )
    nccl_env: list[str] = key(
        [],
        "variables that NCCL gets on every rank unless the environment has them, as in "
        "NCCL_IB_HCA:mlx5 or NCCL_SOCKET_IFNAME:bond0",
    )


@dataclass
class VerifyConfig:
    """Options of `parallel3d verify`."""

    steps: int = key(5, "steps of each comparison", minimum=1)


@dataclass
class TopologyConfig:
    """Options of `parallel3d topology`."""

    rank: int = key(0, "the rank whose groups are highlighted", minimum=0)
    svg: str | None = key(None, "file for a picture of the cluster, as SVG", holds=Path)
    json: str | None = key(None, "file for everything shown, as JSON", holds=Path)
    search: int = key(5, "rows of the placement search to list; 0: no search", minimum=0)


@dataclass
class BenchConfig:
    """Options of `parallel3d bench comm`."""

    sizes: list[int] = key([4096, 262144, 4194304], "bytes of each message")
    iterations: int = key(5, "timed calls of each row; the median counts", minimum=1)
    warmup: int = key(2, "calls before", minimum=0)
    budget_s: float = key(60.0, "seconds for all; iterations are cut to hold it", above=0)
    outlier: float = key(
        1.5, "a pair or rank slower than this many times the median is named", above=1
    )
    json: str | None = key(
        None, "file for all rows; null: bench.json in the run directory", holds=Path
    )


@dataclass
class CalibrateConfig:
    """Options of `parallel3d calibrate`, which measures in the type of `precision`."""

    file: str = key("calibrated.yaml", "the cluster file that it writes", holds=Path)
    replace: bool = key(False, "whether a file of that name may be written anew")
    ranks: int | None = key(
        None,
        "the most ranks of a group, a power of two; null: four a core and eight at least, or as "
        "many as there are GPUs",
        minimum=1,
        maximum=1024,
    )
    passes: int = key(3, "how often each piece is measured, the others between", minimum=1)


@dataclass
class Config:
    """A whole run. Sizes of the dimensions: world size = tp × pp × cp × dp."""

    tp: int = key(1, "tensor-parallel size", minimum=1, megatron="--tensor-model-parallel-size")
    pp: int = key(1, "pipeline-parallel size", minimum=1, megatron="--pipeline-model-parallel-size")
    dp: int | None = key(
        None, "data-parallel size; null: what is left of the world size", minimum=1
    )
    cp: int = key(1, "context-parallel size", minimum=1, megatron="--context-parallel-size")
    sp: bool = key(
        False,
        "sequence parallelism inside the tensor group; with tp=1 there is nothing to split",
        megatron="--sequence-parallel",
    )
    vpp: int = key(
        1,
        "model chunks per pipeline rank",
        minimum=1,
        megatron="--num-virtual-stages-per-pipeline-rank",
    )
    zero: int = key(
        0,
        "ZeRO stage (Rajbhandari et al. 2020): 1 shards the optimizer's state over dp, 2 the "
        "gradients too, 3 the parameters too",
        minimum=0,
        maximum=3,
        megatron="--use-distributed-optimizer",
        differs="--use-distributed-optimizer is zero=1",
    )
    recompute: Any = key(
        "none",
        "parts of a layer that the backward makes again, as [norm,activation]: norms' results, "
        "the MLP's non-linearity (mlp: the GEMM before it too), attention between its projections, "
        "the whole layer; selective is [attention] (Korthikanti et al. 2022 §5), full is [layer]",
        choices=tuple(WORDS),
        list_of=PARTS,
        megatron="--recompute-granularity",
    )
    recompute_layers: list[int] | None = key(
        None,
        "how many layers of a stage do so, its first ones: [2] on every stage, or a number for "
        "each, as the first stages hold most activations: [3,1,0,0]; null: all",
        megatron="--recompute-num-layers",
        differs="one number there, with --recompute-method=block",
    )
    mlp_chunk_tokens: int | None = key(
        None,
        "where the MLP is recomputed: tokens of a micro-batch whose MLP runs at a time, so that "
        "its inner activations never exist for all; null: all",
        minimum=1,
    )
    offload_layers: list[int] | None = key(
        None,
        "how many layers of a stage move what they keep for the backward to pinned host memory, "
        "its first ones: [8] on every stage, or a number for each; null: none",
        megatron="--cpu-offloading-num-layers",
        differs="one number there, with pp=1 alone",
    )
    micro_batch_size: int = key(
        4, "sequences per forward pass", minimum=1, megatron="--micro-batch-size"
    )
    global_batch_size: int = key(
        16,
        "sequences per optimizer step, over all ranks",
        minimum=1,
        megatron="--global-batch-size",
    )
    seed: int = key(
        1234, "weights and sample order are functions of it", minimum=0, megatron="--seed"
    )
    run: str | None = key(
        None,
        "name of the run; null makes one",
        megatron="--save",
        differs="there a folder; here the name of a folder inside runs_dir",
    )
    runs_dir: str = key("runs", "folder of all runs", holds=Path)
    init_from: str | None = key(
        None,
        "weights of a new run: another run (its newest whole checkpoint; run@500 for that of step "
        "500), the folder of a run or of a checkpoint, or a Hugging Face folder; model and "
        "tokenizer come along",
        holds=Path,
        megatron="--finetune",
        differs="there of --load, beside all sizes of its model",
    )
    init_optimizer: bool = key(
        False,
        "init_from a run: the optimizer's state, the number of updates and the loss scale too",
        megatron="--no-load-optim",
        differs="the opposite; there --finetune never reads it",
    )
    device: str = key(
        "auto",
        "where to compute; auto: on GPUs (CUDA or ROCm), one a rank, and on the CPU only where "
        "nothing says that a GPU is meant; "
        "simulated: an accelerator simulated on the CPU, which finds races and host waits: for "
        "tests, slow",
        choices=("auto", "cpu", "cuda", "simulated"),
    )
    compile: bool = key(
        False,
        "blocks through TorchInductor: a faster step after a slower first one; needs a C++ "
        "compiler on CPU, Triton on CUDA",
    )
    deterministic: bool = key(
        False,
        "on GPUs, kernels that add in a fixed order: the same layout then gives the same bits, as "
        "it always does on CPU; slower",
        megatron="--deterministic-mode",
        differs="there it also refuses settings that are not deterministic",
    )
    attention_kernel: str = key(
        AUTO,
        "kernel of attention; auto: PyTorch's choice, but not cuDNN on a B200 where a rank has "
        "fewer than 8 key-value heads (tp divides them), as PyTorch issue 193893 reports wrong "
        "results; math writes the scores out; fa3, fa4: FlashAttention 3 or 4 where it is "
        "installed; training with model.dropout has a formula of its own",
        choices=KERNELS,
        megatron="--attention-backend",
        differs="there flash, fused, unfused, local or auto, of Transformer Engine",
    )
    layout: str = key(
        "given",
        "train: auto takes the planner's best layout that fits, by what cluster= tells of the "
        "machine; what is typed of tp, cp, pp, dp, vpp, micro_batch_size, schedule, recompute and "
        "zero holds",
        choices=("given", "auto"),
    )
    placement: str = key(
        "default",
        "which GPU holds which rank: default (the launcher's order), auto (searched), an order "
        "such as tp-cp-pp-dp, a tiling such as tp4-dp2-pp2-dp4, or file (rank_file)",
    )
    rank_file: str | None = key(
        None, "for placement=file: a line `rank host local_index` for each rank", holds=Path
    )
    prompt: str = key("\n", "generate: the text to continue, taken as it is typed")
    preflight: bool = key(False, "probe every group before step 1 and name what is slow")
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    ddp: DataParallelConfig = field(default_factory=DataParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    dryrun: DryrunConfig = field(default_factory=DryrunConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def replica_size(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp * self.cp * self.pp

    @property
    def world_size(self) -> int:
        """Ranks of the run; of one replica while dp is null."""
        return self.replica_size * (self.dp or 1)

    @property
    def padded_seq_length(self) -> int:
        """Tokens of a sample with the padding that context parallelism needs."""
        return padded_length(self.model.seq_length, self.cp, self.rank_multiple)

    @property
    def local_seq_length(self) -> int:
        """Tokens of a sample on each context-parallel rank, before tp splits them under sp."""
        return self.padded_seq_length // self.cp

    @property
    def rank_multiple(self) -> int:
        """Divides the tokens of a sample on a context-parallel rank."""
        return self.tp * self.tensor_parallel.chunks if self.sp else 1

    @property
    def mlp_chunks(self) -> int:
        """Chunks in which a recomputed MLP runs."""
        most = self.mlp_chunk_tokens
        return 1 if most is None else -(-self.micro_batch_size * self.local_seq_length // most)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a data-parallel rank in a step. Raises ValueError while dp is null."""
        return self.microbatches_of(self.global_batch_size)

    def microbatches_of(self, batch: int) -> int:
        """Micro-batches of a data-parallel rank in a step of `batch` sequences, as above."""
        if self.dp is None:
            raise ValueError("dp is not known yet: call check_config first")
        return batch // (self.micro_batch_size * self.dp)

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch by samples read, of a checked configuration."""
        schedule = self.train.batch_schedule or {0: self.global_batch_size}
        return BatchSizes.of(schedule)

    @property
    def budget(self) -> int | None:
        """Samples of `train.tokens`; None where another key gives the length."""
        tokens = self.train.tokens
        return None if tokens is None else -(-math.ceil(tokens) // self.model.seq_length)

    @property
    def train_steps(self) -> int:
        """Steps of a run that begins; `Length` has those of one that goes on. Raises ValueError for
        epochs, before `loader.with_length`."""
        if self.budget is not None:
            return self.batch_sizes.steps(self.budget)
        if self.train.epochs is not None:
            raise ValueError("the steps of train.epochs are known when the data is open")
        return self.train.steps or DEFAULT_STEPS


# The sections by name.
SECTIONS: dict[str, type] = {
    name: type(value) for name, value in vars(Config()).items() if dataclasses.is_dataclass(value)
}


def register_schema() -> None:
    """Registers `Config` with Hydra as `schema`, the first of conf/config.yaml's defaults; may be
    called repeatedly."""
    from hydra.core.config_store import ConfigStore  # workers read a finished config without Hydra

    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # building the node takes a quarter of composing
        store.store(name="schema", node=Config)


def conf_dir() -> Path:
    """Returns the folder of the Hydra groups: in the package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"
