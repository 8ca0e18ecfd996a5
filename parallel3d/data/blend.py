"""Interleaves data sets by weight; maps sample i to a data set in O(log sets), without a table.

Two owners share a row of slots by Webster's rule: of the first n slots the left one has w·n,
rounded. More than two share it through Huffman's tree, whose nodes split their slots between two
children. A node with children has at most 2/3 of its parent's weight, so the rounding of all levels
above adds up to less than 1.5 slots, and the last level adds 0.5.

So after every n slots each owner has its share of n to within 2. Webster's rule for all owners at
once (slots ordered by (j + 1/2) / w) does not guarantee that: next to a weight of 1/2, a thousand
owners of 1/2000 would wait for their first slot until the heavy one has had 500.

Sources: M. Balinski and H. P. Young, Fair Representation, 1982 (Webster's rule; quotas); D. A.
Huffman, "A Method for the Construction of Minimum-Redundancy Codes", Proc. IRE 1952.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import operator
import resource
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from parallel3d.config.checks.run import Weights, blend_weights
from parallel3d.config.fields import show
from parallel3d.data.sampler import Sample
from parallel3d.data.split import Corpus, open_pair, remote_of
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.data.tokens import WatchedFile
from parallel3d.errors import UserError

if TYPE_CHECKING:
    from parallel3d.config.schema import DataConfig


def whole_weights(weights: Sequence[Fraction]) -> list[int]:
    """Returns the smallest whole numbers in the same proportions; `weights` > 0."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


class Shares:
    """Shares slots out by whole weights > 0, in integers: no slot depends on a rounded float."""

    def __init__(self, weights: Sequence[int]) -> None:
        """Raises ValueError without weights, or for a weight below 1."""
        if not weights or min(weights) < 1:
            raise ValueError("shares need weights, whole numbers of at least 1")
        self.owners = len(weights)
        # Nodes with children, a child before its parent: twice the left child's weight, the node's
        # own weight, and its children (a node's number, or -1 - k for owner k).
        self._twice_left: list[int] = []
        self._weight: list[int] = []
        self._left: list[int] = []
        self._right: list[int] = []
        # Ties: owners in their order, then nodes in the order in which they were made.
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
        """Returns the owner of a slot, and how many slots it had before this one."""
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
        """Returns how many of the first `slots` each owner has; their sum is `slots`."""
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


# Samples of several data sets as one endless sequence


class DatasetOrder(Protocol):
    """The samples of one data set, epoch after epoch, each epoch in its own order."""

    seq_length: int
    windows: int  # samples of an epoch

    @property
    def masks(self) -> bool: ...

    def sample(self, i: int) -> Sample: ...

    def will_read(self, i: int) -> None: ...


class PartRead(NamedTuple):
    """How much a run has read of one part of its blend."""

    tokens: int
    epochs: float


class WeightPeriod(NamedTuple):
    """Whole weights > 0, by the number of the data set, from sample `first` of the run on."""

    first: int
    weights: Mapping[int, int]


class Blended:
    """Maps sample i to a data set, by i alone.

    Within a stage each data set has had, after any number of samples, its share to within 2
    (`Shares`); the next stage continues a data set where the last one left it.
    """

    def __init__(
        self,
        parts: Sequence[DatasetOrder],
        stages: Sequence[WeightPeriod],
        names: Sequence[str] = (),
    ) -> None:
        """`stages`: the first begins at sample 0, each other one after its predecessor; `names` of
        the parts, for reports. Raises ValueError for stages in another order."""
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

    @property
    def windows(self) -> int:
        """The most samples of which none comes twice."""
        limits = [part.windows for part in self.parts]
        repeats = lambda n: any(map(operator.gt, self.counts(n), limits))  # noqa: E731
        return bisect_right(range(sum(limits) + 1), False, key=repeats) - 1

    def at(self, i: int) -> tuple[int, int]:
        """Returns the data set of sample `i`, and the sample's number in that set."""
        if i < 0:
            raise IndexError(f"sample {i}: samples count from 0")
        stage = bisect_right(self._firsts, i) - 1
        owner, place = self._shares[stage].at(i - self._firsts[stage])
        part = self._members[stage][owner]
        return part, self._before[stage][part] + place

    def will_read(self, i: int) -> None:
        """Prefetches the tokens of sample `i`."""
        part, place = self.at(i)
        self.parts[part].will_read(place)

    def sample(self, i: int) -> Sample:
        """Returns sample `i` >= 0."""
        part, place = self.at(i)
        return self.parts[part].sample(place)

    def read(self, samples: int) -> dict[str, PartRead]:
        """Returns how much of each part the first `samples` of the run read, by its name."""
        return {
            name: PartRead(count * part.seq_length, round(count / part.windows, 4))
            for name, part, count in zip(self.names, self.parts, self.counts(samples), strict=True)
        }

    def counts(self, samples: int) -> list[int]:
        """Returns how many of the first `samples` of the run come from each data set."""
        stage = max(0, bisect_right(self._firsts, samples - 1) - 1)
        stage = min(stage, len(self._before) - 1)
        counts = list(self._before[stage])
        inside = self._shares[stage].counts(samples - self._firsts[stage])
        for part, had in zip(self._members[stage], inside, strict=True):
            counts[part] += had
        return counts


# The corpora of a blend, and the weights of its stages


# Epochs up to which repeated text trains about as well as new text. Source: N. Muennighoff and
# others, "Scaling Data-Constrained Language Models", NeurIPS 2023.
_REPEATS_WITHOUT_LOSS = 4


@dataclass(frozen=True)
class Blend:
    """Corpora of one tokenizer, ordered by fingerprint: independent of file names and of the order
    in which they were typed."""

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
        """A digest of the corpora and weights of all stages."""
        return hashlib.blake2b(self.history.encode(), digest_size=16).hexdigest()

    @property
    def history(self) -> str:
        """Each stage as its first sample and a digest, in a manifest's format."""
        stages = []
        for stage in self.stages:
            facts = [[self.corpora[k].fingerprint, weight] for k, weight in stage.weights.items()]
            digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
            stages.append(f"{stage.first}:{digest.hexdigest()}")
        return " ".join(stages)


def history_until(history: str, samples: int) -> list[str]:
    """Returns the stages of a `Blend.history` that contributed to the first `samples`."""
    stages = history.split()
    return [stage for stage in stages if int(stage.partition(":")[0]) < max(1, samples)]


def open_blend(data: DataConfig, seq_length: int, folder: Path, limit: int | None = None) -> Blend:
    """Opens the blend of `data`, without plans; `limit`: the model's vocabulary; `folder`: for the
    blocks of remote files. Raises UserError."""
    weights = blend_weights(data)
    prefixes = list(dict.fromkeys(prefix for stage in weights for prefix in stage.by_prefix))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a pair has two files, and two plans
    remote = remote_of(prefixes, folder, data.block_cache_gb)
    tokenizer = None if data.tokenizer is None else open_tokenizer(data.tokenizer)
    corpora = [
        open_pair(
            data, prefix, f"data.blend's {show(prefix)}", seq_length, limit, tokenizer, remote
        )
        for prefix in prefixes
    ]
    corpora.sort(key=lambda corpus: corpus.fingerprint)
    _check_alike(corpora)
    stages = (_stage(stage, corpora, seq_length) for stage in weights)
    last = {stage.first: stage for stage in stages}  # of several at one sample, the last counts
    return Blend(tuple(corpora), tuple(last.values()))


def check_epochs(
    blend: Blend, windows: Sequence[int], samples: int, most: float | None
) -> list[str]:
    """Returns warnings for parts that `samples` repeat often; `windows`: samples of an epoch.

    Raises UserError for a part that would be read more than `most` times.
    """
    counts = [0] * len(blend.corpora)
    ends = [*(stage.first for stage in blend.stages[1:]), samples]
    for stage, end in zip(blend.stages, ends, strict=True):
        shares = Shares(list(stage.weights.values()))
        inside = shares.counts(max(0, min(end, samples) - stage.first))
        for part, had in zip(stage.weights, inside, strict=True):
            counts[part] += had
    warnings = []
    for corpus, had, epoch in zip(blend.corpora, counts, windows, strict=True):
        times = had / epoch
        small = (
            f"{corpus.named} is small for its share: its {epoch:,} samples would "
            f"be read {times:.1f} times"
        )
        if most is not None and times > most:
            raise UserError(
                f"{small}, more than data.most_epochs={most:g}; give it a weight of about "
                f"{math.floor(most / times * 100)} % of this, or more text"
            )
        if times > _REPEATS_WITHOUT_LOSS:
            warnings.append(small)
    return warnings


def _stage(stage: Weights, corpora: Sequence[Corpus], seq_length: int) -> WeightPeriod:
    """Returns a stage with whole weights, by the numbers of its corpora."""
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
                f"{before.named} and {show(corpus.name)} hold the same tokens: "
                "give one of them, with the sum of their weights"
            )
        if (corpus.tokenizer, corpus.eot) != (first.tokenizer, first.eot):
            raise UserError(
                f"{first.named} and {show(corpus.name)} were made by different "
                f"tokenizers, {first.tokenizer[:12]} and {corpus.tokenizer[:12]}: make them by one"
            )
