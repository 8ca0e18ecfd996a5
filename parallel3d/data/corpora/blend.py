"""A blend as it is opened: its pairs, in an order that is theirs, and what each stage weighs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.config.checks.corpora import Weights, blend_weights
from parallel3d.config.fields import show
from parallel3d.data.corpora.blended import WeightPeriod
from parallel3d.data.corpora.paired import open_pair, remote_of
from parallel3d.data.corpora.shares import Shares, whole_weights
from parallel3d.data.corpora.split import Corpus
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.data.watched import WatchedFile
from parallel3d.errors import UserError

if TYPE_CHECKING:  # the configuration drags in omegaconf, which this file can do without
    from parallel3d.config.schema import DataConfig

_FILES_EACH = 4  # of a pair: tokens, index, two plans
_FILES_ELSE = 512
_OFTEN = 4  # epochs: up to there repeated text is about as good as new
# N. Muennighoff and others, "Scaling Data-Constrained Language Models", NeurIPS 2023.


@dataclass(frozen=True)
class Blend:
    """Corpora of one tokenizer, in the order of their fingerprints: that of the names or the line
    that was typed says nothing."""

    corpora: tuple[Corpus, ...]
    stages: tuple[WeightPeriod, ...]

    @property
    def vocab_size(self) -> int:
        return self.corpora[0].vocab_size

    @property
    def eot(self) -> int:
        return self.corpora[0].eot

    @property
    def tokenizer(self) -> str:
        return self.corpora[0].tokenizer

    @property
    def tokenizer_name(self) -> str | None:
        return next((c.tokenizer_name for c in self.corpora if c.tokenizer_name), None)

    @property
    def watched(self) -> dict[str, WatchedFile]:
        return {key: file for one in self.corpora for key, file in one.watched.items()}

    @property
    def train_tokens(self) -> int:
        return sum(len(corpus.train) for corpus in self.corpora)

    @property
    def valid_tokens(self) -> int:
        return sum(len(corpus.valid) for corpus in self.corpora)

    @property
    def fingerprint(self) -> str:
        """Of all stages: what is read, in which shares."""
        return hashlib.blake2b(self.history.encode(), digest_size=16).hexdigest()

    @property
    def history(self) -> str:
        """Each stage as its first sample and a digest, as a manifest keeps them."""
        words = []
        for stage in self.stages:
            facts = [[self.corpora[k].fingerprint, weight] for k, weight in stage.weights.items()]
            digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
            words.append(f"{stage.first}:{digest.hexdigest()}")
        return " ".join(words)

    def packed(self, with_plans: Callable[[Corpus], Corpus]) -> Blend:
        """The blend of the same corpora with their plans."""
        return dataclasses.replace(self, corpora=tuple(with_plans(one) for one in self.corpora))


def part_name(prefix: str) -> str:
    """What errors call a part of a blend."""
    return f"data.blend's {show(prefix)}"


def history_until(history: str, samples: int) -> list[str]:
    """The stages of a `Blend.history` that had a part in the first `samples`."""
    return [word for word in history.split() if int(word.partition(":")[0]) < max(1, samples)]


def open_blend(data: DataConfig, seq_length: int, folder: Path, limit: int | None = None) -> Blend:
    """The blend of `data`, without plans; `limit`: the model's vocabulary; `folder`: of blocks of
    what lies elsewhere. Raises UserError."""
    weights = blend_weights(data)
    prefixes = list(dict.fromkeys(prefix for stage in weights for prefix in stage.by_prefix))
    _allow_files(len(prefixes))
    remote = remote_of(prefixes, folder, data.block_cache_gb)
    tokenizer = None if data.tokenizer is None else open_tokenizer(data.tokenizer)
    corpora = [
        open_pair(data, prefix, part_name(prefix), seq_length, limit, tokenizer, remote)
        for prefix in prefixes
    ]
    corpora.sort(key=lambda corpus: corpus.fingerprint)
    _check_alike(corpora)
    stages = (_stage(stage, corpora, seq_length) for stage in weights)
    last = {stage.first: stage for stage in stages}  # of those that begin at the same sample
    return Blend(tuple(corpora), tuple(last.values()))


def check_epochs(
    blend: Blend, windows: Sequence[int], samples: int, most: float | None
) -> list[str]:
    """Sentences about parts that a run of `samples` reads often; `windows`: samples of an epoch.

    Raises UserError for one that is read more than `most` times.
    """
    counts = [0] * len(blend.corpora)
    ends = [*(stage.first for stage in blend.stages[1:]), samples]
    for stage, end in zip(blend.stages, ends, strict=True):
        shares = Shares(list(stage.weights.values()))
        inside = shares.counts(max(0, min(end, samples) - stage.first))
        for part, had in zip(stage.weights, inside, strict=True):
            counts[part] += had
    said = []
    for corpus, had, epoch in zip(blend.corpora, counts, windows, strict=True):
        times = had / epoch
        small = (
            f"{part_name(corpus.name)} is small for its share: its {epoch:,} samples would "
            f"be read {times:.1f} times"
        )
        if most is not None and times > most:
            raise UserError(
                f"{small}, more than data.most_epochs={most:g}; give it a weight of about "
                f"{math.floor(most / times * 100)} % of this, or more text"
            )
        if times > _OFTEN:
            said.append(small)
    return said


def _stage(stage: Weights, corpora: Sequence[Corpus], seq_length: int) -> WeightPeriod:
    """Whole weights by number, of the pairs of this stage alone."""
    typed = stage.by_prefix
    members = [k for k, corpus in enumerate(corpora) if corpus.name in typed]
    exact = [typed[corpora[k].name] or Fraction(len(corpora[k].train)) for k in members]
    return WeightPeriod(
        -(-stage.first // seq_length), dict(zip(members, whole_weights(exact), strict=True))
    )


def _check_alike(corpora: Sequence[Corpus]) -> None:
    first = corpora[0]
    for before, corpus in pairwise(corpora):
        if before.fingerprint == corpus.fingerprint:
            raise UserError(
                f"{part_name(before.name)} and {show(corpus.name)} hold the same tokens: "
                "give one of them, with the sum of their weights"
            )
        if (corpus.tokenizer, corpus.eot) != (first.tokenizer, first.eot):
            raise UserError(
                f"{part_name(first.name)} and {show(corpus.name)} were made by different "
                f"tokenizers, {first.tokenizer[:12]} and {corpus.tokenizer[:12]}: make them by one"
            )


def _allow_files(pairs: int) -> None:
    """Lets this process have as many files open as there are pairs. Raises UserError."""
    needed = _FILES_EACH * pairs + _FILES_ELSE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"data.blend has {pairs:,} parts, whose {needed:,} files this system does not let a "
            f"process have open at a time, but {hard:,}: raise that (ulimit -n), or join some parts"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
