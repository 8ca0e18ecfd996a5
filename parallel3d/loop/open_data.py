"""Opens the text of a run, which must be the same on every rank, and gives it to a trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from parallel3d.build import Trainer
from parallel3d.checkpoint.runs import KEPT_FILE
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.corpus import Blend, Corpus, open_corpus, open_sets
from parallel3d.data.keys import DataConfig
from parallel3d.data.loader import check_same_text
from parallel3d.data.own_tokenizer import with_own_tokenizer
from parallel3d.data.tokenizer import BYTE, keep_tokenizer, open_tokenizer
from parallel3d.errors import print_line
from parallel3d.models.keys import ModelConfig
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config

if TYPE_CHECKING:
    from parallel3d.optim.own import OptimizerFactory


def open_data(
    data: DataConfig,
    model: ModelConfig,
    worker: Worker,
    groups: ProcessGroups,
    device: torch.device,
    *,
    has_source: bool,
) -> tuple[DataConfig, Corpus | Blend, dict[str, Corpus]]:
    """Opens the corpus and the validation sets; collective.

    Returns the `data` section with the run's own tokenizer, the corpus, and the sets by name.
    Raises UserError if the ranks read different texts.

    `has_source`: whether the weights come from another run or a folder (`init_from`).
    """
    data = with_own_tokenizer(data, worker.run_dir)
    corpus = open_corpus(data, model.seq_length, vocab_size=model.vocab_size)
    check_same_text(corpus, groups.world, device)
    if data.tokenizer is None and corpus.tokenizer_name is not None:
        data = dataclasses.replace(data, tokenizer=corpus.tokenizer_name)
    if worker.rank == 0 and (data.tokenizer is not None or data.reads_bytes):
        is_begun = has_source or (worker.run_dir / KEPT_FILE).exists()
        known = corpus.tokenizer, corpus.roles
        for sentence in keep_tokenizer(data, worker.run_dir, *known, is_begun=is_begun):
            print_line(sentence)
    sets = open_sets(data, corpus, model.seq_length, model.vocab_size)
    if worker.rank == 0:
        for one in (corpus, *sets.values()):
            for sentence in one.told:
                print_line(sentence)
    for opened in sets.values():
        check_same_text(opened, groups.world, device)
    return data, corpus, sets


def make_trainer(
    config: Config,
    groups: ProcessGroups,
    device: torch.device,
    corpus: Corpus | Blend,
    sets: Mapping[str, Corpus],
    stop_requested: Callable[[], bool],
    save_requested: Callable[[], bool],
    optimizer: OptimizerFactory | None = None,
) -> Trainer:
    """Creates the trainer, with the corpus and the samples of the validation sets."""
    how = config.model.seq_length, config.data, config.seed
    sources = {name: one.samples(True, *how) for name, one in sets.items()}
    name = config.data.tokenizer or (BYTE if config.data.reads_bytes else None)
    sizes = open_tokenizer(name).sizes() if sets and name is not None else None
    if sets and sizes is None and groups.rank == 0:
        print_line(
            "data.valid: bits per byte are not computed, because the corpus does not name its "
            "tokenizer; give data.tokenizer=…"
        )
    files = [file for one in sets.values() for file in one.files]
    return Trainer(
        config,
        groups,
        device,
        corpus,
        valid_sets=sources,
        token_bytes=sizes,
        valid_files=files,
        stop_requested=stop_requested,
        save_requested=save_requested,
        optimizer=optimizer,
    )
