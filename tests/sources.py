"""Makes the sources of samples that a whole configuration describes."""

from __future__ import annotations

from parallel3d.data.corpus import Blend, Corpus
from parallel3d.data.sampler import DatasetOrder, Sources
from parallel3d.run_config import Config


def sources_of(corpus: Corpus | Blend, config: Config) -> Sources:
    return corpus.sources(config.model, config.data, config.seed)


def part_of(corpus: Corpus, config: Config, held_out: bool) -> DatasetOrder:
    return corpus.samples(held_out, config.model.seq_length, config.data, config.seed)
