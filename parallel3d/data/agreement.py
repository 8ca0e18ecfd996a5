"""All ranks must read the same text: a batch is cut out of it on each of them alone."""

from __future__ import annotations

import socket
from collections import Counter
from typing import TYPE_CHECKING

import torch

from parallel3d.comm.exchange import all_gather_json
from parallel3d.data.corpora.blend import Blend
from parallel3d.data.corpora.split import Corpus
from parallel3d.errors import UserError

if TYPE_CHECKING:
    from parallel3d.comm.group import Group


def check_same_text(corpus: Corpus | Blend, world: Group, device: torch.device) -> None:
    """Raises UserError, on every rank alike, if two ranks have other tokens; collective.

    A file that grows while the ranks start, or copies of it on the hosts' own disks.
    """
    tokens = corpus.train_tokens + corpus.valid_tokens
    facts = [corpus.fingerprint, tokens, corpus.train_tokens, corpus.tokenizer, corpus.eot]
    mine = [*facts, socket.gethostname()]
    said = all_gather_json(mine, world.handle, device)
    texts = [tuple(word[:-1]) for word in said]
    usual, _ = Counter(texts).most_common(1)[0]
    odd = next((rank for rank, text in enumerate(texts) if text != usual), None)
    if odd is None:
        return
    pair = sorted((odd, texts.index(usual)))
    a, b = (f"rank {rank} on {said[rank][-1]} reads {said[rank][1]:,} tokens" for rank in pair)
    kind = "fingerprints" if texts[odd][0] != usual[0] else "tokenizers"
    column = 0 if kind == "fingerprints" else 3
    digests = " and ".join(said[rank][column][:12] for rank in pair)
    raise UserError(
        f"the ranks do not read the same text: {a}, {b} ({kind} {digests}); start again when "
        "it is complete, and give a data.path that holds the same on every host"
    )
