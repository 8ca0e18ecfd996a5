"""Defines the cases of the exactness tests.

A `Problem` is everything that determines the numbers of a run; the reference only depends on it. A
`Case` adds the settings of the computation (schedule, sequence parallelism, micro-batches …), which
must change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from omegaconf import OmegaConf

from parallel3d.blueprint.layout import Layout
from parallel3d.data.sampler import Sample
from parallel3d.models.dialect import AttentionKind
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config, conf_dir

# a second step reads leftovers of the first, and a third reads leftovers of an equal layer
STEPS = 3
GLOBAL_BATCH = 24  # divisible by dp × micro-batches for 1, 2, 3, 4 and 6 of these
# A global batch that is half as large from the second step on: by samples read
# (`train.batch_schedule`).
HALVED = ((0, GLOBAL_BATCH), (1, GLOBAL_BATCH // 2), (GLOBAL_BATCH + 1, GLOBAL_BATCH))
# The precision in which the reference computes: never below fp32.
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp16": torch.float32,
}

# The presets at sizes that divide badly on purpose: tp does not divide 61 tokens, and pp does not
# divide 3 or 5 layers. The large init_std makes attention far from uniform, so that every gradient
# matters.
TINY_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 8,
    "ffn_hidden_size": 56,
    "seq_length": 16,
    "vocab_size": 61,
    "vocab_multiple": 8,
    "init_std": 0.2,
}
# A clip of 0.5 is below every norm of these models in these steps, so it is always active.
OPTIM = {
    "sgd": {"name": "sgd", "lr": 0.5, "weight_decay": 0.01, "clip_grad": 0.5},
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0},
    "muon": {"name": "muon", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.5, "momentum": 0.95},
}


@functools.cache
def preset(name: str) -> dict[str, Any]:
    """Returns the fields that conf/model/<name>.yaml sets."""
    return OmegaConf.to_container(OmegaConf.load(conf_dir() / "model" / f"{name}.yaml"))


class TwoKinds(ModelConfig):
    """A model whose sliding layers have fewer and wider heads than its full layers."""

    sliding_heads: ClassVar = (4, 2, 6)  # numbers of query and key-value heads, width of a head

    def attention_kind(self, layer: int) -> AttentionKind:
        kind = super().attention_kind(layer)
        if kind.window is None:
            return kind
        heads, kv_heads, size = self.sliding_heads
        rope = kind.rope and kind.rope._replace(pairs=size // 2)
        return kind._replace(rope=rope, heads=heads, kv_heads=kv_heads, head_size=size)


@dataclass(frozen=True)
class Problem:
    """A model, an optimizer and a precision: everything that may change the numbers."""

    preset: str
    optimizer: str
    tied: bool
    precision: str = "fp64"
    model: tuple[tuple[str, Any], ...] = ()
    optim: tuple[tuple[str, Any], ...] = ()
    layers: int = 3
    loss: tuple[tuple[str, Any], ...] = ()
    steps: int = STEPS
    batch: int = GLOBAL_BATCH
    batches: tuple[tuple[int, int], ...] = ()  # train.batch_schedule
    moe: tuple[tuple[str, Any], ...] = ()  # configuration of the balance of experts
    documents: bool = False  # samples are packs of documents, each of which attends only to itself
    # Number of ranks over which samples are split; their documents and masks depend on it.
    ranks: int = 1
    padding: bool = False  # a third of all tokens is padding
    biases: tuple[float, ...] = ()  # biases of every router before the first step; zeros if empty
    seed: int = Config.seed
    two_kinds: bool = False  # heads of sliding layers differ from those of full ones

    @property
    def seq_length(self) -> int:
        return dict(self.model).get("seq_length", TINY_SIZES["seq_length"])

    @property
    def tokens(self) -> int:
        """Tokens read in a step, including masked ones."""
        return self.batch * self.seq_length

    def tokens_of(self, step: int) -> int:
        """Samples read in a step, counted from 0, by the schedule of the batch if there is one."""
        entries, samples, batch = self.batches or ((0, self.batch),), 0, 0
        for _ in range(step + 1):
            batch = [size for first, size in entries if first <= samples][-1]
            samples += batch
        return batch * self.seq_length

    def __str__(self) -> str:
        changes = " ".join(f"{k}={v}" for k, v in self.model + self.optim + self.loss + self.moe)
        tied = "tied" if self.tied else "untied"
        words = f"{self.preset} {self.layers} layers {tied} {self.optimizer} {self.precision}"
        packs = "documents" if self.documents else ""
        packs += f" for {self.ranks} ranks" if self.ranks > 1 else ""
        batches = f"batches {dict(self.batches)}" if self.batches else ""
        more = "padded" if self.padding else ""
        more += f" biases {self.biases}" if self.biases else ""
        more += f" seed {self.seed}" if self.seed != Config.seed else ""
        more += " two kinds of heads" if self.two_kinds else ""
        return " ".join(f"{words} {changes} {packs} {batches} {more}".split())


TREATMENT = ("freeze", "groups")


def unhashed(value: tuple[Any, ...]) -> Any:
    """Returns keys of the problem's configuration with their values."""
    if isinstance(value[0], str):
        return list(value)
    return {pattern: dict(factors) for pattern, factors in value}


@dataclass(frozen=True)
class Case:
    """A problem and the way to compute it; every field but the first must change nothing."""

    problem: Problem
    schedule: str = "1f1b"
    sp: bool = False
    # None: the first and the last stage, and one between them if there is one.
    microbatches: int | None = None
    embedding: str = "vocab_parallel"
    parallel_output: bool = True
    bucket_cap_mb: float | None = None
    overlap: bool = True
    layers_per_stage: tuple[int, ...] | None = None
    compile: bool = False
    keys: tuple[tuple[str, Any], ...] = ()  # other keys of the configuration, by dotted name

    def __str__(self) -> str:
        default = Case(self.problem)
        ways = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if name != "problem" and value != getattr(default, name)
        ]
        return f"{self.problem} [{' '.join(ways)}]"

    @property
    def is_evaluated(self) -> bool:
        """Whether evaluation is compared.

        The forward alone does not depend on how the weights were trained. Below fp64 the compiler
        would make further kernels for it.
        """
        exact = not self.compile or self.problem.precision == "fp64"
        return exact and self.problem.optimizer == "sgd"

    def config(self, layout: Layout) -> Config:
        """Returns the configuration of this case under `layout`."""
        problem = self.problem
        sizes = {**TINY_SIZES, "num_layers": problem.layers, **dict(problem.model)}
        lists = "dense_layers", "layer_types", "rope_short_factors", "rope_long_factors"
        for name in lists:
            sizes[name] = list(sizes.get(name, ()))
        microbatches = self.microbatches or (3 if layout.pp > 1 else 2)
        kind_of_model = TwoKinds if problem.two_kinds else ModelConfig
        config = Config(
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            cp=layout.cp,
            ep=max(layout.ep, 1),
            seed=problem.seed,
            sp=self.sp,
            micro_batch_size=problem.batch // (layout.dp * microbatches),
            global_batch_size=problem.batch,
            device="cpu",
            compile=self.compile,
            model=kind_of_model(**(preset(problem.preset) | sizes)),
        )
        config.model.tie_embeddings = problem.tied
        config.model.embedding = self.embedding
        config.model.parallel_output = self.parallel_output
        config.precision.name = problem.precision
        for name, value in problem.loss:
            setattr(config.loss, name, value)
        for name, value in problem.moe:
            setattr(config.moe, name, value)
        config.schedule.name = self.schedule
        if self.layers_per_stage is not None:
            config.schedule.layers_per_stage = list(self.layers_per_stage)
        config.ddp.bucket_cap_mb = self.bucket_cap_mb
        config.ddp.overlap = self.overlap
        config.data.document_mask = problem.documents
        config.train.steps = problem.steps
        config.train.batch_schedule = dict(problem.batches) or None
        config.train.eval_batches = 1
        for name, value in {
            "lr_decay_style": "constant",
            **OPTIM[problem.optimizer],
            **dict(problem.optim),
        }.items():
            setattr(config.optim, name, unhashed(value) if name in TREATMENT else value)
        for name, value in self.keys:
            section, _, leaf = name.rpartition(".")
            setattr(getattr(config, section) if section else config, leaf, value)
        return config


class UnequalMasks:
    """Returns random tokens with masks. Samples differ in the number of unmasked tokens; some have
    one or none.

    With `documents` they are packs of documents (see `_pack`). With `ranks` > 1, documents and
    masks meet the cuts at which context parallelism splits samples over that many ranks (see
    `_begins_at_cuts` and `_mask_by_rank`).
    """

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        documents: bool = False,
        ranks: int = 1,
        padding: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.documents, self.ranks, self.padding = documents, ranks, padding
        self.windows: int | None = None  # set for a validation set, which is finite

    def sample(self, i: int) -> Sample:
        sample = _sample(self.vocab_size, self.seq_length, i)
        if self.ranks > 1:
            sample = sample._replace(loss_mask=_mask_by_rank(sample.loss_mask, i, self.ranks))
        sample = _pack(sample, i, self.ranks) if self.documents else sample
        return _padded(sample, i) if self.padding else sample


@functools.cache
def _sample(vocab_size: int, seq_length: int, i: int) -> Sample:
    """Caches the samples: every case of a worker reads these few several times per step."""
    rng = np.random.default_rng([20, i])
    tokens = rng.integers(0, vocab_size, seq_length + 1)
    if i % 8 == 3:  # masks nearly all tokens
        mask = np.zeros(seq_length, dtype=bool)
        mask[rng.integers(seq_length)] = True
    # Masks all tokens: with micro-batches of one sample, a micro-batch then has no loss at all.
    elif i % 16 == 6:
        mask = np.zeros(seq_length, dtype=bool)
    else:
        mask = rng.random(seq_length) < rng.choice([0.3, 0.7, 1.0])
    return Sample(tokens, mask)


@functools.cache
def _begins(length: int, i: int) -> tuple[int, ...]:
    """Returns where the documents of sample i begin, after its first one.

    In turn: several of a single token, one as long as the sample, halves, odd lengths at random,
    and one for each token.
    """
    rng = np.random.default_rng([21, i])
    some = sorted(rng.choice(np.arange(1, length), size=rng.integers(1, 5), replace=False).tolist())
    turns = [(1, 2, 3, length - 1), (), (length // 2,), some, some, tuple(range(1, length))]
    return tuple(turns[i % len(turns)])


def _piece(length: int, ranks: int) -> int:
    """Returns the tokens of a piece; each rank has two pieces."""
    return -(-length // (2 * ranks))


@functools.cache
def _begins_at_cuts(length: int, i: int, ranks: int) -> tuple[int, ...]:
    """Does the same as `_begins` for split samples.

    In turn: all documents end at cuts; one does; one token on each side of every cut is a document;
    a document begins or ends one token before or after a cut; or the cuts are ignored.
    """
    piece = _piece(length, ranks)
    cuts = list(range(piece, length, piece))
    one = cuts[i // 4 % len(cuts)] if cuts else 1
    turns: list[list[int]] = [
        *(cuts, [one], [cut + by for cut in cuts for by in (-1, 0, 1)]),
        [one - 1, one + 1],
    ]
    found = turns[i // 2 % 4] if i % 2 else list(_begins(length, i // 2))
    return tuple(sorted({begin for begin in found if 0 < begin < length}))


def _mask_by_rank(mask: np.ndarray, i: int, ranks: int) -> np.ndarray:
    """Masks, in turn, all tokens of one rank, or all tokens of the others."""
    whose = np.arange(len(mask)) // _piece(len(mask), ranks)
    whose = np.minimum(whose, 2 * ranks - 1 - whose)
    if i % 3 == 0:
        return mask & (whose != i // 3 % ranks)
    return mask & (whose == i // 3 % ranks) if i % 6 == 4 else mask


def _pack(sample: Sample, i: int, ranks: int = 1) -> Sample:
    """Returns `sample` divided into documents.

    In every fifth sample the tokens after the last whole document are padding, which is not
    learned. Every seventh gives no documents: it is a single one.
    """
    length = len(sample.loss_mask)
    if i % 7 == 5:
        return sample
    starts = np.zeros(length, dtype=np.int32)
    for begin in _begins(length, i) if ranks == 1 else _begins_at_cuts(length, i, ranks):
        starts[begin:] = begin
    mask, used = sample.loss_mask.copy(), None
    if i % 5 == 0:
        used = int(starts[-1])
        mask[used:] = False
    return Sample(sample.tokens, mask, starts, used)


def _padded(sample: Sample, i: int) -> Sample:
    """Returns `sample` with padding at its end, or with nothing but padding; every third has none.

    A third of the tokens of many samples is padding, which is a document by itself where samples
    have documents.
    """
    length = len(sample.loss_mask)
    if i % 3 == 0 or sample.used is not None:
        return sample
    used = length - 5 * i % (length + 1)
    mask, starts = sample.loss_mask.copy(), sample.starts
    mask[used:] = False
    if starts is not None:
        starts = starts.copy()
        starts[used:] = used
    return Sample(sample.tokens, mask, starts, used)


def dead_weights(names: Iterable[str], model: ModelConfig) -> frozenset[str]:
    """Returns weights whose exact gradient is zero, so that they stay 0 but for rounding.

    A key bias adds the same to all scores of a query, unless RoPE turns it by the key's position or
    a norm of the key follows it. A sink is a further score, to which it adds nothing, and a cap
    bends the scores.
    """
    if model.qk_norm or model.attention_sinks or model.attention_logit_cap:
        return frozenset()
    turns = [model.attention_kind(layer).rope is not None for layer in range(model.num_layers)]
    dead = {f"layers.{layer}.attention.k.bias" for layer, turned in enumerate(turns) if not turned}
    return frozenset(name for name in names if name in dead)
