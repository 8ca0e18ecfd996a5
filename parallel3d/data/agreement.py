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
    mine = [corpus.fingerprint, tokens, corpus.train_tokens, socket.gethostname()]
    said = all_gather_json(mine, world.handle, device)
    texts = [tuple(word[:3]) for word in said]
    usual, _ = Counter(texts).most_common(1)[0]
    odd = next((rank for rank, text in enumerate(texts) if text != usual), None)
    if odd is None:
        return
    pair = sorted((odd, texts.index(usual)))
    a, b = (f"rank {rank} on {said[rank][3]} reads {said[rank][1]:,} tokens" for rank in pair)
    digests = " and ".join(said[rank][0][:12] for rank in pair)
    raise UserError(
        f"the ranks do not read the same text: {a}, {b} (fingerprints {digests}); start again when "
        "it is complete, and give a data.path that holds the same on every host"
    )
