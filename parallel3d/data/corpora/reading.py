"""Samples of a run: what it trains on, and what it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from parallel3d.data.chat.corpus import ChatSamples
from parallel3d.data.corpora.blend import Blend
from parallel3d.data.corpora.blended import Blended, DatasetOrder
from parallel3d.data.corpora.split import Corpus
from parallel3d.data.corpus import check_vocabulary
from parallel3d.data.packing.packs import PackSampler
from parallel3d.data.sampler import Sampler

if TYPE_CHECKING:  # the configuration drags in omegaconf, which this file can do without
    from parallel3d.config.schema import Config


class Sources(NamedTuple):
    """Samples to train on, held-out ones, and those of a blend's heaviest parts by their name."""

    train: Sampler | PackSampler | ChatSamples | Blended
    valid: Sampler | PackSampler | ChatSamples | Blended
    held_out: Mapping[str, DatasetOrder]


def sources_of(corpus: Corpus | Blend, config: Config) -> Sources:
    """What a run reads of the corpus that its `data` opened. Raises UserError if its model has not
    the vocabulary for it."""
    data, seq_length, seed = config.data, config.model.seq_length, config.seed
    check_vocabulary(corpus.vocab_size, config.model.vocab_size, data.tokenizer)

    def part(one: Corpus, held_out: bool, name: str = "") -> DatasetOrder:
        tokens, shuffle = (one.valid, False) if held_out else (one.train, True)
        if one.plans is not None:
            packs = PackSampler(tokens, one.plans[held_out], seed, shuffle, one.eot, name)
            return ChatSamples(packs) if one.marked else packs
        masks = data.eod_mask_loss, data.document_mask
        windows = Sampler(
            *(tokens, seq_length, seed, shuffle, one.eot, *masks, one.starts(held_out), name)
        )
        return ChatSamples(windows) if one.marked else windows

    if isinstance(corpus, Corpus):
        return Sources(part(corpus, False), part(corpus, True), {})
    parts = corpus.corpora
    names = [one.name for one in parts]
    train = Blended([part(one, False, one.fingerprint) for one in parts], corpus.stages, names)
    valid = [part(one, True, one.fingerprint) for one in parts]
    first = corpus.stages[0].weights
    heaviest = sorted(first, key=lambda k: (-first[k], k)) + [
        k for k in range(len(parts)) if k not in first
    ]
    shown = heaviest[: data.held_out_sets]
    held_out = {names[k]: valid[k] for k in shown}
    return Sources(train, Blended(valid, corpus.stages[:1], names), held_out)
