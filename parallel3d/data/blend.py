"""An endless row of slots shared out by weights: whose slot i is, in O(log) steps and no table.

Two share a row by Webster's rule: of the first n slots the left one has w·n, rounded. More than two
share it through Huffman's tree, whose nodes split their slots so between two children. No node with
children then has more than 2/3 of its parent's weight: the rounding of all levels above adds up to
less than 1.5 slots, and the last one to 0.5 more.

So after every n slots, every one has had its share of n to within 2: Webster's rule for all at once
(the slot's order by (j + 1/2) / w) does not keep that. Beside a weight of 1/2, a thousand of 1/2000
would all wait for their first slot until the heavy one has had 500.

Sources: M. Balinski and H. P. Young, Fair Representation, 1982 (Webster's rule; quotas); D. A.
Huffman, "A Method for the Construction of Minimum-Redundancy Codes", Proc. IRE 1952.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
import math
import resource
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from parallel3d.config.checks.corpora import Weights, blend_weights
from parallel3d.config.fields import show
from parallel3d.data.paired import open_pair, remote_of
from parallel3d.data.sampler import Sample
from parallel3d.data.split import Corpus
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.data.watched import WatchedFile
from parallel3d.errors import UserError

if TYPE_CHECKING:
    from parallel3d.config.schema import DataConfig


def whole_weights(weights: Sequence[Fraction]) -> list[int]:
    """The smallest whole numbers in the same proportions; `weights` > 0."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


class Shares:
    """Slots shared out by whole weights > 0. Integers alone: no slot hangs on a rounded float."""

    def __init__(self, weights: Sequence[int]) -> None:
        """`weights` of at least one; else, or with one below 1, ValueError."""
        if not weights or min(weights) < 1:
            raise ValueError("shares need weights, whole numbers of at least 1")
        self.owners = len(weights)
        # Per node with children: twice the left child's weight, its own weight, its children: nodes
        # by their number, owner k as -1 - k. A child comes before its parent.
        self._twice_left: list[int] = []
        self._weight: list[int] = []
        self._left: list[int] = []
        self._right: list[int] = []
        # Of equal weights who comes first in the row of owners, then who was joined first.
        heap = [(weight, k, -1 - k) for k, weight in enumerate(weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            (small, _, right), (large, _, left) = heapq.heappop(heap), heapq.heappop(heap)
            node = len(self._weight)
            self._twice_left.append(2 * large)
            self._weight.append(small + large)
            self._left.append(left)
            self._right.append(right)
            heapq.heappush(heap, (small + large, self.owners + node, node))
        self._root = heap[0][2]

    def at(self, slot: int) -> tuple[int, int]:
        """Whose slot this is, and how many slots were theirs before it."""
        node = self._root
        while node >= 0:
            twice, weight = self._twice_left[node], self._weight[node]
            lefts, rest = divmod(twice * slot + weight, 2 * weight)
            if rest + twice >= 2 * weight:
                slot, node = lefts, self._left[node]
            else:
                slot, node = slot - lefts, self._right[node]
        return -1 - node, slot

    def counts(self, slots: int) -> list[int]:
        """Of the first `slots`, how many are each owner's; their sum is `slots`."""
        counts, inside = [0] * self.owners, [0] * len(self._weight)
        if self._root < 0:
            return [slots]
        inside[self._root] = slots
        for node in reversed(range(len(inside))):
            weight = self._weight[node]
            lefts = (self._twice_left[node] * inside[node] + weight) // (2 * weight)
            for child, had in (
                (self._left[node], lefts),
                (self._right[node], inside[node] - lefts),
            ):
                if child >= 0:
                    inside[child] = had
                else:
                    counts[-1 - child] = had
        return counts


# Samples of several data sets as one endless row of samples.


class DatasetOrder(Protocol):
    """A data set's own row of samples: epoch after epoch, each in an order of its own."""

    seq_length: int
    windows: int  # samples of an epoch

    @property
    def masks(self) -> bool: ...

    def sample(self, i: int) -> Sample: ...

    def will_read(self, i: int) -> None: ...


class PartRead(NamedTuple):
    """What a run has read of a part of its blend."""

    tokens: int
    epochs: float


class WeightPeriod(NamedTuple):
    """From sample `first` of the run on, these data sets have these whole weights > 0."""

    first: int
    weights: Mapping[int, int]  # by the number of the data set


class Blended:
    """Sample i is a function of i alone: no state, nothing that grows with the samples.

    Within a stage every data set has had, after any number of samples, its share to within 2
    (`shares`); a data set goes on, from stage to stage, where it stood.
    """

    def __init__(
        self,
        parts: Sequence[DatasetOrder],
        stages: Sequence[WeightPeriod],
        names: Sequence[str] = (),
    ) -> None:
        """The first stage begins at sample 0, each other one after the one before; `names` of the
        parts, to show."""
        firsts = [stage.first for stage in stages]
        if not stages or firsts[0] != 0 or sorted(set(firsts)) != firsts:
            raise ValueError(f"stages from samples {firsts}")
        self.parts, self.names, self._firsts = parts, names, firsts
        self.seq_length = parts[0].seq_length
        self.masks = any(part.masks for part in parts)
        self._members = [list(stage.weights) for stage in stages]
        self._shares = [Shares(list(stage.weights.values())) for stage in stages]
        self._before = [[0] * len(parts)]  # samples of each data set before a stage
        for first in firsts[1:]:
            self._before.append(self.counts(first))

    def at(self, i: int) -> tuple[int, int]:
        """The data set that sample `i` is from, and which of that set's samples it is."""
        if i < 0:
            raise IndexError(f"sample {i}: samples count from 0")
        stage = bisect_right(self._firsts, i) - 1
        owner, place = self._shares[stage].at(i - self._firsts[stage])
        part = self._members[stage][owner]
        return part, self._before[stage][part] + place

    def will_read(self, i: int) -> None:
        """Has the system fetch what sample `i` is made of."""
        part, place = self.at(i)
        self.parts[part].will_read(place)

    def sample(self, i: int) -> Sample:
        """Sample `i` >= 0."""
        part, place = self.at(i)
        return self.parts[part].sample(place)

    def read(self, samples: int) -> dict[str, PartRead]:
        """What the first `samples` of the run read of each part, by its name."""
        return {
            name: PartRead(count * part.seq_length, round(count / part.windows, 4))
            for name, part, count in zip(self.names, self.parts, self.counts(samples), strict=True)
        }

    def counts(self, samples: int) -> list[int]:
        """Of the first `samples` of the run, how many are from each data set."""
        stage = max(0, bisect_right(self._firsts, samples - 1) - 1)
        stage = min(stage, len(self._before) - 1)
        counts = list(self._before[stage])
        inside = self._shares[stage].counts(samples - self._firsts[stage])
        for part, had in zip(self._members[stage], inside, strict=True):
            counts[part] += had
        return counts


# A blend as it is opened: its pairs, in an order that is theirs, and what each stage weighs.


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
