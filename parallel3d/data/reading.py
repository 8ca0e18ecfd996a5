"""The samples of a run, and the check that all ranks read the same text."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel3d.comm.exchange import all_gather_json
from parallel3d.data.blend import Blend, Blended, DatasetOrder
from parallel3d.data.chat import ChatSamples
from parallel3d.data.corpus import check_vocabulary
from parallel3d.data.packing import PackSampler
from parallel3d.data.sampler import Sampler
from parallel3d.data.split import Corpus
from parallel3d.errors import UserError

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import Group
    from parallel3d.config.schema import Config


def check_same_text(corpus: Corpus | Blend, world: Group, device: torch.device) -> None:
    """Raises UserError, on every rank alike, if two ranks have different tokens; collective.

    They differ if a file grows while the ranks start, or if hosts hold different copies.
    """
    tokens = corpus.train_tokens + corpus.valid_tokens
    facts = [corpus.fingerprint, tokens, corpus.train_tokens, corpus.tokenizer, corpus.eot]
    mine = [*facts, socket.gethostname()]
    gathered = all_gather_json(mine, world.handle, device)
    texts = [tuple(facts[:-1]) for facts in gathered]
    usual, _ = Counter(texts).most_common(1)[0]
    odd = next((rank for rank, text in enumerate(texts) if text != usual), None)
    if odd is None:
        return
    pair = sorted((odd, texts.index(usual)))
    a, b = (
        f"rank {rank} on {gathered[rank][-1]} reads {gathered[rank][1]:,} tokens" for rank in pair
    )
    kind = "fingerprints" if texts[odd][0] != usual[0] else "tokenizers"
    column = 0 if kind == "fingerprints" else 3
    digests = " and ".join(gathered[rank][column][:12] for rank in pair)
    raise UserError(
        f"the ranks do not read the same text: {a}, {b} ({kind} {digests}); start again when "
        "it is complete, and give a data.path that holds the same on every host"
    )


# Samples to train on, and held-out samples


class Sources(NamedTuple):
    """Training and held-out samples; `held_out`: those of a blend's heaviest parts, by name."""

    train: DatasetOrder | Blended
    valid: DatasetOrder | Blended
    held_out: Mapping[str, DatasetOrder]


def sources_of(corpus: Corpus | Blend, config: Config) -> Sources:
    """Returns the samples of a corpus. Raises UserError if the model's vocabulary is too small."""
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
