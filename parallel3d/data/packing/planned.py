"""The plans of a corpus: of what is trained on, and of what is held out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.data import cache
from parallel3d.data.build_lock import Report
from parallel3d.data.chat.corpus import learned, nothing_said
from parallel3d.data.corpora.split import Corpus
from parallel3d.data.packing.best_fit import best_fit, one_each
from parallel3d.data.packing.plan import PackingPlan, Pieces, kept_plan, pieces_of, plan_file
from parallel3d.data.watched import marks_of
from parallel3d.errors import UserError

if TYPE_CHECKING:  # the configuration drags in omegaconf, which this file can do without
    from parallel3d.config.schema import DataConfig


def with_plans(
    corpus: Corpus, data: DataConfig, seq_length: int, folder: Path, named: str, report: Report
) -> Corpus:
    """The corpus with its two plans from `folder`, which are made if need be. Raises UserError."""
    room = seq_length + 1
    fit = one_each if data.packing == "padded" else best_fit

    def plan(held_out: bool) -> PackingPlan:
        path = _path(corpus, held_out, folder, room, data.packing)

        def make() -> Pieces:
            pieces = _pieces(corpus, held_out, data, named, room)
            return _learned(pieces, corpus, held_out, report) if corpus.marked else pieces

        found = kept_plan(path, make, room, report, fit)
        if found.cut and not data.cut_documents:
            raise _too_long(named, found.cut, room, data.packing)
        return found

    plans = plan(False), plan(True)
    digests = [corpus.fingerprint, *(plan.digest for plan in plans)]
    files = *corpus.files, *(plan.watched for plan in plans)
    return dataclasses.replace(corpus, plans=plans, fingerprint=" ".join(digests), files=files)


def check_pieces(
    corpus: Corpus, data: DataConfig, seq_length: int, folder: Path, named: str
) -> None:
    """Raises the UserError of documents that do not fit a sample, unless there are plans."""
    for held_out in (False, True):
        path = _path(corpus, held_out, folder, seq_length + 1, data.packing)
        cache.check_room_for(path)
        if not path.exists():
            _pieces(corpus, held_out, data, named, seq_length + 1)


def check_lengths(lengths: Sequence[int], seq_length: int, named: str, packing: str) -> None:
    """Raises UserError if there is a document that does not fit a sample."""
    if long := sum(length > seq_length + 1 for length in lengths):
        raise _too_long(named, long, seq_length + 1, packing)


def _path(corpus: Corpus, held_out: bool, folder: Path, room: int, packing: str) -> Path:
    first = len(corpus.train) if held_out else 0
    tokens = len(corpus.valid if held_out else corpus.train)
    how = "" if packing == "best_fit" else f":{packing}"
    how += ":learned" * corpus.marked
    # The marks: a fingerprint looks at some places of a pair, a plan comes of all of it.
    stream = f"{corpus.fingerprint}:{first}:{tokens}{how}:{marks_of(corpus.watched)}"
    return plan_file(folder, stream, room)


def _pieces(corpus: Corpus, held_out: bool, data: DataConfig, named: str, room: int) -> Pieces:
    tokens = len(corpus.valid if held_out else corpus.train)
    pieces = pieces_of(corpus.begins(held_out), tokens, room)
    if pieces.cut and not data.cut_documents:
        raise _too_long(named, pieces.cut, room, data.packing)
    if not pieces.starts.size:
        part = "held-out" if held_out else "training"
        raise UserError(
            f"{named} has no document of two tokens in its {part} part, and "
            f"data.packing={data.packing} needs one: give data.packing=concat"
        )
    return pieces


def _learned(pieces: Pieces, corpus: Corpus, held_out: bool, report: Report) -> Pieces:
    """Leaves out what holds nothing that is learned. Raises UserError if that is all."""
    kept = learned(corpus.valid if held_out else corpus.train, pieces.starts, pieces.lengths)
    if not kept.any():
        raise nothing_said(held_out)
    if left_out := int((~kept).sum()):
        report(
            f"left out of the {'held-out' if held_out else 'training'} samples: {left_out:,} of "
            f"{kept.size:,} pieces of conversations, in which the assistant says nothing"
        )
    return pieces._replace(starts=pieces.starts[kept], lengths=pieces.lengths[kept])


def _too_long(named: str, documents: int, room: int, packing: str) -> UserError:
    has = f"{documents:,} documents" if documents > 1 else "a document"
    return UserError(
        f"{named} has {has} longer than the {room:,} tokens of a sample, which "
        f"data.packing={packing} does not cut: give data.cut_documents=true, which does, or a "
        "longer model.seq_length"
    )
