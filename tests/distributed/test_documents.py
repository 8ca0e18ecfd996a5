"""Tests that separating the attention of a text's documents changes training.

`matrix` tests that every layout separates them like the reference.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.data.corpus import Corpus
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, plain_groups
from tests.distributed.pool import Pool


def test_documents_change_what_is_learned(references: References) -> None:
    """Checks the premise of the other tests, without which a training with documents would show
    nothing."""
    problem = Problem("llama_tiny", "sgd", True, layers=2, steps=2, batch=12)
    losses = [
        references.of(replace(problem, documents=documents)).run.losses
        for documents in (False, True)
    ]
    assert all(abs(a - b) > 1e-3 for a, b in zip(*losses, strict=True))


def trained_on_packed_text(masks: bool) -> tuple[list[float], float, int]:
    """Returns losses of two steps and of the held-out split, and the documents of the first
    micro-batch."""
    groups = plain_groups(Layout(1, 1, 1))
    config = Case(Problem("gpt_tiny", "sgd", True, layers=1, batch=4)).config(groups.layout)
    config.data.document_mask = masks
    # Words of one to nine tokens, each followed by an end of text.
    rng = np.random.default_rng(0)
    words = (rng.integers(1, 61, rng.integers(1, 10)) for _ in range(200))
    stream = np.concatenate([np.append(word, 0) for word in words]).astype("<u2")
    corpus = Corpus(stream[:-100], stream[-100:], "", config.model.vocab_size, eot=0)
    config.model.vocab_size = 257  # the vocabulary of the corpus, which has bytes
    trainer = Trainer(config, groups, torch.device("cpu"), corpus)
    steps = [trainer.train_step().loss for _ in range(2)]
    documents = trainer.train_batches.micro_batch(0, 0).inputs.documents
    held_out = trainer.evaluate()
    groups.close()
    return steps, held_out, 0 if documents is None else int(documents.blocks.table[0, 0, 0])


def test_a_run_reads_documents_at_the_ends_of_text_of_its_corpus(pool: Pool) -> None:
    plain, masked = (pool.run(1, trained_on_packed_text, masks)[0] for masks in (False, True))
    assert plain[2] == 0 and masked[2] > 4
    assert all(abs(a - b) > 1e-4 for a, b in zip(plain[0], masked[0], strict=True))
    assert abs(plain[1] - masked[1]) > 1e-4
